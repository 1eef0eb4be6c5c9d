"""Progress of a batch of puts by threshold of its flag, as the few groups that traces show.

What always holds: there are at most `STEP_FIRINGS_MAX` groups, in the order of their thresholds; further ones are
merged into the last. A block that was never sent is in none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore.durability import Durability
from kvstore.limits import STEP_FIRINGS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.client.blocks import Block, PutResult

__all__ = ["Firing", "firings"]


class Firing(NamedTuple):
    """Blocks that went out when the flag reached their thresholds. Times are of CLOCK_MONOTONIC."""

    low: int
    high: int
    blocks: int
    size_bytes: int
    failed: int
    fired_ns: int  # the first
    landed_ns: int  # the last; 0: none has
    durable_ns: int  # the last; 0: none is
    durability: Durability  # the least


def firings(blocks: Sequence[Block], results: Sequence[PutResult]) -> Iterator[Firing]:
    """One for each threshold that fired; of many, the last are merged."""
    fired = [(block, result) for block, result in zip(blocks, results, strict=True) if result.fired_ns]
    thresholds = sorted({block.threshold for block, _ in fired})
    for at, low in enumerate(thresholds[:STEP_FIRINGS_MAX]):
        high = low if at + 1 < STEP_FIRINGS_MAX else thresholds[-1]
        some = [(block, result) for block, result in fired if low <= block.threshold <= high]
        yield Firing(
            low,
            high,
            len(some),
            sum(block.length for block, _ in some),
            sum(result.error is not None for _, result in some),
            min(result.fired_ns for _, result in some),
            max(result.landed_ns for _, result in some),
            max(result.durable_ns for _, result in some),
            min(result.durability or Durability.LANDED for _, result in some),
        )
