"""Armed puts inside gRPC: the C core watches the flag, and a thread sends the blocks whose thresholds it has reached.

What always holds: what `ArmedPuts` promises. A block is copied when it is sent, so once a put has ended, or was
abandoned, nothing reads its source; until then its region can't be closed. Blocks that fire together go in one stream.
What it doesn't do: tell that a block has landed before it has ended. A block that was abandoned while it was being sent
may be stored all the same.
"""

from __future__ import annotations

import threading
from contextvars import copy_context
from ctypes import string_at
from typing import TYPE_CHECKING, cast

from kvstore.client.blocks import regions_of
from kvstore.client.puts import ArmedPuts
from kvstore.clock import SystemClock
from kvstore.errors import Closed, DeadlineExceeded, KvError, NodeUnavailable, UsageError
from kvstore.limits import ACK_GRACE_MS
from nic_offload.fabric import EventKind
from nic_offload.trigger import CounterMove, arm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.client.blocks import Block, PutResult
    from kvstore.client.core import Core
    from kvstore.client.inline import InlineCalls
    from kvstore.client.link import Link
    from kvstore.client.transfer_watch import Watch
    from kvstore.durability import Durability
    from nic_offload.counter import Counter
    from nic_offload.fabric import Event, Region
    from nic_offload.flags import FlagWord

__all__ = ["GrpcPuts"]

_CLOCK = SystemClock()


class GrpcPuts(ArmedPuts):
    """A batch of puts inside gRPC. Of the batch's tags the firing of block i has number 2i."""

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
        self._fired: list[int] = []  # whose sending no thread has begun
        self._reading = threading.Lock()  # held while a source is copied
        self._is_abandoned = False
        self._held: list[Region] = []
        try:
            for region in regions_of(blocks):
                region.hold()
                self._held.append(region)
            # Of a link it needs what ends with the client, and nothing of the fabric.
            link = cast("Link", core.unlinked)
            super().__init__(core, link, blocks, durability, flag, deadline_ns, watch)
        except BaseException:
            self._release()
            raise

    def _start(self, flag: FlagWord | Counter | None, deadline_ns: int) -> None:
        fabric = self._client.fabric
        trigger = self._counter_of(flag)
        self._moved = fabric.open_counter(None)  # by each block that fires; nobody looks at it
        self._link.operations[self._tag] = self
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
            self._close_counters()
            raise

    def _now(self, late: KvError | None = None) -> list[PutResult]:
        return [
            one if one.durability is None else one._replace(durable_ns=one.landed_ns)
            for one in super()._now(late)
        ]

    # --- told by the client's pump with the lock held

    def event(self, event: Event) -> None:
        """A block has fired, or its time is over, or all of it is."""
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
                    self.lost(error)

    # --- in a thread of the transport

    def _send(self) -> None:
        with self._client.lock:
            fired, self._fired = self._fired, []
        by_domain: dict[bytes, list[int]] = {}
        for i in fired:
            by_domain.setdefault(self._blocks[i].domain, []).append(i)
        for domain, some in by_domain.items():
            try:
                results = self._inline.put_many(
                    self._sources(some),
                    durability=self._durability,
                    expires_unix_ms=self._expires_unix_ms,
                    domain=domain,
                    timeout_s=self._left_s(),
                )
            except KvError as error:
                self._sent(some, [], error)
            except BaseException as error:  # such as gRPC's own, of a channel that was closed
                self._sent(some, [], NodeUnavailable(f"The put could not be sent: {error}."))
                raise
            else:
                self._sent(some, results, NodeUnavailable("The put was not sent."))

    def _left_s(self) -> float:
        left_ms = (self._deadline_ns - _CLOCK.monotonic_ns()) // 1_000_000 + ACK_GRACE_MS
        return min(self._client.reach.get_timeout_s, left_ms / 1000)

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

    def _sent(self, some: Sequence[int], results: Sequence[PutResult], error: KvError) -> None:
        """Note what became of these; the error is that of all without a result."""
        with self._client.lock:
            for at, i in enumerate(some):
                if self._group.row(i).over:
                    continue
                result = results[at] if at < len(results) else None
                if result is None or result.durability is None:
                    failure = error if result is None else result.error
                    assert failure is not None
                    self._errors[i] = failure
                    self._group.end(i)
                else:
                    self._group.land(i, _CLOCK.monotonic_ns())
                    self._group.end(i, int(result.durability))
            self._end_if_over()

    def _let_go(self) -> None:
        super()._let_go()
        self._moved.close()
        self._release()

    def _close_counters(self) -> None:
        self._moved.close()
        if self._counter is not None:
            self._counter.close()

    def _release(self) -> None:
        held, self._held = self._held, []
        for region in held:
            region.let_go()

    def lost(self, error: KvError) -> None:
        """End those that have not ended. When this returns, nothing reads the sources any more."""
        with self._reading:
            self._is_abandoned = True
        super().lost(error)

    # --- for the application

    def abandon(self) -> None:
        """End all puts that have not ended. When this returns, nothing reads the sources any more."""
        self.cancel()
        with self._client.lock:
            self.lost(DeadlineExceeded("The put was abandoned before it was stored."))
