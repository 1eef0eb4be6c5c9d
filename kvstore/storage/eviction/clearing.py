"""Finds blocks whose eviction makes one free extent of a given length, for a put that is larger than any hole.

Blocks of one size leave holes that fit the next block. With mixed sizes, the least recently used blocks are
scattered, and a large put would evict most of the drive before the freed extents happened to adjoin. So this looks
for large holes that are close together, with little between them.

Always holds: the blocks found, together with free space, cover the whole length contiguously, and none of them has a
guard; a step examines a bounded number of places.

It moves nothing, and ignores how recently a block was used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.limits import (
    BLOCK_BYTES_MAX,
    EVICTION_HOLES_TRIED,
    EVICTION_STEPS_MAX,
    HEADER_BYTES,
    PAGE_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.storage.eviction.evictor import Evictor
    from kvstore.storage.extents import Extents

__all__ = ["Clearing", "clearings"]

_RECORD_PAGES_MAX: Final = (HEADER_BYTES + BLOCK_BYTES_MAX) // PAGE_BYTES


class Clearing(NamedTuple):
    """Blocks to evict, in the order of the drive."""

    generations: list[int]
    pages: int  # of the blocks, without free pages


class _Land:
    """Queries about a place on the drive."""

    def __init__(self, extents: Extents, core: Evictor) -> None:
        self._extents = extents
        self._core = core
        self.steps = 0

    def look(self, page: int) -> tuple[int, int]:
        """Return length and generation (0: free) of the extent that begins here; a length of 0 if it must stay."""
        self.steps += 1
        free = self._extents.free_at(page)
        if free:
            return free, 0
        block = self._core.at(page)
        if block is None or self._core.is_guarded(block.generation):
            return 0, 0
        return block.pages, block.generation

    def clearing(self, start: int, length: int, pages_max: int) -> Clearing | None:
        """Try to clear from a place on; None if a block must stay, or more than `pages_max` would be evicted."""
        position, pages = start, 0
        generations: list[int] = []
        while position < start + length:
            here, generation = self.look(position)
            position += here
            if generation:
                generations.append(generation)
                pages += here
            if not here or pages > pages_max:
                return None
        return Clearing(generations, pages)


def clearings(extents: Extents, core: Evictor, length: int) -> Iterator[Clearing | None]:
    """Look for a clearing, a step at a time: None means to continue, and the end that there is none."""
    land = _Land(extents, core)
    best: Clearing | None = None
    for start in extents.longest_starts(EVICTION_HOLES_TRIED):
        found = land.clearing(start, length, best.pages - 1 if best else length + _RECORD_PAGES_MAX)
        best = found or best
        if land.steps > EVICTION_STEPS_MAX:
            land.steps = 0
            yield None
    if best is not None:
        yield best
        return
    # The whole drive, from its beginning: either there is one, or there is none anywhere.
    first = position = extents.first_page
    generations: list[tuple[int, int]] = []
    while position < extents.until_page:
        here, generation = land.look(position)
        position += here or 1  # the length of a block that must stay is unknown here
        if not here:
            first, generations = position, []
        elif generation:
            generations.append((generation, here))
        if position - first >= length:
            yield Clearing([one for one, _ in generations], sum(pages for _, pages in generations))
            return
        if land.steps > EVICTION_STEPS_MAX:
            land.steps = 0
            yield None
