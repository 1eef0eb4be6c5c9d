"""Closes connections whose clients read nothing from the fabric, or whose fabric connection broke.

Words for a client that can't be reached, or that reads nothing, wait in the C core, which has a bound for all of them.
Whatever was in flight when a connection broke is lost, in both directions, although libfabric makes a new one.

What always holds: a connection is closed if nothing was sent for `STALLED_MS` although something is waiting, or if it
is seen to have broken.
What it doesn't do: close the connection of a client that was stopped for a moment.
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
    """Closes stalled connections of a node."""

    def __init__(self, clock: Clock, detach: Callable[[Connection], None]) -> None:
        self._clock = clock
        self._detach = detach
        self._looked_ns = clock.monotonic_ns()

    def look(self, connections: Iterable[Connection]) -> None:
        """Close stalled connections, if it is time to check."""
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
                log.warning(
                    "The client accepts no writes. The connection is closed.", extra=connection.about()
                )
            else:
                continue
            self._detach(connection)
