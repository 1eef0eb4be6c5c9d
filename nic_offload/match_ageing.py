"""Which entries of the match-action table have not been hit for their idle timeout.

A heap holds when each entry is to be looked at next: at first its timeout after it was added, later its timeout after
its last hit. So a hit costs nothing here, and an entry is looked at about once a timeout.

What always holds: an entry hit within its timeout is not idle. The heap is at most twice as large as the number of
entries that age, and a few more. What was removed from the table is never returned.

What it doesn't do: read a clock, remove entries, or lock: the table does, with its lock held.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from nic_offload.match_ledger import VOID_ROW

if TYPE_CHECKING:
    from nic_offload.match_entry import Entry
    from nic_offload.match_ledger import Ledger

__all__ = ["AGED_AT_ONCE", "Ageing"]

AGED_AT_ONCE = 1_000  # entries removed by one call
_SPARE = 64


class Ageing:
    """The entries that age."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._due: list[
            tuple[int, int, Entry]
        ] = []  # when to look, the entry's age as a tie-break, the entry
        self._count = 0

    def added(self, entry: Entry, now_ns: int) -> None:
        """Watch an entry if it has a timeout."""
        if entry.plan.idle_ns is not None:
            self._count += 1
            heapq.heappush(self._due, (now_ns + entry.plan.idle_ns, entry.age, entry))

    def removed(self, entry: Entry) -> None:
        """An entry leaves the table, for whatever reason; call it before its row is released."""
        if entry.plan.idle_ns is None:
            return
        self._count -= 1
        if len(self._due) > 2 * self._count + _SPARE:
            self._due = [one for one in self._due if one[2].row != VOID_ROW and one[2] is not entry]
            heapq.heapify(self._due)

    def idle(self, now_ns: int, at_most: int) -> list[Entry]:
        """Some of the entries that have not been hit for their timeout; the caller removes them."""
        found: list[Entry] = []
        looked = 0
        while self._due and self._due[0][0] <= now_ns and looked < 2 * at_most and len(found) < at_most:
            looked += 1
            _, age, entry = heapq.heappop(self._due)
            if entry.row == VOID_ROW:
                continue
            assert entry.plan.idle_ns is not None
            again_ns = self._ledger.last_hit_ns[entry.row] + entry.plan.idle_ns
            if again_ns > now_ns:
                heapq.heappush(self._due, (again_ns, age, entry))
            else:
                found.append(entry)
        return found
