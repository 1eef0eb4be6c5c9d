"""Prefill times measured on an engine, instead of the roofline.

A table is a CSV file with the columns `new_tokens`, `context_tokens` and `prefill_s`: how long an engine took to
prefill this many new tokens after a context whose KV it had. It has every pair of its counts.

What always holds: between the counts times are interpolated linearly; beyond them nothing is guessed: a prompt outside
the table is refused with the measured range. Below the smallest count of new tokens the time is the smallest's, which
is the minimum of a step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.parameter_files import read_rows
from sim.units import OutOfRange, require

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["COLUMNS", "Timings", "read_timings"]

COLUMNS = ("new_tokens", "context_tokens", "prefill_s")
_ROWS_MAX = 100_000
_TOKENS_MAX = 1e8


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds for each count of new tokens and each of context; both rise."""

    new_tokens: tuple[float, ...]
    context_tokens: tuple[float, ...]
    prefill_s: tuple[tuple[float, ...], ...]  # by new tokens, then by context

    def of(self, new_tokens: float, context_tokens: float) -> float:
        """The time to prefill new tokens after a context of this length."""
        require("a prompt's new tokens", new_tokens, "tokens that were measured", 0, self.new_tokens[-1])
        require("a prompt's context", context_tokens, "tokens that were measured", 0, self.context_tokens[-1])
        row, up = _place(self.new_tokens, new_tokens)
        column, right = _place(self.context_tokens, context_tokens)
        near = _between(self.prefill_s[row], column, right)
        return near + up * (
            _between(self.prefill_s[min(row + 1, len(self.prefill_s) - 1)], column, right) - near
        )


def _place(counts: Sequence[float], count: float) -> tuple[int, float]:
    """The two counts around `count`, and how far it is from the first to the second."""
    if count <= counts[0]:
        return 0, 0.0
    at = min(bisect_right(counts, count) - 1, len(counts) - 2)
    return at, (count - counts[at]) / (counts[at + 1] - counts[at])


def _between(times: Sequence[float], at: int, share: float) -> float:
    return times[at] + share * (times[min(at + 1, len(times) - 1)] - times[at])


def read_timings(path: Path) -> Timings:
    """Read a table; one with gaps is refused."""
    rows = read_rows("--timings", path, COLUMNS, _ROWS_MAX)
    found: dict[tuple[float, float], float] = {}
    for line, row in enumerate(rows, start=2):
        values = []
        for column in COLUMNS:
            try:
                values.append(float(row[column]))
            except (TypeError, ValueError):
                where = f"--timings {path.name}:{line} {column}"
                raise OutOfRange(where, repr(row[column]), "a number", "such as 512 or 0.25") from None
        new, context, seconds = values
        require(f"--timings {path.name}:{line} new_tokens", new, "tokens", 1, _TOKENS_MAX)
        require(f"--timings {path.name}:{line} context_tokens", context, "tokens", 0, _TOKENS_MAX)
        require(f"--timings {path.name}:{line} prefill_s", seconds, "seconds", 0, 1e5)
        found[new, context] = seconds
    news, contexts = (tuple(sorted({pair[i] for pair in found})) for i in (0, 1))
    gap = next(((n, c) for n in news for c in contexts if (n, c) not in found), None)
    if gap is not None:
        what = f"{path}, without new_tokens {gap[0]:g} at context_tokens {gap[1]:g}"
        raise OutOfRange("--timings", what, "a table", "with every pair of its counts")
    assert math.isfinite(sum(found.values()))
    return Timings(news, contexts, tuple(tuple(found[n, c] for c in contexts) for n in news))
