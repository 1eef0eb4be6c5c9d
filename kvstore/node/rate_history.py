"""Half an hour of a node's totals at regular intervals, for the sparklines of its web page.

What always holds: at most `UI_HISTORY_POINTS` points, `UI_HISTORY_MS` apart; taking one reads counters and touches no
drive. What it doesn't do: outlive the process, or replace Prometheus.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kvstore.limits import UI_HISTORY_MS, UI_HISTORY_POINTS

if TYPE_CHECKING:
    from kvstore.node.node import Node

__all__ = ["FIELDS", "History"]

FIELDS = ("uptime_ms", "put_bytes", "got_bytes", "puts", "hits", "misses", "failed", "waiting")


class History:
    """The history of a node's rates. The first point is recorded at once, on the running loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._points: deque[tuple[int, ...]] = deque(maxlen=UI_HISTORY_POINTS)
        self._take()

    def _take(self) -> None:
        self._timer = self._loop.call_later(UI_HISTORY_MS / 1000, self._take)
        self._points.append(self.now())

    def now(self) -> tuple[int, ...]:
        """The totals at this moment, in the order of `FIELDS`."""
        node, counters, store = self._node, self._node.counters, self._node.store.statistics()
        return (
            (node.clock.monotonic_ns() - node.began_ns) // 1_000_000,
            counters.put_bytes,
            counters.got_bytes,
            counters.puts,
            counters.hits_memory + counters.hits_drive,
            counters.misses.total(),
            counters.puts_failed,
            node.fetches.waiting + store.puts_pending + store.gets_pending,
        )

    def points(self) -> list[tuple[int, ...]]:
        """All points, the oldest first, and this moment."""
        return [*self._points, self.now()]

    def close(self) -> None:
        """Stop taking points."""
        self._timer.cancel()
