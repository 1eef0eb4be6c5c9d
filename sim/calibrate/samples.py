"""Measurements in a JSON file, which can be kept, shared and fitted again.

What always holds: seconds are those of one run of `count` messages (for a drive: of one message with `count` under
way). A file in which something is missing is refused with the name of the missing part.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sim.parameter_files import read_text
from sim.units import OutOfRange

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Measured", "Sample", "dump", "parse", "read_measured"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One point."""

    part: str  # memory, link, drive, node, path
    what: str
    size_bytes: int
    count: int
    seconds: float
    seconds_min: float  # of the runs, or the median of a drive's operations
    seconds_max: float  # of the runs, or the 99th percentile of a drive's operations


@dataclass(frozen=True, slots=True)
class Measured:
    """All points of a machine, and its description."""

    machine: dict[str, Any]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()  # what could not be measured, and why

    def of(self, part: str, what: str | None = None) -> list[Sample]:
        """The points of a part."""
        return [one for one in self.samples if one.part == part and what in {None, one.what}]


def parse(text: str, source: str) -> Measured:
    """Read the JSON that `kvstore bench --json` and `kvsim calibrate run` write."""
    try:
        document = json.loads(text)
        samples = tuple(Sample(**row) for row in document["samples"])
        found = Measured(dict(document.get("machine", {})), samples, tuple(document.get("notes", ())))
    except (ValueError, KeyError, TypeError) as error:
        raise OutOfRange(
            source, f"unreadable ({error!r})", "measurements", "as kvstore bench --json"
        ) from error
    for one in samples:
        if not (one.size_bytes > 0 and one.count > 0 and one.seconds > 0):
            what = f"{one.part}, {one.what}: {one.size_bytes} B, {one.count}, {one.seconds} s"
            raise OutOfRange(source, what, "measurements", "sizes, counts and seconds above 0")
    return found


def read_measured(parameter: str, path: Path) -> Measured:
    """Read a file of measurements."""
    return parse(read_text(parameter, path), str(path))


def dump(measured: Measured) -> str:
    """Write a file of measurements."""
    document = {
        "machine": measured.machine,
        "notes": measured.notes,
        "samples": [asdict(one) for one in measured.samples],
    }
    return json.dumps(document, indent=1) + "\n"
