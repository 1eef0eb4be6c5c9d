"""Compares a profile's predictions with measurements through a running node, at sizes it was not fitted at.

A shared machine may be twice as fast in one minute as in the next. So the bare link and drive are measured in turns
with the path. A prediction combines their times as the model does, and adds what the node adds according to the
profile. The prediction from the profile alone, with its own link and drive, is shown as well.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

from sim.calibrate.profile import OPERATIONS, TRAIN, Beside, base_s
from sim.svg import COLOURS, Chart, Series, bytes_label, figure, seconds_label
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.calibrate.profile import Profile
    from sim.calibrate.samples import Measured

__all__ = ["ERROR_MEDIAN_MAX", "Compared", "compare", "error_median", "plot", "predict"]

ERROR_MEDIAN_MAX = 0.25


class Compared(NamedTuple):
    """One measured point and its prediction."""

    operation: str
    size_bytes: int
    blocks: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Share of the measured time by which the prediction is off; below 0 if it is too short."""
        return self.predicted_s / self.measured_s - 1


def predict(
    profile: Profile, operation: str, size_bytes: int, blocks: int, beside: Beside | None = None
) -> float:
    """Seconds until the last of `count` blocks: the first alone, each other as one of a train."""

    def one_s(count: str) -> float:
        added_s = profile.line(f"node.{operation}.{count}").seconds(size_bytes)
        if beside is None:
            return base_s(profile, operation, count, size_bytes) + added_s
        return beside.base_s(operation, count, size_bytes) + added_s

    return one_s("1") + ((blocks - 1) * one_s(TRAIN) if blocks > 1 else 0.0)


def compare(profile: Profile, measured: Measured, *, alone: bool = False) -> list[Compared]:
    """Every measured point of the path; `alone` is predicted from the profile only."""
    beside = None if alone else Beside(measured, "path")
    found = [
        Compared(
            one.what,
            one.size_bytes,
            one.count,
            predict(profile, one.what, one.size_bytes, one.count, beside),
            one.seconds,
        )
        for one in measured.of("path")
        if one.what in OPERATIONS
    ]
    if not found:
        accepted = "of kvstore bench path"
        raise OutOfRange("the measurements", "without any of the path", "measurements", accepted)
    return found


def error_median(found: Sequence[Compared]) -> float:
    """Median of the absolute errors."""
    return statistics.median(abs(one.error) for one in found)


def plot(found: Sequence[Compared]) -> str:
    """Predicted and measured side by side, for single blocks and for trains."""
    charts = []
    for title, many in (("one block", False), ("each of a train of blocks", True)):
        series = []
        for operation, colour in zip(OPERATIONS, COLOURS, strict=False):
            points = [one for one in found if one.operation == operation and (one.blocks > 1) == many]
            sizes = [float(one.size_bytes) for one in points]
            measured = [one.measured_s / one.blocks for one in points]
            predicted = [one.predicted_s / one.blocks for one in points]
            series += [
                Series(operation, sizes, predicted, colour=colour),
                Series("", sizes, measured, colour=colour, points=True),
            ]
        charts.append(
            Chart(
                f"Put and get: {title}",
                "block size",
                "seconds a block; dots are measured",
                series,
                x_log=True,
                y_log=True,
                x_format=bytes_label,
                y_format=seconds_label,
            )
        )
    share = 100 * error_median(found)
    return figure(
        charts, caption=(f"Median error {share:.0f} % over {len(found)} points; the goal is 25 %.",)
    )
