"""The allocator against a naive model, and its prefix rule against a drive with stale headers."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import Corrupt
from kvstore.storage.extents import Extents

FIRST, UNTIL = 2, 66


def test_the_smallest_extent_that_is_long_enough_gives_its_start() -> None:
    extents = Extents.around([(2, 3), (10, 1), (15, 40)], FIRST, UNTIL)  # free: 5-10, 11-15, 55-66
    assert extents.allocate(4) == 11
    assert extents.allocate(4) == 5
    assert extents.allocate(12) is None
    assert extents.allocate(11) == 55
    assert extents.free_pages == 1


@pytest.mark.parametrize("live", [[(2, 3), (4, 1)], [(1, 1)], [(65, 2)], [(5, 0)]])
def test_live_extents_that_cannot_be_are_refused(live: list[tuple[int, int]]) -> None:
    with pytest.raises(Corrupt):
        Extents.around(live, FIRST, UNTIL)


def test_a_pinned_extent_comes_back_with_the_last_pin() -> None:
    extents = Extents.around([(2, 64)], FIRST, UNTIL)
    extents.pin(2)
    extents.pin(2)
    extents.release(2, 64)
    extents.unpin(2)
    assert extents.allocate(1) is None
    extents.unpin(2)
    assert extents.allocate(64) == 2


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2**16)), max_size=120))
@settings(max_examples=200, deadline=None)
def test_nothing_overlaps_and_neighbours_are_one(steps: list[tuple[int, int]]) -> None:
    extents = Extents(FIRST, UNTIL)
    live: dict[int, int] = {}
    for length, choice in steps:
        if live and choice % 3 == 0:
            start = sorted(live)[choice % len(live)]
            extents.release(start, live.pop(start))
        else:
            holes = _holes(live)
            start_or_none = extents.allocate(length)
            fitting = [size for size in holes.values() if size >= length]
            assert (start_or_none is None) == (not fitting)
            if start_or_none is not None:
                assert holes.get(start_or_none) == min(fitting), "best fit, from the start of a hole"
                live[start_or_none] = length
        holes = _holes(live)
        assert extents.free_pages == sum(holes.values())
        assert extents.free_extents == len(holes), "neighbours are one"


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_a_scan_never_jumps_over_a_live_record(seed: int) -> None:
    """The claim of "Why jumping is sound", with headers that are never wiped when their records are freed."""
    rng = random.Random(seed)
    extents = Extents(FIRST, UNTIL)
    live: dict[int, int] = {}
    headers: dict[int, int] = {}  # page -> pages of the record whose header was last written there
    for _ in range(150):
        if live and rng.random() < 0.5:
            start = rng.choice(sorted(live))
            extents.release(start, live.pop(start))
            continue
        length = rng.randrange(1, 12)
        start_or_none = extents.allocate(length)
        if start_or_none is None:
            continue
        for page in range(start_or_none, start_or_none + length):
            headers.pop(page, None)  # overwritten, by a payload that is no header
        headers[start_or_none] = live[start_or_none] = length
        assert set(live) <= set(_scan(headers))


def _scan(headers: dict[int, int]) -> list[int]:
    taken = []
    page = FIRST
    while page < UNTIL:
        if page in headers:
            taken.append(page)
        page += headers.get(page, 1)
    return taken


def _holes(live: dict[int, int]) -> dict[int, int]:
    holes = {}
    position = FIRST
    for start, length in [*sorted(live.items()), (UNTIL, 0)]:
        if start > position:
            holes[position] = start - position
        position = start + length
    return holes


def test_what_is_held_is_not_given_out() -> None:
    extents = Extents(10, 110)
    extents.hold(30, 20)
    assert extents.free_pages == 100
    assert extents.allocate(20) == 10, "as far as to what is held"
    assert extents.allocate(1) is None, "the rest begins with it"
    extents.release(12, 8)
    assert extents.allocate(8) == 12, "the smallest that is long enough and free of it"
    extents.let_go()
    assert extents.allocate(80) == 30


def test_free_pages_are_found_from_a_page_on_and_what_was_not_written_is_noted() -> None:
    extents = Extents(10, 110)
    assert extents.allocate(20) == 10
    assert extents.free_from(0) == (30, 80)
    assert extents.free_from(50) == (50, 60)
    assert extents.free_from(50, 60) == (50, 10)
    assert extents.free_from(10, 30) is None
    assert extents.free_from(110) is None
    assert extents.free_from(50, 50) is None
    extents.release(10, 5, unwritten=True)
    assert extents.unwritten is None
    extents.unwritten = []
    extents.release(15, 5, unwritten=True)
    extents.release(20, 5)
    assert extents.unwritten == [(15, 5)]


def test_a_piece_is_found_as_fast_after_many_of_its_length() -> None:
    """A drive of a long life has many free pieces of one length, and the first of them is taken again and again."""
    extents = Extents(0, 1 << 19)
    held = [extents.allocate(2) for _ in range(1 << 17)]
    for start in held[::2]:
        assert start is not None
        extents.release(start, 2)

    def cost_s(count: int) -> float:
        began = time.thread_time()
        for _ in range(count):
            start = extents.allocate(2)
            assert start is not None
            extents.release(start, 2)
        return time.thread_time() - began

    early = min(cost_s(500) for _ in range(3))
    cost_s(50_000)
    assert min(cost_s(500) for _ in range(3)) < 3 * early + 0.0005
