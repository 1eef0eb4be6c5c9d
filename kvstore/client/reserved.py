"""Puts into slots that were requested first: a reservation, and its puts until their last acknowledgement.

`Client.reserve` leases a slot for each block; `Reservation.arm` queues the puts. If it doesn't matter beforehand what
is already stored, `Client.arm` needs no reservation.

What always holds: what holds for every put (`kvstore.client.puts`); a lease is given back only if its put will
certainly never be sent.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from kvstore.client.arguments import checks_arguments
from kvstore.client.lease_returns import GivingBack
from kvstore.client.puts import ArmedPuts
from kvstore.durability import Durability
from kvstore.errors import FabricError, InvalidArgument, KvError, LeaseExpired
from kvstore.limits import ACK_GRACE_MS, LEASE_MARGIN_MS
from nic_offload.group import Group
from nic_offload.made_by import made_by
from nic_offload.trigger import AckWatch, TriggeredPut, arm, watch_acks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.link import Host, Link
    from kvstore.client.puts import Said
    from kvstore.client.slabs import Slab
    from kvstore.client.spans import PutSpan
    from kvstore.client.transfer_watch import Watch
    from kvstore.wire.fabric_call import Leased
    from nic_offload.counter import Counter
    from nic_offload.fabric import Event
    from nic_offload.flags import FlagWord

__all__ = ["Reservation", "lease_deadline_ns"]


@made_by("`Client.reserve`")
@checks_arguments
class Reservation:
    """Leased slots for a batch of blocks. Arm them or give them back.

    >>> reservation = client.reserve([block])
    >>> reservation.already_stored
    1
    >>> reservation.give_back()
    """

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
        self._blocks, self._leases, self._words = blocks, leases, words
        self._watch = watch
        self._span = span
        self._client = client
        self._link = link
        self._deadline_ns = deadline_ns
        self._spent = False

    @property
    def already_stored(self) -> int:
        """How many of the blocks are already stored; they are not sent."""
        return sum(lease.already_stored for lease in self._leases)

    def _spend(self) -> None:
        if self._spent:
            raise InvalidArgument("A reservation is armed or released once; reserve again.")
        self._spent = True

    def arm(self, flag: FlagWord | Counter | None) -> ArmedPuts:
        """Queue the puts. Each is sent when `flag` reaches its block's threshold; without a flag, at once.

        >>> puts = client.reserve([block]).arm(None)
        >>> [result.already_stored for result in puts.wait(timeout_s=10)]
        [True]
        """
        self._spend()
        try:
            return _LeasedPuts(
                self._client,
                self._link,
                self._blocks,
                self._leases,
                self._words,
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

    def give_back(self) -> None:
        """Return the leases without putting anything. When this returns, the slots are free.

        >>> client.reserve([block]).give_back()
        """
        self._spend()
        of_lease = list(zip(self._leases, self._words, strict=True))
        with self._client.lock:
            self._link.give_back_words([word for lease, word in of_lease if lease.already_stored])
            leases = [(lease, word) for lease, word in of_lease if not lease.already_stored]
            giving = GivingBack(self._client, self._link, leases)
        giving.over.wait(self._client.reach.call_timeout_s)
        if self._span is not None:
            self._span.given_back()


class _LeasedPuts(ArmedPuts):
    """A batch of puts into leased slots."""

    def __init__(
        self,
        client: Host,
        link: Link,
        blocks: Sequence[Block],
        leases: Sequence[Leased],
        words: Sequence[int],
        durability: Durability,
        flag: FlagWord | Counter | None,
        deadline_ns: int,
        watch: Watch | None = None,
        span: PutSpan | None = None,
    ) -> None:
        self._leases, self._words = leases, words
        self._has_stored = any(lease.already_stored for lease in leases)
        self._slab: Slab | None = None  # where pieces are gathered
        self._gather_at: dict[int, int] = {}  # by number
        self._kept_words: set[int] = set()  # numbers of puts whose words are given back with their leases
        super().__init__(client, link, blocks, durability, flag, deadline_ns, watch, span)

    def _start(self, flag: FlagWord | Counter | None, deadline_ns: int, said: Said | None) -> None:
        assert said is None, "the reservation told the node"
        client = self._client
        self._group = Group(client.fabric, self._tag, len(self._blocks))
        sent = []
        for i, lease in enumerate(self._leases):
            if lease.already_stored:
                self._group.end(i)
            else:
                sent.append(i)
        if not sent:
            self._end_if_over()
            return
        try:
            self._take_slab(sent)
            watch_acks(client.fabric, [self._watch(i, deadline_ns) for i in sent])
            trigger = self._counter_of(flag)
            arm(client.fabric, [self._put(i, trigger, deadline_ns) for i in sent])
        except KvError:
            self._undo(sent)
            raise
        self._armed()

    def _take_slab(self, sent: Sequence[int]) -> None:
        """Memory for blocks of pieces, each gathered when it fires."""
        size = 0
        for i in sent:
            if self._blocks[i].pieces is not None:
                self._gather_at[i] = size
                size += self._blocks[i].length
        if size:
            self._slab = self._client.slabs.take(size)

    def _give_back_slab(self) -> None:
        if self._slab is not None:
            self._client.slabs.give_back(self._slab)
            self._slab = None

    def _undo(self, sent: Sequence[int]) -> None:
        """None of them is armed: nothing is sent or awaited, and the slots are the node's again."""
        with contextlib.suppress(FabricError):
            self._client.fabric.cancel([self._tag + 2 * i + 1 for i in sent])
        if self._counter is not None:
            self._counter.close()
        self._give_back_slab()
        of_lease = zip(self._leases, self._words, strict=True)
        self._link.give_back_words([word for lease, word in of_lease if lease.already_stored])
        GivingBack(self._client, self._link, [(self._leases[i], self._words[i]) for i in sent])

    def _watch(self, i: int, deadline_ns: int) -> AckWatch:
        return AckWatch(
            tag=self._tag + 2 * i + 1,
            endpoint=self._link.endpoint,
            word=self._link.word_address(self._words[i]),
            generation=self._leases[i].generation,
            final_code=self._durability,
            deadline_ns=deadline_ns + ACK_GRACE_MS * 1_000_000,
            group=self._group,
            good_max=Durability.SYNCED,
            row=i,
        )

    def _put(self, i: int, flag: Counter | None, deadline_ns: int) -> TriggeredPut:
        block, lease = self._blocks[i], self._leases[i]
        region, source = block.region, block.region.address + block.offset
        if block.pieces is not None:
            assert self._slab is not None
            region, source = self._slab.region, self._slab.region.address + self._gather_at[i]
        return TriggeredPut(
            tag=self._tag + 2 * i,
            endpoint=self._link.endpoint,
            peer=self._link.peer,
            region=region,
            source=source,
            pieces=block.pieces,
            length=block.length,
            target=lease.payload,
            target_key=self._link.landing_key,
            flag_target=lease.flag,
            flag_key=self._link.landing_key,
            flag_value=lease.generation,
            trigger=flag,
            threshold=block.threshold,
            deadline_ns=deadline_ns,
            acked=True,
            group=self._group,
            row=i,
        )

    def _refused(self, i: int, event: Event, error: KvError) -> None:
        if isinstance(error, LeaseExpired):
            self._give_up(i, error)
        else:
            super()._refused(i, event, error)

    def _put_failed(self, i: int, status: int) -> None:
        self._client.fabric.cancel([self._tag + 2 * i + 1])
        if status in (-errno.ETIMEDOUT, -errno.ECANCELED):
            self._kept_words.add(i)
            # It was never sent, and never will be.
            GivingBack(self._client, self._link, [(self._leases[i], self._words[i])])
        super()._put_failed(i, status)

    def _give_up(self, i: int, error: KvError) -> None:
        """The node ended the lease.

        An unsent put is withdrawn; otherwise only ending the link is certain. A put that can't be withdrawn was sent,
        or ended by its own deadline, and that event is still to come.
        """
        if self._client.fabric.cancel([self._tag + 2 * i]):
            self._put_failed(i, -errno.ETIMEDOUT)
        else:
            self._client.settle(lambda: self._went_out(i, error))

    def _went_out(self, i: int, error: KvError) -> None:
        if not self._group.row(i).over:
            self._end(i, error)
            self._client.lose(self._link, error)

    def _release(self) -> None:
        super()._release()
        self._give_back_slab()
        self._link.give_back_words([word for i, word in enumerate(self._words) if i not in self._kept_words])

    def _is_stored(self, i: int) -> bool:
        return self._leases[i].already_stored


def lease_deadline_ns(asked_ns: int, lease_ms: int) -> int:
    """When to give up by ourselves, in our clock, so that the node's lease still stands."""
    return asked_ns + max(lease_ms - LEASE_MARGIN_MS, lease_ms // 2) * 1_000_000
