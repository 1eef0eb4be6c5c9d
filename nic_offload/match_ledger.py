"""The counters of the match-action table: three numbers per entry, in arrays, at 24 bytes per entry.

What always holds: row 0, the void row, belongs to no entry. An entry that has left the table is counted there, so a
match that was under way doesn't change another entry's counters. A new row starts at zero. Arrays never shrink and are
never replaced, so a matching thread may keep references to them.

What it doesn't do: lock the counting. Only one thread matches; rows are allocated under a lock.
"""

from __future__ import annotations

import threading
from array import array
from typing import NamedTuple

__all__ = ["Counters", "Ledger"]

VOID_ROW = 0
ROW_BITS = 24  # twice the maximum of entries, each with a guard: while rules are replaced there are two sets
ROW_MASK = (1 << ROW_BITS) - 1


class Counters(NamedTuple):
    """What an entry has seen. `last_hit_ns` is by the matcher's clock; 0 before the first hit."""

    hits: int
    last_hit_ns: int
    moved_bytes: int


class Ledger:
    """Rows of counters."""

    def __init__(self) -> None:
        self.hits = array("Q", [0])
        self.last_hit_ns = array("Q", [0])
        self.moved_bytes = array("Q", [0])
        self._free: list[int] = []
        self._lock = threading.Lock()

    def allocate(self) -> int:
        """A row of zeros."""
        with self._lock:
            if self._free:
                row = self._free.pop()
                self.hits[row] = self.last_hit_ns[row] = self.moved_bytes[row] = 0
                return row
            row = len(self.hits)
            assert row <= ROW_MASK
            self.moved_bytes.append(0)
            self.last_hit_ns.append(0)
            self.hits.append(0)
            return row

    def release(self, row: int) -> None:
        """Free a row, after its holders have been pointed to the void row."""
        with self._lock:
            self._free.append(row)

    def read(self, row: int) -> Counters:
        """The numbers of one row; zeros for the void row, whatever it counted."""
        if row == VOID_ROW:
            return Counters(0, 0, 0)
        return Counters(self.hits[row], self.last_hit_ns[row], self.moved_bytes[row])
