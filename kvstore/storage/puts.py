"""The way of a block onto the drive: write, publish, sync, report.

Always holds:

- A put is reported only when its record is whole on the drive, in the index, and, if asked for, synced.
- The order rule ("Why jumping is sound" in the record format's page): generations are given in the order
  of allocation, and a put is reported only when all with a lower generation have been written. After a
  failed write none with a higher one is reported and nothing more is allocated, until the store is opened
  anew.
- A failed sync or write is never retried.
- A name is written once: later puts of it share the fate of the first, and of what is stored already.

It doesn't check payloads: `crc32c` is the caller's word.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.durability import Durability
from kvstore.errors import NoSpace, ReadOnly, StorageError
from kvstore.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    FINGERPRINT_BYTES,
    GENERATION_MAX,
    HEADER_BYTES,
    KEY_BYTES,
    PAGE_BYTES,
    TENANT_BYTES,
)
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.index import Entry
from kvstore.storage.items import PutDone, PutItem, PutsDone
from kvstore.storage.outbox import Outbox
from kvstore.wire.record import Header, Kind, record_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.storage.extents import Extents
    from kvstore.storage.index import Index, Name
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.volume import Volume

__all__ = ["Puts"]

_HeaderPage: Final = ctypes.c_char * HEADER_BYTES
_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Puts:
    """All puts that have not been reported yet."""

    def __init__(
        self, volume: Volume, index: Index, extents: Extents, traffic: Traffic, clock: Clock
    ) -> None:
        self._volume = volume
        self._index = index
        self._extents = extents
        self._traffic = traffic
        self._clock = clock
        self._by_name: dict[Name, _Write] = {}  # accepted and not published
        self._begun: deque[_Write] = deque()  # given to the drive and not retired, by generation
        self._unsynced: list[tuple[int, PutItem, PutsDone]] = []  # published, and wait for this generation
        self._sync: _Sync | None = None
        self._published_generation = self._synced_generation = volume.last_generation  # opening has synced
        self._failed_generation = GENERATION_MAX + 1  # none at or above it will be reported as kept
        self.stopped: StorageError | None = None
        self.outbox: Outbox[PutDone] = Outbox()
        self.syncs = 0

    def accept(self, items: Sequence[PutItem], done: PutsDone) -> None:
        """Take puts on; each is reported through the outbox, later or at once."""
        stored = self._index.lookup([(item.tenant, item.key) for item in items])
        self.outbox.promised += len(items)
        for item, entry in zip(items, stored, strict=True):
            refusal = _refusal(item)
            if refusal is not None:
                self._report(item, done, refusal)
            elif (first := self._by_name.get((item.tenant, item.key))) is not None:
                first.followers.append((item, done))
            elif entry is None or self._is_over(entry):
                write = _Write(self, item, done, replaces=entry)
                self._by_name[item.tenant, item.key] = write
                self._traffic.add(write)
            else:
                self._settle(item, done, entry)

    def settle_finished(self) -> None:
        """Publish and report what the drive has finished."""
        retired = []
        while self._begun and self._begun[0].result is not None:
            retired.append(self._begun.popleft())
        self._publish([write for write in retired if write.generation < self._failed_generation])
        for write in retired:
            self._finish(write, self.stopped if write.generation >= self._failed_generation else None)
        self.sync_if_awaited()

    def sync_if_awaited(self) -> None:
        """Queue a sync if somebody waits for one; while one is under way, the next gathers those who come."""
        if self._unsynced and self._sync is None:
            self._sync = _Sync(self)
            self._traffic.add_first(self._sync)

    def begin(self, write: _Write, tag: int) -> DiskOp | None:
        """Give a write its place, its generation and its header."""
        try:
            if self.stopped is not None:
                raise self._stopped_again()
            write.generation = self._take_generation()
            write.offset = self._allocate(write.size_bytes)
        except StorageError as error:
            self._finish(write, error)
            return None
        self._fill_in(write)
        self._begun.append(write)
        return DiskOp(DiskOpKind.WRITE, write.item.slot_address, write.size_bytes, write.offset, tag)

    def written(self, write: _Write, result: int) -> None:
        """Take the result of a write."""
        write.result = result
        if result < 0:
            self.stop(_write_error(result), write.generation)

    def begin_sync(self, sync: _Sync) -> None:
        """Let a sync that starts now stand for all that has been published."""
        sync.generation = self._published_generation

    def synced(self, sync: _Sync, result: int) -> None:
        """Take the result of a sync: report those that waited for it."""
        self._sync = None
        self.syncs += 1
        if result < 0:
            failure = ReadOnly(
                f"The drive could not be synced: {os.strerror(-result)}; it takes no more puts."
            )
            self.stop(failure, 0)
            waiting, self._unsynced = self._unsynced, []
            for _, item, done in waiting:
                self._report(item, done, failure)
            return
        self._synced_generation = sync.generation
        waiting, self._unsynced = self._unsynced, []
        for generation, item, done in waiting:
            self._await_sync(generation, item, done)

    def _take_generation(self) -> int:
        try:
            return self._volume.take_generation()
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store takes no more puts."), 0)
            raise

    def _allocate(self, size_bytes: int) -> int:
        page = self._extents.allocate(size_bytes // PAGE_BYTES)
        if page is None:
            raise NoSpace(f"The drive has no free extent of {size_bytes} bytes.")
        return page * PAGE_BYTES

    def _fill_in(self, write: _Write) -> None:
        item = write.item
        header = Header(
            Kind.BLOCK,
            item.key,
            item.tenant,
            item.fingerprint,
            write.generation,
            item.length,
            item.crc32c,
            item.expires_ms,
        )
        page = _HeaderPage.from_address(item.slot_address)
        self._volume.codec.pack(page, 0, header, write.offset)
        used_bytes = HEADER_BYTES + item.length
        # What another tenant left in the slot must not reach the drive behind the payload.
        ctypes.memset(item.slot_address + used_bytes, 0, write.size_bytes - used_bytes)

    def _publish(self, writes: Sequence[_Write]) -> None:
        if not writes:
            return
        replacing = [write for write in writes if write.replaces is not None]
        before = self._index.lookup([write.name for write in replacing])
        try:
            self._index.publish((write.name, write.entry()) for write in writes)
        except StorageError as error:
            self.stop(ReadOnly(f"{error} The store takes no more puts."), writes[0].generation)
            return
        self._published_generation = writes[-1].generation
        for write, old in zip(replacing, before, strict=True):
            # Gone if it was quarantined meanwhile; then its extent stays out of use.
            if old is not None and old == write.replaces:
                self._extents.release(old.offset // PAGE_BYTES, record_bytes(old.length) // PAGE_BYTES)

    def _finish(self, write: _Write, error: StorageError | None) -> None:
        del self._by_name[write.name]
        for item, done in ((write.item, write.done), *write.followers):
            if error is None:
                self._settle(item, done, write.entry())
            else:
                self._report(item, done, error)

    def _settle(self, item: PutItem, done: PutsDone, entry: Entry) -> None:
        """Report a put whose name is stored, as soon as it is as durable as this put asks."""
        if (entry.length, entry.fingerprint) != (item.length, item.fingerprint):
            self._report(
                item, done, StorageError("The key is stored already, with another length or layout.")
            )
        elif item.durability is Durability.SYNCED:
            self._await_sync(entry.generation, item, done)
        else:
            self._report(item, done, None)

    def _await_sync(self, generation: int, item: PutItem, done: PutsDone) -> None:
        if generation <= self._synced_generation:
            self._report(item, done, None)
        elif self._failed_generation == 0:
            self._report(item, done, self._stopped_again())
        else:
            self._unsynced.append((generation, item, done))

    def _report(self, item: PutItem, done: PutsDone, error: StorageError | None) -> None:
        self.outbox.add(done, PutDone(item.tag, error, max(item.durability, Durability.WRITTEN)))

    def _is_over(self, entry: Entry) -> bool:
        return entry.expires_ms != 0 and entry.expires_ms <= self._clock.wall_ms()

    def stop(self, error: StorageError, generation: int) -> None:
        """Take no more puts, and report none as kept that has this generation or a higher one."""
        self._failed_generation = min(self._failed_generation, generation)
        if self.stopped is None or isinstance(self.stopped, NoSpace):
            self.stopped = error

    def _stopped_again(self) -> StorageError:
        if isinstance(self.stopped, NoSpace):
            return NoSpace(str(self.stopped))
        return ReadOnly("The drive failed earlier and takes no more puts until the store is opened anew.")


class _Write:
    """One record on its way to the drive, and the later puts of its name."""

    reads: Final = False

    __slots__ = (
        "_puts",
        "done",
        "followers",
        "generation",
        "item",
        "offset",
        "replaces",
        "result",
        "size_bytes",
    )

    def __init__(self, puts: Puts, item: PutItem, done: PutsDone, replaces: Entry | None) -> None:
        self._puts = puts
        self.item = item
        self.done = done
        self.replaces = replaces
        self.followers: list[tuple[PutItem, PutsDone]] = []
        self.size_bytes = record_bytes(item.length)
        self.generation = 0
        self.offset = 0
        self.result: int | None = None

    @property
    def name(self) -> Name:
        return self.item.tenant, self.item.key

    def entry(self) -> Entry:
        item = self.item
        return Entry(
            self.offset, item.length, item.crc32c, self.generation, item.expires_ms, item.fingerprint
        )

    def begin(self, tag: int) -> DiskOp | None:
        return self._puts.begin(self, tag)

    def end(self, result: int) -> None:
        self._puts.written(self, result)


class _Sync:
    """One fdatasync, for all that had been published when it began."""

    __slots__ = ("_puts", "generation")
    size_bytes: int = 0
    reads: Final = False

    def __init__(self, puts: Puts) -> None:
        self._puts = puts
        self.generation = 0

    def begin(self, tag: int) -> DiskOp:
        self._puts.begin_sync(self)
        return DiskOp(DiskOpKind.SYNC, 0, 0, 0, tag)

    def end(self, result: int) -> None:
        self._puts.synced(self, result)


def _refusal(item: PutItem) -> StorageError | None:
    assert item.slot_address % PAGE_BYTES == 0
    if not BLOCK_BYTES_MIN <= item.length <= BLOCK_BYTES_MAX:
        return StorageError(
            f"A block has {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX} bytes; this one has {item.length}."
        )
    sizes = (len(item.tenant), len(item.key), len(item.fingerprint))
    if sizes != (TENANT_BYTES, KEY_BYTES, FINGERPRINT_BYTES):
        return StorageError(f"A tenant, a key or a fingerprint has the wrong size: {sizes}.")
    return None


def _write_error(result: int) -> StorageError:
    if -result in _FULL_ERRNOS:
        return NoSpace("The file system under the drive has no space left; the store takes no more puts.")
    return ReadOnly(f"The drive could not be written: {os.strerror(-result)}; it takes no more puts.")
