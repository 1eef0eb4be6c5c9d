"""`kvstore stats` and `kvstore drives`: a node's counters and gauges, and the state of its drives.

They ask one node, and change nothing. The names in the JSON are those of the proto and don't change.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvstore.config import counted, printable, show_size, show_time
from kvstore.miss import MissReason
from kvstore.wire import blocks_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstore.client import Client
    from kvstore.wire.kvstore_pb2 import StatusResponse
    from kvstore.wire.observing_pb2 import StatisticsResponse

__all__ = [
    "drives",
    "encryption",
    "encryption_line",
    "evictions",
    "numbers",
    "parts",
    "reasons",
    "stats",
    "table",
]

_SINCE = "Since the node started"
_NOW = "Now"
_MINE = "Of this tenant"
_LAST_COUNTER = "quarantined"
_COUNTERS_TOO = {"leased", "landed", "leases_expired", "puts_key_taken"}  # added later, with higher numbers
_DRIVE_HEADS = ("drive", "blocks", "used", "free", "takes puts", "")


def stats(client: Client, *, as_json: bool) -> int:
    """Print them; the exit status."""
    statistics, status = client.statistics(), client.status()
    document = {**numbers(statistics), "encryption": encryption(status)}
    page = f"Encryption: {encryption_line(status)}\n{_stats_page(statistics)}"
    print(json.dumps(document, indent=2) if as_json else page)  # noqa: T201 - its output
    return 0


def encryption(status: StatusResponse) -> dict[str, object]:
    """Whether a node encrypts, and with which keys, which only an observer is told."""
    return {
        "on": status.encrypted,
        "keys": status.keys,
        "keys_damaged": status.keys_damaged,
        "master_key": status.master_key,
    }


def encryption_line(status: StatusResponse) -> str:
    """The same as a line of text."""
    if not status.encrypted:
        return "off: stored data is in the clear on the drives (kvstore serve --master-key)"
    if not status.master_key:
        return "on"
    damaged = (
        f", {counted(status.keys_damaged, 'slot')} damaged (kvstore keys status)"
        if status.keys_damaged
        else ""
    )
    return (
        f"on, {counted(status.keys, 'key')}, sealed with master key {printable(status.master_key)}{damaged}"
    )


def numbers(statistics: StatisticsResponse) -> dict[str, object]:
    """All figures under the names of the proto; misses and evictions by reason; None for what is not counted."""
    found: dict[str, object] = {}
    for field in statistics.DESCRIPTOR.fields:
        if field.name == "misses":
            found[field.name] = reasons(statistics)
        elif field.name == "evictions":
            found[field.name] = evictions(statistics)
        else:
            found[field.name] = getattr(statistics, field.name)
    if not statistics.quota_bytes:
        found["quota_used_bytes"] = None
    return found


def reasons(statistics: StatisticsResponse) -> dict[str, int]:
    """Misses by reason."""
    return {MissReason(one.reason).name.lower(): one.blocks for one in statistics.misses}


def evictions(statistics: StatisticsResponse) -> dict[str, int]:
    """Evictions by reason."""
    known = blocks_pb2.GoneReason.DESCRIPTOR.values_by_number
    return {
        known[one.reason].name.removeprefix("GONE_REASON_").lower()
        if one.reason in known
        else str(one.reason): one.blocks
        for one in statistics.evictions
    }


def _stats_page(statistics: StatisticsResponse) -> str:
    sections: dict[str, list[tuple[str, str]]] = {_SINCE: [], _NOW: [], _MINE: []}
    counters = True
    for name, value in numbers(statistics).items():
        section = _SINCE if counters or name in _COUNTERS_TOO else _NOW
        sections[_MINE if name.startswith("quota_") else section].append((name, _shown(name, value)))
        counters = counters and name != _LAST_COUNTER
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    lines: list[str] = []
    for head, rows in sections.items():
        lines += [f"{head}:", *(f"  {name.ljust(width)}  {value}" for name, value in rows)]
    return "\n".join(lines)


def _shown(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {reason}" for reason, count in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "not counted without a quota"
    assert isinstance(value, int)
    if name == "quota_bytes" and not value:
        return "none"
    if name.endswith("_bytes"):
        return show_size(value)
    return show_time(value) if name.endswith("_ms") else str(value)


def drives(client: Client, *, as_json: bool) -> int:
    """Print them; the exit status."""
    status = client.status()
    print(json.dumps(_drives_document(status), indent=2) if as_json else _drives_page(status))  # noqa: T201
    return 0


def _drives_document(status: StatusResponse) -> dict[str, object]:
    return {
        "node": status.node,
        "version": status.version,
        "takes_puts": not status.read_only,
        "encrypted": status.encrypted,
        "drives": [
            {
                "number": one.number,
                "blocks": one.blocks,
                "capacity_bytes": one.capacity_bytes,
                "free_bytes": one.free_bytes,
                "takes_puts": one.takes_puts,
                "failure": one.failure,
            }
            for one in status.drives
        ],
    }


def _drives_page(status: StatusResponse) -> str:
    rows = [_DRIVE_HEADS]
    rows += [
        (
            str(one.number),
            str(one.blocks),
            f"{show_size(one.capacity_bytes - one.free_bytes)} of {show_size(one.capacity_bytes)}",
            show_size(one.free_bytes),
            "yes" if one.takes_puts else "no",
            printable(one.failure),
        )
        for one in status.drives
    ]
    lines = table(rows)
    how = "encrypted" if status.encrypted else "not encrypted (kvstore serve --master-key)"
    node = f"node {printable(status.node)}, version {printable(status.version)}, stored data is {how}"
    return "\n".join([node, *lines])


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines with aligned columns, the last of any width."""
    rows = list(rows)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    return [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)),)).rstrip()
        for row in rows
    ]


def parts(counts: Mapping[str, int]) -> str:
    """Counts in one line."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
