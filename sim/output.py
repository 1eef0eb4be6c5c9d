"""Output of results: aligned tables, CSV, JSON and files of plots."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from sim.units import OutOfRange, Unusable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["as_csv", "as_json", "counted", "save", "save_plot", "table"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> str:
    """Columns aligned to the right, those in `left` to the left."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def counted(count: int, what: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def as_csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Comma-separated values with a head, numbers in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def as_json(document: Any) -> str:
    """Indented for people, in full for programs."""
    return json.dumps(document, indent=2)


def save(parameter: str, path: Path, text: str) -> str:
    """Write a file; return a line that reports it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.filename is None:  # it was opened, and a write failed: the drive is full, say
            error.filename = str(path)
            raise
        raise Unusable(parameter, path, f"can't be written: {error.strerror}") from error
    return f"\nwritten: {path}"


def save_plot(parameter: str, path: Path, svg: str) -> str:
    """Write a plot as SVG; a name with another suffix is an error."""
    if path.suffix.lower() != ".svg":
        raise OutOfRange(parameter, str(path), "a file for a plot", "named *.svg: plots are SVG")
    return save(parameter, path, svg)
