"""A tenant's rate limit: a token bucket that fills at its rate and holds one second's worth.

What always holds: over any time, no more is admitted than the rate times that time plus one second's worth; a refused
request costs nothing, and is told when to retry. A single request larger than the bucket is admitted when the bucket is
full, and is paid for afterwards, because refusing it for ever would not be a limit but a ban.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import Overloaded

if TYPE_CHECKING:
    from kvstore.clock import Clock

__all__ = ["Rate"]

_SECOND_NS = 1_000_000_000


class Rate:
    """One tenant's bucket, in nanoseconds of its own time: a request costs a second divided by the rate."""

    __slots__ = ("_clock", "_cost_ns", "_paid_ns")

    def __init__(self, clock: Clock, per_s: int) -> None:
        self._clock = clock
        self._paid_ns = 0  # when all that was admitted is paid for
        self._cost_ns = 0
        self.limit(per_s)

    def limit(self, per_s: int) -> None:
        """Change the rate; 0 is no limit."""
        self._cost_ns = _SECOND_NS // per_s if per_s else 0

    @property
    def is_limited(self) -> bool:
        """Whether there is a rate."""
        return self._cost_ns > 0

    def take(self, requests: int) -> None:
        """Admit this many requests, or raise Overloaded with the time to wait."""
        if not self._cost_ns:
            return
        now_ns = self._clock.monotonic_ns()
        cost_ns = requests * self._cost_ns
        paid_ns = max(self._paid_ns, now_ns - _SECOND_NS)  # at most a second is saved up
        over_ns = paid_ns + min(cost_ns, _SECOND_NS) - now_ns
        if over_ns > 0:
            raise Overloaded("The tenant has reached its request rate.", -(-over_ns // 1_000_000))
        self._paid_ns = paid_ns + cost_ns
