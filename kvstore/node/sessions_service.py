"""The service Sessions: the blocks of a user's conversation, turn by turn.

What always holds: a call sees only sessions of its caller's tenant, because a session's name on the drive contains the
tenant's. The steps of one session are executed one after the other, each completely or not at all. A call that uses a
cluster's map is answered by the one node that orders the user's sessions (`kvstore.cluster.primacy`). Many blocks, or
many sessions, are read in slices of the node's thread, with other tenants' turns in between; the store changes a large
session in slices. A tenant has one such large read or change at a time.
What it doesn't do: move a block's bytes, or know their meaning.
"""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from kvstore.config import counted
from kvstore.durability import Durability
from kvstore.errors import (
    DeadlineExceeded,
    KvError,
    NoSession,
    Overloaded,
    ProtocolError,
    StorageError,
    WrongEpoch,
)
from kvstore.limits import (
    PREFIX_STEP_BLOCKS,
    PROTECTED_SESSIONS_MAX,
    PROTECTED_SESSIONS_OF_TENANT_MAX,
    SESSION_BLOCKS_MAX,
    SESSION_BYTES,
    SESSION_STEP_BLOCKS,
    SESSION_TIME_TO_LIVE_MS_MAX,
    SESSIONS_LISTED_MAX,
    SESSIONS_LISTED_STEP,
)
from kvstore.lookups import Kind, Outcome
from kvstore.names import user_name
from kvstore.node.calls import check_keys, kept_durability_of, refusals
from kvstore.node.connection import check_count
from kvstore.node.session_changes import change
from kvstore.node.session_names import check_text, home_elsewhere, name_of, no_session
from kvstore.steps import Step
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.wire import sessions_pb2 as pb
from kvstore.wire import sessions_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenant
    from kvstore.node.time_slices import Turn
    from kvstore.storage.items import SessionDone
    from kvstore.storage.manifests import Listed, SessionName, Stored
    from kvstore.wire.manifest import Manifest

__all__ = ["SessionsService"]

log = logging.getLogger(__name__)


class SessionsService(sessions_pb2_grpc.SessionsServicer):
    """The node's service for sessions."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node = node
        self._gate = gate
        self._protecting: set[SessionName] = set()  # whose manifests are being written
        self._has_warned = False

    async def AppendSession(  # noqa: N802 - named by the proto, like all that follow
        self, request: pb.AppendSessionRequest, context: Context
    ) -> pb.AppendSessionResponse:
        """Name blocks as a turn."""
        async with self._refusals(context, request.name):
            tenant = self._enter("append session", context, request.name, len(request.keys))
            check_count(len(request.keys), SESSION_BLOCKS_MAX)
            keys = await self._keys(tenant, request)
            await self._node.granted.just_landed.stored(tenant.id, keys)
            item = SessionItem(
                _name(tenant, request.name),
                SessionStep.APPEND,
                kept_durability_of(request.durability),
                0,
                keys=keys,
                first_block=request.first_block if request.HasField("first_block") else None,
                tokens=request.tokens,
                at_ms=self._node.clock.wall_ms(),
                continues=request.continues,
                label=request.name.session.encode(),
                expires_ms=self._ends_ms(request.time_to_live_ms)
                if request.HasField("time_to_live_ms")
                else None,
            )
            async with self._ordered(tenant, request.name, changes=True) as epoch:
                blocks = await self._changed(item._replace(epoch=epoch), request.name)
            self._node.traces.of(item.name).saw(
                Step.APPENDED,
                len(request.keys),
                tokens=request.tokens,
                detail=f"{item.durability.name.lower()}, the session has {counted(blocks, 'block')}",
            )
            return pb.AppendSessionResponse(blocks=blocks)
        raise AssertionError

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:  # noqa: N802
        """Return what a session consists of."""
        async with self._refusals(context, request.name):
            tenant = self._enter("get session", context, request.name)
            name = _name(tenant, request.name)
            looking = self._node.lookups.begin(context, tenant.id, Kind.SESSION, 0, name)
            until = request.first_block + request.blocks
            try:
                async with (
                    self._ordered(tenant, request.name) as epoch,
                    self._reading(name, request.blocks) as turn,
                ):
                    manifest, keys = await self._read(turn, name, request.first_block, until, epoch)
                    answer = await _answer(turn, manifest, keys)
            except NoSession:
                if request.blocks:  # a resume needs its blocks; for a mere listing, none is missed
                    looking.add(Outcome.NO_SESSION)
                    looking.over()
                raise
            if request.blocks:
                looking.blocks = manifest.blocks
                looking.all_are(Outcome.NAMED, len(keys))
                looking.over()
            return answer
        raise AssertionError

    async def ListSessions(  # noqa: N802
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        """List a user's sessions."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("list sessions", context, request.tenant)
            check_text("user", request.user)
            if len(request.page_token) not in {0, SESSION_BYTES}:
                raise ProtocolError("The page token is not one of a list of sessions.")
            limit = min(request.page_size or SESSIONS_LISTED_MAX, SESSIONS_LISTED_MAX)
            user = user_name(tenant.id, request.user)
            found: list[Listed] = []
            whose = pb.SessionName(user=request.user, map_revision=request.map_revision)
            async with self._ordered(tenant, whose) as epoch, self._node.turns.of(tenant.id) as turn:
                while len(found) <= limit:
                    behind = found[-1].session if found else request.page_token
                    step = min(limit + 1 - len(found), SESSIONS_LISTED_STEP)
                    found += (more := self._node.store.manifests.of_user(tenant.id, user, behind, step))
                    if len(more) < step:
                        break
                    await turn.next()
            page, now_ms = found[:limit], self._node.clock.wall_ms()
            return pb.ListSessionsResponse(
                sessions=[
                    pb.ListedSession(
                        session=one.label.decode(errors="replace"),
                        blocks=one.blocks,
                        turns=one.turns,
                        tokens=one.tokens,
                        last_turn_unix_ms=one.at_ms,
                        expires_unix_ms=one.expires_ms,
                    )
                    for one in page
                    if one.label is not None
                    and not 0 < one.expires_ms <= now_ms
                    and epoch in (None, one.epoch)
                ],
                next_page_token=page[-1].session if len(found) > limit else b"",
            )
        raise AssertionError

    async def ForkSession(self, request: pb.ForkSessionRequest, context: Context) -> pb.ForkSessionResponse:  # noqa: N802
        """Make a session of another one's first blocks."""
        async with self._refusals(context, request.source):
            tenant = self._enter("fork session", context, request.source)
            if request.name.tenant != request.source.tenant:
                raise ProtocolError("A session and its fork are of one tenant.")
            source = _name(tenant, request.source)
            item = SessionItem(
                _name(tenant, request.name),
                SessionStep.FORK,
                kept_durability_of(request.durability),
                0,
                source=source,
                label=request.name.session.encode(),
            )
            has_begun = False
            try:
                async with (
                    self._ordered(tenant, request.source) as source_epoch,
                    self._ordered(tenant, request.name, changes=True) as epoch,
                ):
                    whole = self._stored(source, source_epoch).manifest.blocks
                    wanted = request.blocks if request.HasField("blocks") else whole
                    item = item._replace(blocks=wanted, epoch=epoch, source_epoch=source_epoch)
                    has_begun = True
                    blocks = await self._changed(item, request.name)
            except WrongEpoch as error:
                if has_begun:  # the source can't be known to be ours any more; the fork may be there
                    raise DeadlineExceeded(f"The fork may have taken effect or not: {error}") from error
                raise
            return pb.ForkSessionResponse(blocks=blocks)
        raise AssertionError

    async def TruncateSession(  # noqa: N802
        self, request: pb.TruncateSessionRequest, context: Context
    ) -> pb.TruncateSessionResponse:
        """Truncate a session to its first blocks."""
        async with self._refusals(context, request.name):
            tenant = self._enter("truncate session", context, request.name)
            name = _name(tenant, request.name)
            item = SessionItem(
                name, SessionStep.TRUNCATE, kept_durability_of(request.durability), 0, blocks=request.blocks
            )
            async with self._ordered(tenant, request.name, changes=True) as epoch:
                left = await self._changed(item._replace(epoch=epoch), request.name)
            names = [name.user + name.session]
            self._gate.audit.removed(
                "truncate session", tenant=tenant.name, peer=context.peer(), names=names, blocks=left
            )
            return pb.TruncateSessionResponse(blocks=left)
        raise AssertionError

    async def RemoveSession(  # noqa: N802
        self, request: pb.RemoveSessionRequest, context: Context
    ) -> pb.RemoveSessionResponse:
        """Forget a session."""
        async with self._refusals(context, request.name):
            tenant = self._enter("remove session", context, request.name)
            name = _name(tenant, request.name)
            item = SessionItem(
                name,
                SessionStep.REMOVE,
                kept_durability_of(request.durability),
                0,
                delete_blocks=request.delete_blocks,
            )
            async with self._ordered(
                tenant, request.name, changes=True, delete_blocks=request.delete_blocks
            ) as epoch:
                done = await self._change(item._replace(epoch=epoch))
            self._node.traces.forget(name)
            self._node.watchers.session(tenant.id, request.name.user, request.name.session, 0, removed=True)
            self._gate.audit.removed(
                "remove session",
                tenant=tenant.name,
                peer=context.peer(),
                names=[name.user + name.session],
                unreferenced=len(done.unreferenced),
            )
            deleted = [key for _, key in done.unreferenced] if request.delete_blocks else []
            return pb.RemoveSessionResponse(unreferenced=len(done.unreferenced), deleted=deleted)
        raise AssertionError

    async def LimitSession(  # noqa: N802
        self, request: pb.LimitSessionRequest, context: Context
    ) -> pb.LimitSessionResponse:
        """Set when a session expires."""
        async with self._refusals(context, request.name):
            tenant = self._enter("limit session", context, request.name)
            name, ends_ms = _name(tenant, request.name), self._ends_ms(request.time_to_live_ms)
            item = SessionItem(name, SessionStep.LIMIT, kept_durability_of(request.durability), 0)
            async with self._ordered(tenant, request.name, changes=True) as epoch:
                await self._change(item._replace(expires_ms=ends_ms, epoch=epoch))
            return pb.LimitSessionResponse(expires_unix_ms=ends_ms)
        raise AssertionError

    async def ProtectSession(  # noqa: N802
        self, request: pb.ProtectSessionRequest, context: Context
    ) -> pb.ProtectSessionResponse:
        """Keep a session's first blocks from being evicted."""
        async with self._refusals(context, request.name):
            tenant = self._enter("protect session", context, request.name)
            name = _name(tenant, request.name)
            blocks = request.blocks or SESSION_BLOCKS_MAX
            if blocks > SESSION_BLOCKS_MAX:
                raise ProtocolError(
                    f"A session has 1 to {SESSION_BLOCKS_MAX} blocks to protect, not {blocks}."
                )
            item = SessionItem(name, SessionStep.PROTECT, Durability.SYNCED, 0, blocks=blocks)
            async with self._ordered(tenant, request.name, changes=True) as epoch:
                self._stored(name, epoch)
                self._refuse_to_protect(name)
                self._protecting.add(name)
                try:
                    await self._change(item._replace(epoch=epoch))
                finally:
                    self._protecting.discard(name)
            return pb.ProtectSessionResponse()
        raise AssertionError

    async def UnprotectSession(  # noqa: N802
        self, request: pb.UnprotectSessionRequest, context: Context
    ) -> pb.UnprotectSessionResponse:
        """Remove the protection of a session's blocks."""
        async with self._refusals(context, request.name):
            tenant = self._enter("unprotect session", context, request.name)
            name = _name(tenant, request.name)
            async with self._ordered(tenant, request.name, changes=True) as epoch:
                was_protected = name in self._node.store.protected
                if was_protected:
                    await self._change(
                        SessionItem(name, SessionStep.PROTECT, Durability.WRITTEN, 0, epoch=epoch)
                    )
            return pb.UnprotectSessionResponse(was_protected=was_protected)
        raise AssertionError

    async def PrefetchSession(  # noqa: N802
        self, request: pb.PrefetchSessionRequest, context: Context
    ) -> pb.PrefetchSessionResponse:
        """Begin to read a session's first blocks into memory."""
        async with self._refusals(context, request.name):
            tenant = self._enter("prefetch session", context, request.name)
            name = _name(tenant, request.name)
            async with (
                self._ordered(tenant, request.name) as epoch,
                self._reading(name, SESSION_BLOCKS_MAX) as turn,
            ):
                _, keys = await self._read(turn, name, 0, SESSION_BLOCKS_MAX, epoch)
                trace = self._node.traces.of(name)
                trace.saw(Step.PREFETCHING, len(keys))
                wish = self._node.prefetches.wish(
                    name.tenant,
                    name,
                    lambda done: trace.saw(Step.PREFETCHED, len(done.came), done.size_bytes),
                )
                for at in range(0, len(keys), PREFIX_STEP_BLOCKS):
                    if not wish.add(keys[at : at + PREFIX_STEP_BLOCKS]):
                        break
                    await turn.next()
                asked = self._node.prefetches.queue(wish)
            return pb.PrefetchSessionResponse(blocks=asked.blocks)
        raise AssertionError

    async def GetStandby(self, request: pb.GetStandbyRequest, context: Context) -> pb.GetStandbyResponse:  # noqa: N802
        """Return which nodes must have the blocks of a user's sessions."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("get standby", context, request.tenant)
            check_text("user", request.user)
            if (membership := self._node.membership) is None:
                raise WrongEpoch("The node is in no cluster now.")
            if not request.map_revision:
                raise ProtocolError(
                    "A standby is found by the revision of a map, which the call does not have."
                )
            placed_as = self._gate.tenants.placed_as(tenant.name)
            term = await membership.primacy.enter(placed_as, request.user)
            node = name = ""
            if (upkeep := self._node.upkeep) is not None:
                if request.away_node:
                    await upkeep.moves.standbys.doubt(term, request.away_node)
                await upkeep.moves.arrive(term, tenant, request.user)
                node, name = await upkeep.moves.standbys.named(term, tenant, request.user)
            await membership.primacy.check(term, placed_as, request.user)
            return pb.GetStandbyResponse(name=membership.name, standby_node=node, standby_name=name)
        raise AssertionError

    @asynccontextmanager
    async def _refusals(self, context: Context, name: pb.SessionName) -> AsyncIterator[None]:
        """As `refusals`, and names the session if it doesn't exist: the store has only digests of names."""
        async with refusals(context, self._node.counters):
            try:
                yield
            except NoSession:
                raise no_session(name, self._elsewhere(name)) from None

    def _elsewhere(self, name: pb.SessionName) -> str:
        return home_elsewhere(self._node, self._gate.tenants, name)

    def _enter(self, what: str, context: Context, name: pb.SessionName, requests: int = 1) -> Tenant:
        tenant = self._gate.enter(what, context, name.tenant, requests)
        self._node.traces.of_call(context, tenant.id)
        return tenant

    @asynccontextmanager
    async def _ordered(
        self, tenant: Tenant, name: pb.SessionName, *, changes: bool = False, delete_blocks: bool = False
    ) -> AsyncIterator[int | None]:
        """Work on a user's sessions in an epoch in which this node orders them; None: the call uses no map.

        The result is returned only if the node still orders them afterwards, and its standby has it, else
        DeadlineExceeded.
        """
        if not name.map_revision:
            yield None
            return
        check_text("user", name.user)
        if (membership := self._node.membership) is None:
            raise WrongEpoch("The node is in no cluster now.")
        placed_as = self._gate.tenants.placed_as(tenant.name)
        term = await membership.primacy.enter(placed_as, name.user)
        standby: AbstractAsyncContextManager[None] = nullcontext()
        if (upkeep := self._node.upkeep) is not None:
            await upkeep.moves.arrive(term, tenant, name.user)
            standbys = upkeep.moves.standbys
            if changes:
                standby = standbys.changing(
                    term, tenant, name.user, name.session, delete_blocks=delete_blocks
                )
            else:
                standby = standbys.reading(term, tenant, name.user)
        try:
            async with standby:
                yield term.epoch
        except WrongEpoch:  # nothing was done
            raise
        except KvError:
            await membership.primacy.check(term, placed_as, name.user)
            raise
        await membership.primacy.check(term, placed_as, name.user)

    async def _change(self, item: SessionItem) -> SessionDone:
        """Execute a step; with two copies it goes on when its caller gives up, and the standby gets it later."""
        step, upkeep = change(self._node, item), self._node.upkeep
        return await (step if upkeep is None else upkeep.moves.standbys.run(step))

    @asynccontextmanager
    async def _reading(self, name: SessionName, blocks: int) -> AsyncIterator[Turn]:
        """Read this many blocks of a session in turns; a tenant has one long read at a time."""
        over = _nothing
        if blocks > SESSION_STEP_BLOCKS:  # else hundreds of calls would each hold parts of theirs
            over = await self._node.turns.long(name.tenant)
        try:
            async with self._node.turns.of(name.tenant) as turn:
                yield turn
        finally:
            over()

    async def _read(
        self, turn: Turn, name: SessionName, first: int, until: int, epoch: int | None
    ) -> tuple[Manifest, list[bytes]]:
        """A session and some of its keys: all as of one moment, even if it changes meanwhile."""
        for last_try in (False, True):
            manifest, keys = self._stored(name, epoch).manifest, list[bytes]()
            try:
                for at in range(first, min(until, manifest.blocks), SESSION_STEP_BLOCKS):
                    if keys:
                        await turn.next()
                    step = min(at + SESSION_STEP_BLOCKS, until)
                    keys += self._node.store.manifests.keys_of(name.tenant, manifest, at, step)
            except StorageError:
                if last_try:
                    raise
                await turn.next()  # it was truncated or removed meanwhile
            else:
                return manifest, keys
        raise AssertionError

    async def _keys(self, tenant: Tenant, request: pb.AppendSessionRequest) -> list[bytes]:
        """Copy the keys of a message; many of them over several turns."""
        keys: list[bytes] = []
        if len(request.keys) <= SESSION_STEP_BLOCKS:
            check_keys(request.keys, SESSION_STEP_BLOCKS)
            return list(request.keys)
        async with self._node.turns.of(tenant.id) as turn:
            for at in range(0, len(request.keys), SESSION_STEP_BLOCKS):
                if at:
                    await turn.next()
                some = request.keys[at : at + SESSION_STEP_BLOCKS]
                check_keys(some, SESSION_STEP_BLOCKS)
                keys += some
        return keys

    def _stored(self, name: SessionName, epoch: int | None) -> Stored:
        stored = self._node.store.manifests.get(name)
        if stored is None or stored.is_over(self._node.clock.wall_ms(), epoch):
            raise NoSession("There is no such session.")  # `_refusals` names it
        return stored

    def _ends_ms(self, time_to_live_ms: int) -> int:
        if time_to_live_ms > SESSION_TIME_TO_LIVE_MS_MAX:
            raise ProtocolError(f"A session lives {SESSION_TIME_TO_LIVE_MS_MAX} ms at most, or without end.")
        return self._node.clock.wall_ms() + time_to_live_ms if time_to_live_ms else 0

    async def _changed(self, item: SessionItem, name: pb.SessionName) -> int:
        """Execute a step, and notify watchers; returns how many blocks the session has afterwards."""
        blocks = (await self._change(item)).blocks
        if not self._has_warned and (elsewhere := self._elsewhere(name)):
            self._has_warned = True
            log.warning(
                "A client that uses no map changes sessions here of users whose home is another node, such as %s."
                " Clients that use the map don't find them: open sessions with `Nodes`.",
                elsewhere,
            )
        self._node.watchers.session(item.name.tenant, name.user, name.session, blocks)
        return blocks

    def _refuse_to_protect(self, name: SessionName) -> None:
        protected = {*self._node.store.protected, *self._protecting}
        if name in protected:
            return
        if sum(one.tenant == name.tenant for one in protected) >= PROTECTED_SESSIONS_OF_TENANT_MAX:
            raise Overloaded(f"A tenant protects at most {PROTECTED_SESSIONS_OF_TENANT_MAX} sessions.")
        if len(protected) >= PROTECTED_SESSIONS_MAX:
            raise Overloaded("The node protects as many sessions as it can; end the protection of some.")


async def _answer(turn: Turn, manifest: Manifest, keys: list[bytes]) -> pb.GetSessionResponse:
    """The message for a session, built in steps: a long one has megabytes."""
    answer = pb.GetSessionResponse(
        blocks=manifest.blocks,
        turns=[
            pb.Turn(first_block=one.first_block, tokens=one.tokens, began_unix_ms=one.at_ms)
            for one in manifest.turns
        ],
        expires_unix_ms=manifest.expires_ms,
    )
    for at in range(0, len(keys), SESSION_STEP_BLOCKS):
        if at:
            await turn.next()
        answer.keys.extend(keys[at : at + SESSION_STEP_BLOCKS])
    return answer


def _nothing() -> None:
    """Do nothing: no long step was begun."""


def _name(tenant: Tenant, name: pb.SessionName) -> SessionName:
    return name_of(tenant.id, name.user, name.session)
