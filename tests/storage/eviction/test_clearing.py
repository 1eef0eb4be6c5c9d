"""Finding a run of pages to clear, compared with every possible run."""

from __future__ import annotations

import random
from array import array
from itertools import chain

import pytest

from kvstore.errors import ConfigError
from kvstore.storage.eviction.clearing import Clearing, clearings
from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.lru import Lru
from kvstore.storage.eviction.policies import POLICY_NAMES, new_policy
from kvstore.storage.eviction.removals import History
from kvstore.storage.eviction.types import Eviction, Evictions, Guard, Reason, Record, Standing, Watermarks
from kvstore.storage.extents import Extents

FIRST, UNTIL = 4, 124


def core_with(places: list[tuple[int, int, int]]) -> Evictor:
    """A core with blocks, by first page, pages and generation."""
    core = Evictor(Lru(), Watermarks(0, 0), now_ms=0)
    refused = core.admitted(
        [Record(generation, pages, start=start) for start, pages, generation in places], 0
    )
    assert not refused
    return core


class Land:
    """A random drive: free pages, blocks, guarded blocks, and other pages."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        places: list[tuple[int, int, int]] = []
        self.kind: dict[int, str] = {}  # of each page
        self.start_of: dict[int, int] = {}  # generation -> its first page
        self.guarded: set[int] = set()
        live: list[tuple[int, int]] = []
        page, generation = FIRST, 1
        odds = rng.choice([[5, 5, 1, 0], [2, 6, 1, 1], [1, 8, 0, 0]])
        while page < UNTIL:
            pages = min(rng.choice([1, 2, 3, 8]), UNTIL - page)
            (kind,) = rng.choices(["free", "block", "guarded", "other"], odds)
            self.kind.update(dict.fromkeys(range(page, page + pages), kind))
            if kind != "free":
                live.append((page, pages))
            if kind in {"block", "guarded"}:
                places.append((page, pages, generation))
                self.start_of[generation] = page
                if kind == "guarded":
                    self.guarded.add(generation)
                generation += 1
            page += pages
        self.extents = Extents.around(live, FIRST, UNTIL)
        self.core = core_with(places)
        self.core.hold(sorted(self.guarded), Guard.PIN)

    def look(self, length: int) -> Clearing | None:
        steps = clearings(self.extents, self.core, length)
        return next((found for found in steps if found is not None), None)

    def can_be_cleared(self, first: int, length: int) -> bool:
        return all(self.kind.get(page) in {"free", "block"} for page in range(first, first + length))


@pytest.mark.parametrize("seed", range(150))
def test_a_region_to_clear_is_found_if_there_is_one_and_is_valid(seed: int) -> None:
    land = Land(seed)
    for length in (2, 9, 17, 40):
        found = land.look(length)
        possible = any(land.can_be_cleared(first, length) for first in range(FIRST, UNTIL - length + 1))
        assert (found is not None) == possible
        if found is None:
            continue
        assert not land.guarded.intersection(found.generations)
        pages = 0
        for generation in found.generations:
            start = land.start_of[generation]
            standing = land.core.at(start)
            assert standing is not None
            pages += standing.pages
            land.core.gone([generation], Reason.CLEARED, 0)
            land.extents.release(start, standing.pages)
        assert pages == found.pages
        assert land.extents.longest >= length
        assert pages < length + 8, "no more than was in the way"
        break


def test_of_the_large_holes_the_one_with_the_least_in_the_way_is_taken() -> None:
    core = core_with([(10, 2, 1), (12, 2, 2), (30, 2, 3), (50, 2, 4)])
    extents = Extents.around([(10, 2), (12, 2), (30, 2), (40, 2), (50, 2)], 4, 60)
    (found,) = clearings(extents, core, 18)
    assert found == Clearing([3], 2)
    core.hold([3], Guard.LEASE)
    (found,) = clearings(extents, core, 18)
    assert found == Clearing([4], 2)


def test_a_long_search_is_made_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.eviction.clearing.EVICTION_STEPS_MAX", 10)
    core = core_with([(start, 2, start) for start in range(2, 402, 2)])
    core.hold(range(2, 300, 2), Guard.PIN)
    extents = Extents.around([(start, 2) for start in range(2, 402, 2)], 2, 402)
    looks = list(clearings(extents, core, 20))
    assert looks[:-1] == [None] * (len(looks) - 1)
    assert len(looks) > 10
    assert looks[-1] is not None


def test_blocks_are_found_by_their_first_pages_as_long_as_they_are_stored() -> None:
    core = core_with([(4, 6, 7), (10, 2, 8), (20, 3, 9)])
    expected = [Standing(7, 6), None, Standing(8, 2), Standing(9, 3)]
    assert [core.at(page) for page in (4, 5, 10, 20)] == expected
    core.gone([8], Reason.DELETED, 0)
    core.admitted([Record(11, 5, start=12), Record(12, 2, start=10), Record(13, 2)], 0)
    assert [core.at(page) for page in (10, 12, 0)] == [Standing(12, 2), Standing(11, 5), None]
    with pytest.raises(AssertionError):
        core.admitted([Record(14, 1, start=10)], 0)
    assert 14 not in core
    core.moved(12, 15, 30)
    assert [core.at(page) for page in (10, 30)] == [None, Standing(15, 2)]
    with pytest.raises(AssertionError):
        core.moved(15, 16, 20)
    assert core.at(30) == Standing(15, 2)


def test_blocks_are_found_by_their_first_pages_after_reopening() -> None:
    core = core_with([])
    core.restore(array("Q", [3, 5, 6]), array("I", [2, 4, 1]), array("Q", [0] * 3), array("Q", [40, 20, 30]))
    assert [core.at(page) for page in (20, 30, 40)] == [Standing(5, 4), Standing(6, 1), Standing(3, 2)]


def test_history_remembers_the_newest_of_a_name_and_forgets_the_oldest() -> None:
    history = History(3)
    told = [Eviction(generation, 1, generation % 2, 5, Reason.SPACE, 0, 0) for generation in range(6)]
    for numbers in ([1, 2], [1, 3, 4]):
        first = 0 if numbers == [1, 2] else 2
        some = Evictions(array("Q", chain.from_iterable(told[first : first + len(numbers)])))
        history.add(b"".join(map(name_of, numbers)), some)
    names = [name_of(number) for number in range(1, 5)]
    assert [history.of(name) for name in names] == [told[2], None, told[3], told[4]]
    assert list(history.sessions_of(b"".join(names), 4) or ()) == [0, 0, 1, 0]
    assert history.sessions_of(names[0] + names[1], 2) is None, "in no session, or not remembered"


def name_of(number: int) -> bytes:
    return bytes([number]) * 48


def test_unknown_policies_are_refused() -> None:
    assert [new_policy(one, 100).name for one in POLICY_NAMES] == ["lru", "s3fifo"]
    with pytest.raises(ConfigError, match="lru, s3fifo"):
        new_policy("fifo", 100)
