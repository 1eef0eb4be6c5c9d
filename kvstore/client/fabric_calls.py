"""Calls over the fabric, the client's side: put into a place of the node's, answered by a word in our memory.

What always holds: a call ends once, by its answer, by its deadline or by the link's loss; a call that is not answered
in time ends the link, because nobody knows whether the node has it; a place is used again after its answer. With all
places in use, or with more to say than a place holds, no call is begun, and the caller makes it by gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvstore.errors import DeadlineExceeded, KvError
from kvstore.wire.fabric_call import (
    ANSWER_BYTES,
    CALL_BYTES,
    CALL_PLACES,
    LENGTH_END,
    TELLS,
    AnswerCode,
    Call,
    call_bytes,
    call_offset,
    flag_offset,
    leases_of,
    length_said,
)
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import AckWatch, TriggeredPut, arm, watch_acks

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    from kvstore.client.link import Host, Link
    from kvstore.wire.fabric_call import CallKind, Leased, Metadata
    from kvstore.wire.kvstore_pb2 import CallArea
    from nic_offload.fabric import Event, Region

__all__ = ["MEMORY_BYTES", "Answered", "FabricCalls"]

Answered: TypeAlias = "Callable[[list[Leased] | KvError], object]"

_ANSWERS_BYTES = CALL_PLACES * ANSWER_BYTES
MEMORY_BYTES = _ANSWERS_BYTES + CALL_PLACES * CALL_BYTES  # answers first, then calls
_CODE_MASK = 0xFF


class FabricCalls:
    """Of one link. All methods are called with the client's lock held."""

    def __init__(
        self, client: Host, link: Link, area: CallArea, region: Region, memory: mmap.mmap, start: int
    ) -> None:
        self._client = client
        self._link = link
        self._area = area
        self._region = region
        self._memory = memory
        self._start = start  # of the answers, in that memory
        self._free = list(range(CALL_PLACES))
        self._words = link.take_words(CALL_PLACES)
        self._next = [area.first_generation] * CALL_PLACES

    def begin(
        self,
        kind: CallKind,
        fingerprint: bytes,
        metadata: Metadata,
        blocks: int,
        rows: bytes,
        deadline_ns: int,
        answered: Answered,
        *,
        tells: bool = False,
        durability: int = 0,
        lease_ms: int = 0,
        expires_unix_ms: int = 0,
    ) -> bool:
        """Make a call, and tell its end with the client's lock held; False if it can't be made this way."""
        if not self._free:
            return False
        place = self._free[-1]
        generation, word = self._next[place], self._words[place]
        flags = TELLS if tells else 0
        call = Call(
            generation, kind, word, fingerprint, metadata, flags, durability, lease_ms, expires_unix_ms
        )
        data = call_bytes(call, blocks, rows)
        if data is None:
            return False
        self._free.pop()
        self._next[place] += 1
        at = self._start + _ANSWERS_BYTES + place * CALL_BYTES
        self._memory[at : at + len(data)] = data
        under_way = _UnderWay(self, place, generation, answered)
        tag = self._client.next_tags()
        link, fabric = self._link, self._client.fabric
        watch = AckWatch(
            tag=tag + 1,
            endpoint=link.endpoint,
            word=link.word_address(word),
            generation=generation,
            deadline_ns=deadline_ns,
            final_code=AnswerCode.DONE,
        )
        link.operations[tag] = link.operations[tag + 1] = under_way
        under_way.tags = (tag, tag + 1)
        try:
            watch_acks(fabric, [watch])
            arm(fabric, [self._put(tag, place, generation, self._region.address + at, len(data))])
        except FabricError:  # it has as much to do as it takes: nothing went out
            fabric.cancel([tag + 1])
            self._next[place] -= 1
            self.over(under_way)
            return False
        return True

    def first_word(self, tag: int, deadline_ns: int) -> TriggeredPut:
        """A word behind the flags, which the node reads nothing from: it only makes the connection."""
        return TriggeredPut(
            tag=tag,
            endpoint=self._link.endpoint,
            peer=self._link.peer,
            region=self._region,
            source=self._region.address,
            length=0,
            target=0,
            target_key=0,
            flag_target=self._area.base + flag_offset(CALL_PLACES),
            flag_key=self._area.key,
            flag_value=1,
            deadline_ns=deadline_ns,
        )

    def _put(self, tag: int, place: int, generation: int, source: int, length: int) -> TriggeredPut:
        return TriggeredPut(
            tag=tag,
            endpoint=self._link.endpoint,
            peer=self._link.peer,
            region=self._region,
            source=source,
            length=length,
            target=self._area.base + call_offset(place),
            target_key=self._area.key,
            flag_target=self._area.base + flag_offset(place),
            flag_key=self._area.key,
            flag_value=generation,
            acked=True,
        )

    def over(self, under_way: _UnderWay) -> None:
        """A place is free again."""
        for tag in under_way.tags:
            self._link.operations.pop(tag, None)
        self._free.append(under_way.place)

    def answer(self, place: int) -> bytes:
        """The bytes in a place for answers."""
        at = self._start + place * ANSWER_BYTES
        length = min(length_said(self._memory[at : at + LENGTH_END]), ANSWER_BYTES)
        return self._memory[at : at + length]

    def lose(self, error: KvError) -> None:
        """A call was not answered, or not with an answer."""
        self._client.lose(self._link, error)


class _UnderWay:
    """One call, told of its events by the client's pump."""

    def __init__(self, calls: FabricCalls, place: int, generation: int, answered: Answered) -> None:
        self._calls = calls
        self.place = place
        self._generation = generation
        self._answered = answered
        self.tags: tuple[int, ...] = ()

    def event(self, event: Event) -> None:
        """Its answer came, or did not come in time, or it could not be sent."""
        if event.kind == EventKind.ACKED:
            self._take(event.value & _CODE_MASK)
        elif event.kind == EventKind.FAILED:
            self._calls.lose(FabricError.from_code("A call over the fabric", event.status))
        elif event.kind == EventKind.WATCH_FAILED:
            self._calls.lose(DeadlineExceeded("The node did not answer a call over the fabric in time."))

    def _take(self, code: int) -> None:
        answer: list[Leased] | KvError = []
        if code == AnswerCode.BYTES:
            try:
                answer = leases_of(self._calls.answer(self.place), self._generation)
            except KvError as error:
                answer = error
        self._calls.over(self)
        self._answered(answer)

    def lost(self, error: KvError) -> None:
        """The link is gone."""
        self._answered(error)
