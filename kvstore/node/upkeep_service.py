"""The service Upkeep: blocks that other nodes of the cluster offer, and which of them are accepted.

What always holds: the caller is authenticated as a node of the cluster, and offers under the lease that this node's
map has. A block is accepted only if it was announced here before its bytes were read there, and if it has not been
deleted since: that check and the store's acceptance are one step. It belongs to its tenant, within the tenant's quota.
When little room is left, nothing is accepted.
What it doesn't do: send a block's bytes, or delete anything.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvstore.cluster.map import DRAINING
from kvstore.durability import Durability
from kvstore.errors import KvError, ProtocolError
from kvstore.limits import (
    SESSION_BLOCKS_MAX,
    SESSIONS_COPIES_AT_ONCE,
    SESSIONS_MOVED_BLOCKS_MAX,
    UPKEEP_ASKED_BLOCKS,
    UPKEEP_FREE_SHARE,
    UPKEEP_WAITED_BLOCKS_MAX,
    UPKEEP_WAITED_MS,
)
from kvstore.node.calls import check_keys, refusals
from kvstore.node.connection import check_block, check_count
from kvstore.wire import upkeep_pb2 as pb
from kvstore.wire import upkeep_pb2_grpc
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from kvstore.clock import Clock
    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.node import Node
    from kvstore.storage.index import Name
    from kvstore.storage.items import PutItem

__all__ = ["UPKEEP", "UpkeepService", "Waited"]

UPKEEP = b"upkeep"  # the pseudo-tenant of copies, for turns on the node's thread and for memory


class _Unwelcome(KvError):
    """A block is not expected, or no longer."""


class _One(NamedTuple):
    ticket: int
    until_ns: int
    size_bytes: int


class Waited:
    """The blocks that a node expects."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_name: dict[Name, _One] = {}  # the oldest first
        self._tickets = itertools.count(secrets.randbits(48) + 1)
        self.size_bytes = 0  # that they will use on the drives
        self.size_bytes_of: Counter[bytes] = Counter()  # the same by tenant
        self.lacked: dict[Name, None] = {}  # blocks of sessions that were moved here, accepted until deleted

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def has_room(self) -> bool:
        """Whether the blocks of one more offer can be expected."""
        now_ns = self._clock.monotonic_ns()
        for name, one in list(
            itertools.takewhile(lambda row: row[1].until_ns <= now_ns, self._by_name.items())
        ):
            self._drop(name, one)
        return len(self._by_name) + UPKEEP_ASKED_BLOCKS <= UPKEEP_WAITED_BLOCKS_MAX

    def ticket(self) -> int:
        """A unique number for an offer."""
        return next(self._tickets)

    def add(self, name: Name, ticket: int, size_bytes: int) -> None:
        """Accept an offer of a block; it replaces an earlier offer."""
        if (earlier := self._by_name.get(name)) is not None:
            self._drop(name, earlier)
        until_ns = self._clock.monotonic_ns() + UPKEEP_WAITED_MS * 1_000_000
        self._by_name[name] = _One(ticket, until_ns, size_bytes)
        self.size_bytes += size_bytes
        self.size_bytes_of[name[0]] += size_bytes

    def cancel(self, names: Iterable[Name]) -> None:
        """Expect these no longer: they are being deleted."""
        for name in names:
            self.lacked.pop(name, None)
            if (one := self._by_name.get(name)) is not None:
                self._drop(name, one)

    @property
    def may_lack_more(self) -> bool:
        """Whether the blocks of a few more sessions can be noted."""
        return len(self.lacked) < SESSIONS_MOVED_BLOCKS_MAX // 2

    def lack(self, names: Iterable[Name]) -> None:
        """Note blocks of sessions that have moved here; those beyond the limit are not copied."""
        for name in names:
            if len(self.lacked) < SESSIONS_MOVED_BLOCKS_MAX:
                self.lacked[name] = None

    def take(self, name: Name, ticket: int) -> None:
        """Store a block whose bytes have arrived; _Unwelcome if it is not expected."""
        one = self._by_name.get(name)
        if one is None or one.ticket != ticket:
            raise _Unwelcome("The node does not expect the block.")
        self.lacked.pop(name, None)
        self._drop(name, one)

    def _drop(self, name: Name, one: _One) -> None:
        del self._by_name[name]
        self.size_bytes -= one.size_bytes
        self.size_bytes_of[name[0]] -= one.size_bytes
        if not self.size_bytes_of[name[0]]:
            del self.size_bytes_of[name[0]]


class UpkeepService(upkeep_pb2_grpc.UpkeepServicer):
    """The node's service for other nodes of its cluster."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node, self._gate = node, gate

    async def Offer(self, request: pb.OfferRequest, context: Context) -> pb.OfferResponse:  # noqa: N802 - named by the proto
        """Return which blocks are stored here, and expect the others."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter_node("offer", context, request.tenant)
            check_keys([block.key for block in request.blocks], UPKEEP_ASKED_BLOCKS)
            async with self._node.turns.of(UPKEEP):
                refused = self._refusal(request)
                if refused:
                    return pb.OfferResponse(refused=refused)
                assert self._node.membership is not None
                return self._answer(tenant.id, request, self._node.membership.lease)
        raise AssertionError

    def _refusal(self, request: pb.OfferRequest) -> str:
        membership, upkeep = self._node.membership, self._node.upkeep
        if membership is None or upkeep is None:
            return "The node does not replicate."
        if not membership.lease:
            return "The node is not on its own map."
        if not request.lease or membership.lease_of.get(request.node) != request.lease:
            return "The offering node is not on this node's map."
        return "" if upkeep.waited.has_room else "The node expects its maximum number of blocks."

    def _answer(self, tenant: bytes, request: pb.OfferRequest, lease: int) -> pb.OfferResponse:
        upkeep, store = self._node.upkeep, self._node.store
        assert upkeep is not None
        now_ms, ticket = self._node.clock.wall_ms(), upkeep.waited.ticket()
        answer = pb.OfferResponse(lease=lease, ticket=ticket)
        names = [(tenant, block.key) for block in request.blocks]
        quota = store.quota(tenant)
        for block, name, entry in zip(request.blocks, names, store.lookup(names), strict=True):
            if entry is not None and not 0 < entry.expires_ms <= now_ms:
                drive = store.drive_of(entry.generation)
                is_sure = drive is not None and upkeep.eligibility.is_sure(drive, entry.generation)
                said = pb.OFFERED_STORED_SURELY if is_sure else pb.OFFERED_STORED
                upkeep.waited.lacked.pop(name, None)
            elif store.is_putting(name):
                said = pb.OFFERED_STORED
            elif not block.surely:
                said = pb.OFFERED_MISSING
            elif request.moved and not self._is_lacked(name):
                said = pb.OFFERED_UNWANTED
            else:
                size_bytes = record_bytes(block.length)
                of_tenant = quota.used_bytes + upkeep.waited.size_bytes_of[tenant] + size_bytes
                is_full = quota.bytes_max and of_tenant > quota.bytes_max
                if is_full or not self._has_room(upkeep.waited.size_bytes + size_bytes):
                    said = pb.OFFERED_FULL
                else:
                    upkeep.waited.add(name, ticket, size_bytes)
                    said = pb.OFFERED_WANTED
            answer.blocks.append(said)
        return answer

    def _is_lacked(self, name: Name) -> bool:
        """Whether a session that was moved here lists the block, which has not been deleted here since."""
        assert self._node.upkeep is not None
        lacked = self._node.upkeep.waited.lacked
        if name in lacked and not any(self._node.store.manifests.references([name])):
            del lacked[name]
        return name in lacked

    def _has_room(self, size_bytes: int) -> bool:
        now = self._node.store.statistics()
        return now.takes_puts and now.free_bytes - size_bytes >= now.capacity_bytes // UPKEEP_FREE_SHARE

    async def Copy(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.CopyRequest], context: Context
    ) -> pb.CopyResponse:
        """Store an expected block."""
        async with refusals(context, self._node.counters):
            first = await anext(request_iterator, None)
            if first is None or first.WhichOneof("part") != "start":
                raise ProtocolError("A copy begins with its start message.")
            start, upkeep = first.start, self._node.upkeep
            tenant = self._gate.enter_node("copy", context, start.tenant)
            check_block(start.name.key, start.name.fingerprint, start.name.length)
            if upkeep is None:
                return pb.CopyResponse()

            def take(item: PutItem) -> None:
                upkeep.waited.take((tenant.id, start.name.key), start.ticket)
                if self._node.erasures.refuse_copies(tenant.id, item.domain):
                    raise _Unwelcome("The block's erase domain was erased a moment ago.")
                if item.crc32c != start.crc32c:
                    raise ProtocolError("The bytes of the copy do not match its block.")

            try:
                async with self._node.turns.moving(UPKEEP):
                    await self._node.inline.put(
                        context.peer(),
                        tenant.id,
                        start.name.key,
                        start.name.fingerprint,
                        start.name.length,
                        Durability.WRITTEN,
                        start.expires_unix_ms,
                        (message.chunk async for message in request_iterator),
                        take,
                        start.name.domain,
                    )
            except _Unwelcome:
                return pb.CopyResponse()
            return pb.CopyResponse(kept=True)
        raise AssertionError

    async def TakeSessions(  # noqa: N802
        self, request: pb.TakeSessionsRequest, context: Context
    ) -> pb.TakeSessionsResponse:
        """Take a user's sessions from their former home."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter_node("take sessions", context, request.tenant)
            if (upkeep := self._node.upkeep) is None:
                return pb.TakeSessionsResponse()
            return await upkeep.moves.take(tenant, request.user)
        raise AssertionError

    async def SendSessions(  # noqa: N802
        self, request: pb.SendSessionsRequest, context: Context
    ) -> pb.SendSessionsResponse:
        """Send a user's sessions to their new home."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter_node("send sessions", context, request.tenant)
            if (upkeep := self._node.upkeep) is None:
                return pb.SendSessionsResponse()
            return await upkeep.moves.send(tenant, request)
        raise AssertionError

    async def TakeSession(  # noqa: N802
        self, request: pb.TakeSessionRequest, context: Context
    ) -> pb.TakeSessionResponse:
        """Store a session that the node has asked for."""
        async with refusals(context, self._node.counters):
            self._gate.enter_operator("take session", context)
            if request.keys:  # a session may have been truncated to none
                check_keys(request.keys, SESSION_BLOCKS_MAX)
            upkeep = self._node.upkeep
            return pb.TakeSessionResponse(taken=upkeep is not None and await upkeep.moves.take_one(request))
        raise AssertionError

    async def FollowSessions(  # noqa: N802
        self, request: pb.FollowSessionsRequest, context: Context
    ) -> pb.FollowSessionsResponse:
        """Begin to keep copies of a lot's sessions."""
        async with refusals(context, self._node.counters):
            self._gate.enter_operator("follow sessions", context)
            if (upkeep := self._node.upkeep) is None:
                return pb.FollowSessionsResponse(refused="The node does not replicate.")
            return await upkeep.moves.copies.follow(request)
        raise AssertionError

    async def CopySessions(  # noqa: N802
        self, request: pb.CopySessionsRequest, context: Context
    ) -> pb.CopySessionsResponse:
        """Store copies of sessions."""
        async with refusals(context, self._node.counters):
            self._gate.enter_operator("copy sessions", context)
            check_count(len(request.copies), SESSIONS_COPIES_AT_ONCE)
            for copy in request.copies:
                if copy.keys:
                    check_keys(copy.keys, SESSION_BLOCKS_MAX)
            if (upkeep := self._node.upkeep) is None:
                return pb.CopySessionsResponse()
            return await upkeep.moves.copies.keep(request)
        raise AssertionError

    async def DeleteCopies(  # noqa: N802
        self, request: pb.DeleteCopiesRequest, context: Context
    ) -> pb.DeleteCopiesResponse:
        """Delete blocks of sessions that were deleted at their home."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter_node("delete copies", context, request.tenant)
            check_keys(request.keys)
            if (upkeep := self._node.upkeep) is not None:
                names = [(tenant.id, key) for key in request.keys]
                counts = self._node.store.manifests.references(names)
                named = frozenset(key for (_, key), count in zip(names, counts, strict=True) if count)
                await upkeep.moves.delete(tenant.id, named)
            return pb.DeleteCopiesResponse()
        raise AssertionError

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:  # noqa: N802
        """Begin or stop draining, and return its progress."""
        async with refusals(context, self._node.counters):
            self._gate.enter_operator("drain", context)
            membership, upkeep = self._node.membership, self._node.upkeep
            if membership is None or upkeep is None:
                raise ProtocolError("The node does not replicate: it was started without --cluster-replicas.")
            if not membership.lease:
                why = membership.outside or "its lease has ended"
                raise ProtocolError(f"The node is not on the map of its cluster: {why}.")
            if request.has_begun and membership.state != DRAINING:
                raise ProtocolError(
                    "The drain was cancelled, or the node was restarted: it is an ordinary member."
                )
            refusal = "" if request.undo else upkeep.why_not_drained()
            state = "" if request.undo or refusal else DRAINING
            if membership.state != state:
                await membership.announce(state)
            if refusal:
                raise ProtocolError(f"The node can't be drained: {refusal}. Add a node first.")
            if upkeep.has_drained:
                await membership.note_drained()
            is_seen, full = membership.is_seen, upkeep.moves.hand_overs.full_blocks
            return pb.DrainResponse(
                looked=is_seen and membership.since == upkeep.looked == upkeep.moves.hand_overs.looked,
                left=upkeep.ended.one_copy + full,
                unsure=upkeep.ended.unsure,
                full=upkeep.ended.full + full,
                copied_blocks=upkeep.copied_blocks,
                users_left=upkeep.moves.hand_overs.users_left,
                unnamed_sessions=upkeep.moves.hand_overs.unnamed,
            )
        raise AssertionError

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:  # noqa: N802
        """Remove a node that will not return from the cluster."""
        async with refusals(context, self._node.counters):
            self._gate.enter_operator("forget", context)
            membership = self._node.membership
            if membership is None:
                raise ProtocolError("The node is in no cluster.")
            names = await membership.forget(request.node)
            self._gate.audit.note("forget", tenant="", peer=context.peer(), names=" ".join(names))
            return pb.ForgetResponse(names=names)
        raise AssertionError
