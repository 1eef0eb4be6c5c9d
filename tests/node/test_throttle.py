"""Written blocks are added to the index a few times a second at most, which no caller can observe."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING

import pytest

from kvstore.client.block_calls import Stored
from kvstore.client.blocks import Hit
from kvstore.durability import Durability
from kvstore.node import granted_puts, ticks
from kvstore.node.throttle import Throttle
from tests.conftest import ClientWithBuffers, small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.node.hot_pages import HotStatistics
    from kvstore.node.node import Node

MS = 1_000_000
MINUTE_MS = 60_000


class Time:
    """A clock with a list of later actions."""

    def __init__(self) -> None:
        self.now_ns = 1000 * MS
        self.later: list[tuple[float, Callable[[], object]]] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ms(self) -> int:
        return self.now_ns // MS

    def call_later(self, delay_s: float, do: Callable[[], object]) -> None:
        self.later.append((delay_s, do))

    def pass_ms(self, ms: int) -> None:
        self.now_ns += ms * MS
        due, self.later = self.later, []
        for _, do in due:
            do()


def test_a_task_that_has_not_just_run_runs_at_once_and_repeats_are_merged() -> None:
    time, done = Time(), [0]

    def do() -> None:
        done[0] += 1

    pace = Throttle(time, time.call_later, 4, do)
    pace.ask()
    assert (done, time.later) == ([1], [])
    for _ in range(5):
        pace.ask()
    assert (done, [delay_s for delay_s, _ in time.later]) == ([1], [0.004])
    time.pass_ms(4)
    assert (done, time.later) == ([2], [])
    time.now_ns += 4 * MS
    pace.ask()
    assert done == [3]
    pace.ask()
    pace.end()
    time.pass_ms(4)
    assert done == [3], "nothing after its end"


def test_a_query_sees_written_blocks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pace of a minute, only queries have written blocks added to the index."""
    monkeypatch.setattr(granted_puts, "GRANTED_TAKE_MS", MINUTE_MS)
    monkeypatch.setattr(ticks, "TIMER_TICK_MS", MINUTE_MS)
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)

        def ahead() -> int:
            return int(node.call(lambda inside: inside.granted._lanes.ahead))

        waited = 0
        for number in range(40):
            block = rig.block(number, 5000)
            (result,) = rig.client.put([block], durability=Durability.WRITTEN)
            assert (result.error, result.durability) == (None, Durability.WRITTEN)
            waited += ahead()
            match number % 4:
                case 0:
                    assert isinstance(rig.client.exists([block.key])[0], Stored)
                case 1:
                    assert rig.client.get([rig.wanted(block)]) == [Hit(block.key)]
                    assert rig.client.exists([block.key]) != []
                case 2:
                    assert rig.client.delete([block.key]) == [True]
                    assert not isinstance(rig.client.get([rig.wanted(block)])[0], Hit)
                case _:
                    assert rig.client.explain([block.key])[0].stored
            assert ahead() == 0
        last = rig.block(40, 5000)
        assert rig.client.put([last])[0].error is None
        assert waited > 20, "nearly all waited for their minute"
        keys = [rig.key(number) for number in range(41)]
        rig.client.close()
    with NodeInProcess(tmp_path / "node") as again, small_client(again.target) as client:
        stored = [isinstance(one, Stored) for one in client.exists(keys)]
        assert stored == [number % 4 != 2 for number in range(41)]


@pytest.mark.parametrize("are_plain", [True, False])
def test_a_get_right_after_its_put_counts_as_a_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, are_plain: bool
) -> None:
    """The core answers it before the index has the block."""
    monkeypatch.setattr(granted_puts, "GRANTED_TAKE_MS", MINUTE_MS)
    if not are_plain:
        monkeypatch.setattr(granted_puts, "are_plain", lambda _: False)
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)

        def hot(inside: Node) -> HotStatistics:
            inside.fabric_calls.served()
            inside.granted.take_all()
            return inside.hot.pages.statistics()

        for number in range(20):
            before, block = node.call(hot), rig.block(number, 5000)
            assert rig.client.put([block], durability=Durability.WRITTEN)[0].error is None
            for _ in range(number % 3):
                assert rig.client.get([rig.wanted(block)]) == [Hit(block.key)]
            while node.call(hot).kept <= number:
                sleep(0.001)
            assert (node.call(hot).protected_bytes > before.protected_bytes) == (number % 3 > 0)
        rig.client.close()


def test_a_client_waiting_for_memory_does_not_wait_for_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hot memory is full of written blocks; the next lands when they are processed, and not a minute later."""
    monkeypatch.setattr(granted_puts, "GRANTED_TAKE_MS", MINUTE_MS)
    with NodeInProcess(tmp_path / "node", 4 << 30) as node:
        rig = ClientWithBuffers(node)
        for first in range(0, 2000, 100):
            blocks = [rig.block(number, 64 << 10) for number in range(first, first + 100)]
            assert not any(one.error for one in rig.client.arm(blocks).wait(20))
        wait_until(lambda: not node.call(lambda inside: inside.granted.is_hungry), "nobody waits for memory")
