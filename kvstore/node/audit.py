"""The audit log: who came, who was turned away, who removed what. One line of JSON each.

    {"at_ms": 1763716000000, "what": "attach", "tenant": "acme", "peer": "ipv4:10.0.0.7:50112", "outcome": "ok", ...}

What always holds: a line is in the file before the call that it is of is answered; lines of refusals are bounded, so
that nobody fills the drive by knocking (the next line counts what was left out); a log that can't be written stops
nothing, and says so once.
What it doesn't do: tell of puts and gets, which are too many; `kvstore explain` and the metrics do.
"""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.limits import AUDIT_REFUSALS_PER_S
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.clock import Clock

__all__ = ["Audit"]

log = logging.getLogger(__name__)

_SECOND_NS = 1_000_000_000


class Audit(Handle):
    """An audit log; without a file it goes nowhere."""

    def __init__(self, clock: Clock, path: Path | None) -> None:
        self._clock = clock
        self._fd = -1
        self._second = 0
        self._refusals = 0
        self._left_out = 0
        self._failed = False
        if path is not None:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ConfigError(f"The audit log {path} can't be written: {error.strerror}.") from error

    def note(self, what: str, *, tenant: str, peer: str, **more: str | int) -> None:
        """Something was done."""
        self._write({"what": what, "tenant": tenant, "peer": peer, "outcome": "ok", **more})

    def refused(self, what: str, *, tenant: str, peer: str, why: str) -> None:
        """Something was refused to somebody."""
        second = self._clock.monotonic_ns() // _SECOND_NS
        if second != self._second:
            self._second, self._refusals = second, 0
        self._refusals += 1
        if self._refusals > AUDIT_REFUSALS_PER_S:
            self._left_out += 1
            return
        line: dict[str, str | int] = {
            "what": what,
            "tenant": tenant,
            "peer": peer,
            "outcome": "refused",
            "why": why,
        }
        if self._left_out:
            line["refusals_left_out"], self._left_out = self._left_out, 0
        self._write(line)

    def _write(self, line: dict[str, str | int]) -> None:
        if self._fd < 0:
            return
        text = json.dumps({"at_ms": self._clock.wall_ms(), **line}, separators=(",", ":")) + "\n"
        try:
            os.write(self._fd, text.encode())
        except OSError as error:
            if not self._failed:
                log.warning("The audit log can't be written: %s.", error.strerror)
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
