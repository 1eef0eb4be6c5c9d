"""The data folder: its lock, the names of its drives and indexes, and notes of the commits of each index.

Always holds: one process at a time has a folder open; the notes in the lock file survive the process, not power loss.

It doesn't open drives (`kvstore.storage.drive_files` does), and doesn't know which of them belong together
(`kvstore.storage.drive_set` does).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.errors import ConfigError, FolderLocked, StorageError
from kvstore.limits import DRIVES_MAX, LENT_MAX, PAGE_BYTES
from kvstore.storage.row_check import CHECK_BYTES, checked, is_whole

__all__ = [
    "BegunNote",
    "CommitNote",
    "FolderLock",
    "LentNote",
    "NotePlace",
    "OpenFiles",
    "SyncNote",
    "drive_path",
    "index_path",
    "kernel_boot_id",
]

_LOCK_NAME: Final = "kvstore.lock"
_NOTE: Final = struct.Struct("<16sQQ")
_NOTE_BYTES: Final = _NOTE.size + 8  # with its check, and in whole words
_NO_NOTE: Final = (bytes(16), 0, 0)
_SYNCED_AT: Final = PAGE_BYTES // 2  # after all notes of commits
_BEGUN_AT: Final = PAGE_BYTES  # after those of syncs
_LENT: Final = struct.Struct("<16sQQQII")
_LENT_BYTES: Final = _LENT.size + 8
_LENT_AT: Final = 2 * PAGE_BYTES
_LOCK_BYTES: Final = 4 * PAGE_BYTES

assert _NOTE_BYTES * DRIVES_MAX <= _SYNCED_AT
assert _SYNCED_AT + _NOTE_BYTES * DRIVES_MAX <= _BEGUN_AT
assert _BEGUN_AT + _NOTE_BYTES * DRIVES_MAX <= _LENT_AT
assert _LENT_AT + _LENT_BYTES * LENT_MAX * DRIVES_MAX <= _LOCK_BYTES


def drive_path(data: Path, number: int) -> Path:
    """Where a drive is: a file, or a link to a file elsewhere or to a raw block device."""
    return data / f"drive-{number}.kv"


def index_path(data: Path, number: int) -> Path:
    """Where a drive's index is."""
    return data / f"index-{number}"


class CommitNote(NamedTuple):
    """The last commit of an index that is known to have happened: its drive, epoch and number."""

    drive_uuid: bytes
    epoch: int
    commit: int


class SyncNote(NamedTuple):
    """The last sync that is known to have happened: its drive and epoch, and the generation up to which it reached."""

    drive_uuid: bytes
    epoch: int
    generation: int


class BegunNote(NamedTuple):
    """The last generation that was given, with its drive and epoch. No record on the drive has a higher one."""

    drive_uuid: bytes
    epoch: int
    generation: int


class LentNote(NamedTuple):
    """Ground lent to a lane: it may have contiguous records that no index has yet."""

    drive_uuid: bytes
    epoch: int
    page: int
    generation: int
    pages: int
    records: int


class FolderLock:
    """Locks a data folder for this process; the kernel releases it when the process dies."""

    def __init__(self, data: Path) -> None:
        self._path = data / _LOCK_NAME
        try:
            had_folder = data.is_dir()
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._is_new, self._made = not self._path.exists(), None if had_folder else data
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise ConfigError(f"The data folder {data} can't be used: it is a file, not a folder.") from error
        except OSError as error:
            raise ConfigError(f"The data folder {data} can't be used: {error.strerror}.") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise FolderLocked(f"Another process has the data folder {data} open.") from error
        if not os.fstat(self._fd).st_nlink:  # that process has just given it up, with the folder
            os.close(self._fd)
            raise FolderLocked(f"Another process had the data folder {data} open; try again.")
        try:
            os.posix_fallocate(self._fd, 0, _LOCK_BYTES)  # a mapped page without room would kill the process
            self._page = mmap.mmap(self._fd, _LOCK_BYTES)
        except OSError as error:
            os.close(self._fd)
            raise StorageError(f"The data folder {data} can't be used: {error.strerror}.") from error

    def place(self, number: int) -> NotePlace:
        """Return the place where commits of one drive's index are noted."""
        return NotePlace(self._page, number)

    def release(self) -> None:
        """Unlock it for other processes."""
        self._page.close()
        os.close(self._fd)

    def give_up(self) -> None:
        """The same, after nothing came of the folder: where nothing else was made, nothing is left."""
        if self._is_new and list(self._path.parent.iterdir()) == [self._path]:
            self._path.unlink()
            if self._made is not None:
                self._made.rmdir()
        self.release()


class NotePlace:
    """Where commits of one index, and syncs and generations of its drive are noted; valid while the lock is held."""

    def __init__(self, page: mmap.mmap, number: int) -> None:
        self._page = page
        self._at = number * _NOTE_BYTES
        self._lent_at = _LENT_AT + number * LENT_MAX * _LENT_BYTES

    @property
    def note(self) -> CommitNote:
        """The last note of this process or an earlier one; an empty one if it is damaged."""
        return CommitNote._make(self._read(b"note", self._at))

    def write_note(self, note: CommitNote) -> None:
        """Note a commit: a store to a page that outlives the process, so it costs next to nothing."""
        self._write(b"note", self._at, note)

    @property
    def synced(self) -> SyncNote:
        """The last synced note; nothing, if it is damaged."""
        return SyncNote._make(self._read(b"synced", _SYNCED_AT + self._at))

    def write_synced(self, note: SyncNote) -> None:
        """Note a sync."""
        self._write(b"synced", _SYNCED_AT + self._at, note)

    @property
    def begun(self) -> BegunNote:
        """The last generation that was given; none, if the note is damaged."""
        return BegunNote._make(self._read(b"begun", _BEGUN_AT + self._at))

    def write_begun(self, note: BegunNote) -> None:
        """Note that a generation was given, before anything is written under it."""
        self._write(b"begun", _BEGUN_AT + self._at, note)

    @property
    def lent(self) -> list[LentNote]:
        """All ground whose records may not all be in the index; damaged notes are left out."""
        starts = range(self._lent_at, self._lent_at + LENT_MAX * _LENT_BYTES, _LENT_BYTES)
        rows = [self._page[at : at + _LENT.size + CHECK_BYTES] for at in starts]
        return [LentNote._make(_LENT.unpack_from(row)) for row in rows if is_whole(b"lent", row)]

    def write_lent(self, place: int, note: LentNote | None) -> None:
        """Note ground before a lane has it; None: all records on it are in the index."""
        at = self._lent_at + place * _LENT_BYTES
        row = bytes(_LENT.size + CHECK_BYTES) if note is None else checked(b"lent", _LENT.pack(*note))
        self._page[at : at + len(row)] = row

    def _read(self, kind: bytes, at: int) -> tuple[bytes, int, int]:
        row = self._page[at : at + _NOTE.size + CHECK_BYTES]
        return _NOTE.unpack_from(row) if is_whole(kind, row) else _NO_NOTE

    def _write(self, kind: bytes, at: int, note: tuple[bytes, int, int]) -> None:
        row = checked(kind, _NOTE.pack(*note))
        self._page[at : at + len(row)] = row


class OpenFiles:
    """Files that are open, by their names: whether these still lead to them."""

    def __init__(self, *paths: Path) -> None:
        self._identities = {path: _identity(path) for path in paths}

    def are_in_place(self) -> bool:
        """Return whether no file was deleted or replaced since."""
        return all(map(self.is_in_place, self._identities))

    def is_in_place(self, path: Path) -> bool:
        """The same, of one of them."""
        with suppress(OSError):
            return _identity(path) == self._identities[path]
        return False


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def kernel_boot_id() -> str:
    """Return the id of this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
