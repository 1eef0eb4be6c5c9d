"""Calls that arrived over the fabric together are executed in turns, one of each tenant."""

from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.clock import SystemClock
from kvstore.limits import FABRIC_REST
from kvstore.node import fabric_answers
from kvstore.node.fabric_answers import FabricCalls
from kvstore.node.time_slices import Turns

REST: Any = {
    "fetches": SimpleNamespace(settle=lambda: None),
    "granted": SimpleNamespace(catch_up_lanes=lambda: None, take_written=lambda: None),
    "hot": SimpleNamespace(
        shelf=SimpleNamespace(served=list, has_more=False), pages=SimpleNamespace(touch=lambda _: None)
    ),
    "store": SimpleNamespace(used=lambda _: None),
}
COLD: Any = SimpleNamespace(feed=lambda: None, note=lambda _: [])


class Of:
    """A connection of a tenant."""

    def __init__(self, tenant: bytes) -> None:
        self.tenant = tenant


@pytest.mark.parametrize("round_ms", [0, 1000])
def test_a_tenant_with_many_calls_does_not_delay_one_with_a_single_call(
    monkeypatch: pytest.MonkeyPatch, round_ms: int
) -> None:
    monkeypatch.setattr(fabric_answers, "FABRIC_CALLS_MS", round_ms)
    clock = SystemClock()
    node: Any = SimpleNamespace(clock=clock, turns=Turns(clock), **REST)
    done: list[int] = []

    async def come() -> None:
        calls = FabricCalls(node, count(), COLD)
        monkeypatch.setattr(calls, "_do", lambda event: done.append(event.tag))
        many = [SimpleNamespace(connection=Of(b"many")) for _ in range(5)]
        few = SimpleNamespace(connection=Of(b"few"))
        of_many: list[Any] = [SimpleNamespace(tag=tag) for tag in range(20)]
        of_few: Any = SimpleNamespace(tag=99)
        for event in of_many:
            calls._watched[event.tag] = (many[event.tag % 5], 0)
        calls._watched[99] = (few, 0)  # type: ignore[assignment]
        calls.landed(of_many)
        calls.landed([of_few])
        async with asyncio.timeout(5):
            for _ in iter(lambda: len(done) < 21, False):
                await asyncio.sleep(0)
        assert sorted(done) == [*range(20), 99]

    asyncio.run(come())
    if not round_ms:
        assert done.index(99) <= 3


def test_a_tenant_whose_calls_take_long_pauses_while_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SystemClock()
    node: Any = SimpleNamespace(clock=clock, turns=Turns(clock), **REST)
    done: list[int] = []

    def work(event: Any) -> None:
        done.append(event.tag)
        until_ns = clock.monotonic_ns() + (0 if event.tag == 99 else 20_000_000)
        while clock.monotonic_ns() < until_ns:
            pass

    async def come() -> None:
        calls = FabricCalls(node, count(), COLD)
        monkeypatch.setattr(calls, "_do", work)
        node.turns.note_call(b"few")
        for tag, tenant in ((1, b"many"), (2, b"many"), (99, b"few")):
            calls._watched[tag] = (SimpleNamespace(connection=Of(tenant)), 0)  # type: ignore[assignment]
        began = asyncio.get_running_loop().time()
        calls.landed([SimpleNamespace(tag=1), SimpleNamespace(tag=2)])  # type: ignore[list-item]
        assert done == [1]
        calls.landed([SimpleNamespace(tag=99)])  # type: ignore[list-item]
        assert done == [1, 99]
        async with asyncio.timeout(20):
            for _ in iter(lambda: len(done) < 3, False):
                await asyncio.sleep(0.001)
        assert asyncio.get_running_loop().time() - began >= 0.02 + FABRIC_REST * 0.02

    asyncio.run(come())
