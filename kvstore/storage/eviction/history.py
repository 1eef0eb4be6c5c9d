"""The last evictions, for those who ask later where a block went; and how many there were, by reason.

Always holds: the newest entries are kept, a fixed number of them, some 250 bytes each.

To look one up is a search through all of them, about a millisecond: people ask, not programs.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvstore.storage.eviction.items import Eviction, Reason, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["History"]


class History:
    """A ring of evictions."""

    __slots__ = ("_blocks", "_last", "_pages", "space_idle_ms")

    def __init__(self, size: int) -> None:
        self._last: deque[Eviction] = deque(maxlen=size)
        self._blocks = [0] * (max(Reason) + 1)
        self._pages = [0] * (max(Reason) + 1)
        self.space_idle_ms = 0  # how long the last block that went for room had not been used

    def add(self, eviction: Eviction) -> None:
        """Note one, over the oldest."""
        self._last.append(eviction)
        reason = eviction.reason
        self._blocks[reason] += 1
        self._pages[reason] += eviction.pages
        if reason is Reason.SPACE:
            self.space_idle_ms = eviction.idle_ms

    def add_all(self, reason: Reason, newest: Iterable[Eviction], blocks: int, pages: int) -> None:
        """Note many at once, of which the newest are told one by one."""
        self._last.extend(newest)
        self._blocks[reason] += blocks
        self._pages[reason] += pages

    def by_generation(self, generation: int) -> Eviction | None:
        """Give the eviction of a generation, if it is remembered."""
        return next((entry for entry in reversed(self._last) if entry.generation == generation), None)

    def by_name(self, name64: int) -> Eviction | None:
        """Give the newest eviction of a name, if one is remembered."""
        return next((entry for entry in reversed(self._last) if entry.name64 == name64), None)

    def tallies(self) -> dict[Reason, Tally]:
        """Count all there ever were."""
        return {reason: Tally(self._blocks[reason], self._pages[reason]) for reason in Reason}
