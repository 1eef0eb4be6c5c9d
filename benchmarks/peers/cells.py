"""The cells of a comparison: each has the rounds of one contender, shape and operation; and the table of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.peers.client_process import Timed

__all__ = ["CONTENDERS", "KINDS", "SHAPES", "Cell", "Cells", "Shape", "label", "table"]

KIB, MIB = 1 << 10, 1 << 20
KINDS = ("landed", "written", "hot", "cold")
CONTENDERS = ("us", "redis", "redis, everysec", "fabric", "drive")


def label(size: int) -> str:
    """A size for people."""
    return f"{size // MIB}M" if size >= MIB else f"{size // KIB}K"


class Shape(NamedTuple):
    """How blocks of one size are moved: `batch` per call, `window` calls under way, and a number of calls per round."""

    name: str
    size: int
    batch: int
    window: int
    calls: int

    @property
    def bytes(self) -> int:
        return self.size * self.batch * self.calls

    @property
    def title(self) -> str:
        how = {"one": "one at a time", "eight": "eight in flight"}.get(self.name, f"batches of {self.batch}")
        return f"{label(self.size)}, {how}"


SHAPES: dict[int, tuple[Shape, ...]] = {
    size: (
        Shape("one", size, 1, 1, one),
        Shape("eight", size, 1, 8, eight),
        Shape("batch", size, batch, 1, batches),
    )
    for size, one, eight, batch, batches in (
        (32 * KIB, 200, 256, 64, 6),
        (256 * KIB, 64, 96, 32, 4),
        (MIB, 32, 48, 16, 3),
        (4 * MIB, 10, 16, 8, 2),
        (16 * MIB, 4, 8, 4, 2),
    )
}


@dataclass
class Cell:
    """One contender and operation: its rounds, and the calls of all of them."""

    gbps: list[float] = field(default_factory=list)
    calls_us: list[float] = field(default_factory=list)
    client_s_per_gb: list[float] = field(default_factory=list)
    server_s_per_gb: list[float] = field(default_factory=list)

    def took(self, total_bytes: int, timed: Timed, server_ns: int | None) -> None:
        """Record a round of calls."""
        self.gbps.append(total_bytes / (timed.end_ns - timed.begin_ns))
        self.calls_us += [one / 1e3 for one in timed.calls_ns]
        self.client_s_per_gb.append(timed.cpu_ns / total_bytes)
        if server_ns is not None:
            self.server_s_per_gb.append(server_ns / total_bytes)

    def quantile_us(self, share: float) -> float:
        """The quantile of the times of all calls."""
        ordered = sorted(self.calls_us)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

    def summary(self) -> dict[str, float]:
        """Medians of the rounds, and quantiles of all calls."""
        found = {"gbps": statistics.median(self.gbps)}
        if self.calls_us:
            found |= {"p50_us": self.quantile_us(0.5), "p99_us": self.quantile_us(0.99)}
        for name, values in (("client", self.client_s_per_gb), ("server", self.server_s_per_gb)):
            if values:
                found[f"{name}_cpu_s_per_gb"] = statistics.median(values)
        return {name: float(f"{value:.4g}") for name, value in found.items()}


class Cells:
    """All of them, by contender, shape and kind."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, Shape, str], Cell] = {}

    def at(self, who: str, shape: Shape, kind: str) -> Cell:
        """The cell, created if it is new."""
        return self._cells.setdefault((who, shape, kind), Cell())

    def get(self, who: str, shape: Shape, kind: str) -> Cell | None:
        """The cell, if anything was measured in it."""
        return self._cells.get((who, shape, kind))

    def listed(self) -> list[dict[str, object]]:
        """All cells, for programs."""
        return [
            {
                "contender": who,
                "block_bytes": shape.size,
                "shape": shape.title,
                "kind": kind,
                **cell.summary(),
            }
            for (who, shape, kind), cell in self._cells.items()
        ]


_HEAD = ("", "GB/s", "p50 us", "p99 us", "CPU client", "server, s/GB")
_KEYS = ("gbps", "p50_us", "p99_us", "client_cpu_s_per_gb", "server_cpu_s_per_gb")


def table(cells: Cells, shapes: Iterable[Shape]) -> str:
    """All cells, one line per contender and operation."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for shape in shapes:
        for kind in KINDS:
            found = [(who, cell) for who in CONTENDERS if (cell := cells.get(who, shape, kind)) is not None]
            if found:
                rows.append((f"{shape.title}, {kind}", *[""] * (len(_HEAD) - 1)))
            for who, cell in found:
                summary = cell.summary()
                rows.append((f"  {who}", *(_number(summary.get(key)) for key in _KEYS)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = (
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
