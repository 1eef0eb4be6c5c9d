"""Where blocks are on the drive, by first page: about 24 bytes a block.

Always holds: a block is found by its first page and by no other.

It knows neither free extents nor records that are not blocks; to it, those places are empty.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.storage.eviction.idmap import IdMap

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Ground", "Standing"]

_SMALLEST_RECORD_PAGES: Final = 2


class Standing(NamedTuple):
    """A block on its place."""

    generation: int
    pages: int


class Ground:
    """Blocks by their places."""

    __slots__ = ("_free", "_generations", "_pages", "_spots")

    def __init__(self, capacity_pages: int) -> None:
        self._spots = IdMap(capacity_pages // _SMALLEST_RECORD_PAGES)
        self._generations = array("Q")
        self._pages = array("H")
        self._free = array("I")

    def put(self, start: int, pages: int, generation: int) -> None:
        """Let a block stand at a place."""
        if self._free:
            spot = self._free.pop()
            self._generations[spot] = generation
            self._pages[spot] = pages
        else:
            spot = len(self._generations)
            self._generations.append(generation)
            self._pages.append(pages)
        added = self._spots.add(start, spot)
        assert added, f"two blocks begin at page {start}"

    def put_all(self, starts: Sequence[int], pages: Sequence[int], generations: Sequence[int]) -> None:
        """Let many stand on empty ground, in ascending order of their places."""
        self._spots.add_all(starts, 0)
        self._pages.extend(pages)
        self._generations.extend(generations)

    def take(self, start: int) -> None:
        """Let a place be empty, if a block stood there."""
        spot = self._spots.remove(start)
        if spot >= 0:
            self._free.append(spot)

    def at(self, start: int) -> Standing | None:
        """Return which block begins at a page."""
        spot = self._spots.find(start)
        return None if spot < 0 else Standing(self._generations[spot], self._pages[spot])
