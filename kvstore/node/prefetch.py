"""Prefetches: blocks are read into the hot memory before they are requested, while no fetch is waiting.

What always holds: a prefetch never reads while a fetch waits for the drive, and has at most `PREFETCH_AHEAD_BYTES`
in flight; one prefetch has at most `PREFETCH_BLOCKS_MAX` blocks, uses at most an eighth of the hot memory, and evicts
only unused blocks; tenants take turns. Many blocks are looked up in slices, by the caller (`Wish`).
Prefetched blocks that were never requested are evicted first.
What it doesn't do: promise anything (a missing block, or one without room, is left out; the caller can learn which were
read), or check payloads: the sender does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import Overloaded
from kvstore.limits import (
    FETCHES_A_ROUND,
    PAGE_BYTES,
    PREFETCH_AHEAD_BYTES,
    PREFETCH_BLOCKS_MAX,
    PREFETCHES_MAX,
    SHARES,
)
from kvstore.node.fair_queue import FairQueue
from kvstore.node.landing import pages_of
from kvstore.storage.items import GetItem

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from kvstore.node.hot import HotMemory
    from kvstore.node.hot_pages import Piece
    from kvstore.storage.items import GetDone
    from kvstore.storage.store import Store

__all__ = ["Asked", "Prefetched", "Prefetches", "Wish"]


class Prefetched(NamedTuple):
    """What a prefetch has read."""

    came: Sequence[bytes]  # in memory, at least a moment ago
    size_bytes: int


class Asked:
    """A prefetch. `ended` is called once, when none of its blocks waits or is being read."""

    def __init__(self, ended: Callable[[Prefetched], object] | None) -> None:
        self._ended = ended
        self._came: list[bytes] = []
        self._size_bytes = 0
        self.waiting = 0  # how many of its blocks wait
        self.reading = 0
        self.blocks = 0  # how many fit into its share

    def came(self, one: _Wanted) -> None:
        """Note that a block is in memory."""
        self._came.append(one.key)
        self._size_bytes += one.length

    def so_far(self) -> Prefetched:
        """The blocks read so far."""
        return Prefetched(tuple(self._came), self._size_bytes)

    def end_if_over(self) -> None:
        """Call `ended` if this was the last block."""
        if not self.waiting and not self.reading:
            ended, self._ended = self._ended, None
            if ended is not None:
                ended(self.so_far())


class _Wanted(NamedTuple):
    """A block that waits to be read."""

    tenant: bytes
    flow: Hashable
    key: bytes
    fingerprint: bytes
    length: int
    generation: int
    size_bytes: int
    asked: Asked


class Wish:
    """The blocks to prefetch: up to the first gap, after which none are usable, and within its share."""

    def __init__(self, store: Store, tenant: bytes, flow: Hashable, asked: Asked, left_bytes: int) -> None:
        self.tenant = tenant
        self.flow = flow
        self.asked = asked
        self.wanted: list[_Wanted] = []
        self._store = store
        self._left_bytes = left_bytes

    def add(self, keys: Sequence[bytes]) -> bool:
        """Add blocks; returns whether more may be added."""
        for key, entry in zip(keys, self._store.lookup([(self.tenant, key) for key in keys]), strict=True):
            size_bytes = 0 if entry is None else pages_of(entry.length) * PAGE_BYTES
            self._left_bytes -= size_bytes
            if entry is None or self._left_bytes < 0 or len(self.wanted) == PREFETCH_BLOCKS_MAX:
                return False
            self.wanted.append(
                _Wanted(
                    self.tenant,
                    self.flow,
                    key,
                    entry.fingerprint,
                    entry.length,
                    entry.generation,
                    size_bytes,
                    self.asked,
                )
            )
        return True


class Prefetches:
    """The prefetches of a node."""

    def __init__(self, store: Store, memory: HotMemory, is_wanted_elsewhere: Callable[[], bool]) -> None:
        """`is_wanted_elsewhere` says whether other work waits for the drive or for memory."""
        self._store = store
        self._memory = memory
        self._is_wanted_elsewhere = is_wanted_elsewhere
        self._queued: FairQueue[_Wanted] = FairQueue()
        self._left: dict[tuple[bytes, Hashable], Asked] = {}  # those with a waiting block
        self._reading: dict[int, tuple[Piece, _Wanted]] = {}
        self._reading_bytes = 0
        self._goes_on: asyncio.Handle | None = None
        self._is_closed = False
        self._tag = 0

    def __len__(self) -> int:
        return len(self._left)

    def wish(
        self, tenant: bytes, flow: Hashable, ended: Callable[[Prefetched], object] | None = None
    ) -> Wish:
        """Begin to collect blocks, to be passed to `queue`; `ended` is called when they are done."""
        return Wish(self._store, tenant, flow, Asked(ended), self._memory.size_bytes // SHARES)

    def queue(self, wish: Wish) -> Asked:
        """Start reading the collected blocks."""
        tenant, flow, asked = wish.tenant, wish.flow, wish.asked
        before = self._left.pop((tenant, flow), None)
        if before is not None:  # requested again before it was done: it starts again
            self._queued.drop(tenant, flow)
            before.waiting = 0
            before.end_if_over()
        mine = sum(1 for whose, _ in self._left if whose == tenant)
        if len(self._left) >= PREFETCHES_MAX or mine >= PREFETCHES_MAX // SHARES:
            raise Overloaded("The node's prefetch queue is full; fetch the session instead.")
        asked.blocks = asked.waiting = len(wish.wanted)
        if wish.wanted:
            self._left[tenant, flow] = asked
            self._queued.add(wish.wanted)
            self.pump()
        else:
            asked.end_if_over()
        return asked

    def close(self) -> None:
        """Start no more reads. What the store still reads is not kept: the memory may be closed before it arrives."""
        self._is_closed = True
        self._queued = FairQueue()
        self._left.clear()
        if self._goes_on is not None:
            self._goes_on.cancel()

    def pump(self) -> None:
        """Read on, unless other work waits; many blocks in rounds, with other calls between them."""
        reads: list[GetItem] = []
        looked = 0
        while self._reading_bytes < PREFETCH_AHEAD_BYTES and not self._is_wanted_elsewhere():
            if looked == FETCHES_A_ROUND:
                self._go_on()
                break
            one = self._queued.take(lambda _: True)
            if one is None:
                break
            looked += 1
            self._no_longer_waits(one)
            if self._memory.pages.has(one.generation):
                one.asked.came(one)
            else:
                piece = self._memory.pages.take_unasked(pages_of(one.length))
                if piece is not None:
                    reads.append(self._read(one, piece))
            one.asked.end_if_over()
        if reads:
            self._store.get(reads, self._arrived)

    def _go_on(self) -> None:
        if self._goes_on is None:
            self._goes_on = asyncio.get_running_loop().call_soon(self._come)

    def _come(self) -> None:
        self._goes_on = None
        self.pump()

    def _read(self, one: _Wanted, piece: Piece) -> GetItem:
        self._tag += 1
        self._reading[self._tag] = piece, one
        one.asked.reading += 1
        self._reading_bytes += one.size_bytes
        address = self._memory.address(piece)
        return GetItem(one.tenant, one.key, one.fingerprint, one.length, address, one.size_bytes, self._tag)

    def _no_longer_waits(self, one: _Wanted) -> None:
        one.asked.waiting -= 1
        if not one.asked.waiting:
            del self._left[one.tenant, one.flow]

    def _arrived(self, batch: Sequence[GetDone]) -> None:
        if self._is_closed:
            return
        pieces: list[Piece] = []
        kept: list[tuple[Piece, int, tuple[bytes, bytes]]] = []
        for done in batch:
            piece, one = self._reading.pop(done.tag)
            pieces.append(piece)
            one.asked.reading -= 1
            self._reading_bytes -= self._memory.size(piece)
            if done.miss is None:
                kept.append((piece, done.generation, (one.tenant, one.key)))
                one.asked.came(one)
            one.asked.end_if_over()
        entries = self._store.lookup([name for _, _, name in kept])  # a block may have been removed by now
        self._memory.keep((*one, entry) for one, entry in zip(kept, entries, strict=True))
        self._memory.pages.release_all(pieces)
        self.pump()
