"""The warm-up: a node that starts reads its newest blocks back into its hot memory before it takes calls.

Otherwise the next turn of each conversation would wait for the drive after a restart, although its blocks were in
memory before.

What always holds: it delays the start by `WARM_MS` at most, and fills at most half of the hot memory. Of each drive the
newest blocks are read first, and later they are evicted last. A block comes into memory if its header and its payload
are right; one that can't be read, or is wrong, is left for the get that finds that out. Reading is no use of a block
for eviction.
What it doesn't do: know which blocks were in memory before; the newest are those that were written last.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvstore.config import show_size
from kvstore.errors import KvError
from kvstore.limits import (
    HEADER_BYTES,
    PAGE_BYTES,
    READ_AHEAD_BYTES,
    WARM_BLOCKS_MAX,
    WARM_BLOCKS_STEP,
    WARM_MS,
    WARM_SHARE,
)
from kvstore.miss import MissReason
from kvstore.node.landing import pages_of
from kvstore.storage.items import GetItem
from nic_offload.checksum import crc32c_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.node.hot_pages import Piece
    from kvstore.node.node import Node
    from kvstore.storage.drive import Drive
    from kvstore.storage.index import Entry, Name
    from kvstore.storage.items import GetDone

__all__ = ["WarmUp"]

log = logging.getLogger(__name__)


class _Came(NamedTuple):
    """A block that has been read and checked."""

    generation: int
    piece: Piece
    name: Name


class WarmUp:
    """The warm-up of a node that nobody has called yet."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._until_s = asyncio.get_running_loop().time() + WARM_MS / 1000
        self._came: list[_Came] = []
        self._size_bytes = 0
        self._is_over = False

    async def run(self) -> None:
        """Read blocks, of all drives at the same time, and keep them."""
        store, memory = self._node.store, self._node.hot
        each_bytes = memory.size_bytes // WARM_SHARE // len(store.drives)
        await asyncio.gather(*(self._read(drive, each_bytes) for drive in store.drives))
        self._is_over = True
        self._came.sort()  # the newest are kept last, and evicted last
        entries = store.lookup([one.name for one in self._came])  # one may have expired by now
        memory.keep(
            (one.piece, one.generation, one.name, entry)
            for one, entry in zip(self._came, entries, strict=True)
        )
        memory.pages.release_all([one.piece for one in self._came])
        if self._came:
            log.info("%d blocks are in memory again (%s)", len(self._came), show_size(self._size_bytes))

    async def _read(self, drive: Drive, left_bytes: int) -> None:
        with suppress(KvError):  # the drive has failed
            for batch in self._batches(drive, left_bytes):
                if not await self._are_read(batch):
                    break

    def _batches(self, drive: Drive, left_bytes: int) -> Iterator[list[tuple[Name, Entry]]]:
        """The newest blocks that fit, the newest first, as many at a time as may be read at a time."""
        newest = drive.keeping.newest(WARM_BLOCKS_MAX)[::-1].tolist()
        now_ms = self._node.clock.wall_ms()
        batch: list[tuple[Name, Entry]] = []
        batch_bytes = 0
        for first in range(0, len(newest), WARM_BLOCKS_STEP):
            for name, entry in drive.keeping.of_generations(newest[first : first + WARM_BLOCKS_STEP]):
                size_bytes = pages_of(entry.length) * PAGE_BYTES
                if size_bytes > left_bytes or 0 < entry.expires_ms <= now_ms:
                    continue
                left_bytes -= size_bytes
                batch.append((name, entry))
                batch_bytes += size_bytes
                if batch_bytes >= READ_AHEAD_BYTES or len(batch) == WARM_BLOCKS_STEP:
                    yield batch
                    batch, batch_bytes = [], 0
            if left_bytes < PAGE_BYTES:
                break
        if batch:
            yield batch

    async def _are_read(self, batch: Sequence[tuple[Name, Entry]]) -> bool:
        """Read blocks; returns whether to go on: the drive reads them, and there is time and memory for more."""
        loop, pages = asyncio.get_running_loop(), self._node.hot.pages
        over: asyncio.Future[None] = loop.create_future()
        reading: dict[int, tuple[Piece, GetItem]] = {}
        for tag, ((tenant, key), entry) in enumerate(batch):
            if (piece := pages.take_unasked(pages_of(entry.length))) is not None:
                address, size_bytes = self._node.hot.address(piece), pages_of(entry.length) * PAGE_BYTES
                item = GetItem(
                    tenant, key, entry.fingerprint, entry.length, address, size_bytes, tag, is_requested=False
                )
                reading[tag] = piece, item
        goes_on = len(reading) == len(batch)

        def came(done: Sequence[GetDone]) -> None:
            nonlocal goes_on
            for one in done:
                piece, item = reading.pop(one.tag)
                goes_on &= one.miss is None or one.miss.reason is not MissReason.UNREADABLE
                if self._is_over or not self._take(piece, item, one):
                    pages.release(piece)
            if not reading and not over.done():
                over.set_result(None)

        if reading:
            self._node.store.get([item for _, item in reading.values()], came)
            await asyncio.wait([over], timeout=self._until_s - loop.time())
        return goes_on and not reading and loop.time() < self._until_s

    def _take(self, piece: Piece, item: GetItem, done: GetDone) -> bool:
        """Take a block that has been read, if its payload is right."""
        if done.miss is not None or crc32c_at(item.slot_address + HEADER_BYTES, done.length) != done.crc32c:
            return False
        self._came.append(_Came(done.generation, piece, (item.tenant, item.key)))
        self._size_bytes += done.length
        self._node.store.believe([done.generation])
        return True
