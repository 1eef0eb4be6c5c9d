"""The threshold for "too slow", on invented times; the attacks' tests depend on it."""

from __future__ import annotations

import pytest

from tests.hostile.beside import NOISE_OF_P50, NOISE_S, SLOWER_MAX, Times, check_speed

CALLS = 2000
MOST, SOME, SLOW = NOISE_S / 5, 2 * NOISE_S, 5 * NOISE_S


def times(slow: int, elsewhere: int = 0) -> Times:
    """So many calls of each took long."""
    some = CALLS // 20
    here, there = ([SLOW] * n + [SOME] * some + [MOST] * (CALLS - n - some) for n in (slow, elsewhere))
    return Times(here, there, [])


ALONE = times(0)


@pytest.mark.parametrize("slow", [0, CALLS // 100])
def test_one_slow_call_of_a_hundred_is_acceptable(slow: int) -> None:
    check_speed(ALONE, times(slow))


def test_more_slow_calls_fail_with_the_factor() -> None:
    with pytest.raises(
        AssertionError, match=r"p99 50\.0 ms .* is 2\.5 times 20\.0 ms alone: of 2000 calls 40 .* 0 else"
    ):
        check_speed(ALONE, times(CALLS // 50))


def test_load_of_the_machine_slows_both_and_is_not_the_nodes_fault() -> None:
    check_speed(ALONE, times(CALLS // 5, CALLS // 5))
    with pytest.raises(AssertionError):
        check_speed(ALONE, times(CALLS // 5, CALLS // 10))


def test_a_neighbour_that_was_slow_alone_may_be_twice_as_slow() -> None:
    check_speed(times(CALLS // 10), times(CALLS // 2))


def test_on_a_machine_that_is_slow_as_a_whole_calls_may_take_longer() -> None:
    usual = NOISE_S / 2
    alone, limit = Times([usual] * CALLS, [usual] * CALLS, []), SLOWER_MAX * NOISE_OF_P50 * usual
    check_speed(alone, Times([limit] * CALLS, [usual] * CALLS, []))
    with pytest.raises(AssertionError):
        check_speed(alone, Times([1.01 * limit] * CALLS, [usual] * CALLS, []))
