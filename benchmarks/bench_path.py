"""The product's data path compared with what the machine can do: put landed, put written, get, and the CPU path.

`landed` is compared with the provider's own writes, `written` and `get` with the slower of these and the plain drive,
all measured in alternation. The flag's latency is from the store until the caller is told, for one block at a time,
compared with a plain write and its acknowledgement.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.bench.bare import BareDrive, BareFabric
from kvstore.bench.path_blocks import PathBlocks
from kvstore.client import Client
from kvstore.demo.node_process import NodeProcess
from kvstore.limits import HEADER_BYTES
from kvstore.storage.disk import DiskOpKind
from nic_offload.flags import FlagWords

if TYPE_CHECKING:
    from benchmarks.form import Form

_TOTAL = 64 << 20
_SIZES = ((32 << 10, "32 KiB"), (256 << 10, "256 KiB"), (1 << 20, "1 MiB"), (4 << 20, "4 MiB"))
_LATENCY_ROUNDS_MAX = 50
_WAIT_S = 60.0
_CAPACITY = "2GiB"  # the largest that is filled with zeros when it is created


class _Path(PathBlocks):
    """The rates of the path, and of the CPU path."""

    @property
    def total_bytes(self) -> int:
        return self.count * self.block_bytes

    def landed(self) -> float:
        return self.total_bytes / self.put(self.count).landed_ns

    def written(self) -> float:
        return self.total_bytes / self.put(self.count).written_ns

    def get(self) -> float:
        return self.total_bytes / self.cold_ns(self.count)

    def flag_to_landed_us(self) -> float:
        return statistics.median(self.put(1).landed_ns for _ in range(_rounds(self.block_bytes))) / 1e3

    def inline(self) -> float:
        count = min(self.count, 16)
        return count * self.block_bytes / self.inline_ns(count)


def _rounds(block_bytes: int) -> int:
    """How often one block is timed; the drive has room for all of them."""
    return min(_LATENCY_ROUNDS_MAX, _TOTAL // block_bytes)


def run(form: Form) -> None:
    """Measure all points."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for block_bytes, label in _SIZES:
            home = Path(folder).resolve() / str(block_bytes)
            home.mkdir()
            _size(form, home, block_bytes, label)


def _size(form: Form, home: Path, block_bytes: int, label: str) -> None:
    slots = min(_TOTAL // block_bytes, 1024)
    record = block_bytes + HEADER_BYTES
    with (
        NodeProcess(home / "node", capacity=_CAPACITY) as node,
        Client(node.target, slots=slots, block_bytes_max=block_bytes) as client,
        FlagWords.create(1) as flags,
        BareFabric(client.fabric.provider, block_bytes, slots) as fabric,
        BareFabric(client.fabric.provider, block_bytes, 1) as one,
        BareDrive(home, 128 << 20) as drive,
    ):
        path = _Path(client, flags, block_bytes, min(_TOTAL // block_bytes, 1024))
        form.compare(f"put, landed, {label}", "GB/s", path.landed, fabric.gbps, goal=0.85)
        form.compare(
            f"put, written, {label}",
            "GB/s",
            path.written,
            lambda: min(fabric.gbps(), drive.gbps(DiskOpKind.WRITE, record)),
            goal=0.8,
        )
        form.compare(
            f"get from the drive, {label}",
            "GB/s",
            path.get,
            lambda: min(fabric.gbps(), drive.gbps(DiskOpKind.READ, record)),
            goal=0.8,
        )
        form.compare(
            f"flag to landed, {label}",
            "us",
            path.flag_to_landed_us,
            lambda: statistics.median(one.nanoseconds() for _ in range(_rounds(block_bytes))) / 1e3,
            goal=2.0,
            lower_is_better=True,
        )
        form.compare(
            f"triggered against CPU copy and gRPC, written, {label}", "GB/s", path.written, path.inline
        )
        path.close()
