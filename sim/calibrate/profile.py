"""A machine's profile: all fits by name, in a TOML file; and the parameters that `curve` and `replay` take from it.

A name is part.what.count: `memory.copy.1`, `link.put.1` (one message alone), `link.put.train` (each of many),
`drive.read.8` (one with eight under way), `beside.link.1` (the bare link, measured in turns with the product),
`node.landed.train` (what the node adds to its link and drive).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from sim.calibrate.fit import Line, fit
from sim.parameter_files import read_toml
from sim.presets import Fit, Preset, Stages
from sim.units import OutOfRange, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sim.calibrate.samples import Measured, Sample
    from sim.curve import Direction

__all__ = [
    "DRIVE_DEPTH",
    "Beside",
    "Profile",
    "base_s",
    "cluster_values",
    "dump_profile",
    "fit_profile",
    "measured_preset",
    "read_profile",
    "together",
]

DRIVE_DEPTH = 8  # about as many as the store has in flight
OPERATIONS = ("landed", "written", "get")
TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Profile:
    """The fits of a machine."""

    lines: dict[str, Line]
    trigger_s: float  # the additional time of a put that waits for a flag
    machine: dict[str, Any]

    def line(self, name: str) -> Line:
        """A fit by its name."""
        if name not in self.lines:
            raise OutOfRange("the profile", f"without {name}", "fits", "all that calibrate run measures")
        return self.lines[name]

    def drive(self, way: str, depth: int) -> Line:
        """The drive's fit: of fio's random access if measured, otherwise of what was."""
        for name in (f"drive.rand{way}.{depth}", f"drive.{way}.{depth}"):
            if name in self.lines:
                return self.lines[name]
        return self.line(f"drive.{way}.{depth}")


def together(operation: str, count: str, link_s: float, drive_s: Callable[[str, int], float]) -> float:
    """The time of an operation on link and drive: in sequence for a single block, in parallel in a train."""
    if operation == "landed":
        return link_s
    way = "write" if operation == "written" else "read"
    if count == TRAIN:
        return max(link_s, drive_s(way, DRIVE_DEPTH) / DRIVE_DEPTH)
    return link_s + drive_s(way, 1)


def base_s(profile: Profile, operation: str, count: str, size_bytes: int) -> float:
    """The time of the bare link and drive beside a running node, by the profile."""
    link_s = profile.line(f"beside.link.{count}").seconds(size_bytes)
    return together(
        operation, count, link_s, lambda way, depth: profile.line(f"beside.{way}.{depth}").seconds(size_bytes)
    )


class Beside:
    """The bare link and drive, as they were measured in turns with the product."""

    def __init__(self, measured: Measured, part: str) -> None:
        found = _singles_and_trains(measured.of(part, "bare link"))
        self.points = {f"beside.link.{count}": dict(points) for count, points in found.items()}
        for way in ("write", "read"):
            for one in measured.of(part, f"bare {way}"):
                self.points.setdefault(f"beside.{way}.{one.count}", {})[one.size_bytes] = one.seconds

    def lines(self) -> dict[str, Line]:
        """Each of them as a line."""
        return {name: fit(sorted(points.items())) for name, points in self.points.items() if points}

    def base_s(self, operation: str, count: str, size_bytes: int) -> float:
        """The measured time of link and drive alone."""
        try:
            link_s = self.points[f"beside.link.{count}"][size_bytes]
            return together(
                operation, count, link_s, lambda way, depth: self.points[f"beside.{way}.{depth}"][size_bytes]
            )
        except KeyError as error:
            what = f"without what the bare link or drive took beside, {error}"
            raise OutOfRange(
                "the measurements", what, "measurements", "of kvstore bench node or path"
            ) from error

    def since(self, profile: Profile) -> dict[str, float]:
        """Time of link and drive divided by the fitted time; medians over the sizes."""
        ratios: dict[str, list[float]] = {"link.1": [], f"link.{TRAIN}": [], "drive": []}
        for name, points in self.points.items():
            where = name.removeprefix("beside.") if name.startswith("beside.link") else "drive"
            ratios[where] += [seconds / profile.line(name).seconds(size) for size, seconds in points.items()]
        return {name: statistics.median(found) if found else 1.0 for name, found in ratios.items()}


def _singles_and_trains(samples: list[Sample]) -> dict[str, list[tuple[int, float]]]:
    """(size, seconds a message) of messages alone, and of each but the first of a train."""
    alone = {one.size_bytes: one.seconds for one in samples if one.count == 1}
    trains = []
    for one in samples:
        if one.count > 1:
            first_s = alone.get(one.size_bytes, one.seconds)
            if first_s >= one.seconds:  # a single message wakes a napping thread; in a train it doesn't
                first_s = one.seconds / one.count
            trains.append((one.size_bytes, (one.seconds - first_s) / (one.count - 1)))
    return {"1": sorted(alone.items()), TRAIN: sorted(trains)}


def fit_profile(measured: Measured) -> Profile:
    """Fit everything that was measured."""
    lines: dict[str, Line] = {}
    for part, what in (("memory", "copy"), ("link", "put")):
        for count, points in _singles_and_trains(measured.of(part, what)).items():
            if points:
                lines[f"{part}.{what}.{count}"] = fit(points)
    drive = measured.of("drive")
    for way, depth in sorted({(one.what, one.count) for one in drive}):
        points = [(one.size_bytes, one.seconds) for one in drive if (one.what, one.count) == (way, depth)]
        lines[f"drive.{way}.{depth}"] = fit(points)
    profile = Profile(lines, _trigger_s(measured), measured.machine)
    beside = Beside(measured, "node")
    lines |= beside.lines()
    for operation in OPERATIONS:
        for count, points in _singles_and_trains(measured.of("node", operation)).items():
            if points:
                bases = [beside.base_s(operation, count, size) for size, _ in points]
                lines[f"node.{operation}.{count}"] = fit(points, bases)
    return profile


def _trigger_s(measured: Measured) -> float:
    """How much longer a put takes that waits for a flag; not below zero, which would be noise."""
    singles = {one.size_bytes: one.seconds for one in measured.of("link", "put") if one.count == 1}
    without = {one.size_bytes: one.seconds for one in measured.of("link", "untriggered") if one.count == 1}
    found = [singles[size] - seconds for size, seconds in without.items() if size in singles]
    return max(0.0, sum(found) / len(found)) if found else 0.0


def dump_profile(profile: Profile) -> str:
    """As TOML."""

    def value(given: object) -> str:
        if isinstance(given, str):
            return '"' + given.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return repr(given)

    parts = [
        "# What `kvsim calibrate fit` found: seconds = latency_s + s_per_byte * size_bytes, within the range.",
        "",
    ]
    parts += ["[machine]", *(f"{name} = {value(given)}" for name, given in profile.machine.items()), ""]
    parts += ["[trigger]", f"seconds = {profile.trigger_s!r}", ""]
    for name, line in profile.lines.items():
        parts += [f'[line."{name}"]', *(f"{key} = {value(given)}" for key, given in asdict(line).items()), ""]
    return "\n".join(parts)


def _line(source: str, name: str, table: Mapping[str, Any]) -> Line:
    wanted = [field.name for field in fields(Line)]
    given = {key: table.get(key) for key in wanted}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise OutOfRange(f"{source}, {name}, {key}", repr(value), "a number", "from 0")
    return Line(**given)  # type: ignore[arg-type]


def read_profile(path: Path) -> Profile:
    """Read what `dump_profile` wrote."""
    document = read_toml("--profile", path)
    try:
        lines = {name: _line(str(path), name, table) for name, table in document["line"].items()}
        return Profile(lines, float(document["trigger"]["seconds"]), dict(document.get("machine", {})))
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise OutOfRange(
            "--profile", str(path), "a profile", "such as `kvsim calibrate fit` writes"
        ) from error


def measured_preset(profile: Profile, direction: Direction) -> Preset:
    """Both paths over the measured link and drive; the CPU's has the measured copy beside."""
    link, copy = profile.line("link.put.1"), profile.line("memory.copy.1")
    drive = profile.drive("write" if direction == "put" else "read", 1)
    nvme = Fit(1 / max(drive.s_per_byte, 1e-15), 0.0, drive.latency_s, 0.0)
    smallest = max(line.size_bytes_min for line in (link, copy, drive))
    largest = min(line.size_bytes_max for line in (link, copy, drive))
    return Preset(
        "measured",
        f"fitted from a machine of {profile.machine.get('cores', '?')} cores, {profile.machine.get('kernel', '?')}",
        ("everything: it is measured, not printed",),
        (
            f"Measured from {format_bytes(smallest)} to {format_bytes(largest)}; beyond it, the same rate.",
            "Both paths use the same link, whose latency holds the trigger; the CPU's adds one copy in memory.",
            (
                f"Median error of the fits: link {100 * link.error_median:.0f} %, copy {100 * copy.error_median:.0f} %,"
                f" drive {100 * drive.error_median:.0f} %."
            ),
        ),
        stages=Stages(
            pcie_s_per_byte=0.0,
            vram_s_per_byte=0.0,
            cpu_s_per_byte=copy.s_per_byte,
            dram_s_per_byte=0.0,
            nic_serialisation_s_per_byte=link.s_per_byte,
            pcie_latency_s=0.0,
            network_latency_s=link.latency_s,
            nvme_write=nvme,
            nvme_read=nvme,
        ),
        nic_inner_stages=False,
        dram_passes=0,
        cpu_copies=1,
        cpu_message_s=copy.latency_s,
        nvme_latency_unit_s=1.0,
    )


def cluster_values(profile: Profile) -> dict[str, float]:
    """The cluster's numbers that a profile contains; the others stay."""
    link, train = profile.line("link.put.1"), profile.line("link.put.train")
    copy = profile.line("memory.copy.1")
    write, read = (profile.drive(way, DRIVE_DEPTH) for way in ("write", "read"))
    first_write, first_read = (profile.drive(way, 1) for way in ("write", "read"))

    def rate(s_per_byte: float) -> float:
        return 1 / max(s_per_byte, 1e-15)

    return {
        "link_bits_per_s": 8 * rate(train.s_per_byte),
        "link_latency_s": max(0.0, link.latency_s - train.latency_s - profile.trigger_s),
        "nic_message_s": train.latency_s,
        "trigger_message_s": profile.trigger_s,
        "host_copy_bytes_per_s": rate(copy.s_per_byte),
        "cpu_message_s": copy.latency_s,
        "drive_write_bytes_per_s": DRIVE_DEPTH * rate(write.s_per_byte),
        "drive_read_bytes_per_s": DRIVE_DEPTH * rate(read.s_per_byte),
        "drive_message_s": (write.latency_s + read.latency_s) / 2 / DRIVE_DEPTH,
        "drive_write_latency_s": first_write.latency_s,
        "drive_read_latency_s": first_read.latency_s,
    }
