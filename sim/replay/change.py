"""The cost of a cluster's change when nodes are lost or join: which blocks have one copy, for how long, and the load.

Blocks are placed as in a new cluster of the product: in 524,288 lots, each on the first nodes of its order. When the
members change, a node with a lot's blocks sends them to the owners that lack them, by the product's rule and at the
product's rate. The loss is repeated several times, each time with other nodes.

What always holds: owners follow the product's placement, which a test compares lot by lot; the bytes that are moved
agree with `kvstore cluster plan`. The same arguments give the same result.

What it assumes: each lot has as many bytes, and is requested as often, as any other, except for the popular prefix. All
nodes have the same weight. A sender copies one lot at a time at the full rate, and a receiver takes what its
drives and links can take; so times are lower bounds. Not modelled: the walk through the index, copies that fail and are
repeated, calls and copies that slow each other down, a node without room for its copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.replay.kv_homes import CLUSTER_LOTS, cluster_orders
from sim.units import OutOfRange, require

if TYPE_CHECKING:
    import numpy.typing as npt

    from sim.replay.cluster_hardware import Cluster

    Integers = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]
    Reals = npt.NDArray[np.float64]

__all__ = ["Change", "Changed", "Trial", "change"]

_NODES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """The change, and the state and load of the nodes."""

    lose: int = 1
    join: int = 0
    replicas: int = 2
    stored_bytes: float = 1e12  # on a node on average, all copies counted
    copy_bytes_per_s: float = float(32 << 20)  # that a node sends; the product's bound
    noticed_s: float = 6.0  # until copying begins: 5 s for the lease, 1 s for the map to be stable
    busy: float = 0.5  # of a node's drives or links, on average, before the change
    popular_share: float = 0.1  # of all bytes that gets fetch: those of one prefix
    popular_blocks: int = 64  # the blocks of that prefix
    trials: int = 20
    seed: int = 1

    def __post_init__(self) -> None:
        require("--lose-nodes", self.lose, "a number of nodes", 0, _NODES_MAX)
        require("--join-nodes", self.join, "a number of nodes", 0, _NODES_MAX)
        require("--replicas", self.replicas, "a number of copies", 1, 2)
        require("--stored-bytes", self.stored_bytes, "bytes", 0, 1e18)
        require("--copy-bytes-per-s", self.copy_bytes_per_s, "bytes per second", 1, 1e12)
        require("--noticed-s", self.noticed_s, "seconds", 0, 1e6)
        require("--busy", self.busy, "a share of the time", 0.001, 1)
        require("--popular-share", self.popular_share, "a share of the bytes", 0, 1)
        require("--popular-blocks", self.popular_blocks, "a number of blocks", 1, 10**6)
        require("--trials", self.trials, "a number of trials", 1, 1000)
        require("--seed", self.seed, "a whole number", 0, 2**63)


class Trial(NamedTuple):
    """One change. Shares are of all blocks; fullness and load are 1 for a node with the mean before the change.

    A lost block is on no node; its gets count as before, since it is computed and put again.
    """

    lost_share: float  # no copy is left
    short_share: float  # fewer copies are left than there should be
    moved_bytes: float
    senders: int
    receivers: int
    half_s: float  # after the change, until half of the copies are made
    safe_s: float  # until all are
    asked_twice_share: float  # of the gets, until then: the first owner lacks the block, and another has it
    fullest_before: float
    fullest_after: float
    busiest_before: float  # shares of the time of a node's drives or links; above 1 the node falls behind
    busiest_after: float
    copying: float  # the highest rate of a sender, as a share of what a node can send
    popular_before: float  # the busiest node, with the popular prefix
    popular_after: float


class Changed(NamedTuple):
    """All trials."""

    trials: tuple[Trial, ...]
    one_node: float  # the share of its time that a node needs for the prefix, if it has all of it

    def median(self, name: str) -> float:
        """The median of a figure."""
        return float(median(getattr(one, name) for one in self.trials))

    def worst(self, name: str) -> float:
        """The highest value of a figure."""
        return float(max(getattr(one, name) for one in self.trials))


def change(cluster: Cluster, terms: Change) -> Changed:
    """Run as many trials as the terms give."""
    nodes = cluster.nodes + terms.join
    if terms.lose >= nodes or terms.lose > cluster.nodes:
        raise OutOfRange("--lose-nodes", terms.lose, "nodes", f"of the {cluster.nodes}, with one left")
    require("nodes, with --join-nodes,", nodes, "a number of nodes", 1, _NODES_MAX)
    names = [b"node-%d:7070" % number for number in range(nodes)]
    order = cluster_orders(names, terms.replicas + max(terms.lose, terms.join))
    rng = np.random.default_rng(terms.seed)
    old = np.arange(nodes) < cluster.nodes
    before = _owners(order, old, terms.replicas)
    known: dict[bytes, Trial] = {}  # without the popular prefix, by the nodes that are alive
    trials = []
    for _ in range(terms.trials):
        alive = np.ones(nodes, dtype=bool)
        alive[rng.choice(cluster.nodes, terms.lose, replace=False)] = False
        popular = rng.integers(0, CLUSTER_LOTS, terms.popular_blocks)
        after = _owners(order, alive, terms.replicas)
        if (which := alive.tobytes()) not in known:
            known[which] = _trial(cluster, terms, before, after, alive)
        loads = (_busiest(terms, cluster, owners, nodes, popular) for owners in (before, after))
        trials.append(known[which]._replace(popular_before=next(loads), popular_after=next(loads)))
    return Changed(tuple(trials), terms.busy * cluster.nodes * terms.popular_share)


def _trial(cluster: Cluster, terms: Change, before: Integers, after: Integers, alive: Flags) -> Trial:
    """All of a trial but the popular prefix."""
    left = alive[before]
    kept, has_all = left.any(axis=1), left.all(axis=1)
    mean = before.size / cluster.nodes  # copies of lots on a node, before
    each = terms.stored_bytes / mean
    changed = ~has_all | (before[:, : after.shape[1]] != after).any(axis=1)
    copies = _copies(before[changed], left[changed], after[changed])
    made_s = _made_s(copies, each, terms.copy_bytes_per_s, _put_bytes_per_s(cluster))
    found_first = (after[:, :1] == before).any(axis=1)
    busiest_before, busiest_after = (
        _busiest(terms, cluster, owners, len(alive)) for owners in (before, after)
    )
    return Trial(
        lost_share=1 - float(kept.mean()),
        short_share=float((kept & ~has_all).mean()),
        moved_bytes=each * len(copies),
        senders=len(np.unique(copies[:, 0])),
        receivers=len(np.unique(copies[:, 1])),
        half_s=terms.noticed_s + float(np.quantile(made_s, 0.5, method="higher")) if len(made_s) else 0.0,
        safe_s=terms.noticed_s + float(made_s.max()) if len(made_s) else 0.0,
        asked_twice_share=float((kept & ~found_first).mean()),
        fullest_before=float(np.bincount(before.ravel()).max()) / mean,
        fullest_after=float(np.bincount(after[kept].ravel(), minlength=len(alive)).max()) / mean,
        busiest_before=busiest_before,
        busiest_after=busiest_after,
        copying=terms.copy_bytes_per_s / cluster.node_get_bytes_per_s if len(copies) else 0.0,
        popular_before=busiest_before,
        popular_after=busiest_after,
    )


def _busiest(
    terms: Change, cluster: Cluster, owners: Integers, nodes: int, popular: Integers | None = None
) -> float:
    """The load of the busiest node, with the blocks of a popular prefix in these lots."""
    load = np.bincount(owners[:, 0], minlength=nodes) / CLUSTER_LOTS
    if popular is not None:
        of_prefix = np.bincount(owners[popular, 0], minlength=nodes) / terms.popular_blocks
        load = (1 - terms.popular_share) * load + terms.popular_share * of_prefix
    return terms.busy * cluster.nodes * float(load.max())


def _owners(order: Integers, there: Flags, replicas: int) -> Integers:
    """The owners of each lot among the present nodes."""
    present, rows = there[order], np.arange(len(order))
    owners = []
    for _ in range(min(replicas, int(there.sum()))):
        first = present.argmax(axis=1)
        owners.append(order[rows, first])
        present[rows, first] = False
    return np.stack(owners, axis=1)


def _copies(before: Integers, left: Flags, after: Integers) -> Integers:
    """Sender and receiver of each copy of a lot, lot by lot.

    The first owner that has it sends; if none has, a former owner sends to the first one, and that one to the others.
    """
    is_its: Flags = np.equal(before[:, None], after[:, :, None]) & left[:, None]
    has: Flags = is_its.max(axis=2)  # by lot and owner
    rows = np.arange(len(before))
    first = after[rows, has.argmax(axis=1)]
    senders = np.repeat(first[:, None], after.shape[1], axis=1)
    senders[:, 0] = before[rows, left.argmax(axis=1)]  # used only if no owner before it has it
    senders[:, 0][has.any(axis=1)] = first[has.any(axis=1)]
    missing: Flags = left.any(axis=1, keepdims=True) & ~has
    return np.stack([senders[missing], after[missing]], axis=1)


def _made_s(copies: Integers, each: float, send_bytes_per_s: float, take_bytes_per_s: float) -> Reals:
    """The earliest time of each copy: when its sender and receiver have made it and all before it."""
    sent_s, taken_s = (
        _nth(copies[:, column]) * each / bytes_per_s
        for column, bytes_per_s in enumerate((send_bytes_per_s, take_bytes_per_s))
    )
    made_s: Reals = np.maximum(sent_s, taken_s)
    return made_s


def _nth(nodes: Integers) -> Integers:
    """For each of these, how many before it are the same, plus 1."""
    order = np.argsort(nodes, kind="stable")
    first = np.searchsorted(nodes[order], nodes[order])
    nth = np.empty_like(nodes)
    nth[order] = np.arange(len(nodes)) - first + 1
    return nth


def _put_bytes_per_s(cluster: Cluster) -> float:
    links = cluster.links_per_node * cluster.link_bits_per_s / 8
    return min(cluster.drives_per_node * cluster.drive_write_bytes_per_s, links)
