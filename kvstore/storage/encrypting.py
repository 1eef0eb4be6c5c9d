"""Encrypts in the background what a drive stored before it had keys, and overwrites what is left in the clear.

Blocks come first: each is read, checked and rewritten, encrypted with its tenant's own key. Then come sessions and
their chunks. Then all free space that isn't zeros is overwritten with zeros.

Always holds:

- A record older than the drive's first key is encrypted, and the new copy survives power loss, before the old place
  is overwritten. The index alone says which records are left, and which old places, so a process that dies at any
  moment leaves nothing that the next one would not find.
- Once it is durable that nothing is left, the superblock says so. Until then each process scans the free pages again.
- It uses at most one part in `ENCRYPT_SHARE` of the time, handles one record or piece at a time, and starts none,
  except the first of a stretch, while a tenant's work is queued.
- It makes no room: a record that finds no room stays as it is, and is retried later.
- A block keeps its eviction state; its users and pins don't notice.

It doesn't decide which key encrypts new records: puts do.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from kvstore.config import show_size
from kvstore.errors import KvError, NoSpace, StorageError
from kvstore.limits import (
    ENCRYPT_LOOKED_AT_ONCE,
    ENCRYPT_PIECE_BYTES,
    ENCRYPT_REST_MS,
    ENCRYPT_SHARE,
    ENCRYPT_STRETCH_BYTES,
    HEADER_BYTES,
    PAGE_BYTES,
)
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.index_layout import is_header_of
from kvstore.wire.record import record_bytes
from nic_offload.checksum import crc32c_at
from nic_offload.memory import undumped

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.clock import Clock
    from kvstore.storage.block_writes import Puts
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.extents import Extents
    from kvstore.storage.index import Entry, Index, Name
    from kvstore.storage.session_rewrites import SessionRewrites
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.volume import Volume
    from kvstore.storage.writes import Writes

__all__ = ["Encrypting"]

_NS_PER_MS: Final = 1_000_000
_LABELS_WHY: Final = "Labels of sessions may be in the index in the clear until the next start."


class Encrypting:
    """Encrypts the records that a drive has in the clear."""

    def __init__(
        self,
        volume: Volume,
        index: Index,
        extents: Extents,
        traffic: Traffic,
        writes: Writes,
        keeping: Keeping,
        puts: Puts,
        sessions: SessionRewrites,
        clock: Clock,
    ) -> None:
        self._volume = volume
        self._index = index
        self._extents = extents
        self._traffic = traffic
        self._writes = writes
        self._keeping = keeping
        self._puts = puts
        self._sessions = sessions
        self._clock = clock
        self.is_active = volume.keys is not None and bool(volume.superblock.plain_below)
        self.is_working = False  # an operation of it is on its way to or from the drive
        has_labels = volume.keys is not None and not index.is_label_free
        self._why_at_end = _LABELS_WHY if has_labels else ""
        self.why = "" if self.is_active else self._why_at_end  # why it doesn't continue
        self._closed = False
        self._plain: list[tuple[Name, Entry]] = []  # found, and still to be encrypted
        self._at: int | None = 0  # where the scan of the index continues; None: it is done
        self._left_out = False  # some were left out during the scan, and are tried again
        self._sweep: _Sweep | None = None
        self._is_ending = False
        self._since_ns = self._rest_until_ns = 0
        self._left_bytes = 0
        self._memory = undumped(PAGE_BYTES)
        keeping.plain_bytes = index.plain_bytes() if self.is_active else 0

    @property
    def clear_bytes(self) -> int:
        """Return an upper bound of what the drive has in the clear; records of sessions are not counted.

        It is 0 once it is durable that there is nothing, and the index has no label in the clear either.
        """
        if not self.is_active:
            return PAGE_BYTES if self._why_at_end else 0
        at = self._extents.first_page if self._sweep is None else self._sweep.page
        free = min(self._extents.free_pages, self._extents.until_page - at)
        return max(PAGE_BYTES, self._keeping.plain_bytes + free * PAGE_BYTES)

    def step(self) -> None:
        """Begin a stretch of work, if one is due."""
        if not self.is_active or self.is_working or self._closed:
            return
        if self._is_ending and not self._has_ended():
            return
        if self._writes.stopped is not None:
            self.why = "The drive takes no writes."
            return
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._rest_until_ns:
            return
        self._since_ns, self._left_bytes = now_ns, ENCRYPT_STRETCH_BYTES
        self._is_ending = True
        self._go_on()

    def _has_ended(self) -> bool:
        """Return whether the last stretch is over, with old places overwritten; then it pauses."""
        if self._puts.rewriting or self._keeping.is_overwriting:
            return False
        self._is_ending = False
        now_ns = self._clock.monotonic_ns()
        worked_ns = now_ns - self._since_ns
        self._rest_until_ns = now_ns + max(worked_ns * (ENCRYPT_SHARE - 1), ENCRYPT_REST_MS * _NS_PER_MS)
        return True

    def close(self) -> None:
        """Begin nothing more."""
        self._closed = True

    def _go_on(self) -> None:
        """Begin the next piece of work, if it belongs to this stretch."""
        self.is_working = False
        is_first = self._left_bytes == ENCRYPT_STRETCH_BYTES
        if self._closed or self._writes.stopped is not None:
            return
        if self._left_bytes > 0 and (is_first or not self._traffic.tenants_wait):
            self.is_working = self._begin()

    def _begin(self) -> bool:
        """Begin one piece of work; False if there is nothing to do now."""
        if self._sweep is not None:
            return self._sweep_on(self._sweep)
        try:
            return self._begin_block() or self._begin_session() or self._begin_sweep()
        except StorageError as error:  # of the index: the drive has stopped
            self.why = str(error)
            return False

    # Blocks.

    def _begin_block(self) -> bool:
        looked = 0
        while self._plain or (self._at is not None and looked < ENCRYPT_LOOKED_AT_ONCE):
            if not self._plain:
                self._look()
                looked += ENCRYPT_LOOKED_AT_ONCE
                continue
            name, entry = self._plain.pop()
            if self._index.lookup([name])[0] != entry:
                continue  # what replaced it is encrypted
            size_bytes = record_bytes(entry.length)
            if self._puts.is_under_way(name):
                self._left_out = True
            elif size_bytes > self._extents.longest * PAGE_BYTES:
                self._leave(f"No {show_size(size_bytes)} are free in one piece, which a block needs.")
            else:
                self._read(name, entry)
                return True
        if self._at is None and self._left_out:
            self._at, self._left_out = 0, False
            return False
        return self._at is not None and self._nothing_yet()

    def _nothing_yet(self) -> bool:
        """Continue the scan at the next step: an index may have many encrypted blocks."""
        self._left_bytes = 0
        return False

    def _leave(self, why: str) -> None:
        self.why = why
        self._left_out = True

    def _look(self) -> None:
        assert self._at is not None
        rows, at = self._index.after(self._at, ENCRYPT_LOOKED_AT_ONCE)
        self._plain = [(name, entry) for name, entry in rows if not entry.domain]
        self._at = at or None

    def _read(self, name: Name, entry: Entry) -> None:
        size_bytes = record_bytes(entry.length)
        self._extents.pin(entry.offset // PAGE_BYTES)
        self._left_bytes -= size_bytes

        def read(error: int) -> None:
            self._extents.unpin(entry.offset // PAGE_BYTES)
            if error:
                self._keeping.unreadable(name, entry.generation, wipe=True)
            elif not self._is_whole(name, entry):
                self._keeping.quarantine(name, entry.generation, wipe=True)
            elif self._puts.rewrite(name, entry, self._address, self._rewritten):
                return
            self._go_on()

        self._add(_Pieces(self, size_bytes, entry.offset, DiskOpKind.READ, read))

    def _is_whole(self, name: Name, entry: Entry) -> bool:
        header, decryption = self._volume.codec.open(self._address, entry.offset)
        if decryption is not None:
            decryption.close()
        is_its = is_header_of(header, name, entry)
        return is_its and crc32c_at(self._address + HEADER_BYTES, entry.length) == entry.crc32c

    def _rewritten(self, error: KvError | None) -> None:
        if isinstance(error, NoSpace):
            self._leave("Others took the room that a block needs.")
        elif error is not None:
            self._leave(str(error))
        else:
            self.why = ""
        self._go_on()

    # Sessions.

    def _begin_session(self) -> bool:
        size_bytes = self._sessions.begin_one(self._volume.superblock.plain_below, self._rewritten)
        self._left_bytes -= size_bytes
        return size_bytes > 0

    # Free pages.

    def _begin_sweep(self) -> bool:
        """Wait until nothing in the clear is about to become free, then scan all that is free."""
        if self._at is not None or not self._sessions.is_done or self._puts.rewriting:
            return False
        if self._keeping.plain_bytes:  # a block was added behind the scan
            self._at = 0
            return False
        self._sweep = _Sweep(self._extents.first_page)
        self._extents.unwritten = []
        self._writes.ground.seal()
        self.is_working = True
        self._writes.after_sync(
            self._synced, unhurried=True
        )  # after everything that replaced records wait for
        self._writes.sync_if_awaited(at_once=True)
        return self.is_working

    def _synced(self, error: StorageError | None) -> None:
        if error is None:
            self._keeping.after_wipes(self._wiped)
        else:
            self._wiped(error)

    def _wiped(self, error: StorageError | None) -> None:
        if error is None:
            self._go_on()
        else:
            self.is_working = False

    def _sweep_on(self, sweep: _Sweep) -> bool:
        extents = self._extents
        found = extents.free_from(sweep.page, sweep.until_page)
        while found is None:
            if self._writes.lends:  # all was scanned except what a lane has, or gave back unwritten
                self._writes.lends = False
                self._writes.ground.seal()
                sweep.begun = self._writes.begun
            if not extents.unwritten:
                return self._end(sweep) if self._writes.have_ended(sweep.begun) else False
            sweep.page, pages = extents.unwritten.pop()
            sweep.until_page = sweep.page + pages
            found = extents.free_from(sweep.page, sweep.until_page)
        start, pages = found
        pages = min(pages, ENCRYPT_PIECE_BYTES // PAGE_BYTES)
        extents.hold(start, pages)
        self._left_bytes -= pages * PAGE_BYTES
        sweep.page = start + pages

        def read(error: int) -> None:
            size_bytes = pages * PAGE_BYTES
            if not error and ctypes.string_at(self._address, size_bytes).count(0) == size_bytes:
                written(0)
                return
            ctypes.memset(self._address, 0, size_bytes)
            self._add(_Pieces(self, size_bytes, start * PAGE_BYTES, DiskOpKind.WRITE, written))

        def written(error: int) -> None:
            extents.end_hold()
            sweep.failed += bool(error)
            self._go_on()

        self._add(_Pieces(self, pages * PAGE_BYTES, start * PAGE_BYTES, DiskOpKind.READ, read))
        return True

    def _end(self, sweep: _Sweep) -> bool:
        """Write to the drive that nothing is left."""

        def overwritten(error: StorageError | None) -> None:
            if error is not None or sweep.failed or self._keeping.leaves_some:
                self._give_up("Some pages could not be overwritten; that is tried again at the next start.")
            else:
                self._writes.after_sync(synced)

        def synced(error: StorageError | None) -> None:
            self.is_working, self._writes.lends = False, True
            if error is None and not self._closed:
                self._volume.note_nothing_plain()
                self.is_active, self._extents.unwritten = False, None
                self.why = self._why_at_end
                self._memory = undumped(PAGE_BYTES)

        self.is_working = True
        self._keeping.after_scrubs(overwritten)  # which may be at once
        return self.is_working

    def _give_up(self, why: str) -> None:
        self.is_working, self._writes.lends = False, True
        self.why = why
        self._closed, self._sweep = True, None

    # Memory and the drive.

    def _add(self, pieces: _Pieces) -> None:
        if len(self._memory) < pieces.size_in_all:
            self._memory = undumped(pieces.size_in_all)
        self.is_working = True
        self._traffic.add(pieces)

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def address_at(self, at: int) -> int:
        """Return the address of a byte that is read or written."""
        return self._address + at

    def next_piece(self, pieces: _Pieces) -> None:
        """Queue the rest of some work."""
        self._traffic.add(pieces)


class _Sweep:
    """How far the free pages have been scanned."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.until_page: int | None = None  # None: the drive's end
        self.begun = 0  # writes that had begun when all was scanned: what is under way is on no free page
        self.failed = 0


class _Pieces:
    """A range of the drive that is read or written, piece by piece."""

    reads: Final = False  # no caller waits for it
    tenant: Final = b""

    __slots__ = ("_at", "_encrypting", "_kind", "_offset", "_over", "size_in_all")

    def __init__(
        self,
        encrypting: Encrypting,
        size_in_all: int,
        offset: int,
        kind: DiskOpKind,
        over: Callable[[int], None],
    ) -> None:
        self._encrypting = encrypting
        self.size_in_all = size_in_all
        self._offset = offset
        self._kind = kind
        self._over = over
        self._at = 0

    @property
    def size_bytes(self) -> int:
        return min(ENCRYPT_PIECE_BYTES, self.size_in_all - self._at)

    def begin(self, tag: int) -> DiskOp:
        address = self._encrypting.address_at(self._at)
        return DiskOp(self._kind, address, self.size_bytes, self._offset + self._at, tag)

    def end(self, result: int) -> None:
        if result < 0:
            self._over(result)
            return
        self._at += result
        if self._at < self.size_in_all:
            self._encrypting.next_piece(self)
        else:
            self._over(0)
