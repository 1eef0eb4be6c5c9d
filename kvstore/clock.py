"""The clock seam: all of the store's notions of time go through a `Clock`, so tests can hold it still.

`monotonic_ns` measures deadlines and never goes back; `wall_ms` is only for times that outlive the
process, such as a block's expiry on the drive.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What the store asks of time."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some fixed moment; never goes back."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970, as the machine believes."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def wall_ms(self) -> int:
        """Milliseconds of CLOCK_REALTIME."""
        return time.time_ns() // 1_000_000
