"""Gets: the node writes into our region and then into an acknowledgement word; here we wait for the words.

What always holds: when a get returns, nothing of it is under way any more, and until then its regions are held. The
node puts one word for each block, behind the last byte of it. What has not come by the deadline is cancelled: the node
then puts a word that says so, or the block's own if its bytes were on their way. Only if one of these does not come
within `FETCH_CANCEL_MS` the link is lost, which ends everything that goes through it. A get that the node was not asked
for by its deadline ends there, and the node never is.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from kvstore.client.blocks import Hit
from kvstore.clock import SystemClock
from kvstore.errors import DeadlineExceeded, FabricError, KvError
from kvstore.limits import FETCH_CANCEL_MS
from kvstore.miss import Miss, MissReason
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.ack import miss_of_code
from kvstore.wire.fabric_call import FetchRow, rows_of_fetch
from nic_offload.fabric import EventKind
from nic_offload.trigger import AckWatch, watch_acks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.link import Host, Link
    from nic_offload.fabric import Event, Region

__all__ = ["Ended", "Get", "NoGet"]

Ended: TypeAlias = "Callable[[list[Hit | Miss]], object]"
Lost: TypeAlias = "Callable[[Sequence[Hit | Miss | None], KvError], object]"

_CODE_MASK = 0xFF


class NoGet:
    """A batch that could not even be begun: a miss for each block, at once."""

    def __init__(self, blocks: int, miss: Miss, ended: Ended | None) -> None:
        self._outcomes: list[Hit | Miss] = [miss] * blocks
        if ended is not None:
            ended(self._outcomes)

    def wait(self, first: int | None = None) -> list[Hit | Miss]:
        """The misses of the first so many blocks, or of all."""
        return self._outcomes[:first]


def _hold_regions(blocks: Sequence[Block]) -> list[Region]:
    """Hold the regions of these blocks, each once: their owner can't close them while a peer may write there."""
    held: list[Region] = []
    try:
        for region in {id(block.region): block.region for block in blocks}.values():
            region.hold()
            held.append(region)
    except FabricError:
        for region in held:
            region.let_go()
        raise
    return held


class Get:
    """One batch of blocks being fetched. Begun with the client's lock held.

    `ended` is called once, with that lock held and all outcomes, when the last is known.
    """

    def __init__(
        self, client: Host, link: Link, blocks: Sequence[Block], deadline_ns: int, ended: Ended | None = None
    ) -> None:
        self._client = client
        self._ended = ended
        self._link = link
        self._blocks = blocks
        self._outcomes: list[Hit | Miss | None] = [None] * len(blocks)
        self._held = _hold_regions(blocks)
        try:
            self._words = link.take_words(len(blocks))
        except KvError:
            self._let_go()
            raise
        self._generations = [next(link.generations) for _ in blocks]
        self._tags = [client.next_tags() for _ in blocks]
        self._index = {tag: i for i, tag in enumerate(self._tags)}
        self._open = len(blocks)
        self._came = 0  # so many of the first outcomes are known, without a gap
        self._tell_at = len(blocks)  # the least number of them that somebody waits for
        self._done = threading.Condition(client.lock)
        self._lost: Lost | None = None
        self._asked = False  # or about to be, before anybody else has the lock
        self._cancelling = False
        self._called = False  # it was asked for by gRPC
        try:
            watch_acks(
                client.fabric, [self._watch(i, self._tags[i], deadline_ns) for i in range(len(blocks))]
            )
        except KvError:
            link.give_back_words(self._words)
            self._let_go()
            raise
        for tag in self._tags:
            link.operations[tag] = self

    def _watch(self, i: int, tag: int, deadline_ns: int) -> AckWatch:
        return AckWatch(
            tag=tag,
            endpoint=self._link.endpoint,
            word=self._link.word_address(self._words[i]),
            generation=self._generations[i],
            final_code=1,
            deadline_ns=deadline_ns,
        )

    @property
    def blocks(self) -> int:
        """How many."""
        return len(self._blocks)

    def rows(self) -> bytes:
        """The same for a call over the fabric."""
        return rows_of_fetch(
            FetchRow(
                block.key,
                block.length,
                self._words[i],
                self._generations[i],
                region.base + block.offset,
                region.key,
            )
            for i, (block, region) in enumerate(self._named())
        )

    def _named(self) -> Iterable[tuple[Block, Region]]:
        """The blocks, and what the node's side calls their memory."""
        return [(block, block.region.through(self._link.endpoint)) for block in self._blocks]

    def request(self, fingerprint: bytes) -> pb.FetchRequest:
        """The call that asks the node for all of it."""
        return pb.FetchRequest(
            connection=self._link.number,
            blocks=[
                pb.FetchBlock(
                    name=pb.BlockName(key=block.key, fingerprint=fingerprint, length=block.length),
                    target=region.base + block.offset,
                    target_key=region.key,
                    ack_word=self._words[i],
                    ack_generation=self._generations[i],
                )
                for i, (block, region) in enumerate(self._named())
            ],
        )

    def event(self, event: Event) -> None:
        """One of our words has come, or has not come in time."""
        i = self._index[event.tag]
        if self._outcomes[i] is not None:
            return
        if event.kind == EventKind.ACKED:
            self._end(i, miss_of_code(event.value & _CODE_MASK) or Hit(self._blocks[i].key))
        elif event.tag != self._tags[i]:
            self._not_confirmed()
        else:
            self.cancel()

    def ask(self) -> bool:
        """Say, with the lock held, that the node is asked now; False if the get has ended, so that it is not."""
        self._asked = self._open > 0
        return self._asked

    def by_rpc(self) -> None:
        """It is asked for by gRPC, so the fabric will not bring the call."""
        self._called = True

    def cancel(self) -> None:
        """Have the node end what has not come, and wait for its word on each block, `FETCH_CANCEL_MS` at most."""
        if self._cancelling or not self._open:
            return
        if not self._asked:
            self.refuse(Miss(MissReason.NODE_AWAY, "its deadline was over before the node was asked"))
            return
        self._cancelling = True
        left = [i for i, outcome in enumerate(self._outcomes) if outcome is None]
        for i in left:
            tag = self._tags[i] + 1  # the first watch of the same word may still have something to say
            self._index[tag] = i
            self._link.operations[tag] = self
        # From now on, and not from the deadline: a busy process may come to it late, and the node must be asked first.
        until_ns = SystemClock().monotonic_ns() + FETCH_CANCEL_MS * 1_000_000
        try:
            watch_acks(self._client.fabric, [self._watch(i, self._tags[i] + 1, until_ns) for i in left])
        except FabricError:
            self._not_confirmed()
            return
        self._client.cancel_fetch(
            self._link,
            [(self._words[i], self._generations[i]) for i in left],
            self._not_confirmed,
            called=self._called,
        )

    def _not_confirmed(self) -> None:
        """Nobody knows whether the node still writes: only the end of the link makes sure that it does not."""
        if self._open:
            error = DeadlineExceeded(
                "A fetched block did not come in time, and the node did not confirm that it never will."
            )
            self._client.lose(self._link, error)

    def lost(self, error: KvError) -> None:
        """The link is gone: whatever had not come is a miss."""
        told, self._lost = self._lost, None
        for i, outcome in enumerate(self._outcomes):
            if outcome is None:
                self._end(i, Miss(MissReason.NODE_AWAY, str(error)))
        if told is not None:
            told(self._outcomes, error)

    def tell_loss(self, lost: Lost) -> None:
        """The node has taken the call; if it goes away, or not all comes in time, say so to this, with all outcomes."""
        with self._client.lock:
            self._lost = lost
            self._tell_if_late()

    def refuse(self, miss: Miss) -> None:
        """The node did not take the call, so nothing of it will come; but words, if it is to confirm that already."""
        if self._cancelling and self._called:
            return  # a word that comes later must not stand over one of whoever has the place next
        self._client.fabric.cancel([*self._index])
        for i, outcome in enumerate(self._outcomes):
            if outcome is None:
                self._end(i, miss)

    def _end(self, i: int, outcome: Hit | Miss) -> None:
        self._outcomes[i] = outcome
        self._link.operations.pop(self._tags[i], None)
        self._link.operations.pop(self._tags[i] + 1, None)
        self._link.give_back_words([self._words[i]])
        self._open -= 1
        if not self._open and self._link.is_sure:
            self._let_go()
        self._tell_if_late()
        while self._came < len(self._outcomes) and self._outcomes[self._came] is not None:
            self._came += 1
        if self._came >= self._tell_at:
            self._tell_at = len(self._outcomes)  # who wants more says so when he has looked
            self._done.notify_all()
        if not self._open and self._ended is not None:
            self._ended([outcome for outcome in self._outcomes if outcome is not None])

    def _tell_if_late(self) -> None:
        """It was cancelled, and is over: some of it had not come."""
        if self._open or not self._cancelling or self._lost is None:
            return
        told, self._lost = self._lost, None
        if any(isinstance(one, Miss) and one.reason is MissReason.NODE_AWAY for one in self._outcomes):
            told(self._outcomes, DeadlineExceeded("A fetched block did not come in time."))

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for region in held:
            region.let_go()

    def wait(self, first: int | None = None) -> list[Hit | Miss]:
        """Wait for the first so many blocks, or for all.

        If nothing else does, their deadline ends that, or `FETCH_CANCEL_MS` after it the end of the link.
        """
        wanted = len(self._outcomes) if first is None else min(first, len(self._outcomes))

        def have_come() -> bool:
            self._tell_at = min(self._tell_at, wanted)
            return self._came >= wanted

        with self._done:
            self._done.wait_for(have_come)
            return [outcome for outcome in self._outcomes[:wanted] if outcome is not None]
