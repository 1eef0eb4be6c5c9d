"""triggerkv compared with Redis, the plain fabric and the plain drive: the same blocks in one run, as callers see them.

What always holds: the contenders take turns, each once a round, and the order rotates. Every time is wall time from the
call of put or get, or the store to the flag, until the caller has the result. Ratios are medians of rounds. Blocks are
deleted after each round, untimed, so that no contender evicts. `TRIGGERKV_PEERS_ROUNDS` is the number of rounds; five
by default.

 - *us*: a node as `kvstore serve` starts it, and `ours.py`, a client process that uses the Python API.
 - *redis*: Debian's Redis over TCP on loopback without persistence, and `redis_client.c`, over hiredis. *redis,
   everysec* has an append-only file, so a SET survives a SIGKILL of the server, as our `written` does.
 - *fabric*: plain writes of the node's provider, and a word in return. *drive*: io_uring with O_DIRECT, at depth 16 for
   batches, one operation for one block; each of its operations is run next to ours.

For Redis, `landed` is a SET and `hot` a GET. `cold` is read from the drive after a restart of
the node; Redis has no counterpart.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import goals
from benchmarks.peers.cells import SHAPES, Cells, table
from benchmarks.peers.client_process import Worker, WorkerFailed, cpu_ns, settled_cpu_ns
from benchmarks.peers.contenders import Drive, OnFabric, Ours, Redises
from benchmarks.peers.redis import FORMS, Redis
from benchmarks.plain import PlainFabric
from kvstore.bench.bare import BareDrive
from kvstore.demo.node_process import NodeProcess
from nic_offload.library import load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.form import Form
    from benchmarks.peers.cells import Shape
    from benchmarks.peers.contenders import Contender

_KIB, _MIB = 1 << 10, 1 << 20
_CAPACITY = "1GiB"  # the default
_DRIVE_BYTES = 128 * _MIB
_AHEAD, _CADENCE_US, _SMALL = 64, 20_000, 32 * _KIB
_CLIENTS = 4
_CLIENT_BYTES = 128 * _MIB  # of each: enough to make the moment small in which they start one after the other
_CLIENT_CAPACITY, _CLIENT_HOT = "4GiB", "2GiB"
_KILLS, _KILL_BATCH, _KILL_CALLS = 3, 64, 4
_IDLE_S = 10.0  # twice the time between two of its checks of all connections
_IDLE_AFTER_S = 5.0  # after which an idle node ticks at its lowest rate
_READABLE = 16


def run(form: Form, results: Path = Path("build/bench")) -> None:
    """Measure all points; every cell goes to `peers.cells.json`, beside them."""
    rounds = int(os.environ.get("TRIGGERKV_PEERS_ROUNDS", "5"))
    cells = Cells()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        home = Path(folder).resolve()
        for size, shapes in SHAPES.items():
            _beside(cells, home / str(size), size, shapes, rounds)
        goals.note(form, cells)
        _alone(form, home / "alone", rounds)
        for size in (_SMALL, _MIB):
            _many(form, home / f"many-{size}", SHAPES[size][-1], rounds)
        _killed(form, home / "killed")
    print(table(cells, [shape for shapes in SHAPES.values() for shape in shapes]))
    results.mkdir(parents=True, exist_ok=True)
    path = results / "peers.cells.json"
    path.write_text(json.dumps(cells.listed(), indent=2) + "\n")
    print(f"-> {path}\n")


def _client(node: NodeProcess) -> Worker:
    return Worker([sys.executable, "-m", "benchmarks.peers.ours", node.target])


def _beside(cells: Cells, home: Path, size: int, shapes: Sequence[Shape], rounds: int) -> None:
    """All contenders with blocks of one size. The first round is discarded."""
    home.mkdir()
    slots = max(shape.batch * shape.window for shape in shapes)
    with ExitStack() as stack:
        node = stack.enter_context(NodeProcess(home / "node", capacity=_CAPACITY))
        client = stack.enter_context(_client(node))
        client.ask("open", size, slots)
        drive = Drive(stack.enter_context(BareDrive(home, max(_DRIVE_BYTES, 8 * size))))
        contenders: list[Contender] = [Ours(node, client, drive)]
        for name, form in (("redis", "nothing kept"), ("redis, everysec", "everysec")):
            server = stack.enter_context(Redis(home / form.replace(" ", "-"), form))
            client = stack.enter_context(server.client())
            client.ask("open", size, slots)
            contenders.append(Redises(name, server, client))
        contenders.append(OnFabric(stack.enter_context(PlainFabric(load().best_provider()))))
        for one in contenders:
            one.round(shapes, Cells())
        for turn in range(rounds):
            for i in range(len(contenders)):
                contenders[(turn + i) % len(contenders)].round(shapes, cells)


def _alone(form: Form, home: Path, rounds: int) -> None:
    """What only triggerkv has: puts armed ahead and an idle node; also whether landed blocks can be read."""
    home.mkdir()
    with NodeProcess(home / "node", capacity=_CAPACITY) as node, _client(node) as client:
        client.ask("open", _SMALL, _AHEAD)
        for cadence_us, label, p50, p99 in (
            (0, "back to back", 60, 300),
            (_CADENCE_US, "each 20 ms, by a process", 150, 1000),
        ):
            told_us: list[float] = []
            for turn in range(1 + rounds):
                timed = client.timed("armed", _AHEAD, cadence_us)
                settled_cpu_ns(node.pid)
                client.ask("forget", "armed")
                told_us += [one / 1e3 for one in timed.calls_ns] if turn else []
            told_us.sort()
            for name, goal, value in (
                ("p50", p50, told_us[len(told_us) // 2]),
                ("p99", p99, told_us[len(told_us) * 99 // 100]),
            ):
                form.note(
                    f"{_AHEAD} x 32K armed ahead, {label}, store to told, {name}",
                    value,
                    "us",
                    goal=goal,
                    lower_is_better=True,
                )
        there = 0
        for _ in range(_READABLE):
            client.ask("put", "fresh", "landed", 1, 1, 1)
            there += int(client.ask("check", "fresh"))
        form.note("landed and readable at once", there / _READABLE, "of 1", goal=1.0)
        time.sleep(_IDLE_AFTER_S)
        before_ns = settled_cpu_ns(node.pid)
        time.sleep(_IDLE_S)
        share = 100 * (cpu_ns(node.pid) - before_ns) / (_IDLE_S * 1e9)
        form.note("node with an idle client, of one core", share, "%", goal=0.2, lower_is_better=True)


def _many(form: Form, home: Path, shape: Shape, rounds: int) -> None:
    """Four clients in four processes compared with one of them, for triggerkv and for Redis."""
    home.mkdir()
    with ExitStack() as stack:
        node = stack.enter_context(
            NodeProcess(home / "node", capacity=_CLIENT_CAPACITY, arguments=("--hot", _CLIENT_HOT))
        )
        server = stack.enter_context(Redis(home / "redis", "nothing kept"))
        sides = {
            "us": [stack.enter_context(_client(node)) for _ in range(_CLIENTS)],
            "redis": [stack.enter_context(server.client()) for _ in range(_CLIENTS)],
        }
        for clients in sides.values():
            for client in clients:
                client.ask("open", shape.size, shape.batch)
        rates: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        errors: list[str] = []
        for turn in range(1 + rounds):
            for name, clients in list(sides.items())[:: 1 if turn % 2 else -1]:
                for count in (1, _CLIENTS):
                    try:
                        found = _together(clients[:count], shape)
                    except WorkerFailed as error:
                        errors.append(f"{name}, {count} clients: {error}")
                        continue
                    for kind, gbps in found.items() if turn else ():
                        rates[name, kind, count].append(gbps)
    _compare_clients(form, shape, rates)
    for text in errors:
        print(text)
    form.note(f"{_CLIENTS} clients, {shape.title}: errors", len(errors), "", goal=0, lower_is_better=True)


def _compare_clients(form: Form, shape: Shape, rates: Mapping[tuple[str, str, int], list[float]]) -> None:
    for kind in ("landed", "hot"):
        for name, goal in (("us", 1.0), ("redis", None)):
            metric = f"{name}: {_CLIENTS} clients against 1, {kind}, {shape.title}"
            several, one = rates[name, kind, _CLIENTS], rates[name, kind, 1]
            count = min(len(several), len(one))  # a round that ended with an error has no rate
            if count:
                form.pairs(metric, "GB/s", several[:count], one[:count], goal=goal)


def _together(clients: Sequence[Worker], shape: Shape) -> dict[str, float]:
    """Run all of them at the same time: total bytes, from the first call to the last answer."""
    calls = _CLIENT_BYTES // (shape.size * shape.batch)

    def all_of(*words: object) -> float:
        for client in clients:
            client.tell(*words)
        found = [client.answered() for client in clients]
        total = len(found) * shape.size * shape.batch * calls
        return total / (max(one.end_ns for one in found) - min(one.begin_ns for one in found))

    def forget() -> None:
        for client in clients:
            client.ask("forget", shape.name)

    put = ("put", shape.name)
    rates = {"landed": all_of(*put, "landed", shape.batch, shape.window, calls)}
    forget()
    all_of(*put, "written", shape.batch, shape.window, calls)
    get = ("get", shape.name, shape.batch, shape.window)
    all_of(*get)
    rates["hot"] = all_of(*get)
    forget()
    return rates


def _killed(form: Form, home: Path) -> None:
    """Send SIGKILL right after the last acknowledgement; return how many acknowledged blocks survived the restart."""
    home.mkdir()

    def share(server: NodeProcess | Redis, client: Worker, how: str) -> float:
        there = 0
        client.ask("open", _SMALL, _KILL_BATCH)
        for _ in range(_KILLS):
            client.ask("put", "kept", how, _KILL_BATCH, 1, _KILL_CALLS)
            server.kill()
            server.start()
            client.ask("ready")
            there += int(client.ask("check", "kept"))
        return there / (_KILLS * _KILL_BATCH * _KILL_CALLS)

    for how, goal in (("landed", None), ("written", 1.0)):
        with NodeProcess(home / how, capacity=_CAPACITY) as node, _client(node) as client:
            form.note(f"kill -9: us, {how}, are there", share(node, client, how), "of 1", goal=goal)
    for kept in ("default", "everysec", "always"):
        assert kept in FORMS
        with Redis(home / kept, kept) as server, server.client() as client:
            form.note(f"kill -9: redis, {kept}, are there", share(server, client, kept), "of 1")
