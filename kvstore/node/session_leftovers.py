"""Sessions that earlier homes and standbys have left on this node's drives: removed when nothing needs them.

A session that has moved to another home stays here as it was (`session_moves`): its epoch is over, and no call finds
it. It keeps its blocks out of the repair, and they stay useful until they are evicted; its own pages count against the
tenant's quota all the time, and nothing evicts them.

What always holds: a session is removed only if its user's home has noted, in the epoch of etcd's record, that it has
the user's sessions, and if this one is of an epoch before that, and before the copies that the record names: no node
will ever ask for it. And only if none of its blocks is stored here. Each SESSIONS_MOVE_RETRY_MS some users are looked
at.
What it doesn't do: remove blocks, or sessions of users who have used none since this node started and have their home
elsewhere: the drives have only digests of names. Those go when their users come back, or change their home once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.durability import Durability
from kvstore.errors import KvError, StorageError, TenantDenied, WrongEpoch
from kvstore.limits import (
    SESSION_CHUNK_BLOCKS,
    SESSIONS_COPIES_AT_ONCE,
    SESSIONS_MOVE_RETRY_MS,
    SESSIONS_USERS_KNOWN_MAX,
)
from kvstore.names import user_name
from kvstore.node.listed_sessions import listed_sessions
from kvstore.node.session_changes import change
from kvstore.node.upkeep_service import UPKEEP
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from kvstore.task_ends import logs_failure

if TYPE_CHECKING:
    from kvstore.cluster.membership import Membership
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenants

__all__ = ["Leftovers"]

log = logging.getLogger(__name__)

_User = tuple[str, str]  # names of tenant and user


class Leftovers:
    """The users of whom sessions of past epochs may be here. Used in its event loop only."""

    def __init__(self, node: Node, tenants: Tenants, membership: Membership) -> None:
        self._node, self._tenants, self._membership = node, tenants, membership
        self._over: OrderedDict[_User, int] = (
            OrderedDict()
        )  # the epoch before which a user's sessions are over
        self._task: asyncio.Task[None] | None = None
        self.removed_sessions = 0  # since the node started

    def start(self) -> None:
        """Begin to remove them."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(logs_failure(log, "Sessions of past epochs are no longer removed."))

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def note(self, tenant: str, user: str, epoch: int) -> None:
        """Note that a user's sessions here of epochs before this one are over."""
        self._over[tenant, user] = max(epoch, self._over.get((tenant, user), 0))
        if len(self._over) > SESSIONS_USERS_KNOWN_MAX:
            self._over.popitem(last=False)

    async def note_taken(self, tenant: str, user: str, home: str, epoch: int) -> bool:
        """Note that another node says that it has a user's sessions, in an epoch that must be that of the record.

        False if etcd does not answer: then it must be said again, or they stay.
        """
        placed_as, primacy = self._tenants.placed_as(tenant), self._membership.primacy
        lot = self._membership.map.lot_of(placed_as.encode(), user.encode())
        try:
            record = await primacy.record(lot)
        except WrongEpoch:
            return False
        if record is not None and (record.node, record.epoch) == (home, epoch):
            is_standby = record.standby == self._membership.name
            until = record.copies if is_standby else max(record.epoch, record.top)
            self.note(tenant, user, primacy.own_epoch(until))
        return True

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SESSIONS_MOVE_RETRY_MS / 1000)
            for _ in range(min(len(self._over), SESSIONS_COPIES_AT_ONCE)):
                one, epoch = self._over.popitem(last=False)
                try:
                    is_done = await self._has_removed(*one, epoch)
                except KvError as error:  # a drive that can't be read, perhaps
                    log.debug("A session of a past epoch was not removed: %s", error)
                    is_done = False
                if not is_done:
                    self.note(*one, epoch)

    async def _has_removed(self, tenant_name: str, user: str, epoch: int) -> bool:
        """Remove a user's sessions that are over and have no block here; whether none is left."""
        try:
            tenant = self._tenants.copied(tenant_name).id
        except TenantDenied:  # it is in the tenants file no more
            return True
        is_done = True
        async for one in listed_sessions(self._node, tenant, user):
            if one.epoch < epoch:
                name = SessionName(tenant, user_name(tenant, user), one.session)
                if await self._has_block(name, one.epoch):
                    is_done = False
                else:
                    item = SessionItem(name, SessionStep.REMOVE, Durability.WRITTEN, 0, epoch=one.epoch)
                    await change(self._node, item)
                    self.removed_sessions += 1
        return is_done

    async def _has_block(self, name: SessionName, epoch: int) -> bool:
        """Whether a block of a session is stored here, or the session is no longer of this epoch."""
        store = self._node.store
        stored = store.manifests.get(name)
        if stored is None or stored.manifest.epoch != epoch:
            return True
        with suppress(StorageError):  # it has changed meanwhile, or is damaged
            for at in range(0, stored.manifest.blocks, SESSION_CHUNK_BLOCKS):
                async with self._node.turns.of(UPKEEP):
                    until = at + SESSION_CHUNK_BLOCKS
                    keys = store.manifests.keys_of(name.tenant, stored.manifest, at, until)
                    if any(store.lookup([(name.tenant, key) for key in keys])):
                        return True
            return False
        return True
