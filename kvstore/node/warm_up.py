"""The warm-up: a node that has started reads its newest blocks back into its hot memory.

Otherwise the next turn of each conversation would wait for the drive after a restart, although its blocks were in
memory before.

What always holds: the blocks are read and checked as prefetches, and fetches come first. They fill at most half of the
hot memory, and the warm-up ends once clients' blocks have filled that much.
What it doesn't do: know which blocks were in memory before; the newest are those that were written last.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.config import show_size
from kvstore.errors import KvError
from kvstore.limits import (
    PAGE_BYTES,
    SHARES,
    WARM_BLOCKS_MAX,
    WARM_BLOCKS_STEP,
    WARM_MS,
    WARM_SHARE,
)
from kvstore.node.landing import pages_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.node.node import Node
    from kvstore.node.prefetch import Prefetched
    from kvstore.storage.drive import Drive
    from kvstore.storage.index import Name

__all__ = ["WarmUp"]

log = logging.getLogger(__name__)

_TURNS = b"warm-up"  # the pseudo-tenant of its steps on the node's thread


class WarmUp:
    """The warm-up of a node."""

    def __init__(self, node: Node) -> None:
        """Note the newest blocks. With ten million of them that takes a tenth of a second, so no client waits yet."""
        self._node = node
        self._bytes = node.hot.size_bytes // WARM_SHARE
        self.blocks = self.size_bytes = 0  # that it has read
        self._newest: list[tuple[Drive, list[int]]] = []
        for drive in node.store.drives:
            with suppress(KvError):
                newest = drive.keeping.newest(WARM_BLOCKS_MAX // len(node.store.drives))
                self._newest.append((drive, newest.tolist()))

    async def run(self) -> None:
        """Read the blocks, the newest last, so that they are evicted last."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WARM_MS / 1000):
                for drive, newest in self._newest:
                    with suppress(KvError):  # the drive fails, or clients prefetch: it isn't needed
                        await self._read_all(await self._fitting(drive, newest))
        if self.blocks:
            log.info("%d blocks are in memory again (%s)", self.blocks, show_size(self.size_bytes))

    async def _fitting(self, drive: Drive, newest: Sequence[int]) -> list[tuple[Name, int]]:
        """The newest blocks that fit into the drive's part of the memory, with their sizes; the newest last."""
        steps: list[list[tuple[Name, int]]] = []
        left_bytes, end = self._bytes // len(self._newest), len(newest)
        while end and left_bytes > 0:
            async with self._node.turns.of(_TURNS):
                generations = newest[max(0, end - WARM_BLOCKS_STEP) : end]
                end -= len(generations)
                step: list[tuple[Name, int]] = []
                for name, entry in reversed(drive.keeping.of_generations(generations)):
                    size_bytes = pages_of(entry.length) * PAGE_BYTES
                    left_bytes -= size_bytes
                    if left_bytes >= 0:
                        step.append((name, size_bytes))
                step.reverse()
                step.sort(key=lambda one: one[0][0])  # tenants together, so that fewer prefetches read more
                steps.append(step)
        return [one for step in reversed(steps) for one in step]

    async def _read_all(self, blocks: Iterable[tuple[Name, int]]) -> None:
        pages = self._node.hot.pages
        for names in self._parts(blocks):
            if pages.statistics().kept_bytes >= self._bytes:
                break
            await self._read(names)

    def _parts(self, blocks: Iterable[tuple[Name, int]]) -> Iterator[list[Name]]:
        """Blocks of one tenant each, as many as one prefetch may read."""
        part: list[Name] = []
        part_bytes, part_max = 0, self._node.hot.size_bytes // SHARES
        for name, size_bytes in blocks:
            is_full = len(part) == WARM_BLOCKS_STEP or part_bytes + size_bytes > part_max
            if part and (is_full or name[0] != part[0][0]):
                yield part
                part, part_bytes = [], 0
            part.append(name)
            part_bytes += size_bytes
        if part:
            yield part

    async def _read(self, names: Sequence[Name]) -> None:
        over: asyncio.Future[Prefetched] = asyncio.get_running_loop().create_future()

        def ended(what: Prefetched) -> None:
            if not over.done():  # done: it was cancelled
                over.set_result(what)

        async with self._node.turns.of(_TURNS):
            tenant, entries = names[0][0], self._node.store.lookup(names)
            wish = self._node.prefetches.wish(tenant, _TURNS, ended)
            wish.add([name[1] for name, entry in zip(names, entries, strict=True) if entry is not None])
            self._node.prefetches.queue(wish)
        read = await over
        self.blocks += len(read.came)
        self.size_bytes += read.size_bytes
