"""The gRPC service: words of the proto in, words of the node out, errors of the tree as status codes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from kvcli.version import package_version
from kvstore.errors import Expired, ProtocolError
from kvstore.limits import ACK_WORDS, SLOTS_A_STEP
from kvstore.lookups import Kind, Outcome
from kvstore.node.calls import durability_of, miss_message, refusals
from kvstore.node.connection import AckArea, BlockRequest, check_count, check_generation
from kvstore.node.connection_calls import fetch, lease_told, note_leases
from kvstore.node.inline import deadline
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from kvstore.wire.fabric_call import FetchRow
from kvstore.wire.seal import Seal
from kvstore.wire.status import code_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.connection import Connection
    from kvstore.node.landing import Lease
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenant
    from kvstore.storage.items import DriveState, PutItem
    from nic_offload.sender import Area

__all__ = ["KvStoreService"]


def _lease_message(connection: Connection, lease: Lease | None) -> pb.Lease:
    return pb.Lease(**lease_told(connection, lease)._asdict())


def _block_request(block: pb.ReserveBlock) -> BlockRequest:
    name = block.name
    return BlockRequest(name.key, name.fingerprint, name.length, block.ack_word, name.domain)


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
    """One node's service."""

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
            connection, told = await self._attached(request, tenant, context)
            peer = context.peer()
            try:
                self._gate.audit.connected(
                    "attach", tenant=tenant.name, peer=peer, connection=connection.number
                )
                answer = pb.AttachResponse(
                    connection=connection.number,
                    node=self._name,
                    fabric_address=told,
                    slots=connection.layout.slots,
                    landing_key=connection.landing_key,
                    parts=True,
                    encrypts=self._node.store.keys is not None,
                )
                if connection.seal is not None:
                    answer.seal = connection.seal.told
                if request.HasField("answers_base"):
                    calls = self._node.fabric_calls.open(connection, request.answers_base)
                    answer.calls.base, answer.calls.key = calls.base, calls.key
                    answer.calls.first_generation = calls.first_generation
                sharing = self._node.sharing if request.shares else None
                puts = None
                if request.puts_by_grants:
                    shares_slots = sharing is not None and sharing.shares_slots(tenant.id)
                    puts = self._node.granted.open(connection, shares=shares_slots)
                if puts is not None:
                    answer.puts.CopyFrom(_put_area_message(puts.told))
                if sharing is not None:
                    shared = sharing.offer(connection, None if puts is None else puts.shared)
                    if shared is not None:
                        answer.shared.CopyFrom(shared)
                yield answer
                await (
                    connection.ended.wait()
                )  # or until the call ends; nothing more is read that it may bring
            finally:
                try:  # to close an endpoint takes milliseconds, and a thousand clients may leave at once
                    async with self._node.turns.of(tenant.id, rest=3):
                        self._node.detach(connection)
                finally:
                    self._node.detach(connection)
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
    async def _over(self, number: int, owner: Tenant | None) -> AsyncIterator[Connection]:
        """A connection, for something that is done in one go: milliseconds, if it names a thousand blocks."""
        tenant = self._node.connection(number, owner).tenant
        async with self._node.turns.whole(tenant):
            yield self._node.connection(number, owner)  # it may have ended meanwhile

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:  # noqa: N802
        """Lease slots."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("reserve", context, len(request.blocks))
            async with self._over(request.connection, owner) as begun:
                connection = begun
                check_count(len(request.blocks))
                answer, began_ns = pb.ReserveResponse(), self._node.clock.monotonic_ns()
                durability = durability_of(request.durability)
                leases: list[Lease | None] = []
                try:
                    async for first in self._steps(len(request.blocks)):
                        connection = self._node.connection(request.connection, owner)
                        some = self._node.reserve(
                            connection,
                            [_block_request(block) for block in request.blocks[first : first + SLOTS_A_STEP]],
                            durability,
                            request.lease_ms,
                            request.expires_unix_ms,
                        )
                        leases += some
                        answer.leases.extend(_lease_message(connection, lease) for lease in some)
                except BaseException:  # all or none
                    self._node.abort(connection, [(one.slot, one.generation) for one in leases if one])
                    raise
                note_leases(self._node, connection, leases, durability, began_ns, context)
                return answer
        raise AssertionError

    @staticmethod
    async def _steps(count: int) -> AsyncIterator[int]:
        """Go through the slots of a call in steps, and let others' calls come between."""
        for first in range(0, max(count, 1), SLOTS_A_STEP):
            if first:
                await asyncio.sleep(0)
            yield first

    async def WhyFailed(self, request: pb.WhyFailedRequest, context: Context) -> pb.WhyFailedResponse:  # noqa: N802
        """Say why puts failed."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("why_failed", context)
            async with self._over(request.connection, owner) as connection:
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
        """Take leases back."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("abort", context)
            async with self._over(request.connection, owner) as connection:
                answer = pb.AbortResponse()
                async for first in self._steps(len(request.leases)):
                    some = request.leases[first : first + SLOTS_A_STEP]
                    leases = [(lease.slot, lease.generation) for lease in some]
                    released, expired = self._node.abort(connection, leases)
                    answer.released += released
                    answer.expired.extend(expired)
                return answer
        raise AssertionError

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:  # noqa: N802
        """Queue fetches."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("fetch", context, len(request.blocks))
            async with self._over(request.connection, owner) as connection:
                fetch(
                    self._node,
                    connection,
                    [block.name.fingerprint for block in request.blocks],
                    [
                        FetchRow(
                            block.name.key,
                            block.name.length,
                            block.ack_word,
                            block.ack_generation,
                            block.target,
                            block.target_key,
                            block.skip,
                            block.part,
                        )
                        for block in request.blocks
                    ],
                    context,
                    called=True,
                )
                return pb.FetchResponse()
        raise AssertionError

    async def CancelFetch(  # noqa: N802
        self, request: pb.CancelFetchRequest, context: Context
    ) -> pb.CancelFetchResponse:
        """End fetches whose time is over."""
        async with refusals(context, self._node.counters):
            owner = self._gate.enter_with("cancel_fetch", context)
            async with self._over(request.connection, owner) as connection:
                check_count(len(request.blocks))
                for block in request.blocks:
                    connection.acks.target(block.ack_word)
                    check_generation(block.ack_generation)
                words = {block.ack_generation: block.ack_word for block in request.blocks}
                self._node.fetches.cancel(connection, words, called=request.called)
                return pb.CancelFetchResponse()
        raise AssertionError

    async def Put(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PutRequest], context: Context
    ) -> pb.PutResponse:
        """Keep a block that comes inside gRPC."""
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
        """Send a block inside gRPC."""
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

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802, ARG002
        """Say how the node is doing."""
        async with refusals(context, self._node.counters):
            self._gate.enter("status", context)
            store = self._node.store.statistics()
            return pb.StatusResponse(
                node=self._name,
                version=package_version(),
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
            )
        raise AssertionError
