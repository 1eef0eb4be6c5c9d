"""The table of a drive's blocks: the Python face of `keep/blocks.c`, and the file that it keeps its rows in.

Always holds: what `kvstore/storage/keep/blocks.h` says. Errors are StorageErrors, whose texts are half sentences; a
row, or a file, that is not as it was written is Corrupt. After an error of a change the file has that change or not,
and no other one is made.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import Corrupt, StorageError
from kvstore.limits import INDEX_ROWS_AT_ONCE
from kvstore.storage.index_layout import BLOCK_ROW, LIFE_ROW, NAME_BYTES
from kvstore.storage.keep._keep import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["BlockTable"]


class BlockTable:
    """An open table. One thread uses it."""

    def __init__(self, path: Path, flags: int) -> None:
        """Open the file; then `create` or `load` the table."""
        try:
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"its table of blocks can't be opened: {error.strerror}") from error
        self._is_writable = flags & os.O_ACCMODE != os.O_RDONLY
        self._table = ffi.gc(lib.keep_blocks_new(self._fd), lib.keep_blocks_free)
        if self._table == ffi.NULL:
            os.close(self._fd)
            raise MemoryError("There is no memory for the table of blocks.")

    @classmethod
    def create(cls, path: Path) -> BlockTable:
        """Make a new table, in place of an existing file."""
        table = cls(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        with table._closed_if_it_fails():
            _check(lib.keep_blocks_create(table._table))
        return table

    @classmethod
    def load(cls, path: Path, *, readonly: bool = False) -> BlockTable:
        """Open an existing table, undoing what a killed process left of its last change; Corrupt if it isn't whole."""
        table = cls(path, os.O_RDONLY if readonly else os.O_RDWR)
        with table._closed_if_it_fails():
            _check(lib.keep_blocks_load(table._table, not readonly), "its table of blocks was changed")
        return table

    def close(self) -> None:
        """Close the file. Nothing is asked of the table afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def sync(self) -> None:
        """Make all changes durable."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise StorageError(f"could not be synced: {error.strerror}") from error

    @property
    def commit(self) -> int:
        """The number of the last change."""
        return int(lib.keep_blocks_commit(self._table))

    def __len__(self) -> int:
        return int(lib.keep_blocks_count(self._table))

    def begin_epoch(self, drive_uuid: bytes, epoch: int) -> None:
        """Say to which drive and epoch the table belongs."""
        _check(lib.keep_blocks_begin_epoch(self._table, drive_uuid, epoch))

    def is_of(self, drive_uuid: bytes, epoch: int) -> bool:
        """Return whether it belongs to this drive and epoch."""
        return bool(lib.keep_blocks_is_of(self._table, drive_uuid, epoch))

    def put(self, rows: NDArray[Any]) -> None:
        """Put blocks, given as `BLOCK_ROW`s, in this order, each in place of one with its name: one commit."""
        data = ffi.from_buffer("struct keep_block[]", np.ascontiguousarray(rows))
        _check(lib.keep_blocks_put(self._table, data, len(rows)))

    def remove(self, names: bytes) -> NDArray[Any]:
        """Remove blocks: one commit. Return the row of each; one without a generation for each that there is not."""
        return self._of_names(lib.keep_blocks_remove, names)

    def remove_generations(self, generations: Sequence[int]) -> NDArray[Any]:
        """Remove the blocks with these generations, like `remove`."""
        asked = ffi.from_buffer("uint64_t[]", np.array(generations, np.uint64))
        return self._rows(len(generations), lib.keep_blocks_remove_generations, asked)

    def renew(self, names: bytes, expiries_ms: NDArray[np.uint64]) -> None:
        """Change when blocks expire; those that there are not are left out."""
        expiries = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(expiries_ms))
        _check(lib.keep_blocks_renew(self._table, names, expiries, len(expiries_ms)))

    def find(self, names: bytes) -> NDArray[Any]:
        """Return the row of each block; one without a generation for each that there is not."""
        return self._of_names(lib.keep_blocks_find, names)

    def find_until(self, tenant: bytes, keys: bytes, count: int, now_ms: int) -> int:
        """Return how many of these keys are there and have not expired, up to the first that is not."""
        return _check(lib.keep_blocks_find_until(self._table, tenant, keys, count, now_ms))

    def of_generations(self, generations: Sequence[int]) -> NDArray[Any]:
        """Return the row of each generation; one without a generation for each that there is not."""
        asked = ffi.from_buffer("uint64_t[]", np.array(generations, np.uint64))
        return self._rows(len(generations), lib.keep_blocks_of_generations, asked)

    def after(self, at: int, limit: int, tenant: bytes | None = None) -> tuple[NDArray[Any], int]:
        """Look at `limit` names from a place on, or a few more; return their rows, or those of one tenant.

        Also return where to continue; 0: there are no more. The order is one of hashes, and 0 is the beginning: a scan
        returns each block that is there from its beginning to its end.
        """
        rows = np.empty(limit + lib.KEEP_ALIKE_MAX, BLOCK_ROW)
        place = ffi.new("uint64_t *", at)
        mark = 0 if tenant is None else lib.keep_blocks_mark(self._table, tenant)
        out = ffi.from_buffer("struct keep_block[]", rows, require_writable=True)
        count = _check(lib.keep_blocks_after(self._table, place, mark, limit, out))
        rows = rows[:count]
        return rows if tenant is None else rows[rows["tenant"] == np.void(tenant)], place[0]

    def generations(self, tenant: bytes | None = None) -> NDArray[np.uint64]:
        """Return the generations of all blocks in ascending order, or those of one tenant."""
        every = self._column(lib.keep_blocks_generations(self._table), np.uint64)
        if tenant is None:
            return np.sort(every[every > 0])
        marks = self._column(lib.keep_blocks_marks(self._table), np.uint32)
        return np.sort(every[(every > 0) & (marks == lib.keep_blocks_mark(self._table, tenant))])

    def newest(self, limit: int) -> NDArray[np.uint64]:
        """Return the last generations, at most `limit`, in ascending order."""
        every = self._column(lib.keep_blocks_generations(self._table), np.uint64)
        if 0 < limit < len(every):
            every = np.partition(every, -limit)[-limit:]
        return np.sort(every[every > 0])

    def lives(self) -> NDArray[Any]:
        """Return where all blocks are, as `LIFE_ROW`s, in no order, unchecked since loading."""
        lives = np.empty(len(self), LIFE_ROW)
        out = ffi.from_buffer("struct keep_life[]", lives, require_writable=True)
        _check(lib.keep_blocks_lives(self._table, out))
        return lives

    def rows(self) -> Iterator[NDArray[Any]]:
        """Return all rows, thousands at once, in no order, unchecked since loading. Nothing is changed meanwhile."""
        live = self._column(lib.keep_blocks_generations(self._table), np.uint64) > 0
        for first in range(0, len(live), INDEX_ROWS_AT_ONCE):
            part = live[first : first + INDEX_ROWS_AT_ONCE]
            at, size = lib.KEEP_HEAD_BYTES + first * BLOCK_ROW.itemsize, len(part) * BLOCK_ROW.itemsize
            try:
                data = os.pread(self._fd, size, at)
            except OSError as error:
                raise StorageError(f"could not be read: {error.strerror}") from error
            if len(data) < size:
                raise Corrupt("could not be read: its table of blocks was cut")
            rows = np.frombuffer(data, BLOCK_ROW)[part]
            if len(rows):
                yield rows

    def _column(self, words: Any, kind: type[np.generic]) -> NDArray[Any]:
        count = lib.keep_blocks_slots(self._table)
        if not count:
            return np.empty(0, kind)
        return np.frombuffer(ffi.buffer(words, count * np.dtype(kind).itemsize), kind)

    def _of_names(self, call: Any, names: bytes) -> NDArray[Any]:
        count, rest = divmod(len(names), NAME_BYTES)
        assert not rest, "each name has a tenant and a key of their lengths"
        return self._rows(count, call, names)

    def _rows(self, count: int, call: Any, what: Any) -> NDArray[Any]:
        rows = np.empty(count, BLOCK_ROW)
        _check(
            call(
                self._table, what, count, ffi.from_buffer("struct keep_block[]", rows, require_writable=True)
            )
        )
        return rows

    @contextmanager
    def _closed_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _check(outcome: int, if_damaged: str = "contradicts itself: a block's row was changed") -> int:
    if outcome >= 0:
        return outcome
    if outcome == -errno.EBADMSG:
        raise Corrupt(if_damaged)
    if outcome == -errno.EEXIST:
        raise StorageError("could not be written: two blocks have one generation")
    if outcome == -errno.ENOMEM:
        raise MemoryError("There is no memory for the table of blocks.")
    raise StorageError(f"could not be read or written: {os.strerror(-outcome)}")
