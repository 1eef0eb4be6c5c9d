"""Which drive of a store, or which node of several, a name belongs to: weighted rendezvous hashing.

Names fall into 8,192 lots, and each lot has its own order of all drives, drawn from their uuids (of nodes, from their
names): the first is the lot's home, the next is used when the first can't accept a block, and so on. Clusters with more
lots have `kvstore.cluster.owners` instead.

What always holds:

- The order of two drives in a lot depends only on those two. So an added drive moves only the lots that it takes, and
  a removed drive moves only the lots that it had.
- Each drive is the home of a share of all lots in proportion to its weight, within the variance of 8,192 draws.
- Zones never change which drive is first. The second is the first one in another zone than the home's, if there is one.

What it doesn't do: resist attacks on the balance: a client that chooses keys can choose those of one lot.
"""

from __future__ import annotations

import math
import struct
from array import array
from functools import lru_cache
from hashlib import shake_128
from typing import TYPE_CHECKING, Final
from zlib import crc32

from kvstore.limits import PLACEMENT_DRIVES_CACHED, PLACEMENTS_CACHED

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LOTS", "Placement", "lot_of", "lots_of"]

_LOT_BITS: Final = 13
LOTS: Final = 1 << _LOT_BITS
_DRAWS: Final = struct.Struct(f"<{1 << _LOT_BITS}Q")
_LOG_OF_ALL: Final = 64 * math.log(2)


class Placement:
    """The orders of some drives, by their indices in the given sequence."""

    __slots__ = ("_orders",)
    _orders: list[tuple[int, ...]]

    def __init__(self, drives: Sequence[tuple[bytes, int]], zones: Sequence[str] = ()) -> None:
        """`drives` are pairs of uuid and weight; `zones` are the drives' zones, if any."""
        self._orders = _orders_of(tuple(drives), tuple(zones))

    @property
    def orders(self) -> Sequence[tuple[int, ...]]:
        """Return the drives for each lot."""
        return self._orders

    @property
    def homes(self) -> bytes:
        """Return the home of each lot, which a name falls into by the upper bits of its CRC-32."""
        return bytes(order[0] for order in self._orders)

    def order(self, tenant: bytes, name: bytes) -> tuple[int, ...]:
        """Return the drives for a name, its home first."""
        return self.order_of(lot_of(tenant, name))

    def order_of(self, lot: int) -> tuple[int, ...]:
        """Return the drives for a lot."""
        return self._orders[lot]


@lru_cache(PLACEMENTS_CACHED)  # stores and maps are often rebuilt with the same drives and nodes
def _orders_of(drives: tuple[tuple[bytes, int], ...], zones: tuple[str, ...]) -> list[tuple[int, ...]]:
    if len(drives) == 1:
        return [(0,)] * (1 << _LOT_BITS)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # many lots share few orders
    lots = zip(*(_lots_known(uuid, weight) for uuid, weight in drives), strict=True)
    positions = range(len(drives))
    orders = []
    for scores in lots:
        order = tuple(sorted(positions, key=scores.__getitem__))
        if order not in known:
            known[order] = _apart(order, zones)
        orders.append(known[order])
    return orders


@lru_cache(PLACEMENT_DRIVES_CACHED)  # of 64 KiB each; the others stay as they are when one joins or leaves
def _lots_known(uuid: bytes, weight: int) -> array[float]:
    return array("d", lots_of(uuid, weight))


def _apart(order: tuple[int, ...], zones: Sequence[str]) -> tuple[int, ...]:
    """Return the order with the first drive of another zone moved to second place."""
    if not zones:
        return order
    second = next((at for at in order if zones[at] != zones[order[0]]), order[1])
    return (order[0], second, *(at for at in order[1:] if at != second))


def lot_of(tenant: bytes, name: bytes, lots: int = LOTS) -> int:
    """Return the lot of a name, of so many: a power of two."""
    return crc32(tenant + name) * lots >> 32


def lots_of(uuid: bytes, weight: int) -> list[float]:
    """Return a drive's draw for each lot, of which the lowest is home: exponential, with the weight as rate."""
    draws = _DRAWS.unpack(shake_128(uuid).digest(_DRAWS.size))
    log = math.log
    return [(_LOG_OF_ALL - log(draw + 1)) / weight for draw in draws]
