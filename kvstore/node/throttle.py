"""Throttles an action: it runs soon after it is requested, and at most once in so many milliseconds.

What always holds: it runs after each request: at once if it did not run a moment ago, otherwise once for all requests
that arrive in the meantime. It doesn't run after `end`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.clock import Clock

__all__ = ["Throttle"]


class Throttle:
    """Throttles one action. Everything happens on the node's loop."""

    def __init__(
        self,
        clock: Clock,
        later: Callable[[float, Callable[[], object]], None],
        interval_ms: int,
        do: Callable[[], object],
    ) -> None:
        self._clock, self._later, self._interval_ms, self._do = clock, later, interval_ms, do
        self._next_ns = 0
        self._is_due = self._is_over = False

    def ask(self) -> None:
        """Do it now or soon."""
        if self._clock.monotonic_ns() >= self._next_ns:
            self.now()
        elif not self._is_due:
            self._is_due = True
            self._later(self._interval_ms / 1000, self._come)

    def now(self) -> None:
        """Do it now."""
        self._next_ns = self._clock.monotonic_ns() + self._interval_ms * 1_000_000
        self._do()

    def end(self) -> None:
        """Do it no more."""
        self._is_over = True

    def _come(self) -> None:
        self._is_due = False
        if not self._is_over:
            self.now()
