"""`kvsim cluster`: how safe a cluster's blocks are while its nodes change, and how busy the remaining nodes are."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from sim.output import as_csv, as_json, table
from sim.replay.change import Change, Trial, change
from sim.replay.replay_command import cluster_of
from sim.svg import bytes_label
from sim.units import format_seconds, parse_bytes

if TYPE_CHECKING:
    import argparse

    from sim.replay.change import Changed

__all__ = ["run_cluster"]


def run_cluster(arguments: argparse.Namespace) -> str:
    """The command's output."""
    cluster = cluster_of(arguments)
    terms = Change(
        lose=arguments.lose_nodes,
        join=arguments.join_nodes,
        replicas=arguments.replicas,
        stored_bytes=parse_bytes("--stored", arguments.stored),
        copy_bytes_per_s=parse_bytes("--copy-rate", arguments.copy_rate),
        noticed_s=arguments.noticed_s,
        busy=arguments.busy,
        popular_share=arguments.popular_share,
        popular_blocks=arguments.popular_blocks,
        trials=arguments.trials,
        seed=arguments.seed,
    )
    changed = change(cluster, terms)
    if arguments.as_json:
        trials = [one._asdict() for one in changed.trials]
        return as_json({"change": asdict(terms), "popular_on_one_node": changed.one_node, "trials": trials})
    if arguments.as_csv:
        return as_csv(Trial._fields, changed.trials)
    rows = [
        (what, *(form(pick(name)) for pick in (changed.median, changed.worst)))
        for what, name, form in (
            ("blocks without a copy", "lost_share", _percent),
            ("blocks with one copy of two", "short_share", _percent),
            ("to copy", "moved_bytes", bytes_label),
            ("nodes that send", "senders", _count),
            ("nodes that receive", "receivers", _count),
            ("half of it copied after", "half_s", _time),
            ("all copied after", "safe_s", _time),
            ("gets that ask a second node until then", "asked_twice_share", _percent),
            ("fullest node before, mean = 1", "fullest_before", _ratio),
            ("fullest node afterwards", "fullest_after", _ratio),
            ("busiest node before", "busiest_before", _percent),
            ("busiest node afterwards", "busiest_after", _percent),
            ("a sender's copying", "copying", _percent),
            ("busiest with the popular prefix, before", "popular_before", _percent),
            ("busiest with the popular prefix, afterwards", "popular_after", _percent),
        )
    ]
    head = ("", "median", "worst")
    return f"{_about(terms, cluster.nodes)}\n\n{table(head, rows, left=(0,))}\n\n{_notes(terms, changed)}"


def _about(terms: Change, nodes: int) -> str:
    return (
        f"Of {nodes:,} nodes {terms.lose} {'is' if terms.lose == 1 else 'are'} lost and {terms.join}"
        f" {'joins' if terms.join == 1 else 'join'}, in {terms.trials} trials;"
        f" {terms.replicas} copies of each block, {bytes_label(terms.stored_bytes)} on a node."
    )


def _notes(terms: Change, changed: Changed) -> str:
    return (
        f"Busy: share of the time of a node's drives or links; the mean before is {_percent(terms.busy)}, and above"
        " 100 % a node falls behind.\n"
        f"If one node had all of the popular prefix, it alone would make that node {_percent(changed.one_node)} busy.\n"
        "Times are lower bounds: a sender copies at its full rate, one lot at a time."
    )


def _percent(share: float) -> str:
    return f"{100 * share:,.3g} %" if share < 1 else f"{100 * share:,.0f} %"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _time(value_s: float) -> str:
    return f"{format_seconds(value_s)} s" if value_s else "-"
