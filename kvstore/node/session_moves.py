"""Sessions follow their users: what a node does when it becomes, or has been, the home of users.

The *new* home takes a user's sessions before their first step there: it asks the node that ordered them before, by the
record in etcd, which sends their keys and turns at once, and the blocks afterwards (`session_hand_overs`).

What always holds: sessions are taken in the term that began with the takeover, before the first step of their user in
it, or not at all; by then the former home orders none, so what it has is what the last step left. A session is taken
whole or not. It goes to the member that is named, wherever the caller is. A block is copied only to a session that
still lists it and lacks it, and that has had no deletion of it since (`upkeep_service.Waited`); blocks deleted on the
former home are deleted on the new one. A first step waits for SESSIONS_MOVE_MS at most, and for changes under way.
What it doesn't do: take sessions from a node that doesn't answer; protect them here; remove them there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import grpc.aio

from kvstore.durability import Durability
from kvstore.errors import KvError, StorageError, WrongEpoch
from kvstore.limits import (
    SESSION_STEP_BLOCKS,
    SESSIONS_LISTED_STEP,
    SESSIONS_MOVE_HOPS,
    SESSIONS_MOVE_MS,
    SESSIONS_MOVED_MAX,
)
from kvstore.names import domain_of, user_name
from kvstore.node.calls import Ends
from kvstore.node.session_changes import change
from kvstore.node.session_hand_overs import HandOvers
from kvstore.node.session_names import check_text, name_of
from kvstore.node.upkeep_service import UPKEEP
from kvstore.storage.items import DeleteItem, SessionItem, SessionStep
from kvstore.wire import upkeep_pb2 as pb
from kvstore.wire.manifest import Turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.cluster.membership import Membership
    from kvstore.cluster.primacy import Takeover, Term
    from kvstore.node.node import Node
    from kvstore.node.peers import Peers
    from kvstore.node.tenants import Tenant, Tenants
    from kvstore.node.upkeep import Upkeep
    from kvstore.storage.items import DeleteDone
    from kvstore.storage.manifests import Listed

__all__ = ["SessionMoves"]

log = logging.getLogger(__name__)

_User = tuple[str, str]  # names of tenant and user


class _Expected(NamedTuple):
    """A user whose sessions are expected."""

    tenant: Tenant
    user: str
    term: Term
    taking: set[asyncio.Task[bool]]


class SessionMoves:
    """The sessions that a node takes from others, and sends to them."""

    def __init__(
        self, node: Node, tenants: Tenants, membership: Membership, peers: Peers, upkeep: Upkeep
    ) -> None:
        self._node, self._tenants, self._membership, self._peers = node, tenants, membership, peers
        self._upkeep = upkeep
        self._expected: dict[int, _Expected] = {}  # by ticket
        self._arriving: dict[tuple[Term, _User], asyncio.Task[None]] = {}
        self.taken_sessions = 0  # since the node started
        self.hand_overs = HandOvers(node, tenants, membership, peers, upkeep)

    async def close(self) -> None:
        """Stop; a step that waits for its user's sessions fails."""
        await self.hand_overs.close()
        for task in list(self._arriving.values()):
            task.cancel()
        await asyncio.gather(*self._arriving.values(), return_exceptions=True)

    # --- as the new home

    async def arrive(self, term: Term, tenant: Tenant, user: str) -> None:
        """Take a user's sessions from their former home, before the first step of the user in this term."""
        self.hand_overs.note(tenant.name, user)
        primacy, key = self._membership.primacy, (term, (tenant.name, user))
        while (takeover := primacy.takeover(term)) is not None and key[1] not in takeover.users:
            if (task := self._arriving.get(key)) is None:
                task = asyncio.create_task(self._arrive(term, takeover, tenant, user))
                self._arriving[key] = task
                task.add_done_callback(lambda _: self._arriving.pop(key))
            await asyncio.shield(task)

    async def take(self, tenant: Tenant, user: str) -> str:
        """Take a user's sessions now; why that can't be done yet, or ""."""
        check_text("user", user)
        if not self._upkeep.waited.may_lack_more:
            return "The node still receives the blocks of other sessions."
        primacy = self._membership.primacy
        try:
            term = await primacy.enter(self._tenants.placed_as(tenant.name), user)
            await self.arrive(term, tenant, user)
        except WrongEpoch as error:
            return str(error)
        return ""

    async def _arrive(self, term: Term, takeover: Takeover, tenant: Tenant, user: str) -> None:
        ticket = secrets.randbits(63)
        expected = self._expected[ticket] = _Expected(tenant, user, term, set())
        try:
            async with asyncio.timeout(SESSIONS_MOVE_MS / 1000):
                await self._ask(ticket, takeover.node, takeover.epoch, tenant, user)
        except (TimeoutError, grpc.aio.AioRpcError, KvError) as error:
            log.warning("Sessions were not moved here from node %s: %r", takeover.node, error)
        finally:
            del self._expected[ticket]
        # What has begun must have ended before the first step: it would be seen to appear without a step.
        while expected.taking:
            await asyncio.wait(expected.taking)
        self._membership.primacy.note_taken(term, tenant.name, user)

    async def _ask(self, ticket: int, node: str, epoch: int, tenant: Tenant, user: str) -> None:
        for _ in range(SESSIONS_MOVE_HOPS):
            request = pb.SendSessionsRequest(
                node=self._membership.name,
                ticket=ticket,
                tenant=tenant.name,
                user=user,
                epoch=epoch,
            )
            if node == self._membership.name:  # the node in between had not taken them
                answer = await self.send(tenant, request)
            elif (target := self._target(node)) is None:
                return
            else:
                answer = await self._peers.stub(target).SendSessions(
                    request, timeout=SESSIONS_MOVE_MS / 1000, metadata=self._peers.metadata
                )
            if not answer.earlier_node:
                return
            node, epoch = answer.earlier_node, answer.earlier_epoch

    def _target(self, name: str) -> str | None:
        """The address of a member."""
        return next((one.node for one in self._membership.map.members if one.name == name), None)

    async def take_one(self, request: pb.TakeSessionRequest) -> bool:
        """Store a session that was asked for; False if it is not expected, or can't be stored."""
        if (expected := self._expected.get(request.ticket)) is None:
            return False
        task = asyncio.create_task(self._store(expected, request))
        expected.taking.add(task)
        task.add_done_callback(expected.taking.discard)
        return await asyncio.shield(task)

    async def _store(self, expected: _Expected, request: pb.TakeSessionRequest) -> bool:
        node, (tenant, user, term, _) = self._node, expected
        try:
            name = name_of(tenant.id, user, request.session)
            if node.erasures.refuse_copies(tenant.id, domain_of(user)):
                return False
            deleted = frozenset(request.deleted)
            await self._delete(tenant.id, deleted)
            item = SessionItem(
                name,
                SessionStep.TAKE,
                Durability.WRITTEN,
                0,
                keys=list(request.keys),
                turns=[Turn(one.first_block, one.tokens, one.began_unix_ms) for one in request.turns],
                label=request.session.encode(),
                expires_ms=request.expires_unix_ms,
                epoch=term.epoch,
            )
            await change(node, item)
        except KvError as error:
            log.warning("A session was not moved here: %s", error)
            return False
        names = [(tenant.id, key) for key in dict.fromkeys(request.keys) if key not in deleted]
        async with node.turns.of(UPKEEP) as turn:
            for at in range(0, len(names), SESSION_STEP_BLOCKS):
                if at:
                    await turn.next()
                some = names[at : at + SESSION_STEP_BLOCKS]
                there = node.store.lookup(some)
                self._upkeep.waited.lack(one for one, entry in zip(some, there, strict=True) if entry is None)
        self.taken_sessions += 1
        node.watchers.session(tenant.id, user, request.session, len(request.keys))
        return True

    async def _delete(self, tenant: bytes, keys: frozenset[bytes]) -> None:
        """Delete blocks that were deleted on the former home: this node may have been the home before."""
        node, names = self._node, [(tenant, key) for key in keys]
        found = [
            name for name, entry in zip(names, node.store.lookup(names), strict=True) if entry is not None
        ]
        if found:
            ends: Ends[DeleteDone] = Ends(len(found))
            node.granted.delete(found)
            node.store.delete([DeleteItem(*name, Durability.WRITTEN, 0) for name in found], ends.collect)
            await ends.all()
        node.deletions.note(names)

    # --- as the former home

    async def send(self, tenant: Tenant, request: pb.SendSessionsRequest) -> pb.SendSessionsResponse:
        """Send a user's sessions of a past epoch to the member that has taken them over, or name an earlier home."""
        check_text("user", request.user)
        primacy, placed_as = self._membership.primacy, self._tenants.placed_as(tenant.name)
        lot = self._membership.map.lot_of(placed_as.encode(), request.user.encode())
        term = primacy.term_of(lot, request.epoch)
        if (task := self._arriving.get((term, (tenant.name, request.user)))) is not None:
            await asyncio.wait([task])
        takeover = primacy.takeover(term)
        if takeover is not None and (tenant.name, request.user) not in takeover.users:
            primacy.note_taken(term, tenant.name, request.user)
            return pb.SendSessionsResponse(earlier_node=takeover.node, earlier_epoch=takeover.epoch)
        keys = list[bytes]()
        async for session in self._sessions(tenant, request):
            if request.node == self._membership.name:
                await self.take_one(session)
            elif (target := self._target(request.node)) is None:
                break
            elif (await self._sent(target, session)).taken:
                deleted = frozenset(session.deleted)
                keys += [key for key in session.keys if key not in deleted]
        if keys:
            self.hand_overs.queue(request.node, tenant, request.user, keys)
        return pb.SendSessionsResponse()

    async def _sent(self, target: str, session: pb.TakeSessionRequest) -> pb.TakeSessionResponse:
        with suppress(grpc.aio.AioRpcError):
            answer: pb.TakeSessionResponse = await self._peers.stub(target).TakeSession(
                session, timeout=SESSIONS_MOVE_MS / 1000, metadata=self._peers.metadata
            )
            return answer
        return pb.TakeSessionResponse()

    async def _sessions(
        self, tenant: Tenant, request: pb.SendSessionsRequest
    ) -> AsyncIterator[pb.TakeSessionRequest]:
        """A user's sessions of an epoch, the last used first."""
        node = self._node
        found: list[Listed] = []
        epoch, named = self._membership.primacy.own_epoch(request.epoch), user_name(tenant.id, request.user)
        async with node.turns.of(UPKEEP) as turn:
            while True:
                behind = found[-1].session if found else b""
                found += (
                    more := node.store.manifests.of_user(tenant.id, named, behind, SESSIONS_LISTED_STEP)
                )
                if len(more) < SESSIONS_LISTED_STEP:
                    break
                await turn.next()
        now_ms = node.clock.wall_ms()
        theirs = [
            one
            for one in found
            if one.label is not None and one.epoch == epoch and not 0 < one.expires_ms <= now_ms
        ]
        theirs.sort(key=lambda one: one.at_ms, reverse=True)
        for one in theirs[:SESSIONS_MOVED_MAX]:
            label = (one.label or b"").decode(errors="replace")
            session = pb.TakeSessionRequest(ticket=request.ticket, session=label)
            with suppress(StorageError):  # it is lost then
                await self._fill(session, tenant, request.user, epoch)
                yield session

    async def _fill(self, session: pb.TakeSessionRequest, tenant: Tenant, user: str, epoch: int) -> None:
        node = self._node
        stored = node.store.manifests.get(name_of(tenant.id, user, session.session))
        if stored is None or stored.manifest.epoch != epoch:
            raise StorageError("The session has been removed meanwhile.")
        manifest = stored.manifest
        session.expires_unix_ms = manifest.expires_ms
        for first_block, tokens, at_ms in manifest.turns:
            session.turns.add(first_block=first_block, tokens=tokens, began_unix_ms=at_ms)
        async with node.turns.of(UPKEEP) as turn:
            for at in range(0, manifest.blocks, SESSION_STEP_BLOCKS):
                if at:
                    await turn.next()
                keys = node.store.manifests.keys_of(tenant.id, manifest, at, at + SESSION_STEP_BLOCKS)
                session.keys.extend(keys)
                gone = [key for key in dict.fromkeys(keys) if (tenant.id, key) in node.deletions]
                there = node.store.lookup([(tenant.id, key) for key in gone])
                session.deleted.extend(key for key, entry in zip(gone, there, strict=True) if entry is None)
