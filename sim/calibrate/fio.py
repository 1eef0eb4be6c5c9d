"""Sweeps a drive with fio: direct, io_uring, time-based; sizes in steps of four, depths 1, 8, 32, four ways.

What always holds: it works in a file of its own, and removes it. A point that is left out (too much memory at once, a
size that the drive refuses) is noted with the reason.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sim.calibrate.samples import Sample
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["DEPTHS", "SIZES_BYTES", "WAYS", "find", "sample_of", "sweep"]

SIZES_BYTES = tuple(512 << shift for shift in range(0, 19, 2))  # 512 B to 128 MiB
DEPTHS = (1, 8, 32)
WAYS = ("write", "randwrite", "read", "randread")
_FILE_BYTES = 1 << 30
_MEMORY_BYTES_MAX = 1 << 30
_TIMEOUT_S = 120
_PERCENTILES = "50:99"


def find() -> str | None:
    """The path of fio; None if it is not installed."""
    return shutil.which("fio")


def _command(program: str, file: Path, way: str, size_bytes: int, depth: int) -> list[str]:
    return [
        program,
        "--name=kvsim",
        f"--filename={file}",
        f"--size={_FILE_BYTES}",
        "--direct=1",
        "--ioengine=io_uring",
        f"--rw={way}",
        f"--bs={size_bytes}",
        f"--iodepth={depth}",
        f"--percentile_list={_PERCENTILES}",
        "--output-format=json",
    ]


def sample_of(report: str, way: str, size_bytes: int, depth: int) -> Sample:
    """The point that fio's report contains."""
    job = json.loads(report[report.index("{") :])["jobs"][0]
    latency = job["read" if way.endswith("read") else "write"]
    percentiles = latency["clat_ns"].get("percentile", {})
    mean_s = latency["lat_ns"]["mean"] / 1e9
    return Sample(
        "drive",
        way,
        size_bytes,
        depth,
        mean_s,
        percentiles.get("50.000000", 1e9 * mean_s) / 1e9,
        percentiles.get("99.000000", 1e9 * mean_s) / 1e9,
    )


def sweep(
    program: str,
    folder: Path,
    runtime_ms: int,
    progress: Callable[[float], None],
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    depths: Sequence[int] = DEPTHS,
) -> Iterator[Sample | str]:
    """Each point, or the reason why it is missing."""
    points = [(way, size, depth) for size in sizes_bytes for depth in depths for way in WAYS]
    with tempfile.TemporaryDirectory(prefix="kvsim-fio-", dir=folder) as home:
        file = Path(home) / "drive"
        _run(_command(program, file, "write", 1 << 20, DEPTHS[-1]))  # so that no read hits a hole in the file
        for i, (way, size_bytes, depth) in enumerate(points):
            progress(i / len(points))
            if size_bytes * depth > _MEMORY_BYTES_MAX:
                yield f"fio {way} of {size_bytes} B at depth {depth}: would take more than 1 GiB of memory"
                continue
            timed = ["--time_based", f"--runtime={runtime_ms}ms"]
            done = _run([*_command(program, file, way, size_bytes, depth), *timed])
            try:
                yield sample_of(done.stdout, way, size_bytes, depth)
            except (ValueError, KeyError, IndexError):
                said = (done.stderr or done.stdout).strip().splitlines()
                yield f"fio {way} of {size_bytes} B at depth {depth}: {said[-1] if said else 'it said nothing'}"
    progress(1.0)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OutOfRange(
            "fio", f"not usable ({error})", "a program", "that ends within two minutes"
        ) from error
