"""Progress of long work in the node's log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.node.server import _progress_shown_by

if TYPE_CHECKING:
    import pytest


class HeldClock(SystemClock):
    """A clock that the test moves."""

    now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_progress_is_logged_once_a_second_with_the_time_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = HeldClock()
    show = _progress_shown_by(clock)
    mib = 1 << 20
    for at_ms, done in ((0, 0), (400, 9), (1000, 25), (1500, 30), (2000, 50), (4000, 100)):
        clock.now_ns = at_ms * 1_000_000
        show("filling", done * mib, 100 * mib)
    assert caplog.messages == [
        "filling: 0 B of 100 MiB",
        "filling: 25 MiB of 100 MiB, 3 s left",
        "filling: 50 MiB of 100 MiB, 2 s left",
        "filling: 100 MiB of 100 MiB",
    ]
