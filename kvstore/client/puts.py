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
from nic_offload.group import Group
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
    from nic_offload.group import Row

__all__ = ["ArmedPuts", "Reservation", "lease_deadline_ns"]

_CODE_MASK = 0xFF


@dataclass(slots=True)
class _Put:
    """One block on its way. Of the batch's tags the put of block i has number 2i, its acknowledgement 2i + 1."""

    block: Block
    lease: Leased
    word: int
    failure: KvError | None = None  # by its code; it ends when the node has said more
    error: KvError | None = None  # why it failed
    keeps_word: bool = False  # it is given back with the lease


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
    """A batch of armed puts: wait for it, look at it, or let it be.

    Each block is a row of a group, into which the C core writes when it fired and what the node acknowledged. Events
    tell only what went wrong, and once, if nobody waits, that all of it is over.
    """

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
        self._results: list[PutResult] | None = None
        self._counter: Counter | None = None
        with client.lock:
            if link.error is not None:
                raise link.error
            self._tag = client.next_tags()
            self._group = Group(client.fabric, self._tag, len(puts))
            self._start(flag, deadline_ns)

    def _start(self, flag: FlagWord | Counter, deadline_ns: int) -> None:
        link, client = self._link, self._client
        sent = []
        for i, put in enumerate(self._puts):
            if put.lease.already_stored:
                self._group.end(i)
            else:
                sent.append(i)
        if not sent:
            self._end_if_over()
            return
        try:
            watch_acks(client.fabric, [self._watch(i, deadline_ns) for i in sent])
            if isinstance(flag, FlagWord):
                flag = self._counter = client.fabric.open_counter(flag)
            arm(client.fabric, [self._armed(i, flag, deadline_ns) for i in sent])
        except KvError:
            self._undo(sent)
            raise
        link.operations[self._tag] = self
        if self._span is not None:
            self._span.armed()

    def _undo(self, sent: Sequence[int]) -> None:
        """None of them is armed: nothing goes out, nothing is awaited, and the slots are the node's again."""
        with contextlib.suppress(FabricError):
            self._client.fabric.cancel([self._tag + 2 * i + 1 for i in sent])
        if self._counter is not None:
            self._counter.close()
        self._link.give_back_words([put.word for put in self._puts if put.lease.already_stored])
        leases = [(self._puts[i].lease, self._puts[i].word) for i in sent]
        GivingBack(self._client, self._link, leases)

    def _watch(self, i: int, deadline_ns: int) -> AckWatch:
        put = self._puts[i]
        return AckWatch(
            tag=self._tag + 2 * i + 1,
            endpoint=self._link.endpoint,
            word=self._link.word_address(put.word),
            generation=put.lease.generation,
            final_code=self._durability,
            deadline_ns=deadline_ns + ACK_GRACE_MS * 1_000_000,
            group=self._group,
            good_max=Durability.SYNCED,
            row=i,
        )

    def _armed(self, i: int, flag: Counter, deadline_ns: int) -> TriggeredPut:
        put = self._puts[i]
        return TriggeredPut(
            tag=self._tag + 2 * i,
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
            acked=True,
            group=self._group,
            row=i,
        )

    # --- what went wrong, told by the client's pump with the lock held

    def event(self, event: Event) -> None:
        """It is over, or one of our puts or acknowledgements is not as it should be."""
        if event.kind == EventKind.OVER:
            self._end_if_over()
            return
        i = (event.tag - self._tag) // 2
        if self._group.row(i).over:
            return
        match event.kind:
            case EventKind.ACKED:
                self._refused(i, event)
            case EventKind.FAILED:
                self._put_failed(i, event.status)
            case EventKind.LATE:
                self._late(i)
            case EventKind.WATCH_FAILED:
                error = DeadlineExceeded("A block went out and was not acknowledged in time.")
                self._end(i, error)
                self._client.lose(self._link, error)

    def _refused(self, i: int, event: Event) -> None:
        error = error_of_code(event.value & _CODE_MASK) or ProtocolError(
            "The node said of a put what no put's end is."
        )
        if isinstance(error, LeaseExpired):
            self._give_up(i, error)
            return
        put = self._puts[i]
        put.failure = error
        # Whatever became of the block, it is the node's: the source is free.
        self._group.land(i, event.time_ns)
        self._link.failures.ask(put.lease.generation, lambda told: self._failed(i, told or error))

    def _failed(self, i: int, error: KvError) -> None:
        if not self._group.row(i).over:
            self._end(i, error)

    def _put_failed(self, i: int, status: int) -> None:
        if status == -errno.ETIMEDOUT:
            error: KvError = DeadlineExceeded(
                "The flag did not reach the put's threshold before the lease ended."
            )
        else:
            error = FabricError.from_code("A put", status)
        self._client.fabric.cancel([self._tag + 2 * i + 1])
        put = self._puts[i]
        if status in (-errno.ETIMEDOUT, -errno.ECANCELED):
            put.keeps_word = True
            self._end(i, error)
            GivingBack(self._client, self._link, [(put.lease, put.word)])  # it never went out, and never will
        else:
            self._end(i, error)
            self._client.lose(self._link, error)

    def _late(self, i: int) -> None:
        """The NIC holds it past its deadline. If it has gone out, the acknowledgement's deadline decides."""
        if self._client.fabric.cancel([self._tag + 2 * i]):
            self._put_failed(i, -errno.ETIMEDOUT)

    def _give_up(self, i: int, error: KvError) -> None:
        """The node ended the lease. If the put has not gone out it won't; else only the link's end is certain.

        One that can't be withdrawn has gone out, or its own deadline has ended it, and that is not told yet.
        """
        if self._client.fabric.cancel([self._tag + 2 * i]):
            self._put_failed(i, -errno.ETIMEDOUT)
        else:
            self._client.settle(lambda: self._went_out(i, error))

    def _went_out(self, i: int, error: KvError) -> None:
        if not self._group.row(i).over:
            self._end(i, error)
            self._client.lose(self._link, error)

    def lost(self, error: KvError) -> None:
        """The link is gone: whatever had no acknowledgement failed."""
        for i, row in enumerate(self._group.rows()):
            if not row.over:
                self._end(i, self._puts[i].failure or error)

    def _end(self, i: int, error: KvError) -> None:
        self._puts[i].error = error
        self._group.end(i)
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._results is not None or self._group.open_rows:
            return
        self._results = self._now()
        self._link.operations.pop(self._tag, None)
        self._link.give_back_words([put.word for put in self._puts if not put.keeps_word])
        if self._counter is not None:
            self._counter.close()
        if self._span is not None:
            self._span.ended([put.block for put in self._puts], self._results)
        if self._told is not None:
            for put, result in zip(self._puts, self._results, strict=True):
                self._told.put_ended(put.block, result)

    def _now(self, late: KvError | None = None) -> list[PutResult]:
        return [self._result(put, row, late) for put, row in zip(self._puts, self._group.rows(), strict=True)]

    def _result(self, put: _Put, row: Row, late: KvError | None) -> PutResult:
        if put.lease.already_stored:
            return PutResult(put.block.key, self._durability, None, already_stored=True)
        error = put.error if row.over else late
        reached = Durability(row.code) if row.code else None
        return PutResult(
            key=put.block.key,
            durability=reached,
            error=error,
            fired_ns=row.fired_ns,
            landed_ns=row.landed_ns,
            durable_ns=row.over_ns if error is None else 0,
        )

    # --- for the application

    def progress(self) -> tuple[int, int, int]:
        """How many blocks have fired, have landed, and have ended."""
        rows = list(self._group.rows())
        return (
            sum(row.fired_ns > 0 for row in rows),
            sum(row.landed_ns > 0 for row in rows),
            sum(row.over for row in rows),
        )

    def ended(self) -> list[PutResult] | None:
        """The results in the order of the blocks, or None while one is still under way."""
        with self._client.lock:
            self._end_if_over()
            return self._results

    def cancel(self) -> int:
        """Withdraw the puts that have not gone out, exactly; returns how many."""
        with self._client.lock:
            waiting = [self._tag + 2 * i for i, row in enumerate(self._group.rows()) if not row.over]
            return self._client.fabric.cancel(waiting) if waiting else 0

    @property
    def has_ended(self) -> bool:
        """Whether every put has ended."""
        return not self._group.open_rows

    def wait_landed(self, timeout_s: float) -> bool:
        """Wait until every put has landed or failed, so that the sources may be written again; returns whether so."""
        return self._group.wait_landed(timeout_s)

    def abandon(self) -> None:
        """End what has not landed, at any price: when this returns, nothing reads the sources any more.

        What has not gone out never does. If anything has, and the node has not said that it landed, the link is lost.
        """
        settled = threading.Event()

        def lose_unless_landed() -> None:
            if not self._group.wait_landed(0):
                self._client.lose(self._link, DeadlineExceeded("A block went out and did not land in time."))
            settled.set()

        with self._client.lock:
            reading = [
                self._tag + 2 * i
                for i, row in enumerate(self._group.rows())
                if not row.over and not row.landed_ns
            ]
            if not reading or self._client.fabric.cancel(reading) == len(reading):
                return
            # Some may have failed or landed already, and that is not told yet: they are no reason to lose the link.
            self._client.settle(lose_unless_landed)
        if not settled.wait(self._client.reach.call_timeout_s):
            with self._client.lock:
                lose_unless_landed()

    def wait(self, timeout_s: float) -> list[PutResult]:
        """Wait until every put has ended; the results in the order of the blocks.

        Blocks that are still under way when the time is over are reported with DeadlineExceeded; they go on.
        """
        self._group.wait(len(self._puts), timeout_s)
        with self._client.lock:
            self._end_if_over()
            if self._results is not None:
                return list(self._results)
            return self._now(DeadlineExceeded(f"The put had not ended after {timeout_s} s; it goes on."))


def lease_deadline_ns(asked_ns: int, lease_ms: int) -> int:
    """When to give up by ourselves, in our clock, so that the node's lease still stands."""
    return asked_ns + max(lease_ms - LEASE_MARGIN_MS, lease_ms // 2) * 1_000_000
