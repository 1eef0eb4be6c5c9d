"""Guards, which keep rows from being evicted: counts by kind, 8 bytes a row.

Always holds: a count is changed only by its own kind; a row is guarded while any of its counts is not zero.

It doesn't know blocks or sessions, and never ends a guard by itself.
"""

from __future__ import annotations

from array import array
from typing import Final

from kvstore.limits import GUARDS_OF_A_KIND_MAX
from kvstore.storage.eviction.items import Guard, Refusal, Stuck

__all__ = ["Guards"]

_COUNT_BITS: Final = 16
_COUNT_MASK: Final = (1 << _COUNT_BITS) - 1
_PROTECTED_SHIFT: Final = Guard.PROTECTED * _COUNT_BITS
_STUCK_BY: Final = {
    Guard.PIN: Stuck.PINNED,
    Guard.WRITE: Stuck.WRITING,
    Guard.LEASE: Stuck.LEASED,
    Guard.PROTECTED: Stuck.PROTECTED,
}


class Guards:
    """Counts in one word a row: the guard that lasts longest in the highest bits."""

    __slots__ = ("_by_longest", "_pages", "protected_pages", "words")

    def __init__(self, pages: array[int]) -> None:
        """Take the pages of each row, which somebody else keeps: a row has its own before it has a guard."""
        self._pages = pages
        self.protected_pages = 0  # of all rows that are protected
        self.words = array("Q")  # not zero: the row may not go
        self._by_longest = [0] * (len(Guard) + 1)  # rows, by the number of bits of their word, in counts

    def reach(self, row: int) -> None:
        """Make rows up to this one exist."""
        missing = row + 1 - len(self.words)
        if missing > 0:
            self.words.extend([0] * missing)

    def count(self, row: int, guard: Guard) -> int:
        """Return how many guards of a kind a row has."""
        return self.words[row] >> guard * _COUNT_BITS & _COUNT_MASK

    def add(self, row: int, guard: Guard) -> Refusal | None:
        """Guard a row once more."""
        if self.count(row, guard) >= GUARDS_OF_A_KIND_MAX:
            return Refusal.FULL
        self._change(row, 1 << guard * _COUNT_BITS)
        return None

    def drop(self, row: int, guard: Guard) -> Refusal | None:
        """Take one guard back."""
        if not self.count(row, guard):
            return Refusal.NOT_HELD
        self._change(row, -(1 << guard * _COUNT_BITS))
        return None

    def add_for_session(self, row: int) -> None:
        """Protect a row because a session of its is. Such sessions are few, so this has no bound of its own."""
        self._change(row, 1 << Guard.PROTECTED * _COUNT_BITS)

    def clear(self, row: int) -> None:
        """Forget all guards of a row that is gone."""
        self._change(row, -self.words[row])

    def is_protected(self, row: int) -> bool:
        """Return whether the longest of its guards is that one."""
        return self.words[row] >> Guard.PROTECTED * _COUNT_BITS != 0

    def tally(self) -> dict[Guard, int]:
        """Count the rows by the longest of their guards."""
        return {guard: self._by_longest[guard + 1] for guard in Guard}

    def what_is_over_soonest(self) -> Stuck:
        """Return what to wait for if every row has a guard, or precedes a row with one."""
        for guard in Guard:
            if self._by_longest[guard + 1]:
                return _STUCK_BY[guard]
        return Stuck.EMPTY

    def _change(self, row: int, by: int) -> None:
        before = self.words[row]
        after = before + by
        self.words[row] = after
        longest = self._by_longest
        longest[before.bit_length() + _COUNT_BITS - 1 >> 4] -= 1
        longest[after.bit_length() + _COUNT_BITS - 1 >> 4] += 1
        protected = (after >> _PROTECTED_SHIFT != 0) - (before >> _PROTECTED_SHIFT != 0)
        if protected:
            self.protected_pages += protected * self._pages[row]
