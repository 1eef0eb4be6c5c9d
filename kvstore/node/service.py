"""The main gRPC service: converts the proto's messages into calls of the node, and errors into status codes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from kvcli.version import VERSION
from kvstore.errors import Expired, ProtocolError
from kvstore.limits import ACK_WORDS
from kvstore.lookups import Kind, Outcome
from kvstore.node.calls import durability_of, miss_message, refusals
from kvstore.node.connection import AckArea, BlockRequest, check_count, check_generation
from kvstore.node.connection_calls import fetch, in_steps, reserve
from kvstore.node.inline import deadline
from kvstore.sealing.store_keys import StoreKeys
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from kvstore.wire.fabric_call import FetchRow
from kvstore.wire.seal import Seal
from kvstore.wire.status import code_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.connection import Connection
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenant
    from kvstore.storage.items import DriveState, PutItem
    from nic_offload.sender import Area

__all__ = ["KvStoreService"]


def _block_request(block: pb.ReserveBlock) -> BlockRequest:
    name = block.name
    return BlockRequest(name.key, name.fingerprint, name.length, block.ack_word, name.domain)


def _fetch_row(block: pb.FetchBlock) -> tuple[bytes, FetchRow]:
    """The requested layout, and the block."""
    name = block.name
    return name.fingerprint, FetchRow(
        name.key,
        name.length,
        block.ack_word,
        block.ack_generation,
        block.target,
        block.target_key,
        block.skip,
        block.part,
    )


def _put_area_message(area: Area) -> pb.PutArea:
    return pb.PutArea(
        flags=area.flags,
        slots=area.slots,
        slot_bytes=area.slot_bytes,
        key=area.key,
        count=area.slots_count,
        first_generation=area.first_generation,
    )


def _drive_message(state: DriveState) -> pb.DriveStatus:
    now = state.statistics
    if now is None:
        return pb.DriveStatus(number=state.number, failure=state.failure)
    return pb.DriveStatus(
        number=state.number,
        blocks=now.blocks,
        capacity_bytes=now.capacity_bytes,
        free_bytes=now.free_bytes,
        takes_puts=now.takes_puts,
        failure=state.failure,
    )


class KvStoreService(kvstore_pb2_grpc.KvStoreServicer):
    """The node's main service."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node = node
        self._gate = gate
        self._name = node.store.name

    async def Attach(  # noqa: N802 - named by the proto, like all that follow
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        """Hold a connection open for as long as the client holds the stream."""
        async with refusals(context, self._node.counters):
            request = await anext(request_iterator, None)
            if request is None:
                raise ProtocolError("An attach stream begins with a request.")
            tenant = self._gate.enter("attach", context, request.tenant)
            connection, own_address = await self._attached(request, tenant, context)
            peer = context.peer()
            try:
                self._gate.audit.connected(
                    "attach", tenant=tenant.name, peer=peer, connection=connection.number
                )
                answer = pb.AttachResponse(
                    connection=connection.number,
                    node=self._name,
                    fabric_address=own_address,
                    slots=connection.layout.slots,
                    landing_key=connection.landing_key,
                    parts=True,
                    prefixes=True,
                    encrypts=self._node.store.keys is not None,
                )
                if connection.seal is not None:
                    answer.seal = connection.seal.secret
                desk = None
                if request.HasField("answers_base"):
                    calls = self._node.fabric_calls.open(connection, request.answers_base)
                    answer.calls.base, answer.calls.key = calls.base, calls.key
                    answer.calls.first_generation = calls.first_generation
                    desk = calls.desk if request.reads_directory else None
                sharing = self._node.sharing if request.shares else None
                puts = None
                if request.puts_by_grants:
                    shares_slots = sharing is not None and sharing.shares_slots(tenant.id)
                    puts = self._node.granted.open(connection, shares=shares_slots)
                if puts is not None:
                    answer.puts.CopyFrom(_put_area_message(puts.description))
                if sharing is not None:
                    shared = sharing.offer(
                        connection,
                        None if puts is None else puts.shared,
                        desk,
                        looks=request.looks_in_rows,
                    )
                    if shared is not None:
                        answer.shared.CopyFrom(shared)
                yield answer
                await connection.ended.wait()  # or until the call ends; later messages are not read
            finally:
                try:  # closing an endpoint takes milliseconds, and a thousand clients may leave at once
                    async with self._node.turns.of(tenant.id, rest=3):
                        self._node.left(connection)
                finally:
                    self._node.left(connection)
                self._gate.audit.connected(
                    "detach", tenant=tenant.name, peer=peer, connection=connection.number
                )

    async def _attached(
        self, request: pb.AttachRequest, tenant: Tenant, context: Context
    ) -> tuple[Connection, bytes]:
        return await self._node.attach(
            tenant=tenant,
            credentials=self._gate.credentials(context),
            caller=context.peer(),
            peer_address=request.fabric_address,
            provider=request.provider,
            acks=AckArea(request.ack_base, request.ack_key, request.ack_words),
            block_bytes_max=request.block_bytes_max,
            slots=request.slots,
            seal=Seal.fresh() if request.seals else None,
        )

    @asynccontextmanager
    async def _over(self, number: int, owner: Tenant | None) -> AsyncIterator[Callable[[], Connection]]:
        """Yield a function that finds the connection, which may end at any time. A tenant's calls run one at a time."""
        tenant = self._node.connection(number, owner).tenant
        async with self._node.turns.whole(tenant):
            yield lambda: self._node.connection(number, owner)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:  # noqa: N802
        """Lease slots."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("reserve", context, len(request.blocks))
            answer = pb.ReserveResponse()
            async with self._over(request.connection, owner) as find:
                await reserve(
                    self._node,
                    find,
                    len(request.blocks),
                    lambda step: [_block_request(block) for block in request.blocks[step]],
                    durability_of(request.durability),
                    request.lease_ms,
                    request.expires_unix_ms,
                    context,
                    lambda leases: answer.leases.extend(pb.Lease(**one._asdict()) for one in leases),
                )
            return answer
        raise AssertionError

    async def WhyFailed(self, request: pb.WhyFailedRequest, context: Context) -> pb.WhyFailedResponse:  # noqa: N802
        """Return why puts failed."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("why_failed", context)
            async with self._over(request.connection, owner) as find:
                connection = find()
                check_count(len(request.generations), ACK_WORDS)
                return pb.WhyFailedResponse(
                    puts=[
                        pb.FailedPut(
                            generation=generation,
                            name=type(error).__name__,
                            sentence=str(error),
                            code=code_of(error),
                        )
                        for generation, error in connection.why_failed(request.generations)
                    ]
                )
        raise AssertionError

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Release leases."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("abort", context)
            async with self._over(request.connection, owner) as find:
                answer = pb.AbortResponse()
                async for step in in_steps(len(request.leases)):
                    leases = [(lease.slot, lease.generation) for lease in request.leases[step]]
                    released, expired = self._node.abort(find(), leases)
                    answer.released += released
                    answer.expired.extend(expired)
                return answer
        raise AssertionError

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:  # noqa: N802
        """Queue fetches."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("fetch", context, len(request.blocks))
            async with self._over(request.connection, owner) as find:
                await fetch(
                    self._node,
                    find,
                    len(request.blocks),
                    lambda step: [_fetch_row(block) for block in request.blocks[step]],
                    context,
                    called=True,
                )
                return pb.FetchResponse()
        raise AssertionError

    async def CancelFetch(  # noqa: N802
        self, request: pb.CancelFetchRequest, context: Context
    ) -> pb.CancelFetchResponse:
        """Cancel fetches."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("cancel_fetch", context)
            async with self._over(request.connection, owner) as find:
                connection = find()
                check_count(len(request.blocks))
                for block in request.blocks:
                    connection.acks.target(block.ack_word)
                    check_generation(block.ack_generation)
                words = {block.ack_generation: block.ack_word for block in request.blocks}
                if not request.called:
                    self._node.fabric_calls.cancel(connection, list(words))
                self._node.fetches.cancel(connection, words, called=request.called)
                return pb.CancelFetchResponse()
        raise AssertionError

    async def Put(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PutRequest], context: Context
    ) -> pb.PutResponse:
        """Store a block sent over gRPC."""
        async with refusals(context, self._node.counters):
            first = await anext(request_iterator, None)
            if first is None or first.WhichOneof("part") != "start":
                raise ProtocolError("An inline put begins with its start message.")
            start = first.start
            tenant = self._gate.enter("put", context, start.tenant)
            spans, began_ns = self._node.spans, self._node.clock.monotonic_ns()
            parent = None if spans is None else spans.parent_of(context)

            def before_kept(item: PutItem) -> None:
                if not start.is_copy:
                    return
                if self._node.erasures.refuse_copies(tenant.id, item.domain):
                    raise Expired("The block may have been erased since this copy of it was read.")
                if self._node.deletions.may_be_since(item[:2], start.read_ms_ago):
                    raise Expired("The block may have been deleted since this copy of it was read.")

            async with self._node.turns.moving(tenant.id):
                durability = await self._node.inline.put(
                    context.peer(),
                    tenant.id,
                    start.name.key,
                    start.name.fingerprint,
                    start.name.length,
                    durability_of(start.durability),
                    start.expires_unix_ms,
                    (message.chunk async for message in request_iterator),
                    before_kept,
                    start.name.domain,
                )
            if spans is not None and parent is not None:
                spans.inline_put(parent, began_ns, 1, start.name.length, durability)
            return pb.PutResponse(durability=cast("pb.Durability", int(durability)))
        raise AssertionError

    async def Get(self, request: pb.GetRequest, context: Context) -> None:  # noqa: N802
        """Send a block over gRPC."""
        async with refusals(context, self._node.counters):
            name = request.name
            tenant = self._gate.enter("get", context, request.tenant)
            looking = self._node.lookups.begin(context, tenant.id, Kind.GET, 1)
            async with self._node.turns.moving(tenant.id):
                read = await self._node.inline.get(
                    context.peer(), tenant.id, name.key, name.fingerprint, name.length
                )
                looking.read(read)
                try:
                    miss = read.done.miss
                    if miss is not None:
                        looking.missed(0, name.key, miss.reason)
                        await context.write(pb.GetResponse(miss=miss_message(miss)))
                        return
                    for chunk in read.chunks():
                        async with deadline("A reader"):
                            await context.write(pb.GetResponse(chunk=chunk))
                    looking.add(Outcome.MEMORY if read.in_memory else Outcome.DRIVE)
                finally:
                    read.close()
                    looking.over()

    def _keys_for(self, tenant: Tenant) -> dict[str, Any]:
        keys = self._node.store.keys
        if not isinstance(keys, StoreKeys) or not self._gate.tenants.observes(tenant.name):
            return {}
        status = keys.status
        return {"keys": status.live, "keys_damaged": status.damaged, "master_key": status.master_id}

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802, ARG002
        """Return the node's state."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("status", context)
            store = self._node.store.statistics()
            return pb.StatusResponse(
                node=self._name,
                version=VERSION,
                provider=self._node.fabric.provider,
                blocks=store.blocks,
                capacity_bytes=store.capacity_bytes,
                free_bytes=store.free_bytes,
                read_only=not store.takes_puts,
                connections=len(self._node),
                mapped=0 if self._node.sharing is None else len(self._node.sharing),
                corrupt_found=store.quarantined,
                index_rebuilt=store.rebuilt,
                drives=map(_drive_message, self._node.store.drive_states()),
                encrypted=self._node.store.keys is not None,
                **self._keys_for(tenant),
            )
        raise AssertionError
