"""Turns and shares, without a node."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvstore.limits import SHARES, TURN_BYTES
from kvstore.node.fair_queue import FairQueue, Places, Shares

MIB = 1 << 20


@dataclass(frozen=True)
class Thing:
    tenant: str
    flow: int
    size_bytes: int
    number: int = 0


def everything(queue: FairQueue[Thing]) -> list[Thing]:
    taken = []
    while (thing := queue.take(lambda _: True)) is not None:
        taken.append(thing)
    return taken


things = st.lists(
    st.builds(Thing, st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 5 * MIB), st.integers()),
    max_size=60,
)


@given(things)
def test_every_item_is_delivered_once_and_in_order_for_each_connection(waiting: list[Thing]) -> None:
    queue: FairQueue[Thing] = FairQueue()
    queue.add(waiting)
    assert len(queue) == len(waiting)
    taken = everything(queue)
    assert len(queue) == 0
    for name in {(thing.tenant, thing.flow) for thing in waiting}:
        assert [t for t in taken if (t.tenant, t.flow) == name] == [
            t for t in waiting if (t.tenant, t.flow) == name
        ]


@given(
    st.lists(st.integers(1, 3 * MIB), min_size=40, max_size=60),
    st.lists(st.integers(1, 3 * MIB), min_size=40),
)
def test_two_waiting_tenants_get_equal_bytes_whatever_their_block_sizes(
    ours: list[int], theirs: list[int]
) -> None:
    queue: FairQueue[Thing] = FairQueue()
    queue.add(Thing("a", 0, size) for size in ours)
    queue.add(Thing("b", number % 3, size) for number, size in enumerate(theirs))
    left = Counter(a=len(ours), b=len(theirs))
    given_bytes = Counter[str]()
    for thing in everything(queue):
        given_bytes[thing.tenant] += thing.size_bytes
        left[thing.tenant] -= 1
        if not left[thing.tenant]:
            break
        assert abs(given_bytes["a"] - given_bytes["b"]) <= 3 * MIB + 2 * TURN_BYTES


def test_a_late_tenant_waits_for_one_turn_of_the_others() -> None:
    queue: FairQueue[Thing] = FairQueue()
    queue.add(Thing("greedy", flow, 32 << 10) for flow in range(10) for _ in range(1000))
    for _ in range(500):
        queue.take(lambda _: True)
    late = Thing("late", 0, 32 << 10)
    queue.add([late])
    before = 0
    while queue.take(lambda _: True) != late:
        before += 1
    assert before <= TURN_BYTES // (32 << 10)


def test_connections_of_one_tenant_take_turns() -> None:
    queue: FairQueue[Thing] = FairQueue()
    queue.add([Thing("a", flow, MIB, number) for flow in range(3) for number in range(3)])
    assert [(thing.flow, thing.number) for thing in everything(queue)] == [
        (flow, number) for number in range(3) for flow in range(3)
    ]


def test_a_tenant_at_its_limit_is_skipped_and_keeps_its_place() -> None:
    queue: FairQueue[Thing] = FairQueue()
    queue.add([Thing("a", 0, MIB, 1), Thing("b", 0, MIB, 2), Thing("a", 1, MIB, 3), Thing("b", 0, MIB, 4)])
    assert queue.take(lambda thing: thing.number in (3, 4)) == Thing("a", 1, MIB, 3), (
        "its other connection may"
    )
    assert queue.take(lambda thing: thing.number == 4) is None, "what is behind what may not, may not either"
    assert len(queue) == 3
    assert [thing.number for thing in everything(queue)] == [2, 1, 4], "a has just had a turn"


def test_an_item_put_back_is_next_again_and_costs_its_turn_once() -> None:
    queue: FairQueue[Thing] = FairQueue()
    queue.add([Thing("a", 0, MIB, 1), Thing("a", 0, MIB, 2), Thing("b", 0, MIB, 3), Thing("b", 0, MIB, 4)])
    for _ in range(50):
        thing = queue.take(lambda _: True)
        assert thing is not None
        assert thing.number == 1
        queue.put_back(thing)
    assert sorted(thing.number for thing in everything(queue)[:2]) == [1, 3]


def test_requests_of_a_closed_connection_are_removed() -> None:
    queue: FairQueue[Thing] = FairQueue()
    queue.add([Thing("a", 0, MIB, 1), Thing("a", 1, MIB, 2), Thing("b", 0, MIB, 3)])
    queue.drop("a", 0)
    queue.drop("a", 7)
    queue.drop("c", 0)
    assert len(queue) == 2
    assert {thing.number for thing in everything(queue)} == {2, 3}


def test_a_tenant_that_releases_nothing_holds_at_most_an_eighth_or_one_item() -> None:
    shares = Shares(8000)
    assert shares.may_hold(("t", "a"), 3000), "a single thing, whatever its size"
    shares.hold(("t", "a"), 3000)
    assert not shares.may_hold(("t", "a"), 1)
    for _ in range(10):
        assert shares.may_hold(("t", "b"), 100)
        shares.hold(("t", "b"), 100)
    assert not shares.may_hold(("t", "b"), 1)
    assert shares.may_hold(("t", "c"), 4000)
    assert not shares.may_hold(("t", "c"), 4001)
    shares.release(("t", "b"), 100)
    assert shares.may_hold(("t", "b"), 100)
    assert not shares.may_hold(("t", "b"), 101)


@given(st.integers(1, 20), st.integers(1, 500), st.integers(0, 2**32))
def test_guards_add_up(holders: int, most: int, seed: int) -> None:
    shares = Shares(2000)
    held = Counter[tuple[str, int]]()
    rng = random.Random(seed)
    for _ in range(500):
        who, size = ("t", rng.randrange(holders)), rng.randint(1, most)
        if rng.random() < 0.3 and held[who]:
            shares.release(who, held.pop(who))
        elif shares.may_hold(who, size):
            shares.hold(who, size)
            held[who] += size
        assert shares.total_bytes == held.total() <= 2000
    assert max(held.values(), default=0) <= max(2000 // SHARES, most)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 400)), max_size=20),
    st.integers(1, 900),
    st.integers(0, 40),
)
def test_puts_may_hold_an_eighth_or_as_much_as_they_leave_free(
    tenants: int, before: list[tuple[int, int, int]], size: int, most: int
) -> None:
    shares, held = Shares(4000, lambda: tenants), Counter[tuple[int, int]]()
    for tenant, flow, bytes_of_it in before:
        if shares.may_hold((tenant, flow), bytes_of_it):
            shares.hold((tenant, flow), bytes_of_it)
            held[tenant, flow] += bytes_of_it
    count = shares.may_hold_so_many((0, 0), size, most)
    assert 0 <= count <= most
    for _ in range(count):
        shares.hold((0, 0), size)
    if count > 1:
        now = held[0, 0] + count * size
        assert now <= max(4000 // SHARES, 4000 - shares.total_bytes)
        assert shares.total_bytes <= 4000
    if count < most:
        assert not shares.may_hold((0, 0), size), "an eighth in any case"


def test_puts_of_one_connection_may_hold_half_and_leave_the_next_a_quarter() -> None:
    shares = Shares(8000)
    assert shares.may_hold_so_many(("t", "a"), 100, 1000) == 40
    shares.hold(("t", "a"), 4000)
    assert shares.may_hold_so_many(("t", "a"), 100, 1000) == 0
    assert shares.may_hold_so_many(("t", "b"), 100, 1000) == 20


def test_a_request_larger_than_everything_may_be_held_alone() -> None:
    shares = Shares(100)
    assert shares.may_hold(("t", "a"), 500)
    shares.hold(("t", "a"), 500)
    assert not shares.may_hold(("t", "b"), 1)


def test_with_any_number_of_connections_a_tenant_leaves_another_its_share_of_a_common_memory() -> None:
    shares = Shares(8000, lambda: 2)
    for number in range(100):
        if shares.may_hold(("evil", number), 500):
            shares.hold(("evil", number), 500)
    assert shares.total_bytes == 4000
    for number in range(4):
        assert shares.may_hold(("good", number), 500)
        shares.hold(("good", number), 500)
    assert not shares.may_hold(("evil", 200), 500)
    for number in range(8):
        shares.release(("evil", number), 500)
    assert shares.may_hold(("good", 4), 500)


def test_a_single_item_larger_than_a_tenants_share_may_be_held_if_there_is_room() -> None:
    shares = Shares(100, lambda: 50)
    assert shares.may_hold(("a", 0), 60)
    shares.hold(("a", 0), 60)
    assert not shares.may_hold(("a", 1), 1)
    assert shares.may_hold(("b", 0), 40)
    assert not shares.may_hold(("b", 0), 41)


def test_a_tenant_new_in_the_file_no_longer_counts_its_share_for_others() -> None:
    tenants = 2
    places = Places(100, lambda: tenants)
    assert filled(places, "first") == 50
    tenants = 10
    assert places.left("first") == 0
    assert filled(places, "second") == 5 + (50 - 45) // 2
    assert filled(places, "third") >= 5
    places.give_back("first", 50)
    assert filled(places, "fourth") > 20


def filled(places: Places, who: str) -> int:
    """The number of places that a tenant gets if it takes as many as it can."""
    count = 0
    while places.left(who):
        places.take(who)
        count += 1
    return count


def test_each_tenant_keeps_a_share_of_long_held_places() -> None:
    """In whatever order they arrive; a single tenant has all."""
    assert filled(Places(100, lambda: 1), "alone") == 100
    for tenants in (2, 3, 10, 50):
        places = Places(100, lambda tenants=tenants: tenants)  # type: ignore[misc]
        got = [filled(places, f"tenant {number}") for number in range(tenants)]
        assert min(got) >= 100 // (2 * tenants)
        assert got[0] <= 100 // (2 * tenants) + 25 + 1
        assert sum(got) <= 100


def test_a_returned_place_can_be_taken_by_others() -> None:
    places = Places(8, lambda: 2)
    assert (filled(places, "first"), filled(places, "second")) == (4, 3)
    places.give_back("first", 4)
    assert places.left("second") == 1
    assert places.left("first") == 3
    places.give_back("second", 3)
    assert (places.total, places.left("third")) == (0, 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-20, 20)), max_size=60))
def test_a_tenants_own_share_is_available_beside_any_others(steps: list[tuple[int, int]]) -> None:
    places, held = Places(200, lambda: 5), [0] * 5
    for who, wanted in steps:
        change = min(wanted, places.left(who)) if wanted > 0 else max(wanted, -held[who])
        if change > 0:
            places.take(who, change)
        elif change < 0:
            places.give_back(who, -change)
        held[who] += change
        assert places.total == sum(held) <= 200
        assert all(places.left(one) + held[one] >= 20 for one in range(5))


def test_a_tenant_has_its_share_of_a_queue_and_returns_what_it_no_longer_uses() -> None:
    queue: FairQueue[Thing] = FairQueue(Places(64, lambda: 2))
    most = queue.left("a")
    assert 0 < most < 64
    queue.add(Thing("a", flow, MIB, number) for number in range(most // 2) for flow in (1, 2))
    assert queue.left("a") == 0
    assert queue.left("b") >= 16
    assert len(queue.withdraw("a", 1, lambda thing: thing.number < 3)) == 3
    queue.drop("a", 2)
    taken = queue.take(lambda _: True)
    assert taken is not None
    queue.put_back(taken)
    assert queue.left("a") == most - (most // 2 - 3)
    everything(queue)
    assert queue.left("a") == most
