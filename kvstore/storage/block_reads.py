"""Reads a block from the drive into a slot: lookup, read, check of the header.

Always holds: a block is returned only if its header is exactly the one that the index and the request name, tag
included. From the lookup to the end of the read its extent is pinned, so nothing new is written there, and the block
is guarded, so it is not evicted. A failed read is retried once; if that fails too, the block is quarantined, so its
name can be put again. Reads that nobody requested guard, retry and quarantine nothing.

It doesn't check payloads; `GetDone` says where that is done. Encrypted blocks are decrypted here, in the slot.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvstore.errors import StorageError
from kvstore.limits import PAGE_BYTES, READS_OF_BLOCK_MAX
from kvstore.miss import Miss, MissReason
from kvstore.storage.completion_queue import CompletionQueue
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.eviction.types import Guard, Reason
from kvstore.storage.index_layout import is_header_of
from kvstore.storage.items import GetDone, GetItem, GetsDone
from kvstore.wire.record import Flaw, Header, record_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.extents import Extents
    from kvstore.storage.index import Entry, Index
    from kvstore.storage.traffic import Traffic
    from kvstore.wire.record import HeaderCodec


__all__ = ["Gets", "mismatch"]


class Gets:
    """All gets that have not been reported yet."""

    def __init__(
        self,
        codec: HeaderCodec,
        index: Index,
        extents: Extents,
        traffic: Traffic,
        keeping: Keeping,
        clock: Clock,
    ) -> None:
        self._codec = codec
        self._index = index
        self._extents = extents
        self._traffic = traffic
        self._clock = clock
        self._keeping = keeping
        self.completions: CompletionQueue[GetDone] = CompletionQueue()

    def accept(self, items: Sequence[GetItem], done: GetsDone) -> None:
        """Accept gets; each is reported through the completions."""
        now_ms = self._clock.wall_ms()
        self.completions.promised += len(items)
        try:
            stored = self._index.lookup([(item.tenant, item.key) for item in items])
        except StorageError as error:
            for item in items:
                self._miss(item, done, MissReason.UNREADABLE, str(error))
            return
        reads = []
        unknown: dict[bytes, list[GetItem]] = {}  # by tenant
        for item, entry in zip(items, stored, strict=True):
            if entry is None:
                unknown.setdefault(item.tenant, []).append(item)
            elif (
                miss := mismatch(item, entry.fingerprint, entry.length, entry.expires_ms, now_ms)
            ) is not None:
                self._miss(item, done, *miss)
            else:
                reads.append(_Read(self, item, done, entry))
        self._extents.pin_all([read.entry.offset // PAGE_BYTES for read in reads])
        self._keeping.guard([read.entry.generation for read in reads if read.item.is_requested], Guard.PIN)
        for read in reads:
            self._traffic.add(read)
        for tenant, missed in unknown.items():
            misses = self._keeping.misses(tenant, [item.key for item in missed])
            for item, why in zip(missed, misses, strict=True):
                self.completions.add(done, GetDone(item.tag, why))

    def refuse(self, items: Sequence[GetItem], done: GetsDone) -> None:
        """Report gets that there is no room for."""
        self.completions.promised += len(items)
        for item in items:
            self._miss(item, done, MissReason.BUSY)

    def arrived(self, read: _Read, result: int) -> None:
        """Take the result of a read."""
        item, entry = read.item, read.entry
        if not item.is_requested:
            self._arrived_unrequested(read, result)
            return
        if result < 0 and read.failed < READS_OF_BLOCK_MAX - 1:
            read.failed += 1
            self._traffic.add(read)
            return
        self._extents.unpin(entry.offset // PAGE_BYTES)
        self._keeping.unguard([entry.generation], Guard.PIN)
        name = (item.tenant, item.key)
        if result < 0:
            self._keeping.unreadable(name, entry.generation, wipe=True)
        found = self._opened(read, result)
        if found is None:
            return
        # Another record's valid header must not be wiped.
        is_its = is_header_of(found, name, entry)
        is_foreign = isinstance(found, Header) and not is_its
        if read.failed == READS_OF_BLOCK_MAX - 1:
            self._keeping.unreadable(name, entry.generation, wipe=not is_foreign)
            self._missed(read, MissReason.UNREADABLE, "only the header could be read")
        elif is_its:
            self._found(read)
        elif found is Flaw.NO_KEY:
            if not self._keeping.erasing[item.tenant]:
                with suppress(StorageError):  # a read-only drive keeps it in its index
                    self._keeping.drop([name], Reason.ERASED, spared=[entry.domain])
            self._missed(read, MissReason.ERASED)
        elif found is Flaw.KEY_DAMAGED:
            self._missed(read, MissReason.UNREADABLE, "its key's slot in the keyring is damaged")
        else:
            self._keeping.quarantine(name, entry.generation, wipe=not is_foreign)
            self._missed(read, MissReason.CORRUPT, "the header on the drive does not belong to this block")

    def _arrived_unrequested(self, read: _Read, result: int) -> None:
        item, entry = read.item, read.entry
        self._extents.unpin(entry.offset // PAGE_BYTES)
        found = self._opened(read, result)
        if found is None:
            return
        if is_header_of(found, (item.tenant, item.key), entry):
            self._found(read)
        else:
            self._missed(read, MissReason.CORRUPT)

    def _opened(self, read: _Read, result: int) -> Header | Flaw | None:
        """Return the header that was read, and decrypt the block; None if that can't be done, which is reported."""
        if result < 0:
            self._missed(read, MissReason.UNREADABLE, os.strerror(-result))
            return None
        try:
            return self._codec.open_record(read.item.slot_address, result, read.entry.offset)
        except StorageError as error:  # the keys can't be read now
            self._missed(read, MissReason.UNREADABLE, str(error))
            return None

    def _found(self, read: _Read) -> None:
        entry = read.entry
        hit = GetDone(read.item.tag, None, entry.length, entry.crc32c, entry.generation, was_read=True)
        self.completions.add(read.done, hit)

    def _missed(self, read: _Read, reason: MissReason, detail: str = "") -> None:
        self.completions.add(read.done, GetDone(read.item.tag, Miss(reason, detail), was_read=True))

    def _miss(self, item: GetItem, done: GetsDone, reason: MissReason, detail: str = "") -> None:
        self.completions.add(done, GetDone(item.tag, Miss(reason, detail)))


class _Read:
    """One record being read into a slot."""

    reads: Final = True

    __slots__ = ("_gets", "done", "entry", "failed", "item")

    def __init__(self, gets: Gets, item: GetItem, done: GetsDone, entry: Entry) -> None:
        self._gets = gets
        self.item = item
        self.done = done
        self.entry = entry
        self.failed = 0  # reads

    @property
    def tenant(self) -> bytes:
        return self.item.tenant

    @property
    def size_bytes(self) -> int:
        return record_bytes(self.entry.length) if self.failed < READS_OF_BLOCK_MAX - 1 else PAGE_BYTES

    def begin(self, tag: int) -> DiskOp:
        return DiskOp(DiskOpKind.READ, self.item.slot_address, self.size_bytes, self.entry.offset, tag)

    def end(self, result: int) -> None:
        self._gets.arrived(self, result)


def mismatch(
    item: GetItem, fingerprint: bytes, length: int, expires_ms: int, now_ms: int
) -> tuple[MissReason, str] | None:
    """Return why a block is not the requested one; None if it is. A request without a fingerprint accepts any."""
    assert item.slot_address % PAGE_BYTES == 0
    if 0 < expires_ms <= now_ms:
        return MissReason.EXPIRED, ""
    if item.fingerprint not in {b"", fingerprint}:
        return MissReason.LAYOUT, ""
    if item.length not in {0, length}:
        return MissReason.LENGTH, f"{length} bytes are stored"
    if record_bytes(length) > item.slot_bytes:
        return MissReason.LENGTH, f"{length} bytes are stored and do not fit into the slot"
    return None
