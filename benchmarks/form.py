"""The one form of every benchmark: a candidate and its ceiling, measured in alternation on the same machine.

What always holds: candidate and ceiling run interleaved, at least five times each, so if the machine slows down, both
slow down. `value` and `ceiling` are the medians of their runs; `ratio` is the median of the *paired* ratios, not the
ratio of the medians, because the two runs of a pair saw the same minute of the machine. `ok` compares the ratio with
the goal if there is a ceiling, otherwise the value with the goal.

What it doesn't do: fail. A missed goal is recorded as `ok: false`; no test asserts a speed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["PAIRS_MIN", "Form", "Point", "machine", "table"]

PAIRS_MIN = 5


@dataclass(frozen=True, slots=True)
class Point:
    """One line of a benchmark's result."""

    metric: str
    value: float
    unit: str
    ceiling: float | None = None
    ratio: float | None = None
    goal: float | None = None
    ok: bool | None = None  # None: there was no goal


def _judge(measured: float, goal: float | None, *, lower_is_better: bool) -> bool | None:
    if goal is None:
        return None
    return measured <= goal if lower_is_better else measured >= goal


class Form:
    """Collects the points of one benchmark and writes them to `folder`."""

    def __init__(
        self,
        name: str,
        folder: Path = Path("build/bench"),
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.name = name
        self.points: list[Point] = []
        self._folder = folder
        self._clock_ns = clock_ns

    def seconds(self, work: Callable[[], object]) -> float:
        """How long one call takes; never zero, so it can be a divisor."""
        start = self._clock_ns()
        work()
        return max(1, self._clock_ns() - start) * 1e-9

    def note(
        self,
        metric: str,
        value: float,
        unit: str,
        *,
        goal: float | None = None,
        lower_is_better: bool = False,
    ) -> Point:
        """Record a value that was measured elsewhere and has no ceiling."""
        ok = _judge(value, goal, lower_is_better=lower_is_better)
        return self._add(Point(metric, value, unit, goal=goal, ok=ok))

    def compare(
        self,
        metric: str,
        unit: str,
        candidate: Callable[[], float],
        ceiling: Callable[[], float],
        *,
        goal: float | None = None,
        pairs: int = PAIRS_MIN,
        lower_is_better: bool = False,
    ) -> Point:
        """Run both in alternation and record medians; each call returns one value in `unit`.

        The order within a pair alternates, so that neither always benefits from the other's warm caches. The first
        pair is discarded.
        """
        if pairs < PAIRS_MIN:
            message = f"{metric}: {pairs} pairs are too few; at least {PAIRS_MIN}."
            raise ValueError(message)
        candidate()
        ceiling()
        values: list[float] = []
        ceilings: list[float] = []
        for turn in range(pairs):
            if turn % 2 == 0:
                values.append(candidate())
                ceilings.append(ceiling())
            else:
                ceilings.append(ceiling())
                values.append(candidate())
        return self.pairs(metric, unit, values, ceilings, goal=goal, lower_is_better=lower_is_better)

    def pairs(
        self,
        metric: str,
        unit: str,
        values: Sequence[float],
        ceilings: Sequence[float],
        *,
        goal: float | None = None,
        lower_is_better: bool = False,
    ) -> Point:
        """Record pairs that were measured elsewhere, in alternation."""
        if min(ceilings) <= 0:
            message = f"{metric}: the ceiling measured {min(ceilings)} {unit}; it has to be above 0."
            raise ValueError(message)
        ratio = statistics.median(a / b for a, b in zip(values, ceilings, strict=True))
        ok = _judge(ratio, goal, lower_is_better=lower_is_better)
        median, top = statistics.median(values), statistics.median(ceilings)
        return self._add(Point(metric, median, unit, top, ratio, goal, ok))

    def _add(self, point: Point) -> Point:
        if any(point.metric == other.metric for other in self.points):
            message = f"{self.name} has two points named {point.metric}."
            raise ValueError(message)
        self.points.append(point)
        return point

    def write(self, about: Mapping[str, object] | None = None) -> Path:
        """Write NAME.json, a plain list of points, and NAME.machine.json beside it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.name}.json"
        _replace(path, [dataclasses.asdict(point) for point in self.points])
        _replace(self._folder / f"{self.name}.machine.json", dict(about if about is not None else machine()))
        return path


def _replace(path: Path, document: object) -> None:
    """Write the whole file, or keep the old one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n")
    partial.replace(path)


def machine() -> dict[str, object]:
    """The properties of the machine that its numbers depend on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "time_unix_s": int(time.time()),
    }


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(points: Sequence[Point]) -> str:
    """The points, aligned for reading."""
    words = {True: "yes", False: "NO", None: "-"}
    head = ("metric", "value", "unit", "ceiling", "ratio", "goal", "ok")
    rows = [
        (
            point.metric,
            _number(point.value),
            point.unit,
            _number(point.ceiling),
            _number(point.ratio),
            _number(point.goal),
            words[point.ok],
        )
        for point in points
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    left = {0, 2, 6}
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)
