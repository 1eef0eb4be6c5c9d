"""Puts by grants on the node: takes blocks from the C core's receivers, and brings them to the drives.

A client writes into its slots without a call. The receiver (`nic_offload.receiver`) reads each block once, into a piece
of hot memory that it was given in advance, lists it on the shelf, and acknowledges `landed`. Everything here happens
afterwards and in batches: the store writes the block from that piece, its durability is acknowledged to the client, and
the piece stays as the hot copy. Blocks that lanes write are known here when they are written (`lane_blocks`), or when
something is asked of the node before that (`catch_up_lanes`).

What always holds: a landed block can be read from here until the store has it, and never after it was deleted. Its
piece is released when nothing reads, sends or writes it any more. A receiver without rooms delays only its own client.
An invalid put ends the connection.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.durability import Durability
from kvstore.errors import KeyTaken, Overloaded, ProtocolError
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    GRANTED_BYTES_MAX,
    GRANTED_GATHERED_PAGES_MAX,
    GRANTED_RETRY_MS,
    GRANTED_SLOTS,
    GRANTED_TAKE_MS,
    PAGE_BYTES,
    ROOMS_IDLE_TICKS,
    ROOMS_MIN,
)
from kvstore.node.call_headers import FabricHeaders
from kvstore.node.drive_lanes import LANE_TAG, DriveLanes
from kvstore.node.fair_queue import Places
from kvstore.node.just_landed import JustLanded
from kvstore.node.landing import LandingLayout
from kvstore.node.lane_blocks import WRITTEN, LaneBlocks, are_plain, count_uses
from kvstore.node.lane_quotas import LaneQuotas
from kvstore.node.put_area import Landed, PutArea, refusals
from kvstore.node.put_rooms import PutRooms
from kvstore.node.span_notes import End
from kvstore.node.throttle import Throttle
from kvstore.steps import Step
from kvstore.storage.index_layout import NAME_BYTES, names_in, names_of, split_names
from kvstore.storage.items import PutDone
from kvstore.wire.ack import AckCode, code_of_error
from kvstore.wire.fabric_call import metadata_of
from nic_offload.lane import written_in
from nic_offload.sender import METADATA_BYTES_MAX
from nic_offload.trigger import put_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.errors import KvError, StorageError
    from kvstore.node.connection import Connection
    from kvstore.node.fair_queue import Holder
    from kvstore.node.hot import Name
    from kvstore.node.node import Node
    from kvstore.storage.drive import Drive
    from kvstore.storage.index import Entry
    from nic_offload.lane import Written
    from nic_offload.receiver import Came, State
    from nic_offload.trigger import WordPut

__all__ = ["Granted"]

log = logging.getLogger(__name__)

_RETRY_S: Final = GRANTED_RETRY_MS / 1000
_WRITTEN: Final = Durability.WRITTEN
_ACKS: Final = {one: AckCode(one) for one in Durability}


class Granted:
    """The puts by grants of a node."""

    def __init__(self, node: Node, tenants_known: Callable[[], int]) -> None:
        self._node = node
        self._slots = Places(GRANTED_BYTES_MAX, tenants_known)  # bytes
        self._memory = node.hot
        self._rooms = PutRooms(node.hot, node.clock)
        self._areas: dict[int, PutArea] = {}  # by number of the connection
        self._leaving: set[PutArea] = set()  # closed ones, with blocks that the store has not accepted yet
        self.just_landed = JustLanded()
        self._by_tag: dict[int, Landed] = {}  # blocks passed to the store
        self._gathering: set[PutArea] = set()  # areas whose small blocks wait for each other
        self._store_at = 0  # store these once this many writes have ended
        self._heard = 0  # blocks taken from receivers
        self._taking = Throttle(node.clock, node.later, GRANTED_TAKE_MS, self.take_written)
        self._lanes = DriveLanes(node.store, node.fabric)
        self._lent = LaneQuotas(node.store.quotas)
        self._lane_blocks = LaneBlocks(node, self._areas, self._lent)

    def __len__(self) -> int:
        return len(self._by_tag) + sum(len(area.unheard) for area in self._every_area) + self._lanes.ahead

    @property
    def _every_area(self) -> list[PutArea]:
        return [*self._areas.values(), *self._leaving]

    def open(self, connection: Connection, *, shares: bool) -> PutArea | None:
        """Let a connection's client put by grants; None if it can't. `shares`: its slots may be mapped.

        A tenant with a rate limit reserves each slot instead, and so does a client whose tenant's share of slots is
        used up, or whose blocks are larger than the hot memory.
        """
        layout = LandingLayout(GRANTED_SLOTS, connection.layout.block_bytes_max)
        if connection.owner.rate.is_limited or layout.slot_bytes > self._memory.size_bytes:
            return None
        if layout.total_bytes > self._slots.left(connection.tenant):
            return None
        area = self._areas[connection.number] = PutArea(
            connection, self._memory, shares=shares, encrypts=self._node.store.keys is not None
        )
        self._slots.take(connection.tenant, layout.total_bytes)
        self._choose_way(area)
        return area

    def _choose_way(self, area: PutArea) -> None:
        """Configure the use of lanes: puts of a tenant with a quota use them only as far as pages of it were lent."""
        self._lent.take_back(area)
        area.is_limited = self._node.store.quotas.limits(area.connection.tenant)
        area.receiver.use(self._lanes.handed, is_limited=area.is_limited)

    def quotas_changed(self) -> None:
        """Apply changed quotas."""
        self.catch_up_lanes()  # pages were lent for what they have begun
        for area in self._areas.values():
            self._choose_way(area)

    def close(self, connection: Connection) -> None:
        """Close the area of a connection whose endpoint is closed: keep what has arrived, take the other rooms back."""
        area = self._areas.get(connection.number)
        if area is None:
            return
        self._take(area, every=True)
        self.catch_up_lanes()
        self._lent.take_back(area)
        self._store(area)
        self._leaving.update([area] if area.unheard else ())
        del self._areas[connection.number]
        self._gathering.discard(area)
        self._rooms.hungry.discard(area)
        self._rooms.empty(area)
        area.close()
        self._slots.give_back(connection.tenant, area.layout.total_bytes)

    # --- rooms

    def empty(self) -> None:
        """Take back all empty rooms."""
        for area in self._areas.values():
            self._rooms.empty(area)

    def tick(self) -> None:
        """Take rooms back from idle clients; give some to waiting ones."""
        for area in self._areas.values():
            area.idle_ticks += 1
            if area.idle_ticks == ROOMS_IDLE_TICKS:
                area.target = ROOMS_MIN
                self._rooms.hungry.discard(area)
                self._rooms.empty(area)
                self._lent.take_back(area)
        self._lanes.tick()
        self.feed_hungry()
        self._node.fetches.pump()

    def end(self) -> None:
        """Take back the lanes' ground: the fabric is about to be closed, and no client is left."""
        self._taking.end()
        self._lanes.seal()

    @property
    def is_hungry(self) -> bool:
        """Whether a client waits for memory."""
        return bool(self._rooms.hungry)

    def feed_hungry(self) -> None:
        """Retry clients that wait for memory, some of which may be free now."""
        for area in list(self._rooms.hungry):
            self.came(area.connection.number)

    # --- arrived blocks

    def handle(self, number: int) -> None:
        """Handle results of a receiver or lane. Small blocks that arrive while a drive is busy are batched."""
        if number == LANE_TAG:
            self._taking.ask()
            self._lend()
        elif (area := self._areas.get(number)) is not None:
            self._handle_area(area)
            self._free_ground()
            self._lanes.renew()

    def _lend(self) -> None:
        self._free_ground()
        self._lanes.lend()

    def _free_ground(self) -> None:
        """Add written blocks to the index if a lane wants ground: a full drive evicts only what is in the index."""
        if self._lanes.want_ground:
            self._taking.now()

    def _handle_area(self, area: PutArea) -> None:
        area.idle_ticks = 0
        state = self._take(area)
        begun, ended = self._node.store.writes
        if begun == ended or state.wanted_pages > GRANTED_GATHERED_PAGES_MAX:
            self._store(area)
        else:
            if not self._gathering:
                self._store_at = (begun + ended + 1) // 2
            self._gathering.add(area)
        self._taken(area, state)

    def store_gathered(self) -> None:
        """Handle completed drive work: once half of the queue has ended, store the blocks that arrived meanwhile."""
        if self._gathering and self._node.store.writes[1] >= self._store_at:
            self._store_all_gathered()

    def _store_all_gathered(self) -> None:
        gathering, self._gathering = self._gathering, set()
        for area in gathering:
            self._store(area)

    def came(self, number: int, *, every: bool = False) -> None:
        """Take a receiver's blocks, and pass them to the store; those that wait for a lane only if `every`."""
        area = self._areas.get(number)
        if area is not None:
            self._go_on(area, self._take(area, every=every))

    def _taken(self, area: PutArea, state: State) -> None:
        if state.broken:
            log.warning(
                "A slot received an invalid put. The connection is closed.", extra=area.connection.about()
            )
            self._node.detach(area.connection)
        else:
            self._lanes.record_pages = state.wanted_pages or self._lanes.record_pages
            self._rooms.feed(area, state)
            if self._lent.renew(area):
                self._lend()

    def take_all(self, *, every: bool = True) -> None:
        """Process everything that has arrived, before a query or a change. `every` is as in `came`.

        Only connections over which something has arrived are examined: most of a thousand clients are idle.
        """
        if every:
            self.catch_up_lanes()
        if self._memory.shelf.came != self._heard:
            for number in self._memory.shelf.waiting(len(self._areas)):
                self.came(number, every=every)
        self._store_all_gathered()
        self.take_written()

    def catch_up_lanes(self) -> None:
        """Learn of all blocks that lanes have begun: those that have ended are in the index then, the others known."""
        if self._lanes.ahead:
            self._note_written(self._lanes.begun())
            if numbers := self._publish_written():
                self._node.later(0, self._written, numbers)

    def before_others(self, names: Sequence[Name]) -> None:
        """Prepare puts of these names another way: no lane takes them; the store has what has landed, or Overloaded."""
        self._memory.stored(names)
        if self._lanes.ahead or self._gathering or self._memory.shelf.came != self._heard:
            self.take_all()
        first = [one for name in names if (one := self.just_landed.get(name)) is not None]
        if any(one.came.id not in self._by_tag for one in first):
            raise Overloaded("A block of this key that came before waits for the drive; try again later.")

    def removed(self, rows: NDArray[Any], *, are_replaced: bool) -> None:
        """Note that the index no longer has these blocks, given as its rows, or that puts replaced them."""
        if self.just_landed and not are_replaced:
            for name in names_of(rows):
                one = self.just_landed.get(name)
                if one is not None:
                    one.is_gone = True
        self._free_names(names_in(rows))

    def free_names(self, names: Sequence[Name]) -> None:
        """Free those of these names that are neither stored nor being put."""
        if names:
            data = b"".join([part for name in names for part in name])
            self._free_names(np.frombuffer(data, np.uint8).reshape(-1, NAME_BYTES))

    def _free_names(self, names: NDArray[np.uint8]) -> None:
        store, landed = self._node.store, self.just_landed.names
        if landed or store.has_puts:
            idle = [one not in landed and not store.is_putting(one) for one in split_names(names)]
            names = names[np.array(idle, np.bool_)]
        self._memory.gone(names[~store.stored(names.tobytes())].tobytes())

    def take_written(self) -> None:
        """Add written records of lanes to the index."""
        if numbers := self._publish_written():
            self._written(numbers)

    def _publish_written(self) -> set[int]:
        """Add written records of lanes to the index; return the numbers of their connections.

        Their memory is kept as the hot copies in the same step: a read that follows finds them there.
        """
        numbers: set[int] = set()
        for drive, data in self._lanes.take():
            rows = np.frombuffer(data, WRITTEN)
            numbers.update(np.unique(rows["tag"]).tolist())
            if self._node.spans is None and drive.takes_puts and are_plain(rows):
                self._lanes.ended(len(rows))
                self._heard += len(rows)
                self._end(*self._lane_blocks.take(drive, rows))
            else:
                self._end_each(drive, written_in(data))
        return numbers

    def _written(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.came(number)
        self._node.poll_store()
        self._memory_freed()

    def _end_each(self, drive: Drive, rows: Sequence[Written]) -> None:
        """Report written records to their drive, one by one."""
        self._note_written(row for row in rows if not row.was_reported)
        for row in rows:
            one = self._by_tag[row.came.id]
            one.is_answered, one.ended_ns = bool(row.is_answered), row.ended_ns
        drive.written((row.came.id, row.generation, row.offset, row.result, row.key) for row in rows)

    def _end(self, rows: NDArray[Any], error: StorageError | None) -> None:
        """End blocks that were written, unless there is an error, and whose memory is still theirs."""
        done: list[PutDone] = []
        for row in written_in(rows.tobytes()):
            area = self._areas[row.tag]
            piece = area.given_back(row.came.room)
            one = Landed(area, row.came, piece, row.came.landed_ns, row.came.landed_ns)
            one.is_answered, one.ended_ns = bool(row.is_answered), row.ended_ns
            self._by_tag[row.came.id] = one
            done.append(PutDone(row.came.id, error, _WRITTEN, 0 if error else row.generation))
        if done:
            self._kept(done)

    def _note_written(self, rows: Iterable[Written]) -> None:
        """Note blocks that lanes have begun to write."""
        by_area: dict[int, list[Came]] = {}
        for row in rows:
            by_area.setdefault(row.tag, []).append(row.came)
        for number, came in by_area.items():
            self._note(self._areas[number], came)

    def _take(self, area: PutArea, *, every: bool = False) -> State:
        """Take arrived blocks; `every` is as in `came`."""
        while True:
            came, state = area.receiver.take(every=every)
            if came:
                self._note(area, came)
            for error in refusals(state):
                self._node.timings.grant_refused(area.connection.tenant, error)
            if len(came) < BATCH_BLOCKS_MAX // 4:
                return state

    def _note(self, area: PutArea, came: Sequence[Came]) -> None:
        node, connection = self._node, area.connection
        self._heard += len(came)
        area.idle_ticks = 0
        node.turns.note_call(connection.tenant)
        leased_ns, landed_ns = came[0].landed_ns, came[-1].landed_ns
        every = [Landed(area, one, area.given_back(one.room), leased_ns, landed_ns) for one in came]
        self.just_landed.add(every)
        on_lanes: dict[int, list[Landed]] = {}
        headers: dict[bytes, list[Landed]] = {}
        for one, landed in zip(came, every, strict=True):
            (on_lanes.setdefault(one.under_way, []) if one.under_way else area.unheard).append(landed)
            if one.metadata_bytes:
                end = one.address + METADATA_BYTES_MAX
                data = ctypes.string_at(end - one.metadata_bytes, one.metadata_bytes)
                headers.setdefault(data, []).append(landed)
        if on_lanes:
            self._by_tag.update({one.came.id: one for some in on_lanes.values() for one in some})
            items = {lane: [one.item for one in some] for lane, some in on_lanes.items()}
            if area.lent_pages:
                lengths = [one.came.length for some in on_lanes.values() for one in some]
                self._lent.charge(area, sum(1 + -(-length // PAGE_BYTES) for length in lengths))
            self._lanes.report_begun(items, self._kept)
        node.counters.leased += len(came)
        node.counters.landed += len(came)
        for data, some in headers.items():
            self._record_metadata(connection, data, some)
        if area.has_our_clock:
            node.traces.fired_blocks += sum(one.flag_ns > 0 and one.trace is None for one in every)
        if node.spans is not None:
            node.spans.landed(((one, one.leased_ns) for one in every), landed_ns)
        if headers:  # blocks without metadata have no trace
            node.traces.saw(Step.LANDED, every, at_ns=landed_ns)

    def _record_metadata(self, connection: Connection, data: bytes, landed: Sequence[Landed]) -> None:
        node = self._node
        try:
            headers = FabricHeaders(metadata_of(data))
            trace = node.traces.of_call(headers, connection.tenant)
        except ProtocolError:
            return  # the metadata is invalid; the blocks are stored anyway
        node.traces.leased(trace, landed)
        if node.spans is not None and (parent := node.spans.parent_of(headers)) is not None:
            node.spans.leased(parent, landed[0].leased_ns, landed, landed[0].durability)

    def _store(self, area: PutArea) -> None:
        """Pass arrived blocks to the store, after those of their names that have come before, over any connection."""
        areas = [area]
        if any(one.came.is_stored for one in area.unheard):
            numbers = self._memory.shelf.waiting(len(self._areas))
            for number in numbers:
                if (other := self._areas.get(number)) is not None:
                    self._taken(other, self._take(other, every=True))
            areas = [one for one in self._every_area if one.unheard]
        self._store_all(areas)

    def _store_all(self, areas: Sequence[PutArea]) -> None:
        """Pass blocks to the store, as far as the drives accept them; others keep their rooms."""
        while unheard := sorted((one for area in areas for one in area.unheard), key=lambda one: one.came.id):
            self._memory.stored([one.name for one in unheard])  # no lane begins one of these any more,
            self.catch_up_lanes()  # and those that a lane has begun must be known
            some = unheard[:BATCH_BLOCKS_MAX]
            try:
                self._node.store.put([one.item for one in some], self._kept)
            except Overloaded:
                self._node.later(_RETRY_S, self._store_all, areas)
                return
            self._by_tag.update({one.came.id: one for one in some})
            for area in areas:
                area.unheard = [one for one in area.unheard if one.came.id not in self._by_tag]
            if any(not area.is_limited or area.lent_pages for area in areas):
                self._lend()
        self._leaving.difference_update([area for area in areas if not area.unheard])

    def _go_on(self, area: PutArea, state: State) -> None:
        if self._areas.get(area.connection.number) is area:
            self._store(area)
            self._taken(area, state)

    # --- how it ended

    def _kept(self, batch: Sequence[PutDone]) -> None:
        node = self._node
        landed = [self._by_tag.pop(done.tag) for done in batch]
        if all(one.ended_ns for one in landed):  # written by a lane, which has acknowledged them already
            now_ns = max(max(one.ended_ns, one.landed_ns) for one in landed)
        else:
            now_ns = node.clock.monotonic_ns()
        if node.spans is not None:
            ends = [End.FAILED if done.error else End.KEPT for done in batch]
            node.spans.ended(zip(landed, ends, strict=True), now_ns)
        words: list[WordPut] = []
        kept: dict[tuple[bytes, Durability], list[Landed]] = {}
        for one, done in zip(landed, batch, strict=True):
            if done.error is None:
                kept.setdefault((one.name[0], done.durability), []).append(one)
                if one.is_answered or not one.is_awaited:
                    continue
            connection, code = one.connection, self._code(one, done)
            if code is not None and not connection.closed:
                words.append(connection.word_put(one.came.ack_word, one.came.ack_generation, code))
        node.counters.kept(one.length for some in kept.values() for one in some)
        if words:
            put_words(node.fabric, words)
        self._settle(landed, batch)
        for (tenant, durability), some in kept.items():
            node.timings.leases_kept(tenant, durability, some, now_ns)
            node.traces.saw(Step.KEPT, some, durability.name.lower(), now_ns)

    def _code(self, one: Landed, done: PutDone) -> AckCode | None:
        """The next word for its client; None if it has all the words that it requested."""
        if done.error is not None:
            self._note_failure(one, done.error)
            return code_of_error(done.error) if one.is_awaited else None
        return AckCode.LANDED if one.durability is Durability.LANDED else _ACKS[done.durability]

    def _note_failure(self, one: Landed, error: KvError) -> None:
        connection = one.connection
        self._node.timings.lease_failed(connection.tenant, one, error)
        if not one.is_awaited:
            self._node.counters.lost(error)
            log.warning("a landed block could not be stored: %s", error, extra=connection.about())
            return
        level = logging.DEBUG if isinstance(error, KeyTaken) else logging.WARNING
        log.log(level, "a block could not be stored: %s", error, extra=connection.about())
        connection.failed(one.came.ack_generation, error)

    def _settle(self, landed: Sequence[Landed], batch: Sequence[PutDone]) -> None:
        """Finish puts that the store is done with: where it has the block, the piece stays as its hot copy."""
        memory, pages = self._memory, self._memory.pages
        freed: dict[Holder, int] = {}  # pages
        self.just_landed.end(landed)
        for one in landed:
            freed[one.area.holder] = freed.get(one.area.holder, 0) + pages.pages(one.piece)
        written = [
            (one, done.generation)
            for one, done in zip(landed, batch, strict=True)
            if done.generation and not one.is_gone and not pages.has(done.generation)
        ]
        generations = np.array([generation for _, generation in written], np.uint64)
        renamed = memory.shelf.rename(array("Q", [one.came.id for one, _ in written]), generations.tobytes())
        listed = set()
        for (one, generation), is_listed in zip(written, renamed, strict=True):
            if is_listed:
                pages.keep(one.piece, generation, *one.name)
                listed.add(one)
        count_uses(self._node, generations, np.frombuffer(renamed, np.uint8))
        if len(listed) < len(landed):
            self._settle_others([one for one in landed if one not in listed])
        pages.release_all([one.piece for one in landed])
        for holder, count in freed.items():
            memory.shares.release(holder, count * PAGE_BYTES)
        self._memory_freed()

    def _memory_freed(self) -> None:
        self._node.freed.set()
        self.feed_hungry()
        if self._node.fetches.waiting:  # they may have waited for this memory
            self._node.later(0, self._node.fetches.pump)

    def _settle_others(self, landed: Sequence[Landed]) -> None:
        """Settle blocks that the C core doesn't list, or of which no record was written."""
        memory, pages = self._memory, self._memory.pages
        entries = self._node.store.lookup([one.name for one in landed])
        hot: list[tuple[bytes, bytes, Entry | None]] = []
        for one, entry in zip(landed, entries, strict=True):
            if entry is not None and not one.is_gone and self._stays(one.came, entry):
                pages.keep(one.piece, entry.generation, *one.name)
                hot.append((*one.name, entry))
            else:
                pages.retire(one.piece, one.came.id)
        memory.shelve(hot)
        self.free_names([one.name for one, entry in zip(landed, entries, strict=True) if entry is None])

    def _stays(self, came: Came, entry: Entry) -> bool:
        """Whether the piece becomes the hot copy of the index's record; then the shelf lists it as that."""
        is_same = (entry.length, entry.crc32c, entry.fingerprint) == (
            came.length,
            came.crc32c,
            came.fingerprint,
        )
        if not is_same or self._memory.pages.has(entry.generation):
            return False
        shelf = self._memory.shelf
        ids, generations = array("Q", [came.id]), array("Q", [entry.generation])
        return shelf.rename(ids, generations) != b"\0" or shelf.take([came.id])[0]

    # --- readers

    def forget(self, names: Iterable[Name]) -> None:
        """Stop reading these here: their bytes have changed."""
        for name in names:
            one = self.just_landed.get(name)
            if one is not None:
                one.is_gone = True
                self._memory.stored([name])  # no lane takes this name until the store is done
                self._memory.unlist(b"".join(name))

    def of_domain(self, tenant: bytes, domain: bytes | None) -> list[Name]:
        """Return the names of a tenant's blocks that wait for the store, all or those of a domain."""
        areas = [area for area in self._every_area if area.connection.tenant == tenant]
        return [one.name for area in areas for one in area.unheard if domain in (None, one.came.domain)]

    def delete(self, names: Iterable[Name]) -> None:
        """Delete these here. Blocks not yet passed to the store never will be: they count as put and deleted."""
        gone = set(names)
        self._memory.stored(gone & self.just_landed.names)  # as in `forget`
        for area in self._every_area:
            over = [one for one in area.unheard if one.name in gone]
            if over:
                area.unheard = [one for one in area.unheard if one.name not in gone]
                self._by_tag.update({one.came.id: one for one in over})
                self._kept([PutDone(one.came.id, None, max(one.durability, _WRITTEN)) for one in over])
