"""The order in which records reach the drive, and the syncs that make them safe.

Always holds:

- The order rule ("Why jumping is sound" in the record format's page): generations are given in the order
  of allocation, and a record is published only when all with a lower generation have been written. After a
  failed write none with a higher one is published and nothing more is allocated, until the store is opened
  again.
- A failed sync or write is never retried.
- A sync covers the writes that had ended when it began, and nothing else.
- A record that finds no room waits, and all later ones wait behind it, until `resume` finds room or `refuse_first`
  reports that there will be none. So freed pages are not taken bit by bit by smaller records meanwhile.
- A lane (`nic_offload.lane`) writes records itself, on the ground lent to it: pages and generations. Its ground
  is ordered among the records by generation, and is taken back before the next record of ours begins.
- An encrypted record waits until its domain has a key that survives power loss, and later ones of the same step of a
  session wait behind it. It is encrypted into separate memory: no slot is changed, nothing is written in the clear.

It doesn't know what records are for: their owners publish and report them.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import BeingErased, KvError, NoSpace, ReadOnly, StorageError
from kvstore.limits import GENERATION_MAX, LENT_MAX, LENT_RECORDS_MAX, PAGE_BYTES, UNSYNCED_FREES_MAX
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.sealing import NO_DOMAIN, Staging
from nic_offload.lane import Ground

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.storage.extents import Extents
    from kvstore.storage.sealing import Keys
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.volume import Volume
    from kvstore.wire.record import Header
    from nic_offload.vault import KeyName

    AfterSync = Callable[[StorageError | None], None]

__all__ = ["Lane", "Owner", "RecordWrite", "Writes", "write_error"]

_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Owner(Protocol):
    """A part of the store that writes records."""

    def publish(self, records: Sequence[RecordWrite]) -> None:
        """Publish records that are complete on the drive; StorageError if that fails."""
        ...

    def finish(self, records: Sequence[RecordWrite], error: KvError | None) -> None:
        """Report records that were published, or never will be."""
        ...


class Lane(Protocol):
    """The C core's writer, on ground lent to it."""

    def lend(self, ground: Ground) -> tuple[int, Ground] | None:
        """Replace its ground, and return the old one as `seal` does; None if it has failed."""
        ...

    @property
    def left(self) -> Ground:
        """The part of its ground that it has not used."""
        ...

    def seal(self) -> tuple[int, Ground]:
        """Take the ground back; return how many records are on it, and the unused rest."""
        ...

    def fail(self) -> None:
        """Begin no more writes, and report none."""
        ...

    def clear(self, generation: int) -> None:
        """Report its records below this generation, each once it and all earlier ones have completed."""
        ...


class RecordWrite:
    """One record being written."""

    reads: Final = False
    waits_for_room = True  # otherwise it is refused, with NoSpace, if there is none

    __slots__ = (
        "_writes",
        "address",
        "domain",
        "generation",
        "key_name",
        "offset",
        "order",
        "owner",
        "result",
        "size_bytes",
        "staged",
        "tenant",
    )

    def __init__(
        self,
        writes: Writes,
        owner: Owner,
        address: int,
        size_bytes: int,
        tenant: bytes,
        domain: bytes = NO_DOMAIN,
    ) -> None:
        self._writes = writes
        self.tenant = tenant  # the tenant whose turn it takes,
        self.domain = domain  # and the erase domain of that tenant
        self.key_name: KeyName | None = None  # the key that encrypts it
        self.staged = 0  # the address of its encrypted bytes, while it is being written
        self.owner = owner
        self.order: object = None  # records with one order are queued in the order in which they are added
        self.address = address
        self.size_bytes = size_bytes
        self.generation = 0
        self.offset = 0
        self.result: int | None = None

    def header(self) -> Header:
        """Return the header, now that place and generation are known."""
        raise AssertionError("this record has no header")

    def begin(self, tag: int) -> DiskOp | None:
        """Take a place and a generation."""
        return self._writes.begin(self, tag)

    def end(self, result: int) -> None:
        """Take the result."""
        self.result = result
        if self.staged:
            self._writes.staging.give_back(self.staged)
            self.staged = 0
        if result < 0:
            self._writes.stop(write_error(result), self.generation)


class Writes:
    """All records that are being written."""

    def __init__(
        self,
        volume: Volume,
        extents: Extents,
        traffic: Traffic,
        note_synced: Callable[[int], object],
        note_begun: Callable[[int], object],
        note_lent: Callable[[int, Ground | None], object] = lambda *_: None,
    ) -> None:
        """`note_synced` gets the generation up to which everything written survives power loss.

        `note_begun` gets the last generation that was given, before a record with it can be on the drive; `note_lent`
        gets ground, with a number, before a lane has it, until everything on it is published.
        """
        self._volume = volume
        self._keys = volume.keys
        self.staging = Staging()
        self.without_keys = 0  # records that wait for keys of their domains, or behind others that do
        self._behind: dict[
            object, deque[RecordWrite]
        ] = {}  # by order, for orders with a record that waits for its key
        self._note_synced = note_synced
        self._note_begun = note_begun
        self._note_lent = note_lent
        self._extents = extents
        self._traffic = traffic
        traffic.about_to_start = self._fill_in
        self._bare: list[RecordWrite] = []  # begun, and without headers so far
        self._begun: deque[RecordWrite | _Lent] = deque()  # given to the drive and not retired, by generation
        self.lane: Lane | None = None
        self.lends = True  # whether ground is lent
        self._lent: _Lent | None = None  # what the lane has now
        self._on_lanes: deque[_Lent] = deque()  # all that are not over
        self._awaiting: list[AfterSync] = []
        self._unhurried: list[AfterSync] = []
        self._at_once = False  # the next sync must be soon
        self._sync: _Sync | None = None
        self._waiting: deque[RecordWrite] = deque()  # for room
        self._resumed: RecordWrite | None = None  # it waited, and is queued again
        self.queued_pages = 0  # of all records that have no place yet
        self.begun = self.ended = self.syncs = 0  # records given to the drive, and retired; syncs
        self._published_generation = self.synced_generation = volume.last_generation  # opening has synced
        note_synced(self.synced_generation)
        self._failed_generation = GENERATION_MAX + 1  # none at or above it will be reported as kept
        self.stopped: StorageError | None = None

    @property
    def waiting_for_sync(self) -> int:
        """How many callers wait for a sync, in progress or later."""
        under_way = self._sync.awaited if self._sync is not None else []
        return len(self._awaiting) + len(self._unhurried) + len(under_way)

    @property
    def sync_failed(self) -> bool:
        """Return whether a sync has failed, so that none will succeed again."""
        return self._failed_generation == 0

    @property
    def waiting(self) -> int:
        """How many records wait for room."""
        return len(self._waiting)

    @property
    def first_waiting(self) -> RecordWrite | None:
        """The record that needs room next."""
        return self._waiting[0] if self._waiting else None

    def add(self, record: RecordWrite) -> None:
        """Queue a record."""
        self.queued_pages += record.size_bytes // PAGE_BYTES
        if self._keys is None:
            self._traffic.add(record)
        elif not self._queue_with_key(record, self._keys):
            self.without_keys += 1

    def _queue_with_key(self, record: RecordWrite, keys: Keys) -> bool:
        """Queue a record if its domain has a key, and return whether it has; otherwise one is made."""
        if record.order in self._behind:
            self._behind[record.order].append(record)
            return False
        record.key_name = keys.name_of(record.tenant, record.domain)
        if record.key_name is not None:
            self._traffic.add(record)
            return True
        if record.order is not None:
            self._behind.setdefault(record.order, deque())
        keys.ensure(record.tenant, record.domain, lambda error: self._has_key(record, keys, error))
        return False

    @property
    def encrypts(self) -> bool:
        """Whether records are encrypted."""
        return self._keys is not None

    def _has_key(self, record: RecordWrite, keys: Keys, error: StorageError | None) -> None:
        self.without_keys -= 1
        behind = self._behind.pop(record.order, deque())
        record.key_name = keys.name_of(record.tenant, record.domain)
        if record.key_name is None:  # it may have been erased meanwhile
            self.without_keys -= len(behind)
            for one in (record, *behind):
                self._fail(one, error or BeingErased())
            return
        self._traffic.add(record)
        while behind and self._queue_with_key(behind[0], keys):
            behind.popleft()
            self.without_keys -= 1
        if behind:
            self._behind[behind.popleft().order] = behind

    def resume(self) -> None:
        """Queue the record that has waited longest, before all others, if there is room for it now."""
        first = None if self._resumed is not None else self.first_waiting
        if first is not None and first.size_bytes <= self._extents.longest * PAGE_BYTES:
            self._resumed = self._waiting.popleft()
            self._traffic.add_first(self._resumed)

    def refuse_first(self, error: StorageError) -> None:
        """Refuse the record that has waited longest, because there will be no room for it."""
        self._fail(self._waiting.popleft(), error)

    def settle_finished(self) -> None:
        """Publish and report what the drive has finished."""
        retired: list[RecordWrite] = []
        while self._begun:
            first = self._begun[0]
            if isinstance(first, _Lent):
                retired += self._take_from(first)
                if not first.is_over:
                    break
            elif first.result is None:
                break
            else:
                retired.append(first)
                self.ended += 1
            self._begun.popleft()
        self._publish([record for record in retired if record.generation < self._failed_generation])
        while self._on_lanes and self._on_lanes[0].is_over:
            self._note_lent(self._on_lanes.popleft().place, None)
        failed = self._failed_generation
        for (owner, kept), some in groupby(retired, lambda one: (one.owner, one.generation < failed)):
            owner.finish(list(some), None if kept else self.stopped)
        self.sync_if_awaited()

    @property
    def needs_ground(self) -> bool:
        """Whether the lane has little ground left or none, and no record of ours is about to take it back."""
        lane = self.lane
        if lane is None or not self.lends or self.stopped is not None or self.queued_pages or self._waiting:
            return False
        return self._lent is None or self._lent.is_low(lane.left)

    def lend(self, pages: int) -> None:
        """Lend the lane ground that it needs: this many pages, or as many as are contiguous.

        It gives back what is left of its ground in the same step, so it is never without.
        """
        lane = self.lane
        assert lane is not None
        pages = min(pages, self._extents.longest)
        records = min(pages // 2, LENT_RECORDS_MAX)
        if not records or len(self._on_lanes) >= LENT_MAX:
            return
        page = self._extents.allocate(pages)
        if page is None:
            return
        try:
            generation = self._volume.take_generations(records)
        except StorageError as error:
            self._extents.release(page, pages, unwritten=True)
            self.stop(ReadOnly(f"{error} The store accepts no more puts."), 0)
            return
        taken = {lent.place for lent in self._on_lanes}
        place = next(place for place in range(LENT_MAX) if place not in taken)
        ground = Ground(page, generation, pages, records)
        self._note_begun(generation + records - 1)
        self._note_lent(place, ground)
        lent, before = _Lent(ground, place), self._lent
        # If nothing else lies between two grounds of a lane, it keeps the order on both itself.
        is_next = before is not None and self._begun[-1] is before and before.is_clear
        self._begun.append(lent)
        self._on_lanes.append(lent)
        given_back = lane.lend(ground)
        if given_back is None:
            lent.left = 0
            self._extents.release(page, pages, unwritten=True)
        else:
            self._lent = lent
            if before is not None:
                self._take_back(before, *given_back)
            if is_next:
                self._clear(lent)
        self.settle_finished()

    def have_ended(self, begun: int) -> bool:
        """Return whether this many writes have ended, and all records on lent ground."""
        return self.ended >= begun and not self._on_lanes

    def seal(self) -> None:
        """Take back what the lane has not used."""
        lent, self._lent = self._lent, None
        if lent is None or self.lane is None:
            return
        self._take_back(lent, *self.lane.seal())

    def _take_back(self, lent: _Lent, used: int, left: Ground) -> None:
        lent.left = used - lent.told
        if left.pages:
            self._extents.release(left.page, left.pages, unwritten=True)

    def ended_on_lane(self, ended: Iterable[tuple[RecordWrite, int, int, int]]) -> None:
        """Note the lane's records in the order of their generations, with generation, offset and result of each."""
        for record, generation, offset, result in ended:
            lent = next(lent for lent in self._on_lanes if generation < lent.until)
            record.generation, record.offset, record.result = generation, offset, record.size_bytes
            lent.told += 1
            if lent.left is not None:
                lent.left -= 1
            lent.ended.append(record)
            if result:
                record.end(result)

    def lane_is_lost(self, error: StorageError) -> None:
        """Stop waiting for records on a lane's ground."""
        self.stop(error, 0)
        for lent in self._on_lanes:
            lent.left = 0

    def _take_from(self, lent: _Lent) -> Sequence[RecordWrite]:
        """The records that have ended on ground that is the first of everything under way."""
        if not lent.is_clear:
            self._clear(lent)
        ended, lent.ended = lent.ended, []
        return ended

    def _clear(self, lent: _Lent) -> None:
        lent.is_clear = True
        if self.lane is not None:
            self.lane.clear(lent.until)

    def after_sync(self, then: AfterSync, *, unhurried: bool = False) -> None:
        """Call back when everything that has ended so far is synced, or never will be.

        An unhurried callback waits until another one needs a sync, or too many wait.
        """
        if self.sync_failed:
            then(self.stopped_again())
        else:
            (self._unhurried if unhurried else self._awaiting).append(then)

    def sync_if_awaited(self, *, at_once: bool = False) -> None:
        """Queue a sync if a record waits for one; records that arrive during a sync wait for the next."""
        self._at_once = self._at_once or at_once  # also if one is under way, behind which the next one comes
        hurry = (
            self._awaiting or len(self._unhurried) > UNSYNCED_FREES_MAX or (self._at_once and self._unhurried)
        )
        if hurry and self._sync is None:
            self._sync, self._at_once = _Sync(self), False
            self._traffic.add_first(self._sync)

    def begin(self, record: RecordWrite, tag: int) -> DiskOp | None:
        """Assign a record its place, its generation and its header."""
        was_resumed = record is self._resumed
        if was_resumed:
            self._resumed = None
        try:
            if self.stopped is not None:
                raise self.stopped_again()
            if self._waiting and not was_resumed:
                _refuse_unless_it_waits(record)
                self._waiting.append(record)
                return None
            self.seal()
            page = self._extents.allocate(record.size_bytes // PAGE_BYTES)
            if page is None:
                _refuse_unless_it_waits(record)
                self._waiting.appendleft(record)
                return None
            record.offset = page * PAGE_BYTES
            record.generation = self._take_generation()
        except StorageError as error:
            self._fail(record, error)
            return None
        self.queued_pages -= record.size_bytes // PAGE_BYTES
        if self._waiting:
            self.resume()
        self._bare.append(record)
        self._begun.append(record)
        self.begun += 1
        if self._keys is not None:
            record.staged = self.staging.take(record.size_bytes)
        return DiskOp(
            DiskOpKind.WRITE, record.staged or record.address, record.size_bytes, record.offset, tag
        )

    def _fill_in(self) -> None:
        """Fill in the headers of all writes that have begun, before the drive gets any of them."""
        if self._bare:
            self._note_begun(self._bare[-1].generation)
            # What another tenant left in a slot must not reach the drive after the payload.
            if self._keys is None:
                self._volume.codec.pack(
                    (record.address, record.size_bytes, record.offset, record.header())
                    for record in self._bare
                )
            else:
                self._encrypt(self._bare)
            self._bare.clear()

    def _encrypt(self, records: Sequence[RecordWrite]) -> None:
        """Encrypt begun records. For a domain that was erased since queueing, zeros are written."""
        rows = []
        for one in records:
            assert one.key_name is not None
            rows.append((one.address, one.staged, one.size_bytes, one.offset, one.key_name, one.header()))
        try:
            self._volume.codec.encrypt(rows)
        except KeyError:
            for row in rows:
                try:
                    self._volume.codec.encrypt([row])
                except KeyError:
                    ctypes.memset(row[1], 0, row[2])

    def begin_sync(self, sync: _Sync) -> None:
        """Begin a sync that covers all writes completed by now."""
        sync.generation = self._published_generation
        sync.awaited = self._awaiting + self._unhurried
        self._awaiting, self._unhurried = [], []

    def synced(self, sync: _Sync, result: int) -> None:
        """Handle the result of a sync: report the records that waited for it."""
        self._sync = None
        self.syncs += 1
        failure = None
        if result < 0:
            failure = ReadOnly(
                f"The drive could not be synced: {os.strerror(-result)}; it accepts no more puts."
            )
            self.stop(failure, 0)
            sync.awaited += self._awaiting + self._unhurried
            self._awaiting, self._unhurried = [], []
        else:
            self.synced_generation = sync.generation
            self._note_synced(sync.generation)
        for then in sync.awaited:
            then(failure)

    def stop(self, error: StorageError, generation: int) -> None:
        """Accept no more, and report no record of this or a higher generation as stored."""
        self._failed_generation = min(self._failed_generation, generation)
        if self.stopped is None or isinstance(self.stopped, NoSpace):
            self.stopped = error
        if self.lane is not None:
            self.lane.fail()
            self.seal()

    def stopped_again(self) -> StorageError:
        """Refuse a later record, with the reason why none is accepted."""
        if isinstance(self.stopped, NoSpace):
            return NoSpace(str(self.stopped))
        return ReadOnly("The drive failed earlier and accepts no more puts until the store is reopened.")

    def _publish(self, records: list[RecordWrite]) -> None:
        by_owner: dict[Owner, list[RecordWrite]] = {}
        for record in records:
            by_owner.setdefault(record.owner, []).append(record)
        try:
            for owner, owned in by_owner.items():
                owner.publish(owned)
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store accepts no more puts."), records[0].generation)
            return
        if records:
            self._published_generation = records[-1].generation

    def _take_generation(self) -> int:
        try:
            return self._volume.take_generation()
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store accepts no more puts."), 0)
            raise

    def _fail(self, record: RecordWrite, error: KvError) -> None:
        self.queued_pages -= record.size_bytes // PAGE_BYTES
        record.owner.finish([record], error)


class _Lent:
    """Ground that a lane has, or had, until everything on it is published."""

    __slots__ = ("ended", "ground", "is_clear", "left", "place", "told", "until")

    def __init__(self, ground: Ground, place: int) -> None:
        self.ground = ground
        self.until = ground.generation + ground.records
        self.place = place  # of its note
        self.ended: list[RecordWrite] = []  # and not retired
        self.told = 0  # how many have ended
        self.left: int | None = None  # how many have not, once no more begin
        self.is_clear = False  # all earlier ones have ended or are the lane's own, and the lane knows

    def is_low(self, unused: Ground) -> bool:
        """Whether the lane may use up the rest before the next check."""
        return 2 * unused.pages < self.ground.pages or 2 * unused.records < self.ground.records

    @property
    def is_over(self) -> bool:
        """Whether all its records have completed and were reported."""
        return self.left == 0 and not self.ended


class _Sync:
    """One fdatasync, for everything that had ended when it began."""

    __slots__ = ("_writes", "awaited", "generation")
    size_bytes: int = 0
    reads: Final = False
    tenant: Final = b""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self.generation = 0
        self.awaited: list[AfterSync] = []

    def begin(self, tag: int) -> DiskOp:
        self._writes.begin_sync(self)
        return DiskOp(DiskOpKind.SYNC, 0, 0, 0, tag)

    def end(self, result: int) -> None:
        self._writes.synced(self, result)


def _refuse_unless_it_waits(record: RecordWrite) -> None:
    if not record.waits_for_room:
        raise NoSpace("There is no room for it now.")


def write_error(result: int) -> StorageError:
    """Return what a failed write means."""
    if -result in _FULL_ERRNOS:
        return NoSpace("The file system under the drive has no space left; the store accepts no more puts.")
    return ReadOnly(f"The drive could not be written: {os.strerror(-result)}; it accepts no more puts.")
