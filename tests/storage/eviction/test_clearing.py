"""Looking for a place to clear, against every place there is; and the ground that it looks at."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ConfigError
from kvstore.storage.eviction.clearing import Clearing, clearings
from kvstore.storage.eviction.ground import Ground, Standing
from kvstore.storage.eviction.items import Eviction, Reason
from kvstore.storage.eviction.policies import POLICY_NAMES, new_policy
from kvstore.storage.eviction.removals import History
from kvstore.storage.extents import Extents

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST, UNTIL = 4, 124


class Land:
    """A drive drawn from a seed: free, blocks, blocks with a guard, and what is none of these."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.ground = Ground(UNTIL)
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
                self.ground.put(page, pages, generation)
                self.start_of[generation] = page
                if kind == "guarded":
                    self.guarded.add(generation)
                generation += 1
            page += pages
        self.extents = Extents.around(live, FIRST, UNTIL)

    def look(self, length: int, is_guarded: Callable[[int], bool] | None = None) -> Clearing | None:
        steps = clearings(self.extents, self.ground, is_guarded or self.guarded.__contains__, length)
        return next((found for found in steps if found is not None), None)

    def can_be_cleared(self, first: int, length: int) -> bool:
        return all(self.kind.get(page) in {"free", "block"} for page in range(first, first + length))


@pytest.mark.parametrize("seed", range(150))
def test_a_clearing_is_found_if_there_is_one_and_it_is_one(seed: int) -> None:
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
            standing = land.ground.at(start)
            assert standing is not None
            pages += standing.pages
            land.ground.take(start)
            land.extents.release(start, standing.pages)
        assert pages == found.pages
        assert land.extents.longest >= length
        assert pages < length + 8, "no more than was in the way"
        break


def test_of_the_large_holes_the_one_is_taken_where_least_stands_in_the_way() -> None:
    ground = Ground(60)
    for start, generation in [(10, 1), (12, 2), (30, 3), (50, 4)]:
        ground.put(start, 2, generation)
    extents = Extents.around([(10, 2), (12, 2), (30, 2), (40, 2), (50, 2)], 4, 60)
    (found,) = clearings(extents, ground, lambda _: False, 18)
    assert found == Clearing([3], 2)
    (found,) = clearings(extents, ground, lambda generation: generation == 3, 18)
    assert found == Clearing([4], 2)


def test_a_long_look_is_taken_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.eviction.clearing.EVICTION_STEPS_MAX", 10)
    ground = Ground(400)
    for start in range(0, 400, 2):
        ground.put(start, 2, 1 + start)
    extents = Extents.around([(start, 2) for start in range(0, 400, 2)], 0, 400)
    looks = list(clearings(extents, ground, lambda generation: generation < 300, 20))
    assert looks[:-1] == [None] * (len(looks) - 1)
    assert len(looks) > 10
    assert looks[-1] is not None


def test_ground_is_found_by_first_pages_and_its_spots_are_used_again() -> None:
    ground = Ground(100)
    ground.put_all([4, 10, 20], [6, 2, 3], [7, 8, 9])
    assert [ground.at(page) for page in (4, 5, 10, 20)] == [
        Standing(7, 6),
        None,
        Standing(8, 2),
        Standing(9, 3),
    ]
    ground.take(10)
    ground.take(10)
    ground.put(12, 5, 11)
    ground.put(10, 2, 12)
    assert [ground.at(10), ground.at(12)] == [Standing(12, 2), Standing(11, 5)]
    assert len(ground._generations) == 4


def test_history_remembers_the_newest_of_a_name_and_forgets_the_oldest() -> None:
    history = History(3)
    told = [Eviction(generation, 1, 0, 0, Reason.SPACE, 0, 0) for generation in range(6)]
    for number, entry in zip([1, 2, 1, 3, 4], told, strict=False):
        history.add((b"t", bytes([number])), entry)
    assert [history.of((b"t", bytes([number]))) for number in range(1, 5)] == [
        told[2],
        None,
        told[3],
        told[4],
    ]


def test_policies_have_names_and_others_are_refused() -> None:
    assert [new_policy(one, 100).name for one in POLICY_NAMES] == ["lru", "s3fifo"]
    with pytest.raises(ConfigError, match="lru, s3fifo"):
        new_policy("fifo", 100)
