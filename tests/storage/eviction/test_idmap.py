"""The map of numbers against a dict."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.storage.eviction.idmap import IdMap

NUMBERS = st.one_of(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 20).map(lambda n: n << 40))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "find"]), NUMBERS), max_size=150)


@given(STEPS, st.integers(0, 5000))
@settings(max_examples=150, deadline=None)
def test_it_is_a_dict(steps: list[tuple[str, int]], expected: int) -> None:
    rows = IdMap(expected)
    model: dict[int, int] = {}
    for row, (action, number) in enumerate(steps):
        if action == "add":
            assert rows.add(number, row) == (number not in model)
            model.setdefault(number, row)
        elif action == "remove":
            assert rows.remove(number) == model.pop(number, -1)
        else:
            assert rows.find(number) == model.get(number, -1)
        assert len(rows) == len(model)
    asked = [number for _, number in steps] + [1, 2, 3, 4, 2**64 - 1]
    assert rows.find_all(asked) == [model[number] for number in asked if number in model]


@given(st.lists(NUMBERS, unique=True, max_size=100))
@settings(max_examples=60, deadline=None)
def test_many_at_once_are_the_same_as_one_by_one(numbers: list[int]) -> None:
    rows = IdMap(1)
    numbers.sort()
    rows.add_all(numbers, 7)
    assert len(rows) == len(numbers)
    assert [rows.find(number) for number in numbers] == list(range(7, 7 + len(numbers)))


def test_neighbours_are_found_with_gaps_between_them() -> None:
    rows = IdMap(1)
    present = [number for number in range(1000) if number % 7 != 3]
    rows.add_all(present, 0)
    assert rows.find_all(range(1000)) == list(range(len(present)))
    assert rows.find_all(reversed(range(1000))) == list(reversed(range(len(present))))
