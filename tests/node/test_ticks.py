"""An idle node ticks rarely, and each event is soon followed by a tick."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from kvstore.limits import IDLE_TICKS, TIMER_TICK_IDLE_MS, TIMER_TICK_MS
from kvstore.names import block_key
from kvstore.node import ticks
from kvstore.node.ticks import Ticks
from tests.cluster.simulated import run as in_no_time
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAITS: dict[str, Callable[[Any], None]] = {
    "a lease": lambda node: setattr(node, "leases", 1),
    "a pin": lambda node: setattr(node.pins, "count", 1),
    "a client that wants memory": lambda node: setattr(node.granted, "is_hungry", True),
    "a block that expires": lambda node: setattr(node.store, "has_timers", True),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TIMER_TICK_MS": 5, "TIMER_TICK_IDLE_MS": 60_000, "IDLE_TICKS": 3}.items():
        monkeypatch.setattr(ticks, name, value)


def quiet_node() -> Any:
    return SimpleNamespace(
        leases=0,
        pins=SimpleNamespace(count=0),
        granted=SimpleNamespace(is_hungry=False),
        store=SimpleNamespace(has_timers=False),
    )


def test_an_idle_nodes_ticks_are_rare_until_something_happens() -> None:
    async def run() -> None:
        seen: list[float] = []
        some = Ticks(quiet_node(), lambda: seen.append(asyncio.get_running_loop().time()))
        try:
            await asyncio.sleep(0.3)
            assert len(seen) == 3
            some.stir()
            await asyncio.sleep(0.3)
            assert len(seen) == 6
        finally:
            some.cancel()

    in_no_time(run())


@pytest.mark.parametrize("what", WAITS)
def test_pending_deadlines_keep_ticks_frequent(what: str) -> None:
    seen: list[int] = []

    async def run() -> None:
        node = quiet_node()
        WAITS[what](node)
        some = Ticks(node, lambda: seen.append(1))
        try:
            await asyncio.sleep(0.3)
        finally:
            some.cancel()

    in_no_time(run())
    assert len(seen) > 50


def test_a_block_put_into_an_idle_node_expires_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "TIMER_TICK_MS": TIMER_TICK_MS,
        "TIMER_TICK_IDLE_MS": 60 * TIMER_TICK_IDLE_MS,
        "IDLE_TICKS": IDLE_TICKS // 10,
    }.items():
        monkeypatch.setattr(ticks, name, value)
    with NodeInProcess(tmp_path / "node") as node, Client(node.target) as client:
        client.status()  # to connect takes a while
        time.sleep(0.5)
        client.put_inline(block_key(b"k"), b"x" * 5000, expires_unix_ms=time.time_ns() // 1_000_000 + 1500)
        deadline = time.monotonic() + 10
        while node.call(lambda one: one.store.statistics().blocks):
            assert time.monotonic() < deadline
            time.sleep(0.02)
