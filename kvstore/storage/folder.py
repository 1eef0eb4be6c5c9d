"""The data folder: who has it open, and the drive that lives in it.

Always holds: one process at a time has a folder open; a file named `drive-0.kv` has its full size from the
moment that it has the name. A link named `drive-0.kv` to a raw block device makes that device the drive.

It doesn't look into the drive (`kvstore.storage.superblock` does).
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError, FolderLocked, NoSpace, StorageError
from kvstore.limits import DRIVE_CAPACITY_BYTES_MIN, PAGE_BYTES
from kvstore.storage.uring import UringDisk

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DRIVE_NAME", "INDEX_NAME", "FolderLock", "open_drive_in", "sync_folder", "use_device"]

DRIVE_NAME: Final = "drive-0.kv"
INDEX_NAME: Final = "index"
_LOCK_NAME: Final = "kvstore.lock"


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

    def release(self) -> None:
        """Let another process have it."""
        os.close(self._fd)


def open_drive_in(data: Path, capacity_bytes: int | None) -> UringDisk:
    """Open the folder's drive; make it with this capacity if there is none. The default `DiskFactory`."""
    path = data / DRIVE_NAME
    if not path.exists() and not path.is_symlink():
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
