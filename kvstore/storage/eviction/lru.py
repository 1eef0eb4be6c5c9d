"""Exact LRU: the least recently used row is evicted first. Sixteen bytes a row."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvstore.storage.eviction.policy import NO_ROW
from kvstore.storage.eviction.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.storage.eviction.policy import Steps

__all__ = ["Lru"]

_NODES_AT_ONCE: Final = 63  # are made before they are needed


class Lru:
    """One ring, the coldest row first. Node 0 is its head; a row's node is the row and one."""

    __slots__ = ("_rings", "_uses", "_uses_by_node")

    name = "lru"
    knows_names = False

    def __init__(self) -> None:
        self._rings = Rings(1)
        self._uses = 0  # so far
        self._uses_by_node = array(
            "Q", [0]
        )  # how many there had been at its last one; ascends along the ring

    def admitted(self, row: int, pages: int, name64: int) -> None:
        """Take in a row as the one used last."""
        del name64
        self.readmitted(row, pages)

    def readmitted(self, row: int, pages: int) -> None:
        """Take in a row as the one used last."""
        del pages
        node = row + 1 if row + 1 < len(self._uses_by_node) else self._reach(row)
        self._rings.push(0, node)
        self._uses += 1
        self._uses_by_node[node] = self._uses

    def restored(self, pages: Sequence[int]) -> None:
        """Take in rows from 0 on, as used in this order."""
        self._rings.fill(0, len(pages))
        self._uses = len(pages)
        self._uses_by_node.extend(range(1, len(pages) + 1))

    def inherited(self, row: int, pages: int, place: int) -> None:
        """Let a row have been used when `place` was, unless it was used after that."""
        del pages
        node, other = self._reach(row), place + 1
        if self._rings.is_linked(node):
            if self._uses_by_node[node] > self._uses_by_node[other]:
                return
            self._rings.unlink(node)
        self._rings.push_behind(other, node)
        self._uses_by_node[node] = self._uses_by_node[other]

    def touched(self, rows: Sequence[int]) -> None:
        """Put each at the end. This is the hottest loop of all, so the ring is closed only once."""
        after, before, uses_by_node = self._rings.after, self._rings.before, self._uses_by_node
        uses = self._uses
        last = before[0]
        for row in rows:
            node = row + 1
            uses += 1
            uses_by_node[node] = uses
            if node != last:
                above, below = after[node], before[node]
                after[below] = above
                before[above] = below
                after[last] = node
                before[node] = last
                last = node
        after[last] = 0
        before[0] = last
        self._uses = uses

    def removed(self, row: int) -> None:
        """Take a row out."""
        self._rings.unlink(row + 1)

    def evicted(self, row: int, name64: int) -> None:
        """Take a row out; nothing is remembered of it."""
        del name64
        self._rings.unlink(row + 1)

    def candidate(self, steps: Steps) -> int:
        """Return the row used longest ago."""
        del steps
        return self._rings.after[0] - 1 if self._rings.after[0] else NO_ROW

    def _reach(self, row: int) -> int:
        node = row + 1
        missing = node + 1 - len(self._uses_by_node)
        if missing > 0:
            self._rings.reach(node + _NODES_AT_ONCE)
            self._uses_by_node.extend([0] * (missing + _NODES_AT_ONCE))
        return node
