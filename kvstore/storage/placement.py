"""Which drive a name belongs to: weighted rendezvous hashing.

Names fall into 16,384 lots, and each lot has its own order of all drives, drawn from their uuids: the first one is the
lot's home, the next is where it goes when the first can't take it, and so on.

Always holds:

- The order of two drives in a lot depends on nothing but those two. So a drive that is added moves only the lots that
  it takes, and one that is left out moves only those that it had.
- Of all lots each drive is the home of a share in proportion to its weight, within what 16,384 draws leave to chance.

It balances and doesn't defend: whoever may choose keys can choose those of one lot.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING, Final
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Placement", "lots_of"]

_LOT_BITS: Final = 14
_LOT_SHIFT: Final = 32 - _LOT_BITS
_DRAW_BYTES: Final = 8
_DRAWS_PER_DIGEST: Final = blake2b.MAX_DIGEST_SIZE // _DRAW_BYTES


class Placement:
    """The orders of some drives, by their positions in the sequence that was given."""

    __slots__ = ("_orders",)
    _orders: list[tuple[int, ...]]

    def __init__(self, drives: Sequence[tuple[bytes, int]]) -> None:
        """Take each drive's uuid and weight."""
        if len(drives) == 1:
            self._orders = [(0,)] * (1 << _LOT_BITS)
            return
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # few orders are shared by many lots
        lots = zip(*(lots_of(uuid, weight) for uuid, weight in drives), strict=True)
        positions = range(len(drives))
        self._orders = []
        for scores in lots:
            order = tuple(sorted(positions, key=scores.__getitem__))
            self._orders.append(known.setdefault(order, order))

    def order(self, tenant: bytes, name: bytes) -> tuple[int, ...]:
        """Give the drives for a name, its home first."""
        return self._orders[crc32(tenant + name) >> _LOT_SHIFT]


def lots_of(uuid: bytes, weight: int) -> list[float]:
    """Give a drive's time of arrival at each lot, the earliest of which is home: exponential, its rate the weight."""
    times = []
    for first in range(0, 1 << _LOT_BITS, _DRAWS_PER_DIGEST):
        digest = blake2b(uuid + first.to_bytes(4, "little")).digest()
        for at in range(0, len(digest), _DRAW_BYTES):
            draw = int.from_bytes(digest[at : at + _DRAW_BYTES], "little")
            times.append(-math.log((draw + 1) / (1 << 8 * _DRAW_BYTES)) / weight)
    return times
