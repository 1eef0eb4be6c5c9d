"""`kvstore trace`: the eight steps of a session's last turns with their times, as a table or as JSON.

It asks one node and changes nothing. It shows the events that the node's process recorded or that clients reported to
it; a restarted node has none.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvcli.running import Status
from kvstore.config import counted, printable, show_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Trace
    from kvstore.commands.sessions_command import Asked
    from kvstore.steps import Seen

__all__ = ["document", "run", "table"]

_HEADS = ("step", "at ms", "seen by", "what", "blocks", "bytes", "")


def run(asked: Asked, session: str, *, as_json: bool = False) -> int:
    """Print it; returns the exit status."""
    with asked.client() as client, asked.naming():
        trace = client.session(asked.user, session).trace()
    print(json.dumps(document(trace), indent=2) if as_json else table(trace))  # noqa: T201 - its output
    return Status.DONE if trace.seen else Status.NO


def document(trace: Trace) -> list[dict[str, object]]:
    """For programs; times are of the node's clocks."""
    return [
        {
            "step": seen.step.number,
            "seen": seen.step.name.lower(),
            "by": _by(seen),
            "unix_ms": trace.now_unix_ms - seen.at_ns / 1e6,
            "blocks": seen.blocks,
            "bytes": seen.size_bytes,
            "tokens": seen.tokens,
            "detail": seen.detail,
        }
        for seen in trace.seen
    ]


def table(trace: Trace) -> str:
    """For people; times count from the first line."""
    if not trace.seen:
        return "The node has no events of this session since it started."
    first_ns = trace.seen[0].at_ns
    rows = [_HEADS, *(_row(seen, first_ns) for seen in trace.seen)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADS) - 1)]
    rule = tuple("-" * width for width in widths)
    lines = [_line(row, widths) for row in (rows[0], rule, *rows[1:])]
    began = datetime.fromtimestamp((trace.now_unix_ms - first_ns / 1e6) / 1000, UTC)
    return "\n".join([*lines, f"from {began:%Y-%m-%d %H:%M:%S.%f} UTC"])


def _by(seen: Seen) -> str:
    return "node" if seen.by_node else "client"


def _row(seen: Seen, first_ns: int) -> tuple[str, ...]:
    details = [counted(seen.tokens, "token")] if seen.tokens else []
    details += [printable(seen.detail)] if seen.detail else []
    return (
        str(seen.step.number),
        f"{(first_ns - seen.at_ns) / 1e6:.2f}",
        _by(seen),
        seen.step.sentence,
        str(seen.blocks or ""),
        show_size(seen.size_bytes) if seen.size_bytes else "",
        ", ".join(details),
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    step, at, by, what, blocks, size = (
        cell.rjust(width) if column in {1, 4, 5} else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row[: len(widths)], widths, strict=True))
    )
    return "  ".join((step, at, by, what, blocks, size, *row[len(widths) :])).rstrip()
