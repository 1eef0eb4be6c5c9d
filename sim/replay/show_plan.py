"""`kvsim plan`: fetch or compute again, how many of what, and whether the event model agrees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sim.models import model
from sim.replay.plan import Demand, all_break_even, break_even, make_plan, trial
from sim.replay.report import as_document
from sim.replay.show import cluster_of
from sim.show import as_json, bar, table
from sim.svg import bytes_label, seconds_label

if TYPE_CHECKING:
    import argparse

    from sim.replay.cluster import Cluster
    from sim.replay.plan import Plan
    from sim.replay.simulate import Result

__all__ = ["run_plan"]

_LARGE_GPUS = 8


def _break_even_table(cluster: Cluster) -> str:
    nic = cluster.link_bits_per_s / 8
    cells = [
        (
            row.model,
            f"{row.token_bytes:,}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.bytes_per_s / 1e9:.2f}",
            f"{row.of(_LARGE_GPUS) / 1e9:.1f}",
            "fetch" if row.bytes_per_s < nic else "compute",
        )
        for row in all_break_even(cluster)
    ]
    head = (
        "model",
        "B/token",
        "tokens/s a GPU",
        "GB/s a GPU",
        f"GB/s, {_LARGE_GPUS} GPUs",
        "with one NIC a GPU",
    )
    about = (
        f"Fetching is faster than computing again above this bandwidth. A GPU of {cluster.gpu_flops_per_s / 1e12:,.0f}"
        f" TFLOP/s at {100 * cluster.gpu_mfu:.0f} %; its NIC gives {nic / 1e9:.1f} GB/s."
    )
    return f"{about}\n\n{table(head, cells, left=(0, 5))}"


def _plan_text(plan: Plan, model_name: str) -> list[str]:
    demand, cluster = plan.demand, plan.cluster
    needs = [(need.what, f"{need.number:,}", f"for {need.why}") for need in plan.needs]
    more = plan.recompute_engines - cluster.engines
    even = break_even(model(model_name), cluster)
    return [
        (
            f"{model_name}: {demand.users:,} users, {plan.turns_per_s:,.2f} turns a second of"
            f" {demand.history_tokens:,} + {demand.new_tokens:,} tokens; no part busier than"
            f" {100 * demand.utilisation_max:.0f} %"
        ),
        "",
        table(("", "number", "because"), needs, left=(0, 2)),
        "",
        (
            f"KV got {bytes_label(plan.get_bytes_per_s)}/s, put {bytes_label(plan.put_bytes_per_s)}/s,"
            f" kept {bytes_label(plan.stored_bytes)}"
        ),
        (
            f"Computing all again would take {plan.recompute_engines:,} engines,"
            f" {more:,} more; storage costs {cluster.storage_usd_per_hour:,.2f} USD an hour,"
            f" those engines {more * cluster.gpus_per_engine * cluster.gpu_usd_per_hour:,.2f}"
        ),
        (
            f"One turn alone: fetch {seconds_label(plan.fetch_s)} and prefill {seconds_label(plan.prefill_s)}, or"
            f" compute all again in {seconds_label(plan.recompute_s)}"
        ),
        (
            f"Fetching is faster above {even.of(cluster.gpus_per_engine) / 1e9:.1f} GB/s an engine"
            f" of {cluster.gpus_per_engine} GPUs"
        ),
    ]


def _trial_text(result: Result, plan: Plan) -> str:
    p99_s, wanted_s = result.ttft_quantile_s(0.99), plan.demand.ttft_s
    verdict = (
        "kept"
        if p99_s <= wanted_s
        else "NOT KEPT: plan for a lower --utilisation-max, or more of what is busiest"
    )
    busy = {
        name: sum(one.busy_s for one in used) / (sum(one.servers for one in used) * result.duration_s)
        for name, used in result.usage.items()
    }
    most = sorted(busy, key=busy.__getitem__, reverse=True)[:4]
    parts = ", ".join(f"{name} {100 * busy[name]:.0f} %" for name in most)
    return (
        f"\nTried with {len(result.ttft_s):,} turns: TTFT p50 {seconds_label(result.ttft_quantile_s(0.5))}, p99"
        f" {seconds_label(p99_s)} of {seconds_label(wanted_s)}: {verdict}\nBusiest: {parts}"
    )


def run_plan(arguments: argparse.Namespace) -> str:
    """What the command prints."""
    cluster = cluster_of(arguments)
    if arguments.break_even:
        if arguments.as_json:
            return as_json([row._asdict() for row in all_break_even(cluster)])
        return _break_even_table(cluster)
    demand = Demand(
        users=arguments.users,
        think_s=arguments.think_s,
        history_tokens=arguments.history_tokens,
        new_tokens=arguments.new_tokens,
        answer_tokens=arguments.answer_tokens,
        found_share=arguments.found_share,
        ttft_s=arguments.ttft_s,
        utilisation_max=arguments.utilisation_max,
    )
    entry = model(arguments.model)
    plan = make_plan(entry, cluster, demand, arguments.path)
    result = None
    if arguments.trial:
        result = trial(entry, plan, arguments.path, arguments.seed, bar("trial of the plan"))
    if arguments.as_json:
        document = dataclasses.asdict(plan) | {"needs": [need._asdict() for need in plan.needs]}
        return as_json(document | ({"trial": as_document([result])} if result else {}))
    lines = _plan_text(plan, entry.name)
    if result is not None:
        lines.append(_trial_text(result, plan))
    return "\n".join(lines)
