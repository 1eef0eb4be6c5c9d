"""A drive in memory, for the node that a test has in its own process.

What always holds: an operation has been done completely when `submit` returns; written data outlives `close`, so a
store can be opened on it again.
What it doesn't do: fail, be slow, or lose anything that was not synced.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.limits import PAGE_BYTES
from kvstore.storage.disk import DiskDone, DiskOpKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.storage.disk import DiskOp

__all__ = ["MemoryDisk", "MemoryDrive"]


class MemoryDisk:
    """One drive. It allocates memory for written pages only."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._memory = mmap.mmap(-1, capacity_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._written: set[int] = set()  # pages
        self._done: list[DiskDone] = []
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def direct_fd(self) -> int | None:
        """None: the drive is not a file."""
        return None

    def submit(self, ops: Sequence[DiskOp]) -> int:
        """Execute operations; all are accepted."""
        for op in ops:
            if op.kind is DiskOpKind.WRITE:
                ctypes.memmove(self._address + op.offset, op.address, op.length)
                self._note(op.offset, op.length)
            elif op.kind is DiskOpKind.READ:
                ctypes.memmove(op.address, self._address + op.offset, op.length)
            self._done.append(DiskDone(op.tag, 0 if op.kind is DiskOpKind.SYNC else op.length))
        os.eventfd_write(self._event_fd, 1)
        return len(ops)

    def reap(self) -> list[DiskDone]:
        """Collect the operations that ended since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        """An eventfd, readable when `reap` has something."""
        return self._event_fd

    def read_at(self, offset: int, length: int) -> bytes:
        """Read whole pages."""
        return self._memory[offset : offset + length]

    def write_at(self, offset: int, data: bytes) -> None:
        """Write whole pages. Zeros on a new drive change nothing, since its memory is zero."""
        if not self._written and data == bytes(len(data)):
            return
        self._memory[offset : offset + len(data)] = data
        self._note(offset, len(data))

    def sync(self) -> None:
        """Do nothing: writes are complete when they return."""

    def data_ranges(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges `(begin, end)` ever written from `start` on, in order."""
        first = start // PAGE_BYTES
        pages = sorted(page for page in self._written if page >= first)
        at = 0
        while at < len(pages):
            begin = at
            while at + 1 < len(pages) and pages[at + 1] == pages[at] + 1:
                at += 1
            yield pages[begin] * PAGE_BYTES, (pages[at] + 1) * PAGE_BYTES
            at += 1

    def refuse_if_deleted(self) -> None:
        """Do nothing: the drive is not a file."""

    def close(self) -> None:
        """Detach the store; `free` ends the drive."""

    def free(self) -> None:
        """Close the eventfd; the drive can't be used afterwards."""
        os.close(self._event_fd)

    def _note(self, offset: int, length: int) -> None:
        self._written.update(range(offset // PAGE_BYTES, (offset + length) // PAGE_BYTES))


class MemoryDrive:
    """The source of a store's only drive."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk

    def numbers(self) -> list[int]:
        """Return 0, the number of the only drive."""
        return [0]

    def open(self, number: int) -> MemoryDisk:
        """Return the drive."""
        del number
        return self._disk

    def take_back(self) -> None:
        """Do nothing: opening created nothing."""
