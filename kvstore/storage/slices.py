"""Long work on the node's one thread, in slices with other work in between.

Always holds: the slices of one task are executed in order; several tasks take turns, one slice in each `step`. The
first slice is executed at once, so a task of one slice never waits. It doesn't know what a task does, or how long a
slice takes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Slices"]


class Slices:
    """All work of a drive that has slices left."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun: deque[Iterator[None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._begun)

    def begin(self, work: Iterator[None]) -> None:
        """Execute the first slice of some work, which yields where other work may use the thread."""
        for _ in work:
            self._begun.append(work)
            return

    def step(self) -> None:
        """Execute one slice of the work that has waited longest."""
        if self._begun:
            self.begin(self._begun.popleft())
