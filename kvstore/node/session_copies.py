"""Copies of other homes' sessions: the side of the standby (`session_standbys` is that of the home).

A home asks this node to follow a lot, and gets a ticket, with which it sends what each step has made of a session. If
the home is lost, the lot's next home takes the sessions from here, as it would from the former home (`session_moves`).

What always holds: a ticket is given only to the node that orders the lot by the record in etcd, under its lease. It is
void, and what came with it has been stored or refused, before these copies are sent to the lot's next home. So a home
that has been replaced gets no step acknowledged here. Copies have an epoch of their own, and count for no client. Of a
user whose sessions the home has not taken yet, the next home hears from whom that has taken the lot over.
What it doesn't do: order sessions, or decide that it is a standby, which the record in etcd says.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.cluster.primacy import Term
from kvstore.cluster.takeovers import Takeover
from kvstore.durability import Durability
from kvstore.errors import KvError, StorageError, WrongEpoch
from kvstore.limits import SESSION_STEP_BLOCKS, SESSIONS_STANDBY_LOTS_MAX
from kvstore.node.listed_sessions import listed_sessions
from kvstore.node.session_changes import change, to_its_end
from kvstore.node.session_names import name_of
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.wire import upkeep_pb2 as pb

if TYPE_CHECKING:
    from kvstore.cluster.membership import Membership
    from kvstore.cluster.primacy import Record
    from kvstore.node.node import Node
    from kvstore.node.session_moves import SessionMoves
    from kvstore.node.tenants import Tenant, Tenants

__all__ = ["SessionCopies"]


class _Followed:
    """A lot whose sessions are copied here."""

    def __init__(self, lot: int, node: str, copies: int) -> None:
        self.lot, self.node, self.copies = lot, node, copies
        self.storing: set[asyncio.Task[bool]] = set()

    async def end(self) -> None:
        """Wait until what has come is stored or refused."""
        while self.storing:
            await asyncio.wait(self.storing)


class SessionCopies:
    """The lots that a node follows. Used in its event loop only."""

    def __init__(self, node: Node, tenants: Tenants, membership: Membership, moves: SessionMoves) -> None:
        self._node, self._tenants, self._membership = node, tenants, membership
        self._moves = moves
        self._followed: dict[int, _Followed] = {}  # by ticket
        self._tickets: OrderedDict[int, int] = OrderedDict()  # by lot
        self._asking: dict[int, set[object]] = {}  # calls that may get a ticket, by lot

    async def follow(self, request: pb.FollowSessionsRequest) -> pb.FollowSessionsResponse:
        """Begin to keep copies of a lot's sessions."""
        primacy, lot, asked = self._membership.primacy, request.lot, object()
        asking = self._asking.setdefault(lot, set())
        asking.add(asked)
        try:
            await self.end(lot, is_over=False)
            record = await primacy.record(lot)
            primacy.check_history(request.history)
            copies = primacy.own_epoch(request.copies)
            is_its = record is not None and self._is_of(record, request)
            if is_its and request.earlier_node:
                await primacy.copy_takeover(Term(lot, copies), Takeover.told(request), request.taken)
            refused = "" if asked in asking else "The lot was taken over meanwhile."
        except WrongEpoch as error:
            return pb.FollowSessionsResponse(refused=str(error))
        finally:
            asking.discard(asked)
            if not asking:
                self._asking.pop(lot, None)
        if not is_its:
            refused = "The record of the lot in etcd doesn't say so."
        if refused or lot in self._tickets:
            return pb.FollowSessionsResponse(refused=refused or "Another call has just been answered.")
        ticket = secrets.randbits(63)
        self._followed[ticket] = _Followed(lot, request.node, copies)
        self._tickets[lot] = ticket
        while len(self._tickets) > SESSIONS_STANDBY_LOTS_MAX:
            del self._followed[self._tickets.popitem(last=False)[1]]
        return pb.FollowSessionsResponse(ticket=ticket)

    def _is_of(self, record: Record, request: pb.FollowSessionsRequest) -> bool:
        copies = record.copies if record.standby == self._membership.name else 0
        return record[:3] == (request.node, request.lease, request.epoch) and request.copies in {
            copies,
            record.top,
        }

    async def end(self, lot: int, *, is_over: bool = True) -> None:
        """Accept no more copies of a lot's sessions with a ticket given so far."""
        if is_over and lot in self._asking:
            self._asking[lot].clear()
        if (ticket := self._tickets.pop(lot, None)) is not None:
            await self._followed.pop(ticket).end()

    async def keep(self, request: pb.CopySessionsRequest) -> pb.CopySessionsResponse:
        """Store copies, those of one ticket in order."""
        by_ticket: dict[int, list[int]] = {}
        for at, copy in enumerate(request.copies):
            by_ticket.setdefault(copy.ticket, []).append(at)
        kept = [False] * len(request.copies)

        async def keep(places: list[int]) -> None:
            for at in places:
                kept[at] = await self._keep(request.copies[at])
                if not kept[at]:
                    break

        await asyncio.gather(*(keep(places) for places in by_ticket.values()))
        return pb.CopySessionsResponse(kept=kept)

    async def _keep(self, copy: pb.SessionCopy) -> bool:
        if (followed := self._followed.get(copy.ticket)) is None:
            return False
        return await to_its_end(self._store(followed, copy), followed.storing)

    async def _store(self, followed: _Followed, copy: pb.SessionCopy) -> bool:
        try:
            tenant = self._tenants.copied(copy.tenant)
            self._moves.hand_overs.note_copy(tenant.name, copy.user, followed.node)
            if copy.is_list:
                await self._remove_others(tenant, copy, followed.copies)
                await self._send_blocks(tenant, copy, followed)
                if copy.is_complete:
                    await self._note_complete(tenant.name, copy.user, followed)
            elif copy.removed:
                await self._remove(tenant, copy, copy.session, followed.copies)
            else:
                return await self._moves.store_copy(tenant, copy, followed.copies)
        except KvError:
            return False
        return True

    async def _note_complete(self, tenant: str, user: str, followed: _Followed) -> None:
        """Note that all that the home has taken and made of a user's sessions is here, as far as it has come."""
        await self._membership.primacy.note_taken(Term(followed.lot, followed.copies), tenant, user)
        self._moves.leftovers.note(tenant, user, followed.copies)

    async def _send_blocks(self, tenant: Tenant, copy: pb.SessionCopy, followed: _Followed) -> None:
        """Send the home blocks of a user's sessions that it lacks: who was to send them may have crashed."""
        keys, manifests = list[bytes](), self._node.store.manifests
        with suppress(StorageError):  # a session was changed meanwhile, or is damaged
            for session in copy.listed:
                stored = manifests.get(name_of(tenant.id, copy.user, session))
                if stored is None or stored.manifest.epoch != followed.copies:
                    continue
                for at in range(0, stored.manifest.blocks, SESSION_STEP_BLOCKS):
                    keys += manifests.keys_of(tenant.id, stored.manifest, at, at + SESSION_STEP_BLOCKS)
                    await asyncio.sleep(0)
        if keys:
            self._moves.hand_overs.queue(followed.node, tenant, copy.user, keys)

    async def _remove(self, tenant: Tenant, copy: pb.SessionCopy, session: str, epoch: int) -> None:
        name = name_of(tenant.id, copy.user, session)
        manifests = self._node.store.manifests
        if manifests.get(name) is None:
            return
        keys = list[bytes]()
        if copy.delete_blocks:
            for some in manifests.own_keys(name):
                keys.extend(some)
                await asyncio.sleep(0)
        item = SessionItem(name, SessionStep.REMOVE, Durability.WRITTEN, 0, epoch=epoch)
        await change(self._node, item._replace(delete_blocks=copy.delete_blocks))
        # Some of its blocks may still be on their way here.
        for at in range(0, len(keys), SESSION_STEP_BLOCKS):
            some_keys = keys[at : at + SESSION_STEP_BLOCKS]
            counts = manifests.references([(tenant.id, key) for key in some_keys])
            unnamed = frozenset(key for key, count in zip(some_keys, counts, strict=True) if not count)
            await self._moves.delete(tenant.id, unnamed)
            await asyncio.sleep(0)

    async def _remove_others(self, tenant: Tenant, copy: pb.SessionCopy, epoch: int) -> None:
        """Remove copies of a user's sessions that the home has no more."""
        listed = frozenset(copy.listed)
        async for one in listed_sessions(self._node, tenant.id, copy.user):
            label = (one.label or b"").decode(errors="replace")
            if one.epoch == epoch and one.label is not None and label not in listed:
                await self._remove(tenant, copy, label, epoch)
