"""Armed puts over gRPC: the C core watches the flag, and a thread sends the blocks whose thresholds it has reached.

What always holds: the guarantees of `ArmedPuts`. A block is copied when it is sent, so once a put has ended, or was
abandoned, nothing reads its source; until then its region can't be closed. Blocks that fire together go in one stream.
What it doesn't do: report that a block has landed before its put has ended. A block that was abandoned while it was
being sent may still be stored.
"""

from __future__ import annotations

import threading
from contextvars import copy_context
from ctypes import string_at
from typing import TYPE_CHECKING, cast

from kvstore.client.blocks import PutResult, hold_regions
from kvstore.client.grpc_gets import Again
from kvstore.client.puts import ArmedPuts
from kvstore.clock import SystemClock
from kvstore.errors import Closed, DeadlineExceeded, KvError, NodeUnavailable, Overloaded, UsageError
from kvstore.limits import ACK_GRACE_MS
from nic_offload.fabric import EventKind
from nic_offload.group import Group
from nic_offload.trigger import CounterMove, arm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.core import Core
    from kvstore.client.grpc_blocks import InlineCalls
    from kvstore.client.link import Link
    from kvstore.client.puts import Rows, Said
    from kvstore.client.transfer_watch import Watch
    from kvstore.durability import Durability
    from nic_offload.counter import Counter
    from nic_offload.fabric import Event
    from nic_offload.flags import FlagWord

__all__ = ["GrpcPuts"]

_CLOCK = SystemClock()


class GrpcPuts(ArmedPuts):
    """A batch of puts over gRPC. Tag 2i of the batch is the firing of block i."""

    def __init__(
        self,
        core: Core,
        inline: InlineCalls,
        blocks: Sequence[Block],
        durability: Durability,
        flag: FlagWord | Counter | None,
        deadline_ns: int,
        expires_unix_ms: int,
        submit: Callable[[Callable[[], None]], None],
        watch: Watch | None,
    ) -> None:
        """`submit` has a thread call something."""
        self._inline, self._expires_unix_ms, self._deadline_ns = inline, expires_unix_ms, deadline_ns
        self._context = copy_context()
        self._submit = submit
        self._fired: list[int] = []  # that no thread has begun to send
        self._reading = threading.Lock()  # held while a source is copied
        self._is_abandoned = False
        self._held = hold_regions(blocks)
        try:
            # It ends with the client, as a link does, and uses nothing of the fabric.
            link = cast("Link", core.unlinked)
            super().__init__(core, link, blocks, durability, flag, deadline_ns, watch)
        except BaseException:
            self._held.close()
            raise

    def _start(self, flag: FlagWord | Counter | None, deadline_ns: int, said: Said | None) -> None:
        assert said is None, "each call tells the node"
        fabric = self._client.fabric
        self._group = Group(fabric, self._tag, len(self._blocks))
        trigger = self._counter_of(flag)
        self._moved = fabric.open_counter(None)  # reported by each block that fires; unused
        self._armed()
        try:
            arm(
                fabric,
                [
                    CounterMove(
                        self._tag + 2 * i,
                        self._moved,
                        1,
                        trigger,
                        block.threshold,
                        deadline_ns=deadline_ns,
                        group=self._group,
                        row=i,
                    )
                    for i, block in enumerate(self._blocks)
                ],
            )
        except KvError:
            del self._link.operations[self._tag]
            self._release()
            raise

    def _named(self, number: int, key: bytes) -> None:
        """Nobody needs it before the block is sent."""

    def _now(self, late: KvError | None = None, rows: Rows | None = None) -> list[PutResult]:
        return [
            one if one.durability is None else one._replace(durable_ns=one.landed_ns)
            for one in super()._now(late, rows)
        ]

    # --- called by the client's pump with the lock held

    def _event(self, event: Event) -> None:
        """A block has fired or its deadline has passed, or the whole batch has ended."""
        i = (event.tag - self._tag) // 2
        if event.kind == EventKind.OVER:
            self._end_if_over()
        elif self._group.row(i).over:
            return
        elif event.kind != EventKind.DONE:
            self._put_failed(i, event.status)
        elif self._keys.get(i) == b"":
            self._end(i, UsageError("The put fired before its block was named, and was not sent."))
        else:
            self._fired.append(i)
            if len(self._fired) == 1:
                try:
                    self._submit(lambda: self._context.copy().run(self._send))
                except Closed as error:  # or the interpreter is ending
                    self._lost(error)

    # --- in a thread of the transport

    def _send(self) -> None:
        with self._client.lock:
            fired, self._fired = self._fired, []
        by_domain: dict[bytes, list[int]] = {}
        for i in fired:
            by_domain.setdefault(self._blocks[i].domain, []).append(i)
        for domain, some in by_domain.items():
            try:
                self._send_all(some, domain)
            except BaseException as error:  # such as gRPC's own error for a closed channel
                failure = (
                    error
                    if isinstance(error, KvError)
                    else NodeUnavailable(f"The block was not sent: {error}.")
                )
                self._sent([(i, PutResult(b"", None, failure)) for i in some])
                if failure is not error:
                    raise

    def _send_all(self, some: list[int], domain: bytes) -> None:
        """Send these; retry those that the node has no memory for yet, until their deadline."""
        until_ns = self._deadline_ns + ACK_GRACE_MS * 1_000_000
        again = Again(min(until_ns, _CLOCK.monotonic_ns() + int(self._client.reach.get_timeout_s * 1e9)))
        while some:
            results = self._inline.put_many(
                self._sources(some),
                durability=self._durability,
                expires_unix_ms=self._expires_unix_ms,
                domain=domain,
                timeout_s=max(0.0, again.left_s()),
            )
            # gRPC reports nothing of blocks that it did not take: the error that broke the stream is theirs, too.
            last = next((one.error for one in reversed(results) if one.error is not None), None)
            missing = PutResult(
                b"", None, last or NodeUnavailable("The stream ended before the block was sent.")
            )
            of_each = [(i, results[at] if at < len(results) else missing) for at, i in enumerate(some)]
            refused = {i for i, one in of_each if isinstance(one.error, Overloaded) and again.left_s() > 0}
            self._sent([(i, one) for i, one in of_each if i not in refused])
            some = sorted(refused)
            if some:
                again.pause()

    def _sources(self, some: Sequence[int]) -> Iterator[tuple[bytes, bytes | bytearray]]:
        """Yield copies, each made when gRPC takes it."""
        for i in some:
            block = self._blocks[i]
            with self._reading:
                if self._is_abandoned:
                    return
                data = (
                    string_at(block.region.address + block.offset, block.length)
                    if block.pieces is None
                    else block.pieces.gathered()
                )
            yield self._keys.get(i) or block.key, data

    def _sent(self, ended: Sequence[tuple[int, PutResult]]) -> None:
        """Record the results of these."""
        with self._client.lock:
            for i, result in ended:
                if self._group.row(i).over:
                    continue
                if result.error is None and result.durability is not None:
                    self._group.land(i, _CLOCK.monotonic_ns())
                    self._group.end(i, int(result.durability))
                else:
                    assert result.error is not None
                    self._errors[i] = result.error
                    self._group.end(i)
            self._end_if_over()

    def _release(self) -> None:
        super()._release()
        self._moved.close()
        self._held.close()

    def _lost(self, error: KvError) -> None:
        """End those that have not ended. When this returns, nothing reads the sources any more."""
        with self._reading:
            self._is_abandoned = True
        super()._lost(error)

    # --- for the application

    def abandon(self) -> None:
        """End all puts that have not ended. When this returns, nothing reads the sources any more."""
        self.cancel()
        with self._client.lock:
            self._lost(DeadlineExceeded("The put was abandoned before it was stored."))
