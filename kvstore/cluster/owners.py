"""The first owners of each lot among a cluster's nodes: weighted rendezvous hashing without a table.

Each node draws a number for each lot, from its name and the lot: exponential, with its weight as rate. The node with
the lowest is the lot's first owner, and so on. Draws are made when a lot is first used, for the lots of a batch
together: a map by itself costs nothing.

What always holds: the order of two nodes in a lot depends only on those two. So a node that joins moves only the lots
that it takes, and one that leaves only those that it had. Zones never change which node is first; the second is the
first one in another zone than the first's. The memory is 8 bytes a lot, whatever the number of nodes.
What it doesn't do: list all nodes of a lot in order. Clusters of 8,192 lots use `kvstore.placement`; its draws differ.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.limits import OWNER_DRAWS_AT_ONCE, OWNERS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

__all__ = ["Owners"]

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64, whose mixing of 64 bits this is
_MIXED: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_DRAW_BITS: Final = 53  # of a float's
_PLACE_BITS: Final = 64 // OWNERS_MAX
_PLACE: Final = (1 << _PLACE_BITS) - 1


class Owners:
    """The first owners of lots, as indices in the given sequence of nodes."""

    def __init__(self, nodes: Sequence[tuple[bytes, int]], zones: Sequence[str], lots: int) -> None:
        """`nodes` are pairs of name and weight; `zones` are the nodes' zones, or empty."""
        seeds = (blake2b(name, digest_size=8).digest() for name, _ in nodes)
        self._seeds = np.array([int.from_bytes(seed, "little") for seed in seeds], dtype=np.uint64)
        self._weights = np.array([weight for _, weight in nodes], dtype=np.float64)
        self._zones = np.unique(zones, return_inverse=True)[1] if zones else None
        self._at_once = max(1, OWNER_DRAWS_AT_ONCE // max(1, len(nodes)))
        self._known = array("Q", [0]) * lots  # owners by lot, each plus 1; 0: not drawn yet

    def order_of(self, lot: int) -> tuple[int, ...]:
        """The first owners of a lot, at most `OWNERS_MAX`."""
        known = self._known[lot]
        if not known:
            self.draw((lot,))
            known = self._known[lot]
        order = []
        while known:
            order.append((known & _PLACE) - 1)
            known >>= _PLACE_BITS
        return tuple(order)

    def draw(self, lots: Iterable[int]) -> None:
        """Draw for these lots, unless it was done before: for a hundred it takes about as long as for one."""
        new = [lot for lot in set(lots) if not self._known[lot]]
        for first in range(0, len(new), self._at_once):
            some = new[first : first + self._at_once]
            for lot, order in zip(some, self._drawn(np.array(some, np.uint64)).tolist(), strict=True):
                self._known[lot] = sum((node + 1) << rank * _PLACE_BITS for rank, node in enumerate(order))

    def orders(self) -> npt.NDArray[np.int64]:
        """The same for all lots, a row each. It takes 15 ns or so for each lot and node, and is not kept."""
        lots = np.arange(len(self._known), dtype=np.uint64)
        parts = (lots[first : first + self._at_once] for first in range(0, len(lots), self._at_once))
        return np.concatenate([self._drawn(part) for part in parts])

    def _drawn(self, lots: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        draws = ((lots + np.uint64(1)) * _STEP)[:, None] + self._seeds
        for shift, factor in _MIXED:
            draws = (draws ^ (draws >> np.uint64(shift))) * np.uint64(factor)
        draws ^= draws >> np.uint64(31)
        uniform = ((draws >> np.uint64(64 - _DRAW_BITS)) + np.uint64(1)) * 2.0**-_DRAW_BITS
        left = np.log(uniform) / self._weights  # negative: the highest comes first
        rows = np.arange(len(lots))
        order: list[npt.NDArray[np.int64]] = []
        for rank in range(min(OWNERS_MAX, len(self._seeds))):
            if rank == 1 and self._zones is not None:
                same = self._zones == self._zones[order[0]][:, None]
                order.append(np.where(same, -np.inf, left).argmax(axis=1))
            else:
                order.append(left.argmax(axis=1))
            left[rows, order[-1]] = -np.inf
        return np.stack(order, axis=1)
