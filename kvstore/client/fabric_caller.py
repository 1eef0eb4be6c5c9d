"""Calls over the fabric, the client's side: written into a slot on the node, answered by a word in our memory.

A call's word is a row of its caller's group, which waits for it; only exceptional answers become events.

What always holds: a call ends once, by its answer, its deadline or the loss of the link. A call that isn't answered in
time ends the link, because it is unknown whether the node executed it. If all places are in use, a call waits in the C
core; if its deadline passes there, only the call ends, since the node was never asked. A call that is too long for a
place, or that finds too many waiting, is not begun, and its caller uses gRPC.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kvstore.errors import DeadlineExceeded, KvError, ProtocolError
from kvstore.limits import FABRIC_ANSWER_BYTES, FABRIC_CALL_BYTES, FABRIC_CALL_PLACES
from kvstore.wire.fabric_call import (
    LENGTH_END,
    TELLS,
    AnswerCode,
    count_of,
    flag_offset,
    header_bytes,
    leases_of,
    length_said,
)
from nic_offload.caller import Call, Caller
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import TriggeredPut

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from kvstore.client.link import Host, Link
    from kvstore.miss import Miss
    from kvstore.wire.fabric_call import CallKind, Leased, Metadata
    from kvstore.wire.kvstore_pb2 import CallArea
    from nic_offload.fabric import Event, Region
    from nic_offload.group import Group

__all__ = ["MEMORY_BYTES", "FabricCall", "FabricCalls"]

Failed: TypeAlias = "Callable[[KvError], object]"
Counted: TypeAlias = "Callable[[tuple[int, Miss | None]], object]"
T = TypeVar("T")

_NOT_SENT = frozenset((-errno.ETIMEDOUT, -errno.ECANCELED))  # nothing of it was sent, or ever will be
_ANSWERS_BYTES = FABRIC_CALL_PLACES * FABRIC_ANSWER_BYTES
MEMORY_BYTES = _ANSWERS_BYTES + FABRIC_CALL_PLACES * FABRIC_CALL_BYTES  # answers first, then calls


class FabricCalls:
    """The calls over a link. All methods are called with the client's lock held."""

    def __init__(
        self, client: Host, link: Link, area: CallArea, region: Region, memory: mmap.mmap, start: int
    ) -> None:
        self._client = client
        self._link = link
        self._area = area
        self._region = region
        self._memory = memory
        self._start = start  # of the answers, in that memory
        self.caller = Caller(
            link.endpoint,
            region,
            link.peer,
            (area.base, area.key),
            region.address,
            region.address + start + _ANSWERS_BYTES,
            region.address + start,
            area.first_generation,
            link.take_words(FABRIC_CALL_PLACES),
        )

    def begin(
        self,
        kind: CallKind,
        fingerprint: bytes,
        metadata: Metadata,
        blocks: int,
        rows: bytes,
        deadline_ns: int,
        tag: int,
        group: Group,
        row: int,
        failed: Failed,
        *,
        good_code: AnswerCode,
        blocks_deadline_ns: int = 0,
        tells: bool = False,
        durability: int = 0,
        lease_ms: int = 0,
        expires_unix_ms: int = 0,
        wanted: Sequence[int] | None = None,
        counted: Counted | None = None,
    ) -> FabricCall | None:
        """Make a call, now or when a slot is free. It ends with a row's completion; None if it can't be made this way.

        `wanted`: a fetch's target addresses in our own memory; see `Caller.call`.

        `failed` is called, with the client's lock held, if the answer is not `good_code` or never comes; `counted`
        instead if it is that of a prefix, with the number of its blocks and the next one's miss. From `tag` on,
        each block of a fetch has two tags, followed by two of the call itself.
        """
        call = Call(
            tag,
            deadline_ns,
            blocks_deadline_ns,
            expires_unix_ms,
            group,
            row,
            blocks,
            lease_ms,
            kind,
            TELLS if tells else 0,
            durability,
            good_code,
            fingerprint,
        )
        if self.caller.call(call, header_bytes(metadata), rows, wanted) < 0:
            return None
        return FabricCall(self, tag, group, row, failed, counted)

    def first_word(self, tag: int, deadline_ns: int) -> TriggeredPut:
        """A word behind the flags that the node ignores: writing it only makes the connection."""
        return TriggeredPut(
            tag=tag,
            endpoint=self._link.endpoint,
            peer=self._link.peer,
            region=self._region,
            source=self._region.address,
            length=0,
            target=0,
            target_key=0,
            flag_target=self._area.base + flag_offset(FABRIC_CALL_PLACES),
            flag_key=self._area.key,
            flag_value=1,
            deadline_ns=deadline_ns,
        )

    def leases(self, tag: int) -> list[Leased]:
        """The leases in the answer to a call; its slot is free again."""
        return self._read(tag, leases_of)

    def count(self, tag: int) -> tuple[int, Miss | None]:
        """As `counted` gets it; the answer's slot is free again."""
        return self._read(tag, count_of)

    def _read(self, tag: int, parse: Callable[[bytes, int], T]) -> T:
        found = self.caller.answer(tag)
        if found is None:
            raise ProtocolError("The node's answer to a call over the fabric does not match the call.")
        place, generation = found
        try:
            return parse(self.answer(place, generation), generation)
        finally:
            self.caller.read(tag)

    def answer(self, place: int, generation: int) -> bytes:
        """The bytes in an answer's slot; ProtocolError if the node did not write them for this call."""
        at, endpoint = self._start + place * FABRIC_ANSWER_BYTES, self._link.endpoint
        length = min(
            length_said(self._memory[at : at + LENGTH_END]), FABRIC_ANSWER_BYTES - endpoint.tag_bytes
        )
        data = self._memory[at : at + length + endpoint.tag_bytes]
        there = self._region.address + at
        if not endpoint.believes(self._region, there, generation, data[:length], data[length:]):
            raise ProtocolError("An answer over the fabric did not come from the node.")
        return data[:length]

    def lose(self, error: KvError) -> None:
        """A call got no answer, or an invalid one."""
        self._client.lose(self._link, error)


class FabricCall:
    """One call. All methods are called with the client's lock held."""

    def __init__(
        self,
        calls: FabricCalls,
        tag: int,
        group: Group,
        row: int,
        failed: Failed,
        counted: Counted | None = None,
    ) -> None:
        self._calls = calls
        self._tag = tag
        self._group, self._row = group, row
        self._failed, self._counted = failed, counted

    @property
    def is_answered(self) -> bool:
        """Whether the node has accepted the call and will send no more."""
        return self._group.row(self._row).code == AnswerCode.DONE

    def event(self, event: Event) -> None:
        """The answer is an error or late, or the call could not be sent."""
        if event.kind == EventKind.ACKED:
            try:
                if self._counted is None:
                    self.leases()
                else:
                    self._counted(self._calls.count(self._tag))
            except KvError as error:
                self._failed(error)
            self._group.end(self._row)
        elif event.kind == EventKind.FAILED and event.status in _NOT_SENT:
            late = DeadlineExceeded("The deadline passed before the node was called.")
            late.was_tried = False
            self._failed(late)
            self._group.end(self._row)
        elif event.kind == EventKind.FAILED:
            self._calls.lose(FabricError.from_code("A call over the fabric", event.status))
        elif event.kind == EventKind.WATCH_FAILED:
            self._calls.lose(DeadlineExceeded("The node did not answer a call over the fabric in time."))

    def leases(self) -> list[Leased]:
        """The leases in the answer; its slot is free again."""
        return self._calls.leases(self._tag)

    def lost(self, error: KvError) -> None:
        """The link is gone."""
        if not self.is_answered:
            self._failed(error)
            self._group.end(self._row)
