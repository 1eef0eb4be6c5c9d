"""Calls over the fabric, the client's side: put into a place of the node's, answered by a word in our memory.

A call's word is a row of its caller's group, which waits for it; only what is no good answer comes as an event.

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
    from nic_offload.group import Group

__all__ = ["MEMORY_BYTES", "FabricCall", "FabricCalls"]

Failed: TypeAlias = "Callable[[KvError], object]"

_ANSWERS_BYTES = CALL_PLACES * ANSWER_BYTES
MEMORY_BYTES = _ANSWERS_BYTES + CALL_PLACES * CALL_BYTES  # answers first, then calls


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
        self._under_way: set[FabricCall] = set()

    def begin(
        self,
        kind: CallKind,
        fingerprint: bytes,
        metadata: Metadata,
        blocks: int,
        rows: bytes,
        deadline_ns: int,
        group: Group,
        row: int,
        failed: Failed,
        *,
        good_code: AnswerCode,
        tells: bool = False,
        durability: int = 0,
        lease_ms: int = 0,
        expires_unix_ms: int = 0,
    ) -> FabricCall | None:
        """Make a call, whose end is a row's; None if it can't be made this way.

        `failed`, with the client's lock held, hears an answer beyond `good_code`, or that there will be none.
        """
        place = self._free_place()
        if place is None:
            return None
        generation, word = self._next[place], self._words[place]
        flags = TELLS if tells else 0
        call = Call(
            generation, kind, word, fingerprint, metadata, flags, durability, lease_ms, expires_unix_ms
        )
        data = call_bytes(call, blocks, rows)
        if data is None:
            return None
        at = self._start + _ANSWERS_BYTES + place * CALL_BYTES
        self._memory[at : at + len(data)] = data
        link, fabric = self._link, self._client.fabric
        tag = self._client.next_tags()
        watch = AckWatch(
            tag=tag + 1,
            endpoint=link.endpoint,
            word=link.word_address(word),
            generation=generation,
            deadline_ns=deadline_ns,
            final_code=AnswerCode.DONE,
            group=group,
            good_max=good_code,
            row=row,
        )
        try:
            watch_acks(fabric, [watch])
            arm(fabric, [self._put(tag, place, generation, self._region.address + at, len(data))])
        except FabricError:  # it has as much to do as it takes: nothing went out
            fabric.cancel([tag + 1])
            return None
        self._free.remove(place)
        self._next[place] += 1
        under_way = FabricCall(self, tag, place, generation, group, row, failed)
        self._under_way.add(under_way)
        link.operations[tag] = under_way
        return under_way

    def _free_place(self) -> int | None:
        """One whose call is answered is free again, though who made it may wait for more."""
        if not self._free:
            for one in [one for one in self._under_way if one.is_answered]:
                one.over()
        return self._free[-1] if self._free else None

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

    def over(self, call: FabricCall) -> None:
        """A place is free again."""
        if call in self._under_way:
            self._under_way.remove(call)
            self._link.operations.pop(call.tag, None)
            self._free.append(call.place)

    def answer(self, place: int) -> bytes:
        """The bytes in a place for answers."""
        at = self._start + place * ANSWER_BYTES
        length = min(length_said(self._memory[at : at + LENGTH_END]), ANSWER_BYTES)
        return self._memory[at : at + length]

    def lose(self, error: KvError) -> None:
        """A call was not answered, or not with an answer."""
        self._client.lose(self._link, error)


class FabricCall:
    """One call. All methods are called with the client's lock held."""

    def __init__(
        self,
        calls: FabricCalls,
        tag: int,
        place: int,
        generation: int,
        group: Group,
        row: int,
        failed: Failed,
    ) -> None:
        self.tag = tag
        self.place = place
        self._calls = calls
        self._generation = generation
        self._group, self._row = group, row
        self._failed = failed

    @property
    def is_answered(self) -> bool:
        """Whether the node has taken it, and has no more to say."""
        return self._group.row(self._row).code == AnswerCode.DONE

    def event(self, event: Event) -> None:
        """Its answer is no good one, or did not come in time, or it could not be sent."""
        if event.kind == EventKind.ACKED:
            try:
                self.leases()
            except KvError as error:
                self._failed(error)
            self._group.end(self._row)
        elif event.kind == EventKind.FAILED:
            self._calls.lose(FabricError.from_code("A call over the fabric", event.status))
        elif event.kind == EventKind.WATCH_FAILED:
            self._calls.lose(DeadlineExceeded("The node did not answer a call over the fabric in time."))

    def leases(self) -> list[Leased]:
        """What the answer has of leases; the call is over."""
        try:
            return leases_of(self._calls.answer(self.place), self._generation)
        finally:
            self.over()

    def over(self) -> None:
        """Nothing more is wanted of it."""
        self._calls.over(self)

    def lost(self, error: KvError) -> None:
        """The link is gone."""
        if not self.is_answered:
            self._failed(error)
            self._group.end(self._row)
