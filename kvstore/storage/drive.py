"""One drive of a store: blocks and sessions in and out of it, for one thread, without asyncio.

The store calls `put` and `get`, watches `fileno()` for reading and calls `poll()` when it is readable. Callbacks
are called only from `poll` (and from `close`, which polls); they may call the store again.

Always holds: a block reported as kept is kept as its durability says; a block handed out has a checked header and a CRC
to check (see `GetDone`); memory of a slot is not touched after its report; everything accepted is reported.

Space is reclaimed by eviction (`kvstore.storage.reclaim`), in steps of `poll`, which also runs every `TIMER_TICK_MS`.
It asks other drives only which blocks and sessions they have, and reports its own to them (`others`).
"""

from __future__ import annotations

import logging
import os
import select
from contextlib import ExitStack
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvstore.errors import Overloaded, ProtocolError, ReadOnly, StorageError
from kvstore.limits import (
    DELETES_QUEUED_MAX,
    ERASE_LOOK_BLOCKS,
    HEADER_BYTES,
    PAGE_BYTES,
    SESSION_BLOCKS_MAX,
    SESSIONS_EXPIRED_AT_ONCE,
    SESSIONS_QUEUED_MAX,
    STORE_QUEUED_MAX,
    TIMER_TICK_MS,
)
from kvstore.miss import Miss, MissReason
from kvstore.storage.batch_bounds import check_batch, check_steps
from kvstore.storage.block_reads import Gets
from kvstore.storage.block_writes import Puts
from kvstore.storage.deletes import Deletes
from kvstore.storage.encrypting import Encrypting
from kvstore.storage.eviction.policies import POLICY_DEFAULT
from kvstore.storage.eviction.types import Guard, Reason
from kvstore.storage.eviction_events import Explanation, Held, Keeping
from kvstore.storage.folder import kernel_boot_id
from kvstore.storage.index_layout import record_pages
from kvstore.storage.index_opening import open_index
from kvstore.storage.items import GetDone, Statistics
from kvstore.storage.lending import Lending
from kvstore.storage.manifests import Manifests
from kvstore.storage.quotas import QuotaQueue, Quotas
from kvstore.storage.reclaim import Reclaim
from kvstore.storage.record_checks import Checks
from kvstore.storage.renewals import Renewals
from kvstore.storage.scrubs import Scrubs
from kvstore.storage.sends import Sends
from kvstore.storage.session_rewrites import SessionRewrites
from kvstore.storage.session_writes import Sessions
from kvstore.storage.traffic import Traffic
from kvstore.storage.wipes import Wipes
from kvstore.storage.writes import Writes
from nic_offload.checksum import crc32c_at
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.storage.block_writes import LaneEnd
    from kvstore.storage.completion_queue import CompletionQueue
    from kvstore.storage.disk import Progress
    from kvstore.storage.eviction.types import Refusal
    from kvstore.storage.folder import NotePlace
    from kvstore.storage.index import Entry, Name, NamesAndLives
    from kvstore.storage.index_opening import OpenedIndex
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
    from kvstore.storage.lane_ground import Lane
    from kvstore.storage.manifests import SessionName
    from kvstore.storage.sends import Send
    from kvstore.storage.volume import Volume
    from kvstore.storage.wipes import Wiped
    from nic_offload.lane import RecordFormat
    from nic_offload.vault import RecordCipher

__all__ = ["Drive"]

log = logging.getLogger(__name__)


class Drive(Handle):
    """An open drive."""

    def __init__(self, volume: Volume, opened: OpenedIndex, clock: Clock, policy: str) -> None:
        """Take over open parts; `Drive.open` makes them."""
        index = opened.index
        self.number = volume.superblock.drive_index
        self.others: list[Drive] = []
        self._volume = volume
        self._index = index
        self._boot_id = opened.boot_id
        self._extents = opened.extents
        self._traffic = Traffic(volume.disk)
        self._clock = clock
        self._writes = Writes(
            volume, self._extents, self._traffic, opened.note_synced, opened.note_begun, opened.note_lent
        )
        self._wipes = Wipes(self._writes, self._extents, self._traffic)
        self._scrubs = Scrubs(self._writes, self._extents, self._traffic, failed=not opened.all_erased)
        self._doubts = opened.doubts
        self.manifests = Manifests(index, volume.keys)
        self.keeping = keeping = Keeping(
            index, self._writes, self._wipes, self._scrubs, self._doubts, volume, clock, policy
        )
        self._room = Reclaim(self._extents, self._traffic, self._writes, self._wipes, keeping, clock)
        capacity_pages = volume.superblock.capacity_bytes // PAGE_BYTES
        self._lending = Lending(capacity_pages, self._extents, self._writes, keeping, self._room)
        self._quota_queue = queue = QuotaQueue(Quotas([keeping], clock), self._writes, self._traffic, clock)
        self.puts = Puts(
            self._writes,
            index,
            keeping,
            self._quota_queue,
            Renewals(self._writes, index, self._extents, self._traffic, keeping, volume.codec),
            clock,
            checks=Checks(volume.codec, self._extents, self._traffic, keeping),
            doubtful=self.doubtful,
            elsewhere=self._elsewhere,
        )
        self._deletes = Deletes(self._writes, self._scrubs, keeping, self.puts)
        self._sessions = Sessions(
            self._writes, self._wipes, index, self.manifests, keeping, queue, clock, others=self.others
        )
        self.deadlines = self._sessions.deadlines
        self._gets = Gets(volume.codec, index, self._extents, self._traffic, keeping, clock)
        self._sends = Sends(self._extents, self._traffic, keeping)
        rewrites = SessionRewrites(self._writes, self._wipes, self.manifests, self._sessions)
        self._encrypting = Encrypting(
            volume, index, self._extents, self._traffic, self._writes, keeping, self.puts, rewrites, clock
        )
        self._completions: tuple[CompletionQueue[Any], ...] = (
            self.puts.completions,
            self._gets.completions,
            self._deletes.completions,
            self._sessions.completions,
        )
        self._rebuilt = opened.rebuilt
        self._closed = False
        index.failed = self._index_failed
        keeping.restore(opened.lives)

    @classmethod
    def open(
        cls,
        volume: Volume,
        folder: Path,
        notes: NotePlace,
        *,
        clock: Clock,
        is_empty: bool = False,
        progress: Progress | None = None,
        boot_id: str | None = None,
        policy: str = POLICY_DEFAULT,
    ) -> Drive:
        """Open a formatted drive, with a new index in this folder if the existing one can't be trusted.

        A drive that is said to be empty has no valid record, so it is not scanned. The drive's disk is closed with
        it; if this fails, the caller still owns it.
        """
        opened = open_index(folder, notes, volume, boot_id or kernel_boot_id(), progress, is_empty=is_empty)
        with ExitStack() as undo:
            undo.callback(opened.index.abandon)
            drive = cls(volume, opened, clock, policy)
            undo.pop_all()
        return drive

    @property
    def store_uuid(self) -> bytes:
        """Return the uuid of the store it belongs to."""
        return self._volume.superblock.store_uuid

    @property
    def uuid(self) -> bytes:
        """Return the drive's own uuid."""
        return self._volume.superblock.drive_uuid

    @property
    def capacity_bytes(self) -> int:
        """Return how many bytes of the drive are used for records and their metadata."""
        return self._volume.superblock.capacity_bytes

    @property
    def failure(self) -> StorageError | None:
        """Why the drive accepts no more writes; empty if it does."""
        return self._writes.stopped

    @property
    def takes_puts(self) -> bool:
        """Return whether it accepts writes."""
        return self._writes.stopped is None

    @property
    def writes(self) -> tuple[int, int]:
        """Return how many writes have begun since the opening, and how many have completed."""
        return self._writes.begun, self._writes.ended

    def has_synced(self, generation: int) -> bool:
        """Return whether a block stored here would survive power loss now."""
        return self.puts.has_synced(generation)

    @property
    def has_doubts(self) -> bool:
        """Return whether any block may be doubted."""
        return bool(self._doubts) or self._writes.sync_failed

    def doubtful(self, entries: Iterable[Entry | None]) -> set[int]:
        """Return which blocks no put may be acknowledged because of: doubted, or of a key that was destroyed."""
        keys, there = self._volume.keys, {one.generation: one.domain for one in entries if one is not None}
        found = self._doubts.of(there) if self.has_doubts else set()
        if keys is not None:  # an interrupted erasure leaves blocks without a key
            found.update(one for one, domain in there.items() if domain and keys.is_destroyed(domain - 1))
        if self._writes.sync_failed:  # the drive may have lost a part of what it was to sync
            found.update(one for one in there if not self.has_synced(one))
        return found

    def believe(self, generations: Sequence[int]) -> None:
        """Record that the CRCs of these blocks were checked and are right."""
        self._doubts.believe(generations)

    @property
    def puts_left(self) -> int:
        """Return how many puts it would accept now."""
        return STORE_QUEUED_MAX - self.puts.completions.promised

    @property
    def deletes_left(self) -> int:
        """Return how many deletions it would accept now."""
        return DELETES_QUEUED_MAX - self._deletes.completions.promised

    @property
    def sessions_left(self) -> int:
        """Return how many steps of sessions it would accept now."""
        return SESSIONS_QUEUED_MAX - self._sessions.completions.promised

    @property
    def salt(self) -> bytes:
        """Return a secret of the store that never leaves the node, for the names of tenants."""
        return blake2b(key=self._volume.superblock.secret, person=b"tkv tenant salt").digest()

    def put(self, items: Sequence[PutItem], done: PutsDone) -> None:
        """Store blocks; `done` is called with each result. Overloaded, and none stored, if the queue is full."""
        self._check(items)
        if len(items) > self.puts_left:
            raise Overloaded("The drive's queue of puts is full.")
        self.puts.accept(items, done)
        self._quota_queue.step()
        self._set_off()

    @property
    def direct_fd(self) -> int | None:
        """Return the descriptor for a lane and a reader; None if the drive can't have them."""
        return self._volume.disk.direct_fd

    @property
    def cipher(self) -> RecordCipher | None:
        """Return the cipher with which lanes and readers process its records; None: they are in the clear."""
        return self._volume.codec.cipher

    @property
    def record_format(self) -> RecordFormat:
        """The format with which a lane makes headers of blocks, and a reader compares them."""
        return self._volume.record_format

    def use_lane(self, lane: Lane) -> None:
        """Attach a lane, which writes here on the ground lent to it."""
        self._lending.use(lane)

    def lend(self, record_pages: int = 1) -> None:
        """Lend the lane ground for blocks of this size if it needs some."""
        self._lending.lend(record_pages)
        self._set_off()

    def seal(self) -> int:
        """Take back what the lane has not used; later puts have higher generations than the one returned."""
        self._lending.seal()
        self._set_off()
        return self._volume.last_generation

    def written(self, rows: Iterable[LaneEnd]) -> None:
        """Add the records that the lane has ended to the index, in the order of generations."""
        self.puts.written(rows)
        self._writes.settle_finished()
        self._set_off()

    def _elsewhere(self, name: Name) -> Callable[[Sequence[tuple[PutItem, PutsDone]]], None] | None:
        for other in filter(lambda one: one.takes_puts, self.others):
            entry = other.lookup([name])[0]
            if entry is not None and not 0 < entry.expires_ms <= self._clock.wall_ms():
                return other._take_over  # noqa: SLF001 - a drive of the same store
        return None

    def _take_over(self, puts: Sequence[tuple[PutItem, PutsDone]]) -> None:
        for item, done in puts:
            self.puts.accept([item], done)
        self._quota_queue.step()
        self._set_off()

    def get(self, items: Sequence[GetItem], done: GetsDone) -> None:
        """Read blocks into slots; `done` is called with each result, a BUSY miss if the queue is full."""
        self._check(items)
        if self._gets.completions.promised + len(items) > STORE_QUEUED_MAX:
            self._gets.refuse(items, done)
        else:
            self._gets.accept(items, done)
        self._set_off()

    def send(self, sends: Sequence[Send]) -> None:
        """Let another reader read blocks that are in the index now; each is `sent` once the drive is done."""
        self._check(sends)
        self._sends.accept(sends)
        self._set_off()

    def sent(self, send: Send) -> None:
        """Note that the drive is done with a send."""
        self._sends.over(send)
        self._set_off()

    def delete(self, items: Sequence[DeleteItem], done: DeletesDone) -> None:
        """Delete blocks; `done` is called with each result. Overloaded, and none deleted, if the queue is full."""
        self._check(items)
        if len(items) > self.deletes_left:
            raise Overloaded("The drive's queue of deletions is full.")
        self._deletes.accept(items, done)
        self._set_off()

    def evict(self, generations: Sequence[int]) -> int:
        """Evict the blocks with these generations that are still stored; return how many bytes that frees.

        The bytes are free once the blocks' readers are done and their headers wiped; no event reports that.
        """
        self._check(generations)
        names = [name for name in self._index.names_of(generations) if name is not None]
        gone = self.keeping.drop(names, Reason.CLEARED)
        self._set_off()
        return int(record_pages(gone["length"][gone["generation"] > 0]).sum()) * PAGE_BYTES

    def of_domain(self, tenant: bytes, of: set[int] | None, at: int) -> tuple[list[Name], int]:
        """Return blocks of a tenant, all or those of some keys, and where to continue; 0: there are no more."""
        return self._index.of_domain(tenant, of, at, ERASE_LOOK_BLOCKS)

    def drop(self, names: Sequence[Name], then: Wiped) -> None:
        """Delete blocks, synced; `then` is called from `poll` or at once."""

        def wiped(error: StorageError | None) -> None:
            if error is None:
                self._writes.after_sync(then)
            else:
                then(error)

        self._sessions.drop(names, wiped)
        self._set_off()

    def holds_session(self, name: SessionName) -> bool:
        """Return whether a session is stored here, is being created, or its removal is not durable yet."""
        return self._sessions.holds(name)

    def change_sessions(self, items: Sequence[SessionItem], done: SessionsDone) -> None:
        """Change sessions; `done` is called with each result. Overloaded, and none changed, if the queue is full."""
        self._check(items)
        check_steps(items)
        if len(items) > self.sessions_left:
            raise Overloaded("The drive's queue of session changes is full.")
        self._sessions.accept(items, done)
        self._set_off()

    def prefix(self, tenant: bytes, keys: Sequence[bytes]) -> int:
        """Return how many of these keys are stored, from the first up to the first gap."""
        self._check(keys)
        return self._index.prefix(tenant, keys, self._clock.wall_ms())

    def missing(self, tenant: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of these keys that are not stored here, in their order."""
        return self._index.missing(tenant, keys, self._clock.wall_ms())

    def names(self) -> Iterator[NamesAndLives]:
        """Return the names of all blocks, and where they are, many at once."""
        return self._index.names()

    def names_of(self, generations: Sequence[int]) -> list[Name | None]:
        """Return which block has each generation."""
        return self._index.names_of(generations)

    def lookup(self, keys: Sequence[tuple[bytes, bytes]]) -> list[Entry | None]:
        """Return the index entry of each (tenant, key), expired ones included, or None. A failed index has none."""
        try:
            return self._index.lookup(keys)
        except StorageError:  # it has stopped the drive
            return [None] * len(keys)

    def verify_payload(self, item: GetItem, done: GetDone) -> GetDone:
        """Check the payload of a hit in its slot; return the hit, or a miss if the check failed."""
        if done.miss is not None:
            return done
        if crc32c_at(item.slot_address + HEADER_BYTES, done.length) == done.crc32c:
            self.believe([done.generation])
            return done
        self.quarantine(item.tenant, item.key, done.generation)
        return GetDone(done.tag, Miss(MissReason.CORRUPT, "the payload failed its CRC"), was_read=True)

    def quarantine(self, tenant: bytes, key: bytes, generation: int) -> None:
        """Remove a block that failed a check. Its extent is reused once the drive has overwritten all of it.

        Its header is wiped first: it may be valid, and the block would return after a later deletion of the name.
        """
        self.keeping.quarantine((tenant, key), generation, wipe=True)
        self._traffic.pump()  # this follows a check of the payload, so the next call may be late

    def used(self, generations: Sequence[int]) -> None:
        """Record that blocks were read from memory, so that eviction counts it as a use."""
        self._check(())
        self.keeping.used(generations)

    def hold(self, names: Sequence[Name], guard: Guard) -> list[Held | None]:
        """Guard blocks from eviction until `release` or the process ends, refcounted; None for each not stored."""
        self._check(names)
        return self.keeping.hold(names, guard)

    def release(self, held: Sequence[Held], guard: Guard) -> None:
        """Release blocks that were guarded with this guard."""
        self._check(held)
        self.keeping.unguard([one.generation for one in held], guard)
        self._look_again()
        self._set_off()

    def protect(self, session: SessionName, blocks: int = SESSION_BLOCKS_MAX) -> Refusal | None:
        """Protect a session's first blocks from eviction, including future ones; FULL if too many are protected."""
        if not 1 <= blocks <= SESSION_BLOCKS_MAX:
            raise ProtocolError(f"A session has 1 to {SESSION_BLOCKS_MAX} blocks to protect, not {blocks}.")
        return self.keeping.protect(session, blocks)

    def unprotect(self, session: SessionName) -> Refusal | None:
        """End the protection of a session's blocks; NOT_HELD if it was not protected."""
        refusal = self.keeping.unprotect(session)
        self._look_again()
        self._set_off()
        return refusal

    def explain(self, tenant: bytes, key: bytes) -> Explanation:
        """Return where a block is, or why it was removed."""
        return self.keeping.explain((tenant, key))

    def poll(self) -> None:
        """Advance all pending work, and call the callbacks of completed operations."""
        if self._volume.keys is not None:
            self._volume.keys.settle_finished()
        self._traffic.poll()
        self._writes.settle_finished()
        self.puts.settle_renewed()
        self._sessions.slices.step()
        self._wipes.settle_finished()
        if not self._closed:
            self._sessions.expire(min(self.sessions_left, SESSIONS_EXPIRED_AT_ONCE))
        self._doubts.commit()
        self._quota_queue.step()
        self._room.step()
        self._encrypting.step()
        self._lending.go_on()
        self._writes.sync_if_awaited()
        self._traffic.pump()  # the sync that has become due, and what has been freed
        try:
            for queue in self._completions:
                queue.deliver()
        finally:
            self._wake_if_due()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `poll` has something to do."""
        return self._volume.disk.fileno()

    def statistics(self) -> Statistics:
        """Return the drive's statistics."""
        return Statistics(
            capacity_bytes=self.capacity_bytes,
            free_bytes=self._extents.free_pages * PAGE_BYTES,
            blocks=len(self.keeping.core),
            quarantined=self.keeping.quarantined,
            quarantined_bytes=self.keeping.quarantined_bytes,
            doubted=len(self._doubts),
            eviction=self.keeping.core.statistics(),
            puts_pending=self.puts.completions.promised,
            waiting_for_room=self._writes.waiting,
            waiting_for_quota=len(self._quota_queue),
            gets_pending=self._gets.completions.promised + self._sends.blocks,
            deletes_pending=self._deletes.completions.promised,
            sessions_pending=self._sessions.completions.promised,
            wipes_pending=self._wipes.pending + self._scrubs.pending,
            drive_queued=self._traffic.queued,
            drive_in_flight=self._traffic.in_flight,
            drive_in_flight_bytes=self._traffic.in_flight_bytes,
            syncs=self._writes.syncs,
            takes_puts=self.takes_puts,
            rebuilt=self._rebuilt,
            clear_bytes=self._encrypting.clear_bytes,
            clear_why=self._encrypting.why,
        )

    def close(self) -> None:
        """Complete all accepted work, make it durable, and mark the index as clean if the drive never failed."""
        if self._closed:
            return
        self._closed = True
        self._lending.seal()
        self.puts.lane_is_lost()
        self._sends.close()
        self._encrypting.close()
        self._room.close()
        self._quota_queue.close()
        self._scrubs.close()
        with ExitStack() as last:
            last.callback(self._volume.disk.close)
            last.callback(self._index.abandon)
            self._set_off()
            self._drain()
            self._doubts.commit()
            if self._writes.stopped is None:
                self._volume.end_epoch()  # its sync covers all blocks as well
                self._index.close_clean(self._volume.superblock, self._boot_id)

    def share_quotas(self, quotas: Quotas) -> None:
        """Use the quotas of the whole store."""
        self._quota_queue.quotas = quotas

    def wake(self) -> None:
        """Apply changed quotas soon."""
        self._look_again()
        self._wake_if_due()

    def _index_failed(self, error: StorageError) -> None:
        """Accept no more puts: the next opening makes another index from what the drive has then."""
        if self._writes.stopped is None:
            log.warning("%s It is rebuilt at the next start.", error)
        self._writes.stop(ReadOnly(f"{error} The drive accepts no more puts until the store is reopened."), 0)

    def _look_again(self) -> None:
        self._room.look_again()
        self._quota_queue.look_again()

    def _set_off(self) -> None:
        self._wipes.settle_finished()
        self._writes.sync_if_awaited()
        self._traffic.pump()
        self._wake_if_due()

    def _wake_if_due(self) -> None:
        # Reports are made, and room is made, only from `poll`, so work that needs no drive must trigger it.
        if self._is_due or any(self._completions):
            os.eventfd_write(self.fileno(), 1)

    def _drain(self) -> None:
        ready = select.poll()
        ready.register(self.fileno(), select.POLLIN)
        while self.is_busy:
            self._writes.sync_if_awaited(at_once=True)
            self._traffic.pump()
            look_ms = TIMER_TICK_MS if self._writes.without_keys else None  # keys wake the first drive only
            if not (look_ms or self._traffic.in_flight or any(self._completions) or self._is_due):
                raise StorageError("The drive is unusable after an earlier exception.")
            ready.poll(look_ms)
            self.poll()

    @property
    def _is_due(self) -> bool:
        due = (self._room, self._quota_queue, self._writes, self._wipes)
        return bool(self._sessions.slices) or any(one.is_due for one in due)

    @property
    def is_busy(self) -> bool:
        """Return whether any accepted operation is still pending."""
        if self._writes.without_keys or self._encrypting.is_working or self._sessions.slices:
            return True
        pending = self._wipes.pending + self._scrubs.pending + self._writes.waiting_for_sync
        return pending > 0 or any(queue.promised for queue in self._completions)

    @property
    def has_timers(self) -> bool:
        """Return whether any work is pending or any session or block has a time to live."""
        waits = self.deadlines or self.keeping.core.has_timers or self._encrypting.is_active
        return bool(waits) or self.is_busy

    def _check(self, items: Sequence[object]) -> None:
        if self._closed:
            raise StorageError("The drive is closed.")
        check_batch(items)
