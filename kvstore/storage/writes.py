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
import logging
import os
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import BeingErased, KvError, NoSpace, ReadOnly, StorageError
from kvstore.limits import GENERATION_MAX, PAGE_BYTES, UNSYNCED_FREES_MAX
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.lane_ground import LaneGround, Lent
from kvstore.storage.sealing import NO_DOMAIN, Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.storage.extents import Extents
    from kvstore.storage.sealing import Keys
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.volume import Volume
    from kvstore.wire.record import Header
    from nic_offload.lane import Ground
    from nic_offload.vault import KeyName

    AfterSync = Callable[[StorageError | None], None]

__all__ = ["Owner", "RecordWrite", "Writes", "write_error"]

log = logging.getLogger(__name__)

_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Owner(Protocol):
    """A part of the store that writes records."""

    def publish(self, records: Sequence[RecordWrite]) -> None:
        """Publish records that are complete on the drive; StorageError if that fails."""
        ...

    def finish(self, records: Sequence[RecordWrite], error: KvError | None) -> None:
        """Report records that were published, or never will be."""
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
        self._extents = extents
        self._traffic = traffic
        traffic.about_to_start = self._fill_in
        self._bare: list[RecordWrite] = []  # begun, and without headers so far
        self._begun: deque[RecordWrite | Lent] = deque()  # given to the drive and not retired, by generation
        self.ground = LaneGround(volume, extents, note_begun, note_lent)
        self.lends = True  # whether ground is lent
        self._awaiting: list[AfterSync] = []
        self._unhurried: list[AfterSync] = []
        self._at_once = False  # the next sync must be soon
        self._sync: _Sync | None = None
        self._waiting: deque[RecordWrite] = deque()  # for room
        self._resumed: RecordWrite | None = None  # it waited, and is queued again
        self.queued_pages = 0  # of all records that have no place yet
        self.lane_pages = 0  # of the ground that the lane lacks
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

    @property
    def is_due(self) -> bool:
        """Whether `settle_finished` would go on at once, for example as the lane is now known to have left ground."""
        first = self._begun[0] if self._begun else None
        if isinstance(first, Lent):
            return first.is_over or not first.is_clear or bool(first.ended)
        return first is not None and first.result is not None

    def settle_finished(self) -> None:
        """Publish and report what the drive has finished."""
        retired: list[RecordWrite] = []
        while self._begun:
            first = self._begun[0]
            if isinstance(first, Lent):
                retired += self.ground.take_from(first)
                if not first.is_over:
                    break
            elif first.result is None:
                break
            else:
                retired.append(first)
                self.ended += 1
            self._begun.popleft()
        self._publish([record for record in retired if record.generation < self._failed_generation])
        self.ground.forget_over()
        failed = self._failed_generation
        for (owner, kept), some in groupby(retired, lambda one: (one.owner, one.generation < failed)):
            owner.finish(list(some), None if kept else self.stopped)
        self.sync_if_awaited()

    def publish_lane(self, generations: Sequence[int], publish: Callable[[], object]) -> StorageError | None:
        """Publish records that the lane has ended, in the order of generations; return why none was published."""
        self.ground.note_published(generations)
        failure = None
        try:
            self._refuse_if_deleted()
            publish()
        except StorageError as error:
            failure = ReadOnly(f"{error} The store accepts no more puts.")
            self.stop(failure, generations[0])
        else:
            self._published_generation = generations[-1]
        self.settle_finished()
        return failure

    @property
    def may_lend(self) -> bool:
        """Whether the lane may have ground: not while records of ours wait for room."""
        return self.lends and self.stopped is None and not self._waiting

    def have_ended(self, begun: int) -> bool:
        """Return whether this many writes have ended, and all records on lent ground."""
        return self.ended >= begun and not self.ground.lent

    def lend(self, pages: int, least_pages: int) -> bool:
        """Lend the lane this many pages, or as many as are contiguous; False if these are fewer than the least."""
        try:
            lent = self.ground.lend(pages, least_pages, self._begun[-1] if self._begun else None)
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store accepts no more puts."), 0)
            return False
        if lent is not None:
            self._begun.append(lent)
            self.settle_finished()
        return lent is not None and lent.left is None

    def lane_is_lost(self, error: StorageError) -> None:
        """Stop waiting for records on a lane's ground."""
        self.stop(error, 0)
        self.ground.end()

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
        self._at_once = self._at_once or at_once  # also for the sync after the one in progress
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
            self.ground.seal()
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
        if self.ground.lane is not None:
            self.ground.lane.fail()
            self.ground.seal()

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
            if records:
                self._refuse_if_deleted()
            for owner, owned in by_owner.items():
                owner.publish(owned)
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store accepts no more puts."), records[0].generation)
            return
        if records:
            self._published_generation = records[-1].generation

    def _refuse_if_deleted(self) -> None:
        # A file without a name can still be written, but the next start doesn't find it.
        try:
            self._volume.disk.refuse_if_deleted()
        except StorageError as error:
            log.warning("%s What it has is lost at the next start.", error)
            raise

    def _take_generation(self) -> int:
        try:
            return self._volume.take_generation()
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store accepts no more puts."), 0)
            raise

    def _fail(self, record: RecordWrite, error: KvError) -> None:
        self.queued_pages -= record.size_bytes // PAGE_BYTES
        record.owner.finish([record], error)


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
        raise NoSpace(f"The drive has no room for a record of {record.size_bytes} bytes now.")


def write_error(result: int) -> StorageError:
    """Return what a failed write means."""
    if -result in _FULL_ERRNOS:
        return NoSpace("The file system under the drive has no space left; the store accepts no more puts.")
    return ReadOnly(f"The drive could not be written: {os.strerror(-result)}; it accepts no more puts.")
