"""What is lost with a node or a drive, by hand where it can be, and at scale."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sim.cli import main
from sim.models import model
from sim.replay.cluster_hardware import Cluster
from sim.replay.kv_homes import home_of_user
from sim.replay.loss import Losses, lose
from sim.units import OutOfRange

if TYPE_CHECKING:
    from sim.replay.loss import LossReport

ENTRY = model("llama-3-8b")
TEN = replace(Cluster(), nodes=10)
BYTES = 8000 * ENTRY.token_bytes


def _lose(**losses: float) -> LossReport:
    terms = {"requests": 20_000, "users": 400, "busy": 0.1, "noticed_s": 0.0, "seed": 3} | losses
    return lose(ENTRY, TEN, Losses(**terms))  # type: ignore[arg-type]


def _users_of(node: int) -> int:
    return sum(home_of_user(user, 10) == node for user in range(400))


def test_each_user_of_a_lost_node_computes_and_puts_once_more() -> None:
    told = _lose(nodes=1)
    lost = _users_of(0)
    assert told.lost_share == lost / 400
    assert told.put_again_bytes == lost * BYTES, "everybody asks within the run, and only once in vain"
    before, afterwards = told.phases
    assert before.hit_rate == 1
    assert round((1 - afterwards.hit_rate) * afterwards.gets) == lost


def test_until_a_lost_node_is_noticed_each_get_from_it_costs_a_deadline() -> None:
    noticed_s = 0.2 * _lose(nodes=1).duration_s
    told = _lose(nodes=1, noticed_s=noticed_s, deadline_s=7.0)
    _, unnoticed, afterwards = told.phases
    assert unnoticed.hit_rate == pytest.approx(1 - _users_of(0) / 400, abs=0.03)
    assert unnoticed.get_p999_s == 7.0
    assert told.put_again_bytes == _users_of(0) * BYTES, "who was told nothing puts nothing"
    assert told.healed_s is not None
    assert told.healed_s > noticed_s
    assert afterwards.get_p999_s < 1


def test_a_drive_loses_all_kv_of_its_node_and_the_node_continues() -> None:
    told = _lose(nodes=0, drives=1)
    assert told.put_again_bytes == _users_of(0) * BYTES
    whole = _lose(nodes=0)
    assert whole.phases[-1].hit_rate == 1
    assert whole.put_again_bytes == 0


def test_a_slow_node_affects_its_own_users() -> None:
    quick, slow = _lose(nodes=0), _lose(nodes=0, slow_nodes=1, slow_factor=8.0)
    assert slow.phases[0].get_p50_s == pytest.approx(quick.phases[0].get_p50_s, rel=0.1)
    assert slow.phases[0].get_p99_s > 5 * quick.phases[0].get_p50_s


def test_a_single_get_takes_the_time_of_drives_and_links() -> None:
    told = _lose(nodes=0, busy=0.001, requests=1000)
    read_s = BYTES / (8 * TEN.drive_read_bytes_per_s) + TEN.drive_read_latency_s
    link_s = BYTES * 8 / (2 * TEN.link_bits_per_s) + TEN.link_latency_s
    assert told.phases[0].get_p50_s == pytest.approx(read_s + link_s)


def test_a_thousand_nodes_and_a_million_gets_take_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["loss", "--set", "nodes=1000", "--lose-nodes", "3", "--busy", "0.2", "--json"]
    assert main([*arguments, "--requests", "300000", "--users", "50000"]) == 0
    first = capsys.readouterr().out
    assert main([*arguments, "--requests", "300000", "--users", "50000"]) == 0
    assert capsys.readouterr().out == first, "the same terms give the same run"
    told = json.loads(first)
    assert told["lost_share"] == pytest.approx(0.003, abs=0.002)
    assert [phase["name"] for phase in told["phases"]] == ["before", "unnoticed", "afterwards"]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            {"nodes": 10},
            "--lose-nodes, --lose-drives and --slow-nodes is 10; it takes nodes, of the 10 nodes",
        ),
        ({"drives": 10}, "is 11; it takes nodes"),
        ({"busy": 1}, "--busy is 1; it takes a share of the time, from 0.001 to 0.95."),
    ],
)
def test_an_impossible_loss_is_refused(losses: dict[str, float], message: str) -> None:
    with pytest.raises(OutOfRange, match=message):
        _lose(**losses)


def test_the_only_drive_of_a_node_is_not_lost_alone() -> None:
    with pytest.raises(OutOfRange, match="drives_per_node is 1; it takes drives, 2 at least"):
        lose(ENTRY, replace(TEN, drives_per_node=1), Losses(requests=1000, nodes=0, drives=1))
