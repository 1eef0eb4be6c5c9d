"""The Disk for production: a preallocated file or a raw block device, O_DIRECT, through io_uring.

Always holds: every transfer bypasses the page cache, so a crash of the process can't undo a completed
one; nothing is in flight after `close`; a drive is open only once.

It doesn't zero-fill: the first write into an unwritten extent of a preallocated file costs about a quarter
of its speed (`kvstore.storage.superblock` fills drives of moderate size when it formats them).
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import struct
from itertools import chain, starmap
from typing import TYPE_CHECKING, Final

from kvstore.errors import StorageError
from kvstore.limits import BOUNCE_BYTES, DRIVE_QUEUE_DEPTH, PAGE_BYTES
from kvstore.storage._uring import ffi, lib
from kvstore.storage.disk import DiskDone
from kvstore.storage.folder import OpenFiles
from nic_offload.memory import undumped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore.storage.disk import DiskOp

    Move = Callable[[int, list[memoryview], int], int]

__all__ = ["UringDisk"]

_OP_WORDS: Final = 5  # struct store_op
_DONE: Final = struct.Struct("=Qq")  # struct store_done

assert ffi.sizeof("struct store_op") == _OP_WORDS * 8
assert ffi.sizeof("struct store_done") == _DONE.size


class UringDisk:
    """One drive with one ring; all calls must be made by one thread."""

    def __init__(self, path: Path, queue_depth: int = DRIVE_QUEUE_DEPTH) -> None:
        self._path = path
        self._depth = queue_depth
        self._fd = _open_direct(path)
        self._lock_fd = -1
        try:
            self._lock_fd = _locked(path)
            self._is_file = stat.S_ISREG(os.fstat(self._fd).st_mode)
            self._files = OpenFiles(path)
            self._capacity_bytes = os.lseek(self._fd, 0, os.SEEK_END) // PAGE_BYTES * PAGE_BYTES
            self._ring = _open_ring(self._fd, queue_depth)
        except BaseException:
            self._close_files()
            raise
        self._event_fd = int(lib.store_ring_event_fd(self._ring))
        self._ops = ffi.new("struct store_op[]", queue_depth)
        self._ops_bytes = ffi.buffer(self._ops)
        self._done = ffi.new("struct store_done[]", queue_depth)
        self._done_bytes = memoryview(ffi.buffer(self._done))
        self._bounce = undumped(BOUNCE_BYTES)  # page-aligned memory for the blocking helpers
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        """The size of the file or device, in whole pages."""
        return self._capacity_bytes

    @property
    def direct_fd(self) -> int | None:
        """The descriptor, open for direct I/O."""
        return self._fd

    def submit(self, ops: Sequence[DiskOp]) -> int:
        """Start operations in one system call; return how many were accepted."""
        count = min(len(ops), self._depth)
        struct.pack_into(f"={_OP_WORDS * count}Q", self._ops_bytes, 0, *chain.from_iterable(ops[:count]))
        return _checked(lib.store_ring_submit(self._ring, self._ops, count), self._path, "starting I/O")

    def reap(self) -> list[DiskDone]:
        """Collect what has ended."""
        count = _checked(
            lib.store_ring_reap(self._ring, self._done, self._depth), self._path, "collecting finished I/O"
        )
        return list(starmap(DiskDone, _DONE.iter_unpack(self._done_bytes[: count * _DONE.size])))

    def fileno(self) -> int:
        """Return the ring's eventfd."""
        return self._event_fd

    def read_at(self, offset: int, length: int) -> bytes:
        """Read whole pages, waiting for them."""
        parts = []
        for begin in range(offset, offset + length, BOUNCE_BYTES):
            wanted = min(BOUNCE_BYTES, offset + length - begin)
            self._whole(os.preadv, begin, wanted, "Reading")
            parts.append(self._bounce[:wanted])
        return b"".join(parts)

    def write_at(self, offset: int, data: bytes) -> None:
        """Write whole pages, waiting for it."""
        for at in range(0, len(data), BOUNCE_BYTES):
            part = data[at : at + BOUNCE_BYTES]
            self._bounce[: len(part)] = part
            self._whole(os.pwritev, offset + at, len(part), "Writing")

    def sync(self) -> None:
        """Wait until what was written survives power loss."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StorageError(f"The drive {self._path} could not be synced: {error.strerror}.") from error

    def data_ranges(self, start: int) -> Iterator[tuple[int, int]]:
        """Return the parts of a file that are not holes; a device is one part."""
        while start < self._capacity_bytes:
            begin, end = self._next_data(start)
            if begin >= end:
                return
            yield begin, end
            start = end

    def refuse_if_deleted(self) -> None:
        """Look whether the path still leads to the file. A device that is removed fails by itself."""
        if self._is_file and not self._files.are_in_place():
            raise StorageError(f"The drive {self._path} was deleted or replaced while it was open.")

    def close(self) -> None:
        """Wait for operations in flight and close the drive."""
        if self._closed:
            return
        self._closed = True
        while lib.store_ring_depth_left(self._ring) < self._depth:
            lib.store_ring_wait(self._ring)
            self.reap()
        lib.store_ring_close(self._ring)
        self._close_files()
        self._bounce.close()

    def _close_files(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)

    def _next_data(self, start: int) -> tuple[int, int]:
        if not self._is_file:
            return start, self._capacity_bytes
        try:
            begin = os.lseek(self._fd, start, os.SEEK_DATA)
            end = os.lseek(self._fd, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return start, start
            return start, self._capacity_bytes  # a file system that doesn't report holes
        begin -= begin % PAGE_BYTES
        return max(begin, start), min(-(-end // PAGE_BYTES) * PAGE_BYTES, self._capacity_bytes)

    def _whole(self, move: Move, offset: int, wanted: int, doing: str) -> None:
        what = f"{doing} {wanted} bytes at {offset} of {self._path}"
        try:
            with memoryview(self._bounce) as bounce, bounce[:wanted] as part:
                moved = move(self._fd, [part], offset)
        except OSError as error:
            raise StorageError(f"{what} failed: {error.strerror}.") from error
        if moved != wanted:
            raise StorageError(f"{what} ended after {moved} bytes.")


def _open_direct(path: Path) -> int:
    # On a block device O_EXCL fails if it is in use, by a file system for example; on a file it has no effect.
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_EXCL)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise StorageError(
                f"The drive {path} is in use: it is mounted, or another process has it."
            ) from error
        if error.errno == errno.EINVAL:
            raise StorageError(
                f"The file system of {path} refuses O_DIRECT; "
                "put the data folder on ext4 or xfs, or use a block device."
            ) from error
        raise StorageError(f"The drive {path} could not be opened: {error.strerror}.") from error


def _locked(path: Path) -> int:
    # A separate descriptor: the ring keeps the one it works on open for a while after a process has died.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StorageError(f"The drive {path} is in use: another process has it.") from error
    return fd


def _open_ring(file_fd: int, depth: int) -> object:
    out = ffi.new("store_ring **")
    code = lib.store_ring_open(file_fd, depth, out)
    if code < 0:
        limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if code == -errno.ENOMEM and limit_bytes != resource.RLIM_INFINITY:
            raise StorageError(
                "io_uring could not be set up: its rings don't fit into the memory that this process may lock"
                f" ({limit_bytes >> 10:,} KiB); raise ulimit -l, LimitMEMLOCK= of the unit, or --ulimit memlock= of the"
                " container to 64 MiB."
            )
        raise StorageError(
            f"io_uring could not be set up: {os.strerror(-code)}; "
            "it needs Linux 5.10 or later, and a container that allows it."
        )
    return out[0]


def _checked(code: int, path: Path, doing: str) -> int:
    if code < 0:
        raise StorageError(f"{doing.capitalize()} on {path} failed: {os.strerror(-code)} ({code}).")
    return code
