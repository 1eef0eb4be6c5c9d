"""A twin of a real node and its clients on one machine: predicts a load from a profile that was taken with others.

Each client sends its requests one after the other: it gets all blocks, puts the missing ones, and does some work of
its own in between. The times are drawn from the profile: by kind of operation, at some numbers of blocks, sizes,
and active clients, interpolated between these. So a shortage of cores, of the node's thread, of memory or of the drive
is contained in a profile with several clients. Slow operations come in bursts, so a replay draws from a stretch of the
profile about as long as itself; the seed selects it.

What always holds: the simulator's catalogue decides, with the store's own policy, which blocks are stored, and the
simulator's placement where. The same profile and load give the same result.

What it doesn't do: extrapolate. More clients than were measured are refused, as are sizes beyond the measured ones.
"""

from __future__ import annotations

import heapq
import random
import statistics
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from sim.output import counted
from sim.replay.catalogue import Catalogue, policy_maker
from sim.replay.kv_homes import homes, lot_of
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["KINDS", "Load", "MachineProfile", "Outcome", "Seen", "quantile", "replay"]

# What takes time: a get that finds all blocks, some or none; a put until it is written; and the client's own work in
# between, without and with something to put.
KINDS = ("get all", "get some", "get none", "put", "own", "own, putting")


_STRETCH_MIN = 100
_FASTEST = 0.5  # of the median, however fast larger operations were


class Seen(NamedTuple):
    """One operation that was measured."""

    blocks: int
    block_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Measured operations, by kind and by the number of active clients."""

    seen: Mapping[tuple[str, int], Sequence[Seen]]
    _medians: dict[tuple[str, int], dict[tuple[int, int], float]] = field(default_factory=dict)
    _later: dict[tuple[str, int], list[tuple[int, int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, all_seen in self.seen.items():
            groups: dict[tuple[int, int], list[float]] = {}
            for one in all_seen:
                groups.setdefault((one.blocks, one.block_bytes), []).append(one.seconds)
            medians = {shape: statistics.median(times) for shape, times in groups.items()}
            self._medians[key] = medians
            self._later[key] = [
                (one.blocks, one.block_bytes, one.seconds - medians[one.blocks, one.block_bytes])
                for one in all_seen
            ]

    def clients(self, kind: str) -> list[int]:
        """The numbers of clients with which a kind was measured."""
        return sorted(clients for one, clients in self._medians if one == kind)

    def median_s(self, kind: str, clients: float, blocks: int, block_bytes: int) -> float:
        """The median time of an operation with this number of active clients."""
        known = self.clients(kind)
        if not known or not known[0] <= clients <= known[-1]:
            raise OutOfRange("clients", clients, "clients that were measured", f"one of {known} for {kind}")
        at = min(bisect_right(known, clients), len(known) - 1)
        low, high = known[max(0, at - 1)], known[at]
        near = self._at(kind, low, blocks, block_bytes)
        if clients == low:
            return near
        return near + (clients - low) / (high - low) * (self._at(kind, high, blocks, block_bytes) - near)

    def _at(self, kind: str, clients: int, blocks: int, block_bytes: int) -> float:
        """Interpolated linearly between the four neighbouring shapes."""
        medians = self._medians[kind, clients]
        counts, sizes = (sorted({shape[i] for shape in medians}) for i in (0, 1))
        if not (counts[0] <= blocks <= counts[-1] and sizes[0] <= block_bytes <= sizes[-1]):
            what = f"of {counted(blocks, 'block')} of {block_bytes} B"
            accepted = f"{counts[0]} to {counts[-1]} blocks of {sizes[0]} to {sizes[-1]} B"
            raise OutOfRange(f"an operation ({kind})", what, "blocks that were measured", accepted)
        row, across = _place(counts, blocks)
        column, along = _place(sizes, block_bytes)
        first, last = (
            (1 - along) * medians[count, sizes[column]]
            + along * medians[count, sizes[min(column + 1, len(sizes) - 1)]]
            for count in (counts[row], counts[min(row + 1, len(counts) - 1)])
        )
        return first + across * (last - first)

    def later_s(self, kind: str, clients: int, blocks: int, block_bytes: int) -> list[float]:
        """By how much single operations of the neighbouring shapes exceeded their median, in order of time.

        In seconds, not as a share: the wait for a core is as long for a small operation as for a large one. But large
        ones also delay each other in ways that small ones don't wait for.
        """
        near = min(self.clients(kind), key=lambda one: (abs(one - clients), -one))
        counts, sizes = (sorted({shape[i] for shape in self._medians[kind, near]}) for i in (0, 1))
        wanted = {(count, size) for count in _around(counts, blocks) for size in _around(sizes, block_bytes)}
        return [later_s for count, size, later_s in self._later[kind, near] if (count, size) in wanted]


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of each client, in order: (user, blocks); and the nodes that serve them."""

    requests: Sequence[Sequence[tuple[int, Sequence[int]]]]  # by client
    block_bytes: int
    nodes: Sequence[str]  # their addresses, which their clients hash
    capacity_blocks: int  # of a node's drive; its memory holds as many
    stored: Sequence[tuple[int, Sequence[int]]] = ()  # from the beginning, put in this order


def _place(known: Sequence[int], value: int) -> tuple[int, float]:
    """The index of the last known number up to a value, and how far the value is from it to the next."""
    at = max(0, min(bisect_right(known, value) - 1, len(known) - 2))
    return at, (value - known[at]) / (known[at + 1] - known[at]) if len(known) > 1 else 0.0


def _around(known: Sequence[int], value: int) -> tuple[int, int]:
    """The last known number up to a value, and the next one."""
    row, across = _place(known, value)
    return known[row], known[min(row + 1, len(known) - 1) if across else row]


class Outcome(NamedTuple):
    """The result of a load."""

    duration_s: float
    gets_s: list[float]
    blocks: int
    hits: int

    @property
    def gets_per_s(self) -> float:
        """The rate of all clients together."""
        return len(self.gets_s) / self.duration_s


def quantile(times: Sequence[float], share: float) -> float:
    """The quantile of the times for this share."""
    ranked = sorted(times)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


class _Stage(Enum):
    GETS, WORKS, PUTS = range(3)


@dataclass(slots=True)
class _Client:
    todo: Sequence[tuple[int, Sequence[int]]]
    at: int = 0
    stage: _Stage = _Stage.GETS
    lacking: Sequence[int] = ()
    begun_s: float = 0.0


class _Replay:
    def __init__(self, profile: MachineProfile, load: Load, seed: int) -> None:
        self._profile, self._load = profile, load
        self._rng = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._first = homes([(target.encode(), 1) for target in load.nodes])
        make, capacity = policy_maker("lru"), load.capacity_blocks
        self._nodes = [Catalogue(make(capacity), capacity) for _ in load.nodes]
        self._clients = [_Client(todo) for todo in load.requests]
        self._stretch, self._place = max(_STRETCH_MIN, sum(map(len, load.requests))), self._rng.random()
        self._later: dict[tuple[str, int], list[float]] = {}
        self._under_way: list[tuple[float, int]] = []  # until when, and of which client
        self._hits = 0

    def _node_of(self, user: int) -> Catalogue:
        return self._nodes[int(self._first[lot_of(b"", b"user %d" % user)])]

    def _put(self, user: int, blocks: Sequence[int]) -> None:
        """Put blocks in order: the last one is the most recently used."""
        node = self._node_of(user)
        for block in blocks:
            node.admit((block,))

    def _begin(self, now_s: float, number: int, kind: str, blocks: int) -> None:
        median_s = self._profile.median_s(kind, len(self._clients), blocks, self._load.block_bytes)
        later_s = self._later.get((kind, blocks)) or self._drawn_from(kind, blocks)
        took_s = max(_FASTEST * median_s, median_s + later_s[self._rng.randrange(len(later_s))])
        heapq.heappush(self._under_way, (now_s + took_s, number))

    def _drawn_from(self, kind: str, blocks: int) -> list[float]:
        """The stretch of the profile from whose slow operations an operation's time is drawn."""
        later_s = self._profile.later_s(kind, len(self._clients), blocks, self._load.block_bytes)
        begin = int(self._place * max(0, len(later_s) - self._stretch))
        found = self._later[kind, blocks] = later_s[begin : begin + self._stretch]
        return found

    def _get(self, now_s: float, number: int) -> None:
        client = self._clients[number]
        if client.at == len(client.todo):
            return
        user, blocks = client.todo[client.at]
        node = self._node_of(user)
        found = [block for block in blocks if block in node]
        node.touch(found[::-1])
        self._hits += len(found)
        client.lacking = [block for block in blocks if block not in node]
        client.stage, client.begun_s = _Stage.GETS, now_s
        kind = "get all" if not client.lacking else "get some" if found else "get none"
        self._begin(now_s, number, kind, len(blocks))

    def go(self) -> Outcome:
        for user, blocks in self._load.stored:
            self._put(user, blocks)
        for number in range(len(self._clients)):
            self._get(0.0, number)
        now_s, gets_s = 0.0, []
        while self._under_way:
            now_s, number = heapq.heappop(self._under_way)
            client = self._clients[number]
            user, blocks = client.todo[client.at]
            if client.stage is _Stage.GETS:
                gets_s.append(now_s - client.begun_s)
                client.stage = _Stage.WORKS
                self._begin(now_s, number, "own, putting" if client.lacking else "own", len(blocks))
            elif client.stage is _Stage.WORKS and client.lacking:
                client.stage = _Stage.PUTS
                self._begin(now_s, number, "put", len(client.lacking))
            else:
                self._put(user, client.lacking)
                client.at += 1
                self._get(now_s, number)
        asked = sum(len(blocks) for todo in self._load.requests for _, blocks in todo)
        return Outcome(now_s, gets_s, asked, self._hits)


def replay(profile: MachineProfile, load: Load, seed: int = 1) -> Outcome:
    """Let the clients send their requests until the last one is answered."""
    return _Replay(profile, load, seed).go()
