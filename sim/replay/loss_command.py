"""`kvsim loss`: the cost of lost or slow nodes and drives of a large cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from sim.output import as_csv, as_json, table
from sim.replay.loss import Losses, Phase, lose
from sim.replay.replay_command import cluster_of, model_of
from sim.svg import bytes_label, seconds_label

if TYPE_CHECKING:
    import argparse

    from sim.replay.loss import LossReport

__all__ = ["run_loss"]


def run_loss(arguments: argparse.Namespace) -> str:
    """The command's output."""
    cluster = cluster_of(arguments)
    losses = Losses(
        requests=arguments.requests,
        users=arguments.users,
        history_tokens=arguments.history_tokens,
        busy=arguments.busy,
        nodes=arguments.lose_nodes,
        drives=arguments.lose_drives,
        slow_nodes=arguments.slow_nodes,
        slow_factor=arguments.slow_factor,
        noticed_s=arguments.noticed_s,
        deadline_s=arguments.deadline_s,
        seed=arguments.seed,
    )
    report = lose(model_of(arguments), cluster, losses)
    if arguments.as_json:
        phases = [phase._asdict() for phase in report.phases]
        return as_json(report._asdict() | {"phases": phases, "losses": asdict(losses)})
    if arguments.as_csv:
        return as_csv(Phase._fields, report.phases)
    rows = [
        (
            phase.name,
            f"{phase.gets:,}",
            f"{100 * phase.hit_rate:.2f} %",
            *(seconds_label(one) for one in (phase.get_p50_s, phase.get_p99_s, phase.get_p999_s)),
        )
        for phase in report.phases
    ]
    head = ("", "gets", "hits", "get p50", "p99", "p99.9")
    return f"{_about(losses, cluster.nodes, report)}\n\n{table(head, rows, left=(0,))}\n\n{_after(report)}"


def _about(losses: Losses, nodes: int, report: LossReport) -> str:
    about = (
        f"{losses.nodes} of {nodes:,} nodes and {losses.drives} drives of others are lost after"
        f" {seconds_label(report.lost_at_s)} of {seconds_label(report.duration_s)}; the nodes are off the list"
        f" {seconds_label(losses.noticed_s)} later."
    )
    if losses.slow_nodes:
        about += f" {losses.slow_nodes} nodes take {losses.slow_factor:g} times as long throughout."
    return about


def _after(report: LossReport) -> str:
    healed = (
        "To the end of this run more than a tenth as many gets missed as at first"
        if report.healed_s is None
        else f"From {seconds_label(report.healed_s)} after it on a tenth as many gets miss as at first, or fewer"
    )
    return (
        f"{100 * report.lost_share:.2f} % of the users had KV there. {healed}.\n"
        f"Computed again in {report.gpu_s:,.0f} GPU seconds; {bytes_label(report.put_again_bytes)} put again, at most"
        f" {bytes_label(report.put_again_most_bytes_per_s)}/s.\n"
        f"Users are hashed: the fullest node has {report.fullest:.2f} times the mean number, and the busiest drives or"
        f" links have work for {100 * report.busiest:.0f} % of the time.\n"
        "A drive holds a page of nearly every block of its node: its loss is that of all KV there, not of its share.\n"
        "Nothing is copied between nodes: after a miss the prompt is recomputed."
    )
