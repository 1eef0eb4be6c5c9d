"""`kvstore bench`: measures this machine, part by part and as a whole; prints a table, or JSON for `kvsim`."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcli.progress import bars
from kvstore.bench.measure import PARTS, measure
from kvstore.demo.terminal import say, table
from kvstore.errors import ConfigError
from kvstore.writable_folder import writable_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.bench.measure import Sample

__all__ = ["run"]


def _machine() -> dict[str, object]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def _row(sample: Sample) -> tuple[str, ...]:
    moved = sample.size_bytes * sample.count
    spread = f"{sample.seconds_min * 1e6:,.0f} to {sample.seconds_max * 1e6:,.0f}"
    return (
        sample.part,
        sample.what,
        f"{sample.size_bytes // 1024:,}",
        f"{sample.count:,}",
        f"{sample.seconds * 1e6:,.0f}",
        spread,
        f"{moved / sample.seconds / 1e9:.3g}",
    )


def run(parts: Sequence[str], data: Path, *, as_json: bool) -> int:
    """Measure the parts that are named, or all of them."""
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"{part!r} is not a part; choose from {', '.join(PARTS)}.")
    if not data.is_dir():
        raise ConfigError(f"{data} is not a folder; name one on the drive to measure.")
    writable_folder(data)
    machine = _machine()
    with bars() as progress:
        samples = measure(list(dict.fromkeys(parts)) or list(PARTS), data, progress)
    if as_json:
        say(json.dumps({"machine": machine, "samples": [asdict(sample) for sample in samples]}, indent=2))
    else:
        head = ("part", "what", "KiB", "count", "us", "fastest to slowest", "GB/s")
        say(table(head, [_row(sample) for sample in samples]))
    return 0
