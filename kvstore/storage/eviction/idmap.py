"""A map from 64-bit numbers to rows: about 14 bytes an entry, where a dict takes more than 100.

The numbers are divided into parts, with runs of neighbours in the same part. A part is a sorted array, searched by
bisection, with the rows in a second array beside it. Numbers that arrive in ascending order, as generations do, are
appended; others shift at most the rest of one part.

Always holds: nothing is ever rehashed, so no operation pays for earlier ones.

It suits numbers that are dense or random; numbers that agree in all bits that choose the part make a part long. Rows
are below 2^32.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["IdMap"]

_RUN_BITS: Final = 6  # neighbours in one run: blocks put together are got together
_PART_ENTRIES: Final = 64
_PARTS_MIN: Final = 16
_PARTS_MAX: Final = 1 << 14


class IdMap:
    """Rows by number."""

    __slots__ = ("_count", "_mask", "_numbers", "_rows")

    def __init__(self, expected: int) -> None:
        """Be quick with about as many entries as expected; correct with any."""
        parts = 1 << max(0, expected // _PART_ENTRIES - 1).bit_length()
        parts = min(max(parts, _PARTS_MIN), _PARTS_MAX)
        self._mask = parts - 1
        self._numbers = [array("Q") for _ in range(parts)]
        self._rows = [array("I") for _ in range(parts)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, number: int) -> int:
        """Return the row, or -1."""
        part = number >> _RUN_BITS & self._mask
        numbers = self._numbers[part]
        at = bisect_left(numbers, number)
        return self._rows[part][at] if at < len(numbers) and numbers[at] == number else -1

    def find_all(self, wanted: Iterable[int]) -> list[int]:
        """Return the rows of those that are known, in the order asked for."""
        found: list[int] = []
        add = found.append
        mask, parts, rows = self._mask, self._numbers, self._rows
        at = 0
        numbers = parts[0]
        for number in wanted:
            part = number >> _RUN_BITS & mask
            # Entries requested together were often added together, so the next one is tried before a search.
            at += 1
            if numbers is not parts[part] or at >= len(numbers) or numbers[at] != number:
                numbers = parts[part]
                at = bisect_left(numbers, number)
                if at == len(numbers) or numbers[at] != number:
                    continue
            add(rows[part][at])
        return found

    def add(self, number: int, row: int) -> bool:
        """Enter a number; False, and nothing done, if it is known."""
        part = number >> _RUN_BITS & self._mask
        numbers = self._numbers[part]
        if not numbers or numbers[-1] < number:
            numbers.append(number)
            self._rows[part].append(row)
        else:
            at = bisect_left(numbers, number)
            if numbers[at] == number:
                return False
            numbers.insert(at, number)
            self._rows[part].insert(at, row)
        self._count += 1
        return True

    def add_all(self, new: Sequence[int], first_row: int) -> None:
        """Enter numbers into an empty map, in ascending order, with rows one after the other; a run at a time."""
        assert not self._count
        mask, parts, rows = self._mask, self._numbers, self._rows
        at, end, last = 0, len(new), -1
        while at < end:
            number = new[at]
            assert number > last, "numbers ascend"
            run = number >> _RUN_BITS
            until = bisect_left(new, run + 1 << _RUN_BITS, at, min(end, at + (1 << _RUN_BITS)))
            parts[run & mask].extend(new[at:until])
            rows[run & mask].extend(range(first_row + at, first_row + until))
            last = new[until - 1]
            at = until
        self._count = end

    def remove(self, number: int) -> int:
        """Forget a number; return the row it had, or -1 if it was not known."""
        part = number >> _RUN_BITS & self._mask
        numbers = self._numbers[part]
        at = bisect_left(numbers, number)
        if at == len(numbers) or numbers[at] != number:
            return -1
        self._count -= 1
        del numbers[at]
        return self._rows[part].pop(at)
