"""`kvsim paper`: one page with the paper's statements, the results of its numbers, and verdicts."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.progress import bar
from sim.gpu_cost import read_cost_table
from sim.output import as_csv, as_json
from sim.paper import findings

if TYPE_CHECKING:
    import argparse

__all__ = ["run"]

_WIDTH = 118
_WHERE, _VERDICT = 16, 21


def run(arguments: argparse.Namespace) -> str:
    """The command's output."""
    cost = read_cost_table(Path(arguments.gpu_cost)) if arguments.gpu_cost else None
    found = findings(cost, bar("the paper"))
    if arguments.as_json:
        return as_json([one._asdict() for one in found])
    if arguments.as_csv:
        return as_csv(("where", "theirs", "ours", "verdict"), found)
    counts = Counter(one.verdict for one in found)
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    lines = [
        "LLM Serving With Efficient KV-Cache Management Using Triggered Operations (Dhakal, Bruel, Rattihalli,",
        "Chalamalasetti, Milojicic), against its own printed numbers.",
        "",
    ]
    indent = " " * (_WHERE + _VERDICT)
    for one in found:
        head = f"{one.where:{_WHERE}}{one.verdict:{_VERDICT}}"
        lines += textwrap.wrap(f"theirs: {one.theirs}", _WIDTH, initial_indent=head, subsequent_indent=indent)
        lines += textwrap.wrap(
            f"ours:   {one.ours}", _WIDTH, initial_indent=indent, subsequent_indent=indent + "        "
        )
    lines += [
        "",
        f"{len(found)} lines: {tally}.",
        "Judged are the numbers, not the mechanism. kvsim explain: what each preset adds; kvsim search: every reading.",
    ]
    return "\n".join(lines)
