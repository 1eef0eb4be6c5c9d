"""Admission: which call begins next, which calls count as begun, and which are refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import Overloaded
from kvstore.limits import CALLS_BEGUN_MAX, CALLS_LINE_LONG, CALLS_REST, CALLS_REST_MS
from kvstore.node import admission
from kvstore.node.admission import Begun, Entrance
from tests.cluster.simulated import pass_s
from tests.cluster.simulated import run as in_no_time

if TYPE_CHECKING:
    from collections.abc import Coroutine

RESTS = 100


def seconds(doing: Coroutine[Any, Any, float]) -> float:
    """The result of a coroutine in a loop with virtual time."""
    took: list[float] = []

    async def done() -> None:
        took.append(await doing)

    in_no_time(done())
    return took[0]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_one_call_of_a_tenant_with_many_runs_at_a_time_and_another_tenant_does_not_wait() -> None:
    async def come() -> None:
        at = Entrance(lambda: 2)
        first = await at.enter("many")
        rest = [asyncio.create_task(at.enter("many")) for _ in range(5)]
        await settle()
        assert not any(one.done() for one in rest)
        async with asyncio.timeout(1):
            (await at.enter("few")).over()
        begun = first
        for one in rest:  # in the order in which they came
            begun.over()
            begun.over()  # once counts
            await settle()
            assert [other.done() for other in rest].count(True) == 1 + rest.index(one)
            begun = await one
        begun.over()
        assert not at._begun
        assert not at._outside
        assert not at._places.total

    asyncio.run(come())


def test_a_tenant_with_a_long_queue_pauses_between_two_calls_while_others_call() -> None:
    async def come(other: str) -> float:
        at = Entrance(lambda: 2)
        (await at.enter(other)).over()
        begun = await at.enter("many")
        rest = [asyncio.create_task(at.enter("many")) for _ in range(CALLS_LINE_LONG + RESTS + 1)]
        await settle()
        began = asyncio.get_running_loop().time()
        for one in rest:
            begun.over()
            begun = await one
        return asyncio.get_running_loop().time() - began

    assert seconds(come("few")) >= RESTS * CALLS_REST_MS / 1000
    assert seconds(come("many")) == 0


def test_after_a_long_call_others_get_as_much_time_while_they_call() -> None:
    worked_s = 0.1

    async def works() -> None:
        for _ in range(2):
            await asyncio.sleep(0)
            pass_s(worked_s / 2)

    async def come(other: str) -> float:
        at = Entrance(lambda: 2)
        (await at.enter(other)).over()
        begun = await at.enter("heavy")
        await begun.of(works())
        began = asyncio.get_running_loop().time()
        begun.over()
        (await at.enter("heavy")).over()
        return asyncio.get_running_loop().time() - began

    assert seconds(come("few")) >= 0.99 * worked_s * CALLS_REST
    assert seconds(come("heavy")) == 0


def test_with_a_single_tenant_several_calls_run_at_once() -> None:
    async def come() -> None:
        at = Entrance(lambda: 1)
        async with asyncio.timeout(1):
            begun = [await at.enter(None) for _ in range(CALLS_BEGUN_MAX)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await at.enter(None)
        for one in begun:
            one.over()
        assert not at._begun

    asyncio.run(come())


def test_a_caller_that_leaves_while_waiting_or_at_its_turn_delays_no_other() -> None:
    async def come() -> None:
        at = Entrance(lambda: 2)
        first = await at.enter("a")
        gone, called, last = (asyncio.create_task(at.enter("a")) for _ in range(3))
        await settle()
        gone.cancel()
        await settle()
        first.over()
        called.cancel()  # it had come to be its turn, and does not know yet
        with suppress(asyncio.CancelledError):
            await called
        (await asyncio.wait_for(last, 1)).over()
        assert not at._begun
        assert not at._places.total

    asyncio.run(come())


def test_each_tenant_has_its_share_of_the_places_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "CALLS_OUTSIDE_MAX", 8)

    async def come() -> None:
        at = Entrance(lambda: 2)
        begun = await at.enter("a")
        waiting = [asyncio.create_task(at.enter("a")) for _ in range(4)]
        await settle()
        with pytest.raises(Overloaded, match="calls waiting"):
            await at.enter("a")
        (await at.enter("b")).over()
        begun.over()
        for one in waiting:
            (await one).over()

    asyncio.run(come())


def test_a_call_that_waits_for_something_other_than_the_thread_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "CALLS_BEGUN_LOOKS_MAX", 1 << 30)

    async def come() -> None:
        over = asyncio.Event()
        drive: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def reads() -> int:
            return await drive

        reading = Begun(lambda _: over.set())
        call = asyncio.ensure_future(_of(reading, reads()))
        await asyncio.wait_for(over.wait(), 5)
        drive.set_result(7)
        assert await call == 7

        async def works() -> None:
            for _ in iter(lambda: working, False):
                await asyncio.sleep(0)

        over.clear()
        working = True
        call_of_works = asyncio.ensure_future(_of(Begun(lambda _: over.set()), works()))
        await asyncio.sleep(0.1)
        assert not over.is_set(), "it wants the thread all the time"
        working = False
        await call_of_works
        await asyncio.wait_for(over.wait(), 5)

    async def _of(begun: Begun, steps: object) -> object:
        return await begun.of(steps)  # type: ignore[arg-type]

    asyncio.run(come())


def test_an_external_cancellation_ends_an_admitted_call() -> None:
    async def come() -> None:
        seen: list[str] = []

        async def stands() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("ended")
                await asyncio.sleep(0)
                seen.append("cleaned up")
                raise

        async def call() -> None:
            await Begun(lambda _: None).of(stands())

        task = asyncio.create_task(call())
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["ended", "cleaned up"]

    asyncio.run(come())
