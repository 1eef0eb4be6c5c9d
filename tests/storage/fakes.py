"""A drive in memory that fails as drives do, and a clock that doesn't advance by itself.

A seed determines the order in which operations end and, when the drive dies, which 512-byte sectors of unsafe data are
kept. It follows the Disk seam, except where a fault says otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
from typing import TYPE_CHECKING

from kvstore.errors import StorageError
from kvstore.limits import DRIVE_CAPACITY_BYTES_MIN, PAGE_BYTES, SECTOR_BYTES
from kvstore.storage.disk import DiskDone, DiskOp, DiskOpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

__all__ = ["SHORT", "FakeClock", "FakeDisk", "FakeDrives"]

SHORT = 1  # a fault: half of the transfer happens and is reported as such. Negative faults are errnos.
_SECTORS = PAGE_BYTES // SECTOR_BYTES
_ZEROS = bytes(PAGE_BYTES)


class FakeClock:
    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000

    def wall_ms(self) -> int:
        return self.now_ms


class FakeDisk:
    def __init__(
        self,
        pages: dict[int, bytes] | None = None,
        *,
        seed: int = 0,
        capacity: int = DRIVE_CAPACITY_BYTES_MIN,
        watch: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        """`watch` is given whatever is written, to this one and to those that come after it."""
        self.capacity_bytes = capacity
        self.pages = dict(pages or {})  # what a read sees; absent pages are zeros
        self.durable = dict(self.pages)  # what power loss leaves for certain
        self.unsynced: list[tuple[int, bytes]] = []  # (page, content) since the last sync, in order
        self.in_flight: list[DiskOp] = []
        self.faults: dict[int, int] = {}  # by number of the operation
        self.fault_from: tuple[int, int] | None = None  # (number, fault): it and all after it
        self.held: set[int] = set()  # tags that do not end before they are let go
        self.operations = 0
        self.kinds: list[DiskOpKind] = []  # of each operation, by number
        self.unreadable: set[int] = set()  # pages, until they are written
        self.unwritable: set[int] = set()  # pages
        self.deleted = False  # while it is open
        self.watch = watch
        self.rng = random.Random(seed)
        self.closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def direct_fd(self) -> int | None:
        return None

    def submit(self, ops: Sequence[DiskOp]) -> int:
        accepted = max(1, self.rng.randrange(len(ops) + 1))  # back-pressure happens
        self.in_flight.extend(ops[:accepted])
        self._ring_bell()
        return accepted

    def reap(self) -> list[DiskDone]:
        self._silence_bell()
        ready = [op for op in self.in_flight if op.tag not in self.held]
        self.rng.shuffle(ready)
        ending = ready[: self.rng.randrange(1, len(ready) + 1)] if ready else []
        done = [DiskDone(op.tag, self._execute(op)) for op in ending]
        self.in_flight = [op for op in self.in_flight if op not in ending]
        if any(op.tag not in self.held for op in self.in_flight):
            self._ring_bell()
        return done

    def release(self) -> None:
        self.held.clear()
        self._ring_bell()

    def fileno(self) -> int:
        return self._event_fd

    def read_at(self, offset: int, length: int) -> bytes:
        first, count = offset // PAGE_BYTES, length // PAGE_BYTES
        fault = self._fault(DiskOpKind.READ)
        if fault or self.unreadable.intersection(range(first, first + count)):
            raise StorageError("read error")
        return b"".join(self.pages.get(page, _ZEROS) for page in range(first, first + count))

    def write_at(self, offset: int, data: bytes) -> None:
        fault = self._fault(DiskOpKind.WRITE)
        first = offset // PAGE_BYTES
        if self.unwritable.intersection(range(first, first + len(data) // PAGE_BYTES)):
            raise StorageError("write error")
        self._store(offset, data[: len(data) // 2] if fault == SHORT else data if fault == 0 else b"")
        if fault:
            raise StorageError("write error")

    def sync(self) -> None:
        if self._sync() < 0:
            raise StorageError("sync error")

    def data_ranges(self, start: int) -> Iterator[tuple[int, int]]:
        used = sorted(page for page in self.pages if page * PAGE_BYTES >= start)
        while used:
            first = last = used.pop(0)
            while used and used[0] == last + 1:
                last = used.pop(0)
            yield first * PAGE_BYTES, (last + 1) * PAGE_BYTES

    def refuse_if_deleted(self) -> None:
        if self.deleted:
            raise StorageError("deleted")

    def close(self) -> None:
        if not self.closed:
            self.held.clear()
            for op in self.in_flight:
                self._execute(op)
            self.in_flight = []
            self.closed = True
            os.close(self._event_fd)

    def after_kill(self, seed: int) -> FakeDisk:
        """The drive for the next process: all completed operations, and some of those in flight."""
        return self._after(self.pages, [], seed)

    def after_power_loss(self, seed: int) -> FakeDisk:
        """The drive after power loss: everything synced, and some of the rest."""
        return self._after(self.durable, self.unsynced, seed)

    def flip(self, offset: int, bit: int) -> None:
        page = bytearray(self.pages.get(offset // PAGE_BYTES, _ZEROS))
        page[offset % PAGE_BYTES] ^= 1 << bit
        self.pages[offset // PAGE_BYTES] = bytes(page)

    def _after(self, safe: dict[int, bytes], unsafe: list[tuple[int, bytes]], seed: int) -> FakeDisk:
        rng = random.Random(seed)
        drive = FakeDisk(safe, seed=seed, capacity=self.capacity_bytes, watch=self.watch)
        pending = list(unsafe)
        for op in self.in_flight:
            if op.kind is DiskOpKind.WRITE:
                data = ctypes.string_at(op.address, op.length)
                self.watch(data)
                pending.extend(_pages_of(op.offset, data))
        for page, content in pending:
            drive.pages[page] = _mixed(drive.pages.get(page, _ZEROS), content, rng)
        drive.durable = dict(drive.pages)
        self.in_flight = []
        self.close()
        return drive

    def _execute(self, op: DiskOp) -> int:
        if op.kind is DiskOpKind.SYNC:
            return self._sync()
        fault = self._fault(op.kind)
        length = op.length // 2 if fault == SHORT else op.length
        if fault < 0:
            return fault
        if op.kind is DiskOpKind.WRITE:
            if self.unwritable.intersection(
                range(op.offset // PAGE_BYTES, (op.offset + length) // PAGE_BYTES)
            ):
                return -errno.EIO
            self._store(op.offset, ctypes.string_at(op.address, length))
        else:
            pages = range(op.offset // PAGE_BYTES, -(-(op.offset + length) // PAGE_BYTES))
            if self.unreadable.intersection(pages):
                return -errno.EIO
            content = b"".join(self.pages.get(page, _ZEROS) for page in pages)
            ctypes.memmove(op.address, content, length)
        return length

    def _sync(self) -> int:
        fault = self._fault(DiskOpKind.SYNC)
        if fault == 0:
            self.durable = dict(self.pages)
        else:  # what could not be made safe is lost in part, and the next sync will say that all is well
            for page, content in self.unsynced:
                self.pages[page] = _mixed(self.durable.get(page, _ZEROS), content, self.rng)
        self.unsynced = []
        return min(fault, 0) if fault != SHORT else -errno.EIO

    def _store(self, offset: int, data: bytes) -> None:
        self.watch(data)
        for page, content in _pages_of(offset, data):
            self.unreadable.discard(page)  # a drive replaces a bad sector when it is written
            whole = content + self.pages.get(page, _ZEROS)[len(content) :]
            if whole == _ZEROS and page not in self.pages:
                continue
            self.pages[page] = whole
            self.unsynced.append((page, whole))

    def _fault(self, kind: DiskOpKind) -> int:
        number = self.operations
        self.operations += 1
        self.kinds.append(kind)
        if self.fault_from is not None and number >= self.fault_from[0]:
            return self.fault_from[1]
        return self.faults.get(number, 0)

    def _ring_bell(self) -> None:
        os.eventfd_write(self._event_fd, 1)

    def _silence_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)


class FakeDrives:
    """Drives in memory, by number; absent ones are errors."""

    def __init__(self, disks: Sequence[FakeDisk], away: Collection[int] = ()) -> None:
        self._disks = disks
        self._away = away

    def numbers(self) -> list[int]:
        return list(range(len(self._disks)))

    def open(self, number: int) -> FakeDisk:
        if number in self._away:
            raise StorageError("There is no such device.")
        return self._disks[number]

    def take_back(self) -> None:
        """Nothing was made."""


def _pages_of(offset: int, data: bytes) -> list[tuple[int, bytes]]:
    return [
        ((offset + at) // PAGE_BYTES, data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)
    ]


def _mixed(old: bytes, new: bytes, rng: random.Random) -> bytes:
    choice = rng.randrange(4)
    if choice < 2:  # whole pages are the common case
        return new if choice else old
    sectors = []
    for index in range(_SECTORS):
        source = new if rng.random() < 0.5 else old
        sectors.append(source[index * SECTOR_BYTES : (index + 1) * SECTOR_BYTES])
    return b"".join(sectors)
