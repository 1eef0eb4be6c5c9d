"""Blocks over gRPC, for clients that have no fabric: chunk by chunk through the node's hot memory.

Memory is limited to half of the hot memory, to an eighth of that per client, and to its share per tenant. A block that
finds no memory is Overloaded before its first byte is received, and a client that stalls is disconnected after
`INLINE_TIMEOUT_MS`. A get checks the whole payload before it sends the first chunk.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from kvstore.config import counted, shown_apart
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, KvError, Overloaded, ProtocolError
from kvstore.limits import CHUNK_BYTES_MAX, HEADER_BYTES, INLINE_CHUNK_BYTES, INLINE_TIMEOUT_MS, PAGE_BYTES
from kvstore.miss import Miss
from kvstore.names import UNSAID
from kvstore.node.connection import check_block, check_domain, refuse_expired, stored_domain
from kvstore.node.fair_queue import Shares
from kvstore.node.landing import pages_of
from kvstore.storage.block_reads import mismatch
from kvstore.storage.items import GetDone, GetItem, PutItem
from nic_offload.checksum import crc32c_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence

    from kvstore.clock import Clock
    from kvstore.node.granted_puts import Granted
    from kvstore.node.hot import HotMemory
    from kvstore.node.hot_pages import Piece
    from kvstore.node.statistics import Counters
    from kvstore.node.timings import Timings
    from kvstore.storage.items import PutDone, PutsDone
    from kvstore.storage.store import Store

__all__ = ["InlineBlocks", "InlineRead", "PendingRead", "check_chunk", "deadline"]

Reader: TypeAlias = "tuple[bytes, Hashable]"  # a tenant, and one of its callers


@asynccontextmanager
async def deadline(what: str) -> AsyncIterator[None]:
    """A deadline for a client's next step, in case it stalls."""
    try:
        async with asyncio.timeout(INLINE_TIMEOUT_MS / 1000):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} made no progress within {INLINE_TIMEOUT_MS} ms.") from None


def check_chunk(length: int) -> None:
    """Refuse a chunk that is too large."""
    if length > CHUNK_BYTES_MAX:
        most, has = shown_apart(CHUNK_BYTES_MAX, length)
        raise ProtocolError(f"A chunk has at most {most}, not {has}; send the block in several.")


class InlineBlocks:
    """Inline puts and gets of a node."""

    def __init__(
        self,
        store: Store,
        memory: HotMemory,
        granted: Granted,
        clock: Clock,
        counters: Counters,
        timings: Timings,
        tenants_known: Callable[[], int],
    ) -> None:
        self.counters = counters
        self.timings = timings
        self._clock = clock
        self._store = store
        self._granted = granted
        self.memory = memory
        self._shares = Shares(memory.size_bytes // 2, tenants_known)  # readers here don't block the fabric

    def take(self, who: Reader, length: int) -> Piece:
        """Allocate memory for a block; Overloaded if there is none."""
        may = self._shares.may_hold(who, pages_of(length) * PAGE_BYTES)
        piece = self.memory.take(length, who[0]) if may else None
        if piece is None:
            raise Overloaded("The node's memory for blocks is in use; try again later.")
        self._shares.hold(who, self.memory.size(piece))
        return piece

    def give_back(self, who: Reader, piece: Piece) -> None:
        """Free memory."""
        self._shares.release(who, self.memory.size(piece))
        self.memory.pages.release(piece)

    async def put(
        self,
        peer: str,
        tenant: bytes,
        key: bytes,
        fingerprint: bytes,
        length: int,
        durability: Durability,
        expires_unix_ms: int,
        chunks: AsyncIterator[bytes],
        before_kept: Callable[[PutItem], object] = lambda _: None,
        domain: bytes = UNSAID,
    ) -> Durability:
        """Receive a block in chunks and store it; returns the durability reached.

        `before_kept` is called once all bytes have arrived, right before the store, and may refuse.
        """
        check_block(key, fingerprint, length)
        check_domain(key, domain, encrypts=self._store.keys is not None)
        refuse_expired(expires_unix_ms, self._clock.wall_ms())
        began_ns = self._clock.monotonic_ns()
        who = (tenant, peer)
        piece = self.take(who, length)
        try:
            async with deadline("The bytes of an inline put"):
                await self._fill(piece, length, chunks)
            item = PutItem(
                tenant=tenant,
                key=key,
                fingerprint=fingerprint,
                length=length,
                crc32c=crc32c_at(self.memory.address(piece) + HEADER_BYTES, length),
                slot_address=self.memory.address(piece),
                expires_ms=expires_unix_ms,
                durability=max(durability, Durability.WRITTEN),
                tag=0,
                domain=stored_domain(domain),
            )
            landed_ns = self._clock.monotonic_ns()
            kept: asyncio.Future[PutDone] = asyncio.get_running_loop().create_future()

            def finish(batch: Sequence[PutDone]) -> None:
                self.give_back(who, piece)
                lengths = [length] if batch[0].error is None else []
                self.counters.kept(lengths)
                self.timings.inline_kept(
                    tenant, batch[0].durability, began_ns, landed_ns, lengths, [batch[0].error]
                )
                if not kept.done():
                    kept.set_result(batch[0])

            before_kept(item)
            self.keep([item], finish)
        except BaseException:
            self.give_back(who, piece)
            raise
        # From here on the drive owns the piece until `finish`, whether or not this call is still awaited.
        done = await kept
        if done.error is not None:
            raise done.error
        return done.durability

    def keep(self, items: Sequence[PutItem], done: PutsDone) -> None:
        """Pass blocks to the store. No lane takes one of their names before it is done with them."""
        names = {item.tag: item[:2] for item in items}

        def ended(batch: Sequence[PutDone]) -> None:
            done(batch)
            self._granted.free_names([names[one.tag] for one in batch if one.error is not None])

        try:
            self._granted.before_others(list(names.values()))
            self._store.put(items, ended)
        except KvError:
            self._granted.free_names(list(names.values()))
            raise

    async def _fill(self, piece: Piece, length: int, chunks: AsyncIterator[bytes]) -> None:
        payload = self.memory.payload(piece, length)
        filled = 0
        async for chunk in chunks:
            check_chunk(len(chunk))
            if filled + len(chunk) > length:
                raise ProtocolError(f"More bytes arrived than the {length} announced.")
            payload[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        if filled != length:
            raise ProtocolError(f"{counted(filled, 'byte')} arrived and {length} were announced.")

    async def get(self, peer: str, tenant: bytes, key: bytes, fingerprint: bytes, length: int) -> InlineRead:
        """Find a block in memory or read it, and check it."""
        return await self.begin_get(peer, tenant, key, fingerprint, length).read()

    def begin_get(self, peer: str, tenant: bytes, key: bytes, fingerprint: bytes, length: int) -> PendingRead:
        """Find a block, or begin to read it; Overloaded if there is no memory for it."""
        check_block(key, fingerprint, length)
        item = GetItem(
            tenant=tenant,
            key=key,
            fingerprint=fingerprint,
            length=length,
            slot_address=0,
            slot_bytes=pages_of(length) * PAGE_BYTES,
            tag=0,
        )
        began_ns = self._clock.monotonic_ns()
        hot = self._hot((tenant, peer), item)
        if hot is None:
            return self._cold((tenant, peer), item, began_ns)
        if hot.done.miss is None:
            self.timings.got_from_memory.note(self._clock.monotonic_ns() - began_ns)
        return PendingRead(hot)

    def _hot(self, who: Reader, item: GetItem) -> InlineRead | None:
        """A block in memory; a miss if a landed block of this name is not the requested one."""
        name, now_ms = (item.tenant, item.key), self._clock.wall_ms()
        (entry,) = self._store.lookup([name])
        landed = self._granted.just_landed.find(name) if entry is None else None
        if entry is not None:
            if mismatch(item, entry.fingerprint, entry.length, entry.expires_ms, now_ms) is not None:
                return None  # the store reports the miss
            piece = self.memory.pages.find(entry.generation)
            length, crc32c, generation = entry.length, entry.crc32c, entry.generation
        elif landed is not None:
            came, piece = landed.came, landed.piece
            length, crc32c, generation = came.length, came.crc32c, came.id
            differs = mismatch(item, came.fingerprint, length, came.expires_unix_ms, now_ms)
            if differs is not None:
                done = GetDone(item.tag, Miss(*differs))
                self.counters.missed([differs[0]])
                return InlineRead(self.memory, None, item.length, done, lambda: None)
            self.memory.pages.use(piece)
        else:
            return None
        if piece is None:
            return None
        if not self._shares.may_hold(who, self.memory.size(piece)):
            self.memory.pages.release(piece)  # before its bytes are checked
            raise Overloaded("The client has as many reads under way as the node allows; finish those first.")
        if crc32c_at(self.memory.address(piece) + HEADER_BYTES, length) != crc32c:
            self.memory.pages.forget(piece)  # the drive's bytes may be right
            self._granted.forget([name])
            self.memory.pages.release(piece)
            return None
        if entry is not None:
            self._store.used([generation])  # the drive doesn't see this use, and must not evict used blocks
        done = GetDone(item.tag, None, length, crc32c, generation)
        self._shares.hold(who, self.memory.size(piece))
        self.counters.found([length], in_memory=True)
        return InlineRead(
            self.memory, piece, length, done, lambda: self.give_back(who, piece), in_memory=True
        )

    def _cold(self, who: Reader, item: GetItem, began_ns: int) -> PendingRead:
        piece = self.take(who, item.length)
        item = item._replace(slot_address=self.memory.address(piece))
        pending = PendingRead()

        def finish(batch: Sequence[GetDone]) -> None:
            done = self._store.verify_payload(item, batch[0])
            if done.miss is None:
                name = (item.tenant, item.key)
                (entry,) = self._store.lookup([name])  # the block may have been removed by now
                self.memory.keep([(piece, done.generation, name, entry)])
                self.counters.found([done.length], in_memory=False)
                self.timings.got_from_drive.note(self._clock.monotonic_ns() - began_ns)
            else:
                self.counters.missed([done.miss.reason])
            pending.arrived(
                InlineRead(self.memory, piece, item.length, done, lambda: self.give_back(who, piece))
            )

        self._store.get([item], finish)
        return pending


class PendingRead:
    """A block that is being read, to be awaited once or dropped."""

    def __init__(self, read: InlineRead | None = None) -> None:
        self._read: asyncio.Future[InlineRead] = asyncio.get_running_loop().create_future()
        if read is not None:
            self._read.set_result(read)

    def arrived(self, read: InlineRead) -> None:
        """Deliver the block, or free its memory if the caller has left."""
        if self._read.done():
            read.close()
        else:
            self._read.set_result(read)

    @property
    def has_come(self) -> bool:
        """Whether `read` would return at once."""
        return self._read.done()

    async def read(self) -> InlineRead:
        """Wait for the block."""
        try:
            return await self._read
        except asyncio.CancelledError:
            self.drop()  # it may have come in the same moment
            raise

    def drop(self) -> None:
        """Discard the block."""
        self._read.cancel()
        if not self._read.cancelled():
            self._read.result().close()


class InlineRead:
    """A block that was read for an inline get, or a miss; `close` frees its memory, if any."""

    def __init__(
        self,
        memory: HotMemory,
        piece: Piece | None,
        length: int,
        done: GetDone,
        release: Callable[[], None],
        *,
        in_memory: bool = False,
    ) -> None:
        self.done = done
        self.in_memory = in_memory  # before the request
        self.close = release  # frees the memory
        self._memory = memory
        self._piece = piece
        self._length = length

    def chunks(self) -> Iterator[bytes]:
        """The payload, in chunks of the size gRPC handles best."""
        return map(bytes, self.views())

    def views(self) -> Iterator[memoryview]:
        """The same as views of the memory; they are invalid after `close`."""
        assert self._piece is not None
        payload = self._memory.payload(self._piece, self._length)
        for start in range(0, self._length, INLINE_CHUNK_BYTES):
            yield payload[start : start + INLINE_CHUNK_BYTES]
