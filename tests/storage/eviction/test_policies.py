"""Each policy against a plain one, call by call."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstore.storage.eviction.lru import Lru
from kvstore.storage.eviction.policy import NO_ROW, Steps
from kvstore.storage.eviction.s3fifo import S3Fifo
from tests.storage.eviction.reference import PlainLru, PlainS3Fifo

if TYPE_CHECKING:
    from kvstore.storage.eviction.policy import Policy

CAPACITY = 120


def enter(
    policy: Policy | PlainLru | PlainS3Fifo, kind: float, row: int, pages: int, name: int, place: int
) -> None:
    if kind < 0.7:
        policy.admitted(row, pages, name)
    elif kind < 0.85:
        policy.readmitted(row, pages)
    else:
        policy.inherited(row, pages, place)


def live(policy: Policy, plain: PlainLru | PlainS3Fifo, rng: random.Random) -> None:
    pages_of_known = [rng.randrange(1, 9) for _ in range(rng.choice([0, 0, 12]))]  # of an earlier life
    policy.restored(pages_of_known)
    plain.restored(pages_of_known)
    inside = {row: row + 100 for row in range(len(pages_of_known))}  # row -> name
    free = list(range(len(inside), 40))
    for _ in range(600):
        action = rng.random()
        if (action < 0.25 or not inside) and free:
            row = free.pop(rng.randrange(len(free)))
            pages, name = rng.randrange(1, 9), rng.randrange(1, 60)
            if name in inside.values():
                name += 1000 * row + 1000
            kind = rng.random() if inside else 0.0
            place = rng.choice(sorted(inside)) if inside else 0
            for one in (policy, plain):
                enter(one, kind, row, pages, name, place)
            inside[row] = name
        elif action < 0.5:
            rows = rng.choices(sorted(inside), k=rng.randrange(6))
            policy.touched(rows)
            plain.touched(rows)
        elif action < 0.55:
            row = rng.choice(sorted(inside))
            policy.removed(row)
            plain.removed(row)
            free.append(row)
            del inside[row]
        elif action < 0.6 and len(inside) > 1:
            row, place = rng.sample(sorted(inside), 2)
            policy.inherited(row, 1, place)
            plain.inherited(row, 1, place)
        elif inside:
            row = policy.candidate(Steps(10**6))
            assert row == plain.candidate()
            assert row == policy.candidate(Steps(10**6)), "it changes its mind"
            policy.evicted(row, inside[row])
            plain.evicted(row, inside[row])
            free.append(row)
            del inside[row]
    while inside:
        row = policy.candidate(Steps(10**6))
        assert row == plain.candidate()
        policy.evicted(row, inside[row])
        plain.evicted(row, inside.pop(row))
    assert policy.candidate(Steps(10**6)) == NO_ROW


@pytest.mark.parametrize("seed", range(60))
def test_lru_is_exact(seed: int) -> None:
    live(Lru(), PlainLru(), random.Random(seed))


@pytest.mark.parametrize("seed", range(60))
def test_s3_fifo_equals_the_textbook_version(seed: int) -> None:
    live(S3Fifo(CAPACITY), PlainS3Fifo(CAPACITY), random.Random(seed))


def test_s3_fifo_searches_for_a_candidate_in_bounded_steps_and_resumes() -> None:
    policy = S3Fifo(100)
    for row in range(50):
        policy.admitted(row, 2, row + 1)
    policy.touched(range(50))
    calls = 1
    while (row := policy.candidate(Steps(10))) == NO_ROW:
        calls += 1
    assert row == 0, "the first that moved on, once no more than 10 pages are small"
    assert calls == 5


def test_ghosts_are_forgotten_by_their_pages_and_recognized_once() -> None:
    policy = S3Fifo(20)  # small 2, ghosts 18
    for row in range(30):
        policy.admitted(row, 2, row + 1)
    for _ in range(20):
        row = policy.candidate(Steps(100))
        policy.evicted(row, row + 1)
    assert policy.ghosts == 9
    left = []
    for row in (10, 11, 12):  # 10 is too long ago, 11 to 19 are known
        policy.admitted(row, 2, row + 1)
        left.append(policy.ghosts)
    assert left == [9, 8, 7]
    order = []
    while (row := policy.candidate(Steps(100))) != NO_ROW:
        order.append(row)
        policy.evicted(row, 0)
    assert order == [*range(20, 30), 11, 12, 10], "two are main, which goes once little is small"


def test_ghosts_are_forgotten_in_order_even_if_others_were_taken_back() -> None:
    policy = S3Fifo(20)  # of 2 pages each, nine
    for name in range(1, 500):
        policy.admitted(0, 2, name)
        policy.evicted(0, name)
        if name % 3 == 0:
            before = policy.ghosts
            policy.admitted(0, 2, name - 1)
            assert policy.ghosts == before - 1, "a ghost is known again"
            policy.removed(0)
            policy.admitted(0, 2, name - 1)
            assert policy.ghosts == before - 1, "once"
            policy.removed(0)
    assert policy.ghosts == 9, "what was taken back counts no more"


def test_the_number_of_ghosts_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.eviction.s3fifo.EVICTION_GHOSTS_MAX", 5)
    policy = S3Fifo(10_000)
    for name in range(1, 50):
        policy.admitted(0, 1, name)
        policy.evicted(0, name)
    assert policy.ghosts == 5
    policy.admitted(0, 1, 44)
    assert policy.ghosts == 5, "too long ago"
    policy.removed(0)
    policy.admitted(0, 1, 45)
    assert policy.ghosts == 4
