"""Measures each part of this machine alone, and the product's path over all of them.

What always holds: measurements that are compared are taken in turns, so a slow phase of the machine affects all of
them. A sample is the median of its runs, with the fastest and the slowest beside it. Everything written is removed.

`memory` is a copy by the CPU; `link` is armed puts into another process, from the flag's store to the last
acknowledgement; `drive` is io_uring over a filled file; `node` and `path` are puts to a running node and gets from
its drive, `node` at sizes for the fit and `path` at others to check it. Both have the bare link and drive measured in
turns with them.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.bench.bare import BareDrive, BareFabric
from kvstore.bench.path_blocks import PathBlocks
from kvstore.client import Client
from kvstore.config import parse_size
from kvstore.demo.node_process import NodeProcess
from kvstore.limits import HOT_BYTES_DEFAULT
from kvstore.reach import FABRIC
from kvstore.serve_options import check_room
from kvstore.storage.disk import DiskOpKind
from nic_offload.flags import FlagWords
from nic_offload.library import load
from nic_offload.memory import address_of, allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcli.progress import Progress

    Job = Callable[[], int]  # nanoseconds

__all__ = ["PARTS", "Sample", "measure"]

_KIB, _MIB = 1 << 10, 1 << 20
_ROUNDS = 7
_SINGLES = 15  # consecutive runs of very short operations
_TOTAL = 64 * _MIB
_BLOCKS_MAX = 512
_CAPACITY = "2GiB"  # the largest drive file that is filled on creation
_HOT_BYTES = HOT_BYTES_DEFAULT  # of the node
_MEMORY_SIZES = tuple(64 * _KIB << shift for shift in range(0, 11, 2))  # to 64 MiB
_LINK_SIZES = tuple(4 * _KIB << shift for shift in range(0, 13, 2))  # to 16 MiB
_DRIVE_SIZES = tuple(4 * _KIB << shift for shift in range(0, 13, 2))
_DRIVE_DEPTHS = (1, 8, 32)
_DRIVE_BYTES = 256 * _MIB
_BESIDE_BYTES = 64 * _MIB
_BESIDE_DEPTHS = (1, 8)
_NODE_SIZES = (4 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 8 * _MIB)  # around all sizes of the path
_PATH_SIZES = (32 * _KIB, 128 * _KIB, 512 * _KIB, 2 * _MIB, 4 * _MIB)


@dataclass(frozen=True, slots=True)
class Sample:
    """The time of `count` messages of a size together; for a drive, of one at that depth."""

    part: str
    what: str
    size_bytes: int
    count: int
    seconds: float
    seconds_min: float
    seconds_max: float


class _Jobs:
    """A timed operation, run in turns with others."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str, int, int], Job] = {}

    def add(self, part: str, what: str, size_bytes: int, count: int, job: Job) -> None:
        self._jobs[part, what, size_bytes, count] = job

    def run(self, progress: Progress) -> Iterator[Sample]:
        times: dict[tuple[str, str, int, int], list[int]] = {name: [] for name in self._jobs}
        for turn in range(_ROUNDS + 1):
            for at, (name, job) in enumerate(self._jobs.items(), turn * len(self._jobs)):
                progress(f"measuring {name[0]}", at, (_ROUNDS + 1) * len(self._jobs))
                took_ns = job()
                if turn:  # the first is a warm-up
                    times[name].append(took_ns)
        for name, found in times.items():
            seconds = [took_ns / 1e9 for took_ns in found]
            yield Sample(*name, statistics.median(seconds), min(seconds), max(seconds))


def _often(job: Job, repeats: int) -> Job:
    """Several in a row, of which the median counts: after a long idle time the first wakes up late."""
    return lambda: int(statistics.median(job() for _ in range(repeats)))


def _many(size_bytes: int) -> int:
    """The number in a row."""
    return min(_BLOCKS_MAX, _TOTAL // size_bytes)


def _memory(_: Path, progress: Progress) -> Iterator[Sample]:
    jobs = _Jobs()
    with allocate(_MEMORY_SIZES[-1]) as source, allocate(_MEMORY_SIZES[-1]) as target:
        begin, into = address_of(source), address_of(target)

        def copy(size_bytes: int) -> int:
            start_ns = time.monotonic_ns()
            for _ in range(count := max(1, _MEMORY_SIZES[-1] // size_bytes)):
                ctypes.memmove(into, begin, size_bytes)
            return (time.monotonic_ns() - start_ns) // count

        for size_bytes in _MEMORY_SIZES:
            jobs.add("memory", "copy", size_bytes, 1, lambda size_bytes=size_bytes: copy(size_bytes))  # type: ignore[misc]
        yield from jobs.run(progress)


def _link(_: Path, progress: Progress) -> Iterator[Sample]:
    provider = load().best_provider()
    for size_bytes in _LINK_SIZES:
        for count in (1, _many(size_bytes)):
            jobs = _Jobs()
            with BareFabric(provider, size_bytes, count) as fabric:
                repeats = 1 if count > 1 else _SINGLES
                jobs.add("link", "put", size_bytes, count, _often(fabric.nanoseconds, repeats))
                if size_bytes == _LINK_SIZES[0] and count == 1:
                    fired = partial(fabric.nanoseconds, fired=True)
                    jobs.add("link", "untriggered", size_bytes, count, _often(fired, repeats))
                yield from jobs.run(progress)


def _drive(folder: Path, progress: Progress) -> Iterator[Sample]:
    jobs = _Jobs()
    with BareDrive(folder, _DRIVE_BYTES) as drive:
        for kind in (DiskOpKind.WRITE, DiskOpKind.READ):
            for size_bytes in _DRIVE_SIZES:
                for depth in _DRIVE_DEPTHS:
                    operation = partial(drive.operation_ns, kind, size_bytes, depth)
                    jobs.add("drive", kind.name.lower(), size_bytes, depth, operation)
        yield from jobs.run(progress)


def _blocks(part: str, folder: Path, size_bytes: int, progress: Progress) -> Iterator[Sample]:
    """Put, then get the same blocks, one and many; in turns with the bare link and drive."""
    jobs = _Jobs()
    home = folder / f"{part}-{size_bytes}"
    home.mkdir()
    many = _many(size_bytes)
    check_room(home, parse_size(_CAPACITY), "name a folder elsewhere with --data")
    with (
        NodeProcess(home / "node", capacity=_CAPACITY) as node,
        Client(node.target, shared=True, transport=FABRIC, slots=many, block_bytes_max=size_bytes) as client,
        FlagWords.create(1) as flags,
        PathBlocks(client, flags, size_bytes, many, hot_bytes=_HOT_BYTES) as path,
        BareFabric(client.fabric.provider, size_bytes, 1) as single,
        BareFabric(client.fabric.provider, size_bytes, many) as train,
        BareDrive(home, _BESIDE_BYTES) as drive,
    ):
        for count, bare in ((1, single), (many, train)):
            repeats = _SINGLES if count == 1 else 1
            written: list[int] = []

            def put(count: int = count, repeats: int = repeats, written: list[int] = written) -> int:
                times = [path.put(count) for _ in range(repeats)]
                written.append(int(statistics.median(one.written_ns for one in times)))
                return int(statistics.median(one.landed_ns for one in times))

            jobs.add(part, "landed", size_bytes, count, put)
            jobs.add(part, "written", size_bytes, count, written.pop)
            jobs.add(part, "get", size_bytes, count, _often(partial(path.cold_ns, count), repeats))
            jobs.add(part, "bare link", size_bytes, count, _often(bare.nanoseconds, repeats))
        for kind in (DiskOpKind.WRITE, DiskOpKind.READ):
            for depth in _BESIDE_DEPTHS:
                operation = partial(drive.operation_ns, kind, size_bytes, depth)
                jobs.add(part, f"bare {kind.name.lower()}", size_bytes, depth, operation)
        yield from jobs.run(progress)


def _node(folder: Path, progress: Progress) -> Iterator[Sample]:
    for size_bytes in _NODE_SIZES:
        yield from _blocks("node", folder, size_bytes, progress)


def _path(folder: Path, progress: Progress) -> Iterator[Sample]:
    for size_bytes in _PATH_SIZES:
        yield from _blocks("path", folder, size_bytes, progress)


PARTS = {"memory": _memory, "link": _link, "drive": _drive, "node": _node, "path": _path}


def measure(parts: list[str], data: Path, progress: Progress) -> list[Sample]:
    """Measure these parts, in a folder of their own beside `data`'s files, which is removed."""
    found: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=data) as folder:
        for part in parts:
            found += PARTS[part](Path(folder).resolve(), progress)
    return found
