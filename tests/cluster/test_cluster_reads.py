"""Which owner of a block is read first: by the map, or the nearest; in simulated time, against the order of the map."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.cluster_reads import Reads, by_owner
from kvstore.clock import SystemClock
from kvstore.cluster.map import DRAINING, Map, Member
from kvstore.commands.cluster_command import _read_first
from kvstore.errors import NodeUnavailable
from kvstore.limits import CLUSTER_FIRST_TRY_MS, CLUSTER_LOTS, FETCH_CANCEL_MS
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.placement import LOTS
from kvstore.reach import Reach

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KEYS = [block_key(b"near", bytes([number])) for number in range(40)]
ZONES = ("", "rack 1", "rack 2", "rack 3")
WORLDS, TIMEOUT_S = 200, 6.0
AWAY, LACKS = MissReason.NODE_AWAY, MissReason.UNKNOWN


class Clock(SystemClock):
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


@dataclass
class Node:
    """A node that answers at once, or after a time, or not at all."""

    is_dead: bool = False
    hangs: bool = False
    takes_s: float = 0.0
    given_up_s: float = 0.0  # if it hangs: how long giving up a get takes
    answers: dict[bytes, bytes | MissReason] = field(default_factory=dict)


class Cluster:
    """Nodes and their map, and a client's reads by its zone."""

    def __init__(self, now: Map) -> None:
        self.map, self.clock = now, Clock()
        self.nodes = {one.node: Node() for one in now.members}
        self.asked: dict[int, list[str]] = defaultdict(list)  # for each key, in order
        self.put_back: set[tuple[str, bytes]] = set()
        self.suspects: set[str] = set()

    def owners(self, key: bytes) -> list[str]:
        return [self.map.members[at].node for at in self.map.owners(b"acme", key)]

    def get(self, zone: str, replicas: int = 2, timeout_s: float = TIMEOUT_S) -> list[bytes | Miss]:
        """Get all keys, within the timeout."""
        self.asked.clear()
        self.put_back.clear()
        self.suspects.clear()
        reach = SimpleNamespace(zone=zone)
        nodes: Any = SimpleNamespace(
            map=self.map, reach=reach, placed_as=lambda _: "acme", _await_map=lambda timeout_s: timeout_s
        )
        silent: Any = SimpleNamespace(suspect=self.suspects.add)
        repairs: Any = SimpleNamespace(
            has_room=True, add=lambda node, _, key, *__: self.put_back.add((node, key))
        )
        reads = Reads(nodes, lambda: replicas, self._each, silent, repairs, self.clock)
        until_s = self.clock.now_s + timeout_s
        outcomes = reads.found(KEYS, self._ask, timeout_s, lambda _, found: found)
        assert self.clock.now_s <= until_s + 1e-6
        return outcomes

    def _each(self, parts: Mapping[str, list[int]], call: Callable[[Any, list[int]], Any]) -> dict[str, Any]:
        """Call the nodes in parallel: the duration is that of the longest call."""
        began_s, ends_s, answers = self.clock.now_s, [0.0], dict[str, Any]()
        for name, some in parts.items():
            self.clock.now_s = began_s
            for at in some:
                self.asked[at].append(name)
            if name in self.suspects and self.nodes[name].hangs:
                answers[name] = NodeUnavailable(f"{name} does not answer.")  # to a probe
            elif name not in self.nodes or self.nodes[name].is_dead:
                answers[name] = NodeUnavailable(f"{name} has left the cluster.")
            else:
                answers[name] = call(self.nodes[name], some)
            ends_s.append(self.clock.now_s)
        self.clock.now_s = max(began_s, *ends_s)
        return answers

    def _ask(self, node: Any, some: Sequence[int], left_s: float) -> list[bytes | Miss]:
        self.clock.now_s += left_s + node.given_up_s if node.hangs else min(node.takes_s, left_s)
        if node.hangs or node.takes_s > left_s:
            return [Miss(AWAY) for _ in some]
        found = [node.answers.get(KEYS[at], LACKS) for at in some]
        return [Miss(one) if isinstance(one, MissReason) else one for one in found]


def members(zones: Sequence[str], draining: frozenset[int] = frozenset()) -> list[Member]:
    return [
        Member(f"node {at}", f"10.0.0.{at + 1}:1", zone=zone, state=DRAINING if at in draining else "")
        for at, zone in enumerate(zones)
    ]


def of_zones(*zones: str) -> Cluster:
    """Each block is on its first two owners."""
    cluster = Cluster(Map.of(1, members(zones)))
    for key in KEYS:
        for node in cluster.owners(key)[:2]:
            cluster.nodes[node].answers[key] = key
    return cluster


def at_random(dice: random.Random) -> Cluster:
    """Nodes in any zones that die, hang and drain, with any set of copies; a block's bytes are the same on all."""
    count = dice.randint(1, 6)
    zones = [dice.choice(ZONES[: dice.randint(1, 4)]) for _ in range(count)]
    draining = frozenset(at for at in range(count) if dice.random() < 0.15)
    cluster = Cluster(Map.of(1, members(zones, draining), lots=dice.choice((LOTS, CLUSTER_LOTS))))
    for node in cluster.nodes.values():
        node.is_dead, node.hangs = dice.random() < 0.15, dice.random() < 0.15
        misses = (LACKS, MissReason.CORRUPT, MissReason.EVICTED, MissReason.BUSY, MissReason.EXPIRED)
        for key in KEYS:
            node.answers[key] = key if dice.random() < 0.4 else dice.choice(misses)
    if dice.random() < 0.1:
        cluster.nodes.popitem()  # it has left since the client got its map
    return cluster


def test_a_zone_changes_only_which_copy_is_read() -> None:
    """The same hits and misses as by the map, from the same nodes, in the same time."""
    dice, turned = random.Random(1), 0
    for _ in range(WORLDS):
        cluster = at_random(dice)
        replicas, zone = dice.randint(1, 2), dice.choice(ZONES[1:])
        by_map = cluster.get("", replicas)
        order = {at: list(some) for at, some in cluster.asked.items()}
        by_zone = cluster.get(zone, replicas)
        assert by_zone == by_map
        for at, key in enumerate(KEYS):
            asked, owners = list(dict.fromkeys(cluster.asked[at])), cluster.owners(key)
            staying = len(owners) - len(cluster.map.draining)
            by_rank = owners[: min(replicas + 1, staying)] + owners[staying:]
            assert asked in (by_rank[: len(asked)], [*by_rank[1::-1], *by_rank[2:]][: len(asked)])
            if isinstance(by_zone[at], Miss):
                assert set(asked) == set(order[at]), "a block is missed only if each of them lacks it"
            turned += asked[0] != order[at][0]
        for node, key in cluster.put_back:
            assert node in cluster.owners(key)[:replicas]
            assert isinstance(by_zone[KEYS.index(key)], bytes)
            assert cluster.nodes[node].answers[key] in {LACKS, MissReason.CORRUPT}
    assert turned > WORLDS


def test_the_copy_in_the_clients_zone_is_read_or_else_the_first_owners() -> None:
    cluster = of_zones("rack 1", "rack 2", "rack 1", "rack 2", "rack 3")
    near = {one.node for one in cluster.map.members if one.zone == "rack 2"}
    assert cluster.get("rack 2") == KEYS
    seconds = 0
    for at, key in enumerate(KEYS):
        first, second = cluster.owners(key)[:2]
        is_turned = second in near and first not in near
        assert cluster.asked[at] == [second if is_turned else first]
        seconds += is_turned
    assert 0 < seconds < len(KEYS)
    for zone, replicas in (("", 2), ("rack 9", 2), ("rack 2", 1)):
        assert cluster.get(zone, replicas) == KEYS
        assert all(cluster.asked[at] == cluster.owners(key)[:1] for at, key in enumerate(KEYS))


def test_without_a_zone_nodes_without_one_are_not_near() -> None:
    cluster = of_zones("", "rack 1", "")
    assert cluster.get("") == KEYS
    assert all(cluster.asked[at] == cluster.owners(key)[:1] for at, key in enumerate(KEYS))


def test_in_a_cluster_of_one_zone_the_first_owner_is_read_first() -> None:
    cluster = of_zones("rack 1", "rack 1", "rack 1")
    assert cluster.get("rack 1") == KEYS
    assert all(cluster.asked[at] == cluster.owners(key)[:1] for at, key in enumerate(KEYS))


def test_the_status_lists_no_draining_node_as_read_first() -> None:
    some = members(["rack 1", "rack 2", "rack 1"], draining=frozenset({1, 2}))
    now = Map.of(1, some)
    here = Reach(("10.0.0.1:1",), zone="rack 1")
    assert _read_first(here, now) == [some[0].node]
    assert _read_first(replace(here, zone="rack 2"), now) == []
    assert _read_first(replace(here, zone=""), Map.of(1, members(["", ""]))) == []


def test_the_third_owner_is_not_read_before_the_first_two() -> None:
    """It has a copy only if the map has just changed, whatever its zone."""
    cluster = of_zones("rack 1", "rack 2", "rack 3")
    for zone in ZONES[1:]:
        cluster.get(zone)
        for at, key in enumerate(KEYS):
            assert set(cluster.asked[at]) <= set(cluster.owners(key)[:2])


def test_a_draining_node_is_read_last_even_if_it_is_the_nearest() -> None:
    cluster = of_zones("rack 1", "rack 2")
    away = cluster.map.members[0]
    cluster.map = Map.of(2, [replace(away, state=DRAINING), cluster.map.members[1]])
    assert cluster.get("rack 1") == KEYS
    assert all(away.node not in some for some in cluster.asked.values())
    for key in KEYS:
        del cluster.nodes[cluster.map.members[1].node].answers[key]
    assert cluster.get("rack 1") == KEYS
    assert all(some[-1] == away.node for some in cluster.asked.values())


def test_a_hanging_nearest_node_leaves_time_for_the_other() -> None:
    cluster = of_zones("rack 1", "rack 2")
    near = cluster.map.members[1].node
    cluster.nodes[near].hangs = True
    began_s = cluster.clock.now_s
    assert cluster.get("rack 2") == KEYS
    assert cluster.clock.now_s - began_s <= CLUSTER_FIRST_TRY_MS / 1000 + 1e-6
    assert cluster.suspects == {near}
    assert cluster.get("rack 2", timeout_s=0.2) == KEYS
    assert not cluster.put_back, "it may have its copies"


@pytest.mark.parametrize("timeout_s", [1.0, 1.5, 2.0, TIMEOUT_S])
def test_giving_up_a_get_of_a_hung_node_leaves_time_for_the_other(timeout_s: float) -> None:
    cluster = of_zones("", "")
    for at, node in enumerate(cluster.nodes.values()):
        node.hangs, node.given_up_s, node.takes_s = at == 0, FETCH_CANCEL_MS / 1000, 0.01
    assert cluster.get("", timeout_s=timeout_s) == KEYS


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_slow_owner_is_asked_again_with_the_rest_of_the_time(replicas: int) -> None:
    """It needs longer than a first try, and answers probes."""
    cluster = of_zones("", "", "")
    for node in cluster.nodes.values():
        node.takes_s = 1.4
    assert cluster.get("", replicas) == KEYS
    late = cluster.get("", replicas, timeout_s=1.5)
    assert {one.reason for one in late if isinstance(one, Miss)} == {AWAY}


def test_an_owner_that_lacks_a_block_is_asked_once() -> None:
    cluster = of_zones("", "", "")
    slow = cluster.map.members[0].node
    cluster.nodes[slow].takes_s = 1.4
    for node in cluster.nodes.values():
        node.answers.clear()
    assert {one.reason for one in cluster.get("") if isinstance(one, Miss)} == {LACKS}
    for asked in cluster.asked.values():
        assert sorted(asked) == sorted([*cluster.nodes, slow])


def test_a_missing_nearest_copy_is_read_from_the_first_owner_and_put_back() -> None:
    """It was deleted on that node only, or has not been copied yet."""
    cluster = of_zones("rack 1", "rack 2")
    first, near = (one.node for one in cluster.map.members)
    theirs = [key for key in KEYS if cluster.owners(key)[0] == first]
    for key in theirs:
        del cluster.nodes[near].answers[key]
    assert cluster.get("rack 2") == KEYS
    assert cluster.put_back == {(near, key) for key in theirs}


def test_a_miss_is_the_first_owners_even_if_it_is_read_later() -> None:
    cluster = of_zones("rack 1", "rack 2")
    first, near = (one.node for one in cluster.map.members)
    for key in KEYS:
        cluster.nodes[first].answers[key] = MissReason.EVICTED
        cluster.nodes[near].answers[key] = LACKS
    said = {cluster.owners(key)[0]: one for key, one in zip(KEYS, cluster.get("rack 2"), strict=True)}
    assert said == {first: Miss(MissReason.EVICTED), near: Miss(LACKS)}


@pytest.mark.parametrize("lots", [LOTS, CLUSTER_LOTS])
def test_the_parts_of_both_ranks_contain_each_block_once(lots: int) -> None:
    now = Map.of(1, members(["rack 1", "rack 2", "rack 1"]), lots=lots)
    near = now.in_zone["rack 2"]
    parts = [by_owner(now, b"acme", KEYS, range(len(KEYS)), rank, near) for rank in range(2)]
    for at, key in enumerate(KEYS):
        nodes = [node for part in parts for node, some in part.items() if at in some]
        assert sorted(nodes) == sorted(now.members[place].node for place in now.owners(b"acme", key)[:2])
    assert sum(len(some) for some in parts[0].values()) == len(KEYS)
    assert parts[0][now.members[1].node] == [*range(len(KEYS))], (
        "each block has a copy in the zone of one node"
    )
