"""Standbys: with two replicas, another node has each acknowledged step of a user's sessions before the caller is told.

The home of a lot sends what each step has made of a session to the lot's standby, which the record in etcd names, and
answers when that has stored it (`session_copies` is the other side). Steps of many lots share a call.

What always holds: while the record names a standby, that node has all acknowledged steps of the lot's sessions, of the
users who have used any since this process started or since an earlier process of this home sent them. A step is
acknowledged alone only after the record names none. A new standby has the sessions of all these users before the record
names it, and gets an epoch for its copies that no earlier copies have. No call returns what a step has changed before
that step may be acknowledged: changes of a lot are made one after the other, and a read waits for the one under way.
What it doesn't do: anything with one replica; send the blocks in time (clients put them to both nodes, for which they
ask for the standby; `session_hand_overs` sends those that it lacks).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import grpc.aio

from kvstore.cluster.map import DRAINING
from kvstore.errors import DeadlineExceeded, KvError, StorageError, WrongEpoch
from kvstore.limits import (
    REPLICAS_MAX,
    SESSION_BLOCKS_MAX,
    SESSION_CHUNK_BLOCKS,
    SESSION_STEP_BLOCKS,
    SESSIONS_COPIES_AT_ONCE,
    SESSIONS_STANDBY_LOTS_MAX,
    SESSIONS_STANDBY_MS,
    SESSIONS_STANDBY_RETRY_MS,
    SESSIONS_STANDBY_USERS_MAX,
)
from kvstore.node.session_names import name_of
from kvstore.task_ends import drop_failure, logs_failure
from kvstore.wire import upkeep_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from kvstore.cluster.membership import Membership
    from kvstore.cluster.primacy import Term
    from kvstore.node.node import Node
    from kvstore.node.peers import Peers
    from kvstore.node.session_moves import SessionMoves
    from kvstore.node.tenants import Tenant, Tenants
    from kvstore.storage.manifests import Stored
    from kvstore.wire.manifest import Manifest

__all__ = ["Standbys"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_Queued: TypeAlias = tuple[pb.SessionCopy, "asyncio.Future[bool]"]


class _Away(Exception):
    """A node takes no copies now."""


class _User(NamedTuple):
    tenant: Tenant
    user: str


class _Lot:
    """What is known of a lot's standby, in one term of this node."""

    def __init__(self, term: Term) -> None:
        self.lock = asyncio.Lock()  # held while a session of it changes, and until the standby has that
        # Who have used sessions in it, or asked for its standby; the last ones last.
        self.users: OrderedDict[tuple[str, str], _User] = OrderedDict()
        self.begin(term, 0)

    def begin(self, term: Term, lease: int) -> None:
        """Begin a term: nothing is known but the users."""
        self.term, self.lease = term, lease
        self.is_known = False  # the record has been read
        self.standby = ""  # as the record has it, unless it names one that had the lot before this term
        self.is_untouched = False  # it does: no step may be acknowledged before it names another, or none
        self.copies = self.ticket = 0
        self.standby_lease = 0  # of the process that gave the ticket
        self.synced: set[tuple[str, str]] = set()  # users of whose sessions the standby has all that there is
        self.retry_ns = 0  # if it has none: when one is asked again

    def lose(self) -> None:
        """Note that the standby's state isn't known any more."""
        self.ticket = 0
        self.synced.clear()


class Standbys:
    """The standbys of the lots whose sessions this node orders. Used in its event loop only."""

    def __init__(
        self, node: Node, tenants: Tenants, membership: Membership, peers: Peers, moves: SessionMoves
    ) -> None:
        self._node, self._tenants, self._membership, self._peers = node, tenants, membership, peers
        self._moves = moves
        self._lots: OrderedDict[int, _Lot] = OrderedDict()  # the last used last
        self._away: dict[str, int] = {}  # nodes that took no copies: when they are asked again
        self._queues: dict[str, list[_Queued]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._under_way: set[asyncio.Task[Any]] = set()  # changes that may outlive their callers
        self._task: asyncio.Task[None] | None = None
        self._touched: dict[int, Term] = {}  # by lot: a term whose record names nobody from before it
        self._used: set[str] = set()  # nodes that have been standbys of lots ordered here
        self._counted = 0  # lots without a standby, when that was last looked at

    def start(self) -> None:
        """Start to look for standbys without waiting for a step."""
        self._task = asyncio.create_task(self._watch())
        self._task.add_done_callback(logs_failure(log, "No standbys are sought without a step any longer."))

    async def close(self) -> None:
        """Stop."""
        tasks = [*self._sending, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def lots_alone(self) -> int:
        """How many lots ordered here, of those used since the start, have one copy; if they are many, a moment ago."""
        if len(self._lots) > SESSIONS_COPIES_AT_ONCE:
            return self._counted
        return len(self._alone(list(self._lots.values())))

    def _alone(self, lots: list[_Lot]) -> list[_Lot]:
        view, name = self._membership.primacy.view, self._membership.name
        if view is None or not view.members:
            return []
        ours = [one for one in lots if view.members[view.owners_of(one.term.lot)[0]].name == name]
        return [
            one
            for one in ours
            if not (one.is_known and one.standby and self._may_stay(one.standby)) or self._has_restarted(one)
        ]

    # --- steps

    @asynccontextmanager
    async def reading(self, term: Term, tenant: Tenant, user: str) -> AsyncIterator[None]:
        """Read a user's sessions: what was read may be returned afterwards."""
        if (lot := self._lot(term, tenant, user)) is None:
            yield
            return
        one = _User(tenant, user)
        await self._settle(lot, term, one)
        try:
            yield
        except KvError:
            await self._settle(lot, term, one)
            raise
        await self._settle(lot, term, one)

    @asynccontextmanager
    async def changing(
        self, term: Term, tenant: Tenant, user: str, session: str, *, delete_blocks: bool = False
    ) -> AsyncIterator[None]:
        """Change a session: when this ends without an error, the change may be acknowledged."""
        if (lot := self._lot(term, tenant, user)) is None:
            await self._touch(term)
            yield
            return
        one, name = _User(tenant, user), (tenant.name, user)
        async with lot.lock:
            await self._ensure(lot, term, one)
            before = self._stored(one, session)
            was_synced = name in lot.synced
            lot.synced.discard(name)  # until the standby has the change, whatever happens meanwhile
            try:
                yield
            except KvError:
                if was_synced and self._stored(one, session) == before and not self._under_way:
                    lot.synced.add(name)
                raise
            try:
                if lot.standby and was_synced and lot.term == term:
                    copy = await self._difference(one, session, before)
                    copy.delete_blocks = delete_blocks
                    await self._send(lot, [copy])
                    lot.synced.add(name)
            except (_Away, StorageError):
                lot.lose()
            try:
                await self._ensure(lot, term, one)
            except WrongEpoch as error:
                raise DeadlineExceeded(
                    f"The step was done here and not at the node's standby, and may have taken effect or not: {error}"
                ) from error

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """Execute a change of a session that goes on when its caller gives up."""
        if not self._lots:
            return await change
        task = asyncio.create_task(change)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(drop_failure)
        return await asyncio.shield(task)

    async def prepare(self, term: Term, tenant: Tenant, user: str) -> None:
        """Have a standby for a user's sessions, without a step."""
        if (lot := self._lot(term, tenant, user)) is None:
            await self._touch(term)
        else:
            await self._settle(lot, term, _User(tenant, user))

    async def named(self, term: Term, tenant: Tenant, user: str) -> tuple[str, str]:
        """The address and name of the node that has a user's sessions; "" if the record names none, or none is wanted.

        WrongEpoch if the address is not known yet. It is so at a moment of the call.
        """
        if (lot := self._lot(term, tenant, user)) is None:
            return "", ""
        await self._settle(lot, term, _User(tenant, user))
        if not (name := lot.standby):
            return "", ""
        if (node := self._moves.target(name)) is None:
            raise WrongEpoch("The node's map does not have the standby of this user's sessions yet.")
        return node, name

    async def doubt(self, term: Term, node: str) -> None:
        """Check whether a lot's standby, by its address, still answers; if not, it is replaced before the next step."""
        lot = self._lots.get(term.lot)
        if lot is None or not lot.standby or self._moves.target(lot.standby) != node:
            return
        name = lot.standby
        try:
            # Without a ticket it is not stored. A call without a copy would be refused.
            await self._call(name, "CopySessions", pb.CopySessionsRequest(copies=[pb.SessionCopy()]))
        except _Away:
            async with lot.lock:
                if lot.standby == name:
                    lot.lose()

    async def delete(self, tenant: Tenant, keys: Sequence[bytes]) -> None:
        """Delete blocks of sessions at the standbys too; DeadlineExceeded if one has not answered."""
        peers = [one for one in self._used if self._may_stay(one)]
        counts = self._node.store.manifests.references([(tenant.id, key) for key in keys]) if peers else []
        if named := [key for key, count in zip(keys, counts, strict=False) if count]:
            request = pb.DeleteCopiesRequest(tenant=tenant.name, keys=named)
            calls = [self._call(peer, "DeleteCopies", request) for peer in peers]
            if any(
                isinstance(one, BaseException) for one in await asyncio.gather(*calls, return_exceptions=True)
            ):
                raise DeadlineExceeded(
                    "The blocks were deleted here, and a standby of their sessions has not answered: delete them again."
                )

    def note_erasure(self, tenant: str, user: str | None) -> None:
        """Note that a user's sessions, or with None all of a tenant's, were removed without a step."""
        for lot in self._lots.values():
            lot.synced -= {one for one in lot.synced if one[0] == tenant and user in {None, one[1]}}

    def _lot(self, term: Term, tenant: Tenant, user: str) -> _Lot | None:
        """The lot of a user, if its sessions are to be on two nodes."""
        if (self._tenants.replicas(tenant.name) or self._moves.replicas) < REPLICAS_MAX:
            return None
        if (lot := self._lots.get(term.lot)) is None:
            lot = self._lots[term.lot] = _Lot(term)
        self._lots.move_to_end(term.lot)
        lot.users[tenant.name, user] = _User(tenant, user)
        lot.users.move_to_end((tenant.name, user))
        if len(lot.users) > SESSIONS_STANDBY_USERS_MAX:
            lot.users.popitem(last=False)
        while (
            len(self._lots) > SESSIONS_STANDBY_LOTS_MAX and not next(iter(self._lots.values())).lock.locked()
        ):
            self._lots.popitem(last=False)
        return lot

    # --- having a standby

    async def _touch(self, term: Term) -> None:
        """Have the record name none, if it names one that had the lot before: with one replica, before a step."""
        if self._touched.get(term.lot) == term:
            return
        if (await self._membership.primacy.amend(term)).is_untouched:
            await self._membership.primacy.amend(term, "")
        self._touched[term.lot] = term
        if len(self._touched) > SESSIONS_STANDBY_LOTS_MAX:
            del self._touched[next(iter(self._touched))]

    async def _settle(self, lot: _Lot, term: Term, one: _User) -> None:
        """Wait until all that can be read of a user's sessions may be acknowledged."""
        if lot.lock.locked() or not self._is_settled(lot, term, one):
            async with lot.lock:
                await self._ensure(lot, term, one)

    def _is_settled(self, lot: _Lot, term: Term, one: _User) -> bool:
        if (lot.term, lot.lease) != (term, self._membership.primacy.lease) or not lot.is_known:
            return False
        if lot.is_untouched:
            return False
        if lot.standby:
            is_synced = (one.tenant.name, one.user) in lot.synced
            return is_synced and self._may_stay(lot.standby) and not self._has_restarted(lot)
        return self._now_ns() < lot.retry_ns or not self._wanted(term.lot)

    async def _ensure(self, lot: _Lot, term: Term, one: _User) -> None:
        """See to it that the standby has all of a user's sessions, or that the record names none; else WrongEpoch."""
        primacy = self._membership.primacy
        if self._is_settled(lot, term, one):
            return
        if under_way := set(
            self._under_way
        ):  # a step whose caller has given up may change what is to be sent
            await asyncio.wait(under_way)
        if (lot.term, lot.lease) != (term, primacy.lease):
            lot.begin(term, primacy.lease)
        if not lot.is_known:
            await self._amend(lot)
        if self._has_restarted(lot):
            lot.lose()
        if lot.standby and self._may_stay(lot.standby) and await self._has_caught_up(lot, [one]):
            return
        wanted = self._wanted(term.lot)
        if wanted and wanted != lot.standby and await self._is_replaced(lot, wanted):
            return
        lot.retry_ns = self._now_ns() + SESSIONS_STANDBY_RETRY_MS * 1_000_000
        if lot.standby or lot.is_untouched:
            left = lot.standby
            await self._amend(lot, "")
            if left:
                log.warning("Sessions of lot %d have one copy: node %s takes none", term.lot, left)

    async def _amend(self, lot: _Lot, standby: str | None = None, copies: int = 0) -> None:
        """Read the record of a lot, or make it name another standby."""
        lot.is_known = False  # should the answer of etcd be lost
        record = await self._membership.primacy.amend(lot.term, standby, copies)
        lot.is_untouched = record.is_untouched
        lot.standby, lot.copies = ("", 0) if lot.is_untouched else (record.standby, record.copies)
        lot.is_known = True
        if lot.standby:
            self._used.add(lot.standby)

    async def _is_replaced(self, lot: _Lot, wanted: str) -> bool:
        """Have another standby: it is one when it has the sessions of all users."""
        if self._now_ns() < self._away.get(wanted, 0):
            return False
        was, was_copies = lot.standby, lot.copies
        lot.lose()
        lot.is_known = False
        lot.copies = (await self._membership.primacy.amend(lot.term, new=True)).top
        lot.standby = wanted
        if not await self._has_caught_up(lot, list(lot.users.values())):
            lot.standby, lot.copies, lot.is_known = was, was_copies, True
            return False
        await self._amend(lot, wanted, lot.copies)
        return True

    async def _has_caught_up(self, lot: _Lot, users: list[_User]) -> bool:
        try:
            await self._catch_up(lot, users)
        except _Away:
            lot.lose()
            return False
        return True

    async def _catch_up(self, lot: _Lot, users: list[_User]) -> None:
        """Send the standby all sessions of these users that it may lack."""
        if self._now_ns() < self._away.get(lot.standby, 0):
            raise _Away
        if not lot.ticket:
            lot.standby_lease = self._membership.lease_of.get(lot.standby, 0)
            lot.ticket = await self._follow(lot)
        for one in users:
            if (one.tenant.name, one.user) not in lot.synced and await self._send_all(lot, one):
                lot.synced.add((one.tenant.name, one.user))

    async def _send_all(self, lot: _Lot, one: _User) -> bool:
        """Send all of a user's sessions, and which they are; nothing, and False, if the home has not taken them yet.

        The standby may be the former home: a copy would replace what is to be taken from it.
        """
        if self._membership.primacy.untaken(lot.term, one.tenant.name, one.user) is not None:
            return False
        listed, some, keys = list[str](), list[pb.SessionCopy](), 0
        async for copy in self._copies(lot, one):
            listed.append(copy.session)
            some.append(copy)
            if (keys := keys + len(copy.keys)) >= SESSION_BLOCKS_MAX:
                await self._send(lot, some)
                some, keys = [], 0
        await self._send(lot, [*some, self._new_copy(one, is_list=True, listed=listed, is_complete=True)])
        return True

    async def _copies(self, lot: _Lot, one: _User) -> AsyncIterator[pb.SessionCopy]:
        primacy = self._membership.primacy
        request = pb.SendSessionsRequest(user=one.user, epoch=primacy.recorded_epoch(lot.term))
        async for session in self._moves.sessions_of(one.tenant, request):
            yield self._new_copy(
                one,
                session=session.session,
                keys=session.keys,
                turns=session.turns,
                expires_unix_ms=session.expires_unix_ms,
                protected_blocks=session.protected_blocks,
                deleted=session.deleted,
            )

    @staticmethod
    def _new_copy(one: _User, **fields: Any) -> pb.SessionCopy:
        return pb.SessionCopy(tenant=one.tenant.name, user=one.user, **fields)

    async def _follow(self, lot: _Lot) -> int:
        primacy = self._membership.primacy
        request = pb.FollowSessionsRequest(
            node=self._membership.name,
            lease=lot.lease,
            lot=lot.term.lot,
            epoch=primacy.recorded_epoch(lot.term),
            copies=lot.copies,
            history=primacy.history,
        )
        if (taken_over := primacy.taken_over(lot.term)) is not None:
            earlier, users = taken_over
            earlier.tell(request)
            request.taken.extend(users)
        answer: pb.FollowSessionsResponse = await self._call(lot.standby, "FollowSessions", request)
        if answer.refused:
            log.debug("%s keeps no copies of sessions: %s", lot.standby, answer.refused)
            raise _Away
        return answer.ticket

    def _has_restarted(self, lot: _Lot) -> bool:
        """Whether the standby may be another process than the one that has given the ticket."""
        lease = self._membership.lease_of.get(lot.standby, lot.standby_lease)
        return bool(lot.ticket) and lease != lot.standby_lease

    def _may_stay(self, name: str) -> bool:
        """Whether a node may go on as a standby."""
        view = self._membership.primacy.view
        return view is not None and any(one.name == name and one.state != DRAINING for one in view.members)

    def _wanted(self, lot: int) -> str:
        """The node that should be a lot's standby; "" if there is none."""
        view = self._membership.primacy.view
        if view is None or not view.knows_standbys:
            return ""
        for at in view.owners_of(lot):
            one = view.members[at]
            if one.name != self._membership.name and one.state != DRAINING and one.replicas:
                return one.name
        return ""

    async def _watch(self) -> None:
        """Look for standbys for lots that have none, or one that leaves."""
        while True:
            await asyncio.sleep(SESSIONS_STANDBY_RETRY_MS / 1000)
            lots, alone = list(self._lots.values()), list[_Lot]()
            for at in range(0, len(lots), SESSIONS_COPIES_AT_ONCE):
                alone += self._alone(lots[at : at + SESSIONS_COPIES_AT_ONCE])
                await asyncio.sleep(0)
            self._counted = len(alone)
            self._used = {one for one in self._used if self._may_stay(one)}
            for at in range(0, len(alone), SESSIONS_COPIES_AT_ONCE):
                await asyncio.gather(*map(self._seek, alone[at : at + SESSIONS_COPIES_AT_ONCE]))
                await asyncio.sleep(0)

    async def _seek(self, lot: _Lot) -> None:
        """Look for a standby for a lot. A new one gets the sessions of all its users."""
        if not lot.users or (lot.is_known and not lot.standby and not self._wanted(lot.term.lot)):
            return
        one = next(reversed(lot.users.values()))
        with suppress(KvError):
            term = await self._membership.primacy.enter(self._tenants.placed_as(one.tenant.name), one.user)
            await self._settle(lot, term, one)

    def _now_ns(self) -> int:
        return self._node.clock.monotonic_ns()

    # --- sending

    def _stored(self, one: _User, session: str) -> Stored | None:
        return self._node.store.manifests.get(name_of(one.tenant.id, one.user, session))

    async def _difference(self, one: _User, session: str, before: Stored | None) -> pb.SessionCopy:
        """What a step has made of a session that the standby has as it was before."""
        now, manifests = self._stored(one, session), self._node.store.manifests
        if now is None:
            return self._new_copy(one, session=session, removed=True)
        manifest = now.manifest
        first = first_turn = 0
        if before is not None and before.manifest.epoch == manifest.epoch:
            was = before.manifest
            first, first_turn = _common_blocks(was, manifest), _common(was.turns, manifest.turns)
        copy = self._new_copy(
            one,
            session=session,
            first_block=first,
            first_turn=first_turn,
            expires_unix_ms=manifest.expires_ms,
            protected_blocks=manifest.protected,
        )
        if first:
            copy.last_key = manifests.keys_of(one.tenant.id, manifest, first - 1, first)[0]
        for turn, tokens, at_ms in manifest.turns[first_turn:]:
            copy.turns.add(first_block=turn, tokens=tokens, began_unix_ms=at_ms)
        for at in range(first, manifest.blocks, SESSION_STEP_BLOCKS):
            if at > first:
                await asyncio.sleep(0)
            until = min(at + SESSION_STEP_BLOCKS, manifest.blocks)
            copy.keys.extend(manifests.keys_of(one.tenant.id, manifest, at, until))
        return copy

    async def _send(self, lot: _Lot, copies: list[pb.SessionCopy]) -> None:
        """Send copies; _Away if one was not stored."""
        loop, kept = asyncio.get_running_loop(), list[asyncio.Future[bool]]()
        queue = self._queues.setdefault(lot.standby, [])
        for copy in copies:
            copy.ticket = lot.ticket
            kept.append(loop.create_future())
            queue.append((copy, kept[-1]))
        if kept and len(queue) == len(kept):
            task = asyncio.create_task(self._drain(lot.standby))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        if not all(await asyncio.gather(*kept)):
            raise _Away
        for copy in copies:
            deleted = frozenset(copy.deleted)
            if keys := [key for key in copy.keys if key not in deleted]:
                tenant = self._tenants.copied(copy.tenant)
                self._moves.hand_overs.queue(lot.standby, tenant, copy.user, keys, is_copy=True)

    async def _drain(self, peer: str) -> None:
        """Send what is queued for a node, in calls of what has gathered while the one before was under way."""
        queue = self._queues[peer]
        try:
            while queue:
                some = _first(queue)
                request = pb.CopySessionsRequest(copies=[copy for copy, _ in some])
                try:
                    answer: pb.CopySessionsResponse = await self._call(peer, "CopySessions", request)
                    kept = list(answer.kept)
                except _Away:
                    kept = []
                del queue[: len(some)]
                for at, (_, future) in enumerate(some):
                    if not future.done():
                        future.set_result(at < len(kept) and kept[at])
        finally:
            del self._queues[peer]
            for _, future in queue:  # the node ends
                future.cancel()

    async def _call(self, peer: str, method: str, request: Any) -> Any:
        target = self._moves.target(peer)
        if target is None:
            raise _Away
        try:
            call = getattr(self._peers.stub(target), method)
            return await call(request, timeout=SESSIONS_STANDBY_MS / 1000, metadata=self._peers.metadata)
        except grpc.aio.AioRpcError as error:
            log.debug("%s takes no copies of sessions: %r", peer, error)
            self._away[peer] = self._now_ns() + SESSIONS_STANDBY_RETRY_MS * 1_000_000
            raise _Away from error


def _first(queue: list[_Queued]) -> list[_Queued]:
    """What of a queue is sent in one call."""
    keys, some = 0, list[_Queued]()
    for entry in queue[:SESSIONS_COPIES_AT_ONCE]:
        keys += len(entry[0].keys)
        if some and keys > SESSION_BLOCKS_MAX:
            break
        some.append(entry)
    return some


def _common_blocks(was: Manifest, now: Manifest) -> int:
    """How many first blocks two states of a session surely share."""
    chunks = _common(was.chunks, now.chunks)
    if chunks == len(was.chunks) == len(now.chunks):
        return chunks * SESSION_CHUNK_BLOCKS + _common(was.tail, now.tail)
    return chunks * SESSION_CHUNK_BLOCKS


def _common(was: Sequence[object], now: Sequence[object]) -> int:
    """How many first elements are equal."""
    shared = min(len(was), len(now))
    return next((at for at in range(shared) if was[at] != now[at]), shared)
