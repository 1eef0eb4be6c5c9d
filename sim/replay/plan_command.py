"""`kvsim plan`: the cheapest cluster for each way of serving, how many users a cluster can serve; fetch or compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvcli.progress import bar
from sim.output import as_csv, as_json, counted, save_plot, table
from sim.replay.least_cost import LATE_SHARE, WAYS, best, highest_users, make_plan, trial
from sim.replay.plan import Demand, all_break_even
from sim.replay.replay_command import cluster_of, cost_plot, model_of
from sim.replay.report import as_document
from sim.replay.run import Terms
from sim.replay.sweep import points
from sim.svg import bytes_label, seconds_label

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from sim.models import Model
    from sim.replay.cluster_hardware import Cluster
    from sim.replay.least_cost import Plan, Way
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


def _parts(plan: Plan) -> str:
    """The parts of a plan, in a few words."""
    cluster = plan.cluster
    assert cluster is not None
    engines = f"{counted(cluster.engines, 'engine')} of {counted(cluster.gpus_per_engine, 'GPU')}"
    if plan.way == "recompute":
        return engines
    memory = f", {bytes_label(cluster.node_memory_bytes)} of DRAM" if cluster.node_memory_bytes else ""
    of_node = f"{counted(cluster.drives_per_node, 'drive')}, {counted(cluster.links_per_node, 'link')}"
    nodes = f"{counted(cluster.nodes, 'node')} of {of_node}"
    return f"{engines}; {nodes}{memory}"


def _plans_table(plans: Sequence[Plan]) -> str:
    cells = [
        (
            plan.way,
            f"{plan.usd_per_hour:,.2f}",
            seconds_label(plan.ttft_p50_s),
            seconds_label(plan.ttft_p99_s),
            _parts(plan),
        )
        if plan.cluster
        else (plan.way, "-", "-", "-", f"none: {plan.why_not}")
        for plan in plans
    ]
    return table(
        ("way", "USD/hour", "TTFT p50", "p99", "the cheapest cluster found that keeps the deadline"),
        cells,
        left=(0, 4),
    )


def _advice(plans: Sequence[Plan]) -> str:
    chosen = best(plans)
    if chosen is None:
        return "No cluster within the bounds keeps the deadline in any of these ways. Ask for a longer one (--ttft-s)."
    again = next((plan for plan in plans if plan.way == "recompute"), None)
    if chosen.way == "recompute":
        others = [plan for plan in plans if plan.cluster and plan is not chosen]
        more = min((plan.usd_per_hour for plan in others), default=None)
        rest = (
            "no way of keeping KV keeps the deadline"
            if more is None
            else (f"the cheapest way of keeping KV costs {more - chosen.usd_per_hour:,.2f} USD an hour more")
        )
        return f"Recommended: do not offload, compute every prompt again; {rest}."
    if again is None:
        return f"Recommended, of the ways asked for: {chosen.way}."
    if again.cluster is None:
        return f"Recommended: {chosen.way}. Computing every prompt again keeps the deadline with no cluster."
    saved = again.usd_per_hour - chosen.usd_per_hour
    return (
        f"Recommended: {chosen.way}. It saves {saved:,.2f} USD an hour of {again.usd_per_hour:,.2f}"
        " for computing every prompt again."
    )


def _reasons(plan: Plan) -> str:
    """Each count of a plan beside the fewest that suffice on average, and the reason for those."""
    cluster, least = plan.cluster, plan.least
    assert cluster is not None
    assert least is not None
    planned = {
        "engines": cluster.engines,
        "drives": cluster.drives,
        "node links": cluster.nodes * cluster.links_per_node,
        "nodes": cluster.nodes,
    }
    cells = [(need.what, f"{planned[need.what]:,}", f"{need.number:,}", need.why) for need in least.needs]
    head = (plan.way, "planned", "on average", "for")
    flow = (
        f"{least.turns_per_s:,.2f} turns a second; KV got {bytes_label(least.get_bytes_per_s)}/s,"
        f" put {bytes_label(least.put_bytes_per_s)}/s, kept {bytes_label(least.stored_bytes)}"
    )
    alone = (
        f"One turn alone: fetch {seconds_label(least.fetch_s)} and prefill {seconds_label(least.prefill_s)}, or"
        f" compute all again in {seconds_label(least.recompute_s)}"
    )
    if plan.way == "recompute":
        flow, alone = (
            f"{least.turns_per_s:,.2f} turns a second",
            f"One turn alone: {seconds_label(least.recompute_s)}",
        )
    return f"{table(head, cells, left=(0, 3))}\n{flow}\n{alone}"


def _trial_text(result: Result, plan: Plan) -> str:
    p99_s, wanted_s = result.ttft_quantile_s(1 - LATE_SHARE), plan.demand.ttft_s
    verdict = "kept" if p99_s <= wanted_s else "NOT KEPT"
    busy = {
        name: sum(one.busy_s for one in used) / (sum(one.servers for one in used) * result.duration_s)
        for name, used in result.usage.items()
    }
    most = sorted(busy, key=busy.__getitem__, reverse=True)[:4]
    parts = ", ".join(f"{name} {100 * busy[name]:.0f} %" for name in most)
    return (
        f"{plan.way}, tried with {len(result.ttft_s):,} turns:"
        f" TTFT p50 {seconds_label(result.ttft_quantile_s(0.5))},"
        f" p99 {seconds_label(p99_s)} of {seconds_label(wanted_s)}: {verdict}. Busiest: {parts}"
    )


def _row(plan: Plan) -> dict[str, object]:
    """A plan for programs, as one flat line of CSV."""
    cluster = plan.cluster
    counts = {
        name: getattr(cluster, name) if cluster else None
        for name in (
            *(
                "engines",
                "gpus_per_engine",
                "nodes",
                "drives_per_node",
                "links_per_node",
                "node_memory_bytes",
            ),
        )
    }
    return {
        "way": plan.way,
        "users": plan.demand.users,
        "usd_per_hour": plan.usd_per_hour if cluster else None,
        "ttft_p50_s": plan.ttft_p50_s if cluster else None,
        "ttft_p99_s": plan.ttft_p99_s if cluster else None,
        **counts,
        "why_not": plan.why_not,
    }


def _document(plans: Sequence[Plan], trials: Mapping[Way, Result]) -> dict[str, object]:
    chosen = best(plans)
    ways = []
    for plan in plans:
        least = (
            dataclasses.asdict(plan.least) | {"needs": [n._asdict() for n in plan.least.needs]}
            if plan.least
            else None
        )
        tried = {"trial": as_document([trials[plan.way]])} if plan.way in trials else {}
        ways.append(_row(plan) | {"least": least} | tried)
    return {
        "demand": dataclasses.asdict(plans[0].demand),
        "recommended": chosen.way if chosen else None,
        "plans": ways,
    }


def _highest(arguments: argparse.Namespace) -> str:
    cluster, demand, entry = cluster_of(arguments), _demand(arguments), model_of(arguments)
    ways: tuple[Way, ...] = tuple(dict.fromkeys(arguments.way or WAYS))
    found = []
    for number, way in enumerate(ways, 1):
        progress = bar(f"highest rate, {way} ({number} of {len(ways)})")
        users = highest_users(entry, cluster, demand, way, arguments.seed, progress, _terms(arguments))
        progress(1.0)
        found.append((way, users, users / demand.users * demand.turns_per_s(cluster)))
    if arguments.as_json:
        return as_json([{"way": way, "users": users, "turns_per_s": rate} for way, users, rate in found])
    if arguments.as_csv:
        return as_csv(("way", "users", "turns_per_s"), found)
    head = ("way", "users", "turns a second")
    about = (
        f"{entry.name}, {counted(cluster.engines, 'engine')} of {counted(cluster.gpus_per_engine, 'GPU')},"
        f" {counted(cluster.nodes, 'node')} of {counted(cluster.drives_per_node, 'drive')}:"
        " the most users whose first token comes within"
        f" {seconds_label(demand.ttft_s)} in {100 * (1 - LATE_SHARE):.0f} % of the turns, within 3 %\n\n"
    )
    return about + table(head, [(way, f"{users:,}", f"{rate:,.2f}") for way, users, rate in found], left=(0,))


def _even(arguments: argparse.Namespace, cluster: Cluster) -> str:
    rows = [row._asdict() for row in all_break_even(cluster)]
    if arguments.as_json:
        return as_json(rows)
    if arguments.as_csv:
        return as_csv(list(rows[0]), [list(row.values()) for row in rows])
    return _break_even_table(cluster)


_OPTIONS = (
    *("model", "users", "think_s", "history_tokens", "new_tokens", "answer_tokens", "found_share"),
    *("ttft_s", "utilisation_max", "seed", "engine"),
)


class _Swept(NamedTuple):
    """The plans of one point of a sweep, and their trials."""

    point: str
    model: Model
    plans: list[Plan]
    trials: Mapping[Way, Result]


def run_plan(arguments: argparse.Namespace) -> str:
    """The command's output."""
    if arguments.break_even:
        return _even(arguments, cluster_of(arguments))
    if arguments.highest_rate:
        return _highest(arguments)
    swept = [_planned(name, one) for name, one in points(arguments, _OPTIONS)]
    saved = ""
    if arguments.plot:
        drawn = [
            (plan.way, plan.ttft_p99_s, plan.usd_per_hour)
            for one in swept
            for plan in one.plans
            if plan.cluster
        ]
        saved = save_plot("--plot", Path(arguments.plot), cost_plot(drawn, "plan"))
    if arguments.as_json:
        documents = [_document(one.plans, one.trials) for one in swept]
        if arguments.sweep is None:
            return as_json(documents[0])
        return as_json([{"point": one.point, **d} for one, d in zip(swept, documents, strict=True)])
    if arguments.as_csv:
        rows = [{"point": one.point, **_row(plan)} for one in swept for plan in one.plans]
        return as_csv(list(rows[0]), [list(row.values()) for row in rows])
    return "\n\n".join(_text(one) for one in swept) + saved


def _terms(arguments: argparse.Namespace) -> Terms:
    return Terms(engine=arguments.engine)


def _demand(arguments: argparse.Namespace) -> Demand:
    return Demand(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Demand)})


def _planned(point: str, arguments: argparse.Namespace) -> _Swept:
    cluster, demand, entry = cluster_of(arguments), _demand(arguments), model_of(arguments)
    ways: tuple[Way, ...] = tuple(dict.fromkeys(arguments.way or WAYS))
    about = f"{point} " if point else ""
    plans = []
    for number, way in enumerate(ways, 1):
        progress = bar(f"plan, {about}{way} ({number} of {len(ways)})")
        plans.append(make_plan(entry, cluster, demand, way, arguments.seed, progress, _terms(arguments)))
        progress(1.0)
    trials = {
        plan.way: trial(entry, plan, arguments.seed, bar(f"trial of the plan, {plan.way}"))
        for plan in plans
        if arguments.trial and plan.cluster
    }
    return _Swept(point, entry, plans, trials)


def _text(swept: _Swept) -> str:
    point, entry, plans, trials = swept
    demand = plans[0].demand
    about = (f"{point}\n" if point else "") + (
        f"{entry.name}: {demand.users:,} users, turns of {demand.history_tokens:,} + {demand.new_tokens:,} tokens;"
        f" first token within {seconds_label(demand.ttft_s)} in {100 * (1 - LATE_SHARE):.0f} %; no part busier than"
        f" {100 * demand.utilisation_max:.0f} % on average"
    )
    blocks = [about, _plans_table(plans), _advice(plans)]
    chosen = best(plans)
    if chosen is not None:
        blocks.append(_reasons(chosen))
    if trials:
        blocks.append("\n".join(_trial_text(trials[plan.way], plan) for plan in plans if plan.way in trials))
    return "\n\n".join(blocks)
