"""The requester, one rule at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nic_offload.errors import KvError
from nic_offload.match_action import Action, ActionKind, Table, perform
from nic_offload.requester_catalogue import Change, User
from nic_offload.requester_hits import At
from nic_offload.requester_terms import Answer, Ended, Ending, Limits, Outcome, Placement
from tests.nic_offload.matching import request, rule
from tests.nic_offload.requesting import ALICE, BOB, EVE, SMALL, RequesterRig, extent

FAR = 1 << 40


def test_a_hit_fetches_all_kv_of_its_user_in_order_by_node() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1, 2)
    rig.know(ALICE, 3, node="n2")
    rig.know(ALICE, 4)
    rig.know(BOB, 9)
    table = Table()
    entry = table.add(rule(Action(ActionKind.PREFETCH), tenant="acme", user="alice"))
    at = At(rig.requester, 5, FAR)
    hit = table.match(request(), 1)
    assert hit is entry
    assert perform(entry, request(), at)
    assert at.answers == [Answer(Outcome.QUEUED, 1)]
    assert not rig.fetcher.tickets  # begin returns without asking anybody
    assert rig.requester.pump(5) == []
    assert sorted(rig.fetcher.tickets.values(), key=str) == [
        (ALICE, (extent(1), extent(2), extent(4))),
        (ALICE, (extent(3, node="n2"),)),
    ]
    (first, second) = rig.fetcher.tickets
    table.add_bytes(entry, rig.requester.finished(first).moved_bytes)
    assert rig.requester.pump(6) == []
    table.add_bytes(entry, rig.requester.finished(second).moved_bytes)
    assert table.counters(entry).moved_bytes == 40
    assert rig.requester.pump(6) == [Ended(1, ALICE, Ending.COMPLETE)]
    assert rig.requester.pump(6) == []


def test_handles_stand_for_users_of_their_own_tenant_only() -> None:
    rig = RequesterRig()
    odd = User("acme", "a/b c")
    for user in (ALICE, odd, EVE):
        rig.know(user, 1)
    fetch = Action(ActionKind.FETCH)
    at = At(rig.requester, 0, FAR)
    for handle in ("other/eve", "acme", "acme/alice/x", "acme/", "/alice", "acme/nobody"):
        at.begin(fetch, handle, request())
    assert [answer.outcome for answer in at.answers] == [Outcome.MISS]
    counts = rig.requester.statistics()
    assert (counts.refused_foreign, counts.missed) == (2, 4)
    at.begin(fetch, "acme/a%2Fb%20c", request())
    rig.requester.pump(0)
    assert rig.fetcher.asked() == [(odd, 1)]


def test_fetch_goes_before_prefetch() -> None:
    rig = RequesterRig(replace(SMALL, gets_in_flight_max=1))
    rig.know(ALICE, 1)
    rig.know(BOB, 2)
    at = At(rig.requester, 0, FAR)
    at.begin(Action(ActionKind.PREFETCH), "acme/alice", request())
    at.begin(Action(ActionKind.FETCH), "acme/bob", request())
    rig.requester.pump(0)
    assert rig.fetcher.asked() == [(BOB, 2)]


def test_store_and_route_are_recorded_and_forgotten_with_the_user() -> None:
    rig = RequesterRig(SMALL)
    actions = [Action(ActionKind.STORE), Action(ActionKind.ROUTE, "n7")]
    at = At(rig.requester, 0, FAR)
    assert rig.requester.placement(ALICE) == Placement(keep=False, node="")
    for action in actions:
        at.begin(action, "acme/alice", request())
    assert rig.requester.placement(ALICE) == Placement(keep=True, node="n7")
    for number in range(SMALL.users_max):
        at.begin(actions[0], f"acme/u{number}", request())
    assert rig.requester.statistics().placements_without_room == 1
    rig.requester.forget(ALICE)
    assert rig.requester.placement(ALICE) == Placement()


def test_a_second_request_joins_and_makes_the_fetch_urgent() -> None:
    rig = RequesterRig(replace(SMALL, gets_in_flight_max=1))
    rig.know(ALICE, 1, 2)
    rig.know(BOB, 3, 4)
    rig.requester.request(ALICE, 0, FAR)
    rig.requester.request(BOB, 0, FAR)
    assert rig.requester.request(BOB, 0, FAR, urgent=True) == (Outcome.MERGED, 3)
    order = []
    ended = []
    for _ in range(5):
        ended += rig.requester.pump(0)
        order += rig.fetcher.asked()
        rig.finish_all()
    assert order == [(BOB, 3), (BOB, 4), (ALICE, 1), (ALICE, 2)]
    assert ended == [Ended(n, user, Ending.COMPLETE) for n, user in ((2, BOB), (3, BOB), (1, ALICE))]


def test_a_fetch_is_no_longer_urgent_once_the_urgent_request_has_ended() -> None:
    rig = RequesterRig(replace(SMALL, gets_in_flight_max=1))
    rig.know(ALICE, 1)
    rig.know(BOB, 2)
    rig.requester.request(ALICE, 0, FAR)
    rig.requester.request(BOB, 0, FAR)
    rig.requester.request(BOB, 0, 5, urgent=True)
    rig.requester.pump(5)
    assert rig.fetcher.asked() == [(ALICE, 1)]


def test_the_next_fetch_uses_a_miss_that_a_cancelled_get_reports() -> None:
    rig = RequesterRig(replace(SMALL, gets_per_ticket_max=1))
    rig.know(ALICE, 1, 2)
    rig.requester.request(ALICE, 0, FAR)
    rig.requester.pump(0)
    rig.requester.cancel(1)
    rig.requester.finished(2)
    rig.requester.request(ALICE, 0, FAR)
    rig.requester.pump(0)
    rig.requester.finished(3, failed=[extent(1).key])
    rig.requester.finished(1, missing=[extent(1).key])  # the old get: so it did not fail, it is not there
    assert rig.requester.extents(ALICE) == (extent(2),)
    rig.requester.pump(0)
    rig.requester.finished(4)
    assert rig.requester.pump(0) == [Ended(2, ALICE, Ending.COMPLETE)]


def test_blocks_replaced_or_dropped_while_waiting_are_never_requested() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1, 2, 3)
    rig.requester.request(ALICE, 0, FAR)
    newer = extent(2, 5, node="n9", address=77)
    assert rig.requester.moved(ALICE, newer) is Change.REPLACED
    assert rig.requester.moved(ALICE, extent(2, 4, node="n8")) is Change.STALE
    assert rig.requester.dropped(ALICE, extent(3).key, 1) is Change.REMOVED
    rig.know(ALICE, 6)
    rig.requester.pump(0)
    assert {one for _, extents in rig.fetcher.tickets.values() for one in extents} == {
        extent(1),
        newer,
        extent(6),
    }
    assert rig.requester.statistics().reports_stale == 1


def test_a_late_drop_of_an_older_generation_removes_nothing() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1, generation=4)
    assert rig.requester.dropped(ALICE, extent(1).key, 3) is Change.STALE
    assert rig.requester.dropped(ALICE, extent(2).key, 3) is Change.UNKNOWN
    assert rig.requester.moved(BOB, extent(1)) is Change.UNKNOWN
    assert rig.requester.extents(ALICE) == (extent(1, 4),)
    assert rig.requester.dropped(ALICE, extent(1).key, 4) is Change.REMOVED
    assert rig.requester.statistics().users == 0


def test_blocks_that_the_node_lacks_are_requested_from_their_current_owner() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1, 2)
    rig.requester.request(ALICE, 0, FAR)
    rig.requester.pump(0)
    rig.requester.moved(ALICE, extent(2, 2, node="n2"))
    rig.requester.finished(1, missing=[extent(1).key, extent(2).key])
    assert rig.requester.extents(ALICE) == (extent(2, 2, node="n2"),)  # the other is gone, the node says so
    assert rig.requester.pump(0) == []
    assert rig.fetcher.tickets[2] == (ALICE, (extent(2, 2, node="n2"),))
    rig.requester.finished(2)
    assert rig.requester.pump(0) == [Ended(1, ALICE, Ending.PARTIAL)]
    with pytest.raises(KvError, match="no ticket 2"):
        rig.requester.finished(2)


def test_only_the_next_request_retries_a_failed_key() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1, 2)
    rig.requester.request(ALICE, 0, FAR)
    rig.requester.pump(0)
    rig.requester.finished(1, failed=[extent(2).key])
    assert rig.requester.pump(0) == [Ended(1, ALICE, Ending.PARTIAL)]
    assert len(rig.requester.extents(ALICE)) == 2
    rig.fetcher.refuses = 1
    rig.requester.request(ALICE, 0, FAR)
    assert rig.requester.pump(0) == [Ended(2, ALICE, Ending.PARTIAL)]
    counts = rig.requester.statistics()
    assert (counts.bytes_in_flight, counts.gets_in_flight, counts.gets_failed) == (0, 0, 3)


def test_a_joining_request_retries_failed_keys() -> None:
    rig = RequesterRig(replace(SMALL, gets_per_ticket_max=1))
    rig.know(ALICE, 1, 2)
    rig.requester.request(ALICE, 0, FAR)
    rig.requester.pump(0)
    rig.requester.finished(1, failed=[extent(1).key])
    rig.requester.request(ALICE, 0, FAR)
    rig.requester.pump(0)
    assert rig.fetcher.tickets[3] == (ALICE, (extent(1),))
    rig.requester.finished(2)
    rig.requester.finished(3)
    assert {ended.ending for ended in rig.requester.pump(0)} == {Ending.COMPLETE}


def test_a_cancelled_waiting_request_causes_no_get() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1)
    number = rig.requester.request(ALICE, 0, FAR).number
    assert number is not None
    assert rig.requester.cancel(number)
    assert not rig.requester.cancel(number)
    assert rig.requester.pump(0) == [Ended(number, ALICE, Ending.CANCELLED)]
    assert not rig.fetcher.tickets


def test_cancelling_one_of_two_keeps_the_fetch_and_the_last_cancels_it() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1, 2)
    rig.know(ALICE, 3, node="n2")
    first, second = (rig.requester.request(ALICE, 0, FAR).number for _ in range(2))
    assert first is not None
    assert second is not None
    rig.requester.cancel(first)
    rig.requester.pump(0)
    assert len(rig.fetcher.tickets) == 2
    rig.requester.finished(1)
    rig.requester.cancel(second)
    assert rig.fetcher.cancelled == [2]
    assert rig.requester.statistics().bytes_in_flight == 10  # until the fetcher says that it is over
    assert rig.requester.request(ALICE, 0, FAR).outcome is Outcome.QUEUED
    assert rig.requester.finished(2) == (ALICE, 10)
    rig.requester.pump(0)
    assert len(rig.fetcher.asked()) == 3 + 3


def test_cancelling_a_user_ends_only_their_requests() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1)
    rig.know(BOB, 2)
    for user in (ALICE, BOB, ALICE):
        rig.requester.request(user, 0, FAR)
    assert rig.requester.cancel_user(ALICE) == 2
    assert rig.requester.cancel_user(ALICE) == 0
    rig.requester.pump(0)
    assert rig.fetcher.asked() == [(BOB, 2)]


def test_a_deadline_ends_its_own_request_and_the_last_one_the_fetch() -> None:
    rig = RequesterRig()
    rig.know(ALICE, 1)
    assert rig.requester.request(ALICE, 10, 10).outcome is Outcome.LATE
    rig.requester.request(ALICE, 10, 30)
    rig.requester.request(ALICE, 10, 20)
    assert rig.requester.pump(19) == []
    assert rig.requester.pump(20) == [Ended(2, ALICE, Ending.EXPIRED)]
    assert rig.fetcher.cancelled == []
    assert rig.requester.pump(30) == [Ended(1, ALICE, Ending.EXPIRED)]
    assert rig.fetcher.cancelled == [1]


def test_requests_that_end_unfetched_before_their_deadline_leave_nothing_behind() -> None:
    rig = RequesterRig(SMALL)
    rig.know(ALICE, 1)
    for _ in range(100):
        number = rig.requester.request(ALICE, 0, FAR).number
        assert number is not None
        rig.requester.cancel(number)
        rig.requester.pump(0)
        assert len(rig.requester._deadlines) <= 2 * SMALL.requests_max + 1
    assert not rig.requester._waiting
    assert not rig.requester._lines


def test_a_block_or_request_beyond_a_bound_is_skipped_and_counted() -> None:
    rig = RequesterRig(SMALL)
    changes = [rig.requester.stored(ALICE, extent(key)) for key in range(9)]
    assert changes == [Change.ADDED] * 8 + [Change.NO_ROOM]
    assert rig.requester.stored(ALICE, extent(0, 2)) is Change.REPLACED  # what is known may still change
    for user in ("b", "c"):
        rig.know(User("t", user), *range(8))
    assert rig.requester.statistics().extents == SMALL.extents_max
    assert rig.requester.stored(User("t", "d"), extent(1)) is Change.NO_ROOM
    rig.requester.forget(User("t", "b"))
    for user in ("d", "e"):
        rig.know(User("t", user), 1)
    assert rig.requester.stored(User("t", "f"), extent(1)) is Change.NO_ROOM  # the fifth user
    assert rig.requester.statistics().reports_without_room == 1 + 4 + 1 + 1
    answers = [rig.requester.request(ALICE, 0, FAR).outcome for _ in range(7)]
    assert answers == [Outcome.QUEUED] + [Outcome.MERGED] * 5 + [Outcome.FULL]
    rig.requester.cancel_user(ALICE)
    assert rig.requester.request(ALICE, 0, FAR).outcome is Outcome.FULL  # their ends have not been taken yet
    rig.requester.pump(0)
    assert rig.requester.request(ALICE, 0, FAR).outcome is Outcome.QUEUED


def test_bytes_and_gets_in_flight_are_bounded_also_while_they_are_cancelled() -> None:
    rig = RequesterRig(SMALL)
    for user in (ALICE, BOB, EVE):
        rig.know(user, *range(5))
        rig.requester.request(user, 0, FAR)
    rig.requester.pump(0)
    counts = rig.requester.statistics()
    assert (counts.bytes_in_flight, counts.gets_in_flight) == (40, 4)
    assert max(rig.fetcher.asked().count((user, key)) for user in (ALICE, BOB, EVE) for key in range(5)) == 1
    rig.requester.cancel_user(ALICE)
    rig.requester.pump(0)
    assert rig.requester.statistics().bytes_in_flight == 40


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (extent(1, length=0), "not 0"),
        (extent(1, length=11), "not 11"),
        (extent(1, node=""), "node"),
        (extent(1, node="n" * 257), "node"),
        (extent(1)._replace(key=b""), "key"),
        (extent(1)._replace(key=bytes(65)), "key"),
    ],
)
def test_an_impossible_extent_is_refused(bad: object, word: str) -> None:
    rig = RequesterRig(SMALL)
    for report in (rig.requester.stored, rig.requester.moved):
        with pytest.raises(KvError, match=word):
            report(ALICE, bad)  # type: ignore[arg-type]
    with pytest.raises(KvError, match="tenant"):
        rig.requester.stored(User("", "x"), extent(1))
    assert rig.requester.statistics().extents == 0


def test_bounds_that_would_block_a_fetch_forever_are_refused() -> None:
    with pytest.raises(KvError, match="users_max"):
        Limits(users_max=0)
    with pytest.raises(KvError, match="must not exceed"):
        Limits(extent_bytes_max=10, user_bytes_in_flight_max=9)
    with pytest.raises(KvError, match="must not exceed"):
        replace(SMALL, bytes_in_flight_max=24)
