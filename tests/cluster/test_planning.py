"""The predicted moves of a change of members, compared with the placement of each lot."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kvstore.cluster.map import Map, Member
from kvstore.cluster.planning import Plan, with_change
from kvstore.limits import UPKEEP_BYTES_PER_S
from tests.cluster.test_cluster import Cluster, cluster, clusters, command
from tests.stopping import stop

__all__ = ["cluster", "clusters"]
GIB = 1 << 30
FOUR = Map.of(1, (Member(f"name {number}", f"10.0.0.{number}:1", 100) for number in range(1, 5)))
STORED = {one.node: 100 * GIB for one in FOUR.members}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_draining_node_hands_over_everything_and_the_others_share_it(replicas: int) -> None:
    node = "10.0.0.2:1"
    planned = Plan.of(FOUR, with_change(FOUR, node), STORED, replicas)
    assert planned.sends[node] == sum(planned.sends.values()) == pytest.approx(100 * GIB, rel=0.1)
    assert planned.receives[node] == 0
    assert all(20 * GIB < some < 50 * GIB for at, some in planned.receives.items() if at != node)
    assert planned.seconds == -(-planned.sends[node] // UPKEEP_BYTES_PER_S)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_joining_node_receives_its_share_from_all_and_nothing_else_moves(replicas: int) -> None:
    planned = Plan.of(FOUR, with_change(FOUR, "10.0.0.9:1"), STORED, replicas)
    assert (
        planned.receives["10.0.0.9:1"] == sum(planned.receives.values()) == pytest.approx(80 * GIB, rel=0.1)
    )
    assert all(10 * GIB < planned.sends[node] < 32 * GIB for node in STORED)


def test_without_blocks_nothing_moves() -> None:
    one = Map.of(1, [Member("a", "a:1")])
    assert Plan.of(one, with_change(one, "b:1"), {"a:1": 0}, 2).seconds == 0
    assert sum(Plan.of(one, with_change(one, "b:1"), {"a:1": GIB}, 2).receives.values()) == GIB


def test_a_node_that_joins_in_its_own_zone_gets_a_copy_of_everything() -> None:
    planned = Plan.of(FOUR, with_change(FOUR, "10.0.0.9:1", "b"), STORED, 2)
    assert planned.receives["10.0.0.9:1"] == pytest.approx(200 * GIB, rel=0.01)


def test_blocks_of_a_draining_member_are_not_counted_twice() -> None:
    node, joins = "10.0.0.2:1", "10.0.0.9:1"
    drains = with_change(FOUR, node)
    without = Map.of(1, (one for one in FOUR.members if one.node != node))
    left = {one: size for one, size in STORED.items() if one != node}
    planned = Plan.of(drains, with_change(drains, joins), STORED | {node: 300 * GIB}, 2)
    assert planned.receives[joins] == pytest.approx(
        Plan.of(without, with_change(without, joins), left, 2).receives[joins], rel=0.01
    )


def test_a_member_whose_bytes_are_unknown_counts_like_the_others() -> None:
    known = dict(list(STORED.items())[1:])
    all_known, some = (Plan.of(FOUR, with_change(FOUR, "10.0.0.9:1"), one, 2) for one in (STORED, known))
    assert some == all_known


def test_a_member_that_does_not_answer_is_named_and_the_plan_is_made(cluster: Cluster) -> None:
    silent = cluster.nodes[2]
    stop(silent.pid)
    try:
        shown = command(
            cluster.nodes[0], "plan", "127.0.0.1:1", "--zone", "rack 2", "--call-timeout-ms", "1000"
        )
    finally:
        os.kill(silent.pid, signal.SIGCONT)
    assert shown.returncode == 0
    assert f"counted as average nodes: {silent.target}." in shown.stdout
    refused = command(cluster.nodes[0], "plan", cluster.nodes[1].target, "--zone", "rack 2")
    assert refused.returncode == 2
    assert "is a member, with a zone of its own" in refused.stderr


def test_the_command_plans_a_drain_and_a_join(cluster: Cluster) -> None:
    member = cluster.nodes[1].target
    shown = command(cluster.nodes[0], "plan", member)
    assert shown.returncode == 0
    assert f"If {member} is drained:" in shown.stdout
    assert "nothing is copied" in shown.stdout
    told = json.loads(command(cluster.nodes[0], "plan", "127.0.0.1:1", "--json").stdout)
    assert told["joins"]
    assert 0.15 < told["nodes"]["127.0.0.1:1"]["users_after"] < 0.35
