"""The order in which records reach the drive, and the syncs that make them safe.

Always holds:

- The order rule ("Why jumping is sound" in the record format's page): generations are given in the order
  of allocation, and a record is published only when all with a lower generation have been written. After a
  failed write none with a higher one is published and nothing more is allocated, until the store is opened
  anew.
- A failed sync or write is never retried.
- A sync stands for what had ended when it began, and for nothing else.
- A record that finds no room waits, and all that come after it wait behind it, until `resume` finds room or
  `refuse_first` says that there will be none. So what comes free meanwhile is not taken bit by bit by smaller ones.

It doesn't know what records are for: their owners publish and report them.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import NoSpace, ReadOnly, StorageError
from kvstore.limits import GENERATION_MAX, PAGE_BYTES, UNSYNCED_FREES_MAX
from kvstore.storage.disk import DiskOp, DiskOpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.storage.extents import Extents
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.volume import Volume
    from kvstore.wire.record import Header

    AfterSync = Callable[[StorageError | None], None]

__all__ = ["Owner", "RecordWrite", "Writes", "write_error"]

_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Owner(Protocol):
    """Whoever writes records."""

    def publish(self, records: Sequence[RecordWrite]) -> None:
        """Make records that are whole on the drive known; StorageError if that cannot be."""
        ...

    def finish(self, record: RecordWrite, error: StorageError | None) -> None:
        """Report a record that was published, or one that never will be."""
        ...


class RecordWrite:
    """One record on its way to the drive."""

    reads: Final = False

    __slots__ = ("_writes", "address", "generation", "offset", "owner", "result", "size_bytes", "tenant")

    def __init__(self, writes: Writes, owner: Owner, address: int, size_bytes: int, tenant: bytes) -> None:
        self._writes = writes
        self.tenant = tenant  # whose turn it takes
        self.owner = owner
        self.address = address
        self.size_bytes = size_bytes
        self.generation = 0
        self.offset = 0
        self.result: int | None = None

    def header(self) -> Header:
        """Give the header, now that place and generation are known."""
        raise AssertionError("this record has no header")

    def begin(self, tag: int) -> DiskOp | None:
        """Take a place and a generation."""
        return self._writes.begin(self, tag)

    def end(self, result: int) -> None:
        """Take the result."""
        self.result = result
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
    ) -> None:
        """`note_synced` is told up to which generation all that was written survives power loss.

        `note_begun` is told of the last generation that was given before a record with it can be on the drive.
        """
        self._volume = volume
        self._note_synced = note_synced
        self._note_begun = note_begun
        self._extents = extents
        self._traffic = traffic
        traffic.about_to_start = self._fill_in
        self._bare: list[RecordWrite] = []  # begun, and without headers so far
        self._begun: deque[RecordWrite] = deque()  # given to the drive and not retired, by generation
        self._awaiting: list[AfterSync] = []
        self._unhurried: list[AfterSync] = []
        self._sync: _Sync | None = None
        self._waiting: deque[RecordWrite] = deque()  # for room
        self._resumed: RecordWrite | None = None  # had waited, and is queued again
        self.queued_pages = 0  # of all that have no place yet
        self.begun = self.ended = 0  # so many were given to the drive, and retired
        self._published_generation = self.synced_generation = volume.last_generation  # opening has synced
        note_synced(self.synced_generation)
        self._failed_generation = GENERATION_MAX + 1  # none at or above it will be reported as kept
        self.stopped: StorageError | None = None
        self.syncs = 0

    @property
    def waiting_for_sync(self) -> int:
        """How many are told when a sync has ended: the one under way, or one to come."""
        under_way = self._sync.awaited if self._sync is not None else []
        return len(self._awaiting) + len(self._unhurried) + len(under_way)

    @property
    def sync_failed(self) -> bool:
        """Tell whether nothing will ever be synced again."""
        return self._failed_generation == 0

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    @property
    def first_waiting(self) -> RecordWrite | None:
        """The record that has to find room next."""
        return self._waiting[0] if self._waiting else None

    def add(self, record: RecordWrite) -> None:
        """Queue a record."""
        self.queued_pages += record.size_bytes // PAGE_BYTES
        self._traffic.add(record)

    def resume(self) -> None:
        """Queue the record that has waited longest, before all others, if there is room for it now."""
        if not self._waiting or self._resumed is not None:
            return
        if self._waiting[0].size_bytes <= self._extents.longest * PAGE_BYTES:
            self._resumed = self._waiting.popleft()
            self._traffic.add_first(self._resumed)

    def refuse_first(self, error: StorageError) -> None:
        """Say that there will be no room for the record that has waited longest."""
        self._fail(self._waiting.popleft(), error)

    def settle_finished(self) -> None:
        """Publish and report what the drive has finished."""
        retired = []
        while self._begun and self._begun[0].result is not None:
            retired.append(self._begun.popleft())
        self.ended += len(retired)
        self._publish([record for record in retired if record.generation < self._failed_generation])
        for record in retired:
            record.owner.finish(
                record, self.stopped if record.generation >= self._failed_generation else None
            )
        self.sync_if_awaited()

    def after_sync(self, then: AfterSync, *, unhurried: bool = False) -> None:
        """Call back when all that has ended by now is synced, or never will be.

        What is unhurried waits until somebody else needs a sync, or too many wait.
        """
        if self.sync_failed:
            then(self.stopped_again())
        else:
            (self._unhurried if unhurried else self._awaiting).append(then)

    def sync_if_awaited(self, *, at_once: bool = False) -> None:
        """Queue a sync if somebody waits for one; while one is under way, the next gathers those who come."""
        hurry = self._awaiting or len(self._unhurried) > UNSYNCED_FREES_MAX or (at_once and self._unhurried)
        if hurry and self._sync is None:
            self._sync = _Sync(self)
            self._traffic.add_first(self._sync)

    def begin(self, record: RecordWrite, tag: int) -> DiskOp | None:
        """Give a record its place, its generation and its header."""
        was_resumed = record is self._resumed
        if was_resumed:
            self._resumed = None
        try:
            if self.stopped is not None:
                raise self.stopped_again()
            if self._waiting and not was_resumed:
                self._waiting.append(record)
                return None
            page = self._extents.allocate(record.size_bytes // PAGE_BYTES)
            if page is None:
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
        return DiskOp(DiskOpKind.WRITE, record.address, record.size_bytes, record.offset, tag)

    def _fill_in(self) -> None:
        """Make the headers of what has begun, all of it before the drive has any."""
        if self._bare:
            self._note_begun(self._bare[-1].generation)
            # What another tenant left in a slot must not reach the drive behind the payload.
            self._volume.codec.pack(
                (record.address, record.size_bytes, record.offset, record.header()) for record in self._bare
            )
            self._bare.clear()

    def begin_sync(self, sync: _Sync) -> None:
        """Let a sync that starts now stand for all that has ended."""
        sync.generation = self._published_generation
        sync.awaited = self._awaiting + self._unhurried
        self._awaiting, self._unhurried = [], []

    def synced(self, sync: _Sync, result: int) -> None:
        """Take the result of a sync: tell those that waited for it."""
        self._sync = None
        self.syncs += 1
        failure = None
        if result < 0:
            failure = ReadOnly(
                f"The drive could not be synced: {os.strerror(-result)}; it takes no more puts."
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
        """Take no more, and report none as kept that has this generation or a higher one."""
        self._failed_generation = min(self._failed_generation, generation)
        if self.stopped is None or isinstance(self.stopped, NoSpace):
            self.stopped = error

    def stopped_again(self) -> StorageError:
        """Say to a later one why nothing is taken any more."""
        if isinstance(self.stopped, NoSpace):
            return NoSpace(str(self.stopped))
        return ReadOnly("The drive failed earlier and takes no more puts until the store is opened anew.")

    def _publish(self, records: list[RecordWrite]) -> None:
        by_owner: dict[Owner, list[RecordWrite]] = {}
        for record in records:
            by_owner.setdefault(record.owner, []).append(record)
        try:
            for owner, owned in by_owner.items():
                owner.publish(owned)
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store takes no more puts."), records[0].generation)
            return
        if records:
            self._published_generation = records[-1].generation

    def _take_generation(self) -> int:
        try:
            return self._volume.take_generation()
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store takes no more puts."), 0)
            raise

    def _fail(self, record: RecordWrite, error: StorageError) -> None:
        self.queued_pages -= record.size_bytes // PAGE_BYTES
        record.owner.finish(record, error)


class _Sync:
    """One fdatasync, for all that had ended when it began."""

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


def write_error(result: int) -> StorageError:
    """Give what a failed write means."""
    if -result in _FULL_ERRNOS:
        return NoSpace("The file system under the drive has no space left; the store takes no more puts.")
    return ReadOnly(f"The drive could not be written: {os.strerror(-result)}; it takes no more puts.")
