"""The promises of the core, case by case."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.limits import (
    EVICTION_BATCH_BLOCKS,
    EVICTION_STEPS_MAX,
    EVICTION_URGENT_BLOCKS,
    GUARDS_OF_A_KIND_MAX,
    PROTECTED_SESSIONS_MAX,
    SESSION_BLOCKS_MAX,
)
from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.lru import Lru
from kvstore.storage.eviction.s3fifo import S3Fifo
from kvstore.storage.eviction.types import (
    Eviction,
    EvictionPlan,
    Guard,
    Mode,
    Reason,
    Record,
    Refusal,
    Stuck,
    Tally,
    Watermarks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

T0 = 1_700_000_000_000
CAPACITY = 100_000


@pytest.fixture(params=[Lru, partial(S3Fifo, CAPACITY)], ids=["lru", "s3fifo"])
def core(request: pytest.FixtureRequest) -> Evictor:
    return new(request.param)


NO_MARKS = Watermarks(0, 0)


def new(make_policy: type[Lru] | partial[S3Fifo] = Lru, marks: Watermarks = NO_MARKS) -> Evictor:
    return Evictor(make_policy(), marks, now_ms=T0)


def evict(core: Evictor, pages: int, now_ms: int = T0) -> EvictionPlan:
    """Plan the eviction for a put that waits for this many pages."""
    return core.plan(free_pages=0, waiting_pages=pages, now_ms=now_ms)


def order(core: Evictor) -> list[int]:
    """Evict everything, one at a time."""
    gone: list[int] = []
    while victims := evict(core, 1).victims:
        gone += [victim.generation for victim in victims]
    return gone


def chain(session: int, generations: range, first_position: int = 0, **more: int) -> list[Record]:
    return [
        Record(generation, 1, session=session, position=position, **more)
        for position, generation in enumerate(generations, first_position)
    ]


def test_the_least_recently_used_block_is_evicted_first() -> None:
    core = new()
    core.admitted([Record(generation, 1) for generation in range(1, 7)], T0)
    core.touched([2, 1, 99, 2], T0)
    assert order(core) == [3, 4, 5, 6, 1, 2]


def test_a_session_is_evicted_from_its_tail_and_completely_before_a_younger_one(core: Evictor) -> None:
    core.admitted(chain(1, range(1, 5)), T0)
    core.admitted(chain(2, range(11, 15)), T0)
    assert order(core) == [4, 3, 2, 1, 14, 13, 12, 11]


def test_a_session_whose_tail_is_in_use_is_not_old_even_if_its_head_is() -> None:
    core = new()
    core.admitted(chain(1, range(1, 5)), T0)
    core.admitted(chain(2, range(11, 15)), T0)
    core.touched([4], T0)  # an engine that has the head on its GPU asks for the rest only
    assert order(core) == [14, 13, 12, 11, 4, 3, 2, 1]


def test_a_shared_block_is_evicted_when_nothing_follows_it_in_any_session(core: Evictor) -> None:
    core.admitted(chain(1, range(1, 4)), T0)
    assert core.joined([1, 2], 2, 0, T0) == {}
    core.admitted(chain(2, range(12, 14), first_position=2), T0)
    core.touched([12, 13], T0)
    assert order(core) == [3, 13, 12, 2, 1]


def test_a_recently_read_prefix_outlives_the_rest_of_its_session() -> None:
    core = new()
    core.admitted(chain(1, range(1, 5)), T0)
    core.admitted([Record(9, 1)], T0)
    core.touched([1, 2], T0)
    assert order(core) == [4, 3, 9, 2, 1]


def test_a_block_cannot_have_two_positions() -> None:
    core = new()
    core.admitted(chain(1, range(1, 4)), T0)
    assert core.joined([2], 2, 0, T0) == {2: Refusal.MOVED}
    assert core.joined([2], 2, 1, T0) == {}
    assert core.joined([77], 2, 3, T0) == {77: Refusal.UNKNOWN}
    assert core.admitted([Record(9, 1, session=3, position=SESSION_BLOCKS_MAX)], T0) == {9: Refusal.FULL}
    assert 9 in core


def test_a_session_that_continues_differently_drops_its_old_blocks() -> None:
    core = new()
    core.admitted(chain(1, range(1, 5)), T0)
    core.admitted(chain(1, range(13, 15), first_position=2), T0)
    core.touched([1, 2, 13, 14], T0)
    assert order(core) == [3, 4, 14, 13, 2, 1]


def test_links_of_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.eviction.evictor.SESSION_LINKS_MIN", 10)
    core = new()
    core.admitted([Record(1, 1), Record(2, 1)], T0)
    answers = [core.joined([1], session, 0, T0) for session in range(1, 13)]
    assert answers[9:] == [{}, {1: Refusal.FULL}, {1: Refusal.FULL}]
    assert core.statistics().session_links == 10


def test_blocks_after_a_gap_are_evicted_first(core: Evictor) -> None:
    core.admitted([Record(50, 1)], T0)
    core.admitted(chain(1, range(1, 6)), T0)
    core.gone([2], Reason.DELETED, T0)
    plan = evict(core, 3)
    assert [(victim.generation, victim.reason) for victim in plan.victims] == [
        (5, Reason.STRANDED),
        (4, Reason.STRANDED),
        (3, Reason.STRANDED),
    ]
    assert evict(core, 1).victims[0].generation == 50
    assert order(core) == [1]


def test_a_filled_gap_strands_nothing() -> None:
    core = new()
    core.admitted([Record(50, 1)], T0)
    core.admitted(chain(1, range(1, 6)), T0)
    core.gone([2], Reason.SUPERSEDED, T0)
    core.admitted([Record(60, 1, session=1, position=1)], T0)
    assert order(core) == [50, 5, 4, 3, 60, 1]


def test_a_block_behind_a_gap_of_only_one_session_is_not_stranded() -> None:
    core = new()
    core.admitted([Record(50, 1)], T0)
    core.admitted(chain(1, range(1, 4)), T0)
    core.joined([3], 2, 2, T0)
    core.gone([2], Reason.DELETED, T0)
    assert order(core)[0] == 50


def test_a_stranded_block_with_a_guard_stays(core: Evictor) -> None:
    core.admitted(chain(1, range(1, 4)), T0)
    core.admitted([Record(50, 1)], T0)
    core.gone([1], Reason.DELETED, T0)
    core.hold([3], Guard.PIN)
    assert order(core) == [50]
    core.release([3], Guard.PIN, T0)
    assert order(core) == [3, 2]


@pytest.mark.parametrize(
    ("guard", "stuck"),
    [
        (Guard.PIN, Stuck.PINNED),
        (Guard.WRITE, Stuck.WRITING),
        (Guard.LEASE, Stuck.LEASED),
        (Guard.PROTECTED, Stuck.PROTECTED),
    ],
)
def test_a_guard_keeps_its_block_until_the_last_one_ends(core: Evictor, guard: Guard, stuck: Stuck) -> None:
    core.admitted([Record(1, 4), Record(2, 4)], T0)
    assert core.hold([1, 1, 7], guard) == {7: Refusal.UNKNOWN}
    assert order(core) == [2]
    assert core.release([1, 7], guard, T0) == {7: Refusal.UNKNOWN}
    plan = evict(core, 1)
    assert (len(plan.victims), plan.stuck, plan.more) == (0, stuck, False)
    assert core.statistics().guarded[guard] == 1
    assert core.release([1], guard, T0) == {}
    assert core.release([1], guard, T0) == {1: Refusal.NOT_HELD}
    assert order(core) == [1]
    assert evict(core, 1).stuck is Stuck.EMPTY


def test_a_guarded_tail_keeps_all_before_it(core: Evictor) -> None:
    core.admitted(chain(1, range(1, 5)), T0)
    core.hold([3], Guard.LEASE)
    assert order(core) == [4]
    assert evict(core, 1).stuck is Stuck.LEASED
    core.release([3], Guard.LEASE, T0)
    assert order(core) == [3, 2, 1]


def test_stuck_names_the_guard_that_ends_soonest(core: Evictor) -> None:
    core.admitted([Record(1, 1), Record(2, 1)], T0)
    core.hold([1, 2], Guard.PROTECTED)
    core.hold([2], Guard.PIN)
    assert evict(core, 1).stuck is Stuck.PROTECTED, "the pin's end would free nothing"
    core.admitted([Record(3, 1)], T0)
    core.hold([3], Guard.LEASE)
    assert evict(core, 1).stuck is Stuck.LEASED


def test_guards_of_a_block_are_bounded_and_kinds_do_not_mix() -> None:
    core = new()
    core.admitted([Record(1, 1)], T0)
    assert core.hold([1] * GUARDS_OF_A_KIND_MAX, Guard.PIN) == {}
    assert core.hold([1], Guard.PIN) == {1: Refusal.FULL}
    assert core.release([1], Guard.WRITE, T0) == {1: Refusal.NOT_HELD}
    assert core.hold([1], Guard.WRITE) == {}
    assert core.release([1] * GUARDS_OF_A_KIND_MAX, Guard.PIN, T0) == {}
    assert order(core) == []
    assert core.release([1], Guard.WRITE, T0) == {}
    assert order(core) == [1]


def test_a_protected_session_keeps_present_and_future_blocks(core: Evictor) -> None:
    assert core.protect_session(1, now_ms=T0) is None
    assert core.protect_session(1, now_ms=T0) is None
    core.admitted(chain(1, range(1, 3)), T0)
    core.admitted([Record(9, 1)], T0)
    core.joined([9], 1, 2, T0)
    assert core.is_guarded(1)
    assert core.is_guarded(9)
    assert not core.is_guarded(77)
    assert core.release([1], Guard.PROTECTED, T0) == {1: Refusal.NOT_HELD}, "that is the session's"
    assert order(core) == []
    assert core.unprotect_session(1, T0) is None
    assert core.unprotect_session(1, T0) is Refusal.NOT_HELD
    assert order(core) == [9, 2, 1]


def test_a_block_of_two_protected_sessions_is_released_with_the_second() -> None:
    core = new()
    core.admitted([Record(1, 1, session=1)], T0)
    core.joined([1], 2, 0, T0)
    core.protect_session(1, now_ms=T0)
    core.protect_session(2, now_ms=T0)
    core.unprotect_session(1, T0)
    assert core.is_guarded(1)
    core.unprotect_session(2, T0)
    assert not core.is_guarded(1)


def test_protected_sessions_are_bounded() -> None:
    core = new()
    for session in range(1, PROTECTED_SESSIONS_MAX + 1):
        assert core.protect_session(session, now_ms=T0) is None
    assert core.protect_session(PROTECTED_SESSIONS_MAX + 1, now_ms=T0) is Refusal.FULL


def test_a_block_expires_on_time_and_not_before() -> None:
    core = new()
    core.admitted([Record(1, 1, expires_ms=T0 + 1000), Record(2, 1)], T0)
    assert not core.plan(free_pages=9, now_ms=T0 + 999).victims
    (victim,) = core.plan(free_pages=9, now_ms=T0 + 1000).victims
    assert victim == Eviction(1, 1, 0, 0, Reason.EXPIRED, T0 + 1000, 1000)
    assert order(core) == [2]


def test_a_guarded_block_expires_when_its_guard_ends(core: Evictor) -> None:
    core.admitted([Record(1, 1, expires_ms=T0 + 1000)], T0)
    core.protect_session(5, now_ms=T0)
    core.joined([1], 5, 0, T0)
    core.hold([1], Guard.PIN)
    for _ in range(2):
        assert not core.plan(free_pages=9, now_ms=T0 + 5000).victims
    core.release([1], Guard.PIN, T0 + 5000)
    assert not core.plan(free_pages=9, now_ms=T0 + 5000).victims
    core.unprotect_session(5, T0 + 5000)
    assert [victim.reason for victim in core.plan(free_pages=9, now_ms=T0 + 5000).victims] == [Reason.EXPIRED]


def test_an_expired_head_strands_the_rest() -> None:
    core = new()
    core.admitted(chain(1, range(1, 2), expires_ms=T0 + 1000), T0)
    core.admitted(chain(1, range(2, 4), first_position=1), T0)
    core.admitted([Record(0, 1)], T0)
    plan = evict(core, 3, T0 + 1000)
    assert [(victim.generation, victim.reason) for victim in plan.victims] == [
        (1, Reason.EXPIRED),
        (3, Reason.STRANDED),
        (2, Reason.STRANDED),
    ]


def test_evicted_blocks_with_a_time_to_live_leave_no_timer() -> None:
    core = new()
    core.admitted([Record(1, 1, expires_ms=T0 + 1000)], T0)
    assert core.statistics().expiring == 1
    assert order(core) == [1]
    core.admitted([Record(2, 1)], T0)
    assert core.statistics().expiring == 0
    assert not core.plan(free_pages=9, now_ms=T0 + 5000).victims


def test_between_the_watermarks_eviction_continues_as_before() -> None:
    core = new(marks=Watermarks(10, 20))
    core.admitted([Record(generation, 1) for generation in range(1, 100)], T0)

    def taken(free: int, demand: int = 0) -> tuple[Mode, int]:
        plan = core.plan(free_pages=free, demand_pages=demand, now_ms=T0)
        return plan.mode, plan.pages

    assert taken(15) == (Mode.IDLE, 0)
    assert taken(10) == (Mode.IDLE, 0)
    assert taken(9) == (Mode.BACKGROUND, 11)
    assert taken(15) == (Mode.BACKGROUND, 5)
    assert taken(20) == (Mode.IDLE, 0)
    assert taken(15) == (Mode.IDLE, 0)
    assert taken(15, demand=6) == (Mode.BACKGROUND, 11)
    assert taken(30) == (Mode.IDLE, 0)


def test_a_waiting_put_gets_room_even_if_enough_is_free_in_fragments() -> None:
    core = new(marks=Watermarks(10, 20))
    core.admitted([Record(generation, 3) for generation in range(1, 9)], T0)
    plan = core.plan(free_pages=50, waiting_pages=7, now_ms=T0)
    assert (plan.mode, plan.pages, plan.more) == (Mode.URGENT, 9, False)


def test_a_plan_is_bounded_and_reports_that_there_is_more() -> None:
    core = new(marks=Watermarks(50_000, 50_000))
    core.admitted([Record(generation, 1) for generation in range(1, 3 * EVICTION_URGENT_BLOCKS)], T0)
    plan = core.plan(free_pages=0, now_ms=T0)
    assert (len(plan.victims), plan.more, plan.stuck) == (EVICTION_BATCH_BLOCKS, True, None)
    plan = core.plan(free_pages=0, waiting_pages=1, now_ms=T0)
    assert (len(plan.victims), plan.more, plan.stuck) == (EVICTION_URGENT_BLOCKS, True, None)


def test_many_blocks_that_expire_together_are_removed_in_bounded_plans() -> None:
    core = new()
    core.admitted([Record(generation, 1, expires_ms=T0 + 10) for generation in range(1, 1000)], T0)
    sizes = []
    while len(core):
        plan = core.plan(free_pages=50, now_ms=T0 + 10**9)
        sizes.append(len(plan.victims))
        assert plan.more == (len(core) > 0)
        assert core.statistics().timers_lag == (len(core) > 0)
    assert max(sizes) == EVICTION_BATCH_BLOCKS


def test_skipping_many_blocks_that_must_stay_takes_several_plans_and_is_done_once(core: Evictor) -> None:
    guarded = range(1, 2 * EVICTION_STEPS_MAX + 100)
    core.admitted([Record(generation, 1) for generation in guarded], T0)
    core.admitted([Record(100_000, 1), Record(100_001, 1)], T0)
    core.hold(list(guarded), Guard.PROTECTED)
    plans = [evict(core, 1) for _ in range(3)]
    assert [len(plan.victims) for plan in plans] == [0, 0, 1]
    assert [(plan.more, plan.stuck) for plan in plans] == [(True, None), (True, None), (False, None)]
    assert len(evict(core, 1).victims) == 1, "at once: what may not go is out of the way"


def test_a_long_session_is_not_walked_for_each_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    core = new()
    core.admitted(chain(1, range(1, 3001)), T0)
    evict(core, 1)
    monkeypatch.setattr("kvstore.storage.eviction.evictor.EVICTION_STEPS_MAX", 2)
    for generation in range(2999, 2900, -1):
        assert [victim.generation for victim in evict(core, 1).victims] == [generation]


def test_removed_blocks_are_described_and_counted() -> None:
    core = new()
    core.admitted([Record(generation, 2) for generation in range(1, 10)], T0)
    core.admitted(chain(7, range(20, 23)), T0)
    core.touched(range(1, 10), T0 + 2000)
    assert list(core.gone([5, 77, 5], Reason.QUARANTINED, T0 + 5000)) == [
        Eviction(5, 2, 0, 0, Reason.QUARANTINED, T0 + 5000, 3000)
    ]
    assert list(core.gone([22, 6], Reason.DELETED, T0 + 6000)) == [
        Eviction(22, 1, 7, 2, Reason.DELETED, T0 + 6000, 6000),
        Eviction(6, 2, 0, 0, Reason.DELETED, T0 + 6000, 4000),
    ]
    gone = core.statistics().gone
    assert gone[Reason.QUARANTINED] == Tally(1, 2)
    assert gone[Reason.DELETED] == Tally(2, 3)


def restore(core: Evictor, records: Sequence[Record]) -> None:
    """Open a store with these blocks, whose generations ascend."""
    core.restore(
        array("Q", [record.generation for record in records]),
        array("I", [record.pages for record in records]),
        array("Q", [record.expires_ms for record in records]),
    )
    for session in sorted({record.session for record in records if record.session}):
        members = [record for record in records if record.session == session]
        members.sort(key=lambda record: record.position)
        core.joined([record.generation for record in members], session, members[0].position, T0)


def test_after_a_restart_the_oldest_generations_are_evicted_first_each_session_from_its_tail(
    core: Evictor,
) -> None:
    restore(
        core,
        [
            Record(1, 1),
            *chain(1, range(2, 5)),
            *chain(2, range(5, 7)),
            Record(7, 1, session=1, position=3),
            Record(8, 1, expires_ms=T0 + 1000),
            Record(9, 1),
        ],
    )
    assert core.statistics().pages == 9
    core.touched([1], T0)
    core.admitted([Record(10, 1)], T0)
    (expired,) = core.plan(free_pages=99, now_ms=T0 + 1000).victims
    assert expired.generation == 8
    assert order(core) == [6, 5, 7, 4, 3, 2, 9, 1, 10]


@pytest.mark.parametrize("first_position", [0, 3])
def test_a_restart_equals_admitting_again(first_position: int) -> None:
    sessions = [0, 0, 1, 2, 3]
    records = [
        Record(1 + at, 1 + at % 7, at, T0 + at if at % 3 else 0, sessions[at % 5], first_position + at // 5)
        for at in range(5_000)
    ]
    restored, admitted = new(), new()
    restore(restored, records)
    admitted.admitted(records, T0)
    assert restored.statistics() == admitted.statistics()
    assert order(restored) == order(admitted)


def test_sessions_that_share_blocks_or_name_one_twice_are_accepted() -> None:
    opened, told = new(), new()
    for core in (opened, told):
        core.admitted([Record(generation, 1) for generation in range(1, 10)], T0)
    assert opened.joined([1, 2, 3], 1, 0, T0) == {}
    for position, generation in enumerate([1, 2, 3]):
        assert told.joined([generation], 1, position, T0) == {}
    for core in (opened, told):
        assert core.joined([1, 2, 6], 2, 0, T0) == {}
        assert core.joined([7, 8, 7], 3, 0, T0) == {7: Refusal.MOVED}
        assert core.joined([9, 77], 4, 0, T0) == {77: Refusal.UNKNOWN}
        assert core.joined([], 5, 0, T0) == {}
    assert opened.statistics() == told.statistics()
    assert order(opened) == order(told)


def test_a_generation_is_used_once_and_its_row_again() -> None:
    core = new()
    core.admitted([Record(1, 1)], T0)
    assert core.admitted([Record(1, 9), Record(2, 1)], T0) == {1: Refusal.EXISTS}
    assert core.statistics().pages == 2
    core.gone([1, 1, 77], Reason.DELETED, T0)
    core.admitted([Record(3, 1)], T0)
    core.admitted([Record(4, 1)], T0)
    core.statistics()
    assert core._said.rows == 3, "of 2, 3 and 4: the one that 1 had was free once"
    assert order(core) == [2, 3, 4]


def test_a_clock_that_goes_back_ages_no_block() -> None:
    core = new()
    core.admitted([Record(1, 1)], T0 + 5000)
    (why,) = core.gone([1], Reason.DELETED, T0 - 5000)
    assert why.idle_ms == 0


def test_blocks_that_leave_a_session_are_as_old_as_its_tail_was(core: Evictor) -> None:
    core.admitted([Record(50, 1)], T0)
    core.admitted(chain(1, range(1, 6)), T0)
    core.admitted([Record(60, 1)], T0)
    core.left(1, 2, T0)
    assert core.statistics().sessions == 1
    first, *rest = order(core)
    assert first == 50
    assert rest.index(60) == 5, "what the session had is older"
    assert rest.index(1) > rest.index(2)


def test_a_truncated_session_keeps_blocks_that_others_have() -> None:
    core = new()
    core.admitted(chain(1, range(1, 5)), T0)
    assert core.joined([1, 2, 3, 4], 2, 0, T0) == {}
    core.left(1, 1, T0)
    assert order(core) == [4, 3, 2, 1]
    core.left(9, 0, T0)
    assert core.statistics().sessions == 0


def test_a_protected_span_covers_a_prefix_of_its_session_and_the_latest_call_counts(core: Evictor) -> None:
    core.admitted(chain(1, range(1, 6)), T0)
    assert core.protect_session(1, 3, now_ms=T0) is None
    assert order(core) == [5, 4]
    core.admitted(chain(1, range(14, 16), first_position=3), T0)
    assert order(core) == [15, 14]
    assert core.protect_session(1, 2, now_ms=T0) is None
    assert order(core) == [3]
    assert core.protect_session(1, 3, now_ms=T0) is None
    core.admitted(chain(1, range(23, 24), first_position=2), T0)
    assert order(core) == []
    core.left(1, 1, T0)
    assert len(order(core)) == 2, "what left it is not protected by it"
    assert core.unprotect_session(1, T0) is None
    assert order(core) == [1]


def test_a_session_lacks_the_block_that_would_continue_it() -> None:
    core = new()
    core.admitted(chain(1, range(1, 5)), T0)
    core.gone([2], Reason.DELETED, T0)
    assert [core.lacks(1, position) for position in range(6)] == [False, True, False, False, True, False]
    assert [core.lacks(2, position) for position in range(2)] == [True, False]
