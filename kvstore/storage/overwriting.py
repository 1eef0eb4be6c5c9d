"""Places of blocks that may not be overwritten yet: a table of the index, from which a restart finishes them.

An erased block leaves the index first and is overwritten afterwards; so does a block in the clear that is rewritten,
encrypted, elsewhere. If a process died in between without a note, no erasure would find the place again.

Always holds: a place is noted in the transaction that removes its block, and is struck out after all of it has been
overwritten. It may be in use again by then, so an opening overwrites only those of its pages that are free, headers
last: without them a scan would not find what an opening interrupted by power loss has left.

What it doesn't do: survive the loss of the index, as after a power failure. A scan for a new one finds places by their
headers, which are overwritten last (`kvstore.storage.stale_extents`).
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import StorageError
from kvstore.limits import HEADER_BYTES, PAGE_BYTES, SCRUB_PIECE_BYTES
from kvstore.storage.row_check import CHECK_BYTES, checked
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.storage.extents import Extents
    from kvstore.storage.index import Entry, Index
    from kvstore.storage.manifests import Place
    from kvstore.storage.volume import Volume

__all__ = ["PLACES", "PLACE_BYTES", "finish", "note", "noted_generations", "strike"]

log = logging.getLogger(__name__)

PLACES: Final = b"erased"  # the table
_START: Final = struct.Struct(">Q")  # the first page, so that LMDB's order is that of the drive
_BLOCK: Final = struct.Struct("<QI")  # its generation and pages
PLACE_BYTES: Final = _START.size
_HEADER_PAGES: Final = HEADER_BYTES // PAGE_BYTES


def note(transaction: Any, table: Any, entries: Iterable[Entry | Place]) -> None:
    """Note the places of blocks, or of records of sessions, in the transaction that removes them."""
    for entry in entries:
        start, row = _row(entry)
        transaction.put(start, row, db=table)


def strike(index: Index, entries: Iterable[Entry | Place]) -> None:
    """Strike out places. If that fails, the next opening overwrites those of their pages that are free."""

    def strike_all(transaction: Any) -> None:
        for entry in entries:
            start, row = _row(entry)
            if transaction.get(start, db=index.erased) == row:  # else another was erased there since
                transaction.delete(start, db=index.erased)

    with suppress(StorageError):
        index.write(strike_all)


def _row(entry: Entry | Place) -> tuple[bytes, bytes]:
    start = _START.pack(entry.offset // PAGE_BYTES)
    pages = record_bytes(entry.length) // PAGE_BYTES
    return start, checked(start, _BLOCK.pack(entry.generation, pages))


def finish(volume: Volume, index: Index, extents: Extents) -> bool:
    """Overwrite what a process that died has left of erased blocks; False if the drive failed."""
    places = _noted(index)
    if not places:
        return True
    free = extents.after(places[0][0])
    try:
        volume.disk.sync()  # before this, a power failure can lose the new copy of a moved block
        done_until = 0  # a place may reach into the next one
        for start, pages in places:
            until = start + pages
            _overwrite(volume, _common(free, max(start + _HEADER_PAGES, done_until), until))
            done_until = max(done_until, until)
        volume.disk.sync()
        for start, _ in places:
            _overwrite(volume, _common(free, start, start + _HEADER_PAGES))
        volume.disk.sync()
    except StorageError as error:
        log.warning("Some erased records could not be overwritten: %s", error)
        return False
    index.write(lambda transaction: transaction.drop(index.erased, delete=False))
    return True


def noted_generations(index: Index) -> dict[int, int]:
    """Return the generations of the records whose places are noted, by offset."""
    with index.reading() as transaction:
        return {
            _START.unpack(start)[0] * PAGE_BYTES: _BLOCK.unpack(row[:-CHECK_BYTES])[0]
            for start, row in transaction.cursor(index.erased)
        }


def _noted(index: Index) -> list[tuple[int, int]]:
    with index.reading() as transaction:
        return [
            (_START.unpack(start)[0], _BLOCK.unpack(row[:-CHECK_BYTES])[1])
            for start, row in transaction.cursor(index.erased)
        ]


def _common(free: list[tuple[int, int]], start: int, until: int) -> Iterator[tuple[int, int]]:
    """Yield the free parts of a place, as first and last pages."""
    at = max(0, bisect_right(free, (start, 0)) - 1)
    while at < len(free) and free[at][0] < until:
        begin, end = max(start, free[at][0]), min(until, sum(free[at]))
        if begin < end:
            yield begin, end
        at += 1


def _overwrite(volume: Volume, some: Iterable[tuple[int, int]]) -> None:
    zeros = bytes(SCRUB_PIECE_BYTES)
    for first, last in some:
        until = last * PAGE_BYTES
        for at in range(first * PAGE_BYTES, until, SCRUB_PIECE_BYTES):
            volume.disk.write_at(at, zeros[: until - at])
