"""The Disk seam: all that the store requires of a drive.

Transfers go through `submit` and `reap`, in batches, between a drive and memory given by address: Python never sees
those bytes. Reads and writes at opening go through the blocking helpers.

Always holds, of every Disk: a result is either all requested bytes or a `-errno`, so a short transfer is never
mistaken for a complete one; each accepted operation is reaped exactly once; `close` waits for operations in flight,
so their memory can be freed after it.

A Disk does not order operations, does not cache, and does not retry.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["Disk", "DiskDone", "DiskFactory", "DiskOp", "DiskOpKind", "Progress"]

Progress = Callable[[str, int, int], None]
"""Told `(what, done_bytes, total_bytes)` now and then during a long opening."""

DiskFactory = Callable[["Path", "int | None"], "Disk"]
"""Opens the drive in a data folder; makes it with this capacity if there is none."""


class DiskOpKind(enum.IntEnum):
    """What to do; the numbers are those of `uring.c`."""

    READ = 0
    WRITE = 1
    SYNC = 2  # address, length and offset are ignored


class DiskOp(NamedTuple):
    """One operation, all in whole pages. The memory at the address stays untouched until it is reaped."""

    kind: DiskOpKind
    address: int
    length: int
    offset: int
    tag: int


class DiskDone(NamedTuple):
    """The result of an operation: all its bytes, or `-errno`."""

    tag: int
    result: int


class Disk(Protocol):
    """A drive."""

    @property
    def capacity_bytes(self) -> int:
        """The size of the drive."""
        ...

    @property
    def direct_fd(self) -> int | None:
        """A descriptor through which a lane may write as well; None if there is none."""
        ...

    def submit(self, ops: Sequence[DiskOp]) -> int:
        """Start operations, in one system call; return how many of the first ones were accepted."""
        ...

    def reap(self) -> list[DiskDone]:
        """Collect the operations that have ended since the last call; never waits."""
        ...

    def fileno(self) -> int:
        """Return an eventfd, readable when `reap` has something; writing to it wakes its waiters."""
        ...

    def read_at(self, offset: int, length: int) -> bytes:
        """Read whole pages, waiting for them; StorageError if any byte can't be read."""
        ...

    def write_at(self, offset: int, data: bytes) -> None:
        """Write whole pages, waiting for it; StorageError if any byte wasn't written."""
        ...

    def sync(self) -> None:
        """Wait until everything written survives power loss; StorageError if that fails."""
        ...

    def data_ranges(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges `(begin, end)` ever written from `start` on, in order and page-aligned."""
        ...

    def refuse_if_deleted(self) -> None:
        """StorageError if its file was deleted or replaced while it was open: what is written to it would be lost."""
        ...

    def close(self) -> None:
        """Wait for operations in flight and close the drive."""
        ...
