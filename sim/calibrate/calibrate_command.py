"""`kvsim calibrate run | fit | check`: measure this machine, fit a profile, compare it with the product.

Other programs measure, fio and `kvstore bench`, so nothing here needs a fabric.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.progress import bar
from sim.calibrate import check, fio
from sim.calibrate.profile import DRIVE_DEPTH, Beside, dump_profile, fit_profile, read_profile
from sim.calibrate.samples import Measured, Sample, dump, parse, read_measured
from sim.output import as_json, save, save_plot, table
from sim.svg import COLOURS, Chart, Series, bytes_label, figure, seconds_label
from sim.units import OutOfRange, format_bytes, require

if TYPE_CHECKING:
    import argparse

    from sim.calibrate.profile import Profile

__all__ = ["run_check", "run_fit", "run_run"]

_TIMEOUT_S = 900


def _kvstore_bench(parts: list[str], data: Path) -> Measured:
    """The measurements of `kvstore bench` for some parts."""
    command = [sys.executable, "-m", "kvstore", "bench", *parts, "--data", str(data), "--json"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"still measuring after {_TIMEOUT_S} s"
        raise OutOfRange("kvstore bench", what, "a machine", "that is not overwhelmed") from error
    if done.returncode:
        accepted = "on which `kvstore doctor` finds nothing missing"
        raise OutOfRange("kvstore bench", f"failing with status {done.returncode}", "a machine", accepted)
    return parse(done.stdout, "kvstore bench")


def run_run(arguments: argparse.Namespace) -> str:
    """Measure, and write the measurements to a file."""
    data = Path(arguments.data)
    require("--runtime-ms", arguments.runtime_ms, "milliseconds a point", 50, 60_000)
    if not data.is_dir():
        raise OutOfRange("--data", str(data), "a folder", "on the drive that is to be measured")
    program = fio.find()
    parts = ["memory", "link", "node"] if program else ["memory", "link", "drive", "node"]
    measured = _kvstore_bench(parts, data)
    if program is None:
        note = "fio is not installed: the drive was measured by the project's own io_uring loop"
        measured = replace(measured, notes=(*measured.notes, note))
    else:
        found = list(fio.sweep(program, data, arguments.runtime_ms, bar("fio, the drive")))
        measured = replace(
            measured,
            samples=(*measured.samples, *(one for one in found if isinstance(one, Sample))),
            notes=(*measured.notes, *(one for one in found if isinstance(one, str))),
        )
    notes = "".join(f"\n  - {note}" for note in measured.notes)
    what = f"{len(measured.samples)} points measured" + (f"; left out:{notes}" if notes else "")
    return what + save("--out", Path(arguments.out), dump(measured))


def _fits_plot(profile: Profile, measured: Measured) -> str:
    """The paper's Fig. 4 for this machine: the drive's measurements, and the fit."""
    charts = []
    for way in dict.fromkeys(one.what for one in measured.of("drive")):
        series = []
        for depth, colour in zip((1, DRIVE_DEPTH, 32), COLOURS, strict=False):
            points = [one for one in measured.of("drive", way) if one.count == depth]
            name = f"drive.{way}.{depth}"
            if points and name in profile.lines:
                sizes = [float(one.size_bytes) for one in points]
                line = profile.lines[name]
                series += [
                    Series(
                        f"depth {depth}, fitted", sizes, [line.seconds(size) for size in sizes], colour=colour
                    ),
                    Series("", sizes, [one.seconds for one in points], colour=colour, points=True),
                ]
        charts.append(
            Chart(
                f"Drive: {way}",
                "message size",
                "seconds a message; dots are measured",
                series,
                x_log=True,
                y_log=True,
                x_format=bytes_label,
                y_format=seconds_label,
            )
        )
    return figure(charts)


def run_fit(arguments: argparse.Namespace) -> str:
    """Fit, and write the profile."""
    measured = read_measured("MEASURED", Path(arguments.measured))
    profile = fit_profile(measured)
    saved = save("--out", Path(arguments.out), dump_profile(profile))
    if arguments.plot:
        saved += save_plot("--plot", Path(arguments.plot), _fits_plot(profile, measured))
    rows = [
        (
            name,
            seconds_label(line.latency_s),
            f"{bytes_label(1 / line.s_per_byte)}/s" if line.s_per_byte else "-",
            f"{100 * line.error_median:.0f} %",
            f"{100 * line.error_max:.0f} %",
            f"{format_bytes(line.size_bytes_min)} to {format_bytes(line.size_bytes_max)}",
        )
        for name, line in profile.lines.items()
    ]
    head = ("fit", "a", "1/b", "median error", "largest", "range")
    return f"{table(head, rows, left=(0,))}\n\ntrigger {seconds_label(profile.trigger_s)}{saved}"


def run_check(arguments: argparse.Namespace) -> str:
    """Compare with the product's path, measured now or before."""
    profile = read_profile(Path(arguments.profile))
    if arguments.measured:
        measured = read_measured("--measured", Path(arguments.measured))
    else:
        measured = _kvstore_bench(["path"], Path(arguments.data))
    since = Beside(measured, "path").since(profile)
    found = check.compare(profile, measured)
    median, alone = (
        check.error_median(found),
        check.error_median(check.compare(profile, measured, alone=True)),
    )
    good = median <= check.ERROR_MEDIAN_MAX
    if arguments.as_json:
        rows = [one._asdict() | {"error": one.error} for one in found]
        medians = {"error_median": median, "error_median_alone": alone}
        return as_json({"points": rows, **medians, "since": since, "ok": good})
    saved = save_plot("--plot", Path(arguments.plot), check.plot(found)) if arguments.plot else ""
    cells = [
        (
            one.operation,
            format_bytes(one.size_bytes),
            f"{one.blocks:,}",
            seconds_label(one.predicted_s),
            seconds_label(one.measured_s),
            f"{100 * one.error:+.0f} %",
        )
        for one in found
    ]
    verdict = "within" if good else "NOT WITHIN"
    head = ("", "block", "blocks", "predicted", "measured", "off by")
    goal = f"{100 * check.ERROR_MEDIAN_MAX:.0f} %"
    now = ", ".join(f"{name} {ratio:.2f}" for name, ratio in since.items())
    return (
        f"{table(head, cells, left=(0,))}\n\nmedian error {100 * median:.0f} %: {verdict} {goal}{saved}\n"
        "Predicted from the bare link and drive, measured in turns with it, and what the profile says the node adds.\n"
        f"The profile alone is off by {100 * alone:.0f} %; link and drive took this many times as long as there: {now}."
    )
