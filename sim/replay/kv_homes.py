"""Which node stores a user's KV, and which of its drives a page: weighted rendezvous hashing, as in the product.

It repeats `kvstore.placement`, because the simulator imports nothing of the store; a test compares the two key by
key. Names fall into 8,192 lots; each node, or drive, gets for each lot a time drawn from its own name, and the first
one is the lot's home. A cluster whose nodes know each other has 524,288 lots, with another draw (`cluster_orders`).

What always holds: all of a user's KV is on one node, the user's home; a page (a block's KV of one layer and one GPU)
is on one of its drives; the loss of a node or a drive moves only what it had.
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import blake2b, shake_128
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from sim.replay.events import LOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["CLUSTER_LOTS", "cluster_orders", "drive_homes", "home_of_user", "homes", "lot_of", "node_homes"]

_LOT_SHIFT = 32 - (LOTS.bit_length() - 1)
_DRAW_BYTES = 8
CLUSTER_LOTS = 1 << 19  # of a new cluster of the product
_LOG_OF_ALL = 64 * math.log(2)


def lot_of(tenant: bytes, name: bytes) -> int:
    """The lot that a name falls into."""
    return crc32(tenant + name) >> _LOT_SHIFT


def homes(places: Sequence[tuple[bytes, int]]) -> npt.NDArray[np.int32]:
    """The home of each lot among places, each with its name and its weight."""
    first = np.full(LOTS, np.inf)
    found = np.zeros(LOTS, dtype=np.int32)
    for number, (name, weight) in enumerate(places):
        arrival = _arrivals(name, weight)
        earlier = arrival < first
        first[earlier], found[earlier] = arrival[earlier], number
    return found


@lru_cache(maxsize=256)
def node_homes(nodes: int) -> npt.NDArray[np.int32]:
    """The node of each lot, all with the same weight."""
    return homes([(b"node-%d:7070" % number, 1) for number in range(nodes)])


@lru_cache(maxsize=256)
def drive_homes(drives: int) -> npt.NDArray[np.int32]:
    """The drive of each lot within a node, all of one size. The drives of every node are named alike."""
    return homes([(b"drive-%d" % number, 1) for number in range(drives)])


def home_of_user(user: int, nodes: int) -> int:
    """The node of a user."""
    return int(node_homes(nodes)[lot_of(b"", b"user %d" % user)])


def cluster_orders(names: Sequence[bytes], depth: int) -> npt.NDArray[np.int64]:
    """The first `depth` nodes of each lot of a cluster, in its order, all with the same weight."""
    depth = min(depth, len(names))
    steps = np.arange(1, CLUSTER_LOTS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.concatenate(
        [_first_drawn(names, some, depth) for some in np.split(steps, CLUSTER_LOTS // LOTS)]
    )


def _first_drawn(names: Sequence[bytes], steps: npt.NDArray[np.uint64], depth: int) -> npt.NDArray[np.int64]:
    highest = np.zeros((depth, len(steps)), dtype=np.uint64)
    found = np.zeros((depth, len(steps)), dtype=np.int64)
    for number, name in enumerate(names):
        draw = steps + np.uint64(int.from_bytes(blake2b(name, digest_size=8).digest(), "little"))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            draw = (draw ^ (draw >> np.uint64(shift))) * np.uint64(factor)
        draw ^= draw >> np.uint64(31)
        lots = np.flatnonzero(draw >= highest[-1])  # few, after the first nodes
        new, node = draw[lots], np.full(len(lots), number)
        for rank in range(depth):
            before, its = highest[rank, lots], found[rank, lots]
            is_higher = new > before
            highest[rank, lots], found[rank, lots] = np.maximum(new, before), np.where(is_higher, node, its)
            new, node = np.minimum(new, before), np.where(is_higher, its, node)
    return found.T


def _arrivals(name: bytes, weight: int) -> npt.NDArray[np.float64]:
    draws = np.frombuffer(shake_128(name).digest(_DRAW_BYTES * LOTS), dtype="<u8")
    return (_LOG_OF_ALL - np.log(draws.astype(np.float64) + 1)) / weight
