"""The service Erasing: erases what a user or a tenant stored, for good, with a receipt.

First the keys are destroyed, durably: from then on nobody can read what was encrypted with them, whatever happens next.
Then blocks and sessions leave the index, the memory and the drive as in a deletion; data in the clear, or encrypted
with another key, is overwritten.

What always holds: an erasure is answered when every block and session that was stored when it was requested is removed
from the drive, and this would survive a power failure. Their bytes in the hot memory are overwritten, those being sent
as soon as they are sent. While a drive is failed an erasure fails, but only after the keys are destroyed and what they
encrypted has left the memory. An interrupted erasure, even by SIGKILL, can be repeated: it has destroyed the keys or
it has not, and the rest is completed. A call erases only what its caller's tenant has. A tenant's erasures run one
after the other. A receipt is durably in the audit log, if there is one, before it is returned; in a burst, erasures
for which the log has no room yet wait before they begin.

What it doesn't do: erase copies that another user put, in a domain of their own or in the tenant's: these remain.
Without encryption, free pages may still contain blocks and sessions that were evicted or deleted before, and earlier
versions of a session's record.
It calls no other node of a cluster, but refuses copies from nodes that were not called (`kvstore.node.deletions`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvstore.durability import Durability
from kvstore.errors import KvError, Overloaded, StorageError
from kvstore.limits import (
    ERASE_LOOK_BLOCKS,
    ERASE_LOOKS_MAX,
    ERASE_STEP_BLOCKS,
    ERASE_WAIT_LOOK_MS,
    ERASE_WAIT_MS,
    ERASE_WIPED_BYTES,
    ERASURES_WAITING_MAX,
    PAGE_BYTES,
    SESSIONS_LISTED_STEP,
    TURN_STEP_BLOCKS,
)
from kvstore.names import domain_of, fits_domain, user_name
from kvstore.node.calls import Ends, refusals
from kvstore.node.session_names import check_text
from kvstore.sealing.receipts import Receipt
from kvstore.sealing.store_keys import StoreKeys
from kvstore.storage.items import DeleteItem, SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from kvstore.wire import erasing_pb2 as pb
from kvstore.wire import erasing_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Sequence

    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenant
    from kvstore.sealing.domain_key import Erased
    from kvstore.storage.index import Name
    from kvstore.storage.items import DeleteDone, SessionDone

__all__ = ["ErasingService"]


class ErasingService(erasing_pb2_grpc.ErasingServicer):
    """The node's service for erasures."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node = node
        self._gate = gate
        self._waiting: Counter[bytes] = Counter()  # for room in the audit log, by tenant
        self._under_way: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # by tenant

    async def EraseUser(self, request: pb.EraseUserRequest, context: Context) -> pb.EraseUserResponse:  # noqa: N802
        """Erase a user."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("erase user", context, request.tenant)
            check_text("user", request.user)
            await self._wait_for_room(tenant)
            named = user_name(tenant.id, request.user)
            self._node.erasures.note(tenant.id, domain_of(request.user))
            if (upkeep := self._node.upkeep) is not None:
                upkeep.moves.standbys.note_erasure(tenant.name, request.user)
            async with self._serialized(tenant):
                erasure = _Erasure(self._node, tenant.id)
                async with erasure.destroyed([named, domain_of(request.user)]):
                    await erasure.sessions(named)
                    await erasure.blocks_of(domain_of(request.user))
                    await erasure.wipe_free_memory()
                erasure.raise_failure()
                erased = await self._answer(erasure, tenant, domain_of(request.user), context.peer())
            return pb.EraseUserResponse(erased=erased)
        raise AssertionError

    async def EraseTenant(self, request: pb.EraseTenantRequest, context: Context) -> pb.EraseTenantResponse:  # noqa: N802
        """Erase a tenant."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("erase tenant", context, request.tenant)
            await self._wait_for_room(tenant)
            self._node.erasures.note(tenant.id, None)
            if (upkeep := self._node.upkeep) is not None:
                upkeep.moves.standbys.note_erasure(tenant.name, None)
            async with self._serialized(tenant):
                erasure = _Erasure(self._node, tenant.id)
                async with erasure.destroyed(None):
                    await erasure.sessions(None)
                    await erasure.blocks_of(None)
                    await erasure.wipe_free_memory()
                erasure.raise_failure()
                erased = await self._answer(erasure, tenant, None, context.peer())
            return pb.EraseTenantResponse(erased=erased)
        raise AssertionError

    async def _wait_for_room(self, tenant: Tenant) -> None:
        """Wait until the audit log accepts a receipt; Overloaded if that takes too long, or too many wait."""
        audit, waiting = self._gate.audit, self._waiting
        if not waiting[tenant.id] and audit.has_room(tenant.name):
            return
        if waiting[tenant.id] < ERASURES_WAITING_MAX:
            waiting[tenant.id] += 1
            try:
                for _ in range(ERASE_WAIT_MS // ERASE_WAIT_LOOK_MS):
                    await asyncio.sleep(ERASE_WAIT_LOOK_MS / 1000)
                    if audit.has_room(tenant.name):
                        return
            finally:
                waiting[tenant.id] -= 1
                if not waiting[tenant.id]:
                    del waiting[tenant.id]
        raise Overloaded("The tenant fills the node's audit log; erase less often.", 1000)

    @asynccontextmanager
    async def _serialized(self, tenant: Tenant) -> AsyncIterator[None]:
        """Serializes a tenant's erasures: one that finds nothing left isn't answered before the one removing it."""
        async with self._under_way.setdefault(tenant.id, asyncio.Lock()):
            with self._node.store.erasing(tenant.id):
                yield

    async def _answer(self, erasure: _Erasure, tenant: Tenant, domain: bytes | None, peer: str) -> pb.Erased:
        node = self._node
        receipt = Receipt(
            at_ms=node.clock.wall_ms(),
            tenant=tenant.name,
            domain=domain,
            blocks=erasure.blocks,
            overwritten=erasure.overwritten,
            size_bytes=erasure.size_bytes,
            keys=tuple(erasure.keys),
            node=node.store.name,
            store_uuid=node.store.drives[0].store_uuid,
            drives=tuple(drive.number for drive in node.store.drives),
            is_encrypted=erasure.is_encrypted,
            clear_bytes=node.store.statistics().clear_bytes,
            sessions=erasure.removed,
            peer=peer,
        )
        audit = self._gate.audit
        is_written = audit.note(
            receipt.what, tenant=tenant.name, peer=peer, at_ms=receipt.at_ms, **receipt.fields()
        )
        if not is_written or not await asyncio.to_thread(audit.sync, audit.lines):
            raise StorageError(
                "Everything was erased, but the audit log can't be written, so there is no receipt;"
                " repeat the call once it can."
            )
        return pb.Erased(
            at_unix_ms=receipt.at_ms,
            blocks=erasure.blocks,
            bytes=erasure.size_bytes,
            sessions=erasure.removed,
            keys=len(receipt.destroyed),
            receipt=receipt.line(),
            members_digest=0 if node.membership is None else node.membership.reported_digest,
            node=node.store.name,
        )


class _Erasure:
    """An erasure that is under way, and its result so far."""

    def __init__(self, node: Node, tenant: bytes) -> None:
        self._node = node
        self._tenant = tenant
        self._keys = node.store.keys if isinstance(node.store.keys, StoreKeys) else None
        self.is_encrypted = self._keys is not None
        self.keys: list[Erased] = []
        self.blocks = self.size_bytes = self.removed = self.overwritten = 0
        self._failure: KvError | None = None  # of a drive, the first; memory is cleared anyway

    def raise_failure(self) -> None:
        """Raise the error that kept data from leaving a drive, if any."""
        if self._failure is not None:
            raise self._failure

    @asynccontextmanager
    async def destroyed(self, domains: Sequence[bytes] | None) -> AsyncIterator[None]:
        """Destroy the keys of domains, all at once, or of the whole tenant; no domain gets a new key before this ends.

        So whatever carries the number of a destroyed key was encrypted with that key.
        """
        keys, tenant = self._keys, self._tenant
        if keys is None:
            yield
            return
        under_way = asyncio.wrap_future(keys.erase(tenant, domains))
        # A cancelled call doesn't stop the destruction that it began: the erasure ends only when that ends.
        under_way.add_done_callback(lambda _: keys.forget_destroyed(tenant, domains))
        try:
            self.keys += await asyncio.shield(under_way)
            yield
        finally:
            under_way.add_done_callback(lambda _: keys.erased(tenant, domains))

    async def sessions(self, user: bytes | None) -> None:
        """Remove the sessions of a user, or of all, and erase the blocks that nothing else names.

        The blocks come first: without the session, nobody would find them if the node died in between. So do blocks
        that only the session names once the others are erased. Sessions created meanwhile may remain.
        """
        node, last = self._node, b""
        while found := self._some_sessions(user, last):
            for name in found:
                last = name.session if user is not None else b"".join(name)
                only: set[Name] = set()
                for _ in range(ERASE_LOOKS_MAX):
                    more = [one for one in await self._only_in(name) if one not in only]
                    if not more:
                        break
                    await self._erase(more)
                    only.update(more)
                ends: Ends[SessionDone] = Ends(1)
                over = await node.turns.long(self._tenant)
                try:
                    item = SessionItem(name, SessionStep.REMOVE, Durability.SYNCED, 0, is_erased=True)
                    node.store.change_sessions([item], ends.collect)
                    (done,) = await ends.all()
                finally:
                    over()
                if done.error is not None:
                    self._failure = self._failure or done.error
                    return
                node.traces.forget(name)
                self.removed += 1
                await self._erase(list(set(done.unreferenced).difference(only)))

    async def _only_in(self, name: SessionName) -> list[Name]:
        """Return the blocks that only this session names."""
        manifests, counts = self._node.store.manifests, Counter[bytes]()
        steps = manifests.own_keys(name)
        some: Collection[bytes] | None = ()
        while some is not None:
            async with self._node.turns.of(self._tenant):
                counts.update(some)
                some = next(steps, None)
        keys = list(counts)
        only: list[Name] = []
        for first in range(0, len(keys), ERASE_LOOK_BLOCKS):
            async with self._node.turns.of(self._tenant):
                names = [(self._tenant, key) for key in keys[first : first + ERASE_LOOK_BLOCKS]]
                references = zip(names, manifests.references(names), strict=True)
                only += [one for one, count in references if count == counts[one[1]]]
        return only

    async def blocks_of(self, domain: bytes | None) -> None:
        """Erase the blocks of a domain, or all."""
        node = self._node
        node.granted.take_all()  # landed blocks are passed to the store
        # A domain without a key of its own has no blocks: key 0 in an entry means that the block is in the clear.
        its = [key for key in self.keys if key.id is not None and key.domain == domain]
        # Blocks encrypted by a damaged slot can't be decrypted any more, whatever their domain. None is in memory.
        unread = [key for key in self.keys if key.is_unread]
        of = None if domain is None else {_domain_number(key) for key in its + unread}
        steps = node.store.of_domain(self._tenant, domain, of)
        lost = {_domain_number(key) for key in self.keys if key.is_lost}
        if domain is not None and lost:  # only the blocks' keys show which domain these slots belonged to
            steps = chain(steps, self._fitting(domain, lost))
        names = node.granted.of_domain(self._tenant, domain)
        is_more = True
        while is_more:
            async with node.turns.of(self._tenant):  # most blocks examined may be outside the domain
                some = next(steps, None)
            is_more = some is not None
            names += some or ()
            if len(names) >= ERASE_STEP_BLOCKS or not is_more:
                await self._erase(names)
                names = []

    def _fitting(self, domain: bytes, of: set[int]) -> Iterator[list[Name]]:
        for some in self._node.store.of_domain(self._tenant, domain, of):
            yield [name for name in some if fits_domain(name[1], domain)]

    async def wipe_free_memory(self) -> None:
        """Overwrite the free memory for blocks: evicted and landed blocks have left their bytes there."""
        node = self._node
        for connection in [one for one in node.connections.values() if one.tenant == self._tenant]:
            connection.slots.erase()
            is_more = True
            while is_more:
                async with node.turns.of(self._tenant):
                    is_more = connection.slots.wipe_free()
        page: int | None = 0
        while page is not None:
            async with node.turns.of(self._tenant):
                if not page:  # memory granted to readers and receivers in advance is free as well
                    node.fabric_calls.cold.empty()
                    node.granted.empty()
                page = node.hot.pages.wipe_free(page, ERASE_WIPED_BYTES // PAGE_BYTES)

    async def _erase(self, names: Sequence[Name]) -> None:
        for first in range(0, len(names), ERASE_STEP_BLOCKS):
            await self._erase_some(names[first : first + ERASE_STEP_BLOCKS])

    async def _erase_some(self, names: Sequence[Name]) -> None:
        node = self._node
        erased = frozenset(_domain_number(key) for key in self.keys if key.id is not None or key.is_unread)
        items = [
            DeleteItem(tenant, key, Durability.SYNCED, at, erased) for at, (tenant, key) in enumerate(names)
        ]
        ends: Ends[DeleteDone] = Ends(len(items))
        async with node.turns.of(self._tenant) as turn:
            for first in range(0, len(items), TURN_STEP_BLOCKS):
                if first:
                    await turn.next()
                some = names[first : first + TURN_STEP_BLOCKS]
                node.granted.delete(some)
                if self._keys is not None:  # a failed drive's index keeps blocks that nobody can read
                    node.hot.erased(some)
                node.store.delete(items[first : first + TURN_STEP_BLOCKS], ends.collect)
                node.deletions.note(some)
                if node.upkeep is not None:
                    node.upkeep.waited.cancel(some)
        for done in await ends.all():
            self._failure = self._failure or done.error
            self.blocks += done.found
            self.overwritten += done.is_overwritten
            self.size_bytes += done.size_bytes

    def _some_sessions(self, user: bytes | None, after: bytes) -> list[SessionName]:
        manifests = self._node.store.manifests
        if user is None:
            page, _ = manifests.page(self._tenant, after, SESSIONS_LISTED_STEP)
            return [name for name, _ in page]
        listed = manifests.of_user(self._tenant, user, after, SESSIONS_LISTED_STEP)
        return [SessionName(self._tenant, user, one.session) for one in listed]


def _domain_number(key: Erased) -> int:
    """The number of a destroyed key in index entries."""
    return 0 if key.number is None else key.number + 1
