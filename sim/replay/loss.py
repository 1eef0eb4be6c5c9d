"""The effect of lost nodes and drives on a large cluster under millions of gets, and how long it lasts.

Users make requests at random; a get fetches all of a user's KV from the home node. Its pages are spread over the
node's drives, so these act as one faster drive, and the loss of one takes a page of nearly every block: users with KV
there recompute it, as after the loss of the node, though the node continues with the other drives. A get from a lost
node is a MISS after a deadline, until the node is removed from the map; then its users have new homes, and each
recomputes and puts the KV once. This is the only repair: nothing is copied between nodes.

What always holds: homes follow the product's placement; each get and put queues at the home's drives and links in
the event core. The same arguments give the same result.

What it doesn't do: the GPUs' side. The time to recompute a missed prompt is reported as work, not queued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.replay.events import Events, Step
from sim.replay.kv_homes import homes, lot_of
from sim.replay.run import prefill_s
from sim.units import OutOfRange, require

if TYPE_CHECKING:
    import numpy.typing as npt

    from sim.models import Model
    from sim.replay.cluster_hardware import Cluster

    Floats = npt.NDArray[np.float64]
    Integers = npt.NDArray[np.int64]

__all__ = ["LossReport", "Losses", "Phase", "lose"]

_WHEN = 1 / 3  # of the run is over when it happens
_HEALED = 0.1  # of the gets that missed at first still miss
_BINS = 300


@dataclass(frozen=True, slots=True)
class Losses:
    """The load, and the failures."""

    requests: int = 1_000_000
    users: int = 200_000
    history_tokens: int = 8000
    busy: float = 0.5  # of the narrowest part, on average
    nodes: int = 1  # lost nodes
    drives: int = 0  # lost drives, each of another node
    slow_nodes: int = 0
    slow_factor: float = 4.0  # operations of slow nodes take this many times as long
    noticed_s: float = 30.0  # until lost nodes are removed from the map
    deadline_s: float = 1.0  # the time until a get from a lost node is a miss
    seed: int = 1

    def __post_init__(self) -> None:
        require("--requests", self.requests, "a number of requests", 1000, 10**8)
        require("--users", self.users, "a number of users", 1, 10**7)
        require("--history-tokens", self.history_tokens, "tokens", 1, 10**7)
        require("--busy", self.busy, "a share of the time", 0.001, 0.95)
        require("--lose-nodes", self.nodes, "a number of nodes", 0, 1023)
        require("--lose-drives", self.drives, "drives", 0, 1023)
        require("--slow-nodes", self.slow_nodes, "a number of nodes", 0, 1023)
        require("--slow-factor", self.slow_factor, "times longer", 1, 1000)
        require("--noticed-s", self.noticed_s, "seconds", 0, 1e6)
        require("--deadline-s", self.deadline_s, "seconds", 0, 1000)
        require("--seed", self.seed, "a whole number", 0, 2**63)


class Phase(NamedTuple):
    """A part of the run."""

    name: str
    gets: int
    hit_rate: float
    get_p50_s: float
    get_p99_s: float
    get_p999_s: float


class LossReport(NamedTuple):
    """The result."""

    duration_s: float
    lost_at_s: float
    healed_s: float | None  # after the loss, until a tenth as many gets miss; None: not in this run
    lost_share: float  # of the users, whose KV was there
    put_again_bytes: float
    put_again_most_bytes_per_s: float  # in one three-hundredth of the run
    gpu_s: float  # of recomputing
    busiest: float  # share of the run in which the busiest of all drives and links had work; above 1 it falls behind
    fullest: float  # users of the fullest node, before the loss, divided by the mean
    phases: tuple[Phase, ...]


class _Asked(NamedTuple):
    """For each get: its time, its node, whether that is lost and not noticed yet, and whether it is put again."""

    arrival_s: Floats
    home: Integers
    unknown: npt.NDArray[np.bool_]
    first: npt.NDArray[np.bool_]


def lose(model: Model, cluster: Cluster, losses: Losses) -> LossReport:
    """Run it."""
    broken = losses.nodes + losses.drives + losses.slow_nodes
    if broken > cluster.nodes - (losses.nodes > 0):
        accepted = f"of the {cluster.nodes} nodes, each in one way, with one left"
        raise OutOfRange("--lose-nodes, --lose-drives and --slow-nodes", broken, "nodes", accepted)
    if losses.drives and cluster.drives_per_node == 1:
        raise OutOfRange("drives_per_node", 1, "drives", "2 at least: one of them is to be lost")
    rng = np.random.default_rng(losses.seed)
    size_bytes = float(losses.history_tokens * model.token_bytes)
    narrow = cluster.nodes * cluster.node_get_bytes_per_s
    duration_s = losses.requests * size_bytes / (losses.busy * narrow)
    when_s = _WHEN * duration_s
    arrival_s = np.sort(rng.uniform(0.0, duration_s, losses.requests))
    users = rng.integers(0, losses.users, losses.requests)

    before, after = _homes_of_users(cluster.nodes, losses)
    lost_nodes = before < losses.nodes
    lost_drives = (before >= losses.nodes) & (before < losses.nodes + losses.drives)
    known_s = np.where(lost_nodes[users], when_s + losses.noticed_s, when_s)
    gone = (arrival_s >= when_s) & (lost_nodes | lost_drives)[users]
    unknown = gone & (arrival_s < known_s)  # a get from a lost node
    first = np.zeros(losses.requests, dtype=bool)
    at = np.flatnonzero(gone & ~unknown)
    first[at[np.unique(users[at], return_index=True)[1]]] = True  # recomputes, and puts
    missed = unknown | first

    home = np.where(arrival_s >= known_s, after[users], before[users])
    took_s, busiest = _sent(cluster, losses, size_bytes, _Asked(arrival_s, home, unknown, first))
    took_s[unknown] = losses.deadline_s
    share = float((lost_nodes | lost_drives).mean())
    bins = np.bincount((arrival_s / duration_s * _BINS).astype(int), minlength=_BINS)
    again = np.bincount((arrival_s[first] / duration_s * _BINS).astype(int), minlength=_BINS)
    return LossReport(
        duration_s,
        when_s,
        _healed_s(arrival_s[missed], when_s, duration_s, share * bins.astype(np.float64)),
        share,
        float(first.sum() * size_bytes),
        float(again.max() * size_bytes / (duration_s / _BINS)),
        float(missed.sum()) * prefill_s(model, cluster, losses.history_tokens) * cluster.gpus_per_engine,
        busiest,
        float(np.bincount(before, minlength=cluster.nodes).max() * cluster.nodes / losses.users),
        _phases(arrival_s, took_s, missed, (when_s, min(duration_s, when_s + losses.noticed_s))),
    )


def _homes_of_users(nodes: int, losses: Losses) -> tuple[Integers, Integers]:
    """Each user's node, before and after the loss; the first ones are lost."""
    places = [(b"node-%d:7070" % number, 1) for number in range(nodes)]
    lots = np.array([lot_of(b"", b"user %d" % user) for user in range(losses.users)])
    return homes(places)[lots].astype(np.int64), (homes(places[losses.nodes :])[lots] + losses.nodes).astype(
        np.int64
    )


def _sent(
    cluster: Cluster,
    losses: Losses,
    size_bytes: float,
    asked: _Asked,
) -> tuple[Floats, float]:
    """Every get and put through its node; how long each took, and how busy the busiest drives or links were."""
    arrival_s, home, unknown, first = asked
    drives = np.full(cluster.nodes, cluster.drives_per_node, dtype=float)
    drives[losses.nodes : losses.nodes + losses.drives] -= 1
    slower = np.ones(cluster.nodes)
    slow = losses.nodes + losses.drives
    slower[slow : slow + losses.slow_nodes] = losses.slow_factor
    link_s = 8 / (cluster.links_per_node * cluster.link_bits_per_s)
    with Events() as events:
        gets, puts, parts = [], [], []
        for count, factor in zip(drives, slower, strict=True):
            disk, link_out, link_in = (events.add_resource() for _ in range(3))
            read_s = factor / (count * cluster.drive_read_bytes_per_s)
            written_s = factor / (count * cluster.drive_write_bytes_per_s)
            out = Step(link_out, 0.0, factor * link_s, cluster.link_latency_s)
            into = Step(link_in, 0.0, factor * link_s)
            read = Step(disk, 0.0, read_s, cluster.drive_read_latency_s)
            gets.append(events.add_route([read, out]))
            puts.append(events.add_route([into, Step(disk, 0.0, written_s, cluster.drive_write_latency_s)]))
            parts += [disk, link_out, link_in]
        sent = ~unknown
        routes = np.where(first, np.array(puts)[home], np.array(gets)[home])[sent].astype(np.int32)
        took_s = np.zeros(len(arrival_s))
        units = np.full(int(sent.sum()), size_bytes)
        took_s[sent] = events.stream(arrival_s[sent], units, routes) - arrival_s[sent]
        busy = max(events.usage(part).busy_s for part in parts) / arrival_s[-1]
    took_s[first] = np.nan  # a put, in the background
    return took_s, busy


def _healed_s(missed_s: Floats, when_s: float, duration_s: float, at_first: Floats) -> float | None:
    """The end of the last stretch with a tenth of the first one's misses; None if that is the run's last one."""
    misses = np.bincount((missed_s / duration_s * _BINS).astype(int), minlength=_BINS)
    bad = np.flatnonzero(misses > _HEALED * at_first)
    if not len(bad):
        return 0.0
    end_s = (bad[-1] + 1) * duration_s / _BINS
    return None if bad[-1] == _BINS - 1 else max(0.0, float(end_s) - when_s)


def _phases(
    arrival_s: Floats,
    took_s: Floats,
    missed: npt.NDArray[np.bool_],
    ends_s: tuple[float, float],
) -> tuple[Phase, ...]:
    found = []
    edges = (0.0, *ends_s, float(arrival_s[-1]) + 1)
    for name, begin_s, end_s in zip(("before", "unnoticed", "afterwards"), edges, edges[1:], strict=False):
        begin, end = np.searchsorted(arrival_s, (begin_s, end_s))
        if begin == end:
            continue
        times = took_s[begin:end]
        p50_s, p99_s, p999_s = np.nanquantile(times, (0.5, 0.99, 0.999))
        rate = 1 - float(missed[begin:end].mean())
        found.append(Phase(name, int(end - begin), rate, float(p50_s), float(p99_s), float(p999_s)))
    return tuple(found)
