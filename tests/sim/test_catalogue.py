"""Which blocks a tier holds, against a model that is too simple to be wrong; and policies from outside."""

from __future__ import annotations

import importlib.util
import random
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.replay.catalogue import Catalogue, Lru, Steps, policy_maker
from sim.replay.workload import Chats, chats
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Sequence


class Fifo:
    """A policy written outside of this project: it takes its capacity, and ignores uses."""

    def __init__(self, capacity_pages: int) -> None:
        self.capacity_pages = capacity_pages
        self._rows: list[int] = []

    def admitted(self, row: int, pages: int, name64: int) -> None:
        assert pages == 1
        assert name64 >= 0
        self._rows.append(row)

    def inherited(self, row: int, pages: int, place: int) -> None:
        assert row in self._rows
        assert place in self._rows
        assert pages == 1

    def touched(self, rows: Sequence[int]) -> None:
        assert set(rows) <= set(self._rows)

    def evicted(self, row: int, name64: int) -> None:
        del name64
        self._rows.remove(row)

    def candidate(self, steps: Steps) -> int:
        assert steps.left > 0
        return self._rows[0] if self._rows else -1


class _Reference:
    """LRU over a list, the tail of a sequence before its head."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.blocks = capacity, list[int]()

    def ask(self, blocks: Sequence[int]) -> int:
        hits = 0
        while hits < len(blocks) and blocks[hits] in self.blocks:
            hits += 1
        for block in reversed(blocks[:hits]):
            self.blocks.remove(block)
            self.blocks.append(block)
        for block in reversed(blocks[hits:]):
            if block not in self.blocks:
                if len(self.blocks) >= self.capacity:
                    self.blocks.pop(0)
                self.blocks.append(block)
        admitted_any = any(True for _ in blocks[hits:])
        if admitted_any:
            for block in reversed(blocks[:hits]):
                if block in self.blocks:
                    self.blocks.remove(block)
                    self.blocks.append(block)
        return hits


@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 12))
def test_lru_agrees_with_a_list(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    ours, reference = Catalogue(Lru(), capacity), _Reference(capacity)
    for _ in range(60):
        chain = rng.randrange(3)
        blocks = [chain * 100 + i for i in range(rng.randint(1, 6))]
        hits = ours.prefix(blocks)
        assert hits == reference.ask(blocks)
        ours.admit(blocks, hits)
        assert len(ours) <= capacity
        assert {block for block in range(300) if block in ours} == set(reference.blocks)


@pytest.mark.parametrize("name", ["lru", f"{__name__}:Fifo"])
def test_the_rest_of_an_evicted_sequence_is_a_prefix(name: str) -> None:
    tier = Catalogue(policy_maker(name)(5), 5)
    tier.admit([1, 2, 3, 4])
    tier.admit([11, 12, 13])
    assert tier.evicted == 2
    assert [block for block in (1, 2, 3, 4) if block in tier] == [1, 2]
    assert tier.prefix([1, 2, 3, 4]) == 2


def test_blocks_before_new_ones_are_evicted_after_them() -> None:
    tier = Catalogue(Lru(), 4)
    tier.admit([1, 2])
    tier.admit([1, 2, 3], tier.prefix([1, 2, 3]))
    tier.admit([9])
    tier.admit([8])
    assert [block for block in (1, 2, 3, 8, 9) if block in tier] == [1, 2, 8, 9]


class _Rows(Lru):
    """LRU that remembers the largest row it was given."""

    largest = -1

    def admitted(self, row: int, pages: int, name64: int) -> None:
        self.largest = max(self.largest, row)
        super().admitted(row, pages, name64)


def test_rows_are_reused() -> None:
    """A policy keeps arrays by row: they must not grow with everything ever stored."""
    policy = _Rows()
    tier = Catalogue(policy, 5)
    for block in range(200):
        tier.admit([block])
    assert policy.largest < 5
    assert [block for block in range(200) if block in tier] == [195, 196, 197, 198, 199]


def test_a_tier_without_room_holds_nothing() -> None:
    tier = Catalogue(Lru(), 0)
    tier.admit([1, 2])
    tier.touch([1])
    assert (len(tier), tier.prefix([1])) == (0, 0)


def test_the_stores_own_policies_are_used_where_the_store_is_installed() -> None:
    assert type(policy_maker("lru")(9)).__module__ == "kvstore.storage.eviction.lru"
    assert type(policy_maker("s3fifo")(9)).__module__ == "kvstore.storage.eviction.s3fifo"


def test_without_the_store_an_lru_of_the_simulator_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (
        "kvstore",
        "kvstore.storage",
        "kvstore.storage.eviction",
        "kvstore.storage.eviction.s3fifo",
    ):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert type(policy_maker("lru")(9)) is Lru
    with pytest.raises(
        OutOfRange, match=r"--policy is .*; it takes an eviction policy, lru, s3fifo, or package"
    ):
        policy_maker("s3fifo")


def test_the_stores_lru_and_the_simulators_keep_the_same_blocks() -> None:
    work = chats(Chats(sessions=150, seed=8))
    found = []
    for policy in (Lru(), policy_maker("lru")(100)):
        tier = Catalogue(policy, 100)
        hits = []
        for request in work:
            hits.append(tier.prefix(request.blocks))
            tier.admit(request.blocks, hits[-1])
        found.append((hits, tier.evicted))
    assert found[0] == found[1]
    assert found[0][1] > 100


def test_a_policy_is_found_by_name_and_given_its_capacity_if_it_takes_one() -> None:
    made = policy_maker(f"{__name__}:Fifo")(7)
    assert isinstance(made, Fifo)
    assert made.capacity_pages == 7


class Picky(Lru):
    """A policy whose constructor needs more than a capacity."""

    def __init__(self, capacity: int, more: str) -> None:
        super().__init__()
        del capacity, more


def test_an_impossible_policy_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        OutOfRange, match=r"--policy is .*Picky.*; it takes an eviction policy, a class that is made"
    ):
        policy_maker(f"{__name__}:Picky")(5)


@pytest.mark.parametrize(
    "name", ["", "mru", "no_such_module:X", f"{__name__}:NoSuch", "json:loads:x", "os:getcwd", "json:loads"]
)
def test_an_unknown_policy_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        OutOfRange, match=r"--policy is .*; it takes an eviction policy, lru, s3fifo, or package"
    ):
        policy_maker(name)
