"""Sessions follow their users: what a node does when it becomes, or has been, the home of users.

The *new* home takes a user's sessions before their first step there: it asks the node that ordered them before, by the
record in etcd, which sends their keys and turns at once, and the blocks afterwards (`session_hand_overs`). If that node
is not on the map, or sends nothing for SESSIONS_SILENT_MS, its standby is asked, which has all that was acknowledged
there (`session_standbys`), but not what that node had not taken itself.

What always holds: sessions are taken in the term that began with the takeover, before the first step of their user in
it, or not at all; by then the former home orders none, so what it has is what the last step left. A session is taken
whole or not; if one finds no room, no step of its user is made until it does. It goes to the member that is named,
wherever the caller is. A block is copied only to a session that still lists it and lacks it, and that has had no
deletion of it since (`upkeep_service.Waited`); blocks deleted on the former home are deleted on the new one. A first
step waits for SESSIONS_MOVE_MS at most after each session that comes, and for changes under way.
While a standby is on the map, no step is made before it has been asked.
What it doesn't do: take sessions from a node that doesn't answer and had no standby; remove them there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import grpc
import grpc.aio

from kvstore.cluster.takeovers import Takeover
from kvstore.durability import Durability
from kvstore.errors import KvError, Refused, StorageError, WrongEpoch
from kvstore.limits import (
    SESSION_STEP_BLOCKS,
    SESSIONS_MOVE_MS,
    SESSIONS_MOVED_MAX,
    SESSIONS_SILENT_MS,
)
from kvstore.names import domain_of
from kvstore.node.calls import Ends
from kvstore.node.listed_sessions import listed_sessions
from kvstore.node.session_changes import change, to_its_end
from kvstore.node.session_copies import SessionCopies
from kvstore.node.session_hand_overs import HandOvers
from kvstore.node.session_leftovers import Leftovers
from kvstore.node.session_names import check_text, name_of
from kvstore.node.session_standbys import Standbys
from kvstore.node.upkeep_service import UPKEEP
from kvstore.storage.items import DeleteItem, SessionItem, SessionStep
from kvstore.wire import upkeep_pb2 as pb
from kvstore.wire.manifest import Turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.cluster.membership import Membership
    from kvstore.cluster.primacy import Term
    from kvstore.node.node import Node
    from kvstore.node.peers import Peers
    from kvstore.node.tenants import Tenant, Tenants
    from kvstore.node.upkeep import Upkeep
    from kvstore.storage.items import DeleteDone

__all__ = ["SessionMoves"]

log = logging.getLogger(__name__)

_User = tuple[str, str]  # names of tenant and user


class _Expected(NamedTuple):
    """A user whose sessions are expected."""

    tenant: Tenant
    user: str
    term: Term
    taking: set[asyncio.Task[bool]]
    limits: list[asyncio.Timeout]  # of the call that has them sent, if one is under way
    failed: list[KvError]  # why one of them could not be stored

    def extend(self) -> None:
        """Note that one has come: the others may take as long again."""
        for limit in self.limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time() + SESSIONS_MOVE_MS / 1000)


class SessionMoves:
    """The sessions that a node takes from others, and sends to them."""

    def __init__(
        self, node: Node, tenants: Tenants, membership: Membership, peers: Peers, upkeep: Upkeep
    ) -> None:
        self._node, self._tenants, self._membership, self._peers = node, tenants, membership, peers
        self._upkeep = upkeep
        self._expected: dict[int, _Expected] = {}  # by ticket
        self._arriving: dict[tuple[Term, _User], asyncio.Task[None]] = {}
        # Nodes that have not sent sessions: since when, and when they were asked last.
        self._silent: dict[str, tuple[int, int]] = {}
        self.taken_sessions = 0  # since the node started
        self.standbys = Standbys(node, tenants, membership, peers, self)
        self.copies = SessionCopies(node, tenants, membership, self)
        self.leftovers = Leftovers(node, tenants, membership)
        self.hand_overs = HandOvers(
            node, tenants, membership, peers, upkeep, self._take_named, self.leftovers.note_taken
        )

    @property
    def replicas(self) -> int:
        """On how many nodes sessions of tenants without a number are."""
        return self._upkeep.replicas

    def start(self) -> None:
        """Start what is done in the background."""
        self.hand_overs.start()
        self.leftovers.start()
        self.standbys.start()

    async def close(self) -> None:
        """Stop; a step that waits for its user's sessions fails."""
        await self.standbys.close()
        await self.leftovers.close()
        await self.hand_overs.close()
        for task in list(self._arriving.values()):
            task.cancel()
        await asyncio.gather(*self._arriving.values(), return_exceptions=True)

    # --- as the new home

    async def arrive(self, term: Term, tenant: Tenant, user: str) -> None:
        """Take a user's sessions from their former home, before the first step of the user in this term."""
        self.hand_overs.note(tenant.name, user)
        primacy, key = self._membership.primacy, (term, (tenant.name, user))
        while (takeover := primacy.untaken(term, tenant.name, user)) is not None:
            if (task := self._arriving.get(key)) is None:
                task = asyncio.create_task(self._arrive(term, takeover, tenant, user))
                self._arriving[key] = task
                task.add_done_callback(lambda _: self._arriving.pop(key))
            await asyncio.shield(task)

    async def take(self, tenant: Tenant, user: str) -> pb.TakeSessionsResponse:
        """Take a user's sessions now, or say why that can't be done yet."""
        check_text("user", user)
        if not self._upkeep.waited.may_lack_more:
            return pb.TakeSessionsResponse(refused="The node still receives the blocks of other sessions.")
        primacy = self._membership.primacy
        try:
            term = await primacy.enter(self._tenants.placed_as(tenant.name), user)
            await self.arrive(term, tenant, user)
            await self.standbys.prepare(term, tenant, user)
        except (WrongEpoch, StorageError) as error:
            return pb.TakeSessionsResponse(refused=str(error))
        return pb.TakeSessionsResponse(epoch=primacy.recorded_epoch(term))

    async def _take_named(self, tenant: str, user: str) -> str:
        try:
            return (await self.take(self._tenants.copied(tenant), user)).refused
        except KvError as error:
            return str(error)

    async def _arrive(self, term: Term, takeover: Takeover, tenant: Tenant, user: str) -> None:
        ticket = secrets.randbits(63)
        expected = self._expected[ticket] = _Expected(tenant, user, term, set(), [], [])
        try:
            await self.copies.end(term.lot)  # a former home gets nothing acknowledged here any more
            is_done = await self._ask(ticket, takeover, expected)
        finally:
            del self._expected[ticket]
            # What has begun must have ended before the first step: it would be seen to appear without a step.
            while expected.taking:
                await asyncio.wait(expected.taking)
        if expected.failed:
            raise expected.failed[0]
        if not is_done:
            raise WrongEpoch(
                "The node has not taken the user's sessions over from their former home or its standby yet."
            )
        await self._membership.primacy.note_taken(term, tenant.name, user)
        self.leftovers.note(tenant.name, user, term.epoch)

    async def _ask(self, ticket: int, takeover: Takeover, expected: _Expected) -> bool:
        """Have a user's sessions sent here, as far as anybody can; False if a node has not sent what it has."""
        primacy, lot = self._membership.primacy, expected.term.lot
        following: Takeover | None = takeover
        while following is not None:
            node, epoch, standby, copies = following
            within_ms = SESSIONS_MOVE_MS // 2 if standby else SESSIONS_MOVE_MS
            answer = await self._asked(ticket, node, epoch, expected, within_ms)
            if expected.failed:
                return False
            if answer is None and self._may_answer(node):
                return False  # perhaps it has not taken them, and an earlier one has them: only it can say
            if answer is not None and answer.lot.earlier_node and node != self._membership.name:
                await primacy.learn(lot, epoch, Takeover.told(answer.lot), answer.lot.taken)
            if answer is None and standby:
                answer = await self._asked(ticket, standby, copies, expected, SESSIONS_MOVE_MS)
                if expected.failed or (answer is None and self.target(standby) is not None):
                    return False
            if answer is None:  # they are lost, or were never there, as it said when another user came
                following = primacy.learnt(lot, epoch, expected.tenant.name, expected.user)
            else:
                following = Takeover.told(answer) if answer.earlier_node else None
            if following is not None and following.epoch >= epoch:
                break  # each has an earlier epoch than the one before
        return True

    def _may_answer(self, node: str) -> bool:
        """Whether a node that has just not answered is there, and has been silent for a short time."""
        if self.target(node) is None or node not in self._silent:
            return False
        began_ns, last_ns = self._silent[node]
        return last_ns - began_ns < SESSIONS_SILENT_MS * 1_000_000

    def _note_silence(self, node: str) -> None:
        now_ns = self._node.clock.monotonic_ns()
        began_ns, last_ns = self._silent.get(node, (now_ns, now_ns))
        is_new = now_ns - last_ns > SESSIONS_SILENT_MS * 1_000_000  # it was not asked meanwhile
        self._silent[node] = (now_ns if is_new else began_ns), now_ns

    async def _asked(
        self, ticket: int, node: str, epoch: int, expected: _Expected, within_ms: int
    ) -> pb.SendSessionsResponse | None:
        """Have a node send a user's sessions; None if it has not sent all of them, or is not on the map."""
        tenant, user = expected.tenant, expected.user
        request = pb.SendSessionsRequest(
            node=self._membership.name,
            ticket=ticket,
            tenant=tenant.name,
            user=user,
            epoch=epoch,
            history=self._membership.primacy.history,
        )
        answer: pb.SendSessionsResponse
        try:
            async with asyncio.timeout(within_ms / 1000) as limit:
                expected.limits[:] = [limit]
                if node == self._membership.name:  # its copies, or the node in between had not taken them
                    answer = await self.send(tenant, request)
                elif (target := self.target(node)) is None:
                    return None
                else:
                    answer = await self._peers.stub(target).SendSessions(
                        request,
                        timeout=SESSIONS_MOVED_MAX * SESSIONS_MOVE_MS / 1000,
                        metadata=self._peers.metadata,
                    )
        except (TimeoutError, grpc.aio.AioRpcError, KvError) as error:
            log.warning("Sessions were not moved here from node %s: %r", node, error)
            if _is_earlier_version(error):
                self._silent.pop(node, None)
            elif not expected.failed:  # it may have just started, or refuse calls for a moment
                self._note_silence(node)
            return None
        finally:
            expected.limits.clear()
        if answer.is_partial:
            if not expected.failed:
                self._note_silence(node)
            return None
        self._silent.pop(node, None)
        return answer

    def target(self, name: str) -> str | None:
        """The address of a member."""
        return next((one.node for one in self._membership.map.members if one.name == name), None)

    async def take_one(self, request: pb.TakeSessionRequest) -> bool:
        """Store a session that was asked for; False if it is not expected, or refused; an error if there is no room."""
        if (expected := self._expected.get(request.ticket)) is None:
            return False
        is_stored = await to_its_end(self._store(expected, request), expected.taking)
        view, placed_as = self._membership.primacy.view, self._tenants.placed_as(expected.tenant.name)
        home = None if view is None else view.home(placed_as, expected.user)
        if home is not None and home.name == self._membership.name:  # else the next home waits for this node
            expected.extend()
        return is_stored

    async def _store(self, expected: _Expected, request: pb.TakeSessionRequest) -> bool:
        tenant, user, term, *_ = expected
        try:
            is_stored = await self._keep(tenant, user, request, _item(tenant, user, request, term.epoch))
        except KvError as error:
            log.warning("A session was not moved here: %s", error)
            if isinstance(error, Refused):  # it is there, for example
                return False
            expected.failed.append(error)
            raise
        if is_stored:
            self.taken_sessions += 1
            self._node.watchers.session(tenant.id, user, request.session, len(request.keys))
        return is_stored

    async def store_copy(self, tenant: Tenant, copy: pb.SessionCopy, epoch: int) -> bool:
        """Store what a step at its home has made of a session; False if this node has not what was before."""
        item = _item(tenant, copy.user, copy, epoch)._replace(blocks=copy.first_block, replaces=True)
        if copy.first_block or copy.first_turn:
            manifests = self._node.store.manifests
            stored, last = manifests.get(item.name), copy.first_block - 1
            if (
                stored is None
                or stored.manifest.epoch != epoch
                or len(stored.manifest.turns) < copy.first_turn
            ):
                return False
            manifest = stored.manifest
            if last >= 0 and manifests.keys_of(tenant.id, manifest, last, last + 1) != [copy.last_key]:
                return False
            item = item._replace(turns=[*manifest.turns[: copy.first_turn], *item.turns])
        return await self._keep(tenant, copy.user, copy, item)

    async def _keep(
        self, tenant: Tenant, user: str, told: pb.TakeSessionRequest | pb.SessionCopy, item: SessionItem
    ) -> bool:
        node = self._node
        if node.erasures.refuse_copies(tenant.id, domain_of(user)):
            return False
        deleted = frozenset(told.deleted)
        await self.delete(tenant.id, deleted)
        await change(node, item)
        names = [(tenant.id, key) for key in dict.fromkeys(told.keys) if key not in deleted]
        async with node.turns.of(UPKEEP) as turn:
            for at in range(0, len(names), SESSION_STEP_BLOCKS):
                if at:
                    await turn.next()
                some = names[at : at + SESSION_STEP_BLOCKS]
                there = node.store.lookup(some)
                self._upkeep.waited.lack(one for one, entry in zip(some, there, strict=True) if entry is None)
        return True

    async def delete(self, tenant: bytes, keys: frozenset[bytes]) -> None:
        """Delete blocks that were deleted at another home: this one may have been a home before, or a standby."""
        node, names = self._node, [(tenant, key) for key in keys]
        self._upkeep.waited.cancel(names)
        found = [
            name
            for name, entry in zip(names, node.store.lookup(names), strict=True)
            if entry is not None or node.store.is_putting(name)
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
        if (view := primacy.view) is None:  # it knows neither the number of lots nor the history of etcd
            raise WrongEpoch("The node has just started, and does not know its cluster yet.")
        primacy.check_history(request.history)
        term = primacy.term_of(lot := view.lot_of(placed_as.encode(), request.user.encode()), request.epoch)
        if (task := self._arriving.get((term, (tenant.name, request.user)))) is not None:
            await asyncio.wait([task])
        await self.copies.end(lot)  # what the home that has been replaced still sends is not acknowledged
        keys, answer = list[bytes](), pb.SendSessionsResponse()
        if (takeover := primacy.untaken(term, tenant.name, request.user)) is not None:
            # What has come so far is as it was there, and may be nowhere else: if it came from here, for example.
            takeover.tell(answer)
        if (taken_over := primacy.taken_over(term)) is not None:
            taken_over[0].tell(answer.lot)
            answer.lot.taken.extend(taken_over[1])
        self.hand_overs.note(tenant.name, request.user)  # the member will have said that it has them
        async for session in self.sessions_of(tenant, request):
            if request.node == self._membership.name:
                await self.take_one(session)
            elif (target := self.target(request.node)) is None or (
                taken := await self._sent(target, session)
            ) is None:
                answer.is_partial = True
                break
            elif taken.taken:
                deleted = frozenset(session.deleted)
                keys += [key for key in session.keys if key not in deleted]
        if keys:
            self.hand_overs.queue(request.node, tenant, request.user, keys)
        return answer

    async def _sent(self, target: str, session: pb.TakeSessionRequest) -> pb.TakeSessionResponse | None:
        with suppress(grpc.aio.AioRpcError):
            answer: pb.TakeSessionResponse = await self._peers.stub(target).TakeSession(
                session, timeout=SESSIONS_MOVE_MS / 1000, metadata=self._peers.metadata
            )
            return answer
        return None

    async def sessions_of(
        self, tenant: Tenant, request: pb.SendSessionsRequest
    ) -> AsyncIterator[pb.TakeSessionRequest]:
        """A user's sessions of an epoch, the last used first."""
        node = self._node
        epoch = self._membership.primacy.own_epoch(request.epoch)
        now_ms = node.clock.wall_ms()
        theirs = [
            one
            async for one in listed_sessions(node, tenant.id, request.user)
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
        session.expires_unix_ms, session.protected_blocks = manifest.expires_ms, manifest.protected
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


def _is_earlier_version(error: Exception) -> bool:
    """Whether a node will never send sessions."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED


def _item(tenant: Tenant, user: str, told: pb.TakeSessionRequest | pb.SessionCopy, epoch: int) -> SessionItem:
    return SessionItem(
        name_of(tenant.id, user, told.session),
        SessionStep.TAKE,
        Durability.WRITTEN,
        0,
        keys=list(told.keys),
        turns=[Turn(one.first_block, one.tokens, one.began_unix_ms) for one in told.turns],
        label=told.session.encode(),
        expires_ms=told.expires_unix_ms,
        protected=told.protected_blocks,
        epoch=epoch,
    )
