"""Closing a channel takes bounded time, whatever gRPC waits for."""

from __future__ import annotations

import threading
import time
from typing import Any

from kvstore.client.channel import close_channel
from kvstore.limits import CHANNEL_CLOSE_MS


class Stuck:
    """A channel with a call that never ends, as if a signal handler had interrupted its start."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def close(self) -> None:
        self.may_end.wait()


def test_a_channel_that_never_closes_costs_its_deadline() -> None:
    stuck: Any = Stuck()
    began = time.monotonic()
    close_channel(stuck)
    took_ms = (time.monotonic() - began) * 1000
    stuck.may_end.set()
    assert CHANNEL_CLOSE_MS * 0.9 < took_ms < CHANNEL_CLOSE_MS * 5
