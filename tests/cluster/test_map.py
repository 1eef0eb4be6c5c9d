"""The map: homes are a function of the members alone, spread by weight, and move no more than they must."""

from __future__ import annotations

import random

import pytest

from kvstore.cluster.map import Map, Member
from kvstore.errors import ConfigError

USERS = [f"user {number}" for number in range(20_000)]


def members(count: int, weight: int = 8) -> list[Member]:
    return [Member(f"{number:012x}", f"10.0.0.{number}:7070", weight) for number in range(1, count + 1)]


def homes(now: Map) -> list[Member | None]:
    return [now.home("acme", user) for user in USERS]


def test_homes_are_the_same_in_whatever_order_and_from_whomever_the_members_came() -> None:
    some = members(7)
    shuffled = random.Random(1).sample(some, len(some))
    assert homes(Map.of(3, some)) == homes(Map.of(9, shuffled))
    moved = [Member(one.name, f"10.1.0.{at}:9", one.weight) for at, one in enumerate(some, 1)]
    names = [None if one is None else one.name for one in homes(Map.of(3, some))]
    assert names == [None if one is None else one.name for one in homes(Map.of(4, moved))], (
        "an address is no name"
    )


@pytest.mark.parametrize("count", [3, 10, 60])
def test_no_member_has_much_more_than_its_share(count: int) -> None:
    shares = Map.of(1, members(count)).shares()
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= 1.25 / count


@pytest.mark.parametrize("count", [3, 10, 60])
def test_who_joins_takes_its_share_and_moves_nobody_else(count: int) -> None:
    before, after = Map.of(1, members(count)), Map.of(2, members(count + 1))
    (new,) = set(after.members) - set(before.members)
    moved = [(one, other) for one, other in zip(homes(before), homes(after), strict=True) if one != other]
    assert {other for _, other in moved} == {new}
    assert 0.8 / (count + 1) <= len(moved) / len(USERS) <= 1.25 / (count + 1)
    assert homes(Map.of(3, members(count))) == homes(before), "and who leaves gives back what it had"


def test_shares_go_by_weight() -> None:
    small, large = Member("a", "h:1", 10), Member("b", "h:2", 30)
    assert Map.of(1, [small, large]).shares() == pytest.approx([0.25, 0.75], abs=0.02)


def test_a_record_comes_back_as_it_was_and_what_is_none_is_refused() -> None:
    member = Member("7f0a", "[::1]:7070", 12, "0.1.0")
    assert Member.decoded(member.encoded()) == member
    later = member.encoded()[:-1] + b',"zone":"a"}'
    assert Member.decoded(later) == member, "a later version says more"
    for data in (
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"name":1}',
        member.encoded().replace(b"12", b"0"),
        member.encoded().replace(b"12", b"true"),
        member.encoded().replace(b":7070", b""),
    ):
        with pytest.raises(ConfigError):
            Member.decoded(data)


def test_of_two_members_at_one_address_one_is_on_the_map() -> None:
    assert Map.of(1, [Member("b", "h:1"), Member("a", "h:1")]).members == (Member("a", "h:1"),)


def test_nobody_is_at_home_where_there_is_nobody() -> None:
    assert Map(0).home("acme", "user") is None
    assert Map(0).shares() == []
