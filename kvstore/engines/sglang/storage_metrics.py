"""Transfers between SGLang and the node, in the form of SGLang's own metrics: pages and GB/s of each call.

What always holds: the number of entries between two calls of `taken` is bounded; the oldest are dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.clock import SystemClock
from kvstore.limits import SGLANG_CALLS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Moved"]


class Moved:
    """The transfers of one rank. Safe to use from any thread."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._fetched: deque[tuple[int, float]] = deque(maxlen=SGLANG_CALLS_MAX)
        self._stored: deque[tuple[int, float]] = deque(maxlen=SGLANG_CALLS_MAX)

    @contextmanager
    def fetching(self) -> Iterator[Callable[[int, int], None]]:
        """Time a call that fetches; the returned function gets the numbers of pages and bytes."""
        with self._timed(self._fetched) as moved:
            yield moved

    @contextmanager
    def storing(self) -> Iterator[Callable[[int, int], None]]:
        """Time a call that stores."""
        with self._timed(self._stored) as moved:
            yield moved

    @contextmanager
    def _timed(self, calls: deque[tuple[int, float]]) -> Iterator[Callable[[int, int], None]]:
        began_ns = self._clock.monotonic_ns()

        def moved(pages: int, size: int) -> None:
            if pages:
                took_ns = max(1, self._clock.monotonic_ns() - began_ns)
                with self._lock:
                    calls.append((pages, size / took_ns))  # bytes per nanosecond are GB/s

        yield moved

    def taken(self) -> Any:
        """The transfers since the last call, as SGLang's record of them."""
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415  # if it is wanted

        metrics = StorageMetrics()
        with self._lock:
            fetched, stored = list(self._fetched), list(self._stored)
            self._fetched.clear()
            self._stored.clear()
        metrics.prefetch_pgs.extend(pages for pages, _ in fetched)
        metrics.prefetch_bandwidth.extend(speed for _, speed in fetched)
        metrics.backup_pgs.extend(pages for pages, _ in stored)
        metrics.backup_bandwidth.extend(speed for _, speed in stored)
        return metrics
