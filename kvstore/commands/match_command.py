"""`kvstore match`: checks rules, shows them in order of precedence, and says which one a request hits, and why.

What always holds: for a file with an error only that error is shown. A request that hits nothing, or is denied, is an
answer, not an error.

What it doesn't do: ask a running node, whose table may have entries from no file.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

from kvstore.config_files import read_text
from kvstore.errors import RuleError
from nic_offload.match_action import Outcome, Request, Table
from nic_offload.match_fields import FIELDS
from nic_offload.match_file import parse_rules

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nic_offload.match_action import Considered, Entry, FiveTuple

__all__ = ["parse_request", "run"]

_HEAD = ("priority", "name", "tenant", "user", "context", "model", "from", "to", "protocol", "actions")
_ANY = "*"
_NEXT_FIELD = re.compile(rf",\s*(?=(?:{'|'.join(FIELDS)})\s*=)")


def parse_request(text: str) -> Request:
    """`tenant=acme,user=alice,...`; a comma inside a value is fine unless a field's name follows it."""
    fields: dict[str, object] = {}
    for part in _NEXT_FIELD.split(text):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals:
            raise RuleError(f"--request takes FIELD=VALUE,..., and {part.strip()!r} has no '='.")
        if name in fields:
            raise RuleError(f"--request gives {name} twice.")
        fields[name] = value.strip()
    return Request.parse(fields)


def run(path: Path, request_text: str | None, *, as_json: bool) -> int:
    """Print the findings; return the exit status."""
    table = Table()
    table.replace(parse_rules(read_text(path)))
    entries = sorted(table, key=lambda entry: (-entry.plan.level, entry.age, entry.name))
    request = None if request_text is None else parse_request(request_text)
    considered = [] if request is None else table.explain(request)
    if as_json:
        _print(json.dumps(_document(table, entries, request, considered), indent=2))
    else:
        _print(_table(entries) + _bindings(entries) + f"\n\n{_summary(table)}")
        if request is not None:
            _print("\n" + _verdict(considered, request))
    return 0


def _print(text: str) -> None:
    """A text, and a newline."""
    sys.stdout.write(text + "\n")


def _summary(table: Table) -> str:
    size = table.statistics()
    return f"Rules: {size.entries}. Guards: {size.guards}. Masks: {size.masks}."


def _priority(entry: Entry) -> str:
    return "guard" if entry.is_guard else str(entry.priority)


def _end(five: FiveTuple, side: str) -> str:
    """One side of a 5-tuple: address, port, both, or any."""
    shown = five.show()
    address, port = shown.get(side, _ANY), shown.get(f"{side}_port")
    return address if port is None else f"{address} port {port}"


def _row(entry: Entry) -> tuple[str, ...]:
    pattern = entry.pattern
    shown = pattern.show()
    ends = [_end(pattern.five, "source"), _end(pattern.five, "destination")]
    if pattern.bind:
        ends[0] = "not bound" if entry.is_guard else "bound"
    return (
        _priority(entry),
        entry.name,
        *(shown.get(name, _ANY) for name in ("tenant", "user", "context", "model")),
        *ends,
        shown.get("protocol", _ANY),
        ", ".join(map(str, entry.actions)),
    )


def _table(entries: Sequence[Entry]) -> str:
    rows = [_HEAD, *map(_row, entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column == 0 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _bindings(entries: Sequence[Entry]) -> str:
    lines = [
        f"\n  {entry.name}: {', '.join(f'{field} {text}' for field, text in binding.show().items())}"
        for entry in entries
        if entry.plan.bound
        for binding in entry.pattern.bind
    ]
    return "\n\nBound to:" + "".join(lines) if lines else ""


def _verdict(considered: Sequence[Considered], request: Request) -> str:
    if considered and considered[0].outcome is Outcome.WON:
        winner = considered[0].entry
        actions = ", ".join(map(str, winner.actions))
        lines = [f"The request hits {winner.name!r}: {actions}; sessions {winner.sessions_of(request)!r}."]
    else:
        lines = ["The request hits nothing."]
    if not considered:
        lines.append("No rule matched in part.")
    else:
        lines.append("Considered:")
    width = max((len(item.entry.name) for item in considered), default=0)
    for entry, outcome in considered:
        lines.append(f"  {_priority(entry):>8}  {entry.name.ljust(width)}  {outcome.value}")
    return "\n".join(lines)


def _document(
    table: Table, entries: Sequence[Entry], request: Request | None, considered: Sequence[Considered]
) -> dict[str, object]:
    document: dict[str, object] = {
        "entries": [
            {
                "name": entry.name,
                "priority": None if entry.is_guard else entry.priority,
                "guard": entry.is_guard,
                "match": entry.pattern.show(),
                "bind": [binding.show() for binding in entry.pattern.bind],
                "actions": [str(action) for action in entry.actions],
                "sessions": entry.plan.sessions,
            }
            for entry in entries
        ],
        "statistics": table.statistics()._asdict(),
    }
    if request is not None:
        won = considered[0] if considered and considered[0].outcome is Outcome.WON else None
        document["request"] = request.show()
        document["hit"] = None if won is None else entries.index(won.entry)
        document["sessions"] = None if won is None else won.entry.sessions_of(request)
        document["considered"] = [
            {
                "entry": entries.index(item.entry),
                "name": item.entry.name,
                "outcome": item.outcome.name.lower(),
            }
            for item in considered
        ]
    return document
