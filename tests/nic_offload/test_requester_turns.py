"""Turns of the requester: even shares of bytes, whatever the sizes and however many users a tenant has."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from nic_offload.requester_catalogue import User
from nic_offload.requester_terms import Limits
from nic_offload.requester_turns import Line, Lines, Turns
from tests.nic_offload.requesting import RequesterRig

QUANTUM = 10
SIZES = st.lists(st.integers(1, QUANTUM), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(SIZES, min_size=2, max_size=5), st.integers(1, 200))
def test_members_that_always_wait_are_never_far_apart(sizes: list[list[int]], served: int) -> None:
    turns: Turns[int] = Turns(QUANTUM)
    had: Counter[int] = Counter()
    pieces: Counter[int] = Counter()
    for member in range(len(sizes)):
        turns.add(member)

    def cost(member: int) -> int:
        return sizes[member][pieces[member] % len(sizes[member])]

    for _ in range(served):
        member = turns.head(cost)
        assert turns.head(cost) == member  # asking again changes nothing
        length = cost(member)
        turns.charge(member, length)
        had[member] += length
        pieces[member] += 1
        totals = [had[other] for other in range(len(sizes))]
        assert max(totals) - min(totals) <= 2 * QUANTUM


def test_a_pausing_tenant_keeps_its_share_and_a_leaving_one_does_not() -> None:
    for leave in (Turns.pause, Turns.discard):
        turns: Turns[str] = Turns(QUANTUM)
        had = Counter[str]()
        turns.add("a")
        turns.add("b")
        for _ in range(60):
            member = turns.head(lambda _: 6)
            turns.charge(member, 6)
            had[member] += 6
            if member == "a":  # can never have two pieces in a row
                leave(turns, "a")
                turns.charge(turns.head(lambda _: 4), 4)
                had["b"] += 4
                turns.add("a")
        assert (abs(had["a"] - had["b"]) <= 2 * QUANTUM) == (leave is Turns.pause), had


def test_urgent_users_come_first_within_their_tenant_and_not_before_other_tenants() -> None:
    lines = Lines(QUANTUM)
    lines.stand(User("a", "calm"), Line.AHEAD)
    lines.stand(User("a", "hurried"), Line.URGENT)
    lines.stand(User("b", "calm"), Line.AHEAD)
    order = []
    for _ in range(4):
        user = lines.head(lambda _: 10)
        lines.charge(user, 10)
        order.append(user)
    assert Counter(order) == {User("a", "hurried"): 2, User("b", "calm"): 2}
    lines.stand(User("a", "hurried"), None)
    assert {lines.head(lambda _: 10)} <= {User("a", "calm"), User("b", "calm")}
    for user in (User("a", "calm"), User("b", "calm")):
        lines.stand(user, None)
    assert not lines


def test_a_tenant_with_many_users_gets_no_more_than_one_with_a_single_user() -> None:
    limits = replace(
        Limits(),
        extent_bytes_max=100,
        bytes_in_flight_max=100,
        user_bytes_in_flight_max=100,
        gets_per_ticket_max=1,
    )
    rig = RequesterRig(limits)
    users = [User("crowd", str(number)) for number in range(50)] + [User("lonely", "x")]
    for number, user in enumerate(users):
        pieces = 40 if user.tenant == "crowd" else 2000
        rig.know(user, *range(pieces), length=10 + number % 90)
        rig.requester.request(user, 0, 1 << 40)
    bytes_of: Counter[str] = Counter()
    bytes_of_user: Counter[User] = Counter()
    for _ in range(600):
        rig.requester.pump(0)
        for user, extents in rig.fetcher.tickets.values():
            bytes_of[user.tenant] += sum(one.length for one in extents)
            bytes_of_user[user] += sum(one.length for one in extents)
        rig.finish_all()
    assert abs(bytes_of["crowd"] - bytes_of["lonely"]) <= 200
    crowd = [bytes_of_user[user] for user in users[:-1]]
    assert max(crowd) - min(crowd) <= 200
