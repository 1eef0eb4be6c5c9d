"""`kvsim curve`: the two paths by size, as a table, CSV, JSON, stage by stage, or as the paper's Figs. 5 to 7.

What always holds: the preset's caveats come with the numbers, and the fair preset's S is shown beside every
other's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim import curve, hardware, parameters, presets, units
from sim.output import as_csv, as_json, save_plot, table
from sim.svg import COLOURS, Chart, Series, bytes_label, figure, seconds_label

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from sim.presets import Preset

__all__ = ["figures", "run"]

_MB, _TB = 10**6, 10**12
_FIG_5 = sorted({32_000 * 2**i for i in range(14)} | {512 * _MB})
_FIG_6 = [m * _TB // 10 for m in (5, 10, 15, 20, 25, 30, 35, 40, 45, 50)]
_FIG_7 = [32_000 * 2**i for i in range(28)] + [5 * _TB]


def _preset(arguments: argparse.Namespace) -> Preset:
    if arguments.preset == "measured":
        from sim.calibrate.profile import measured_preset, read_profile  # noqa: PLC0415 - only this preset needs it

        if arguments.profile is None:
            raise units.OutOfRange(
                "--profile", "not given", "a profile for --preset measured", "made by `kvsim calibrate fit`"
            )
        chosen = measured_preset(read_profile(Path(arguments.profile)), arguments.direction)
    else:
        if arguments.profile is not None:
            accepted = "with --preset measured only"
            raise units.OutOfRange("--profile", arguments.profile, "a profile", accepted)
        chosen = presets.preset(arguments.preset)
    assignments = list(arguments.set or ())
    if chosen.name == "fair":
        chosen, assignments = _fair(assignments)
    return parameters.override(chosen, assignments)


def _fair(assignments: Sequence[str]) -> tuple[Preset, list[str]]:
    """The fair preset with other speeds, named as in a cluster, and the remaining settings."""
    pairs = [(name.strip(), value) for name, _, value in (text.partition("=") for text in assignments)]
    speeds = [(name, value) for name, value in pairs if name in hardware.SPREADS and value]
    names = {name for name, _ in speeds}
    chosen = presets.fair(hardware.changed(hardware.HARDWARE, speeds, "--set"))
    notes = [
        f"Changed by --set: {name} = {float(value):g} (the preset has {getattr(hardware.HARDWARE, name):g})."
        for name, value in speeds
    ]
    chosen = dataclasses.replace(chosen, caveats=(*chosen.caveats, *notes))
    return chosen, [text for text in assignments if text.partition("=")[0].strip() not in names]


_RANGE_SIZES = (32_000, 10**6, 512 * 10**6)


def _spreads(
    arguments: argparse.Namespace, setting: curve.Setting
) -> tuple[list[dict[str, Any]], Sequence[int]]:
    """S of the fair preset with each speed at the ends of its range, most influential first."""
    sizes = [units.parse_bytes("--size", text) for text in arguments.size or ()] or _RANGE_SIZES

    def speedups(name: str, value: float) -> list[float]:
        entry = presets.fair(hardware.changed(hardware.HARDWARE, [(name, value)], "--set"))
        return [p.speedup for p in curve.curve(entry, sizes, setting)]

    rows = [
        {
            "parameter": name,
            "value": getattr(hardware.HARDWARE, name),
            "low": spread.low,
            "high": spread.high,
            "source": spread.source,
            "speedups_low": speedups(name, spread.low),
            "speedups_high": speedups(name, spread.high),
        }
        for name, spread in hardware.SPREADS.items()
    ]
    rows.sort(
        key=lambda row: max(
            abs(a - b) for a, b in zip(row["speedups_low"], row["speedups_high"], strict=True)
        ),
        reverse=True,
    )
    return rows, sizes


def _ranges(arguments: argparse.Namespace, setting: curve.Setting) -> str:
    """The command's output about them."""
    rows, sizes = _spreads(arguments, setting)
    names = [units.format_bytes(size) for size in sizes]
    if arguments.as_json:
        return as_json({"sizes_bytes": sizes, "direction": setting.direction, "parameters": rows})
    if arguments.as_csv:
        head = ["parameter", "value", "low", "high", "source"]
        ends = [f"speedup_{end}_{name}" for end in ("low", "high") for name in names]
        lines = [[*(row[name] for name in head), *row["speedups_low"], *row["speedups_high"]] for row in rows]
        return as_csv([*head, *ends], lines)
    cells = [
        (
            row["parameter"],
            f"{row['value']:g}",
            f"{row['low']:g} to {row['high']:g}",
            *(f"{a:.2f} to {b:.2f}" for a, b in zip(row["speedups_low"], row["speedups_high"], strict=True)),
            row["source"],
        )
        for row in rows
    ]
    now = ", ".join(
        f"{p.speedup:.2f} at {name}"
        for p, name in zip(curve.curve(presets.preset("fair"), sizes, setting), names, strict=True)
    )
    columns = ("parameter", "value", "range", *(f"S, {name}" for name in names), "where the value comes from")
    most = [
        max(rows, key=lambda row: abs(row["speedups_low"][i] - row["speedups_high"][i]))["parameter"]
        for i in range(len(sizes))
    ]
    decides = "; ".join(f"{parameter} at {name}" for parameter, name in zip(most, names, strict=True))
    return (
        f"preset fair, {setting.direction}: S is {now}.\nWith one number at the ends of its range, the rest as it is:"
        f"\n\n{table(columns, cells, left=(0, 3 + len(names)))}\n\nDecides most: {decides}."
    )


def _listing() -> str:
    rows = [(entry.name, entry.summary) for entry in presets.PRESETS.values()]
    rows.append(("measured", "fitted from a machine by `kvsim calibrate`; needs --profile"))
    return "\n".join(f"{name:16} {summary}" for name, summary in rows)


def _parameters(chosen: Preset) -> str:
    rows = []
    for entry in parameters.PARAMETERS.values():
        value = parameters.value_of(chosen, entry.name)
        shown = "no bound" if value is None else f"{value:g}"
        rows.append((entry.name, shown, entry.unit, f"{entry.low:g} to {entry.high:g}"))
    return table(("parameter", "value", "unit", "accepted"), rows, left=(0, 2))


def figures(chosen: Preset, setting: curve.Setting) -> str:
    """Fig. 5: times and S to a few hundred MB. Fig. 6: times at terabytes. Fig. 7: S over all sizes."""

    def charts(name: str, sizes: Sequence[int], *, x_log: bool) -> dict[str, Chart]:
        points = curve.curve(chosen, sizes, setting)
        fair = curve.curve(presets.preset("fair"), sizes, setting)
        ratio = [Series(f"S, {chosen.name}", sizes, [p.speedup for p in points], marked=True)]
        if chosen.name != "fair":
            fair_s = [p.speedup for p in fair]
            ratio.append(Series("S, fair", sizes, fair_s, dashed=True, colour=COLOURS[2]))
        seconds = [
            Series("CPU-initiated", sizes, [p.cpu_s for p in points], marked=True, colour=COLOURS[1]),
            Series("triggered", sizes, [p.triggered_s for p in points], marked=True, colour=COLOURS[0]),
        ]
        return {
            "S": Chart(
                f"{name}: how many times longer the CPU's way takes",
                "transfer size",
                "S = CPU time / triggered time",
                ratio,
                x_log=x_log,
                x_format=bytes_label,
                y_format=lambda v: f"{v:g}",
                y_from_zero=True,
                rules=[(1.0, "S = 1: no gain")],
            ),
            "time": Chart(
                f"{name}: time of one {setting.direction}",
                "transfer size",
                "seconds",
                seconds,
                x_log=x_log,
                y_log=x_log,
                x_format=bytes_label,
                y_format=seconds_label,
                y_from_zero=True,
            ),
        }

    few = charts("Fig. 5, 32 KB to 512 MB", _FIG_5, x_log=True)
    panels = [
        few["S"],
        few["time"],
        charts("Fig. 7, 32 KB to 5 TB", _FIG_7, x_log=True)["S"],
        charts("Fig. 6, 0.5 TB to 5 TB", _FIG_6, x_log=False)["time"],
    ]
    head = f"Preset {chosen.name}, {setting.direction}, messages of {units.format_bytes(setting.chunk_bytes)} at most."
    return figure(panels, caption=(head, *chosen.caveats))


def _stage_rows(
    chosen: Preset, sizes: Sequence[int], setting: curve.Setting
) -> list[tuple[str, str, float, float]]:
    return [
        (units.format_bytes(size), cost.stage, cost.cpu_s, cost.triggered_s)
        for size in sizes
        for cost in curve.stages(chosen, size, setting)
        if cost.cpu_s or cost.triggered_s
    ]


def _stage_table(chosen: Preset, sizes: Sequence[int], setting: curve.Setting) -> str:
    blocks = []
    for size in sizes:
        whole = curve.point(chosen, size, setting)
        rows = [
            (
                stage,
                units.format_seconds(cpu_s) if cpu_s else "-",
                f"{100 * cpu_s / whole.cpu_s:.1f} %" if cpu_s else "-",
                units.format_seconds(triggered_s) if triggered_s else "-",
                f"{100 * triggered_s / whole.triggered_s:.1f} %" if triggered_s else "-",
            )
            for _, stage, cpu_s, triggered_s in _stage_rows(chosen, [size], setting)
        ]
        total = ("all", units.format_seconds(whole.cpu_s), "", units.format_seconds(whole.triggered_s), "")
        title = f"{units.format_bytes(size)}, S = {whole.speedup:.2f}"
        blocks.append(
            title + "\n" + table(("stage", "CPU s", "", "triggered s", ""), [*rows, total], left=(0,))
        )
    return "\n\n".join(blocks)


def run(arguments: argparse.Namespace) -> str:
    """The command's output."""
    if arguments.preset == "?":
        return _listing()
    chosen = _preset(arguments)
    if arguments.parameters:
        return _parameters(chosen)
    setting = curve.Setting(
        direction=arguments.direction,
        chunk_bytes=units.parse_bytes("--chunk", arguments.chunk),
        trigger_us=arguments.trigger_us,
        drives=arguments.drives,
    )
    return _ranges(arguments, setting) if arguments.ranges else _curve(arguments, chosen, setting)


def _curve(arguments: argparse.Namespace, chosen: Preset, setting: curve.Setting) -> str:
    sizes = [units.parse_bytes("--size", text) for text in arguments.size or ()] or curve.SIZES_BYTES
    points = curve.curve(chosen, sizes, setting)
    fair = [p.speedup for p in curve.curve(presets.preset("fair"), sizes, setting)]
    saved = ""
    if arguments.plot is not None:
        saved = save_plot("--plot", Path(arguments.plot), figures(chosen, setting))
    if arguments.as_json:
        rows = [
            {
                "size_bytes": p.size_bytes,
                "cpu_s": p.cpu_s,
                "triggered_s": p.triggered_s,
                "speedup": p.speedup,
                "fair_speedup": fair_speedup,
                "stages": [cost._asdict() for cost in curve.stages(chosen, p.size_bytes, setting)],
            }
            for p, fair_speedup in zip(points, fair, strict=True)
        ]
        document = {"preset": chosen.name, "direction": setting.direction, "points": rows}
        return as_json({**document, "extras": chosen.extras, "caveats": chosen.caveats})
    if arguments.as_csv:
        # A file of numbers has no room for sentences: the caveats are comments in it.
        notes = "".join(f"# {note}\n" for note in (f"preset {chosen.name}", *chosen.caveats))
        if arguments.stages:
            return notes + as_csv(
                ("size", "stage", "cpu_s", "triggered_s"), _stage_rows(chosen, sizes, setting)
            )
        lines = [
            (p.size_bytes, p.cpu_s, p.triggered_s, p.speedup, f) for p, f in zip(points, fair, strict=True)
        ]
        return notes + as_csv(("size_bytes", "cpu_s", "triggered_s", "speedup", "fair_speedup"), lines)
    head = f"preset {chosen.name}, {setting.direction}: {chosen.summary}\n\n"
    if arguments.stages:
        body = _stage_table(chosen, sizes, setting)
    else:
        cells = [
            (
                units.format_bytes(p.size_bytes),
                units.format_seconds(p.cpu_s),
                units.format_seconds(p.triggered_s),
                f"{p.speedup:.2f}",
                f"{fair_speedup:.2f}",
            )
            for p, fair_speedup in zip(points, fair, strict=True)
        ]
        columns = 4 if chosen.name == "fair" else 5
        titles = ("D", "CPU s", "triggered s", "S", "S fair")
        body = table(titles[:columns], [row[:columns] for row in cells])
    notes = "\n".join(f"  - {caveat}" for caveat in chosen.caveats)
    return f"{head}{body}\n\nRead this with it:\n{notes}{saved}"
