"""Doubly linked rings in two arrays: 8 bytes a node, and no object for any of them.

Nodes are small numbers. The first `heads` of them are the heads of as many rings; every other node is in at most one
ring, and is its own neighbour while it is in none. Removing a node doesn't need the head.

It doesn't count, and doesn't know what a node stands for. For speed, callers may work on `after` and `before`
directly.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Rings"]


class Rings:
    """Rings over numbered nodes."""

    __slots__ = ("after", "before", "heads")

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.after = array("I", range(heads))
        self.before = array("I", range(heads))

    def reach(self, node: int) -> None:
        """Make nodes up to this one exist."""
        have = len(self.after)
        if node >= have:
            new = range(have, node + 1)
            self.after.extend(new)
            self.before.extend(new)

    def fill(self, head: int, count: int) -> None:
        """Make so many nodes behind the heads, and put them into a ring in their order; no others exist yet."""
        first, end = self.heads, self.heads + count
        assert len(self.after) == first
        if count:
            self.after.extend(range(first + 1, end + 1))
            self.before.extend(range(first - 1, end - 1))
            self.after[end - 1] = self.before[first] = head
            self.after[head], self.before[head] = first, end - 1

    def is_linked(self, node: int) -> bool:
        """Return whether a node that may not even exist is in a ring."""
        return node < len(self.after) and self.after[node] != node

    def push(self, head: int, node: int) -> None:
        """Put a free node at the end of a ring."""
        last = self.before[head]
        self.after[last] = self.before[head] = node
        self.before[node] = last
        self.after[node] = head

    def push_behind(self, place: int, node: int) -> None:
        """Put a free node right behind another one."""
        self.push(self.after[place], node)

    def unlink(self, node: int) -> None:
        """Take a node out; one that is in no ring stays so."""
        after, before = self.after[node], self.before[node]
        self.after[before] = after
        self.before[after] = before
        self.after[node] = self.before[node] = node

    def move_all(self, source: int, target: int) -> None:
        """Put all nodes of one ring at the end of another one."""
        first = self.after[source]
        if first == source:
            return
        last = self.before[source]
        end = self.before[target]
        self.after[end] = first
        self.before[first] = end
        self.after[last] = target
        self.before[target] = last
        self.after[source] = self.before[source] = source

    def nodes(self, head: int) -> Iterator[int]:
        """Return the nodes of a ring in order, head excluded; it must not change meanwhile."""
        node = self.after[head]
        while node != head:
            yield node
            node = self.after[node]
