"""The throughput of one client of a cluster of one to four nodes, compared with as many single nodes.

All nodes run on this machine throughout, each with its own drive file. A `ClusterClient` of the first N puts a batch
and gets it back. In alternation with it, N plain clients in the same process, a thread each, do the same at the same
time, each with an equal share of the blocks. The ratio is the cost of spreading blocks. Rates are measured by the
caller.

It does not show how a cluster grows beyond one machine: `kvsim cluster` predicts that.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.client import Block, Client, ClusterBlock, ClusterClient, Hit
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.form import Form

_KIB, _MIB = 1 << 10, 1 << 20
_NODES = 4
_SIZES = ((32 * _KIB, 1024), (_MIB, 64))  # of a block; how many
_ROUNDS = 9
_GOAL = 0.85  # of the sum of single nodes


class _Side(Protocol):
    """One side of the comparison: it puts and gets blocks that are contiguous in memory."""

    def put(self, keys: Sequence[bytes], size: int, durability: Durability) -> list[Any]: ...

    def get(self, keys: Sequence[bytes], size: int) -> list[Any]: ...

    def delete(self, keys: Sequence[bytes]) -> list[Any]: ...


class _Cluster:
    """One client of several nodes."""

    def __init__(self, targets: Sequence[str], memory: Any, stack: ExitStack) -> None:
        self._client = stack.enter_context(ClusterClient(targets))
        self._memory = stack.enter_context(self._client.register(memory))

    def _blocks(self, keys: Sequence[bytes], size: int) -> list[ClusterBlock]:
        return [ClusterBlock(key, self._memory, at * size, size) for at, key in enumerate(keys)]

    def put(self, keys: Sequence[bytes], size: int, durability: Durability) -> list[Any]:
        return self._client.put(self._blocks(keys, size), durability=durability)

    def get(self, keys: Sequence[bytes], size: int) -> list[Any]:
        return self._client.get(self._blocks(keys, size))

    def delete(self, keys: Sequence[bytes]) -> list[Any]:
        return self._client.delete(keys)


class _Singles:
    """A client of each of several nodes, for a share of the blocks, all at the same time."""

    def __init__(self, targets: Sequence[str], memory: Any, stack: ExitStack) -> None:
        self._clients = [stack.enter_context(Client(target)) for target in targets]
        self._regions = [stack.enter_context(client.register(memory)) for client in self._clients]
        self._threads = stack.enter_context(ThreadPoolExecutor(len(targets)))

    def _each(
        self, keys: Sequence[bytes], size: int, do: Callable[[Client, list[Block]], list[Any]]
    ) -> list[Any]:
        width = len(self._clients)
        shares = [
            [Block(keys[at], region, at * size, size) for at in range(number, len(keys), width)]
            for number, region in enumerate(self._regions)
        ]
        return [one for part in self._threads.map(do, self._clients, shares) for one in part]

    def put(self, keys: Sequence[bytes], size: int, durability: Durability) -> list[Any]:
        return self._each(keys, size, lambda client, share: client.put(share, durability=durability))

    def get(self, keys: Sequence[bytes], size: int) -> list[Any]:
        return self._each(keys, size, lambda client, share: client.get(share))

    def delete(self, keys: Sequence[bytes]) -> list[Any]:
        return self._each(keys, 1, lambda client, share: client.delete([block.key for block in share]))


def _rates(side: _Side, size: int, count: int) -> dict[str, float]:
    """GB/s of each operation."""
    found = {}
    for durability in (Durability.LANDED, Durability.WRITTEN):
        keys = [secrets.token_bytes(32) for _ in range(count)]
        began = time.perf_counter()
        assert all(one.error is None for one in side.put(keys, size, durability))
        found[f"put, {durability.name.lower()}"] = size * count / 1e9 / (time.perf_counter() - began)
        if durability is Durability.WRITTEN:
            began = time.perf_counter()
            assert all(isinstance(one, Hit) for one in side.get(keys, size))
            found["get, hot"] = size * count / 1e9 / (time.perf_counter() - began)
        side.delete(keys)
    return found


def run(form: Form) -> None:
    """Measure."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.home())))
        nodes = [stack.enter_context(NodeProcess(folder / f"node{at}")) for at in range(_NODES)]
        memory = allocate(max(size * count for size, count in _SIZES))
        for width in range(1, _NODES + 1):
            _compare(form, [node.target for node in nodes[:width]], memory)


def _compare(form: Form, targets: Sequence[str], memory: Any) -> None:
    with ExitStack() as stack:
        cluster: _Side = _Cluster(targets, memory, stack)
        singles: _Side = _Singles(targets, memory, stack)
        for size, count in _SIZES:
            rounds = []
            for number in range(_ROUNDS + 1):
                order = (cluster, singles) if number % 2 else (singles, cluster)
                of = {id(side): _rates(side, size, count) for side in order}
                rounds.append((of[id(cluster)], of[id(singles)]))
            del rounds[0]  # a warm-up
            for what in rounds[0][0]:
                name = f"{len(targets)} node{'s' * (len(targets) > 1)}, {size // _KIB}K, {what}"
                form.pairs(
                    name, "GB/s", [a[what] for a, _ in rounds], [b[what] for _, b in rounds], goal=_GOAL
                )
