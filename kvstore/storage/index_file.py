"""Checks the file of an index before LMDB maps it: LMDB trusts every byte, and a wrong one can kill the process.

LMDB has no checksums. It follows page numbers, lengths and positions through a mapping; a page beyond the end of the
file is SIGBUS, and a wrong free list makes LMDB overwrite its own pages. So a file is mapped only if

- it is byte for byte the one that was closed cleanly: its *seal*, a small file beside it, has its length and CRC; or
- its structure is valid (`check_structure`): both heads, and every page of every tree and of the free list, is in the
  file, of the right kind, within its bounds and used once, with as many entries as the tree says.

Always holds: nothing here writes to the index, except to overwrite one that is discarded; the seal is removed before
the index is changed, and a damaged seal counts as none.

It doesn't check rows (`kvstore.storage.index_check` does), and doesn't know which store the index belongs to.
"""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvstore.errors import Corrupt
from kvstore.limits import INDEX_PAGES_CHECKED_AT_ONCE, INDEX_READ_BYTES, LMDB_KEY_BYTES_MAX
from nic_offload.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "DATA_NAME",
    "check_structure",
    "is_sealed",
    "overwrite",
    "seal",
    "unseal",
]

DATA_NAME: Final = "data.mdb"
_SEAL_NAME: Final = "seal"
_SEAL: Final = struct.Struct("<8sQI")  # magic, bytes of the file, their CRC32C; then the CRC32C of these
_SEAL_MAGIC: Final = b"TKVSEAL1"
_CRC: Final = struct.Struct("<I")

# LMDB's data version 1 on a little-endian 64-bit machine (mdb.c, "MDB_page", "MDB_node", "MDB_db", "MDB_meta").
_PAGE_BYTES: Final = 4096
_PAGE_HEAD: Final = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_PAGE_HEAD_BYTES: Final = 16
_BRANCH, _LEAF, _OVERFLOW, _META = 0x01, 0x02, 0x04, 0x08
_BIG_DATA, _SUB_DATA = 0x01, 0x02
_NODE_BYTES: Final = 8
_TREE: Final = struct.Struct(
    "<IHHQQQQQ"
)  # pad, flags, depth, branch pages, leaf pages, overflow pages, entries, root
_META_HEAD: Final = struct.Struct("<II")
_META_MAGIC: Final = 0xBEEFC0DE
_META_TREES: Final = 40
_META_TAIL: Final = struct.Struct("<QQ")  # last page, transaction
_METAS: Final = 2
_NO_ROOT: Final = (1 << 64) - 1
_INTEGER_KEY: Final = 0x08
_WORD: Final = struct.Struct("<Q")
_OVERFLOW_COUNT: Final = struct.Struct("<I")


class _Tree(NamedTuple):
    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Head(NamedTuple):
    free: _Tree
    main: _Tree
    last_page: int
    transaction: int


# The seal.


def seal(folder: Path) -> None:
    """Seal the file, which has been closed and synced, as it is now.

    The seal is not synced: if power loss takes it the index is checked, and a seal from another time fits no file.
    """
    length, crc = _summed(folder / DATA_NAME)
    fixed = _SEAL.pack(_SEAL_MAGIC, length, crc)
    (folder / _SEAL_NAME).write_bytes(fixed + _CRC.pack(crc32c(fixed)))


def unseal(folder: Path) -> None:
    """Remove the seal, because the file is about to be changed."""
    seal_path = folder / _SEAL_NAME
    if seal_path.is_dir():  # it is not ours
        shutil.rmtree(seal_path)
    seal_path.unlink(missing_ok=True)


def overwrite(folder: Path) -> None:
    """Overwrite a file that is about to be discarded with zeros, durably; it may be missing."""
    with suppress(FileNotFoundError), (folder / DATA_NAME).open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        zeros = bytes(INDEX_READ_BYTES)
        for at in range(0, size, INDEX_READ_BYTES):
            file.write(zeros[: size - at])
        os.fsync(file.fileno())


def is_sealed(folder: Path) -> bool:
    """Return whether the file is byte for byte what it was when it was sealed."""
    with suppress(OSError):
        said = (folder / _SEAL_NAME).read_bytes()
        if len(said) == _SEAL.size + _CRC.size and _CRC.unpack_from(said, _SEAL.size)[0] == crc32c(
            said[: _SEAL.size]
        ):
            magic, length, crc = _SEAL.unpack_from(said)
            data = folder / DATA_NAME
            return bool(
                magic == _SEAL_MAGIC and data.stat().st_size == length and _summed(data) == (length, crc)
            )
    return False


def _summed(path: Path) -> tuple[int, int]:
    length = crc = 0
    with path.open("rb") as file:
        while part := file.read(INDEX_READ_BYTES):
            crc = crc32c(part, crc)
            length += len(part)
    return length, crc


# The structure.


def check_structure(folder: Path) -> None:
    """Check every page that LMDB could reach; Corrupt if LMDB must not follow one."""
    path = folder / DATA_NAME
    try:
        with path.open("rb") as file:
            _Walk(file.fileno()).check()
    except (OSError, struct.error, IndexError) as error:
        raise Corrupt(f"its file can't be read: {error}") from error


class _Walk:
    """One pass over a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pages = os.fstat(fd).st_size // _PAGE_BYTES
        self._used = np.zeros(self._pages, np.uint8)  # 1: something leads there

    def begin(self) -> _Head:
        """Return the current head."""
        heads = [self._head(number) for number in range(_METAS)]
        first, second = (head.transaction for head in heads)
        if (first, second) != (0, 0) and (first & 1 or not second & 1 or abs(first - second) != 1):
            raise Corrupt("its two heads don't follow each other")
        head = max(heads, key=lambda one: one.transaction)
        if not 1 <= head.last_page < self._pages:
            raise Corrupt("its file is shorter than its header says")
        self._pages = head.last_page + 1
        self._used[:_METAS] = 1
        return head

    def check(self) -> None:
        head = self.begin()
        for _, (flags, value) in self.rows(head.main):
            if flags != _SUB_DATA or len(value) != _TREE.size:
                raise Corrupt("one of its tables is invalid")
            tree = _Tree._make(_TREE.unpack(value))
            if tree.flags:
                raise Corrupt("one of its tables is of another kind")
            for _ in self._leaves(tree):
                pass
        for _, (_, value) in self.rows(head.free):
            self._freed(value)

    def _head(self, number: int) -> _Head:
        page = self._page(number, _META)
        if _META_HEAD.unpack_from(page, _PAGE_HEAD_BYTES) != (_META_MAGIC, 1):
            raise Corrupt("its head is damaged")
        free, main = (_Tree._make(_TREE.unpack_from(page, _META_TREES + at * _TREE.size)) for at in range(2))
        if (free.pad, free.flags, main.flags) != (_PAGE_BYTES, _INTEGER_KEY, 0):
            raise Corrupt("its head is damaged")
        last_page, transaction = _META_TAIL.unpack_from(page, _META_TREES + 2 * _TREE.size)
        return _Head(free, main, last_page, transaction)

    def rows(self, tree: _Tree) -> Iterator[tuple[bytes, tuple[int, bytes]]]:
        """Key, flags and value of every row of a small tree."""
        for pages, nodes in self._leaves(tree):
            for row, at, low, high, flags, key in nodes.tolist():
                page, start = pages[row].tobytes(), at + _NODE_BYTES
                length = low | high << 16
                value = page[start + key : start + key + length]
                if flags & _BIG_DATA:
                    (first,) = _WORD.unpack_from(page, start + key)
                    value = self._read(first, -(-(_PAGE_HEAD_BYTES + length) // _PAGE_BYTES))[
                        _PAGE_HEAD_BYTES:
                    ][:length]
                yield page[start : start + key], (flags, value)

    def _leaves(self, tree: _Tree) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """Yield leaves, many at once, with their nodes. Each leaf, and each page above it, has been checked."""
        if tree.root == _NO_ROOT:
            if tree[2:7] != (0, 0, 0, 0, 0):
                raise Corrupt("a tree without a root has pages")
            return
        if tree.depth < 1:
            raise Corrupt("a tree is deeper than its header says")
        counts = [0, 0, 0, 0]  # branch pages, leaf pages, overflow pages, entries
        numbers = np.array([tree.root], np.uint64)
        for _ in range(tree.depth - 1):
            counts[0] += len(numbers)
            numbers = np.concatenate([self._below(some) for some in _parts(numbers)])
        for some in _parts(numbers):
            pages, nodes = self._sound(some, _LEAF)
            counts[1] += len(pages)
            counts[2] += self._overflow(pages, nodes)
            counts[3] += len(nodes)
            yield pages, nodes
        if tuple(counts) != tree[3:7]:
            raise Corrupt("a tree's entries or pages differ from its header's counts")

    def _below(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the pages that branch pages lead to."""
        _, nodes = self._sound(numbers, _BRANCH)
        low, high, flags = nodes[:, 2:5].T
        below: NDArray[np.uint64] = (low | high << 16 | flags << 32).astype(np.uint64)
        return below

    def _sound(self, numbers: NDArray[np.uint64], kind: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Read pages of one kind to which something leads; return them and their nodes."""
        self._claim(numbers)
        data = b"".join([self._read(number, 1) for number in numbers.tolist()])
        pages = np.frombuffer(data, np.uint8).reshape(-1, _PAGE_BYTES)
        said, flags = pages.view("<u8")[:, 0], pages.view("<u2")[:, 5]
        _refuse(numbers, (said != numbers) | (flags != kind), "has another kind or number than in its parent")
        return pages, _nodes(numbers, pages.view("<u2"), is_leaf=kind == _LEAF)

    def _overflow(self, pages: NDArray[np.uint8], nodes: NDArray[np.int64]) -> int:
        total = 0
        for row, at, low, high, _, key in nodes[(nodes[:, 4] & _BIG_DATA) != 0].tolist():
            (first,) = _WORD.unpack_from(pages[row], at + _NODE_BYTES + key)
            count = -(-(_PAGE_HEAD_BYTES + (low | high << 16)) // _PAGE_BYTES)
            self._claim(np.array([first], np.uint64))
            head = self._page(first, _OVERFLOW)
            if _OVERFLOW_COUNT.unpack_from(head, 12)[0] != count:
                raise Corrupt(f"page {first} has another length than its row")
            self._claim(np.arange(first + 1, first + count, dtype=np.uint64))
            total += count
        return total

    def _freed(self, value: bytes) -> None:
        count = _WORD.unpack_from(value)[0]
        if (count + 1) * _WORD.size > len(value):
            raise Corrupt("its free list is truncated")
        self._claim(np.frombuffer(value, "<u8", count, _WORD.size))

    def _claim(self, numbers: NDArray[np.uint64]) -> None:
        """Note that something leads to these pages."""
        outside = numbers[(numbers < _METAS) | (numbers >= self._pages)]
        if outside.size:
            raise Corrupt(f"a page refers to page {outside[0]}, which doesn't exist")
        again = numbers[self._used[numbers] != 0]
        self._used[numbers] = 1
        if not again.size and len(np.unique(numbers)) < len(numbers):
            ordered = np.sort(numbers)
            again = ordered[1:][ordered[1:] == ordered[:-1]]
        if again.size:
            raise Corrupt(f"two pages refer to page {again[0]}")

    def _page(self, number: int, kind: int) -> bytes:
        page = self._read(number, 1)
        said, _, flags, _, _ = _PAGE_HEAD.unpack_from(page)
        if said != number or flags != kind:
            raise Corrupt(f"page {number} has another kind or number than its parent says")
        return page

    def _read(self, number: int, count: int) -> bytes:
        wanted = count * _PAGE_BYTES
        data = os.pread(self._fd, wanted, number * _PAGE_BYTES)
        if len(data) != wanted:
            raise Corrupt("its file is shorter than its header says")
        return data


def _parts(numbers: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
    for first in range(0, len(numbers), INDEX_PAGES_CHECKED_AT_ONCE):
        yield numbers[first : first + INDEX_PAGES_CHECKED_AT_ONCE]


def _refuse(numbers: NDArray[np.uint64], wrong: NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        raise Corrupt(f"page {numbers[wrong][0]} {why}")


def _nodes(numbers: NDArray[np.uint64], words: NDArray[np.uint16], *, is_leaf: bool) -> NDArray[np.int64]:
    """For each node of some pages: its page's row, its offset, both halves of its length, flags and key length.

    Corrupt if one is unsound.
    """
    lower, upper = words[:, 6].astype(np.int64), words[:, 7].astype(np.int64)
    within = (lower > _PAGE_HEAD_BYTES) & (lower <= upper) & (upper <= _PAGE_BYTES) & (lower % 2 == 0)
    _refuse(numbers, ~within, "has no bounds")
    counts = (lower - _PAGE_HEAD_BYTES) // 2
    every = words[:, _PAGE_HEAD_BYTES // 2 :][:, : counts.max()]
    row, column = np.nonzero(np.arange(every.shape[1]) < counts[:, None])
    place = every[row, column].astype(np.int64)
    of = numbers[row]
    outside = (place % 2 != 0) | (place < upper[row]) | (place > _PAGE_BYTES - _NODE_BYTES)
    _refuse(of, outside, "has a row outside of its bounds")
    low, high, flags, keys = (words[row, place // 2 + word].astype(np.int64) for word in range(4))
    if is_leaf:
        strange = ((flags & ~(_BIG_DATA | _SUB_DATA)) != 0) | (keys < 1)
        sizes = _NODE_BYTES + keys + np.where(flags & _BIG_DATA, _WORD.size, low | high << 16)
    else:
        strange = (keys < 1) & (column > 0)
        sizes = _NODE_BYTES + keys
    _refuse(of, strange | (keys > LMDB_KEY_BYTES_MAX), "has a row of another kind")
    # Nodes lie one after the other from `upper` to the page's end, with nothing in between.
    order = np.lexsort((place, row))
    starts, ends = place[order], (place + sizes + sizes % 2)[order]
    is_first = np.append(True, row[1:] != row[:-1])  # rows ascend, whatever the order of their nodes
    expected = np.where(is_first, upper[row], np.append(0, ends[:-1]))
    is_last = np.append(is_first[1:], True)
    _refuse(of, (starts != expected) | (is_last & (ends != _PAGE_BYTES)), "has rows that overlap")
    return np.stack([row, place, low, high, flags, keys], axis=1)
