"""The store: blocks and sessions in and out of one drive, for one thread, without asyncio.

The node's loop calls `put` and `get`, watches `fileno()` for reading and calls `poll()` when it is
readable. Callbacks are called from `poll` (and from `close`, which polls) and from nowhere else; they may
call the store again.

Always holds: what is reported as kept is kept as the durability says; what is handed out has a checked
header and a CRC to check (see `GetDone`); memory of a slot is not touched after its report; everything
accepted is reported.

It doesn't choose what to evict: a full drive is NoSpace until somebody names what may go. It knows no
connections, leases or tenants' rights.
"""

from __future__ import annotations

import os
import select
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvstore.errors import Corrupt, Overloaded, ProtocolError, ReadOnly, StorageError
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    DELETES_QUEUED_MAX,
    HEADER_BYTES,
    PAGE_BYTES,
    SESSIONS_QUEUED_MAX,
    STORE_QUEUED_MAX,
)
from kvstore.miss import Miss, MissReason
from kvstore.storage.deletes import Deletes
from kvstore.storage.folder import INDEX_NAME, FolderLock, open_drive_in
from kvstore.storage.gets import Gets
from kvstore.storage.index import Index, kernel_boot_id
from kvstore.storage.items import GetDone, Statistics
from kvstore.storage.manifests import Manifests
from kvstore.storage.puts import Puts
from kvstore.storage.recovery import extents_around, rebuild
from kvstore.storage.sessions import Sessions
from kvstore.storage.superblock import EPOCH_FORMATTED, open_superblock
from kvstore.storage.traffic import Traffic
from kvstore.storage.volume import Volume
from kvstore.storage.wipes import Wipes
from kvstore.storage.writes import Writes
from kvstore.wire.record import record_bytes
from nic_offload.checksum import crc32c_at
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.storage.disk import DiskFactory, Progress
    from kvstore.storage.extents import Extents
    from kvstore.storage.index import Entry, Name
    from kvstore.storage.items import (
        DeleteItem,
        DeletesDone,
        GetItem,
        GetsDone,
        PutItem,
        PutsDone,
        SessionItem,
        SessionsDone,
    )
    from kvstore.storage.outbox import Outbox

__all__ = ["Store"]


class Store(Handle):
    """An open data folder."""

    def __init__(self, lock: FolderLock, volume: Volume, opened: _OpenedIndex, clock: Clock) -> None:
        """Take over open parts; `Store.open` makes them."""
        index = opened.index
        self._lock = lock
        self._volume = volume
        self._index = index
        self._boot_id = opened.boot_id
        self._extents = opened.extents
        self._traffic = Traffic(volume.disk)
        self._clock = clock
        self._writes = Writes(volume, self._extents, self._traffic)
        self._wipes = Wipes(self._writes, self._extents, self._traffic)
        self._puts = Puts(self._writes, self._wipes, index, clock)
        self._deletes = Deletes(self._writes, self._wipes, index, self._puts)
        self.manifests = Manifests(index)
        self._sessions = Sessions(self._writes, self._wipes, index, self.manifests, self._deletes)
        self._gets = Gets(
            volume.codec, index, self._extents, self._traffic, clock=clock, quarantine=self.quarantine
        )
        self._outboxes: tuple[Outbox[Any], ...] = (
            self._puts.outbox,
            self._gets.outbox,
            self._deletes.outbox,
            self._sessions.outbox,
        )
        self._rebuilt = opened.rebuilt
        self._quarantined = 0
        self._quarantined_bytes = 0
        self._closed = False

    @classmethod
    def open(
        cls,
        data: Path,
        *,
        capacity_bytes: int | None,
        clock: Clock,
        disk_factory: DiskFactory = open_drive_in,
        progress: Progress | None = None,
        boot_id: str | None = None,
    ) -> Store:
        """Open a data folder, making its drive if there is none and its index if it can't be believed."""
        with ExitStack() as undo:
            lock = FolderLock(data)
            undo.callback(lock.release)
            disk = disk_factory(data, capacity_bytes)
            undo.callback(disk.close)
            volume = Volume(disk, open_superblock(disk, clock, progress))
            opened = _open_index(data, lock, volume, boot_id or kernel_boot_id(), progress)
            store = cls(lock, volume, opened, clock)
            undo.pop_all()
        return store

    @property
    def name(self) -> str:
        """Tell the store's own name: the beginning of its uuid."""
        return self._volume.superblock.store_uuid.hex()[:12]

    @property
    def salt(self) -> bytes:
        """Give a secret of the store that never leaves the node, for the names of tenants."""
        return blake2b(key=self._volume.superblock.secret, person=b"tkv tenant salt").digest()

    def put(self, items: Sequence[PutItem], done: PutsDone) -> None:
        """Keep blocks; `done` gets each one's end. Overloaded, and nothing done, if the queue has no room."""
        self._check(items)
        if self._puts.outbox.promised + len(items) > STORE_QUEUED_MAX:
            raise Overloaded("The store has as many puts to do as it accepts.")
        self._puts.accept(items, done)
        self._set_off()

    def get(self, items: Sequence[GetItem], done: GetsDone) -> None:
        """Read blocks into slots; `done` gets each one's end, a miss BUSY if the queue has no room."""
        self._check(items)
        if self._gets.outbox.promised + len(items) > STORE_QUEUED_MAX:
            self._gets.refuse(items, done)
        else:
            self._gets.accept(items, done)
        self._set_off()

    def delete(self, items: Sequence[DeleteItem], done: DeletesDone) -> None:
        """Forget blocks for good; `done` gets each one's end. Overloaded, and nothing done, if there is no room."""
        self._check(items)
        if self._deletes.outbox.promised + len(items) > DELETES_QUEUED_MAX:
            raise Overloaded("The store has as many deletions to do as it accepts.")
        self._deletes.accept(items, done)
        self._set_off()

    def evict(self, generations: Sequence[int]) -> int:
        """Drop the blocks that have these generations, if there still are such; give the bytes that come free.

        They are free when nobody reads them and their headers are wiped; nobody is told.
        """
        self._check(generations)
        names = [name for name in self._index.names_of(generations) if name is not None]
        gone = self._deletes.drop(names)
        self._set_off()
        return sum(record_bytes(entry.length) for entry in gone if entry is not None)

    def change_sessions(self, items: Sequence[SessionItem], done: SessionsDone) -> None:
        """Do steps of sessions; `done` gets each one's end. Overloaded, and nothing done, if there is no room."""
        self._check(items)
        if any(len(item.keys) > BATCH_BLOCKS_MAX for item in items):
            raise ProtocolError(f"A session is appended at most {BATCH_BLOCKS_MAX} blocks at a time.")
        if self._sessions.outbox.promised + len(items) > SESSIONS_QUEUED_MAX:
            raise Overloaded("The store has as many changes of sessions to do as it accepts.")
        self._sessions.accept(items, done)
        self._set_off()

    def prefix(self, tenant: bytes, keys: Sequence[bytes]) -> int:
        """Tell how many of these keys, from the first on, are stored without a gap."""
        self._check(keys)
        return self._index.prefix(tenant, keys, self._clock.wall_ms())

    def names_of(self, generations: Sequence[int]) -> list[Name | None]:
        """Tell which block has each generation."""
        return self._index.names_of(generations)

    def lookup(self, keys: Sequence[tuple[bytes, bytes]]) -> list[Entry | None]:
        """Tell of each (tenant, key) what the index has; expired blocks are told too."""
        return self._index.lookup(keys)

    def verify_payload(self, item: GetItem, done: GetDone) -> GetDone:
        """Check the payload of a hit in its slot; give the hit, or the miss that it turned into."""
        if done.miss is not None:
            return done
        if crc32c_at(item.slot_address + HEADER_BYTES, done.length) == done.crc32c:
            return done
        self.quarantine(item.tenant, item.key, done.generation)
        return GetDone(done.tag, Miss(MissReason.CORRUPT, "the payload failed its CRC"))

    def quarantine(self, tenant: bytes, key: bytes, generation: int, *, wipe: bool = True) -> None:
        """Forget a block that failed a check. Its extent is not used again until the store is opened anew.

        Its header is wiped: it may be good, and would come back after a later deletion of the name.
        """
        name = (tenant, key)
        entry = self._index.lookup([name])[0]
        if entry is None or entry.generation != generation:
            return  # a newer one has taken its place, or it has been forgotten
        try:
            self._index.remove([name])
        except StorageError as error:  # the block will be checked, and missed, again
            self._writes.stop(ReadOnly(f"{error} The store takes no more puts."), 0)
            return
        if wipe:
            self._wipes.free([(entry.offset, entry.length)], reusable=False)
        self._quarantined += 1
        self._quarantined_bytes += record_bytes(entry.length)

    def poll(self) -> None:
        """Do what has become possible, and call the callbacks of what has ended."""
        self._traffic.poll()
        self._writes.settle_finished()
        self._wipes.settle_finished()
        self._writes.sync_if_awaited()
        self._traffic.pump()  # the sync that has become due, and what has been freed
        try:
            for outbox in self._outboxes:
                outbox.deliver()
        finally:
            self._wake_if_reports_wait()

    def fileno(self) -> int:
        """Give the descriptor that is readable when `poll` has something to do."""
        return self._volume.disk.fileno()

    def statistics(self) -> Statistics:
        """Tell where the store stands."""
        return Statistics(
            capacity_bytes=self._volume.superblock.capacity_bytes,
            free_bytes=self._extents.free_pages * PAGE_BYTES,
            blocks=len(self._index),
            quarantined=self._quarantined,
            quarantined_bytes=self._quarantined_bytes,
            puts_pending=self._puts.outbox.promised,
            gets_pending=self._gets.outbox.promised,
            deletes_pending=self._deletes.outbox.promised,
            sessions_pending=self._sessions.outbox.promised,
            wipes_pending=self._wipes.pending,
            drive_queued=self._traffic.queued,
            drive_in_flight=self._traffic.in_flight,
            drive_in_flight_bytes=self._traffic.in_flight_bytes,
            syncs=self._writes.syncs,
            takes_puts=self._writes.stopped is None,
            rebuilt=self._rebuilt,
        )

    def close(self) -> None:
        """Finish what was accepted, make it durable, and mark the index clean if the drive never failed."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last:
            last.callback(self._lock.release)
            last.callback(self._volume.disk.close)
            last.callback(self._index.abandon)
            self._drain()
            if self._writes.stopped is None:
                self._volume.end_epoch()  # the sync in it takes in all blocks as well
                self._index.close_clean(self._volume.superblock, self._boot_id)

    def _set_off(self) -> None:
        self._wipes.settle_finished()
        self._writes.sync_if_awaited()
        self._traffic.pump()
        self._wake_if_reports_wait()

    def _wake_if_reports_wait(self) -> None:
        # Reports are only given from `poll`, so those that need no drive have to bring it about.
        if any(self._outboxes):
            os.eventfd_write(self.fileno(), 1)

    def _drain(self) -> None:
        ready = select.poll()
        ready.register(self.fileno(), select.POLLIN)
        while self._is_busy():
            self._writes.sync_if_awaited(at_once=True)
            self._traffic.pump()
            if not (self._traffic.in_flight or any(self._outboxes)):
                raise StorageError("The store lost track of what it accepted, after an earlier exception.")
            ready.poll()
            self.poll()

    def _is_busy(self) -> bool:
        if any(outbox.promised for outbox in self._outboxes):
            return True
        return self._wipes.pending > 0 or self._writes.unhurried > 0

    def _check(self, items: Sequence[object]) -> None:
        if self._closed:
            raise StorageError("The store is closed.")
        if len(items) > BATCH_BLOCKS_MAX:
            raise ProtocolError(f"A batch has at most {BATCH_BLOCKS_MAX} blocks; this one has {len(items)}.")


@dataclass(frozen=True, slots=True)
class _OpenedIndex:
    """An index that agrees with the drive, and what follows from it."""

    index: Index
    extents: Extents
    boot_id: str
    rebuilt: bool


def _open_index(
    data: Path, lock: FolderLock, volume: Volume, boot_id: str, progress: Progress | None
) -> _OpenedIndex:
    """Take yesterday's index or build one anew, and begin an epoch: on the drive first, then in the index."""
    folder = data / INDEX_NAME
    index = Index.trusted(folder, volume.superblock, boot_id, lock.note)
    live, extents = None, None
    with ExitStack() as undo:
        if index is not None:
            undo.callback(index.abandon)
            with suppress(Corrupt):  # a trusted index that contradicts itself is not believed after all
                live, extents = extents_around(index, volume.superblock)
        blank = volume.superblock.epoch == EPOCH_FORMATTED
        rebuilt = (index is None or extents is None) and not blank
        if index is None or extents is None:
            undo.close()
            index = Index.empty(folder, volume.superblock.capacity_bytes)
            undo.callback(index.abandon)
            if rebuilt:
                volume.skip_generations(rebuild(volume.disk, volume.superblock, index, progress))
            live, extents = extents_around(index, volume.superblock)
        assert live is not None
        clean = blank or (index.was_clean and not rebuilt)
        volume.begin_epoch(None if clean else live)
        index.begin_epoch(volume.superblock, boot_id, lock)
        undo.pop_all()
    return _OpenedIndex(index, extents, boot_id, rebuilt)
