"""The core's maps, of generations and of places, against dicts."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.lru import Lru
from kvstore.storage.eviction.types import Reason, Record, Refusal, Standing, Watermarks

NUMBERS = st.one_of(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 20).map(lambda n: n << 40))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "find"]), NUMBERS), max_size=150)


def new() -> Evictor:
    return Evictor(Lru(), Watermarks(0, 0), now_ms=0)


def place(number: int) -> int:
    """Another number for each, never 0, with the same low bits: the second map is not the first one again."""
    return (number * 0x9E3779B97F4A7C15 << 6 | number & 63) % 2**64 or 1


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_they_behave_like_dicts(steps: list[tuple[str, int]]) -> None:
    core = new()
    pages: dict[int, int] = {}
    places: dict[int, int] = {}
    for count, (action, number) in enumerate(steps, 1):
        if action == "add" and number not in pages and place(number) not in places:
            assert core.admitted([Record(number, count, start=place(number))], 0) == {}
            pages[number] = count
            places[place(number)] = number
        elif action == "add" and number in pages:
            assert core.admitted([Record(number, 1)], 0) == {number: Refusal.EXISTS}
        elif action == "remove":
            assert [gone.generation for gone in core.gone([number], Reason.DELETED, 0)] == (
                [number] if number in pages else []
            )
            if pages.pop(number, 0):
                del places[place(number)]
        assert (number in core) == (number in pages)
        assert len(core) == len(pages)
    for number in {number for _, number in steps} | {1, 2, 3, 4, 2**64 - 1}:
        assert (number in core) == (number in pages)
        known = places.get(place(number))
        assert core.at(place(number)) == (None if known is None else Standing(known, pages[known]))


@given(st.lists(NUMBERS, unique=True, max_size=100))
@settings(max_examples=60, deadline=None)
def test_a_batch_equals_single_calls(numbers: list[int]) -> None:
    core = new()
    numbers.sort()
    core.restore(array("Q", numbers), array("I", [1] * len(numbers)), array("Q", [0] * len(numbers)))
    assert len(core) == len(numbers)
    assert all(number in core for number in numbers)
    assert [gone.generation for gone in core.gone(numbers, Reason.DELETED, 0)] == numbers
    assert len(core) == 0


def test_many_thousands_of_entries_come_and_go() -> None:
    core = new()
    for first in range(0, 60_000, 600):
        core.admitted([Record(number * 16, 1, start=1 + number) for number in range(first, first + 600)], 0)
        if first >= 3000:
            core.gone([number * 16 for number in range(first - 3000, first - 2400)], Reason.DELETED, 0)
    present = [number for number in range(60_000) if number * 16 in core]
    assert present == list(range(57_000, 60_000))
    assert [page for page in range(60_001) if core.at(page)] == [1 + number for number in present]
