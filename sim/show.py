"""How results are shown: aligned tables, CSV, JSON, files of plots, and a bar for what takes long.

What always holds: the bar goes to stderr, only if that is a terminal, and is gone when the work is done; so a
result that is piped is the result alone.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["as_csv", "as_json", "bar", "save", "save_plot", "spinner", "table"]

_BAR_CELLS = 40


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
    """Write a file whole; give the line that says so."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutOfRange(parameter, str(path), "a file to write", f"and {error.strerror}") from error
    return f"\nwritten: {path}"


def save_plot(parameter: str, path: Path, svg: str) -> str:
    """Write a plot. It is SVG, and a name that says otherwise is refused."""
    if path.suffix.lower() != ".svg":
        raise OutOfRange(parameter, str(path), "a file for a plot", "named *.svg: plots are SVG")
    return save(parameter, path, svg)


def bar(what: str, clock_s: Callable[[], float] = time.monotonic) -> Callable[[float], None]:
    """Give what has to be told of the progress, from 0 to 1; at 1 the bar is wiped.

    How long it will still take is what it took so far, by the share that is done.
    """
    shown = -1
    begun_s = clock_s()

    def progress(share: float) -> None:
        nonlocal shown
        if not sys.stderr.isatty():
            return
        percent = int(100 * share)
        if share >= 1:
            sys.stderr.write("\r\033[K")
        elif percent != shown:
            cells = int(_BAR_CELLS * share)
            left = f", {(clock_s() - begun_s) * (1 - share) / share:,.0f} s left" if percent else ""
            sys.stderr.write(f"\r{what} [{'#' * cells}{'.' * (_BAR_CELLS - cells)}] {percent} %{left}\033[K")
        shown = percent
        sys.stderr.flush()

    return progress


def spinner(what: str) -> Callable[[], None]:
    """Give what has to be told of each step of something whose steps nobody can count beforehand."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{what}: trial {steps}\r")
            sys.stderr.flush()

    return step
