"""Calls that arrive over the fabric: watched like blocks, executed like gRPC calls, answered with a word.

A fetch of blocks that are all on the shelf, or of few whose places on the drives are known (`cold_calls`), never comes
here, nor does a prefix of blocks that are all on the shelf: the C core answers it (`nic_offload.shelf`), and it is
recorded afterwards, before any query can ask for it.

Each connection has an area of `FABRIC_CALL_PLACES` places into which its client writes calls
(`kvstore.wire.fabric_call`), with a random key of its own. The caller is the client that attached: each call and its
flag carry a tag whose key no other client has (`kvstore.wire.seal`), and the connection ends when its client's
credentials are revoked.

What always holds: a place is watched for its next call before the last one is answered, so a client that waits for the
answer finds the place free. Anything but the next valid call ends the connection. The bytes of an answer are not reused
before the fabric is done with them. Tenants take turns, and after long work for one tenant it pauses (`time_slices`).
A call of many blocks is done in steps, and a tenant's such calls one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import secrets
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import KvError, Overloaded, ProtocolError
from kvstore.limits import (
    FABRIC_ANSWER_BYTES,
    FABRIC_CALL_PLACES,
    FABRIC_CALLS_MS,
    SHARES,
    SLOTS_A_STEP,
    TURN_BYTES,
)
from kvstore.lookups import Kind, Outcome
from kvstore.miss import Miss, MissReason
from kvstore.node.call_headers import FabricHeaders
from kvstore.node.calls import durability_of
from kvstore.node.connection import BlockRequest, check_count
from kvstore.node.connection_calls import fetch, in_steps, reserve
from kvstore.node.fail_stop import or_stop
from kvstore.node.fair_queue import FairQueue
from kvstore.node.stored_blocks import StoredBlocks
from kvstore.node.time_slices import Again
from kvstore.wire.ack import AckCode, code_of_miss
from kvstore.wire.fabric_call import (
    AREA_BYTES,
    LENGTH_END,
    ROWS,
    AnswerCode,
    CallKind,
    call_offset,
    count_bytes,
    error_bytes,
    flag_offset,
    leases_bytes,
    length_said,
    metadata_of,
    read_call,
)
from kvstore.wire.status import status_of
from nic_offload.trigger import Landing, TriggeredPut, arm, put_words, watch_landings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.node.cold_calls import ColdCalls
    from kvstore.node.connection import Connection
    from kvstore.node.hot import HotMemory
    from kvstore.node.node import Node
    from kvstore.wire.fabric_call import Call, Leased, Rows
    from nic_offload.fabric import Event
    from nic_offload.shelf import ColdCall, Served

__all__ = ["CallArea", "FabricCalls"]

log = logging.getLogger(__name__)

_ANSWERS = (
    2 * FABRIC_CALL_PLACES
)  # more than calls, because the fabric may be busy with the last of each place


class CallArea:
    """A connection's area for calls: where its client puts them, and the memory from which answers are sent."""

    def __init__(self, connection: Connection, answers_base: int, memory: HotMemory, *, shares: bool) -> None:
        self.connection = connection
        self.answers_base = answers_base  # in the client's memory
        self.first_generation = secrets.randbits(48) + 1
        fabric = connection.fabric
        self._calls = mmap.mmap(-1, AREA_BYTES)
        self._answers = mmap.mmap(-1, _ANSWERS * FABRIC_ANSWER_BYTES)
        self._region = fabric.register(self._calls, endpoint=connection.endpoint)
        self.region = fabric.register(self._answers, remote_write=False)
        self.free = list(range(_ANSWERS))
        acks = connection.acks
        self.desk = memory.shelf.open_desk(
            connection.endpoint,
            connection.peer,
            connection.tenant,
            connection.number,
            (acks.base, acks.key, acks.words),
            (AckCode.SERVED, code_of_miss(MissReason.CORRUPT)),
            memory.size_bytes // SHARES,
            (self._region.address + flag_offset(0), answers_base),
            shares=shares,
        )

    @property
    def base(self) -> int:
        """The address of the area in the client's fabric."""
        return self._region.base

    @property
    def key(self) -> int:
        """The key of the area's memory."""
        return self._region.key

    def watch(self, place: int, generation: int, tag: int) -> Landing:
        """Wait for a call in a place."""
        return Landing(
            tag=tag,
            endpoint=self.connection.endpoint,
            word=self._region.address + flag_offset(place),
            generation=generation,
            payload=self._region.address + call_offset(place),
            peer=self.connection.peer,
            ack_target=0,
            ack_key=0,
            ack_value=0,
            deadline_ns=0,
            length=0,  # a call has its own length and checksum
            quiet=True,
            desk=self.desk,
            region=self._region,
        )

    def take(self, place: int, generation: int) -> tuple[Call, Rows]:
        """The call that has arrived."""
        start, endpoint = call_offset(place), self.connection.endpoint
        length = length_said(self._calls[start : start + LENGTH_END])
        data = self._calls[start : start + length + endpoint.tag_bytes]
        flag = self._region.address + flag_offset(place)
        if not endpoint.believes(self._region, flag, generation, data[:length], data[length:]):
            raise ProtocolError("A call over the fabric did not come from the connection's client.")
        return read_call(data[:length], generation)

    def answer(self, place: int, number: int, data: bytes, call: Call, tag: int) -> TriggeredPut:
        """Send bytes from one of the places for answers, followed by the word."""
        connection, at = self.connection, number * FABRIC_ANSWER_BYTES
        target = self.answers_base + place * FABRIC_ANSWER_BYTES
        data += connection.endpoint.tag(target, connection.acks.key, call.generation, data)
        self._answers[at : at + len(data)] = data
        word = connection.word_put(call.ack_word, call.generation, AnswerCode.BYTES)
        return TriggeredPut(
            tag=tag,
            endpoint=connection.endpoint,
            peer=connection.peer,
            region=self.region,
            source=self.region.address + at,
            length=len(data),
            target=target,
            target_key=connection.acks.key,
            flag_target=word.target,
            flag_key=word.target_key,
            flag_value=word.value,
            sent=True,
        )

    def close(self) -> None:
        """Free the area. The connection's endpoint is closed: nothing arrives any more, and nothing is being sent."""
        self.desk.close()
        self._region.close()
        self.region.close()
        self._calls.close()
        self._answers.close()


class _Due(NamedTuple):
    """A call that waits for its tenant's turn."""

    event: Event
    tenant: bytes
    flow: Connection
    size_bytes: int = TURN_BYTES  # a turn is worth one


class FabricCalls:
    """The fabric calls of a node."""

    def __init__(self, node: Node, tags: Iterator[int], cold: ColdCalls) -> None:
        self._node = node
        self._tags = tags
        self.cold = cold
        self._areas: dict[Connection, CallArea] = {}
        self._watched: dict[int, tuple[CallArea, int]] = {}  # by tag: which place of which area
        self._due: FairQueue[_Due] = FairQueue()  # calls that have arrived: at most four of a connection
        self._again = Again(self._go_on)
        self._served_again = Again(or_stop(self.served))
        self._stored = StoredBlocks(node)
        self._long: set[asyncio.Task[None]] = set()  # calls of many blocks that are being done
        self._answering: dict[int, tuple[CallArea, int]] = {}  # by tag: with which of its places for answers

    def open(self, connection: Connection, answers_base: int) -> CallArea:
        """Accept calls of a connection from now on."""
        node = self._node
        area = CallArea(
            connection, answers_base, node.hot, shares=node.sharing is not None and node.sharing.shares_hot
        )
        self._areas[connection] = area
        self._watch(area, [(place, area.first_generation) for place in range(FABRIC_CALL_PLACES)])
        self.limits_changed()
        return area

    def limits_changed(self) -> None:
        """Apply new rate limits. Calls of a limited tenant are counted one by one, so all of them come to Python."""
        for connection, area in self._areas.items():
            area.desk.answers(answers=not connection.owner.rate.is_limited)

    def close(self, connection: Connection) -> None:
        """Stop watching a connection whose endpoint is closed."""
        area = self._areas.pop(connection, None)
        if area is None:
            return
        for under_way in (self._watched, self._answering):
            for tag in [tag for tag, (whose, _) in under_way.items() if whose is area]:
                del under_way[tag]
        area.close()

    def _watch(self, area: CallArea, due: Sequence[tuple[int, int]]) -> None:
        landings = []
        for place, generation in due:
            tag = next(self._tags)
            self._watched[tag] = area, place
            landings.append(area.watch(place, generation, tag))
        watch_landings(self._node.fabric, landings)

    def is_one(self, event: Event) -> bool:
        """Whether this event is the arrival of a call."""
        return event.tag in self._watched

    def served(self, _tag: int = 0) -> None:
        """Process calls that the C core has answered by itself."""
        node, used = self._node, list[int]()
        began_ns = node.clock.monotonic_ns()
        cold: list[tuple[Connection | None, Served, ColdCall]] = []
        for served in node.hot.shelf.served():
            connection = node.connections.get(served.desk)
            if served.cold is not None:
                cold.append((connection, served, served.cold))
            elif connection is not None:
                used += served.ids
                self._note(connection, served)
        node.hot.pages.touch(used)
        used += self.cold.note(cold)
        if used:
            node.store.used(used)
        if node.hot.shelf.has_more:  # clients can go on for ever, so others have half of the time
            self._served_again.within((node.clock.monotonic_ns() - began_ns) / 1e9)

    def _note(self, connection: Connection, served: Served) -> None:
        node, blocks = self._node, served.blocks
        node.turns.note_call(connection.tenant)
        try:
            headers = FabricHeaders(metadata_of(served.metadata))
        except ProtocolError:
            headers = FabricHeaders(())  # the call was answered anyway; its metadata is ignored
        if served.is_prefix:
            looking = node.lookups.begin(headers, connection.tenant, Kind.PREFIX, blocks)
            looking.all_are(Outcome.STORED)
            looking.was(served.began_ns, served.ended_ns)
            node.timings.called("Prefix", served.began_ns, None, served.ended_ns)
            return
        looking = node.lookups.begin(headers, connection.tenant, Kind.FETCH, blocks)
        looking.all_are(Outcome.MEMORY)
        looking.size_bytes = served.size_bytes
        looking.turn_ns = looking.sending_ns = served.began_ns
        for at in range(served.corrupt + served.failed):
            looking.outcomes[at] = Outcome.CORRUPT if at < served.corrupt else Outcome.GIVEN_UP
        looking.was(served.began_ns, served.ended_ns)
        node.counters.served(blocks, served.size_bytes, served.corrupt)
        node.timings.got_from_memory.note(served.ended_ns - served.began_ns, blocks)
        node.timings.called("Fetch", served.began_ns, None, served.ended_ns)
        if served.corrupt:
            log.error("a block in the hot memory failed its CRC: this machine's memory may be faulty")

    def cancel(self, connection: Connection, generations: Sequence[int]) -> None:
        """Cancel the C core's reads for a connection; each word confirms that, or follows bytes already sent."""
        area = self._areas.get(connection)
        if area is not None and area.desk.cancel(generations):
            self.served()

    def sent(self, event: Event) -> bool:
        """Whether the fabric is done with an answer; if so, its bytes may be reused."""
        area, number = self._answering.pop(event.tag, (None, 0))
        if area is None:
            return False
        area.free.append(number)
        return True

    def landed(self, events: Sequence[Event]) -> None:
        """Execute calls, one of each tenant in turn; of many, the rest in the loop's next round."""
        if events:  # process earlier writes, reads and sends first
            self._node.granted.catch_up_lanes()
            self._node.granted.take_written()
            self.served()
            self._node.fetches.settle()
            self.cold.feed()
        due = ((self._watched.get(event.tag), event) for event in events)
        self._due.add(
            _Due(event, one[0].connection.tenant, one[0].connection) for one, event in due if one is not None
        )
        self._go_on()

    def _go_on(self) -> None:
        clock, turns = self._node.clock, self._node.turns
        began_ns = clock.monotonic_ns()
        until_ns = began_ns + FABRIC_CALLS_MS * 1_000_000
        while (due := self._due.take(self._may)) is not None:
            turns.note_call(due.tenant)
            self._do(due.event)
            ended_ns = clock.monotonic_ns()
            turns.worked(due.tenant, ended_ns - began_ns)
            began_ns = ended_ns
            if ended_ns >= until_ns:
                break
        if self._due:
            self._again.within(0 if due else turns.rests_s())

    def _may(self, due: _Due) -> bool:
        return not self._node.turns.rests(due.tenant)

    def _do(self, event: Event) -> None:
        area, place = self._watched.pop(event.tag, (None, 0))
        if area is None:
            return  # an earlier event closed its connection
        try:
            call, rows = area.take(place, event.value)
        except ProtocolError as error:
            self._end(area, str(error))
            return
        self._watch(area, [(place, event.value + 1)])
        doing = self._doing(area, place, call, rows)
        if len(rows) > SLOTS_A_STEP:
            task = asyncio.get_running_loop().create_task(doing)
            self._long.add(task)
            task.add_done_callback(self._long.discard)
            return
        with suppress(StopIteration):
            doing.send(None)
            raise AssertionError("A call of one step waited.")

    async def _doing(self, area: CallArea, place: int, call: Call, rows: Rows) -> None:
        """Execute a call and answer it: at once, or with others' work between its steps."""
        connection = area.connection
        name = call.kind.name_in_proto
        began_ns = self._node.clock.monotonic_ns()
        failure = None
        try:
            is_long = len(rows) > SLOTS_A_STEP
            async with self._node.turns.whole(connection.tenant) if is_long else nullcontext():
                data = await self._done(area, call, rows)
        except KvError as error:
            self._node.counters.refused += isinstance(error, Overloaded)
            failure = status_of(error).name
            data = error_bytes(call.generation, error)
        except Exception:  # a bug: others' calls are still executed
            log.exception("a call over the fabric failed")
            self._end(area, "Its call failed in the node.")
            return
        if not connection.closed:
            self._answer(area, place, call, data)
        self._node.timings.called(name, began_ns, failure)

    async def _done(self, area: CallArea, call: Call, rows: Rows) -> bytes:
        node, number, owner = self._node, area.connection.number, area.connection.owner

        def find() -> Connection:
            return node.connection(number, owner)

        owner.rate.take(max(1, len(rows)))
        headers = FabricHeaders(call.metadata)
        if call.kind is CallKind.PREFIX:
            return await self._prefix(find, call, rows.keys, headers)
        if not call.kind.reserves:
            await fetch(
                node,
                find,
                len(rows),
                lambda step: [(call.fingerprint, row) for row in rows.fetch[step]],
                headers,
                called=False,
                shares=bool(call.flags & ROWS),
            )
            return b""
        leases: list[Leased] = []
        await reserve(
            node,
            find,
            len(rows),
            lambda step: [
                BlockRequest(row.key, call.fingerprint, row.length, row.ack_word, row.domain)
                for row in rows.reserve[step]
            ],
            durability_of(call.durability),
            call.lease_ms,
            call.expires_unix_ms,
            headers,
            leases.extend,
        )
        return leases_bytes(call.generation, leases)

    async def _prefix(
        self, find: Callable[[], Connection], call: Call, keys: Sequence[bytes], headers: FabricHeaders
    ) -> bytes:
        node, tenant = self._node, find().tenant
        check_count(len(keys))
        looking = node.lookups.begin(headers, tenant, Kind.PREFIX, len(keys))
        stored, miss = 0, None
        async for step in in_steps(len(keys)):
            some, miss = self._stored.prefix(tenant, call.fingerprint, keys[step])
            stored += some
            if miss is not None:
                break
        looking.all_are(Outcome.STORED, stored)
        if miss is not None:
            looking.missed(stored, keys[stored], MissReason(miss.reason))
        looking.over()
        return count_bytes(
            call.generation, stored, None if miss is None else Miss(MissReason(miss.reason), miss.detail)
        )

    def _answer(self, area: CallArea, place: int, call: Call, data: bytes) -> None:
        connection = area.connection
        try:
            if not data:
                done = connection.word_put(call.ack_word, call.generation, AnswerCode.DONE)
                put_words(self._node.fabric, [done])
            elif area.free:
                tag, number = next(self._tags), area.free.pop()
                self._answering[tag] = area, number
                arm(self._node.fabric, [area.answer(place, number, data, call, tag)])
            else:
                self._end(area, "It sends calls without waiting for answers.")
        except KvError as error:  # its word is invalid, or the fabric's queue is full
            self._end(area, str(error))

    def _end(self, area: CallArea, why: str) -> None:
        log.warning("%s The connection is closed.", why, extra=area.connection.about())
        self._node.detach(area.connection)
