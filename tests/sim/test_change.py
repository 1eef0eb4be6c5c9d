"""Nodes of a cluster come and go in the simulator: against the product's own map and plan, and by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.cluster.map import Map, Member
from kvstore.cluster.planning import Plan
from kvstore.limits import CLUSTER_LOTS, UPKEEP_BYTES_PER_S
from sim.cli import main
from sim.replay.change import Change, Trial, _copies, _made_s, change
from sim.replay.cluster_hardware import Cluster
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Iterable

FIVE = replace(Cluster(), nodes=5)
STORED = 1e12
LOSES_EACH = {"trials": 6, "seed": 13}  # each of five nodes is lost in one of these trials


def _map(nodes: int, gone: int | None = None) -> Map:
    members = [
        Member(f"node-{number}:7070", f"node-{number}:7070") for number in range(nodes) if number != gone
    ]
    return Map.of(1, members, lots=CLUSTER_LOTS)


def _busiest(now: Map) -> float:
    """The share of all lots of the node with the most."""
    return max(Counter(order[0] for order in now.orders()).values()) / now.lots


def _all_of(**terms: float) -> tuple[Trial, ...]:
    terms = {"stored_bytes": STORED, "noticed_s": 0.0} | LOSES_EACH | terms
    return change(FIVE, Change(**terms)).trials  # type: ignore[arg-type]


def _rounded(shares: Iterable[float]) -> list[float]:
    return sorted({round(share, 9) for share in shares})


def test_a_joining_node_is_sent_the_blocks_of_the_products_plan() -> None:
    before, after = _map(5), _map(6)
    plan = Plan.of(before, after, dict.fromkeys((one.node for one in before.members), int(STORED)), 2)
    told = _all_of(lose=0, join=1)[0]
    assert told.moved_bytes == pytest.approx(sum(plan.receives.values()), rel=1e-6)
    assert told.safe_s == pytest.approx(plan.seconds, abs=1.5)
    assert (told.senders, told.receivers) == (5, 1)
    newest = next(at for at, one in enumerate(after.members) if one.name == "node-5:7070")
    asked = sum(order[0] == newest for order in after.orders())
    assert told.asked_twice_share == asked / after.lots


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_lost_node_takes_the_copies_that_the_products_map_places_there(replicas: int) -> None:
    before = _map(5)
    owned = Counter(node for order in before.orders() for node in order[:replicas])
    shares = {owned[node] / before.lots for node in range(5)}
    trials = _all_of(replicas=replicas)
    if replicas == 1:
        assert _rounded(one.lost_share for one in trials) == _rounded(shares)
        assert {(one.short_share, one.moved_bytes, one.safe_s) for one in trials} == {(0, 0, 0)}
    else:
        assert _rounded(one.short_share for one in trials) == _rounded(shares)
        assert {one.lost_share for one in trials} == {0}
        assert all(one.moved_bytes == pytest.approx(one.short_share * STORED * 5 / 2) for one in trials)
        assert {one.asked_twice_share for one in trials} == {0}, "the second owner is the first one now"


def test_load_on_survivors_is_as_in_the_products_map() -> None:
    trials = _all_of(busy=0.5)
    shares = [_busiest(_map(5, gone)) for gone in range(5)]
    assert _rounded(one.busiest_after for one in trials) == _rounded(0.5 * 5 * share for share in shares)
    assert _rounded(one.busiest_before for one in trials) == _rounded([0.5 * 5 * _busiest(_map(5))])


def test_the_fullest_node_is_the_one_to_which_the_products_map_gives_the_most() -> None:
    orders = np.array(list(_map(5).orders()))
    for replicas in (1, 2):
        before, mean = orders[:, :replicas], replicas * len(orders) / 5
        fullest = []
        for gone in range(5):
            last = np.argsort(orders == gone, axis=1, kind="stable")  # the others stay in their order
            after = np.take_along_axis(orders, last, axis=1)[:, :replicas]
            left = after[(before != gone).any(axis=1)]  # of the other lots there is no copy
            fullest.append(np.bincount(left.ravel()).max() / mean)
        trials = _all_of(replicas=replicas)
        assert _rounded(one.fullest_before for one in trials) == _rounded(
            [np.bincount(before.ravel()).max() / mean]
        )
        assert _rounded(one.fullest_after for one in trials) == _rounded(fullest)


def test_two_lost_nodes_take_only_blocks_without_another_copy() -> None:
    before = _map(5)
    pairs = Counter(frozenset(order[:2]) for order in before.orders())
    shares = {count / before.lots for count in pairs.values()}
    lost = {one.lost_share for one in _all_of(lose=2, trials=12)}
    assert len(lost) > 5
    assert all(min(abs(one - share) for share in shares) < 1e-12 for one in lost)


def test_each_copy_has_one_sender() -> None:
    before = np.array([[1, 2], [3, 1], [1, 3], [2, 3], [2, 3], [1, 2]])
    left = np.array([[False, True], [True, False], [False, False], [True, True], [True, True], [False, True]])
    after = np.array([[2, 4], [3, 4], [4, 5], [4, 2], [4, 5], [4, 5]])
    assert _copies(before, left, after).tolist() == [[2, 4], [3, 4], [2, 4], [2, 4], [4, 5], [2, 4], [4, 5]]


def test_a_copy_is_made_when_its_sender_and_its_receiver_are_done_with_earlier_ones() -> None:
    assert _made_s(np.array([(1, 2), (1, 3), (4, 3)]), 10.0, 5.0, 100.0).tolist() == [2, 4, 2]
    assert _made_s(np.array([(1, 2), (3, 2), (4, 2)]), 10.0, 5.0, 2.0).tolist() == [5, 10, 15]


def test_the_time_to_safety_is_the_busiest_senders() -> None:
    slow, quick = (_all_of(copy_bytes_per_s=rate, noticed_s=7.0, trials=1)[0] for rate in (1e8, 2e8))
    assert slow.safe_s - 7 == pytest.approx(2 * (quick.safe_s - 7))
    assert 7 < slow.half_s < slow.safe_s


def test_the_nodes_copy_at_the_products_rate() -> None:
    assert Change().copy_bytes_per_s == UPKEEP_BYTES_PER_S


def test_a_prefix_of_one_block_is_one_nodes_load() -> None:
    terms = Change(busy=0.2, popular_share=1.0, popular_blocks=1)
    told = change(FIVE, terms)
    assert told.one_node == pytest.approx(1.0)
    assert told.median("popular_before") == pytest.approx(told.one_node)
    assert told.worst("popular_after") == pytest.approx(told.one_node)
    spread = change(FIVE, replace(terms, popular_blocks=10**5))
    assert spread.worst("popular_before") == pytest.approx(spread.worst("busiest_before"), rel=0.05)


def test_a_thousand_nodes_take_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--set", "nodes=1000", "--trials", "2", "--lose-nodes", "2", "--json"]) == 0
    for trial in json.loads(capsys.readouterr().out)["trials"]:
        assert trial["short_share"] == pytest.approx(0.004, abs=0.003)
        assert trial["senders"] > 800, "most share the copying"
        assert trial["fullest_after"] < 1.2


def test_the_same_settings_give_the_same_trials() -> None:
    terms = Change(lose=2, trials=2)
    assert change(FIVE, terms) == change(FIVE, terms) != change(FIVE, replace(terms, seed=2))


def test_the_table_and_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--replicas", "1", "--trials", "2"]) == 0
    assert "blocks without a copy" in capsys.readouterr().out
    assert main(["cluster", "--trials", "2", "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"lose": 5}, "--lose-nodes is 5; it takes nodes, of the 5, with one left"),
        ({"lose": 6, "join": 3}, "--lose-nodes is 6; it takes nodes, of the 5"),
        ({"join": 4096}, "nodes, with --join-nodes, is 4,101"),
        ({"replicas": 3}, "--replicas is 3; it takes a number of copies, from 1 to 2"),
    ],
)
def test_a_change_of_a_fixed_setting_is_refused(terms: dict[str, int], message: str) -> None:
    with pytest.raises(OutOfRange, match=message):
        change(FIVE, Change(**terms))
