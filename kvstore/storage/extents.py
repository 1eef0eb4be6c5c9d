"""Which pages of the drive are free: best fit, always from the start of a free extent.

Always holds: free extents never adjoin (neighbours are merged); an allocation is the prefix of a free extent, on
which recovery by scan depends ("Why jumping is sound" in docs/record-format.md); a pinned extent is not reused until
its last pin is released.

It stores nothing about live extents: those are in the index. Units are pages, not bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import Corrupt

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Extents"]


class Extents:
    """The free extents of one drive."""

    __slots__ = (
        "_by_end",
        "_by_length",
        "_by_start",
        "_first",
        "_free_pages",
        "_held",
        "_lengths",
        "_parked",
        "_pins",
        "_until",
        "unwritten",
    )

    def __init__(self, first_page: int, until_page: int) -> None:
        self._first = first_page
        self._until = until_page
        self._by_start: dict[int, int] = {}  # start -> length
        self._by_end: dict[int, int] = {}  # end -> start
        # length -> its starts. No plain dict: its front, if it is taken again and again, is found more and more slowly.
        self._by_length: dict[int, OrderedDict[int, None]] = {}
        self._lengths: list[int] = []  # sorted; blocks come in few sizes, so this list is short
        self._pins: dict[int, int] = {}  # start -> how many read from it
        self._parked: dict[int, int] = {}  # released while pinned: start -> length
        self._free_pages = 0
        self._held = (0, 0)  # free pages that somebody overwrites
        self.unwritten: list[tuple[int, int]] | None = None  # given back as they were, if it is to be noted
        self._add(first_page, until_page - first_page)

    @classmethod
    def around(cls, live: ArrayLike, first_page: int, until_page: int) -> Extents:
        """Return the free extents between live ones, which are rows `(start, length)`; Corrupt if they overlap."""
        extents = cls(first_page, first_page)
        extents._until = until_page
        starts, lengths = np.asarray(live, np.int64).reshape(-1, 2).T
        begins = np.concatenate([[first_page], starts + lengths])
        gaps = np.append(starts, until_page) - begins
        wrong = np.flatnonzero((gaps[:-1] < 0) | (lengths <= 0))
        if wrong.size:
            raise Corrupt(f"Two records claim page {starts[wrong[0]]} of the drive.")
        if gaps[-1] < 0:
            raise Corrupt(f"A record claims page {begins[-1] - 1}, which lies beyond the drive.")
        for at in np.flatnonzero(gaps).tolist():
            extents._add(int(begins[at]), int(gaps[at]))
        return extents

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated, in whatever pieces."""
        return self._free_pages

    @property
    def free_extents(self) -> int:
        """How many free extents there are."""
        return len(self._by_start)

    @property
    def first_page(self) -> int:
        """The first page for extents."""
        return self._first

    @property
    def until_page(self) -> int:
        """The page after the last one for extents."""
        return self._until

    @property
    def longest(self) -> int:
        """Pages of the longest free extent: what can be allocated at once."""
        return self._lengths[-1] if self._lengths else 0

    def longest_starts(self, count: int) -> list[int]:
        """Return where the longest free extents begin, the longest first."""
        return list(
            islice((start for length in reversed(self._lengths) for start in self._by_length[length]), count)
        )

    def some_starts(self, count: int) -> list[int]:
        """Return where some free extents begin: one of each length in turn, the longest first."""
        of_lengths = [iter(self._by_length[length]) for length in reversed(self._lengths)]
        starts: list[int] = []
        while of_lengths and len(starts) < count:
            first = [next(one, None) for one in of_lengths]
            starts += [one for one in first if one is not None]
            of_lengths = [one for one, start in zip(of_lengths, first, strict=True) if start is not None]
        return starts[:count]

    def free_from(self, page: int, until: int | None = None) -> tuple[int, int] | None:
        """Return the first free pages from one on, and how many there are; None if there are none before the last."""
        until = self._until if until is None else until
        starts = (
            start for start, length in self._by_start.items() if start < until and start + length > page
        )
        start = min(starts, default=None) if page < until else None
        if start is None:
            return None
        begin = max(start, page)
        return begin, min(start + self._by_start[start], until) - begin

    def after(self, page: int) -> list[tuple[int, int]]:
        """Return the free extents that end after a page, in order."""
        return sorted(one for one in self._by_start.items() if sum(one) > page)

    def hold(self, start: int, length: int) -> None:
        """Keep free pages from being allocated, until `let_go`; they stay free."""
        self._held = (start, start + length)

    def let_go(self) -> None:
        """End that."""
        self._held = (0, 0)

    def free_at(self, start: int) -> int:
        """Return how many pages the free extent that begins here has; 0 if there is none."""
        return self._by_start.get(start, 0)

    def allocate(self, length: int) -> int | None:
        """Take the start of the smallest free extent that is long enough; None if there is none."""
        first, until = self._held
        for whole in self._lengths[bisect_left(self._lengths, length) :]:
            for start in self._by_length[whole]:
                if start >= until or start + length <= first:
                    self._remove(start)
                    self._add(start + length, whole - length)
                    return start
        return None

    def release(self, start: int, length: int, *, unwritten: bool = False) -> None:
        """Free an extent, of which nothing may have been written; if it is being read, when its readers are done."""
        assert self._first <= start < start + length <= self._until
        if unwritten and self.unwritten is not None:
            self.unwritten.append((start, length))
        if start in self._pins:
            assert start not in self._parked
            self._parked[start] = length
        else:
            self._free(start, length)

    def pin(self, start: int) -> None:
        """Keep a live extent from being given out again."""
        self._pins[start] = self._pins.get(start, 0) + 1

    def is_pinned(self, start: int) -> bool:
        """Return whether an extent is being read."""
        return start in self._pins

    def unpin(self, start: int) -> None:
        """Remove one pin."""
        left = self._pins.pop(start) - 1
        if left:
            self._pins[start] = left
        elif start in self._parked:
            self._free(start, self._parked.pop(start))

    def _free(self, start: int, length: int) -> None:
        end = start + length
        if end in self._by_start:
            end += self._remove(end)
        if start in self._by_end:
            start = self._by_end[start]
            self._remove(start)
        self._add(start, end - start)

    def _add(self, start: int, length: int) -> None:
        if length == 0:
            return
        assert start not in self._by_start
        self._by_start[start] = length
        self._by_end[start + length] = start
        if length not in self._by_length:
            self._by_length[length] = OrderedDict()
            insort(self._lengths, length)
        self._by_length[length][start] = None
        self._free_pages += length

    def _remove(self, start: int) -> int:
        length = self._by_start.pop(start)
        del self._by_end[start + length]
        starts = self._by_length[length]
        del starts[start]
        if not starts:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._free_pages -= length
        return length
