"""Puts from a reservation to their last acknowledgement.

`Client.reserve` leases a slot for each block; `Reservation.arm` queues the puts; from there to the
acknowledgement nobody calls anything: a store to the flag word is all.

What always holds: each put ends, by its acknowledgement, by its deadline or by the link's loss; a lease
is only given back when its put will certainly never go out; the source may be written again once the put
has landed or failed.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.client.blocks import PutResult
from kvstore.client.giving_back import GivingBack
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, FabricError, KvError, LeaseExpired, ProtocolError
from kvstore.limits import ACK_GRACE_MS, LEASE_MARGIN_MS
from kvstore.wire.ack import error_of_code
from nic_offload.fabric import EventKind
from nic_offload.flags import FlagWord
from nic_offload.trigger import AckWatch, TriggeredPut, arm, watch_acks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.link import Host, Link
    from kvstore.client.spans import PutSpan
    from kvstore.client.watch import Watch
    from kvstore.wire.fabric_call import Leased
    from nic_offload.counter import Counter
    from nic_offload.fabric import Event

__all__ = ["ArmedPuts", "Reservation", "lease_deadline_ns"]

_CODE_MASK = 0xFF


@dataclass(slots=True)
class _Put:
    """One block on its way. Its put's tag is `tag`, its acknowledgement's `tag + 1`."""

    block: Block
    lease: Leased
    word: int
    tag: int = 0
    result: PutResult | None = None
    failure: KvError | None = None  # by its code; it ends when the node has said more
    fired_ns: int = 0
    landed_ns: int = 0


class Reservation:
    """Leased slots for a batch of blocks. Arm it, or give it back."""

    def __init__(
        self,
        client: Host,
        link: Link,
        blocks: Sequence[Block],
        leases: Sequence[Leased],
        words: Sequence[int],
        durability: Durability,
        deadline_ns: int,
        watch: Watch | None = None,
        span: PutSpan | None = None,
    ) -> None:
        self.durability = durability
        self._watch = watch
        self._span = span
        self._client = client
        self._link = link
        self._deadline_ns = deadline_ns
        self._spent = False
        self._puts = [
            _Put(block, lease, word) for block, lease, word in zip(blocks, leases, words, strict=True)
        ]

    @property
    def already_stored(self) -> int:
        """How many of the blocks the node has already; nothing is sent for them."""
        return sum(put.lease.already_stored for put in self._puts)

    def _spend(self) -> None:
        if self._spent:
            raise ProtocolError("A reservation is armed or given back once; reserve again.")
        self._spent = True

    def arm(self, flag: FlagWord | Counter) -> ArmedPuts:
        """Queue the puts: each goes out when `flag` reaches its block's threshold."""
        self._spend()
        try:
            puts = ArmedPuts(
                self._client,
                self._link,
                self._puts,
                self.durability,
                flag,
                self._deadline_ns,
                self._watch,
                self._span,
            )
        except KvError as error:
            if self._span is not None:
                self._span.failed(error)
            raise
        if self._watch is not None:
            self._watch.armed([put.block for put in self._puts], puts)
        return puts

    def give_back(self) -> None:
        """Return the leases: nothing will be put. When this returns, the slots are free again."""
        self._spend()
        with self._client.lock:
            self._link.give_back_words([put.word for put in self._puts if put.lease.already_stored])
            leases = [(put.lease, put.word) for put in self._puts if not put.lease.already_stored]
            giving = GivingBack(self._client, self._link, leases)
        giving.over.wait(self._client.reach.call_timeout_s)
        if self._span is not None:
            self._span.given_back()


class ArmedPuts:
    """A batch of armed puts: wait for it, look at it, or let it be."""

    def __init__(
        self,
        client: Host,
        link: Link,
        puts: list[_Put],
        durability: Durability,
        flag: FlagWord | Counter,
        deadline_ns: int,
        watch: Watch | None = None,
        span: PutSpan | None = None,
    ) -> None:
        self._client = client
        self._told = watch
        self._span = span
        self._link = link
        self._puts = puts
        self._durability = durability
        self._by_tag: dict[int, _Put] = {}
        self._open = 0
        self._unlanded = 0  # the node may still be reading their sources
        self._counter: Counter | None = None
        self._done = threading.Condition(client.lock)
        with client.lock:
            if link.error is not None:
                raise link.error
            self._start(flag, deadline_ns)

    def _start(self, flag: FlagWord | Counter, deadline_ns: int) -> None:
        link, client = self._link, self._client
        sent = []
        for put in self._puts:
            if put.lease.already_stored:
                put.result = PutResult(put.block.key, self._durability, None, already_stored=True)
                link.give_back_words([put.word])
                self._tell(put)
                continue
            put.tag = client.next_tags()
            self._by_tag[put.tag] = self._by_tag[put.tag + 1] = put
            sent.append(put)
        self._open = self._unlanded = len(sent)
        if not sent:
            self._all_ended()
            return
        try:
            watch_acks(client.fabric, [self._watch(put, deadline_ns) for put in sent])
            if isinstance(flag, FlagWord):
                flag = self._counter = client.fabric.open_counter(flag)
            arm(client.fabric, [self._armed(put, flag, deadline_ns) for put in sent])
        except KvError:
            self._undo(sent)
            raise
        for tag in self._by_tag:
            link.operations[tag] = self
        if self._span is not None:
            self._span.armed()

    def _undo(self, sent: Sequence[_Put]) -> None:
        """None of them is armed: nothing goes out, nothing is awaited, and the slots are the node's again."""
        with contextlib.suppress(FabricError):
            self._client.fabric.cancel([put.tag + 1 for put in sent])
        if self._counter is not None:
            self._counter.close()
        GivingBack(self._client, self._link, [(put.lease, put.word) for put in sent])

    def _watch(self, put: _Put, deadline_ns: int) -> AckWatch:
        return AckWatch(
            tag=put.tag + 1,
            endpoint=self._link.endpoint,
            word=self._link.word_address(put.word),
            generation=put.lease.generation,
            final_code=self._durability,
            deadline_ns=deadline_ns + ACK_GRACE_MS * 1_000_000,
        )

    def _armed(self, put: _Put, flag: Counter, deadline_ns: int) -> TriggeredPut:
        return TriggeredPut(
            tag=put.tag,
            endpoint=self._link.endpoint,
            peer=self._link.peer,
            region=put.block.region,
            source=put.block.region.address + put.block.offset,
            length=put.block.length,
            target=put.lease.payload,
            target_key=self._link.landing_key,
            flag_target=put.lease.flag,
            flag_key=self._link.landing_key,
            flag_value=put.lease.generation,
            trigger=flag,
            threshold=put.block.threshold,
            deadline_ns=deadline_ns,
            report_fired=True,
            acked=True,
        )

    # --- what happens, told by the client's pump with the lock held

    def event(self, event: Event) -> None:
        """One of our puts or acknowledgements has news."""
        put = self._by_tag.get(event.tag)
        if put is None or put.result is not None:
            return
        match event.kind:
            case EventKind.FIRED:
                put.fired_ns = event.time_ns
            case EventKind.ACKED:
                self._acked(put, event)
            case EventKind.FAILED:
                self._put_failed(put, event.status)
            case EventKind.LATE:
                self._late(put)
            case EventKind.WATCH_FAILED:
                error = DeadlineExceeded("A block went out and was not acknowledged in time.")
                self._end(put, error)
                self._client.lose(self._link, error)

    def _acked(self, put: _Put, event: Event) -> None:
        code = event.value & _CODE_MASK
        error = error_of_code(code)
        if not isinstance(error, LeaseExpired) and not put.landed_ns:
            put.landed_ns = event.time_ns
            self._has_landed()
        if isinstance(error, LeaseExpired):
            self._give_up(put, error)
        elif error is not None:
            put.failure = error
            self._link.failures.ask(put.lease.generation, lambda told: self._failed(put, told or error))
        elif code >= self._durability:
            self._end(put, None, Durability(code), event.time_ns)

    def _failed(self, put: _Put, error: KvError) -> None:
        if put.result is None:
            self._end(put, error)

    def _put_failed(self, put: _Put, status: int) -> None:
        if status == -errno.ETIMEDOUT:
            error: KvError = DeadlineExceeded(
                "The flag did not reach the put's threshold before the lease ended."
            )
        else:
            error = FabricError.from_code("A put", status)
        self._client.fabric.cancel([put.tag + 1])
        if status in (-errno.ETIMEDOUT, -errno.ECANCELED):
            self._end(put, error, keep_word=True)
            GivingBack(self._client, self._link, [(put.lease, put.word)])  # it never went out, and never will
        else:
            self._end(put, error)
            self._client.lose(self._link, error)

    def _late(self, put: _Put) -> None:
        """The NIC holds it past its deadline. If it has gone out, the acknowledgement's deadline decides."""
        if self._client.fabric.cancel([put.tag]):
            self._put_failed(put, -errno.ETIMEDOUT)

    def _give_up(self, put: _Put, error: KvError) -> None:
        """The node ended the lease. If the put has not gone out it won't; else only the link's end is certain.

        One that can't be withdrawn has gone out, or its own deadline has ended it, and that is not told yet.
        """
        if self._client.fabric.cancel([put.tag]):
            self._put_failed(put, -errno.ETIMEDOUT)
        else:
            self._client.settle(lambda: self._went_out(put, error))

    def _went_out(self, put: _Put, error: KvError) -> None:
        if put.result is None:
            self._end(put, error)
            self._client.lose(self._link, error)

    def lost(self, error: KvError) -> None:
        """The link is gone: whatever had no acknowledgement failed."""
        for put in self._puts:
            if put.result is None:
                self._end(put, put.failure or error)

    def _end(
        self,
        put: _Put,
        error: KvError | None,
        durability: Durability | None = None,
        durable_ns: int = 0,
        *,
        keep_word: bool = False,
    ) -> None:
        reached = durability if durability is not None else Durability.LANDED if put.landed_ns else None
        put.result = PutResult(
            key=put.block.key,
            durability=reached,
            error=error,
            fired_ns=put.fired_ns,
            landed_ns=put.landed_ns,
            durable_ns=durable_ns,
        )
        if not put.landed_ns:
            self._has_landed()
        self._link.operations.pop(put.tag, None)
        self._link.operations.pop(put.tag + 1, None)
        if not keep_word:
            self._link.give_back_words([put.word])
        self._open -= 1
        if not self._open:
            self._all_ended()
        self._tell(put)
        self._done.notify_all()

    def _all_ended(self) -> None:
        if self._counter is not None:
            self._counter.close()
        if self._span is not None:
            results = [put.result for put in self._puts if put.result is not None]
            self._span.ended([put.block for put in self._puts], results)

    def _has_landed(self) -> None:
        self._unlanded -= 1
        if not self._unlanded:
            self._done.notify_all()

    def _tell(self, put: _Put) -> None:
        if self._told is not None and put.result is not None:
            self._told.put_ended(put.block, put.result)

    # --- for the application

    def progress(self) -> tuple[int, int, int]:
        """How many blocks have fired, have landed, and have ended."""
        with self._client.lock:
            return (
                sum(put.fired_ns > 0 for put in self._puts),
                sum(put.landed_ns > 0 for put in self._puts),
                sum(put.result is not None for put in self._puts),
            )

    def ended(self) -> list[PutResult] | None:
        """The results in the order of the blocks, or None while one is still under way."""
        with self._client.lock:
            results = [put.result for put in self._puts if put.result is not None]
            return results if len(results) == len(self._puts) else None

    def cancel(self) -> int:
        """Withdraw the puts that have not gone out, exactly; returns how many."""
        with self._client.lock:
            waiting = [put.tag for put in self._puts if put.result is None]
            return self._client.fabric.cancel(waiting) if waiting else 0

    @property
    def has_ended(self) -> bool:
        """Whether every put has ended."""
        return not self._open

    def wait_landed(self, timeout_s: float) -> bool:
        """Wait until every put has landed or failed, so that the sources may be written again; returns whether so."""
        with self._done:
            return self._done.wait_for(lambda: not self._unlanded, max(0.0, timeout_s))

    def abandon(self) -> None:
        """End what has not landed, at any price: when this returns, nothing reads the sources any more.

        What has not gone out never does. If anything has, and the node has not said that it landed, the link is lost.
        """
        with self._done:
            reading = [put.tag for put in self._puts if put.result is None and not put.landed_ns]
            if not reading or self._client.fabric.cancel(reading) == len(reading):
                return
            settled: list[bool] = []

            def lose_unless_over() -> None:
                if self._unlanded:
                    self._client.lose(
                        self._link, DeadlineExceeded("A block went out and did not land in time.")
                    )
                settled.append(True)
                self._done.notify_all()

            # Some may have failed or landed already, and that is not told yet: they are no reason to lose the link.
            self._client.settle(lose_unless_over)
            if not self._done.wait_for(
                lambda: bool(settled) or not self._unlanded, self._client.reach.call_timeout_s
            ):
                lose_unless_over()

    def wait(self, timeout_s: float) -> list[PutResult]:
        """Wait until every put has ended; the results in the order of the blocks.

        Blocks that are still under way when the time is over are reported with DeadlineExceeded; they go on.
        """
        until = time.monotonic() + timeout_s
        with self._done:
            self._done.wait_for(lambda: not self._open, max(0.0, until - time.monotonic()))
            late = DeadlineExceeded(f"The put had not ended after {timeout_s} s; it goes on.")
            return [
                put.result
                or PutResult(
                    put.block.key,
                    Durability.LANDED if put.landed_ns else None,
                    late,
                    fired_ns=put.fired_ns,
                    landed_ns=put.landed_ns,
                )
                for put in self._puts
            ]


def lease_deadline_ns(asked_ns: int, lease_ms: int) -> int:
    """When to give up by ourselves, in our clock, so that the node's lease still stands."""
    return asked_ns + max(lease_ms - LEASE_MARGIN_MS, lease_ms // 2) * 1_000_000
