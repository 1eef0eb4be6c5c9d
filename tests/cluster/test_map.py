"""The map: homes are a function of the members alone, spread by weight, and move no more than they must."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.cluster.map import DRAINING, Map, Member
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


LOTS_SEEN = range(0, 8192, 7)


def zoned(zones: str) -> list[Member]:
    """A member for each letter, in the zone of that name; of a space, in none."""
    return [replace(one, zone=zone.strip()) for one, zone in zip(members(len(zones)), zones, strict=True)]


@pytest.mark.parametrize("zones", ["ab", "aab", "abc", "aaab", "aabbcc", "abbbbbbb", "aaa   ", "a b"])
def test_two_copies_are_in_two_zones(zones: str) -> None:
    now, plain = Map.of(1, zoned(zones)), Map.of(1, members(len(zones)))
    for lot in LOTS_SEEN:
        first, second, *rest = now.owners_of(lot)
        before = plain.owners_of(lot)
        assert now.members[first].zone != now.members[second].zone
        assert first == before[0], "the first owner is the same as without zones"
        assert second == next(at for at in before if now.members[at].zone != now.members[first].zone)
        assert rest == [at for at in before if at not in (first, second)]


@pytest.mark.parametrize("zones", ["aaa", "   "])
def test_one_zone_is_none(zones: str) -> None:
    now, plain = Map.of(1, zoned(zones)), Map.of(1, members(len(zones)))
    assert all(now.owners_of(lot) == plain.owners_of(lot) for lot in LOTS_SEEN)


@pytest.mark.parametrize("zones", ["aab", "aabbcc", "abcabcab"])
def test_who_joins_a_zone_takes_copies_and_moves_none_between_others(zones: str) -> None:
    all_of_them = zoned(zones)
    before, after = Map.of(1, all_of_them[:-1]), Map.of(2, all_of_them)
    new = all_of_them[-1].name
    taken = 0
    for lot in LOTS_SEEN:
        had, has = ({now.members[at].name for at in now.owners_of(lot)[:2]} for now in (before, after))
        if new in has:
            taken += 1
        elif had != has:
            assert len({one.zone for one in before.members}) < len({one.zone for one in after.members}), (
                "copies of one zone go apart only when a second zone has come"
            )
    assert taken / len(LOTS_SEEN) > 0


def test_those_that_drain_are_no_zone_for_copies() -> None:
    some = zoned("aab")
    some[-1] = replace(some[-1], state=DRAINING)
    now = Map.of(1, some)
    assert all(now.members[now.owners_of(lot)[-1]].state == DRAINING for lot in LOTS_SEEN)


def test_shares_go_by_weight() -> None:
    small, large = Member("a", "h:1", 10), Member("b", "h:2", 30)
    assert Map.of(1, [small, large]).shares() == pytest.approx([0.25, 0.75], abs=0.02)


def test_a_record_comes_back_as_it_was_and_what_is_none_is_refused() -> None:
    member = Member("7f0a", "[::1]:7070", 12, "0.1.0")
    assert Member.decoded(member.encoded()) == member
    zoned = Member("7f0a", "[::1]:7070", 12, "0.1.0", zone="rack 1")
    assert Member.decoded(zoned.encoded()) == zoned
    earlier = member.encoded().replace(b',"state":"","zone":""', b"")
    assert b"zone" not in earlier
    assert Member.decoded(earlier) == member, "an earlier version says less"
    later = member.encoded()[:-1] + b',"color":"a"}'
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
