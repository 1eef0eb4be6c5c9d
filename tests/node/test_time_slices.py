"""Heavy calls take turns by the time that their tenants have used, with at most half of the thread beside others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.limits import FABRIC_REST, FABRIC_WORK_US, MOVING_MAX, MOVING_MS, TURNS_OTHERS_MS
from kvstore.node.time_slices import Again, Turns
from tests.cluster.simulated import LoopClock
from tests.cluster.simulated import run as in_no_time

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

MS = 1_000_000
WAIT_S = 20.0


class Clock(SystemClock):
    """A clock that only steps of work move."""

    now_ns = 1_000 * MS

    def monotonic_ns(self) -> int:
        return self.now_ns


def run(done: Callable[[], Coroutine[None, None, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await done()

    in_no_time(bounded())


async def work(
    turns: Turns, clock: Clock, tenant: bytes, steps: int, took_ms: int, order: list[bytes]
) -> None:
    async with turns.of(tenant) as turn:
        for step in range(steps):
            if step:
                await turn.next()
            order.append(tenant)
            clock.now_ns += took_ms * MS


def test_tenants_take_turns_by_the_time_they_have_used() -> None:
    """One has four calls of long steps, the other one call of short ones, which is not served last."""
    clock, order = Clock(), list[bytes]()
    turns = Turns(clock)

    async def done() -> None:
        greedy = [work(turns, clock, b"greedy", 10, 3, order) for _ in range(4)]
        await asyncio.gather(*greedy, work(turns, clock, b"modest", 9, 1, order))

    run(done)
    assert len(order) == 49
    assert max(at for at, tenant in enumerate(order) if tenant == b"modest") <= 15


def test_with_others_a_step_is_followed_by_as_much_time_for_them() -> None:
    clock, paused = Clock(), list[float]()
    turns = Turns(clock)

    async def done() -> None:
        loop = asyncio.get_running_loop()
        real = loop.call_later

        def noted(delay: float, *more: object) -> object:
            paused.append(delay)
            return real(0, *more)  # type: ignore[arg-type]

        loop.call_later = noted  # type: ignore[method-assign, assignment]
        turns.note_call(b"heavy")
        await work(turns, clock, b"heavy", 2, 5, [])
        turns.note_call(b"other")
        turns.note_call(b"heavy")
        await work(turns, clock, b"heavy", 2, 5, [])
        clock.now_ns += (TURNS_OTHERS_MS + 1) * MS
        await work(turns, clock, b"heavy", 2, 5, [])
        loop.call_later = real  # type: ignore[method-assign]

    run(done)
    assert [one for one in paused if one < 1] == [0, 0, 0.005, 0.005, 0, 0]


def test_an_abandoned_call_delays_no_other() -> None:
    clock, order = Clock(), list[bytes]()
    turns = Turns(clock)

    async def done() -> None:
        async with turns.of(b"first"):
            waiting = [asyncio.create_task(work(turns, clock, b"gone", 1, 1, order)) for _ in range(3)]
            last = asyncio.create_task(work(turns, clock, b"last", 3, 1, order))
            await asyncio.sleep(0)
            for one in waiting:
                one.cancel()
        await last

    run(done)
    assert order == [b"last"] * 3


async def carry(turns: Turns, tenant: bytes, moving: list[int], ended: asyncio.Event) -> None:
    async with turns.moving(tenant):
        moving[0] += 1
        moving[1] = max(moving)
        try:
            await ended.wait()
        finally:
            moving[0] -= 1


def test_while_others_call_few_blocks_of_a_tenant_move_at_a_time() -> None:
    clock, moving = Clock(), [0, 0]
    turns = Turns(clock)

    async def done() -> None:
        turns.note_call(b"greedy")
        turns.note_call(b"modest")
        ended = asyncio.Event()
        calls = [asyncio.create_task(carry(turns, b"greedy", moving, ended)) for _ in range(20)]
        await asyncio.sleep(MOVING_MS / 4000)
        assert moving[0] == MOVING_MAX
        async with turns.moving(b"modest"):
            calls[0].cancel()  # one that moves,
            calls[5].cancel()  # and one that waits
        ended.set()
        await asyncio.gather(*calls, return_exceptions=True)
        assert moving == [0, MOVING_MAX]

    run(done)


def test_single_and_slow_blocks_delay_no_other() -> None:
    clock, moving = Clock(), [0, 0]
    turns = Turns(clock)

    async def done() -> None:
        turns.note_call(b"greedy")
        ended = asyncio.Event()
        calls = [asyncio.create_task(carry(turns, b"greedy", moving, ended)) for _ in range(20)]
        await asyncio.sleep(0)
        assert moving[0] == 20, "nobody else calls"
        turns.note_call(b"modest")
        turns.note_call(b"greedy")
        more = [asyncio.create_task(carry(turns, b"greedy", moving, ended)) for _ in range(2 * MOVING_MAX)]
        await asyncio.sleep(0)
        assert moving[0] == 20 + MOVING_MAX
        await asyncio.sleep(2 * MOVING_MS / 1000)
        assert moving[0] == 20 + 2 * MOVING_MAX
        ended.set()
        await asyncio.gather(*calls, *more)

    run(done)


def test_a_tenants_long_calls_run_one_at_a_time_and_pause_as_long_while_others_call() -> None:
    clock = Clock()
    turns = Turns(clock)

    async def done() -> None:
        loop = asyncio.get_running_loop()
        over = await turns.long(b"greedy")
        second = asyncio.create_task(turns.long(b"greedy"))
        other = await asyncio.wait_for(turns.long(b"other"), 1)
        turns.note_call(b"other")
        clock.now_ns += 100 * MS
        began_s = loop.time()
        over()
        await asyncio.sleep(0)
        assert not second.done()
        over = await second
        assert loop.time() - began_s >= 0.09
        clock.now_ns += 1000 * (TURNS_OTHERS_MS + 1) * MS
        began_s = loop.time()
        over()
        (await turns.long(b"greedy"))()
        assert loop.time() - began_s < 1
        other()

    run(done)


def test_a_tenant_that_used_much_time_pauses_while_others_call() -> None:
    clock = Clock()
    turns = Turns(clock)
    turns.note_call(b"other")
    turns.note_call(b"long")
    turns.worked(b"long", FABRIC_WORK_US * 1_000)
    assert not turns.rests(b"long"), "no more than anybody may"
    turns.worked(b"long", 5 * MS)
    turns.worked(b"long", 1 * MS)
    assert turns.rests(b"long")
    assert not turns.rests(b"other")
    assert turns.rests_s() == pytest.approx(FABRIC_REST * 6 / 1000)
    clock.now_ns += FABRIC_REST * 6 * MS - 1
    assert turns.rests(b"long")
    clock.now_ns += 1
    assert not turns.rests(b"long")
    assert turns.rests_s() == 0


def test_an_expired_pause_does_not_hide_a_later_one() -> None:
    """Of a tenant that has not called since, which nothing checks."""
    clock = Clock()
    turns = Turns(clock)
    for tenant in (b"gone", b"other"):
        turns.note_call(tenant)
    turns.worked(b"gone", 1 * MS)
    clock.now_ns += FABRIC_REST * 1 * MS + 1
    turns.worked(b"other", 2 * MS)
    assert turns.rests_s() == pytest.approx(FABRIC_REST * 2 / 1000)
    assert turns.rests(b"other")


def test_a_single_tenant_never_pauses() -> None:
    clock = Clock()
    turns = Turns(clock)
    turns.note_call(b"other")
    clock.now_ns += (TURNS_OTHERS_MS + 1) * MS
    turns.note_call(b"long")
    turns.worked(b"long", 5 * MS)
    assert not turns.rests(b"long")


def test_a_repeated_task_runs_once_at_the_earliest_requested_time() -> None:
    done: list[float] = []

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        again = Again(lambda: done.append(loop.time()))
        began = loop.time()
        for seconds in (WAIT_S, 0.01, WAIT_S):
            again.within(seconds)
        for _ in iter(lambda: not done, False):
            await asyncio.sleep(0.001)
        assert done[0] - began >= 0.01
        await asyncio.sleep(0)
        assert len(done) == 1
        again.within(0)
        for _ in iter(lambda: len(done) < 2, False):
            await asyncio.sleep(0)

    run(ask)


def test_a_call_without_steps_waits_until_its_tenant_has_paused() -> None:
    async def done() -> None:
        turns = Turns(LoopClock())
        turns.note_call(b"other")
        turns.note_call(b"long")
        turns.worked(b"long", 20 * MS)
        loop, ended = asyncio.get_running_loop(), list[float]()

        async def work(tenant: bytes) -> None:
            async with turns.whole(tenant):
                turns.worked(tenant, 10 * MS)
            ended.append(loop.time())

        began = loop.time()
        await asyncio.gather(*(work(b"long") for _ in range(3)), work(b"other"))
        assert ended[0] - began < 0.05, "the other tenant does not wait"
        assert ended[1] - began >= FABRIC_REST * 20 / 1000
        assert ended[2] - began >= FABRIC_REST * 30 / 1000, "one by one"
        assert ended[3] - began >= FABRIC_REST * 40 / 1000, "also while another waits"

    run(done)
