"""The files of a store's drives: files, or links to files and block devices, named by number in the data folder.

`drive-0.kv` is a file of the folder, or a link to a file elsewhere or to a raw block device; the same holds for higher
numbers. A new drive gets its link here: under its own number if it has been formatted, otherwise under the first free
one.

Always holds: a file that we create has its full size before it has its name; no link replaces another; a file is
created only if a size was given with its name; if opening fails, links made for it are removed.

It formats nothing, and writes nothing to a drive (`kvstore.storage.drive_set` has the rules for that).
"""

from __future__ import annotations

import errno
import os
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

from kvstore.config import show_size, shown_apart
from kvstore.errors import ConfigError, NoSpace, StorageError
from kvstore.limits import DRIVE_CAPACITY_BYTES_MAX, DRIVE_CAPACITY_BYTES_MIN, DRIVES_MAX, PAGE_BYTES
from kvstore.storage.folder import drive_path, index_path
from kvstore.storage.superblock import find_superblock
from kvstore.storage.uring import UringDisk
from kvstore.synced_files import sync_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.config import DriveSpec
    from kvstore.storage.disk import Disk

__all__ = ["DriveSource", "FolderDrives"]


class DriveSource(Protocol):
    """The drives that a store opens, by their numbers."""

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the drives."""
        ...

    def open(self, number: int) -> Disk:
        """Open one; StorageError if that fails."""
        ...

    def take_back(self) -> None:
        """Remove what was created for a start that failed."""
        ...


class FolderDrives:
    """The drives of a data folder."""

    def __init__(self, data: Path, capacity_bytes: int | None, drives: Sequence[DriveSpec] = ()) -> None:
        self._data = data
        self._capacity_bytes = capacity_bytes
        self._specs = drives
        self._made: list[Path] = []

    def numbers(self) -> list[int]:
        """Return the numbers of the drives, including those requested."""
        for spec in self._specs:
            self._adopt(spec)
        linked = self.linked()
        if not linked and not self._specs and not any(self._data.glob("index-*")):
            self._preallocate(drive_path(self._data, 0), self._capacity_bytes)
            linked = [0]
        return linked

    def open(self, number: int) -> UringDisk:
        """Open the drive that has this number."""
        return UringDisk(drive_path(self._data, number))

    def take_back(self) -> None:
        """Remove the files and links that this opening made."""
        for path in self._made:
            path.unlink(missing_ok=True)
        self._made.clear()

    def linked(self) -> list[int]:
        """Return the numbers for which the folder has a name."""
        return [number for number in range(DRIVES_MAX) if os.path.lexists(drive_path(self._data, number))]

    def _adopt(self, spec: DriveSpec) -> None:
        path = spec.path.absolute()
        linked = self.linked()
        real = os.path.realpath(path)
        if any(os.path.realpath(drive_path(self._data, number)) == real for number in linked):
            return
        if not os.path.lexists(path):
            if spec.capacity_bytes is None:  # a device may have been meant
                raise ConfigError(
                    f"{path} does not exist. To create a file there, give its size: {path}:100GiB"
                )
            self._preallocate(path, spec.capacity_bytes)
        elif not (path.is_block_device() or path.is_file()):
            raise ConfigError(f"{path} is neither a file nor a block device, so it cannot be a drive.")
        number = self._number_on(path)
        if number is None:
            number = self._free_number()
        elif number in linked:
            raise ConfigError(
                f"{path} is drive {number}, and the folder {self._data} has another drive {number}."
            )
        link = drive_path(self._data, number)
        link.symlink_to(
            path
        )  # not what it resolves to: names below /dev/disk/by-id survive a reboot, others may not
        self._made.append(link)
        sync_folder(self._data)

    def _preallocate(self, path: Path, capacity_bytes: int | None) -> None:
        _preallocate(path, capacity_bytes)
        self._made.append(path)

    def _number_on(self, path: Path) -> int | None:
        with closing(UringDisk(path)) as disk:
            try:
                superblock = find_superblock(disk)
            except StorageError as error:
                raise ConfigError(f"{path} can't be used as a drive. {error}") from error
        return None if superblock is None else superblock.drive_index

    def _free_number(self) -> int:
        taken = set(self.linked())
        for number in range(DRIVES_MAX):
            if number not in taken and not index_path(self._data, number).exists():
                return number
        raise ConfigError(f"A store has at most {DRIVES_MAX} drives.")


def _preallocate(path: Path, capacity_bytes: int | None) -> None:
    if capacity_bytes is None:
        raise ConfigError(f"There is no drive {path}, and no capacity to create one with.")
    if capacity_bytes < DRIVE_CAPACITY_BYTES_MIN:
        least, actual = shown_apart(DRIVE_CAPACITY_BYTES_MIN, capacity_bytes)
        raise ConfigError(f"A drive has at least {least}, not {actual}.")
    if capacity_bytes > DRIVE_CAPACITY_BYTES_MAX:
        most, actual = shown_apart(DRIVE_CAPACITY_BYTES_MAX, capacity_bytes)
        raise ConfigError(f"A drive has at most {most}, not {actual}.")
    part = path.with_name(f"{path.name}.part")  # a crash leaves this file, which is then overwritten
    try:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"The drive {path} could not be created: {error.strerror}.") from error
    try:
        os.posix_fallocate(fd, 0, capacity_bytes // PAGE_BYTES * PAGE_BYTES)
        os.fsync(fd)
    except OSError as error:
        part.unlink()
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise NoSpace(
                f"The file system of {path.parent} has no room for a drive of {show_size(capacity_bytes)}; create"
                " a smaller one, or make room."
            ) from error
        raise StorageError(f"The drive {path} could not be created: {error.strerror}.") from error
    finally:
        os.close(fd)
    part.rename(path)
    sync_folder(path.parent)
