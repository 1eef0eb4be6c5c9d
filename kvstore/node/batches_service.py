"""The service Batches: many blocks in one stream, through the same memory and shares as single inline blocks.

What always holds: each block is answered once, by its number, and only after the store has reported. Blocks of a get
are sent whole and in order, each checked before its first byte. A stream uses at most its client's share of memory. It
waits only for memory that it holds itself. If others hold it, the block is Overloaded, and the stream continues.
A client that stalls is disconnected after `INLINE_TIMEOUT_MS`; blocks that had arrived completely are still stored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from kvstore.config import counted
from kvstore.durability import Durability
from kvstore.errors import DomainRequired, KvError, Overloaded, ProtocolError
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    BATCH_ENDS_MS,
    BATCH_ENDS_TOGETHER,
    BATCH_ENDS_UNREAD_MAX,
    BATCH_PUTS_AHEAD,
    BATCH_READS_AHEAD,
    HEADER_BYTES,
    INLINE_CHUNK_BYTES,
    SESSION_BLOCKS_MAX,
    TURN_STEP_BLOCKS,
    TURN_STEP_PUTS,
)
from kvstore.lookups import Kind, Outcome
from kvstore.miss import Miss, MissReason
from kvstore.node.calls import durability_of, miss_message, refusals
from kvstore.node.connection import check_block, check_count, check_domain, stored_domain
from kvstore.node.inline import check_chunk, deadline
from kvstore.node.time_slices import Turn
from kvstore.storage.items import PutItem
from kvstore.wire import batches_pb2 as pb
from kvstore.wire import kvstore_pb2
from kvstore.wire.parts import PutMessage, encoded_get, parse_put
from kvstore.wire.status import code_of
from nic_offload.checksum import crc32c_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.hot_pages import Piece
    from kvstore.node.inline import InlineBlocks, InlineRead, PendingRead
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenant
    from kvstore.storage.items import PutDone

__all__ = ["BatchesService", "add_batches"]

T = TypeVar("T")


class BatchesService:
    """The node's service for batches. It decodes and encodes messages with blocks itself."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node = node
        self._gate = gate

    async def PutBatch(  # noqa: N802 - named by the proto
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> None:
        """Store a stream of blocks."""
        async with refusals(context, self._node.counters):
            began_ns, spans = self._node.clock.monotonic_ns(), self._node.spans
            parent = None if spans is None else spans.parent_of(context)
            first = parse_put(await _first(request_iterator))
            tenant = self._gate.enter("put batch", context, first.tenant, first.named)
            puts = _Puts(self._node, context, tenant, first)
            answering = asyncio.create_task(puts.answer())
            message, coming = first, asyncio.create_task(_next(request_iterator))
            try:
                while True:
                    # Receive the next message while one is processed: gRPC buffers little of it before it is awaited,
                    # and a task begins only in the loop's next round.
                    await asyncio.sleep(0)
                    await puts.take(message)
                    if (came := await coming) is None or answering.done():
                        break
                    coming = asyncio.create_task(_next(request_iterator))
                    message = parse_put(came)
                    tenant.rate.take(message.named)
                puts.end()
                await answering
            finally:
                coming.cancel()
                puts.drop()
                await puts.stop(answering)
                if spans is not None and parent is not None:
                    spans.inline_put(parent, began_ns, puts.blocks, puts.size_bytes, puts.durability)

    async def GetBatch(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GetBatchRequest], context: Context
    ) -> None:
        """Send a stream of blocks."""
        async with refusals(context, self._node.counters):
            message: pb.GetBatchRequest | None = await _first(request_iterator)
            assert message is not None, "a stream without one has been refused"
            tenant = self._gate.enter("get batch", context, message.tenant, len(message.blocks))
            gets = _Gets(self._node, context, tenant)
            try:
                while message is not None:
                    check_count(len(message.blocks))
                    await gets.take(message.blocks)
                    message = await _next(request_iterator)
                    tenant.rate.take(0 if message is None else len(message.blocks))
            finally:
                gets.drop()


def add_batches(server: grpc.aio.Server, node: Node, gate: Gate) -> None:
    """Register these calls with a server, with messages as raw bytes."""
    service = BatchesService(node, gate)
    handlers: dict[str, Any] = {
        "PutBatch": grpc.stream_stream_rpc_method_handler(service.PutBatch),
        "GetBatch": grpc.stream_stream_rpc_method_handler(
            service.GetBatch, request_deserializer=pb.GetBatchRequest.FromString
        ),
    }
    name = pb.DESCRIPTOR.services_by_name["Batches"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


async def _first(requests: AsyncIterator[T]) -> T:
    message = await _next(requests)
    if message is None:
        raise ProtocolError("A stream of blocks begins with a request.")
    return message


async def _next(requests: AsyncIterator[T]) -> T | None:
    async with deadline("A stream of blocks"):
        return await anext(requests, None)


class _Filling:
    """A block whose bytes are arriving; without memory they are discarded."""

    __slots__ = ("filled", "name", "number", "piece", "view")

    def __init__(
        self, number: int, name: kvstore_pb2.BlockName, piece: Piece | None, view: memoryview | None
    ) -> None:
        self.number = number
        self.name = name
        self.piece = piece
        self.view = view
        self.filled = 0


class _Puts:
    """A stream of puts."""

    def __init__(self, node: Node, context: Context, tenant: Tenant, first: PutMessage) -> None:
        self._store = node.store
        self._inline = node.inline
        self._context = context
        self._who = (tenant.id, context.peer())
        self._tenant = tenant.id
        self.blocks = self.size_bytes = 0  # of stored blocks
        self.durability = max(durability_of(first.durability), Durability.WRITTEN)
        self._expires_ms = first.expires_unix_ms
        self._filling: _Filling | None = None
        self._number = 0
        self._parts = 0  # received
        self._whole: list[PutItem] = []  # to be handed to the store together
        self._pieces: dict[int, Piece] = {}  # of complete blocks without an answer
        self._lengths: dict[int, int] = {}  # of the same
        self._ends: list[pb.BlockEnd] = []
        self._changed = asyncio.Event()  # there is something to report
        self._report: asyncio.TimerHandle | None = None  # when some of it is
        self._freed = asyncio.Event()  # memory was freed
        self._over = False
        self._stopped = False
        self._failure: KvError | None = None  # of sending results
        self._turn = Turn(node.turns, tenant.id, 2)  # the completions of puts cost others as much again

    async def take(self, message: PutMessage) -> None:
        """Process a message; many blocks over several turns."""
        try:
            for name, chunk in message.parts():
                check_chunk(len(chunk))
                self._parts += 1
                if self._parts % TURN_STEP_PUTS == 0:
                    self._hand_over()
                    await self._turn.next()
                if name is not None:
                    if self._filling is not None:
                        raise ProtocolError("A block began before the bytes of the previous one had arrived.")
                    await self._begin(name)
                filling = self._filling
                if filling is None:
                    raise ProtocolError("Bytes arrived that belong to no block.")
                self._fill(filling, chunk)
            self._hand_over()
        finally:
            self._turn.end()

    async def _begin(self, name: kvstore_pb2.BlockName) -> None:
        check_block(name.key, name.fingerprint, name.length)
        number, self._number = self._number, self._number + 1
        piece = None
        while len(self._ends) >= BATCH_ENDS_UNREAD_MAX:
            self._hand_over()
            await self._wait_for_an_end()
        try:
            check_domain(name.key, name.domain, encrypts=self._store.keys is not None)
        except DomainRequired as error:
            self._end(number, error)
            self._filling = _Filling(number, name, None, None)
            return
        while len(self._pieces) >= BATCH_PUTS_AHEAD:  # puts that end together are reported together
            self._hand_over()
            await self._wait_for_an_end()
        while piece is None:
            try:
                piece = self._inline.take(self._who, name.length)
            except Overloaded as error:
                self._hand_over()
                if not self._pieces:
                    self._end(number, error)
                    break
                await self._wait_for_an_end()
        view = None if piece is None else self._inline.memory.payload(piece, name.length)
        self._filling = _Filling(number, name, piece, view)

    async def _wait_for_an_end(self) -> None:
        self._turn.end()
        self._freed.clear()
        await self._freed.wait()
        if self._failure is not None:  # no more results are read
            raise self._failure

    def _fill(self, filling: _Filling, chunk: memoryview) -> None:
        end = filling.filled + len(chunk)
        length = filling.name.length
        if end > length:
            raise ProtocolError(f"More bytes arrived than the {length} announced.")
        if filling.view is not None:
            filling.view[filling.filled : end] = chunk
        filling.filled = end
        if end < length:
            return
        self._filling = None
        if filling.piece is None:
            return
        name, address = filling.name, self._inline.memory.address(filling.piece)
        self._pieces[filling.number] = filling.piece
        self._lengths[filling.number] = length
        self._whole.append(
            PutItem(
                tenant=self._tenant,
                key=name.key,
                fingerprint=name.fingerprint,
                length=length,
                crc32c=crc32c_at(address + HEADER_BYTES, length),
                slot_address=address,
                expires_ms=self._expires_ms,
                durability=self.durability,
                tag=filling.number,
                domain=stored_domain(name.domain),
            )
        )
        if len(self._whole) == BATCH_BLOCKS_MAX:
            self._hand_over()

    def _hand_over(self) -> None:
        items, self._whole = self._whole, []
        if not items:
            return
        try:
            self._inline.keep(items, partial(self._kept, self._inline.timings.clock.monotonic_ns()))
        except KvError as error:
            for item in items:
                self._inline.give_back(self._who, self._pieces.pop(item.tag))
                del self._lengths[item.tag]
                self._end(item.tag, error)

    def _kept(self, landed_ns: int, batch: Sequence[PutDone]) -> None:
        kept = [self._lengths.pop(done.tag) for done in batch if done.error is None]
        self._inline.counters.kept(kept)
        self.blocks, self.size_bytes = self.blocks + len(kept), self.size_bytes + sum(kept)
        self._inline.timings.inline_kept(
            self._tenant, self.durability, landed_ns, landed_ns, kept, (done.error for done in batch)
        )
        for done in batch:
            self._lengths.pop(done.tag, None)
            self._inline.give_back(self._who, self._pieces.pop(done.tag))
            self._end(done.tag, done.error, done.durability)
        self._freed.set()

    def _end(self, number: int, error: KvError | None, durability: Durability | None = None) -> None:
        end = pb.BlockEnd(number=number)
        if error is None and durability is not None:
            end.durability = cast("kvstore_pb2.Durability", int(durability))
        elif error is not None:
            end.error.name, end.error.sentence = type(error).__name__, str(error)
            end.error.code = code_of(error)
            if isinstance(error, Overloaded):
                end.error.retry_after_ms = error.retry_after_ms
                self._inline.counters.refused += 1
        self._ends.append(end)
        if not self._pieces or len(self._ends) >= BATCH_ENDS_TOGETHER:
            self._changed.set()
        elif self._report is None:
            self._report = asyncio.get_running_loop().call_later(BATCH_ENDS_MS / 1000, self._changed.set)

    async def answer(self) -> None:
        """Report results, until the stream has ended and all are reported.

        Each message costs as much as the processing of a block, so results wait for those of other blocks for a moment.
        """
        while not (self._over and not self._pieces and not self._ends):
            await self._changed.wait()
            self._changed.clear()
            if self._report is not None:
                self._report.cancel()
                self._report = None
            if self._stopped:
                return
            ends, self._ends = self._ends, []
            self._freed.set()
            if ends:
                try:
                    async with deadline("A reader"):
                        await self._context.write(pb.PutBatchResponse(ends=ends).SerializeToString())
                except KvError as error:
                    self._failure = error
                    self._freed.set()
                    raise

    async def stop(self, answering: asyncio.Task[None]) -> None:
        """Finish sending the current message, and send no other.

        The call's status can't be sent during a message: if that were cancelled, the call would end at its deadline.
        """
        self._stopped = True
        self._changed.set()
        with contextlib.suppress(Exception):  # it has ended the call, or the error that ends it counts
            await answering

    def end(self) -> None:
        """Note that the stream has ended."""
        if self._filling is not None:
            raise ProtocolError(
                f"{counted(self._filling.filled, 'byte')} arrived and {self._filling.name.length} were announced."
            )
        self._over = True
        if not self._pieces:
            self._changed.set()

    def drop(self) -> None:
        """Free the memory of an unfinished block. A complete one belongs to the store until it reports."""
        self._hand_over()  # the message that broke the stream may have had some
        if self._filling is not None and self._filling.piece is not None:
            self._inline.give_back(self._who, self._filling.piece)
        self._filling = None


class _Gets:
    """A stream of gets."""

    def __init__(self, node: Node, context: Context, tenant: Tenant) -> None:
        self._inline: InlineBlocks = node.inline
        self._lookups = node.lookups
        self._looking = node.lookups.begin(context, tenant.id, Kind.GET, 0)
        self._context = context
        self._peer = context.peer()
        self._tenant = tenant.id
        self._number = 0
        self._turn = Turn(node.turns, tenant.id, 1)
        self._pending: deque[tuple[int, bytes, PendingRead]] = deque()
        self._chunks: list[tuple[int, memoryview]] = []  # to be sent together
        self._chunks_bytes = 0
        self._unsent: list[InlineRead] = []  # the blocks of these chunks that end here

    async def take(self, names: Sequence[kvstore_pb2.BlockName]) -> None:
        """Send these blocks, reading ahead of what is being sent."""
        if self._looking.blocks + len(names) > SESSION_BLOCKS_MAX:  # streams have no maximum; look-ups do
            self._looking.over()
            self._looking = self._lookups.begin(self._context, self._tenant, Kind.GET, 0)
        self._looking.blocks += len(names)
        try:
            await self._take(names)
        finally:
            self._turn.end()

    async def _take(self, names: Sequence[kvstore_pb2.BlockName]) -> None:
        for name in names:
            number, self._number = self._number, self._number + 1
            if self._number % TURN_STEP_BLOCKS == 0:
                self._turn.end()  # blocks in memory need no wait, and others wait for the thread
            await self._turn.begin_again()
            if len(self._pending) >= BATCH_READS_AHEAD:
                await self._send_first()
            while True:
                try:
                    read = self._inline.begin_get(
                        self._peer, self._tenant, name.key, name.fingerprint, name.length
                    )
                except Overloaded as error:
                    if self._pending:
                        await self._send_first()
                        continue
                    await self._miss(number, name.key, Miss(MissReason.BUSY, str(error)))
                else:
                    self._pending.append((number, name.key, read))
                break
        while self._pending:
            await self._send_first()
        await self._flush()

    async def _send_first(self) -> None:
        number, key, pending = self._pending.popleft()
        if not pending.has_come:
            self._turn.end()
        read: InlineRead = await pending.read()
        self._looking.read(read)
        self._unsent.append(read)
        if read.done.miss is not None:
            await self._miss(number, key, read.done.miss)
            return
        self._looking.add(Outcome.MEMORY if read.in_memory else Outcome.DRIVE)
        for chunk in read.views():
            if self._chunks_bytes + len(chunk) > INLINE_CHUNK_BYTES or len(self._chunks) == BATCH_BLOCKS_MAX:
                await self._flush(read)
            self._chunks.append((number, chunk))
            self._chunks_bytes += len(chunk)

    async def _miss(self, number: int, key: bytes, miss: Miss) -> None:
        self._looking.missed(len(self._looking.outcomes), key, miss.reason)
        await self._flush()
        part = pb.GetPart(number=number, miss=miss_message(miss))
        await self._write(pb.GetBatchResponse(parts=[part]).SerializeToString())

    async def _flush(self, still_read: InlineRead | None = None) -> None:
        """Send the collected chunks, and free the memory of blocks sent by then, except the one still being read."""
        chunks, self._chunks, self._chunks_bytes = self._chunks, [], 0
        message = encoded_get(chunks) if chunks else b""
        over, self._unsent = self._unsent, [] if still_read is None else [still_read]
        for read in over:
            if read is not still_read:
                read.close()
        if message:
            await self._write(message)

    async def _write(self, message: bytes) -> None:
        self._turn.end()  # the client may be slow to read it
        async with deadline("A reader"):
            await self._context.write(message)

    def drop(self) -> None:
        """Release the blocks that were read."""
        for one in self._unsent:
            one.close()
        for _, _, read in self._pending:
            read.drop()
        self._looking.over()
