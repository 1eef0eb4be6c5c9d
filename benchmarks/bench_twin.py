"""The simulator's twin of a real node, and of a real cluster of three, compared with measurements of them.

A round first profiles the machine: gets from the node's memory, gets from its drive, gets of missing blocks, and puts,
with one, two and four clients, at both ends of a range of block sizes and of blocks per request. From that alone the
twin (`sim.replay.twin`) predicts each point: other sizes, other numbers of clients, chats with follow-up turns and
evictions, three nodes. Then the points are measured. No prediction uses a measured point, or a profile of another
round, because a shared machine may be twice as fast in one minute as in the next.

What always holds: a point's error is that of the median round; every byte that comes back is checked. The goal is a
median error of 25 % over all points, for each of gets per second, p50 and p99 of a get; and the same hit rate, to a
hundredth. `TRIGGERKV_TWIN_ROUNDS` is the number of rounds; three by default.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import statistics
import sys
import tempfile
from contextlib import ExitStack
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.peers.client_process import Worker
from benchmarks.twin.replaying_client import Row
from kvstore.demo.node_process import NodeProcess
from sim.replay.twin import Load, MachineProfile, Outcome, Seen, quantile, replay
from sim.replay.workload import Chats, chats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.form import Form

    Requests = list[tuple[int, list[int]]]

_KIB, _MIB = 1 << 10, 1 << 20
_GOAL = 0.25
_HITS_GOAL = 0.01
_SIZES = (64 * _KIB, 160 * _KIB, 512 * _KIB)
_COUNTS = (1, 6, 16)
_CLIENTS = (1, 2, 4)
_USERS = 12
_GETS, _PUTS, _TURNS = 100, 16, 3  # per shape in the profile
_EDGE = 0.05  # share of each client's requests, at both ends, that does not count
_POINT_GETS, _CHATS_GETS = 480, 480
_FILLS, _REPLAYS = 5, 9
_HOT = 512 * _MIB
_CAPACITY, _CHATS_BLOCKS = "1GiB", 768  # how many of the chats' blocks fill a drive


class _Side(NamedTuple):
    """A node or several, and clients of them."""

    home: Path
    nodes: Sequence[NodeProcess]
    clients: Sequence[Worker]

    @property
    def targets(self) -> list[str]:
        return sorted(node.target for node in self.nodes)

    def run(self, block_bytes: int, parts: Sequence[Requests]) -> list[list[Row]]:
        """Have as many clients as there are parts do theirs at the same time."""
        for number, (client, part) in enumerate(zip(self.clients, parts, strict=False)):
            path = self.home / f"client{number}.json"
            path.write_text(json.dumps({"block_bytes": block_bytes, "requests": part}))
            client.tell(path)
        found = []
        for client in self.clients[: len(parts)]:
            rows = json.loads(Path(client.answer()).read_text())
            found.append([Row(*row) for row in rows])
        wrong = sum(row.wrong for rows in found for row in rows)
        if wrong:
            message = f"{wrong} blocks came back with other bytes."
            raise AssertionError(message)
        return found


def _open(stack: ExitStack, home: Path, clients: int, *, nodes: int = 1, capacity: str, hot: int) -> _Side:
    home.mkdir()
    arguments = ["--hot", str(hot)]
    started = [
        stack.enter_context(NodeProcess(home / f"node{i}", capacity=capacity, arguments=arguments))
        for i in range(nodes)
    ]
    command = [
        sys.executable,
        "-m",
        "benchmarks.twin.replaying_client",
        _SIZES[-1],
        _COUNTS[-1],
        secrets.token_hex(8),
    ]
    command += [node.target for node in started]
    return _Side(home, started, [stack.enter_context(Worker([*map(str, command)])) for _ in range(clients)])


class _Names:
    """Blocks under new names."""

    def __init__(self) -> None:
        self._next = count()

    def fresh(self, blocks: int) -> list[int]:
        return [next(self._next) for _ in range(blocks)]


def _dealt(requests: Sequence[tuple[int, list[int]]], clients: int) -> list[Requests]:
    """Assign each user's requests to one client, in their order."""
    return [[one for one in requests if one[0] % clients == client] for client in range(clients)]


# --- the profile


def _lacking(blocks: int) -> int:
    """How many blocks of a request in the profile are missing, if some are."""
    return max(1, blocks // 4)


class _Profiler:
    """Measures the machine in slices; earlier slices count as well."""

    def __init__(self, memory: _Side, writing: _Side, names: _Names) -> None:
        self._memory, self._writing, self._names = memory, writing, names
        self._seen: dict[tuple[str, int], list[Seen]] = {}
        self._rng = random.Random(1)
        self._sets: dict[tuple[int, int], Requests] = {}
        for size in _SIZES:
            for blocks in _COUNTS:
                self._sets[size, blocks] = [(user, names.fresh(blocks)) for user in range(_USERS)]
                memory.run(size, [self._sets[size, blocks]])

    def slice(self, load: Load) -> None:
        """Measure around a load: the sizes, numbers of blocks and numbers of clients next to its own."""
        asked = {len(blocks) for todo in load.requests for _, blocks in todo}
        clients = _around(_CLIENTS, {len(load.requests)})
        self._shapes(
            clients,
            _around(_SIZES, {load.block_bytes}),
            _around(_COUNTS, asked),
            puts=not load.stored,
        )

    def begin(self) -> None:
        """Discard what was measured so far, including first accesses of memory, and measure everything once."""
        self._seen.clear()
        self._shapes(_CLIENTS, _SIZES, _COUNTS, puts=True)

    def _shapes(
        self, all_clients: Sequence[int], sizes: Sequence[int], counts: Sequence[int], *, puts: bool
    ) -> None:
        for clients in all_clients:
            for size in sizes:
                self._gets(clients, size, counts)
                if puts:
                    self._puts(clients, size, counts)

    def _gets(self, clients: int, size: int, counts: Sequence[int]) -> None:
        """Gets of blocks in memory, small and large ones in alternation."""
        stored = [one for blocks in counts for one in self._sets[size, blocks]]
        asked = [stored[self._rng.randrange(len(stored))] for _ in range(_GETS * len(counts))]
        self._note(clients, size, self._memory.run(size, _dealt(asked, clients)))

    def _puts(self, clients: int, size: int, counts: Sequence[int]) -> None:
        """Gets of blocks that are missing or partly stored, and puts: a chat's first turn and some later ones."""
        begun: list[Requests] = []
        for blocks in counts:
            for user in range(_PUTS):
                old = self._names.fresh(blocks)
                kept = old[_lacking(blocks) :] if blocks > 1 else old
                turns = [[*kept, *self._names.fresh(_lacking(blocks))] for _ in range(_TURNS)]
                begun.append([(user, one) for one in (old, *turns)])
        self._rng.shuffle(begun)
        together = _dealt([one for chat in begun for one in chat], clients)
        self._note(clients, size, self._writing.run(size, together))

    def _note(self, clients: int, size: int, parts: Sequence[Sequence[Row]]) -> None:
        """Record the time of each operation, and the client's time between operations.

        The first and last operations of each client are left out, because not all clients are active then. So are
        requests with more missing blocks than intended, because some had been evicted.
        """

        def add(kind: str, blocks: int, took_ns: int) -> None:
            self._seen.setdefault((kind, clients), []).append(Seen(blocks, size, max(1, took_ns) / 1e9))

        for rows in parts:
            edge = max(1, int(_EDGE * len(rows)))
            for row, after in list(pairwise(rows))[edge:-edge]:
                evicted = row.lacking == row.blocks and row.blocks not in _COUNTS
                if evicted or row.lacking not in {0, _lacking(row.blocks), row.blocks}:
                    continue
                kind = "all" if not row.lacking else "some" if row.lacking < row.blocks else "none"
                add(f"get {kind}", row.blocks, row.get_ns)
                if row.lacking:
                    add("put", row.lacking, row.put_ns)
                own_ns = after.started_ns - row.started_ns - row.get_ns - (row.put_ns if row.lacking else 0)
                add("own, putting" if row.lacking else "own", row.blocks, own_ns)

    def profile(self) -> MachineProfile:
        """The profile, from everything measured so far."""
        return MachineProfile(self._seen)


def _around(known: Sequence[int], wanted: set[int]) -> list[int]:
    """The measured values next to a wanted one, on either side."""
    below = {max(one for one in known if one <= value) for value in wanted}
    return sorted(below | {min(one for one in known if one >= value) for value in wanted})


# --- the points


class _Point(NamedTuple):
    name: str
    side: _Side
    parts: list[Requests]
    load: Load


class _Found(NamedTuple):
    """The compared figures."""

    gets_per_s: float
    p50_s: float
    p99_s: float
    hit_rate: float

    @classmethod
    def of(cls, outcome: Outcome) -> _Found:
        times = outcome.gets_s
        return cls(
            outcome.gets_per_s, quantile(times, 0.5), quantile(times, 0.99), outcome.hits / outcome.blocks
        )


def _expected(profile: MachineProfile, load: Load) -> _Found:
    """The median of some replays, each of another part of the profile."""
    found = [_Found.of(replay(profile, load, seed)) for seed in range(_REPLAYS)]
    return _Found(*map(statistics.median, zip(*found, strict=True)))


def _measured(point: _Point) -> _Found:
    parts = point.side.run(point.load.block_bytes, point.parts)
    rows = [row for part in parts for row in part]
    begun_ns, ended_ns = min(row.started_ns for row in rows), max(row.ended_ns for row in rows)
    return _Found.of(
        Outcome(
            (ended_ns - begun_ns) / 1e9,
            [row.get_ns / 1e9 for row in rows],
            sum(row.blocks for row in rows),
            sum(row.blocks - row.lacking for row in rows),
        )
    )


def _points(
    memory: _Side, evicting: dict[int, _Side], three: _Side, names: _Names, capacity: dict[int, int]
) -> Iterator[_Point]:
    """Random gets from memory; chats that get earlier turns and put new ones, on a drive too small for them."""
    rng = random.Random(2)
    for side, kib, blocks, clients in (
        *((memory, 128, 8, clients) for clients in (1, 2, 3, 4)),
        *(
            (memory, 256, 4, 1),
            (memory, 256, 4, 3),
            (memory, 384, 12, 2),
            (three, 128, 8, 2),
            (three, 128, 8, 4),
        ),
    ):
        stored = [(user, names.fresh(blocks)) for user in range(_USERS)]
        side.run(kib * _KIB, [stored])
        asked = [stored[rng.randrange(_USERS)] for _ in range(_POINT_GETS)]
        name = f"memory, {blocks} x {kib} KiB, clients {clients}, nodes {len(side.nodes)}"
        yield _point(name, side, kib * _KIB, asked, clients, stored, 10**6)
    for side, kib, clients in (
        *((evicting[128], 128, clients) for clients in (1, 2, 3, 4)),
        *((evicting[256], 256, 1), (evicting[256], 256, 3), (three, 128, 2), (three, 128, 4)),
    ):
        room = capacity[kib] if side is not three else 10**6
        name = f"chats, {kib} KiB, clients {clients}, nodes {len(side.nodes)}"
        yield _point(name, side, kib * _KIB, _turns(names), clients, [], room)


def _turns(names: _Names) -> Requests:
    work = chats(
        Chats(sessions=150, sessions_per_s=0.5, turns=6, turn_tokens=1000, answer_tokens=500, system_tokens=0)
    )
    numbers: dict[int, int] = {}
    found = []
    for request in work:
        for block in request.blocks:
            if block not in numbers:
                (numbers[block],) = names.fresh(1)
        found.append((request.user, [numbers[block] for block in request.blocks[: _COUNTS[-1]]]))
    return found[:_CHATS_GETS]


def _point(
    name: str,
    side: _Side,
    block_bytes: int,
    asked: Requests,
    clients: int,
    stored: Requests,
    capacity_blocks: int,
) -> _Point:
    parts = _dealt(asked, clients)
    load = Load(parts, block_bytes, side.targets, capacity_blocks, stored)
    return _Point(name, side, parts, load)


def _capacity(side: _Side, kib: int, names: _Names) -> int:
    """How many blocks a node keeps if more are put than fit: counted in advance, as the profile is, several times.

    The node evicts many at a time, so the number varies.
    """
    return round(statistics.fmean(_kept(side, kib, names) for _ in range(_FILLS)))


def _kept(side: _Side, kib: int, names: _Names) -> int:
    """Fill the node, and find the oldest block that is left."""
    wanted = 5 * _CHATS_BLOCKS // 4
    blocks = names.fresh(wanted)
    batches = [(0, blocks[at : at + _COUNTS[-1]]) for at in range(0, wanted, _COUNTS[-1])]
    side.run(kib * _KIB, [batches])
    gone, there = -1, wanted - 1
    while there - gone > 1:
        middle = (gone + there) // 2
        ((row,),) = side.run(kib * _KIB, [[(0, [blocks[middle]])]])
        gone, there = (middle, there) if row.lacking else (gone, middle)
    return wanted - there


# --- all of it


def run(form: Form, results: Path = Path("build/bench")) -> None:
    """Measure all points."""
    rounds = int(os.environ.get("TRIGGERKV_TWIN_ROUNDS", "3"))
    names = _Names()
    pairs: dict[str, list[tuple[_Found, _Found]]] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder, ExitStack() as stack:
        home = Path(folder).resolve()
        memory = _open(stack, home / "memory", max(_CLIENTS), capacity=_CAPACITY, hot=_HOT)
        writing = _open(stack, home / "writing", max(_CLIENTS), capacity=_CAPACITY, hot=_HOT)
        # Each drive has blocks of one size, like an engine's. With several, a drive also clears room for large ones.
        evicting = {
            kib: _open(
                stack, home / f"of {kib}", max(_CLIENTS), capacity=str(_CHATS_BLOCKS * kib * _KIB), hot=_HOT
            )
            for kib in (128, 256)
        }
        three = _open(stack, home / "three", max(_CLIENTS), nodes=3, capacity=_CAPACITY, hot=_HOT)
        capacity = {kib: _capacity(side, kib, names) for kib, side in evicting.items()}
        sides = [(_SIZES[0], memory), (_SIZES[0], writing), (_SIZES[0], three)]
        for size, side in (*sides, *((kib * _KIB, side) for kib, side in evicting.items())):
            for user in range(_USERS):  # a client connects at its first call
                side.run(size, [[(user, names.fresh(1))] for _ in side.clients])
        profiler = _Profiler(memory, writing, names)
        for turn in range(1 + rounds):
            if turn < 2:
                profiler.begin()
            for point in _points(memory, evicting, three, names, capacity):
                profiler.slice(point.load)
                expected = _expected(profiler.profile(), point.load)
                found = _measured(point)
                if turn:
                    pairs.setdefault(point.name, []).append((expected, found))
                print(
                    point.name,
                    *(f"{a:.4g}/{b:.4g}" for a, b in zip(expected, found, strict=True)),
                    flush=True,
                )
    _judge(form, pairs, results)


def _judge(form: Form, pairs: dict[str, list[tuple[_Found, _Found]]], results: Path) -> None:
    """Each point's median round; and the median over all points, which is the goal's."""
    errors: dict[str, list[float]] = {"gets_per_s": [], "p50_s": [], "p99_s": []}
    cells = []
    for name, rounds in pairs.items():
        for metric, all_errors in errors.items():
            ratio = statistics.median(
                getattr(expected, metric) / getattr(found, metric) for expected, found in rounds
            )
            measured = statistics.median(getattr(found, metric) for _, found in rounds)
            all_errors.append(abs(ratio - 1))
            cells.append({"point": name, "metric": metric, "measured": measured, "twin_to_real": ratio})
        hits = [(expected.hit_rate, found.hit_rate) for expected, found in rounds]
        off = statistics.median(abs(expected - found) for expected, found in hits)
        form.note(f"{name}: hit rate off by", off, "", goal=_HITS_GOAL, lower_is_better=True)
        cells.append({"point": name, "metric": "hit_rate", "measured": hits[0][1], "off_by": off})
    for metric, all_errors in errors.items():
        what = f"{metric}, {len(all_errors)} points: median error"
        form.note(what, statistics.median(all_errors), "", goal=_GOAL, lower_is_better=True)
    for cell in cells:
        print(
            "  ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in cell.values())
        )
    results.mkdir(parents=True, exist_ok=True)
    (results / "twin.cells.json").write_text(json.dumps(cells, indent=2) + "\n")
