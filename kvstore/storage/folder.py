"""The data folder: who has it open, how far its index had got, and the drive that lives in it.

Always holds: one process at a time has a folder open; a file named `drive-0.kv` has its full size from the
moment that it has the name; the note in the lock file survives the process, not the power. A link named
`drive-0.kv` to a raw block device makes that device the drive.

It doesn't look into the drive (`kvstore.storage.superblock` does).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.errors import ConfigError, FolderLocked, NoSpace, StorageError
from kvstore.limits import DRIVE_CAPACITY_BYTES_MAX, DRIVE_CAPACITY_BYTES_MIN, PAGE_BYTES
from kvstore.storage.uring import UringDisk

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "DRIVE_NAME",
    "INDEX_NAME",
    "CommitNote",
    "FolderLock",
    "open_drive_in",
    "sync_folder",
    "use_device",
]

DRIVE_NAME: Final = "drive-0.kv"
INDEX_NAME: Final = "index"
_LOCK_NAME: Final = "kvstore.lock"
_NOTE: Final = struct.Struct("<16sQQ")


class CommitNote(NamedTuple):
    """The last commit of the index that is known to have happened: of which store, in which epoch, its number."""

    store_uuid: bytes
    epoch: int
    commit: int


class FolderLock:
    """Holds a data folder for this process; the kernel lets go of it when the process dies."""

    def __init__(self, data: Path) -> None:
        try:
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(data / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"The data folder {data} cannot be used: {error.strerror}.") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise FolderLocked(f"Another process has the data folder {data} open.") from error
        try:
            os.posix_fallocate(self._fd, 0, PAGE_BYTES)  # a mapped page without room would kill the process
            self._page = mmap.mmap(self._fd, PAGE_BYTES)
        except OSError as error:
            os.close(self._fd)
            raise StorageError(f"The data folder {data} cannot be used: {error.strerror}.") from error

    @property
    def note(self) -> CommitNote:
        """What was noted last, by this process or by one before it."""
        return CommitNote._make(_NOTE.unpack_from(self._page))

    def write_note(self, note: CommitNote) -> None:
        """Note a commit: a store to a page that outlives the process, so it costs next to nothing."""
        _NOTE.pack_into(self._page, 0, *note)

    def release(self) -> None:
        """Let another process have it."""
        self._page.close()
        os.close(self._fd)


def open_drive_in(data: Path, capacity_bytes: int | None) -> UringDisk:
    """Open the folder's drive; make it with this capacity if there is none. The default `DiskFactory`."""
    path = data / DRIVE_NAME
    if not path.exists() and not path.is_symlink():
        if (data / INDEX_NAME).exists():  # a new drive would hide that the blocks are gone
            raise StorageError(
                f"The drive of {data} is gone: the folder has an index and no {DRIVE_NAME}."
                " Bring the drive back, or remove the index to begin with a new one."
            )
        _preallocate(path, capacity_bytes)
    return UringDisk(path)


def use_device(data: Path, device: Path) -> None:
    """Make a raw block device the folder's drive; ConfigError if it is none, or the folder has another drive."""
    if not device.is_block_device():
        raise ConfigError(
            f"{device} is not a block device; without one the drive is a file in the data folder."
        )
    path = data / DRIVE_NAME
    if path.is_symlink() and path.resolve() == device.resolve():
        return
    if path.is_symlink() or path.exists():
        raise ConfigError(f"The data folder {data} has a drive already, and it is not {device}.")
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.symlink_to(device.resolve())
    sync_folder(data)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _preallocate(path: Path, capacity_bytes: int | None) -> None:
    if capacity_bytes is None:
        raise ConfigError(f"There is no drive in {path.parent} and no capacity was given to make one with.")
    if capacity_bytes < DRIVE_CAPACITY_BYTES_MIN:
        raise ConfigError(
            f"A drive has at least {DRIVE_CAPACITY_BYTES_MIN} bytes; {capacity_bytes} were asked for."
        )
    if capacity_bytes > DRIVE_CAPACITY_BYTES_MAX:
        raise ConfigError(
            f"A drive has at most {DRIVE_CAPACITY_BYTES_MAX} bytes; {capacity_bytes} were asked for."
        )
    part = path.with_suffix(".part")  # a crash leaves this name, which is made anew
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, capacity_bytes // PAGE_BYTES * PAGE_BYTES)
        os.fsync(fd)
    except OSError as error:
        part.unlink()
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise NoSpace(
                f"The file system of {path.parent} has no room for {capacity_bytes} bytes."
            ) from error
        raise StorageError(f"The drive {path} could not be made: {error.strerror}.") from error
    finally:
        os.close(fd)
    part.rename(path)
    sync_folder(path.parent)
