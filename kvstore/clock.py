"""The clock seam: the store reads time only through a `Clock`, so tests can stop it.

`monotonic_ns` measures deadlines and never goes back; `wall_ms` is only for times that outlive the
process, such as a block's expiry on the drive.
"""

from __future__ import annotations

import time
from typing import Protocol

from kvstore.limits import CLOCK_CLOSE_NS, CLOCK_TRIES

__all__ = ["Clock", "SystemClock", "unix_offset_ns"]


class Clock(Protocol):
    """The store's source of time."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some fixed moment; never goes back."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970, by the machine's wall clock."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def wall_ms(self) -> int:
        """Milliseconds of CLOCK_REALTIME."""
        return time.time_ns() // 1_000_000


def unix_offset_ns() -> int:
    """The difference between `monotonic_ns` now and nanoseconds since 1970.

    The clocks are read one after the other, and a thread may lose its core in between: the closest reading counts.
    """
    best_ns, offset_ns = -1, 0
    for _ in range(CLOCK_TRIES):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if best_ns < 0 or after_ns - before_ns < best_ns:
            best_ns, offset_ns = after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2
        if best_ns < CLOCK_CLOSE_NS:
            break
    return offset_ns
