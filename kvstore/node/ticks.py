"""The node's timer: how often it runs periodic work.

What always holds: a tick every `TIMER_TICK_MS` while anything happens or is due; every `TIMER_TICK_IDLE_MS` after
`IDLE_TICKS` quiet ticks. The first event after that is followed by a tick within `TIMER_TICK_MS`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.limits import IDLE_TICKS, TIMER_TICK_IDLE_MS, TIMER_TICK_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.node.node import Node

__all__ = ["Ticks"]


class Ticks:
    """A node's ticks."""

    def __init__(self, node: Node, tick: Callable[[], None]) -> None:
        self._node = node
        self._tick = tick
        self._quiet = 0  # ticks in a row
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(TIMER_TICK_MS / 1000, self._come)

    def stir(self) -> None:
        """Note an event."""
        if self._quiet >= IDLE_TICKS:
            self._timer.cancel()
            self._timer = self._loop.call_later(TIMER_TICK_MS / 1000, self._come)
        self._quiet = 0

    def _is_quiet(self) -> bool:
        node = self._node
        return not (node.leases or node.pins.count or node.granted.is_hungry or node.store.has_timers)

    def _come(self) -> None:
        self._quiet = self._quiet + 1 if self._is_quiet() else 0
        next_ms = TIMER_TICK_IDLE_MS if self._quiet >= IDLE_TICKS else TIMER_TICK_MS
        self._timer = self._loop.call_later(next_ms / 1000, self._come)
        self._tick()

    def cancel(self) -> None:
        """Stop the timer."""
        self._timer.cancel()
