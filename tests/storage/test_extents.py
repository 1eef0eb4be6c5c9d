"""The allocator against a naive model, and its prefix rule against a drive with stale headers."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import Corrupt
from kvstore.storage.extents import Extents, lent_pages

FIRST, UNTIL = 2, 66


def test_the_smallest_extent_that_is_long_enough_is_allocated_from_its_start() -> None:
    extents = Extents.around([(2, 3), (10, 1), (15, 40)], FIRST, UNTIL)  # free: 5-10, 11-15, 55-66
    assert extents.allocate(4) == 11
    assert extents.allocate(4) == 5
    assert extents.allocate(12) is None
    assert extents.allocate(11) == 55
    assert extents.free_pages == 1


@pytest.mark.parametrize("live", [[(2, 3), (4, 1)], [(1, 1)], [(65, 2)], [(5, 0)]])
def test_impossible_live_extents_are_refused(live: list[tuple[int, int]]) -> None:
    with pytest.raises(Corrupt):
        Extents.around(live, FIRST, UNTIL)


def test_a_pinned_extent_is_freed_with_the_last_pin() -> None:
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
def test_nothing_overlaps_and_neighbours_are_merged(steps: list[tuple[int, int]]) -> None:
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


def test_held_pages_are_not_allocated() -> None:
    extents = Extents(10, 110)
    extents.hold(30, 20)
    assert extents.free_pages == 100
    assert extents.allocate(20) == 10, "as far as to what is held"
    assert extents.allocate(1) is None, "the rest begins with it"
    extents.release(12, 8)
    assert extents.allocate(8) == 12, "the smallest that is long enough and free of it"
    extents.end_hold()
    assert extents.allocate(80) == 30


def test_free_pages_are_listed_from_a_page_on_and_unwritten_ones_noted() -> None:
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
    """An old drive has many free pieces of one length, and the first of them is taken again and again."""
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


def test_a_second_free_is_refused_and_changes_nothing() -> None:
    extents = Extents.around([(2, 10), (20, 46)], FIRST, UNTIL)  # free: 12-20
    before = (extents.free_pages, extents.after(0))
    for start, length in [(12, 1), (19, 1), (8, 5), (19, 5), (11, 10), (60, 7), (0, 3), (5, 0), (1, 1)]:
        with pytest.raises(AssertionError):
            extents.release(start, length)
        assert (extents.free_pages, extents.after(0)) == before
    extents.pin(2)
    extents.release(2, 4)
    with pytest.raises(AssertionError):
        extents.release(2, 4)
    with pytest.raises(AssertionError):
        extents.unpin(3)
    assert (extents.free_pages, extents.after(0)) == before
    with pytest.raises(AssertionError):
        extents.allocate(0)


def test_a_batch_equals_single_calls() -> None:
    one, many = Extents(FIRST, UNTIL), Extents(FIRST, UNTIL)
    taken = [one.allocate(4) for _ in range(10)]
    assert [many.allocate(4) for _ in range(10)] == taken
    pinned = [start for start in taken[2:6] if start is not None]
    for start in pinned + pinned:
        one.pin(start)
    many.pin_all(pinned + pinned)
    freed = [(start, 4) for start in taken[1:8] if start is not None]
    for start, length in freed:
        one.release(start, length)
    many.release_all(freed)
    assert one.after(0) == many.after(0)
    for extents in (one, many):
        assert extents.free_pages == UNTIL - FIRST - 10 * 4 + 3 * 4
        assert extents.pinned == 4
    many.unpin_all(pinned + pinned)
    for start in pinned + pinned:
        one.unpin(start)
    assert one.after(0) == many.after(0)
    assert (one.pinned, one.free_pages) == (0, UNTIL - FIRST - 3 * 4)


def test_of_several_that_fit_alike_the_one_free_for_the_longest_time_is_allocated() -> None:
    extents = Extents.around([(at, 3) for at in range(5, 60, 6)], 2, 62)  # free: threes at 2, 8, 14, ...
    assert extents.longest_starts(3) == [2, 8, 14]
    assert [extents.allocate(2) for _ in range(2)] == [2, 8]
    extents.release(2, 2)  # and is a three again, the youngest of them
    assert extents.some_starts(2) == [14, 10]
    assert [extents.allocate(3) for _ in range(10)] == [14, 20, 26, 32, 38, 44, 50, 56, 2, None]


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_many_extents_of_many_lengths_agree_with_a_plain_list(seed: int) -> None:
    """Long enough that runs of free extents are divided and joined again."""
    rng = random.Random(seed)
    pages = 60_000
    live: list[tuple[int, int]] = []
    page = 0
    while page < pages - 100:
        length = rng.choice([1, 2, 5, 9])
        live.append((page, length))
        page += length + rng.choice([1, 1, 2, 7, 40])
    extents = Extents.around(live, 0, pages)
    plain: list[
        tuple[int, int]
    ] = []  # free: start and length, the one that has been so for the longest time first
    ends = [start + length for start, length in live]
    plain = [
        (end, start - end)
        for end, start in zip(ends, [*(start for start, _ in live[1:]), pages], strict=True)
        if start > end
    ]
    rng.shuffle(live)
    for _ in range(300):
        if rng.random() < 0.7 and live:
            start, length = live.pop()
            extents.release(start, length)
            left = [one for one in plain if sum(one) == start]
            right = [one for one in plain if one[0] == start + length]
            for gone in left + right:
                plain.remove(gone)
            begin = left[0][0] if left else start
            plain.append((begin, (sum(right[0]) if right else start + length) - begin))
        else:
            wanted = rng.choice([1, 2, 3, 8, 30])
            fitting = [one for one in plain if one[1] >= wanted]
            best = min(fitting, key=lambda one: one[1], default=None)
            assert extents.allocate(wanted) == (None if best is None else best[0])
            if best is not None:
                plain.remove(best)
                if best[1] > wanted:
                    plain.append((best[0] + wanted, best[1] - wanted))
    assert extents.after(0) == sorted(plain)
    assert extents.longest == max(length for _, length in plain)
    page = rng.randrange(pages)
    assert extents.after(page) == sorted(one for one in plain if sum(one) > page)


def test_extents_that_come_and_go_leave_no_memory_allocated() -> None:
    """Joined from both ends and from the middle, in any order."""
    for order in (1, -1, 7919):
        extents = Extents(0, 1 << 18)
        starts = [extents.allocate(2) for _ in range(1 << 17)]
        places = (
            list(range(len(starts)))
            if order == 1
            else sorted(
                range(len(starts)),
                key=lambda at, order=order: at * order % (1 << 17),  # type: ignore[misc]
            )
        )
        for at in places:
            extents.release(2 * at, 2)
        assert extents.after(0) == [(0, 1 << 18)]


def test_the_few_that_remain_of_many_take_little_memory() -> None:
    """One is left in each neighbourhood, and the runs that contain them are joined."""
    count = 1 << 16
    extents = Extents(0, 2 * count)
    assert [extents.allocate(2) for _ in range(count)] == [2 * at for at in range(count)]
    extents.release_all([(2 * at, 2) for at in range(0, count, 2)])
    assert extents.free_extents == count // 2
    assert 48 <= extents.memory_bytes / extents.free_extents < 110
    extents.release_all([(2 * at, 2) for at in range(1, count, 2) if at % 256 != 1])
    assert extents.free_extents == 1 + count // 256
    assert extents.memory_bytes / extents.free_extents < 400


@pytest.mark.parametrize(
    ("drive", "free", "record", "pages"),
    [
        (64 << 8, 64 << 8, 9, 1 << 8),
        (64 << 8, 64 << 8, 1 << 8, 4 << 8),
        (64 << 8, 8 << 8, 1 << 8, 2 << 8),
        (64 << 8, 2 << 8, 1 << 8, 1 << 8),
        (1 << 30, 1 << 30, 1 << 12, 1 << 16),
    ],
)
def test_ground_for_a_lane_is_larger_for_large_records_if_that_much_is_free(
    drive: int, free: int, record: int, pages: int
) -> None:
    assert lent_pages(drive, free, record) == pages
