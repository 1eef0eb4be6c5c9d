"""The demo's output, on a terminal or in a log: steps, one line of progress, one table."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Progress", "say", "table"]

_LOG_EVERY_S = 0.5
_BAR = 24


def say(text: str) -> None:
    """One step."""
    print(text, flush=True)  # noqa: T201 - this is what the command is for


class Progress:
    """A progress line, updated in place on a terminal and written now and then to a log."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._terminal = sys.stdout.isatty()
        self._shown_s = 0.0

    def show(self, fired: int, landed: int, ended: int) -> None:
        """Show the progress."""
        now_s = time.monotonic()
        last = ended == self._total
        if not self._terminal and not last and now_s - self._shown_s < _LOG_EVERY_S:
            return
        self._shown_s = now_s
        full = _BAR * ended // self._total
        bar = "#" * full + "." * (_BAR - full)
        line = f"   [{bar}] fired {fired:3}  landed {landed:3}  written {ended:3} of {self._total}"
        if self._terminal:
            sys.stdout.write(f"\r{line}" + ("\n" if last else ""))
        else:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Print columns: the first aligned left, the others right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        return "  ".join(
            [first.ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        )

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(head), rule, *(line(row) for row in rows)])
