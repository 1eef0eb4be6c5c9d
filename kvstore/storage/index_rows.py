"""Reads rows of an index's table, thousands at a time, directly from LMDB's file: a start reads all of them.

LMDB returns rows one by one, and a Python call for each of ten million takes half a minute. Here a tree is followed a
level at a time, and the rows of many leaves are gathered together, in the order of their names.

Always holds: only a file that is sealed, or whose structure was checked, is read (`kvstore.storage.index_file`), and
nothing is committed to it meanwhile; one thread uses an index. Rows whose names or values have other lengths are
Corrupt. After `check_order` LMDB finds each row by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvstore.errors import Corrupt
from kvstore.limits import INDEX_PAGES_AT_ONCE
from kvstore.storage.index_file import DATA_NAME, NODE_BYTES, PAGE_BYTES, PAGE_HEAD_BYTES, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Numbers = NDArray[np.int64]

__all__ = ["check_order", "rows_of"]

_LOWER_AT: Final = 6  # of the words of a page's head: where its places end
_WORD_BYTES: Final = 8  # names are whole words


class _Level(NamedTuple):
    """Branch pages that are equally far from the root, from left to right."""

    children: Numbers  # the number of children of each page
    names: Bytes  # the first name of each child; the first child of a page has none
    pages: Numbers  # of the children


class _Table:
    """One tree of a file."""

    def __init__(self, folder: Path, table: bytes, name_bytes: int, value_bytes: int) -> None:
        with (folder / DATA_NAME).open("rb") as file:
            self._root, self._depth = tree_of(file.fileno(), table)
            self._data = np.memmap(file, np.uint8, "r")
        self._name_bytes, self._value_bytes = name_bytes, value_bytes

    def levels(self) -> Iterator[_Level]:
        """Return the branches, the root first."""
        pages = np.array([self._root])
        for _ in range(self._depth - 1):
            parts = [self._children(some) for some in _parts(pages)]
            level = _Level(*(np.concatenate(part) for part in zip(*parts, strict=True)))
            yield level
            pages = level.pages

    def leaves(self) -> Iterator[tuple[Bytes, Numbers]]:
        """The rows, each a name and its value, and the number of rows of each leaf."""
        if not self._depth:
            return
        pages = np.array([self._root])
        for level in self.levels():
            pages = level.pages
        size = NODE_BYTES + self._name_bytes + self._value_bytes
        windows = np.lib.stride_tricks.sliding_window_view(self._data, size)
        said = np.array(
            [self._value_bytes, 0, 0, self._name_bytes], np.uint16
        )  # length, its upper half, flags, name
        for some in _parts(pages):
            at, counts = self._nodes(some)
            if at.max() >= len(windows) or (windows[at, :NODE_BYTES].copy().view("<u2") != said).any():
                raise Corrupt("a row has another length than the others of its table")
            nodes = windows[at]
            yield nodes[:, NODE_BYTES:], counts

    def _nodes(self, pages: Numbers) -> tuple[Numbers, Numbers]:
        """Return where the nodes of some pages are in the file, in the order of names, and how many each page has."""
        words = self._data.reshape(-1, PAGE_BYTES)[pages].view("<u2")
        first = PAGE_HEAD_BYTES // 2
        counts = words[:, _LOWER_AT].astype(np.int64) // 2 - first
        places = words[:, first : first + counts.max()]
        return (pages[:, None] * PAGE_BYTES + places)[np.arange(counts.max()) < counts[:, None]], counts

    def _children(self, pages: Numbers) -> tuple[Numbers, Bytes, Numbers]:
        at, counts = self._nodes(pages)
        within = at[:, None] + np.arange(NODE_BYTES + self._name_bytes)
        nodes = np.take(self._data, within, mode="clip")  # a node without a name may end the file
        heads = nodes[:, :NODE_BYTES].copy().view("<u2").astype(np.int64)
        has_name = np.ones(len(at), np.bool_)
        has_name[np.cumsum(counts) - counts] = False
        if (heads[has_name, 3] != self._name_bytes).any():
            raise Corrupt("a branch has a name of another length than the rows of its table")
        return counts, nodes[:, NODE_BYTES:], heads[:, 0] | heads[:, 1] << 16 | heads[:, 2] << 32


def rows_of(folder: Path, table: bytes, name_bytes: int, value_bytes: int) -> Iterator[Bytes]:
    """Yield arrays of rows, each a name and its value."""
    for rows, _ in _Table(folder, table, name_bytes, value_bytes).leaves():
        yield rows


def check_order(folder: Path, table: bytes, name_bytes: int, value_bytes: int) -> None:
    """Raise Corrupt unless the rows ascend, and a search for each name leads to its row."""
    tree = _Table(folder, table, name_bytes, value_bytes)
    firsts, lasts = [], []  # names of each leaf's
    for rows, counts in tree.leaves():
        names = np.ascontiguousarray(rows[:, :name_bytes])
        if not _are_less(names[:-1], names[1:]).all():
            raise Corrupt("rows of a table are not in their order")
        ends = np.cumsum(counts)
        firsts.append(names[ends - counts])
        lasts.append(names[ends - 1])
    if not firsts:
        return
    first, last = np.concatenate(firsts), np.concatenate(lasts)
    if not _are_less(last[:-1], first[1:]).all():
        raise Corrupt("rows of a table are not in their order")
    leaf_of = np.arange(len(first))  # the first leaf below each page of the level that is looked at
    for level in reversed(list(tree.levels())):
        starts = np.cumsum(level.children) - level.children
        named = np.ones(len(level.pages), np.bool_)
        named[starts] = False
        leaves, names = leaf_of[named], level.names[named]
        if _are_less(first[leaves], names).any() or not _are_less(last[leaves - 1], names).all():
            raise Corrupt("a block is not found where its row stands")
        leaf_of = leaf_of[starts]


def _are_less(names: Bytes, others: Bytes) -> NDArray[np.bool_]:
    """Tell of each name whether it comes before the other one."""
    less, same = np.zeros(len(names), np.bool_), np.ones(len(names), np.bool_)
    for word in range(names.shape[1] // _WORD_BYTES):
        at = slice(word * _WORD_BYTES, (word + 1) * _WORD_BYTES)
        one, other = (np.ascontiguousarray(each[:, at]).view(">u8")[:, 0] for each in (names, others))
        less |= same & (one < other)
        same &= one == other
    return less


def _parts(pages: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for first in range(0, len(pages), INDEX_PAGES_AT_ONCE):
        yield pages[first : first + INDEX_PAGES_AT_ONCE]
