"""The cost of encryption: two nodes on one machine that differ only in a master key, measured in alternation.

A client puts batches until they are `written`, and gets them when they are no longer in the node's memory. Measured for
each node: the CPU time of its process per gigabyte, and the rate that the caller sees. Between two rounds the same
library encrypts as many bytes on its own, from memory to memory, in messages of the same size. No encryption can cost
less than that, unless it replaces work that is done without it, such as the copy of a get. A cost meets its goal if it
is at most 0.15 CPU seconds per GB, or within 1/0.85 of the library's cost in the same rounds; `of its goal` is the
smaller of the two as a share of its bound.
"""

from __future__ import annotations

import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nic_offload._core import ffi, lib

from kvstore.client import Block, Client, Hit
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from nic_offload import aead
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from benchmarks.form import Form

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = ((32 * _KIB, 2048), (256 * _KIB, 512), (_MIB, 128), (4 * _MIB, 32))  # of a block; how many
_ROUNDS = 15
_OF_A_PROCESS = 2  # of a clock's number, as clock_getcpuclockid makes it: the CPU time of all threads
_COST_GOAL = 0.15  # additional CPU seconds per GB,
_ALONE_GOAL = 1 / 0.85  # or this many times the cost of the library alone
_ALONE_BYTES = 64 * _MIB  # larger than a cache


class _Side:
    """A node, and a client of it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        more = ["--hot", "128MiB", *arguments]
        self.node = NodeProcess(folder, capacity="2GiB", arguments=more)
        self.client = Client(self.node.target, shared=True, call_timeout_ms=60_000, get_timeout_ms=60_000)

    def cpu_s(self) -> float:
        return time.clock_gettime(~self.node.pid << 3 | _OF_A_PROCESS)

    def close(self) -> None:
        self.client.close()
        self.node.stop()


def run(form: Form) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as made:
        folder = Path(made)
        key = folder / "master.key"
        command = [sys.executable, "-m", "kvstore", "keys", "new-master", str(key)]
        subprocess.run(command, check=True, capture_output=True)
        plain, sealed = _Side(folder / "plain"), _Side(folder / "sealed", "--master-key", f"file:{key}")
        try:
            for size, count in _SIZES:
                _compare(form, plain, sealed, size, count)
        finally:
            plain.close()
            sealed.close()


def _compare(form: Form, plain: _Side, sealed: _Side, size: int, count: int) -> None:
    costs: dict[str, list[tuple[float, float]]] = {"put, written": [], "get, cold": []}
    rates: dict[str, list[tuple[float, float]]] = {"put, written": [], "get, cold": []}
    alone = []
    library = _Library()
    for number in range(_ROUNDS):
        alone.append(library.s_a_gb(size))
        first, second = (plain, sealed) if number % 2 else (sealed, plain)
        of = {id(side): _round(side, size, count) for side in (first, second)}
        both = [of[id(plain)], of[id(sealed)]]
        for what, pairs in costs.items():
            pairs.append((both[0][what][0], both[1][what][0]))
            rates[what].append((both[0][what][1], both[1][what][1]))
    for what, pairs in costs.items():
        name = f"{size // _KIB}K {what}"
        without, with_it = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
        more = [b - a for a, b in pairs]
        form.note(f"{name}: node, in the clear", without, "CPU s/GB")
        form.note(f"{name}: node, encrypted", with_it, "CPU s/GB")
        cost = statistics.median(more)
        form.note(f"{name}: encryption", cost, "CPU s/GB")
        ratio = form.pairs(f"{name}: encryption, of the library alone", "CPU s/GB", more, alone).ratio
        assert ratio is not None
        of_goal = min(cost / _COST_GOAL, ratio / _ALONE_GOAL)
        form.note(f"{name}: of its goal", of_goal, "x", goal=1, lower_is_better=True)
        form.note(f"{name}: rate, encrypted", statistics.median(b for _, b in rates[what]), "GB/s")
        form.note(f"{name}: rate of in the clear", statistics.median(b / a for a, b in rates[what]), "x")


def _round(side: _Side, size: int, count: int) -> dict[str, tuple[float, float]]:
    """CPU seconds per GB of the node, and GB/s as the caller sees it."""
    gigabytes = size * count / 1e9
    found = {}
    with allocate(size * count) as memory, side.client.register(memory) as region:
        memory[: size * count] = secrets.token_bytes(size) * count
        salt = secrets.token_bytes(24)
        blocks = [Block(salt + at.to_bytes(8), region, size * at, size) for at in range(count)]
        began, cpu = time.perf_counter(), side.cpu_s()
        results = side.client.put(blocks, durability=Durability.WRITTEN)
        assert all(one.error is None for one in results)
        found["put, written"] = (side.cpu_s() - cpu) / gigabytes, gigabytes / (time.perf_counter() - began)
        _fill_memory(side)
        began, cpu = time.perf_counter(), side.cpu_s()
        assert all(isinstance(one, Hit) for one in side.client.get(blocks))
        found["get, cold"] = (side.cpu_s() - cpu) / gigabytes, gigabytes / (time.perf_counter() - began)
        side.client.delete([block.key for block in blocks])
    return found


def _fill_memory(side: _Side) -> None:
    """Fill the node's memory with other blocks."""
    size, count = 4 * _MIB, 64
    with allocate(size) as memory, side.client.register(memory) as region:
        blocks = [Block(secrets.token_bytes(32), region, 0, size) for _ in range(count)]
        side.client.put(blocks, durability=Durability.WRITTEN)
        side.client.get(blocks)
        side.client.delete([block.key for block in blocks])


class _Library:
    """The encryption library on its own."""

    def __init__(self) -> None:
        self._from = ffi.from_buffer(allocate(_ALONE_BYTES))
        self._to = ffi.from_buffer(allocate(_ALONE_BYTES + aead.TAG_BYTES))
        self._of = ffi.new("struct tk_aead *")

    def s_a_gb(self, size: int) -> float:
        """CPU seconds per GB, for messages of this size."""
        began = time.process_time()
        for at in range(0, _ALONE_BYTES - size + 1, size):
            self._of.nonce = at.to_bytes(aead.NONCE_BYTES)
            assert not lib.tk_aead_encrypt(self._of, self._from + at, size, self._to + at)
        return (time.process_time() - began) / (_ALONE_BYTES / 1e9)
