"""The core's timer wheel against a sorted list, under a clock that jumps both ways."""

from __future__ import annotations

import random
from array import array

import pytest

from kvstore.limits import EVICTION_URGENT_BLOCKS, TIMER_TICK_MS
from kvstore.storage.eviction import evictor
from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.lru import Lru
from kvstore.storage.eviction.types import Guard, Reason, Record, Watermarks

T0 = 1_700_000_000_000
WEEK_MS = 7 * 24 * 3_600_000
ALL = EVICTION_URGENT_BLOCKS
DISTANCES_MS = [0, 1, 50, 99, 100, 101, 6_399, 6_401, 409_600, 26_214_400, WEEK_MS, 9 * WEEK_MS]


class TimerWheel:
    """A core of which only the times count: row n is the block of generation n and one."""

    def __init__(self, now_ms: int) -> None:
        self.core = Evictor(Lru(), Watermarks(0, 0), now_ms=now_ms)
        self.now_ms = now_ms
        self.lagging = False

    def __len__(self) -> int:
        return self.core.statistics().expiring

    def insert(self, row: int, expires_ms: int) -> None:
        assert self.core.admitted([Record(row + 1, 1, expires_ms=expires_ms)], self.now_ms) == {}

    def cancel(self, row: int) -> None:
        self.core.gone([row + 1], Reason.DELETED, self.now_ms)

    def advance(self, now_ms: int, rows_max: int, steps_max: int) -> list[int]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(evictor, "EVICTION_BATCH_BLOCKS", rows_max)
            patched.setattr(evictor, "EVICTION_STEPS_MAX", steps_max)
            plan = self.core.plan(free_pages=0, now_ms=now_ms)
        assert all(victim.reason is Reason.EXPIRED for victim in plan.victims)
        self.lagging = plan.more
        assert self.core.statistics().timers_lag == plan.more
        return [victim.generation - 1 for victim in plan.victims]


def due(times: dict[int, int], now_ms: int) -> list[int]:
    """The rows that are due, by tick."""
    ticks = sorted((-(-at_ms // TIMER_TICK_MS), row) for row, at_ms in times.items())
    return [row for tick, row in ticks if tick <= now_ms // TIMER_TICK_MS]


@pytest.mark.parametrize("seed", range(60))
def test_it_equals_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    now_ms = T0 + rng.randrange(1000)
    wheel = TimerWheel(now_ms)
    times: dict[int, int] = {}
    for _ in range(400):
        action = rng.random()
        if action < 0.45:
            row = next(row for row in range(1000) if row not in times)
            times[row] = now_ms + rng.choice([-1, 1, 1, 1]) * rng.choice(DISTANCES_MS) + rng.randrange(200)
            wheel.insert(row, times[row])
        elif action < 0.55 and times:
            row = rng.choice(sorted(times))
            del times[row]
            wheel.cancel(row)
        else:
            jump_ms = rng.choice(DISTANCES_MS) + rng.randrange(100)
            now_ms = max(0, now_ms + jump_ms * (-1 if rng.random() < 0.3 else 1))
            rows_max, steps_max = (
                (ALL, 1 << 30) if rng.random() < 0.6 else (rng.randrange(1, 4), rng.randrange(9))
            )
            expected = due(times, now_ms)
            given = wheel.advance(now_ms, rows_max, steps_max)
            assert len(given) == len(set(given)) <= rows_max
            assert set(given) <= set(expected), "early"
            if not wheel.lagging:
                assert sorted(given) == sorted(expected)
            for row in given:
                del times[row]
        assert len(wheel) == len(times)
    while wheel.advance(T0 + 9999 * WEEK_MS, 7, 50) or wheel.lagging:
        pass
    assert len(wheel) == 0


def test_a_block_expires_in_the_first_tick_that_begins_after_its_time() -> None:
    wheel = TimerWheel(T0)
    wheel.insert(1, T0 + 250)
    assert wheel.advance(T0 + 299, ALL, 1 << 30) == []
    assert wheel.advance(T0 + 300, ALL, 1 << 30) == [1]


@pytest.mark.parametrize("distance_ms", [TIMER_TICK_MS * 64**level for level in range(7)])
def test_it_is_exact_at_any_distance(distance_ms: int) -> None:
    wheel = TimerWheel(T0)
    for row, at_ms in enumerate(range(T0 + distance_ms - 200, T0 + distance_ms + 201, 100)):
        wheel.insert(row, at_ms)
    for row, at_ms in enumerate(range(T0 + distance_ms - 200, T0 + distance_ms + 201, 100)):
        assert wheel.advance(at_ms - 1, ALL, 1 << 30) == []
        assert wheel.advance(at_ms, ALL, 1 << 30) == [row]


def test_rows_come_in_the_order_of_their_ticks_after_a_jump() -> None:
    wheel = TimerWheel(T0)
    times = {row: T0 + 100 + random.Random(row).randrange(WEEK_MS) // 100 * 100 for row in range(500)}
    for row, at_ms in times.items():
        wheel.insert(row, at_ms)
    given = wheel.advance(T0 + WEEK_MS, ALL, 1 << 30)
    assert [times[row] for row in given] == sorted(times.values())


def test_a_jump_forward_is_processed_in_bounded_steps() -> None:
    wheel = TimerWheel(T0)
    for row in range(1000):
        wheel.insert(row, T0 + 1000 + row * 977)
    seen: list[int] = []
    calls = 0
    while len(seen) < 1000:
        got = wheel.advance(T0 + WEEK_MS, 10, 64)
        assert len(got) <= 10
        seen += got
        calls += 1
        assert calls < 1000
    assert sorted(seen) == list(range(1000))
    assert calls >= 100
    assert wheel.advance(T0 + WEEK_MS, 10, 64) == []
    assert not wheel.lagging


def test_time_without_entries_takes_no_steps() -> None:
    wheel = TimerWheel(T0)
    wheel.insert(1, T0 + 50 * WEEK_MS)
    assert wheel.advance(T0 + 49 * WEEK_MS, ALL, 6) == []
    assert not wheel.lagging


def test_after_a_jump_back_nothing_is_early_and_nothing_is_lost() -> None:
    wheel = TimerWheel(T0)
    wheel.insert(1, T0 + 2 * WEEK_MS)
    assert wheel.advance(T0 + WEEK_MS, ALL, 1 << 30) == []
    wheel.insert(2, T0 + 1000)  # the clock is back at T0, and knows nothing of the week
    assert wheel.advance(T0, ALL, 1 << 30) == []
    assert wheel.advance(T0 + 999, ALL, 1 << 30) == []
    assert wheel.advance(T0 + 1000, ALL, 1 << 30) == [2]
    assert wheel.advance(T0 + 2 * WEEK_MS - 1, ALL, 1 << 30) == []
    assert wheel.advance(T0 + 2 * WEEK_MS, ALL, 1 << 30) == [1]


def test_a_jump_forward_that_is_reverted_leaves_the_rest_in_place() -> None:
    wheel = TimerWheel(T0)
    for row in range(100):
        wheel.insert(row, T0 + 100_000)
    wrongly = wheel.advance(T0 + WEEK_MS, 10, 1 << 30)
    assert len(wrongly) == 10
    assert wheel.advance(T0 + 99_999, ALL, 1 << 30) == []
    assert len(wheel.advance(T0 + 100_000, ALL, 1 << 30)) == 90


def test_never_and_the_end_of_time_are_not_in_the_wheel() -> None:
    wheel = TimerWheel(T0)
    wheel.insert(1, 0)
    wheel.insert(2, 2**64 - 1)
    assert len(wheel) == 0
    wheel.cancel(1)
    wheel.cancel(2)
    wheel.cancel(999)


def test_a_row_put_back_keeps_its_time() -> None:
    wheel = TimerWheel(T0)
    wheel.insert(1, T0 + 1000)
    wheel.core.hold([2], Guard.PIN)
    assert wheel.advance(T0 + WEEK_MS, ALL, 1 << 30) == []
    assert len(wheel) == 0
    wheel.core.release([2], Guard.PIN, T0)
    assert wheel.advance(T0 + 500, ALL, 1 << 30) == []
    assert wheel.advance(T0 + 1000, ALL, 1 << 30) == [1]


def test_the_latest_time_counts() -> None:
    wheel = TimerWheel(T0)
    wheel.insert(1, T0 + 1000)
    wheel.insert(2, 0)
    wheel.core.renewed(2, T0 + 3000)
    wheel.core.renewed(3, T0 + 2000)
    wheel.core.renewed(77, T0 + 100)
    assert wheel.advance(T0 + 1999, ALL, 1 << 30) == []
    assert wheel.advance(T0 + 2000, ALL, 1 << 30) == [2]
    wheel.core.renewed(2, 0)
    assert wheel.advance(T0 + WEEK_MS, ALL, 1 << 30) == []
    assert len(wheel) == 0
    assert 2 in wheel.core


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_equals_single_calls(seed: int) -> None:
    rng = random.Random(seed)
    expiries = [rng.choice([0, 2**64 - 1, T0 - 5, T0 + rng.randrange(WEEK_MS)]) for _ in range(200)]
    one, many = TimerWheel(T0), TimerWheel(T0)
    for row, at_ms in enumerate(expiries):
        one.insert(row, at_ms)
    many.core.restore(array("Q", range(1, 201)), array("I", [1] * 200), array("Q", expiries))
    assert len(one) == len(many)
    for now_ms in range(T0, T0 + WEEK_MS + 1, WEEK_MS // 20):
        assert sorted(one.advance(now_ms, ALL, 1 << 30)) == sorted(many.advance(now_ms, ALL, 1 << 30))
