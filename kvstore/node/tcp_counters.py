"""The kernel's TCP counters of this network namespace: connections accepted and segments received.

An idle node reads them twice a second instead of listing its sockets, so a reading must cost next to nothing: the file
stays open, because to open it is half of the cost of a reading.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from kvstore.limits import GUARD_CHECK_IDLE_MS, GUARD_QUICK_CHECK_MS

__all__ = ["QUIET_READS", "TcpCounters"]

_TEXT_BYTES: Final = 1 << 14
QUIET_READS: Final = 3 * GUARD_CHECK_IDLE_MS // GUARD_QUICK_CHECK_MS


class TcpCounters:
    """The counters, or None where the kernel doesn't report them."""

    def __init__(self) -> None:
        self._file = -1
        self._last: tuple[int, int] | None = None
        self._same = 0  # readings in a row that were like the last
        with suppress(OSError):
            self._file = os.open("/proc/self/net/snmp", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing was received during the last QUIET_READS readings."""
        return self._same >= QUIET_READS

    def read(self) -> tuple[int, int] | None:
        """Return how many connections were accepted and how many segments received."""
        last, self._last = self._last, self._read()
        self._same = 0 if self._last is None or self._last != last else self._same + 1
        return self._last

    def _read(self) -> tuple[int, int] | None:
        try:
            lines = os.pread(self._file, _TEXT_BYTES, 0).split(b"\n")
            names, numbers = (line.split() for line in lines if line.startswith(b"Tcp:"))
            return int(numbers[names.index(b"PassiveOpens")]), int(numbers[names.index(b"InSegs")])
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
