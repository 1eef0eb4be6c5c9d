"""Gets: the node writes into our region and then into an acknowledgement word, for which the caller waits.

Each block is a row of a group, and the call that requests them is the last row: a waiting caller sleeps in the C
core until all rows are complete, and then ends the get.

What always holds: when a get returns, nothing of it is in flight, and until then its regions are held. The node puts
one word for each block, after its last byte. Blocks that have not arrived by the deadline are cancelled: the node
then puts a word that confirms it, or the block's own if its bytes were in flight. If one of these does not arrive
within `FETCH_CANCEL_MS`, the link is lost, which ends everything on it. A get whose deadline passes before the node
is called ends there, and the node is never called.
"""

from __future__ import annotations

import logging
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from kvstore.client.blocks import Hit, whole_of
from kvstore.client.request_ids import header_of
from kvstore.clock import SystemClock
from kvstore.errors import DeadlineExceeded, FabricError, KvError, ProtocolError
from kvstore.limits import FETCH_CANCEL_MS, WAIT_SLICE_S
from kvstore.miss import Miss, MissReason
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.ack import AckCode, miss_of_code
from kvstore.wire.fabric_call import AnswerCode, CallKind, FetchRow, rows_of_fetch, rows_of_parts
from nic_offload.direct import BLOCKS_MAX
from nic_offload.fabric import EventKind, hold, region_for, release
from nic_offload.group import Group
from nic_offload.trigger import AckWatch, watch_acks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.fabric_caller import FabricCall
    from kvstore.client.link import Host, Link
    from nic_offload.fabric import Event, Region

__all__ = ["Ended", "EndedGet", "Get", "read_directly", "survivable"]

log = logging.getLogger(__name__)

Ended: TypeAlias = "Callable[[list[Hit | Miss]], object]"
Lost: TypeAlias = "Callable[[Sequence[Hit | Miss | None], KvError], object]"

_ANY_CODE = 0xFF
_SERVED = int(AckCode.SERVED)
_SCATTERED = int(AckCode.SCATTERED)


def survivable(ended: Ended) -> Ended:
    """The same; an exception is logged, and doesn't end the client's thread that makes the call."""

    def survived(outcomes: list[Hit | Miss]) -> None:
        try:
            ended(outcomes)
        except Exception:
            log.exception("The function `ended` of a get failed.")

    return survived


class EndedGet:
    """A batch whose outcomes are known at once: it could not be started, or was read directly."""

    def __init__(self, outcomes: list[Hit | Miss], scattered: list[bool], ended: Ended | None) -> None:
        self._outcomes, self._scattered = outcomes, scattered
        if ended is not None:
            ended(self._outcomes)

    @classmethod
    def missed(cls, blocks: int, miss: Miss, ended: Ended | None) -> EndedGet:
        """A miss for each block."""
        return cls([miss] * blocks, [False] * blocks, ended)

    def scattered(self) -> list[bool]:
        """As of a `Get`."""
        return self._scattered

    def wait(self, first: int | None = None) -> list[Hit | Miss]:
        """The outcomes of the first `count` blocks, or of all."""
        return self._outcomes[:first]


def read_directly(
    link: Link | None, blocks: Sequence[Block], fingerprint: bytes, request_id: str, bytes_max: int
) -> list[bool] | None:
    """Copy blocks from the memory of a node on this machine; returns what `scattered` does, or None: call the node.

    Blocks of more than `bytes_max` together are not copied: their caller would wait.
    """
    direct = None if link is None else link.direct
    if direct is None or len(blocks) > BLOCKS_MAX:
        return None
    held = _hold_regions(blocks)
    try:
        if _are_on_gpus(held):
            return None
        return direct.read(
            fingerprint,
            [
                (
                    block.key,
                    block.stored_bytes,
                    block.skip,
                    block.length if block.whole else 0,
                    block.region.address + block.offset,
                    0 if block.pieces is None else block.pieces.pointer,
                )
                for block in blocks
            ],
            header_of(request_id),
            bytes_max,
        )
    finally:
        for region in held:
            release(region)


def _hold_regions(blocks: Sequence[Block]) -> list[Region]:
    """Hold the regions of these blocks, each once: their owner can't close them while a peer may write there."""
    held: list[Region] = []
    try:
        for region in dict.fromkeys([block.region for block in blocks]):
            hold(region)
            held.append(region)
    except FabricError:
        for region in held:
            release(region)
        raise
    return held


def _are_on_gpus(regions: Sequence[Region]) -> bool:
    """Whether any of these is memory that no CPU may touch."""
    return any(region.gpu is not None for region in regions)


class Get:
    """One batch of blocks being fetched. Begun with the client's lock held.

    `ended` is called once, with that lock held and all outcomes, when the last is known. With `is_awaited` the opener
    waits for the whole batch at once, and no other thread is woken.
    """

    def __init__(
        self,
        client: Host,
        link: Link,
        blocks: Sequence[Block],
        ended: Ended | None = None,
        *,
        is_awaited: bool = False,
    ) -> None:
        self._client = client
        self._ended = ended
        self._link = link
        self._blocks = blocks
        self._outcomes: list[Hit | Miss] | None = None
        self._misses: dict[int, Miss] = {}  # decided on the client's side
        self._lost: Lost | None = None
        self._taken: Callable[[int], object] | None = None
        self._cancelling = False
        self._call: FabricCall | None = None
        self._called = False  # it was requested over gRPC
        self.kind = CallKind.FETCH_PARTS if any(map(whole_of, blocks)) else CallKind.FETCH
        if self.kind is CallKind.FETCH_PARTS and not link.sends_parts:
            raise ProtocolError("The node sends whole blocks only.")
        self._held = _hold_regions(blocks)
        try:
            self._words = link.take_words(len(blocks))
        except KvError:
            self._release()
            raise
        self._first_generation = link.take_generations(len(blocks))
        self.tag = client.next_tags()
        try:
            self.group = Group(client.fabric, self.tag, len(blocks) + 1, is_awaited=is_awaited)
        except KvError:
            link.give_back_words(self._words)
            self._release()
            raise
        link.operations[self.tag] = self

    def _watch(self, i: int, again: int, deadline_ns: int) -> AckWatch:
        return AckWatch(
            tag=self.tag + 2 * i + again,
            endpoint=self._link.endpoint,
            word=self._link.word_address(self._words[i]),
            generation=self._first_generation + i,
            final_code=1,
            deadline_ns=deadline_ns,
            group=self.group,
            good_max=_ANY_CODE,
            row=i,
        )

    @property
    def blocks(self) -> int:
        """The number of blocks; the row after theirs is the call's."""
        return len(self._blocks)

    def rows(self) -> bytes:
        """The same for a call over the fabric."""
        named, generations = self._named(), count(self._first_generation)
        if self.kind is CallKind.FETCH:
            return rows_of_fetch(
                [
                    (block.key, block.length, word, generation, region.base + block.offset, region.key)
                    for (block, region), word, generation in zip(
                        named, self._words, generations, strict=False
                    )
                ]
            )
        return rows_of_parts(
            [
                FetchRow(
                    block.key,
                    block.stored_bytes,
                    word,
                    generation,
                    region.base + block.offset,
                    region.key,
                    block.skip,
                    block.length if block.whole else 0,
                )
                for (block, region), word, generation in zip(named, self._words, generations, strict=False)
            ]
        )

    def wanted(self) -> list[int] | None:
        """Return for each block the address in our memory at which it is wanted, and its pieces' pointer, or 0.

        None: the CPU must not copy them there.
        """
        if _are_on_gpus(self._held):
            return None
        return [
            number
            for block in self._blocks
            for number in (
                block.region.address + block.offset,
                0 if block.pieces is None else block.pieces.pointer,
            )
        ]

    def scattered(self) -> list[bool]:
        """Return for each block whether it is in its pieces, after `wait`; other hits are in their region."""
        return [code == _SCATTERED for code in self.group.codes(len(self._blocks))]

    def _named(self) -> Iterable[tuple[Block, Region]]:
        """The blocks, and their memory's addresses as the node uses them."""
        return [(block, region_for(block.region, self._link.endpoint)) for block in self._blocks]

    def request(self, fingerprint: bytes) -> pb.FetchRequest:
        """The call that requests the whole batch."""
        return pb.FetchRequest(
            connection=self._link.number,
            blocks=[
                pb.FetchBlock(
                    name=pb.BlockName(key=block.key, fingerprint=fingerprint, length=block.stored_bytes),
                    skip=block.skip,
                    part=block.length if block.whole else 0,
                    target=region.base + block.offset,
                    target_key=region.key,
                    ack_word=self._words[i],
                    ack_generation=self._first_generation + i,
                )
                for i, (block, region) in enumerate(self._named())
            ],
        )

    def event(self, event: Event) -> None:
        """It ended, or one of our words did not arrive in time."""
        i, again = divmod(event.tag - self.tag, 2)
        if event.kind == EventKind.OVER:
            self._end_if_over()
        elif i == len(self._blocks):
            if self._call is not None:
                self._call.event(event)
            self._end_if_over()
        elif self.group.row(i).over:
            return
        elif again:
            self._not_confirmed()
        else:
            self.cancel()

    def ask(self, deadline_ns: int) -> bool:
        """Note, with the lock held, that the node is called now; False if the get has ended, and no call is made."""
        if self._outcomes is None and SystemClock().monotonic_ns() >= deadline_ns:
            self.refuse(Miss(MissReason.NODE_AWAY, "its deadline passed before the node was called"))
        return self._outcomes is None

    def by_fabric(self, call: FabricCall) -> None:
        """The call was sent, and the blocks' words are awaited."""
        self._call = call

    def by_rpc(self, deadline_ns: int) -> None:
        """It was requested over gRPC, so no answer comes over the fabric: wait for the blocks' words."""
        watch_acks(self._client.fabric, [self._watch(i, 0, deadline_ns) for i in range(len(self._blocks))])
        self._called = True

    def rpc_over(self, *, was_taken: bool) -> None:
        """The call was answered, or it is unknown whether the node received it."""
        if was_taken and self._taken is not None:
            self._taken(SystemClock().monotonic_ns())
        self.group.end(len(self._blocks), AnswerCode.DONE if was_taken else 0)
        self._end_if_over()

    def cancel(self) -> None:
        """Have the node cancel blocks that have not arrived, and wait up to `FETCH_CANCEL_MS` for its word on each."""
        left = [i for i in range(len(self._blocks)) if not self.group.row(i).over]
        if self._cancelling or not left:
            return
        self._cancelling = True
        # Counted from now, not from the deadline: a busy process may get here late, before the node was asked.
        until_ns = SystemClock().monotonic_ns() + FETCH_CANCEL_MS * 1_000_000
        try:  # with tags of their own: the first watch of the same word may still report an event
            watch_acks(self._client.fabric, [self._watch(i, 1, until_ns) for i in left])
        except FabricError:
            self._not_confirmed()
            return
        self._client.cancel_fetch(
            self._link,
            [(self._words[i], self._first_generation + i) for i in left],
            self._not_confirmed,
            called=self._called,
        )

    def _not_confirmed(self) -> None:
        """The node may still be writing; only closing the link makes sure that it does not."""
        if any(not self.group.row(i).over for i in range(len(self._blocks))):
            error = DeadlineExceeded(
                "A block did not arrive in time, and the node did not confirm that it was cancelled."
            )
            self._client.lose(self._link, error)

    def lost(self, error: KvError) -> None:
        """The link was lost: blocks that had not arrived are misses."""
        if self._call is not None:
            self._call.lost(error)
        self._miss_the_rest(Miss(MissReason.NODE_AWAY, str(error)))
        if self._lost is not None and self._is_taken():
            report, self._lost = self._lost, None
            report(self._collect(len(self._blocks)), error)
        self._end_if_over()

    def _is_taken(self) -> bool:
        return self.group.row(len(self._blocks)).code == AnswerCode.DONE

    def on_loss(self, lost: Lost) -> None:
        """Called with all outcomes if the node accepts the call and then is lost, or if blocks don't arrive in time."""
        self._lost = lost

    def on_taken(self, taken: Callable[[int], object]) -> None:
        """Notify this when the node accepted the call, before any outcome is reported."""
        self._taken = taken

    def refuse(self, miss: Miss) -> None:
        """The node did not accept the call: no block will arrive, only confirmations that were already requested."""
        if self._cancelling and self._called:
            # A late word must not overwrite one of the slot's next user.
            self.group.end(len(self._blocks))
            self._end_if_over()
            return
        tags = [self.tag + 2 * i + again for i in range(len(self._blocks)) for again in (0, 1)]
        self._client.fabric.cancel(tags)
        self._miss_the_rest(miss)
        self._end_if_over()

    def _miss_the_rest(self, miss: Miss) -> None:
        for i in range(len(self._blocks)):
            if not self.group.row(i).over:
                self._misses[i] = miss
                self.group.end(i)
        self.group.end(len(self._blocks))

    def _outcome(self, i: int, code: int) -> Hit | Miss:
        return self._misses.get(i) or miss_of_code(code) or Hit(self._blocks[i].key)

    def _collect(self, first: int) -> list[Hit | Miss]:
        codes = self.group.codes(first)
        if not self._misses and codes.count(_SERVED) + codes.count(_SCATTERED) == first:
            return [Hit(block.key) for block in self._blocks[:first]]
        return [self._outcome(i, code) for i, code in enumerate(codes)]

    def _end_if_over(self) -> None:
        if self._outcomes is not None or self.group.open_rows:
            return
        self._outcomes = self._collect(len(self._blocks))
        self._link.operations.pop(self.tag, None)
        self._link.give_back_words(self._words)
        if self._call is not None and self._taken is not None and self._is_taken():
            self._taken(self.group.row(len(self._blocks)).over_ns)
        if self._link.is_sure:
            self._release()
        if self._cancelling and self._lost is not None and self._is_taken():
            report, self._lost = self._lost, None
            if any(isinstance(one, Miss) and one.reason is MissReason.NODE_AWAY for one in self._outcomes):
                report(self._outcomes, DeadlineExceeded("A block did not arrive in time."))
        if self._ended is not None:
            self._ended(self._outcomes)

    def _release(self) -> None:
        held, self._held = self._held, []
        for region in held:
            release(region)

    def wait(self, first: int | None = None) -> list[Hit | Miss]:
        """Wait for the first `count` blocks, or for all.

        The wait ends at their deadline or, `FETCH_CANCEL_MS` later, with the link.
        """
        wanted = len(self._blocks) if first is None else max(0, min(first, len(self._blocks)))
        while not self.group.wait(wanted if wanted < len(self._blocks) else wanted + 1, WAIT_SLICE_S):
            pass
        with self._client.lock:
            self._end_if_over()
            return self._collect(wanted) if self._outcomes is None else self._outcomes[:wanted]
