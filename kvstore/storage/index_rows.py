"""Rows of a table of an index, thousands at once, from the file that LMDB has: an opening reads all of them.

LMDB gives rows one by one, and a Python call for each of ten million is half a minute. Here a tree is followed a level
at a time, and the rows of many leaves are gathered together. The rows come in the order of their names.

Always holds: only a file that is sealed, or whose structure was looked through, is read (`kvstore.storage.index_file`),
and nothing is committed to it meanwhile; one thread uses an index. Rows whose names or values have other lengths are
Corrupt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.errors import Corrupt
from kvstore.storage.index_file import DATA_NAME, NODE_BYTES, PAGE_BYTES, PAGE_HEAD_BYTES, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["rows_of"]

_PAGES_AT_ONCE: Final = 2048
_LOWER_AT: Final = 6  # of the words of a page's head: where its places end


def rows_of(folder: Path, table: bytes, name_bytes: int, value_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """Give arrays of rows, each a name and its value."""
    with (folder / DATA_NAME).open("rb") as file:
        root, depth = tree_of(file.fileno(), table)
        if not depth:
            return
        data = np.memmap(file, np.uint8, "r")
    size = NODE_BYTES + name_bytes + value_bytes
    windows = np.lib.stride_tricks.sliding_window_view(data, size)
    said = np.array(
        [value_bytes, 0, 0, name_bytes], np.uint16
    )  # both halves of a length, flags, length of name
    pages = np.array([root])
    for _ in range(depth - 1):
        pages = np.concatenate([_children(data, some) for some in _parts(pages)])
    for some in _parts(pages):
        nodes = windows[_nodes(data, some)]
        if (nodes[:, :NODE_BYTES].copy().view("<u2") != said).any():
            raise Corrupt("a row of the index has another length than all others")
        yield nodes[:, NODE_BYTES:]


def _parts(pages: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for first in range(0, len(pages), _PAGES_AT_ONCE):
        yield pages[first : first + _PAGES_AT_ONCE]


def _nodes(data: NDArray[Any], pages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tell where the nodes of some pages are in the file, page by page, in the order of their names."""
    words = data.reshape(-1, PAGE_BYTES)[pages].view("<u2")
    first = PAGE_HEAD_BYTES // 2
    counts = words[:, _LOWER_AT].astype(np.int64) // 2 - first
    places = words[:, first : first + counts.max()]
    at: NDArray[np.int64] = (pages[:, None] * PAGE_BYTES + places)[np.arange(counts.max()) < counts[:, None]]
    return at


def _children(data: NDArray[Any], pages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tell which pages some branch pages lead to."""
    heads = data[_nodes(data, pages)[:, None] + np.arange(NODE_BYTES)].view("<u2").astype(np.int64)
    numbers: NDArray[np.int64] = heads[:, 0] | heads[:, 1] << 16 | heads[:, 2] << 32
    return numbers
