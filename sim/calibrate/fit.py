"""Fits `seconds = a + m * b` to measurements, weighted by relative error.

Plain least squares would fit the largest messages only, and be wrong by a factor of ten at small ones; here each
point counts by its relative error. What always holds: neither number is negative; the measured range and the errors
are stored with the fit; it is not extrapolated: smaller messages take as long as the smallest one measured, larger
ones go at the rate of the largest.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Line", "fit"]


@dataclass(frozen=True, slots=True)
class Line:
    """A fit, its range and its errors."""

    latency_s: float
    s_per_byte: float
    size_bytes_min: int
    size_bytes_max: int
    error_median: float  # share of the measured time
    error_max: float
    points: int

    def seconds(self, size_bytes: float) -> float:
        """How long a message takes."""
        if size_bytes > self.size_bytes_max:
            return self.seconds(self.size_bytes_max) * size_bytes / self.size_bytes_max
        return self.latency_s + self.s_per_byte * max(size_bytes, self.size_bytes_min)


def _solve(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The best `a, b >= 0` for (m, seconds, weight)."""
    w = sum(weight for _, _, weight in points)
    wm = sum(weight * m for m, _, weight in points)
    wmm = sum(weight * m * m for m, _, weight in points)
    wt = sum(weight * t for _, t, weight in points)
    wmt = sum(weight * m * t for m, t, weight in points)
    determinant = w * wmm - wm * wm
    if determinant > 1e-12 * w * wmm:
        slope = (w * wmt - wm * wt) / determinant
        latency = (wt - slope * wm) / w
        if slope >= 0 and latency >= 0:
            return latency, slope
        if latency < 0:
            return 0.0, max(0.0, wmt / wmm)
    return max(0.0, wt / w), 0.0


def fit(points: Sequence[tuple[int, float]], bases_s: Sequence[float] | None = None) -> Line:
    """Fit (size, seconds); with bases, fit the time above them, with errors relative to the whole time."""
    bases = list(bases_s or [0.0] * len(points))
    rows = [(float(m), t - base, 1 / (t * t)) for (m, t), base in zip(points, bases, strict=True)]
    latency_s, s_per_byte = _solve(rows)
    errors = [
        abs(base + latency_s + s_per_byte * m - t) / t for (m, t), base in zip(points, bases, strict=True)
    ]
    sizes = [m for m, _ in points]
    return Line(
        latency_s, s_per_byte, min(sizes), max(sizes), statistics.median(errors), max(errors), len(points)
    )
