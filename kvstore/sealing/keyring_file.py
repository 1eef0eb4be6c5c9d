"""The file of a keyring, in whole pages, and the seam that tests replace.

What always holds: the file has its name only once all of it is durable, so there is never half a keyring; only one
process has it open; only its owner may read it. Pages are written with O_DIRECT where the file system supports it, so a
page in memory is never written while it changes, and a read after a crash returns what is on the drive.

What it doesn't do: make a write of several sectors atomic. Each sector of a page is old or new until `sync`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
from pathlib import Path
from typing import Final, Protocol

from kvstore.errors import FolderLocked, NoKeyring, NoSpace, StorageError
from kvstore.limits import KEYRING_PAGES_AT_ONCE, PAGE_BYTES
from kvstore.synced_files import sync_folder

__all__ = ["FolderFile", "KeyringFile", "create_file", "keyring_path"]

log = logging.getLogger(__name__)

_COPIES_ON_WRITE: Final = ("bcachefs", "btrfs", "nilfs2", "overlay", "zfs")


def keyring_path(data: Path) -> Path:
    """The path of a data folder's keyring."""
    return data / "keyring"


class KeyringFile(Protocol):
    """The interface of a keyring's file."""

    @property
    def pages(self) -> int:
        """How many whole pages it has."""
        ...

    def read(self, page: int, count: int) -> bytes:
        """Read pages, zeros beyond the end; StorageError if any can't be read."""
        ...

    def write(self, page: int, data: bytes) -> None:
        """Write pages, also at the end; StorageError if any was not written."""
        ...

    def sync(self) -> None:
        """Wait until all that was written survives power loss; StorageError if it may not."""
        ...

    def close(self) -> None:
        """Close the file, so that another process can open it."""
        ...


class FolderFile:
    """A keyring in a data folder."""

    def __init__(self, path: Path, *, locks: bool = True) -> None:
        self._path = path
        try:
            self._fd = os.open(path, (os.O_RDWR if locks else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NoKeyring(f"There is no keyring {path}.") from None
        except OSError as error:
            raise _failed(path, "opened", error) from error
        self._writing = -1
        self._buffer = mmap.mmap(-1, KEYRING_PAGES_AT_ONCE * PAGE_BYTES)
        try:
            if locks:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._writing = _open_directly(self._fd)
                _keep_from_others(self._fd, path)
            self._pages = os.fstat(self._fd).st_size // PAGE_BYTES
        except BlockingIOError as error:
            self.close()
            raise FolderLocked(f"Another process has the keyring {path} open.") from error
        except OSError as error:
            self.close()
            raise _failed(path, "opened", error) from error

    @property
    def pages(self) -> int:
        """How many whole pages it has."""
        return self._pages

    def read(self, page: int, count: int) -> bytes:
        """Read pages."""
        wanted = count * PAGE_BYTES
        try:
            data = os.pread(self._fd, wanted, page * PAGE_BYTES)
        except OSError as error:
            raise _failed(self._path, "read", error) from error
        return data.ljust(wanted, b"\0")

    def write(self, page: int, data: bytes) -> None:
        """Write pages, as many at a time as fit into the buffer."""
        for at in range(0, len(data), len(self._buffer)):
            part = data[at : at + len(self._buffer)]
            self._buffer[: len(part)] = part
            with memoryview(self._buffer) as view, view[: len(part)] as ours:
                try:
                    written = os.pwritev(self._writing, [ours], page * PAGE_BYTES + at)
                except OSError as error:
                    raise _failed(self._path, "written", error) from error
            if written < len(part):
                raise NoSpace(f"There is no room for the keyring {self._path}.")
        self._pages = max(self._pages, page + len(data) // PAGE_BYTES)

    def sync(self) -> None:
        """Wait for the drive."""
        try:
            os.fdatasync(self._writing)
        except OSError as error:
            raise _failed(self._path, "made durable", error) from error

    @property
    def copies_on_write(self) -> str | None:
        """The kind of the file system, if it is copy-on-write, and so keeps overwritten data."""
        kind = _file_system(os.fstat(self._fd).st_dev)
        return kind if kind in _COPIES_ON_WRITE else None

    def close(self) -> None:
        """Close the file, which unlocks it."""
        for fd in (self._writing, self._fd):
            if fd >= 0:
                os.close(fd)
        self._writing = self._fd = -1
        self._buffer.close()


def create_file(path: Path, image: bytes) -> None:
    """Make a keyring of these pages, durably; StorageError if there is one."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # it may be a second name of a keyring in use
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            if os.write(fd, image) < len(image):
                raise NoSpace(f"There is no room for the keyring {path}.")
            os.fsync(fd)
        finally:
            os.close(fd)
        os.link(part, path)  # never replaces a file
        part.unlink()
        sync_folder(path.parent)
    except FileExistsError:
        raise StorageError(f"There is a keyring {path} already, which is not written over.") from None
    except OSError as error:
        raise _failed(path, "made", error) from error


def _keep_from_others(fd: int, path: Path) -> None:
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & 0o077:
        os.fchmod(fd, 0o600)
        log.warning(
            "The keyring %s was open to other users (mode %04o), and is not any more (0600).", path, mode
        )


def _open_directly(fd: int) -> int:
    """Open the same file for writing."""
    path = f"/proc/self/fd/{fd}"
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # tmpfs, where nothing survives anyway


def _file_system(device: int) -> str:
    """The kind of the file system with this device number; empty if unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in mounts.splitlines():
        words, _, behind = line.partition(" - ")
        if words.split()[2] == wanted:
            return behind.split()[0]
    return ""


def _failed(path: Path, what: str, error: OSError) -> StorageError:
    kind = NoSpace if error.errno == errno.ENOSPC else StorageError
    return kind(f"The keyring {path} could not be {what}: {error.strerror}.")
