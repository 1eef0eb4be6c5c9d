"""When sessions expire: names with their times, the earliest first.

Always holds: a name is returned once for each time that was set, never early, and not at all if it was set again or
cleared since. At most twice as many entries are kept as there are names with a time.

It doesn't read a clock, and removes no session.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvstore.limits import STALE_DEADLINES_MAX

if TYPE_CHECKING:
    from kvstore.storage.manifests import SessionName

__all__ = ["Deadlines"]


class Deadlines:
    """The deadlines of one drive's sessions; about 250 bytes for each that expires."""

    __slots__ = ("_heap", "_times_ms")

    def __init__(self) -> None:
        self._times_ms: dict[SessionName, int] = {}
        self._heap: list[tuple[int, SessionName]] = []  # including outdated ones

    def __len__(self) -> int:
        return len(self._times_ms)

    def set(self, name: SessionName, time_ms: int) -> None:
        """Set when a session expires; 0: never."""
        if self._times_ms.get(name, 0) == time_ms:
            return
        if not time_ms:
            del self._times_ms[name]
            return
        self._times_ms[name] = time_ms
        heapq.heappush(self._heap, (time_ms, name))
        if len(self._heap) > 2 * len(self._times_ms) + STALE_DEADLINES_MAX:
            self._heap = [(time_ms, name) for name, time_ms in self._times_ms.items()]
            heapq.heapify(self._heap)

    def due(self, now_ms: int, names_max: int) -> list[SessionName]:
        """Return the expired sessions, and remove them from the list."""
        names: list[SessionName] = []
        while self._heap and self._heap[0][0] <= now_ms and len(names) < names_max:
            time_ms, name = heapq.heappop(self._heap)
            if self._times_ms.get(name) == time_ms:
                del self._times_ms[name]
                names.append(name)
        return names
