"""When to make room, and how much: two watermarks and the waiting put.

Always holds: below the low watermark it requests room until the high one is reached, then nothing until free space is
below the low one again. While a put waits, it requests at least that put's pages each time, because the free space
may be fragmented.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.storage.eviction.types import Mode, Watermarks

__all__ = ["Goal", "Pressure"]


class Goal(NamedTuple):
    """The room requested now."""

    mode: Mode
    pages: int


class Pressure:
    """The hysteresis between the two watermarks."""

    __slots__ = ("_draining", "_marks", "mode")

    def __init__(self, marks: Watermarks) -> None:
        assert 0 <= marks.low_pages <= marks.high_pages
        self._marks = marks
        self._draining = False
        self.mode = Mode.IDLE

    def judge(self, free_pages: int, demand_pages: int, waiting_pages: int) -> Goal:
        """Return the goal, given the free pages, those that puts under way will take, and those that one waits for."""
        left = free_pages - demand_pages
        if left < self._marks.low_pages:
            self._draining = True
        elif left >= self._marks.high_pages:
            self._draining = False
        pages = self._marks.high_pages - left if self._draining else 0
        if waiting_pages:
            self.mode = Mode.URGENT
            return Goal(self.mode, max(pages, waiting_pages))
        self.mode = Mode.BACKGROUND if self._draining else Mode.IDLE
        return Goal(self.mode, pages)
