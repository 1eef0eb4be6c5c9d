"""What a node does in the background when it is no longer the home of users: it hands over their sessions.

When the map has changed, it asks the new home of each user to take their sessions (`session_moves`), and then sends the
blocks that these lack. So nobody needs to wait for the user's next turn, and a drained node may be stopped.

What always holds: a user counts as left until their new home has taken the sessions and their blocks were sent or
refused, or have no room there. What could not be done is tried again every SESSIONS_MOVE_RETRY_MS, and every
UPKEEP_RETRY_MS if it is only blocks without room. Blocks are paced and bounded as other copies are (`upkeep`). At most
SESSIONS_USERS_KNOWN_MAX names of users are remembered, in memory only.
What it doesn't do: hand over sessions of users who have not used any since the node started, because the drives have
only digests of names: those are taken with their next turn, if this node still answers then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import grpc
import grpc.aio

from kvstore.errors import KvError, TenantDenied, WrongEpoch
from kvstore.limits import (
    SESSIONS_COPIES_AT_ONCE,
    SESSIONS_COPIES_CHECK_MS,
    SESSIONS_LISTED_STEP,
    SESSIONS_MOVE_RETRY_MS,
    SESSIONS_MOVED_BLOCKS_MAX,
    SESSIONS_USERS_KNOWN_MAX,
    UPKEEP_ASKED_BLOCKS,
    UPKEEP_AT_ONCE,
    UPKEEP_CALL_MS,
    UPKEEP_OFFERED_BLOCKS,
    UPKEEP_RETRY_MS,
    UPKEEP_SETTLE_MS,
)
from kvstore.names import user_name
from kvstore.node.upkeep_service import UPKEEP
from kvstore.task_ends import logs_failure
from kvstore.wire import upkeep_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvstore.cluster.map import Member
    from kvstore.cluster.membership import Membership
    from kvstore.node.node import Node
    from kvstore.node.peers import Peers
    from kvstore.node.tenants import Tenant, Tenants
    from kvstore.node.time_slices import Turn
    from kvstore.node.upkeep import Block, Upkeep

__all__ = ["HandOvers"]

log = logging.getLogger(__name__)

_User = tuple[str, str]  # names of tenant and user


class _Sending(NamedTuple):
    """Blocks of a user's sessions that their new home may lack."""

    peer: str  # its name
    tenant: Tenant
    keys: list[bytes]
    is_copy: bool  # they are copies for a standby: the home stays
    is_full: bool = False  # the member had no room for them


class _Home(NamedTuple):
    """A process that orders a user's sessions, and what it knows of this node, a standby."""

    name: str
    lease: int
    is_told: bool  # that this node drains
    own_lease: int  # this node's, by then: if it has another one, it may have been replaced meanwhile


class HandOvers:
    """The users that a node hands over."""

    def __init__(
        self,
        node: Node,
        tenants: Tenants,
        membership: Membership,
        peers: Peers,
        upkeep: Upkeep,
        take: Callable[[str, str], Awaitable[str]],
        note_taken: Callable[[str, str, str, int], Awaitable[bool]],
    ) -> None:
        """`take`: takes a user's sessions here now; returns why not yet, or "".

        `note_taken`: notes that a member has a user's sessions, in an epoch; False if that must be tried again.
        """
        self._node, self._tenants, self._membership, self._peers = node, tenants, membership, peers
        self._upkeep, self._take_here, self._note_taken = upkeep, take, note_taken
        self._known: OrderedDict[_User, bool] = (
            OrderedDict()
        )  # the last used last; whether they have been taken
        self._offered_left = 0
        # The users whose sessions are copied here, and the process that knows it.
        self._copied: OrderedDict[_User, _Home] = OrderedDict()
        self._checked = 0  # how many of these, whether this node is still their standby
        self._sending: dict[tuple[_User, bool], _Sending] = {}  # by user, and whether they are for a standby
        self._blocks = 0  # to be sent
        self._has_work = asyncio.Event()
        self.looked = 0  # `Membership.since` when all known users had been offered to their homes once
        self.unnamed = 0  # sessions of users whose names are not known, while the node is draining
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to offer users to their homes, and to send blocks that members have taken."""
        self._tasks = [asyncio.create_task(self._offer()), asyncio.create_task(self._send())]
        for task in self._tasks:
            task.add_done_callback(logs_failure(log, "Sessions are no longer handed over."))

    async def close(self) -> None:
        """End both tasks. Blocks not sent yet are not sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def note(self, tenant: str, user: str) -> None:
        """Note that a user uses sessions here."""
        self._known[tenant, user] = False
        self._known.move_to_end((tenant, user))
        if len(self._known) > SESSIONS_USERS_KNOWN_MAX:
            self._known.popitem(last=False)

    def note_copy(self, tenant: str, user: str, home: str) -> None:
        """Note that a user's sessions are copied here by their home."""
        self._copied[tenant, user] = self._as_home(home)
        self._copied.move_to_end((tenant, user))
        if len(self._copied) > SESSIONS_USERS_KNOWN_MAX:
            self._copied.popitem(last=False)

    def queue(
        self,
        peer: str,
        tenant: Tenant,
        user: str,
        keys: Sequence[bytes],
        *,
        is_copy: bool = False,
        is_full: bool = False,
    ) -> None:
        """Send blocks of sessions that a member has taken, or has copies of; those beyond the limit are not sent."""
        one = (tenant.name, user), is_copy
        was = self._sending.get(one)
        adds = is_copy and was is not None and was.peer == peer
        if not adds:
            self._drop(one)
        wanted = list(dict.fromkeys(keys))[: max(0, SESSIONS_MOVED_BLOCKS_MAX - self._blocks)]
        if adds and was is not None:
            was.keys.extend(wanted)
        else:
            self._sending[one] = _Sending(peer, tenant, wanted, is_copy, is_full)
        self._blocks += len(wanted)
        self._has_work.set()

    def _drop(self, one: tuple[_User, bool]) -> None:
        if (sending := self._sending.pop(one, None)) is not None:
            self._blocks -= len(sending.keys)

    @property
    def users_left(self) -> int:
        """How many users' sessions, or blocks of them for which there may be room, are not on their new homes yet."""
        return self._offered_left + sum(not (one.is_copy or one.is_full) for one in self._sending.values())

    @property
    def full_blocks(self) -> int:
        """How many blocks of sessions are not on their users' new homes, because these have no room."""
        return sum(len(one.keys) for one in self._sending.values() if one.is_full)

    @property
    def copies_left(self) -> int:
        """How many blocks of sessions have not been sent to standbys yet."""
        return sum(len(one.keys) for (_, is_copy), one in self._sending.items() if is_copy)

    @property
    def have_ended(self) -> bool:
        """Whether all users who have another home by the present map have been handed over."""
        return self.looked == self._membership.since and not (self.users_left or self.full_blocks)

    # --- sessions

    async def _offer(self) -> None:
        """Offer users to their homes, after each change of the map until all of them are taken."""
        done = 0  # `Membership.since` when nobody was left
        while True:
            since = self._membership.since
            if await self._changes(since, UPKEEP_SETTLE_MS):
                continue
            if self._membership.lease and done != since:
                try:
                    await self._offer_all()
                except KvError as error:  # a drive that can't be read, perhaps
                    log.warning("Sessions could not be handed over: %s", error)
                    continue
                if since == self._membership.since:
                    self.looked = since
                    done = 0 if self._offered_left else since
            if done == since and self._copied and await self._has_been_replaced():
                done = 0
            await self._changes(since, SESSIONS_MOVE_RETRY_MS if done != since else SESSIONS_COPIES_CHECK_MS)

    async def _has_been_replaced(self) -> bool:
        """Look for users whose home has found another standby, which it does not say; for some of them at a time."""
        users, is_one = list(self._copied), False
        at = self._checked % len(users)
        self._checked = at + SESSIONS_COPIES_AT_ONCE
        for one in users[at : self._checked]:
            placed_as = self._tenants.placed_as(one[0])
            try:
                lot = self._membership.map.lot_of(placed_as.encode(), one[1].encode())
                record = await self._membership.primacy.record(lot)
            except WrongEpoch:
                break
            if record is not None and record.standby != self._membership.name and one in self._copied:
                self._copied[one] = _Home("", 0, is_told=False, own_lease=0)
                is_one = True
        return is_one

    async def _changes(self, since: int, within_ms: int) -> bool:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_ms / 1000
        while self._membership.since == since and (left_s := until_s - loop.time()) > 0:
            await self._membership.later_than(self._membership.map.revision, left_s)
        return self._membership.since != since

    async def _offer_all(self) -> None:
        """Offer users with sessions here to another home of theirs, and copies to homes that may not know of them."""
        since = self._membership.since
        async with self._node.turns.of(UPKEEP, rest=3) as turn:
            elsewhere = await self._with_homes(turn, list(self._known), self._new_home)
            copies = await self._with_homes(turn, list(self._copied), self._unknowing_home)
        self._offered_left = len(elsewhere) + len(copies)
        places = asyncio.Semaphore(UPKEEP_AT_ONCE)

        async def offer(one: _User, home: Member) -> None:
            async with places:
                if await self._is_taken(one, home):
                    self._offered_left -= 1
                    if since == self._membership.since:  # else they may have come back
                        self._known[one] = True

        async def offer_copy(one: _User, home: Member) -> None:
            now = self._as_home(home.name)
            async with places:
                if await self._is_taken(one, home):
                    self._offered_left -= 1
                    if one in self._copied:
                        self._copied[one] = now

        await asyncio.gather(*(offer(*one) for one in elsewhere))
        await asyncio.gather(*(offer_copy(*one) for one in copies))
        self.unnamed = await self._count_unnamed() if self._upkeep.is_draining else 0

    @staticmethod
    async def _with_homes(
        turn: Turn, users: list[_User], home_of: Callable[[_User], Member | None]
    ) -> list[tuple[_User, Member]]:
        found = []
        for at, one in enumerate(users):
            if at and not at % UPKEEP_ASKED_BLOCKS:
                await turn.next()
            if (home := home_of(one)) is not None:
                found.append((one, home))
        return found

    def _unknowing_home(self, one: _User) -> Member | None:
        """The home of a user whose sessions are copied here, if it may not know that.

        It may be another one than the home that sent them; or the same, restarted, when it knows no users; or it needs
        another standby, because this node drains; or has found one, while this node was off the map.
        """
        home = self._membership.map.home(self._tenants.placed_as(one[0]), one[1])
        return None if home is None or self._copied.get(one) in {None, self._as_home(home.name)} else home

    def _as_home(self, name: str) -> _Home:
        lease_of, own_lease = self._membership.lease_of, self._membership.lease
        return _Home(name, lease_of.get(name, 0), self._upkeep.is_draining, own_lease)

    def _new_home(self, one: _User) -> Member | None:
        """The home of a user, if that is another node, and the user has sessions here that it has not taken."""
        name, user = one
        if self._known.get(one, True):
            return None
        home = self._membership.map.home(self._tenants.placed_as(name), user)
        if home is None or home.name == self._membership.name:
            return None
        try:
            tenant = self._tenants.copied(name)
        except TenantDenied:  # it is in the tenants file no more
            return None
        named = user_name(tenant.id, user)
        return (
            home if self._node.store.manifests.of_user(tenant.id, named, b"", SESSIONS_LISTED_STEP) else None
        )

    async def _is_taken(self, one: _User, home: Member) -> bool:
        if home.name == self._membership.name:
            return not await self._take_here(*one)
        request = pb.TakeSessionsRequest(tenant=one[0], user=one[1])
        try:
            answer: pb.TakeSessionsResponse = await self._peers.stub(home.node).TakeSessions(
                request, timeout=UPKEEP_CALL_MS / 1000, metadata=self._peers.metadata
            )
        except grpc.aio.AioRpcError as error:
            log.debug("%s could not be asked to take sessions: %r", home.node, error)
            return error.code() is grpc.StatusCode.UNIMPLEMENTED  # an earlier version never will
        if answer.refused:
            log.debug("%s does not take sessions yet: %s", home.node, answer.refused)
            return False
        return await self._note_taken(*one, home.name, answer.epoch)

    async def _count_unnamed(self) -> int:
        """How many sessions here are of users whose names are not known."""
        ids: dict[str, bytes] = {}
        known: set[tuple[bytes, bytes]] = set()
        for name, user in (*self._known, *self._copied):
            if name not in ids:
                try:
                    ids[name] = self._tenants.copied(name).id
                except TenantDenied:
                    continue
            known.add((ids[name], user_name(ids[name], user)))
        unnamed, after, is_more = 0, b"", True
        async with self._node.turns.of(UPKEEP, rest=3) as turn:
            while is_more:
                some, is_more = self._node.store.manifests.page(b"", after, SESSIONS_LISTED_STEP)
                unnamed += sum((name.tenant, name.user) not in known for name, _ in some)
                after = b"".join(some[-1][0]) if some else after
                await turn.next()
        return unnamed

    # --- their blocks

    async def _send(self) -> None:
        """Send blocks, user by user, and those that could not be sent again later."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            for one, sending in list(self._sending.items()):
                user, count = one[0], len(sending.keys)
                try:
                    left, full = await self._send_to(user, sending)
                except KvError as error:
                    log.warning("Blocks of sessions could not be sent: %s", error)
                    left, full = [], []
                if self._sending.get(one) is sending:
                    left += sending.keys[count:]  # that were added meanwhile
                    self._drop(one)
                    if wanted := left + ([] if sending.is_copy else full):
                        is_full = not left
                        self.queue(
                            sending.peer,
                            sending.tenant,
                            user[1],
                            wanted,
                            is_copy=sending.is_copy,
                            is_full=is_full,
                        )
            if self._sending:
                is_full = all(one.is_full for one in self._sending.values())
                await asyncio.sleep((UPKEEP_RETRY_MS if is_full else SESSIONS_MOVE_RETRY_MS) / 1000)

    async def _send_to(self, user: _User, sending: _Sending) -> tuple[list[bytes], list[bytes]]:
        """Send a user's blocks to their home.

        Returns the keys of those that could not be sent now, and of those for which it has no room.
        """
        left, full = list[bytes](), list[bytes]()
        for at in range(0, len(sending.keys), UPKEEP_OFFERED_BLOCKS):
            if not self._is_for(user, sending):
                return [], []  # a later home, or standby, asks that one
            some = self._upkeep.stored(sending.tenant, sending.keys[at : at + UPKEEP_OFFERED_BLOCKS])
            if left or not some:
                left += [block.name[1] for block in some]
                continue
            unsent: tuple[list[Block], list[Block]] = await self._upkeep.copy_moved(
                sending.peer, user[0], some
            )
            for keys, blocks in zip((left, full), unsent, strict=True):
                keys.extend(block.name[1] for block in blocks)
            if sending.is_full and len(unsent[1]) == len(some):
                return left, full + sending.keys[at + UPKEEP_OFFERED_BLOCKS :]  # still full
        return left, full

    def _is_for(self, user: _User, sending: _Sending) -> bool:
        """Whether a member should have a user's blocks, as far as is known."""
        if sending.is_copy:
            return sending.peer in self._membership.map.names
        home = self._membership.map.home(self._tenants.placed_as(user[0]), user[1])
        return home is not None and home.name == sending.peer
