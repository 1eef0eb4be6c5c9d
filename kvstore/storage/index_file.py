"""The file of an index, looked at before LMDB maps it: LMDB believes every byte, and a wrong one can kill the process.

LMDB has no checksums. It follows page numbers, lengths and positions as it finds them, through a mapping; a page
behind the end of the file is SIGBUS, and a wrong free list lets it write over its own pages. So a file is mapped only
if one of two holds:

- it is byte for byte the one that was closed cleanly: its *seal*, a small file beside it, has its length and CRC; or
- its structure is whole (`check_structure`): both heads, every page of every tree and of the free list in the file, of
  the right kind, inside its bounds and used once, with as many entries as the tree says.

Always holds: nothing here writes to the index; the seal is taken away before the index is changed, and a seal that is
itself damaged is none.

It doesn't look into rows (`kvstore.storage.index_check` does), and doesn't know whose index it is.
"""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvstore.errors import Corrupt
from nic_offload.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "DATA_NAME",
    "NODE_BYTES",
    "PAGE_BYTES",
    "PAGE_HEAD_BYTES",
    "check_structure",
    "is_sealed",
    "seal",
    "tree_of",
    "unseal",
]

DATA_NAME: Final = "data.mdb"
_SEAL_NAME: Final = "seal"
_SEAL: Final = struct.Struct("<8sQI")  # magic, bytes of the file, their CRC32C; then the CRC32C of these
_SEAL_MAGIC: Final = b"TKVSEAL1"
_CRC: Final = struct.Struct("<I")
_READ_BYTES: Final = 4 << 20

# LMDB's data version 1 on a little-endian 64-bit machine (mdb.c, "MDB_page", "MDB_node", "MDB_db", "MDB_meta").
PAGE_BYTES: Final = 4096
_PAGE_HEAD: Final = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
PAGE_HEAD_BYTES: Final = 16
_BRANCH, _LEAF, _OVERFLOW, _META = 0x01, 0x02, 0x04, 0x08
_BIG_DATA, _SUB_DATA = 0x01, 0x02
NODE_BYTES: Final = 8
_KEY_BYTES_MAX: Final = 511
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
    """Say that the file is whole as it is now. It has been closed, and synced.

    The seal is not: without it, after power loss, the index is looked through, and one of another time fits no file.
    """
    length, crc = _summed(folder / DATA_NAME)
    fixed = _SEAL.pack(_SEAL_MAGIC, length, crc)
    (folder / _SEAL_NAME).write_bytes(fixed + _CRC.pack(crc32c(fixed)))


def unseal(folder: Path) -> None:
    """Take the seal away: the file is about to be changed."""
    seal_path = folder / _SEAL_NAME
    if seal_path.is_dir():  # whoever has put it there
        shutil.rmtree(seal_path)
    seal_path.unlink(missing_ok=True)


def is_sealed(folder: Path) -> bool:
    """Tell whether the file is, to the last byte, what it was when it was sealed."""
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
        while part := file.read(_READ_BYTES):
            crc = crc32c(part, crc)
            length += len(part)
    return length, crc


# The structure.


def check_structure(folder: Path) -> None:
    """Walk over every page that LMDB could follow; Corrupt if there is one that it must not see."""
    path = folder / DATA_NAME
    try:
        with path.open("rb") as file:
            _Walk(file.fileno()).check()
    except (OSError, struct.error, IndexError) as error:
        raise Corrupt(f"its file can't be read: {error}") from error


def tree_of(fd: int, table: bytes) -> tuple[int, int]:
    """Tell a table's root page and how deep it is; 0 of a table without rows. The structure is believed."""
    walk = _Walk(fd)
    for name, (_, value) in walk.rows(walk.begin().main):
        if name == table:
            tree = _Tree._make(_TREE.unpack(value))
            return tree.root, tree.depth
    return 0, 0


class _Walk:
    """One pass over a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pages = os.fstat(fd).st_size // PAGE_BYTES
        self._used = bytearray(self._pages)  # 1: something leads there

    def begin(self) -> _Head:
        """Give the head that counts."""
        heads = [self._head(number) for number in range(_METAS)]
        first, second = (head.transaction for head in heads)
        if (first, second) != (0, 0) and (first & 1 or not second & 1 or abs(first - second) != 1):
            raise Corrupt("its two heads don't follow each other")
        head = max(heads, key=lambda one: one.transaction)
        if not 1 <= head.last_page < self._pages:
            raise Corrupt("its file is shorter than it says")
        self._pages = head.last_page + 1
        self._used[:_METAS] = b"\1" * _METAS
        return head

    def check(self) -> None:
        head = self.begin()
        for _, (flags, value) in self.rows(head.main):
            if flags != _SUB_DATA or len(value) != _TREE.size:
                raise Corrupt("one of its tables is none")
            tree = _Tree._make(_TREE.unpack(value))
            if tree.flags:
                raise Corrupt("one of its tables is of another kind")
            for _ in self._leaves(tree):
                pass
        for _, (_, value) in self.rows(head.free):
            self._freed(value)

    def _head(self, number: int) -> _Head:
        page = self._page(number, _META)
        if _META_HEAD.unpack_from(page, PAGE_HEAD_BYTES) != (_META_MAGIC, 1):
            raise Corrupt("its head is damaged")
        free, main = (_Tree._make(_TREE.unpack_from(page, _META_TREES + at * _TREE.size)) for at in range(2))
        if (free.pad, free.flags, main.flags) != (PAGE_BYTES, _INTEGER_KEY, 0):
            raise Corrupt("its head is damaged")
        last_page, transaction = _META_TAIL.unpack_from(page, _META_TREES + 2 * _TREE.size)
        return _Head(free, main, last_page, transaction)

    def rows(self, tree: _Tree) -> Iterator[tuple[bytes, tuple[int, bytes]]]:
        """Give key, flags and value of every row of a small tree."""
        for page, nodes in self._leaves(tree):
            for at, low, high, flags, key in nodes.tolist():
                start = at + NODE_BYTES
                length = low | high << 16
                value = page[start + key : start + key + length]
                if flags & _BIG_DATA:
                    (first,) = _WORD.unpack_from(page, start + key)
                    value = self._read(first, -(-(PAGE_HEAD_BYTES + length) // PAGE_BYTES))[PAGE_HEAD_BYTES:][
                        :length
                    ]
                yield page[start : start + key], (flags, value)

    def _leaves(self, tree: _Tree) -> Iterator[tuple[bytes, NDArray[Any]]]:
        """Give every leaf and where its nodes are; each is sound, and so is all that leads there."""
        if tree.root == _NO_ROOT:
            if tree[2:7] != (0, 0, 0, 0, 0):
                raise Corrupt("a tree without a root has pages")
            return
        counts = [0, 0, 0, 0]  # branch pages, leaf pages, overflow pages, entries
        stack = [(tree.root, tree.depth)]
        while stack:
            number, depth = stack.pop()
            if depth < 1:
                raise Corrupt("a tree is deeper than it says")
            page = self._claimed(number, _LEAF if depth == 1 else _BRANCH)
            nodes = _nodes(page, is_leaf=depth == 1)
            if depth > 1:
                counts[0] += 1
                stack.extend(
                    (low | high << 16 | flags << 32, depth - 1) for _, low, high, flags, _ in nodes.tolist()
                )
                continue
            counts[1] += 1
            counts[2] += self._overflow(page, nodes)
            counts[3] += len(nodes)
            yield page, nodes
        if tuple(counts) != tree[3:7]:
            raise Corrupt("a tree has not as many entries or pages as it says")

    def _overflow(self, page: bytes, nodes: NDArray[Any]) -> int:
        total = 0
        for at, low, high, flags, key in nodes[(nodes[:, 3] & _BIG_DATA) != 0].tolist():
            assert flags & _BIG_DATA
            (first,) = _WORD.unpack_from(page, at + NODE_BYTES + key)
            count = -(-(PAGE_HEAD_BYTES + (low | high << 16)) // PAGE_BYTES)
            head = self._claimed(first, _OVERFLOW)
            if _OVERFLOW_COUNT.unpack_from(head, 12)[0] != count:
                raise Corrupt(f"page {first} has another length than its row")
            for number in range(first + 1, first + count):
                self._claim(number)
            total += count
        return total

    def _freed(self, value: bytes) -> None:
        count = _WORD.unpack_from(value)[0]
        if (count + 1) * _WORD.size > len(value):
            raise Corrupt("its free list is cut")
        for number in np.frombuffer(value, "<u8", count, _WORD.size).tolist():
            self._claim(number)

    def _claim(self, number: int) -> None:
        if not _METAS <= number < self._pages:
            raise Corrupt(f"something leads to page {number}, which it doesn't have")
        if self._used[number]:
            raise Corrupt(f"two things lead to page {number}")
        self._used[number] = 1

    def _claimed(self, number: int, kind: int) -> bytes:
        self._claim(number)
        return self._page(number, kind)

    def _page(self, number: int, kind: int) -> bytes:
        page = self._read(number, 1)
        said, _, flags, _, _ = _PAGE_HEAD.unpack_from(page)
        if said != number or flags != kind:
            raise Corrupt(f"page {number} is not what leads there says it is")
        return page

    def _read(self, number: int, count: int) -> bytes:
        wanted = count * PAGE_BYTES
        data = os.pread(self._fd, wanted, number * PAGE_BYTES)
        if len(data) != wanted:
            raise Corrupt("its file is shorter than it says")
        return data


def _nodes(page: bytes, *, is_leaf: bool) -> NDArray[Any]:
    """Give of each node of a page its place, both halves of its length, flags and length of key; Corrupt if unsound."""
    number, _, _, lower, upper = _PAGE_HEAD.unpack_from(page)
    if not PAGE_HEAD_BYTES < lower <= upper <= PAGE_BYTES or lower % 2:
        raise Corrupt(f"page {number} has no bounds")
    words = np.frombuffer(page, "<u2").astype(np.int64)
    places = words[PAGE_HEAD_BYTES // 2 : lower // 2]
    if (places % 2).any() or (places < upper).any() or (places > PAGE_BYTES - NODE_BYTES).any():
        raise Corrupt(f"page {number} has a row outside of its bounds")
    at = places // 2
    low, high, flags, keys = words[at], words[at + 1], words[at + 2], words[at + 3]
    sizes = NODE_BYTES + keys
    if is_leaf:
        big = flags & _BIG_DATA
        if (flags & ~(_BIG_DATA | _SUB_DATA)).any() or (keys < 1).any() or (keys > _KEY_BYTES_MAX).any():
            raise Corrupt(f"page {number} has a row of another kind")
        sizes = sizes + np.where(big, _WORD.size, low | high << 16)
    elif (keys[1:] < 1).any() or (keys > _KEY_BYTES_MAX).any():
        raise Corrupt(f"page {number} has a row of another kind")
    sizes += sizes % 2
    order = np.argsort(places)
    ends = (places + sizes)[order]
    # Nodes lie one behind the other from `upper` to the page's end, with nothing in between.
    if ends[-1] != PAGE_BYTES or places[order[0]] != upper or (ends[:-1] != places[order][1:]).any():
        raise Corrupt(f"page {number} has rows that overlap")
    return np.stack([places, low, high, flags, keys], axis=1)
