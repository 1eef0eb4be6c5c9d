"""Ends connections whose clients take nothing of what is to go to them over the fabric, or which broke there.

Words for a client that can't be reached, or that reads nothing, wait in the C core, which has a bound for all of them.
What was on the way when a connection broke is lost, in both directions, though libfabric makes a new one.

What always holds: a connection is closed once nothing has gone out for `STALLED_MS`, though something waits, and
once it is seen that it broke.
What it doesn't do: hurry; a client that was stopped for a moment goes on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.limits import STALLED_LOOK_MS, STALLED_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.clock import Clock
    from kvstore.node.connection import Connection

__all__ = ["Stalled"]

log = logging.getLogger(__name__)

_NS = 1_000_000


class Stalled:
    """Ends those connections of a node that stand still."""

    def __init__(self, clock: Clock, detach: Callable[[Connection], None]) -> None:
        self._clock = clock
        self._detach = detach
        self._looked_ns = clock.monotonic_ns()

    def look(self, connections: Iterable[Connection]) -> None:
        """End those that stand still, if it is time to look for them."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns < STALLED_LOOK_MS * _NS:
            return
        self._looked_ns = now_ns
        for connection in list(connections):
            if connection.endpoint.has_broken:
                log.warning(
                    "The fabric's connection broke. The client is detached.", extra=connection.about()
                )
            elif connection.endpoint.stalled_ns > STALLED_MS * _NS:
                log.warning("The client takes nothing. The connection is closed.", extra=connection.about())
            else:
                continue
            self._detach(connection)
