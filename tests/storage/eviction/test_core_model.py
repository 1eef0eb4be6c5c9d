"""Random lives of the core, each step compared with the plain one."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.lru import Lru
from kvstore.storage.eviction.s3fifo import S3Fifo
from kvstore.storage.eviction.types import Guard, Reason, Record, Watermarks
from tests.storage.eviction.reference import PlainCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.storage.eviction.policy import Policy

CAPACITY = 200
MARKS = Watermarks(20, 60)
T0 = 1_700_000_000_000
SESSIONS = range(1, 7)
OUTSIDE = (Reason.SUPERSEDED, Reason.DELETED, Reason.QUARANTINED)


class Life:
    """The core and the plain one, side by side."""

    def __init__(self, make_policy: Callable[[], Policy], seed: int, *, exact_lru: bool) -> None:
        self.rng = random.Random(seed)
        self.now_ms = T0
        self.core = Evictor(make_policy(), MARKS, now_ms=T0)
        self.plain = PlainCore(MARKS)
        self.exact_lru = exact_lru
        self.next_generation = 1
        self.gone = dict.fromkeys(Reason, (0, 0))
        self.taken = 0

    def any_generation(self) -> int:
        """A generation, usually a stored one."""
        if self.plain.blocks and self.rng.random() < 0.95:
            return self.rng.choice(sorted(self.plain.blocks))
        return self.rng.randrange(1, self.next_generation + 2)

    def step(self) -> None:
        steps = (
            self.admit, self.admit, self.grow, self.grow, self.grow, self.touch, self.touch, self.hold, self.hold,
            self.release, self.release, self.release, self.join, self.protect, self.unprotect, self.drop, self.cut,
            self.plan, self.plan, self.plan,
        )  # fmt: skip
        self.rng.choice(steps)()
        self.now_ms += self.rng.choice([0, 1, 30, 100, 700])
        assert len(self.core) == len(self.plain.blocks)
        pages = sum(block.record.pages for block in self.plain.blocks.values())
        assert self.core.statistics().pages == pages

    def admit(self) -> None:
        rng = self.rng
        generation = self.next_generation if rng.random() < 0.9 else self.any_generation()
        self.next_generation = max(self.next_generation, generation + 1)
        expires_ms = self.now_ms + rng.randrange(-50, 5000) if rng.random() < 0.3 else 0
        session = rng.choice([0, *SESSIONS])
        record = Record(
            generation, rng.randrange(1, 6), rng.randrange(1, 50), expires_ms, session, rng.randrange(6)
        )
        refusal = self.plain.admitted(record)
        assert self.core.admitted([record], self.now_ms) == ({} if refusal is None else {generation: refusal})

    def grow(self) -> None:
        """Put the next blocks of a session."""
        session = self.rng.choice(SESSIONS)
        members = self.plain.members(session)
        first = (members[-1].position or 0) + 1 if members else 0
        records = [
            Record(self.next_generation + at, self.rng.randrange(1, 6), 0, 0, session, first + at)
            for at in range(self.rng.randrange(1, 4))
        ]
        self.next_generation += len(records)
        for record in records:
            assert self.plain.admitted(record) is None
        assert self.core.admitted(records, self.now_ms) == {}

    def touch(self) -> None:
        generations = [self.any_generation() for _ in range(self.rng.randrange(6))]
        if self.rng.random() < 0.5:
            members = self.plain.members(self.rng.choice(SESSIONS))
            generations = [member.record.generation for member in members]
        self.plain.touched(generations)
        self.core.touched(generations, self.now_ms)

    def hold(self) -> None:
        guard, generation = self.rng.choice(list(Guard)), self.any_generation()
        refusal = self.plain.hold(generation, guard)
        assert self.core.hold([generation], guard) == ({} if refusal is None else {generation: refusal})

    def release(self) -> None:
        held = [
            (generation, guard)
            for generation, block in self.plain.blocks.items()
            for guard in Guard
            if block.guards[guard]
        ]
        generation, guard = self.any_generation(), self.rng.choice(list(Guard))
        if held and self.rng.random() < 0.9:
            generation, guard = self.rng.choice(held)
        refusal = self.plain.release(generation, guard)
        answer = self.core.release([generation], guard, self.now_ms)
        assert answer == ({} if refusal is None else {generation: refusal})

    def join(self) -> None:
        """Begin a session with blocks of another one, or with an invalid prefix."""
        session, other = self.rng.choice(SESSIONS), self.rng.choice(SESSIONS)
        members = self.plain.members(other)[: self.rng.randrange(1, 5)]
        generations = [member.record.generation for member in members] or [self.any_generation()]
        position = 0 if self.rng.random() < 0.8 else self.rng.randrange(4)
        refused = {}
        for at, generation in enumerate(generations):
            refusal = self.plain.joined(generation, session, position + at)
            if refusal is not None:
                refused[generation] = refusal
        assert self.core.joined(generations, session, position, self.now_ms) == refused

    def protect(self) -> None:
        session = self.rng.choice(SESSIONS)
        blocks = self.rng.choice([1, 2, 3, 100])
        self.plain.protect(session, blocks)
        assert self.core.protect_session(session, blocks, now_ms=self.now_ms) is None

    def unprotect(self) -> None:
        for session in SESSIONS:
            if session in self.plain.protected:
                self.plain.unprotect(session)
                assert self.core.unprotect_session(session, self.now_ms) is None

    def cut(self) -> None:
        session, first_position = self.rng.choice(SESSIONS), self.rng.randrange(5)
        self.plain.left(session, first_position)
        self.core.left(session, first_position, self.now_ms)

    def drop(self) -> None:
        generations = [self.any_generation() for _ in range(self.rng.randrange(3))]
        reason = self.rng.choice(OUTSIDE)
        for generation in generations:
            if generation in self.plain.blocks:
                self.forget(generation, reason)
        self.core.gone(list(dict.fromkeys(generations)), reason, self.now_ms)

    def plan(self) -> None:
        used = sum(block.record.pages for block in self.plain.blocks.values())
        demand = self.rng.choice([0, 0, self.rng.randrange(10)])
        waiting = self.rng.choice([0, 0, 0, self.rng.randrange(1, 12)])
        free = max(0, CAPACITY - used)
        mode, wanted = self.plain.goal(free, demand, waiting)
        expired = self.plain.expired(self.now_ms)
        plan = self.core.plan(free_pages=free, demand_pages=demand, waiting_pages=waiting, now_ms=self.now_ms)
        assert plan.mode is mode
        got = 0
        for victim in plan.victims:
            if victim.reason is Reason.EXPIRED:
                assert victim.generation in expired
                expired.remove(victim.generation)
            else:
                assert got < wanted, "more than was wanted"
                whole = [session for session in SESSIONS if self.plain.is_whole(session)]
                self.plain.check_choice(victim.generation, victim.reason, exact_lru=self.exact_lru)
            block = self.plain.blocks[victim.generation]
            assert victim.pages == block.record.pages
            assert victim.session in (block.sessions or {0})
            self.forget(victim.generation, victim.reason)
            if victim.reason is not Reason.EXPIRED:
                assert all(self.plain.is_whole(session) for session in whole), "a hole"
            assert victim.generation not in self.core
            got += victim.pages
            self.taken += 1
        assert not expired, "late"
        assert plan.pages == got
        assert plan.more is False
        if got < wanted:
            assert all(self.plain.is_guarded(tail) for tail in self.plain.tails())
            assert plan.stuck is self.plain.stuck()
        else:
            assert plan.stuck is None

    def forget(self, generation: int, reason: Reason) -> None:
        blocks, pages = self.gone[reason]
        self.gone[reason] = blocks + 1, pages + self.plain.blocks[generation].record.pages
        self.plain.forget(generation)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        for generation, block in self.plain.blocks.items():
            assert self.core.is_guarded(generation) == self.plain.is_guarded(block)
            assert generation in self.core
        statistics = self.core.statistics()
        assert statistics.gone == self.gone
        assert statistics.sessions == len(self.plain.sessions())
        assert statistics.session_links == sum(len(block.sessions) for block in self.plain.blocks.values())
        guarded = [block for block in self.plain.blocks.values() if self.plain.is_guarded(block)]
        assert sum(statistics.guarded.values()) == len(guarded)


@pytest.mark.parametrize("first_seed", range(0, 40, 10))
def test_lru_keeps_every_guarantee(first_seed: int) -> None:
    taken = 0
    for seed in range(first_seed, first_seed + 10):
        life = Life(Lru, seed, exact_lru=True)
        life.run(400)
        taken += life.taken
    assert taken > 200, "hardly anything was evicted, so nothing was shown"


@pytest.mark.parametrize("first_seed", range(0, 20, 10))
def test_s3_fifo_keeps_every_guarantee(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        Life(partial(S3Fifo, CAPACITY), seed, exact_lru=False).run(400)


@pytest.mark.parametrize("seed", range(6))
def test_when_all_guards_end_everything_is_evicted_and_nothing_is_left_over(seed: int) -> None:
    life = Life(Lru, seed, exact_lru=True)
    life.run(300)
    core, plain, now_ms = life.core, life.plain, life.now_ms
    life.unprotect()
    for generation, block in list(plain.blocks.items()):
        for guard in Guard:
            for _ in range(block.guards[guard]):
                assert core.release([generation], guard, now_ms) == {}
    while core.plan(free_pages=0, waiting_pages=CAPACITY, now_ms=now_ms).victims:
        pass
    statistics = core.statistics()
    assert (len(core), statistics.pages, statistics.expiring) == (0, 0, 0)
    assert (statistics.sessions, statistics.session_links) == (0, 0)
    assert not any(statistics.guarded.values())
