"""S3-FIFO: three first-in-first-out queues, counted in pages, since blocks vary in size.

New blocks enter the small queue. At its end, blocks that were used since they arrived move to the main queue; the
others are evicted, and their names are remembered as ghosts. A new block whose name is a ghost enters the main queue
at once. At the end of the main queue, a block used since its last turn gets another turn, at most three in all; the
others are evicted. So a scan passes through the small queue and leaves the main one alone.

The small queue is a tenth of the drive; when it has more, it is evicted from first. Ghosts stand for as many pages as
the rest of the drive has.

Always holds: touching a row changes one byte, and causes at most about three moves, later, during the search for a
candidate.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvstore.limits import EVICTION_GHOSTS_MAX, EVICTION_USES_MAX
from kvstore.storage.eviction.idmap import IdMap
from kvstore.storage.eviction.policy import NO_ROW
from kvstore.storage.eviction.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.storage.eviction.policy import Steps

__all__ = ["Ghosts", "S3Fifo"]

_SMALL: Final = 0
_MAIN: Final = 1
_HEADS: Final = 2
_SMALL_FRACTION: Final = 10  # one in this many pages
_SHED_ENTRIES: Final = 4096  # of ghosts that are over, dropped together
_ENTRY_MASK: Final = (1 << 32) - 1  # entries are numbered modulo 2^32


class S3Fifo:
    """Two rings of rows and a memory of names."""

    __slots__ = ("_ghosts", "_pages", "_queue", "_queue_pages", "_rings", "_small_pages_max", "_uses")

    name = "s3fifo"
    knows_names = True

    def __init__(self, capacity_pages: int) -> None:
        self._small_pages_max = max(1, capacity_pages // _SMALL_FRACTION)
        self._rings = Rings(_HEADS)
        self._queue_pages = [0, 0]
        self._ghosts = Ghosts(capacity_pages - self._small_pages_max)
        # Of each row:
        self._pages = array("I")
        self._queue = bytearray()
        self._uses = bytearray()

    def admitted(self, row: int, pages: int, name64: int) -> None:
        """Take in a new block: small, or main if it was here not long ago."""
        self._reach(row, pages)
        self._enter(_MAIN if self._ghosts.take(name64) else _SMALL, row)

    def readmitted(self, row: int, pages: int) -> None:
        """Take in a block that has shown its worth: main."""
        self._reach(row, pages)
        self._enter(_MAIN, row)

    def restored(self, pages: Sequence[int]) -> None:
        """Take in rows from 0 on: main, since it is unknown which were new."""
        self._rings.fill(_MAIN, len(pages))
        self._pages.extend(pages)
        self._queue.extend(bytes([_MAIN]) * len(pages))
        self._uses.extend(bytes(len(pages)))
        self._queue_pages[_MAIN] = sum(pages)

    def inherited(self, row: int, pages: int, place: int) -> None:
        """Take in a block at another one's place, in its queue and with its uses; one that is in stays."""
        if self._rings.is_linked(_HEADS + row):
            return
        self._reach(row, pages)
        queue = self._queue[place]
        self._queue[row] = queue
        self._queue_pages[queue] += pages
        self._uses[row] = self._uses[place]
        self._rings.push_behind(_HEADS + place, _HEADS + row)

    def touched(self, rows: Sequence[int]) -> None:
        """Count uses; nothing moves."""
        uses = self._uses
        for row in rows:
            if uses[row] < EVICTION_USES_MAX:
                uses[row] += 1

    def removed(self, row: int) -> None:
        """Take a row out."""
        self._rings.unlink(_HEADS + row)
        self._queue_pages[self._queue[row]] -= self._pages[row]

    def evicted(self, row: int, name64: int) -> None:
        """Take a row out; remember its name if it was still in the small queue."""
        self.removed(row)
        if self._queue[row] == _SMALL:
            self._ghosts.add(name64, self._pages[row])

    def candidate(self, steps: Steps) -> int:
        """Return the next row that goes, moving on those that were used."""
        after, uses, queue_pages = self._rings.after, self._uses, self._queue_pages
        while steps.left > 0:
            small = queue_pages[_SMALL] > self._small_pages_max or not queue_pages[_MAIN]
            node = after[_SMALL if small else _MAIN]
            if node < _HEADS:
                return NO_ROW  # both are empty
            row = node - _HEADS
            if not uses[row]:
                return row
            steps.left -= 1
            left = 0 if small else uses[row] - 1
            self.removed(row)
            self._enter(_MAIN, row, left)
        return NO_ROW

    def _reach(self, row: int, pages: int) -> None:
        self._rings.reach(_HEADS + row)
        missing = row + 1 - len(self._queue)
        if missing > 0:
            self._queue.extend(bytes(missing))
            self._uses.extend(bytes(missing))
            self._pages.extend([0] * missing)
        self._pages[row] = pages

    def _enter(self, queue: int, row: int, uses: int = 0) -> None:
        self._queue[row] = queue
        self._uses[row] = uses
        self._queue_pages[queue] += self._pages[row]
        self._rings.push(queue, _HEADS + row)


class Ghosts:
    """Names of blocks that are gone, the newest, up to a number of pages; about 26 bytes each."""

    __slots__ = ("_first", "_known", "_names", "_pages", "_pages_max", "_start", "_total_pages")

    def __init__(self, pages_max: int) -> None:
        self._pages_max = pages_max
        self._known = IdMap(min(pages_max, EVICTION_GHOSTS_MAX))  # by name, the number of its entry
        # The entries, oldest first. One whose name was taken back has no pages.
        self._names = array("Q")
        self._pages = array("I")
        self._start = 0  # entries before this one are over
        self._first = 0  # the number of the entry that stands first in the arrays
        self._total_pages = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, name64: int, pages: int) -> None:
        """Remember a name, and forget the oldest ones if that is too much."""
        self.take(name64)
        self._known.add(name64, self._first + len(self._names) & _ENTRY_MASK)
        self._names.append(name64)
        self._pages.append(pages)
        self._total_pages += pages
        while self._total_pages > self._pages_max or len(self._names) - self._start > EVICTION_GHOSTS_MAX:
            self._forget_oldest()

    def take(self, name64: int) -> bool:
        """Return whether a name is remembered, and forget it."""
        entry = self._known.remove(name64)
        if entry < 0:
            return False
        at = entry - self._first & _ENTRY_MASK
        self._total_pages -= self._pages[at]
        self._pages[at] = 0
        return True

    def _forget_oldest(self) -> None:
        if self._pages[self._start]:
            self._total_pages -= self._pages[self._start]
            self._known.remove(self._names[self._start])
        self._start += 1
        if self._start >= _SHED_ENTRIES and self._start * 2 >= len(self._names):
            del self._names[: self._start]
            del self._pages[: self._start]
            self._first += self._start
            self._start = 0
