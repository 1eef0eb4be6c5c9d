"""The map: homes are a function of the members alone, spread by weight, and move no more than they must."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from kvstore.cluster.map import DRAINING, Map, Member, _placement
from kvstore.cluster.owners import Owners
from kvstore.errors import ConfigError
from kvstore.limits import CLUSTER_LOTS, OWNERS_MAX
from kvstore.placement import LOTS

USERS = [f"user {number}" for number in range(10_000)]
EVERY_LOTS = pytest.mark.parametrize(
    "lots", [LOTS, CLUSTER_LOTS]
)  # of earlier versions' clusters, and of new ones


def members(count: int, weight: int = 8) -> list[Member]:
    return [Member(f"{number:012x}", f"10.0.0.{number}:7070", weight) for number in range(1, count + 1)]


def homes(now: Map) -> list[Member | None]:
    return [now.home("acme", user) for user in USERS]


@EVERY_LOTS
def test_homes_do_not_depend_on_the_order_or_source_of_the_members(lots: int) -> None:
    some = members(7)
    shuffled = random.Random(1).sample(some, len(some))
    assert homes(Map.of(3, some, lots=lots)) == homes(Map.of(9, shuffled, lots=lots))
    moved = [Member(one.name, f"10.1.0.{at}:9", one.weight) for at, one in enumerate(some, 1)]
    names = [None if one is None else one.name for one in homes(Map.of(3, some, lots=lots))]
    assert names == [None if one is None else one.name for one in homes(Map.of(4, moved, lots=lots))], (
        "an address is no name"
    )


@EVERY_LOTS
@pytest.mark.parametrize("count", [3, 10, 60])
def test_no_member_has_much_more_than_its_share(count: int, lots: int) -> None:
    now = Map.of(1, members(count), lots=lots)
    assert now.shares() == pytest.approx([1 / count] * count)
    orders = list(now.orders())
    assert len(orders) == lots
    for copies in (1, 2):
        has = Counter(owner for order in orders for owner in order[:copies])
        assert max(has.values()) <= (1 + 4 * (count / lots / copies) ** 0.5) * lots * copies / count


def test_of_a_thousand_nodes_none_exceeds_the_mean_by_a_fifth_and_the_next_one_moves_only_its_share() -> None:
    """A sixteenth of the lots is drawn, and spread as independent draws are; all of them are spread more evenly."""
    nodes = [(one.name.encode(), one.weight) for one in members(1001)]
    lots = CLUSTER_LOTS // 16
    before, after = (Owners(nodes[:count], (), lots).orders()[:, 0] for count in (1000, 1001))
    assert np.bincount(before).max() * 1000 / lots <= 1 + 4 * (1000 / lots) ** 0.5
    assert 1 + 4 * (1000 / CLUSTER_LOTS) ** 0.5 < 1.2
    assert set(after[before != after]) == {1000}
    assert 0.5 < (before != after).mean() * 1001 < 1.5


@EVERY_LOTS
def test_owners_are_the_same_in_all_versions(lots: int) -> None:
    """Nodes and clients of all versions compute the same ones."""
    some = [replace(one, weight=at % 3 + 1, zone="ab"[at % 2]) for at, one in enumerate(members(9))]
    now = Map.of(1, some, lots=lots)
    told = blake2b(repr([now.owners_of(lot) for lot in range(0, lots, lots // 4096)]).encode(), digest_size=8)
    assert told.hexdigest() == {LOTS: "567882f875ac3e83", CLUSTER_LOTS: "c027355e7087fc21"}[lots]
    assert all(
        now.owners(b"acme", b"%d" % at) == now.owners_of(now.lot_of(b"acme", b"%d" % at)) for at in range(99)
    )


@EVERY_LOTS
def test_all_lots_at_once_have_the_owners_of_each(lots: int) -> None:
    some = [replace(one, state=DRAINING if at == 2 else "") for at, one in enumerate(members(5))]
    now = Map.of(1, some, lots=lots)
    assert [order for at, order in enumerate(now.orders()) if at % 97 == 0] == [
        now.owners_of(lot) for lot in range(0, lots, 97)
    ]


@EVERY_LOTS
@pytest.mark.parametrize("at_once", [7, 1 << 19])
def test_many_keys_have_the_owners_of_each(lots: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"%d" % at for at in range(300)]
    alone = [Map.of(1, members(5), lots=lots).owners(b"acme", key) for key in keys]
    monkeypatch.setattr("kvstore.cluster.owners.OWNER_DRAWS_AT_ONCE", at_once)
    _placement.cache_clear()
    together = Map.of(1, members(5), lots=lots)
    assert [together.owners(b"acme", key) for key in keys[:9]] == alone[:9]
    assert list(together.owners_of_each(b"acme", keys)) == alone


def test_the_owners_of_many_keys_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = Owners([(one.name.encode(), one.weight) for one in members(3)], (), CLUSTER_LOTS)
    drawn: list[int] = []
    draw = Owners._drawn

    def counted(self: Owners, lots: Any) -> Any:
        drawn.append(len(lots))
        return draw(self, lots)

    monkeypatch.setattr(Owners, "_drawn", counted)
    owners.order_of(7)
    owners.draw([7, 8, 9, 8, 100])
    assert drawn == [1, 3]
    assert owners.order_of(100) == Owners(
        [(one.name.encode(), one.weight) for one in members(3)], (), CLUSTER_LOTS
    ).order_of(100)


@pytest.mark.parametrize("lots", [0, 1, 4096, 8191, 12_288, 1 << 25])
def test_other_numbers_of_lots_are_refused(lots: int) -> None:
    with pytest.raises(ConfigError, match="lots"):
        Map.of(1, members(3), lots=lots)


@EVERY_LOTS
@pytest.mark.parametrize("count", [3, 10, 60])
def test_a_joining_node_takes_its_share_and_moves_no_other_user(count: int, lots: int) -> None:
    before, after = Map.of(1, members(count), lots=lots), Map.of(2, members(count + 1), lots=lots)
    (new,) = set(after.members) - set(before.members)
    moved = [(one, other) for one, other in zip(homes(before), homes(after), strict=True) if one != other]
    assert {other for _, other in moved} == {new}
    assert 0.8 / (count + 1) <= len(moved) / len(USERS) <= 1.25 / (count + 1)
    assert homes(Map.of(3, members(count), lots=lots)) == homes(before), (
        "and who leaves gives back what it had"
    )


LOTS_SEEN = range(0, LOTS, 7)


def zoned(zones: str) -> list[Member]:
    """A member for each letter in the zone of that name, and for each space one without a zone."""
    return [replace(one, zone=zone.strip()) for one, zone in zip(members(len(zones)), zones, strict=True)]


@EVERY_LOTS
@pytest.mark.parametrize("zones", ["ab", "aab", "abc", "aaab", "aabbcc", "abbbbbbb", "aaa   ", "a b"])
def test_two_copies_are_in_two_zones(zones: str, lots: int) -> None:
    now, plain = Map.of(1, zoned(zones), lots=lots), Map.of(1, members(len(zones)), lots=lots)
    for lot in LOTS_SEEN:
        first, second, *rest = now.owners_of(lot)
        before = plain.owners_of(lot)
        assert now.members[first].zone != now.members[second].zone
        assert first == before[0], "the first owner is the same as without zones"
        others = [at for at in before[1:] if now.members[at].zone != now.members[first].zone]
        assert second in others[:1] or not others, "it is the first of another zone"
        assert len(rest) == min(len(zones), OWNERS_MAX) - 2
        assert rest == [at for at in before if at not in (first, second)][: len(rest)]


@EVERY_LOTS
@pytest.mark.parametrize("zones", ["aaa", "   "])
def test_a_single_zone_counts_as_none(zones: str, lots: int) -> None:
    now, plain = Map.of(1, zoned(zones), lots=lots), Map.of(1, members(len(zones)), lots=lots)
    assert all(now.owners_of(lot) == plain.owners_of(lot) for lot in LOTS_SEEN)


@EVERY_LOTS
@pytest.mark.parametrize("zones", ["aab", "aabbcc", "abcabcab"])
def test_a_node_that_joins_a_zone_takes_copies_and_moves_none_between_others(zones: str, lots: int) -> None:
    all_of_them = zoned(zones)
    before, after = Map.of(1, all_of_them[:-1], lots=lots), Map.of(2, all_of_them, lots=lots)
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


def test_draining_members_are_no_zone_for_copies() -> None:
    some = zoned("aab")
    some[-1] = replace(some[-1], state=DRAINING)
    now = Map.of(1, some)
    assert all(now.members[now.owners_of(lot)[-1]].state == DRAINING for lot in LOTS_SEEN)


def test_shares_follow_weights() -> None:
    small, large = Member("a", "h:1", 10), Member("b", "h:2", 30)
    assert Map.of(1, [small, large]).shares() == pytest.approx([0.25, 0.75], abs=0.02)


def test_a_record_is_parsed_as_written_and_invalid_ones_are_refused() -> None:
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


@EVERY_LOTS
def test_without_members_no_user_has_a_home_and_no_block_an_owner(lots: int) -> None:
    empty = Map.of(0, [], lots=lots)
    assert empty.home("acme", "user") is None
    assert empty.shares() == []
    assert empty.owners(b"acme", b"key") == ()
    assert list(empty.owners_of_each(b"acme", [b"key", b"other"])) == [(), ()]
