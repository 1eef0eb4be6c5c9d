"""Fetch or compute again, and counts that can be added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.models import model
from sim.replay.cluster import Cluster
from sim.replay.plan import Demand, break_even, make_plan, trial
from sim.units import OutOfRange
from tests.sim.replay_rig import ONE, TINY

TOKEN_BYTES = 2000


@pytest.mark.parametrize(
    ("name", "gpus", "gbps"),
    [("llama-2-7b", 1, "19"), ("llama-2-70b", 8, "9.4"), ("deepseek-v3", 8, "3.8"), ("gpt-3", 8, "53")],
)
def test_the_break_even_of_known_models_on_h100s_at_half_their_speed(name: str, gpus: int, gbps: str) -> None:
    found = break_even(model(name), Cluster()).of(gpus) / 1e9
    decimals = len(gbps.partition(".")[2])
    assert abs(found - float(gbps)) <= 0.5 * 10**-decimals + 0.03


def test_it_is_where_the_replay_changes_its_mind() -> None:
    even = break_even(TINY, ONE)
    assert (even.token_bytes, even.tokens_per_s, even.bytes_per_s) == (2000, 1000, 2e6)


# 100 turns a second: 1,000 users who think 9 s and read an answer of 100 tokens at 10 ms each.
DEMAND = Demand(
    users=1000,
    think_s=9.0,
    history_tokens=5120,
    new_tokens=200,
    answer_tokens=100,
    found_share=0.9,
    ttft_s=10.0,
    utilisation_max=0.5,
)
BIG = replace(ONE, decode_slots=1000, links_per_node=2, drives_per_node=4)


def test_demand_follows_from_users_and_tokens() -> None:
    plan = make_plan(TINY, BIG, DEMAND)
    assert plan.turns_per_s == pytest.approx(100)
    assert plan.get_bytes_per_s == pytest.approx(100 * 0.9 * 5120 * TOKEN_BYTES)
    assert plan.put_bytes_per_s == pytest.approx(100 * (200 + 100 + 0.1 * 5120) * TOKEN_BYTES)
    assert plan.stored_bytes == 1000 * 5420 * TOKEN_BYTES


def test_each_count_is_the_largest_that_anything_asks_for() -> None:
    plan = make_plan(TINY, BIG, DEMAND)
    engines, drives, links, nodes = plan.needs
    # 100 turns x (200 + 512) tokens at 1,000 tokens a second, half busy.
    assert (engines.number, engines.why) == (143, "prefill of what is new or was not found")
    assert plan.recompute_engines == 1064
    read_s = 90 * (5120 * TOKEN_BYTES / 5.22e9 + 4 * 5e-6)
    written_s = 100 * (812 * TOKEN_BYTES / 2.34e9 + 4 * 5e-6)
    assert drives.number == -(-(read_s + written_s) // 0.5) == 1
    assert drives.why == "KV to be read and written"
    assert links.number == 1
    assert nodes.number == 1
    assert plan.cluster.engines == 143
    assert plan.cluster.drives >= drives.number


@pytest.mark.parametrize(
    ("change", "what", "why"),
    [
        ({"drive_capacity_bytes": 1e9}, "drives", "KV to be kept"),
        ({"link_bits_per_s": 1e8}, "node links", "KV out of the nodes"),
        ({"gpu_flops_per_s": 1e18, "link_bits_per_s": 1e8}, "engines", "KV into the GPUs"),
        ({"gpu_flops_per_s": 1e18, "decode_slots": 10}, "engines", "answers written at a time"),
        ({"node_memory_bytes_per_s": 1e8}, "nodes", "their memory's bandwidth"),
        ({"drive_capacity_bytes": 1e9}, "nodes", "4 drives in each"),
    ],
)
def test_what_is_narrow_is_named(change: dict[str, float], what: str, why: str) -> None:
    plan = make_plan(TINY, replace(BIG, **change), DEMAND)  # type: ignore[arg-type]
    assert {need.what: need.why for need in plan.needs}[what] == why


def test_drives_are_counted_for_all_the_bytes_and_the_share_they_may_be_busy() -> None:
    slow = replace(BIG, gpu_flops_per_s=1e15, drive_read_bytes_per_s=1e8, drive_write_bytes_per_s=5e7)
    read_s = 90 * (5120 * TOKEN_BYTES / 1e8 + 4 * 5e-6)
    written_s = 100 * (812 * TOKEN_BYTES / 5e7 + 4 * 5e-6)
    assert read_s + written_s == pytest.approx(9.216 + 3.248 + 0.0038)
    assert make_plan(TINY, slow, DEMAND).needs[1].number == 25
    assert make_plan(TINY, slow, replace(DEMAND, utilisation_max=0.25)).needs[1].number == 50


def test_a_short_time_to_the_first_token_asks_for_more_at_once() -> None:
    quick = make_plan(TINY, BIG, replace(DEMAND, users=10, ttft_s=0.201))
    drives = quick.needs[1]
    assert drives.why == "one fetch within its time"
    assert drives.number == -(-(5120 * TOKEN_BYTES / 0.0005 / 5.22e9) // 1)


def test_the_cpus_path_needs_more_engines_for_the_same_bytes() -> None:
    narrow = replace(BIG, gpu_flops_per_s=1e18, pcie_bytes_per_s=1e8)
    triggered, cpu = (make_plan(TINY, narrow, DEMAND, path) for path in ("triggered", "cpu"))
    assert cpu.cluster.engines == pytest.approx(2 * triggered.cluster.engines, abs=1)


def test_the_event_model_agrees_with_the_plan() -> None:
    """With the plan's counts no part is busier than planned, and about as busy where that decided."""
    demand = replace(DEMAND, users=200, think_s=19.0)
    plan = make_plan(TINY, BIG, demand)
    result = trial(TINY, plan, "triggered")
    busy = {
        name: sum(one.busy_s for one in used) / (sum(one.servers for one in used) * result.arrival_s[-1])
        for name, used in result.usage.items()
    }
    assert busy["prefill"] == pytest.approx(0.5, rel=0.1)
    assert max(busy.values()) < 0.6
    assert result.hit_rate == pytest.approx(0.9 * 10 / 11, rel=0.02)
    assert result.ttft_quantile_s(0.99) < demand.ttft_s


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"users": 0}, "--users is 0; it takes users, from 1 to 1e+08."),
        ({"found_share": 1.1}, "--found-share is 1.1; it takes a share of the turns, from 0 to 1."),
        ({"utilisation_max": 1}, "--utilisation-max is 1; it takes a share of the time, from 0.05 to 0.95."),
        ({"history_tokens": 100}, "--history-tokens is 100; it takes tokens, from 512 to 1e+07."),
    ],
)
def test_a_demand_out_of_range_is_refused(terms: dict[str, float], message: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        Demand(**terms)  # type: ignore[arg-type]
    assert str(caught.value) == message
