"""How much a tenant may ask for in a time: a bucket that fills at its rate and holds one second's worth.

What always holds: over any time, no more is let through than the rate times that time and one second's worth; what is
refused costs nothing, and is told when it would be let through. A single demand larger than the bucket is let through
when the bucket is full, and is paid for afterwards, because refusing it for ever would be no limit but a ban.
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
        self._paid_ns = 0  # all that was let through is paid for at this moment
        self._cost_ns = 0
        self.limit(per_s)

    def limit(self, per_s: int) -> None:
        """Change the rate; 0 is none."""
        self._cost_ns = _SECOND_NS // per_s if per_s else 0

    @property
    def is_limited(self) -> bool:
        """Whether there is a rate."""
        return self._cost_ns > 0

    def take(self, requests: int) -> None:
        """Admit this many requests, or raise Overloaded with the time to try again."""
        if not self._cost_ns:
            return
        now_ns = self._clock.monotonic_ns()
        cost_ns = requests * self._cost_ns
        paid_ns = max(self._paid_ns, now_ns - _SECOND_NS)  # no more than a second is saved up
        over_ns = paid_ns + min(cost_ns, _SECOND_NS) - now_ns
        if over_ns > 0:
            raise Overloaded("The tenant has reached its request rate.", -(-over_ns // 1_000_000))
        self._paid_ns = paid_ns + cost_ns
