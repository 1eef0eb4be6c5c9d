"""Results waiting for their callbacks.

Always holds: a callback is called only from `deliver`, with all its results so far in one sequence; if one raises,
the others still get their results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CompletionQueue"]

T = TypeVar("T")


class CompletionQueue(Generic[T]):
    """Gathers results and delivers them in batches."""

    __slots__ = ("_waiting", "promised")

    def __init__(self) -> None:
        self._waiting: dict[Callable[[Sequence[T]], None], list[T]] = {}
        self.promised = 0  # pending results, gathered here or still to come

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, callback: Callable[[Sequence[T]], None], result: T) -> None:
        """Keep a result until the next delivery."""
        self._waiting.setdefault(callback, []).append(result)

    def add_all(self, callback: Callable[[Sequence[T]], None], results: Sequence[T]) -> None:
        """Keep many results."""
        self._waiting.setdefault(callback, []).extend(results)

    def deliver(self) -> None:
        """Call the callbacks of all gathered results. New results of these calls may wait for the next delivery."""
        for callback in list(self._waiting):
            results = self._waiting.pop(callback, [])
            self.promised -= len(results)
            callback(results)
