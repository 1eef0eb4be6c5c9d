"""The path of the product against what the machine gives: put landed, put written, get, and the CPU's way.

`landed` is held against the provider's own writes, `written` and `get` against the smaller of that and the bare
drive, all measured in turns. The flag's latency is from the store to the acknowledgement in the client's memory,
for one block at a time, beside a bare write and its acknowledgement.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client import Block, Client, Hit
from kvstore.demo.node_process import NodeProcess
from kvstore.limits import HEADER_BYTES
from kvstore.names import block_key
from kvstore.storage.disk import DiskOpKind
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.bench.ceilings import BareDrive, BareFabric

if TYPE_CHECKING:
    from tests.bench.form import Form

_TOTAL = 64 << 20
_SIZES = ((32 << 10, "32 KiB"), (256 << 10, "256 KiB"), (1 << 20, "1 MiB"), (4 << 20, "4 MiB"))
_LATENCY_ROUNDS_MAX = 50
_WAIT_S = 60.0
_CAPACITY = "2GiB"  # the largest that is filled with zeros when it is made


class _Path:
    """A client of a node, with fresh blocks for every run."""

    def __init__(self, client: Client, flags: FlagWords, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.count = min(_TOTAL // block_bytes, 1024)
        self._client, self._flag = client, flags[0]
        self._name, self._runs = secrets.token_bytes(8), itertools.count()
        self._source = client.register(allocate(self.count * block_bytes))
        self._target = client.register(allocate(self.count * block_bytes))
        self._last: list[Block] = []

    @property
    def total_bytes(self) -> int:
        return self.count * self.block_bytes

    def _fresh(self, count: int) -> list[Block]:
        run = next(self._runs).to_bytes(4)
        return [
            Block(
                block_key(self._name, run, i.to_bytes(4)),
                self._source,
                i * self.block_bytes,
                self.block_bytes,
            )
            for i in range(count)
        ]

    def put(self, count: int) -> tuple[int, int]:
        """Put blocks by one flag store; nanoseconds to the last `landed` and to the last `written`."""
        self._flag.store(0)
        blocks = self._fresh(count)
        puts = self._client.reserve(blocks).arm(self._flag)
        start_ns = time.monotonic_ns()
        self._flag.store(1)
        results = puts.wait(_WAIT_S)
        for result in results:
            if result.error is not None:
                raise result.error
        if count == self.count:
            self._last = blocks
        return (
            max(result.landed_ns for result in results) - start_ns,
            max(result.durable_ns for result in results) - start_ns,
        )

    def landed(self) -> float:
        return self.total_bytes / self.put(self.count)[0]

    def written(self) -> float:
        return self.total_bytes / self.put(self.count)[1]

    def get(self) -> float:
        wanted = [Block(block.key, self._target, block.offset, block.length) for block in self._last]
        start_ns = time.monotonic_ns()
        outcomes = self._client.get(wanted, timeout_s=_WAIT_S)
        took_ns = time.monotonic_ns() - start_ns
        assert all(isinstance(outcome, Hit) for outcome in outcomes)
        return self.total_bytes / took_ns

    def flag_to_landed_us(self) -> float:
        return statistics.median(self.put(1)[0] for _ in range(_rounds(self.block_bytes))) / 1e3

    def inline(self) -> float:
        data = bytes(self.block_bytes)
        blocks = self._fresh(min(self.count, 16))
        start_ns = time.monotonic_ns()
        for block in blocks:
            self._client.put_inline(block.key, bytearray(data), timeout_s=_WAIT_S)
        return len(blocks) * self.block_bytes / (time.monotonic_ns() - start_ns)

    def close(self) -> None:
        self._source.close()
        self._target.close()


def _rounds(block_bytes: int) -> int:
    """How often one block is timed, so that the drive has room for all of them."""
    return min(_LATENCY_ROUNDS_MAX, _TOTAL // block_bytes)


def run(form: Form) -> None:
    """All points."""
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
        path = _Path(client, flags, block_bytes)
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
