"""Upkeep: a node scans its blocks, and copies those that another owner should have and lacks.

It scans when the map has changed, when copies could not be made, and periodically: in slices of its index, with one
call to each other owner per slice. Of the nodes that have a block, the first in its order copies it, so no coordinator
is needed; two that do so at once only waste bytes (docs/cluster.md has the argument for deletions).

What always holds: a block is copied only if this node is sure that it has missed no deletion of it, only to a member
that is on the map under the lease with which it answered, and only after it was announced there; with its tenant and
its own expiry; at most `UPKEEP_BYTES_PER_S`, `UPKEEP_AT_ONCE` blocks at a time. An owner that is down, full or silent
costs the copies of its blocks and a deadline; the rest continues. A draining node copies everything that its owners
lack, whichever other node has it, including blocks with one replica.
What it doesn't do: scan for blocks of sessions (they are on their user's node; `session_moves` has them copied when
that changes), or copy those of tenants whose names it doesn't know; delete surplus copies.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

from kvstore.cluster.etcd import EtcdAway
from kvstore.cluster.map import DRAINING
from kvstore.errors import KvError
from kvstore.limits import (
    MESSAGE_SMALL_BYTES_MAX,
    PAGE_BYTES,
    REPLICAS_MAX,
    UPKEEP_ASKED_BLOCKS,
    UPKEEP_AT_ONCE,
    UPKEEP_BYTES_PER_S,
    UPKEEP_CALL_MS,
    UPKEEP_EVERY_MS,
    UPKEEP_OFFERED_BLOCKS,
    UPKEEP_RETRY_MS,
    UPKEEP_SETTLE_MS,
)
from kvstore.names import SHARED, UNSAID, fits_domain
from kvstore.node.copy_eligibility import CopyEligibility
from kvstore.node.landing import pages_of
from kvstore.node.session_moves import SessionMoves
from kvstore.node.upkeep_service import UPKEEP, Waited
from kvstore.storage.items import GetItem
from kvstore.storage.sealing import NO_DOMAIN
from kvstore.task_ends import logs_failure
from kvstore.wire import kvstore_pb2
from kvstore.wire import upkeep_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvstore.cluster.map import Map
    from kvstore.cluster.membership import Membership
    from kvstore.node.node import Node
    from kvstore.node.peers import Peers
    from kvstore.node.tenants import Tenant, Tenants
    from kvstore.storage.drive import Drive
    from kvstore.storage.index import Entry, Name
    from kvstore.storage.items import GetDone

__all__ = ["Block", "ByteRate", "Found", "Upkeep", "lacking"]

log = logging.getLogger(__name__)

_HAVE = {pb.OFFERED_STORED, pb.OFFERED_STORED_SURELY}


@dataclass(slots=True)
class Found:
    """Results of a scan."""

    one_copy: int = 0  # blocks that this node has not copied yet, or can't
    unsure: int = 0  # of these, those of which a deletion may have been missed
    full: int = 0  # of these, those for which the other owner has no room
    ended_ns: int = 0  # when the scan ended


class Block(NamedTuple):
    """A block that should be on several nodes."""

    name: Name
    tenant: str
    entry: Entry
    owners: tuple[int, ...]  # places on the map, the first owner first
    is_sure: bool


class _Changed(Exception):
    """The map has changed since the scan began."""


class _Unexpected(Exception):
    """The other node no longer expects the block: another node has offered it since, or it was deleted."""


class ByteRate:
    """Limits bytes per second; unused ones are not saved up."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid_s = 0.0

    async def wait(self, length: int) -> None:
        """Wait until this many more bytes may be sent."""
        now_s = asyncio.get_running_loop().time()
        self._paid_s = max(self._paid_s, now_s) + length / self._bytes_per_s
        await asyncio.sleep(self._paid_s - now_s)


class Upkeep:
    """The upkeep of a node."""

    def __init__(
        self,
        node: Node,
        tenants: Tenants,
        membership: Membership,
        replicas: int,
        peers: Peers,
    ) -> None:
        """`replicas`: for tenants without a number."""
        self.replicas = replicas
        self._node, self._tenants, self._membership = node, tenants, membership
        self.waited = Waited(node.clock)
        self.eligibility = CopyEligibility(node.store.drives, lambda: membership.tenure)
        self._peers = peers
        self.found = Found()  # by the current scan, so far
        self.ended = Found()  # by the last complete one
        self.copied_blocks = self.copied_bytes = 0
        self.is_looking = False
        self.looked = 0  # `Membership.since` at the last complete scan
        self.moves = SessionMoves(node, tenants, membership, peers, self)
        self._places = asyncio.Semaphore(UPKEEP_AT_ONCE)
        self._pace = ByteRate(UPKEEP_BYTES_PER_S)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the scans."""
        self.moves.start()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(logs_failure(log, "Blocks are no longer replicated."))

    async def close(self) -> None:
        """End the scans and hand-overs, and close the channels to the peers."""
        await self.moves.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._peers.close()

    @property
    def known(self) -> Found | None:
        """The results of the last complete scan; None if it was not by the present map."""
        return self.ended if self.looked and self.looked == self._membership.since else None

    @property
    def age_ms(self) -> int:
        """For how long the results have been known; 0 if they are not."""
        ended_ns = 0 if self.known is None else self.known.ended_ns
        return (self._node.clock.monotonic_ns() - ended_ns) // 1_000_000 if ended_ns else 0

    @property
    def has_drained(self) -> bool:
        """Whether the node is draining, and each of its blocks that it is sure of is on its owners."""
        known, is_draining = self.known, self._membership.state == DRAINING and self._is_draining()
        has_copied = known is not None and known.one_copy == known.unsure
        return is_draining and has_copied and self.moves.hand_overs.have_ended

    @property
    def is_draining(self) -> bool:
        """Whether the node is draining, as of the map."""
        return self._is_draining()

    def why_not_drained(self) -> str:
        """Why the node can't drain: too few others would stay; "" if it can."""
        names = {one.name for one in self._membership.map.members if one.state != DRAINING}
        staying = len(names - {self._membership.name})
        replicas = min(
            REPLICAS_MAX, max([self.replicas, *(one for _, one in self._tenants.names().values())])
        )
        if staying >= replicas:
            return ""
        return f"too few others would stay ({staying}, and blocks should be on {replicas})"

    async def _run(self) -> None:
        retry_ms = UPKEEP_RETRY_MS // 2
        while True:
            since = self._membership.since
            # A scan misses blocks that land behind it, and those of clients with the map before land for a while.
            settle_ms = UPKEEP_RETRY_MS if self._is_draining() else UPKEEP_SETTLE_MS
            if await self._changes(since, settle_ms) or not self._membership.lease:
                continue
            self.is_looking, self.found = True, Found()
            try:
                await self._look(since)
            except _Changed:
                continue
            except KvError as error:  # a drive that can't be read, perhaps
                log.warning("The blocks could not be scanned: %s", error)
                self.found.one_copy += 1
            finally:
                self.is_looking = False
            self.found.ended_ns = self._node.clock.monotonic_ns()
            self.looked, self.ended = since, self.found
            retry_ms = min(2 * retry_ms, UPKEEP_EVERY_MS) if self.found.one_copy else UPKEEP_RETRY_MS // 2
            wait_ms = retry_ms if self.found.one_copy else UPKEEP_EVERY_MS
            if self._is_draining():  # a client with an older map may have put a block
                wait_ms = UPKEEP_RETRY_MS
            if self.has_drained:
                with suppress(EtcdAway):
                    await self._membership.note_drained()
            if await self._changes(since, wait_ms):
                retry_ms = UPKEEP_RETRY_MS // 2

    def _is_draining(self) -> bool:
        now = self._membership.map
        return any(now.members[at].name == self._membership.name for at in now.draining)

    async def _changes(self, since: int, within_ms: int) -> bool:
        """Whether the members, or their leases, change within this time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_ms / 1000
        while self._membership.since == since and (left_s := until_s - loop.time()) > 0:
            await self._membership.later_than(self._membership.map.revision, left_s)
            self.eligibility.note_tenure()
        return self._membership.since != since

    # --- scanning

    async def _look(self, since: int) -> None:
        """Scan all blocks once."""
        names = self._tenants.names()
        for drive in self._node.store.drives:
            at, is_more = 0, True
            while is_more:
                async with self._node.turns.of(UPKEEP, rest=3):
                    rows, at = drive.keeping.after(at, UPKEEP_ASKED_BLOCKS)
                    blocks = self._wanting(drive, rows, names)
                is_more = at > 0
                if blocks:
                    await self._keep_up(blocks)
                if self._membership.since != since:
                    raise _Changed
        self.eligibility.end_scan()
        if self.found.one_copy:
            log.info("%d blocks have one copy", self.found.one_copy)
        self._peers.keep({one.node for one in self._membership.map.members})

    def _wanting(
        self, drive: Drive, rows: Sequence[tuple[Name, Entry]], names: dict[bytes, tuple[str, int]]
    ) -> list[Block]:
        """Return the blocks among these that should be on several nodes."""
        now_ms, now, is_draining = self._node.clock.wall_ms(), self._membership.map, self._is_draining()
        of_tenants: dict[str, list[tuple[Name, Entry, int]]] = defaultdict(list)
        for name, entry in rows:
            tenant, replicas = names.get(name[0], ("", 0))
            replicas = min(replicas or self.replicas, REPLICAS_MAX) if tenant else 0
            if (replicas > 1 or (replicas and is_draining)) and not 0 < entry.expires_ms <= now_ms:
                of_tenants[tenant].append((name, entry, replicas))
        blocks = []
        for tenant, some in of_tenants.items():
            placed_as = self._tenants.placed_as(tenant).encode()
            owners_of_each = now.owners_of_each(placed_as, (name[1] for name, _, _ in some))
            for (name, entry, replicas), owners in zip(some, owners_of_each, strict=True):
                is_sure = self.eligibility.is_sure(drive, entry.generation)
                blocks.append(Block(name, tenant, entry, owners[:replicas], is_sure))
                self.found.one_copy += len(owners) < replicas
        named = self._node.store.manifests.references([block.name for block in blocks]) if blocks else []
        return [block for block, sessions in zip(blocks, named, strict=True) if not sessions]

    async def _keep_up(self, blocks: Sequence[Block]) -> None:
        """Ask the other owners of each block whether they have it, and copy it where it is missing, if that is ours."""
        now = self._membership.map
        me = next((at for at, one in enumerate(now.members) if one.name == self._membership.name), -1)
        if me < 0:
            raise _Changed
        has = await self._asked(me, now, blocks)
        wanted: dict[tuple[int, str], list[Block]] = defaultdict(list)
        is_draining = self._is_draining()
        for block in blocks:
            owners = lacking(me, block, has, is_draining=is_draining)
            missing = [
                one for one in owners if has[one, block.name] == pb.OFFERED_MISSING
            ]  # others may be down
            if missing and not block.is_sure:
                is_vouched = any(
                    has.get((one, block.name)) == pb.OFFERED_STORED_SURELY for one in block.owners
                )
                self.found.one_copy += 1
                self.found.unsure += not is_vouched  # else the next scan copies it
                continue
            self.found.one_copy += len(owners)
            for owner in missing:
                wanted[owner, block.tenant].append(block)
        for (owner, tenant), some in wanted.items():
            for first in range(0, len(some), UPKEEP_OFFERED_BLOCKS):
                part = some[first : first + UPKEEP_OFFERED_BLOCKS]
                await self._copy(now.members[owner].name, tenant, part)

    async def _asked(self, me: int, now: Map, blocks: Sequence[Block]) -> dict[tuple[int, Name], int]:
        """Ask the other owners about blocks; returns their answers."""
        asked: dict[tuple[int, str], list[Block]] = defaultdict(list)
        for block in blocks:
            for owner in block.owners:
                if owner != me:
                    asked[owner, block.tenant].append(block)
        answers = await asyncio.gather(
            *(self._ask(now.members[owner].name, tenant, some) for (owner, tenant), some in asked.items())
        )
        has: dict[tuple[int, Name], int] = {}
        for ((owner, _), some), (_, offered) in zip(asked.items(), answers, strict=True):
            for block, said in zip(some, offered, strict=True):
                has[owner, block.name] = said
                if said == pb.OFFERED_STORED_SURELY and not block.is_sure:
                    self.eligibility.note_copy(block.entry.generation)
        return has

    # --- asking and copying

    async def _ask(
        self, peer: str, tenant: str, blocks: Sequence[Block], *, surely: bool = False, moved: bool = False
    ) -> tuple[int, Sequence[int]]:
        """A member's answer about blocks, and the ticket for those that it accepts; empty if it is down."""
        nothing = 0, [pb.OFFERED_UNSPECIFIED] * len(blocks)
        lease = self._membership.lease
        request = pb.OfferRequest(node=self._membership.name, lease=lease, tenant=tenant, moved=moved)
        for block in blocks:
            request.blocks.add(key=block.name[1], length=block.entry.length, surely=surely)
        answer: pb.OfferResponse
        try:
            answer = await self._stub(peer).Offer(
                request, timeout=UPKEEP_CALL_MS / 1000, metadata=self._peers.metadata
            )
        except (grpc.aio.AioRpcError, _Changed) as error:
            log.debug("%s could not be asked for copies: %s", peer, error)
            return nothing
        if answer.refused or len(answer.blocks) != len(blocks):
            log.debug("%s does not answer about copies: %s", peer, answer.refused)
            return nothing
        if not answer.lease or self._membership.lease_of.get(peer) != answer.lease:
            return nothing  # it was off the map, and doesn't know it yet
        return answer.ticket, answer.blocks

    def _stub(self, peer: str) -> Any:
        for one in self._membership.map.members:
            if one.name == peer:
                return self._peers.stub(one.node)
        raise _Changed

    async def _copy(self, peer: str, tenant: str, blocks: Sequence[Block]) -> None:
        """Announce blocks to a member, and send it those that it waits for."""
        ticket, reported = await self._ask(peer, tenant, blocks, surely=True)
        self.found.full += sum(said == pb.OFFERED_FULL for said in reported)
        self.found.one_copy -= sum(said in _HAVE for said in reported)
        sending = [
            self._send(peer, ticket, block)
            for block, said in zip(blocks, reported, strict=True)
            if said == pb.OFFERED_WANTED
        ]
        self.found.one_copy -= sum(await asyncio.gather(*sending))

    def stored(self, tenant: Tenant, keys: Sequence[bytes]) -> list[Block]:
        """Those of these blocks that are stored here."""
        names = [(tenant.id, key) for key in keys]
        found = zip(names, self._node.store.lookup(names), strict=True)
        return [
            Block(name, tenant.name, entry, (), is_sure=True) for name, entry in found if entry is not None
        ]

    async def copy_moved(
        self, peer: str, tenant: str, blocks: Sequence[Block]
    ) -> tuple[list[Block], list[Block]]:
        """Send a member the blocks that sessions moved there still lack.

        Returns those that it could not be sent, and those for which it has no room.
        """
        ticket, reported = await self._ask(peer, tenant, blocks, surely=True, moved=True)
        wanted = [block for block, said in zip(blocks, reported, strict=True) if said == pb.OFFERED_WANTED]
        sent = await asyncio.gather(*(self._send(peer, ticket, block) for block in wanted))
        left = [block for block, is_sent in zip(wanted, sent, strict=True) if not is_sent]
        full = [block for block, said in zip(blocks, reported, strict=True) if said == pb.OFFERED_FULL]
        return (left, full) if ticket else (list(blocks), [])

    async def _send(self, peer: str, ticket: int, block: Block) -> bool:
        """Send a block; whether it was copied, or has been removed here."""
        async with self._places:
            await self._pace.wait(block.entry.length)
            try:
                kept = await self._sent(peer, ticket, block)
            except (grpc.aio.AioRpcError, KvError, _Changed, _Unexpected) as error:
                log.debug("A block was not copied to %s: %r", peer, error)
                return False
        if kept:
            self.copied_blocks += 1
            self.copied_bytes += block.entry.length
        return True

    async def _sent(self, peer: str, ticket: int, block: Block) -> bool:
        """Read a block, check it and send it; False if it was removed here."""
        inline, entry, (tenant, key) = self._node.inline, block.entry, block.name
        who = UPKEEP, ""
        piece = inline.take(who, entry.length)
        try:
            item = GetItem(
                tenant,
                key,
                entry.fingerprint,
                entry.length,
                inline.memory.address(piece),
                pages_of(entry.length) * PAGE_BYTES,
                0,
            )
            done = await self._read(item)
            if done is None or done.miss is not None:
                return False
            payload = inline.memory.payload(piece, entry.length)
            domain = self._domain_of(block)
            if domain is None:
                return False
            name = kvstore_pb2.BlockName(
                key=key, fingerprint=entry.fingerprint, length=entry.length, domain=domain
            )
            start = pb.CopyStart(
                ticket=ticket,
                tenant=block.tenant,
                name=name,
                expires_unix_ms=entry.expires_ms,
                crc32c=done.crc32c,
            )
            call = self._stub(peer).Copy(
                _messages(start, payload), timeout=UPKEEP_CALL_MS / 1000, metadata=self._peers.metadata
            )
            answer: pb.CopyResponse = await call
            if not answer.kept:
                raise _Unexpected
            return True
        finally:
            inline.give_back(who, piece)

    def _domain_of(self, block: Block) -> bytes | None:
        """The erase domain of a block that has been read; None if its key has been destroyed since.

        A node that doesn't encrypt doesn't know the requested domain. On one that does, blocks in the clear are shared.
        """
        keys, (tenant, key) = self._node.store.keys, block.name
        if keys is None:
            return UNSAID
        if not block.entry.domain:
            return SHARED
        owner, domain = keys.domain_of(block.entry.domain - 1) or (b"", b"")
        named = SHARED if domain == NO_DOMAIN else domain
        return named if owner == tenant and fits_domain(key, named) else None

    async def _read(self, item: GetItem) -> GetDone | None:
        """Read a block into memory that we own until the drive is done with it, even if we are cancelled."""
        read: asyncio.Future[GetDone] = asyncio.get_running_loop().create_future()
        self._node.store.get([item], lambda batch: read.set_result(batch[0]))
        is_cancelled = False
        while not read.done():
            try:
                await asyncio.shield(read)
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
        return self._node.store.verify_payload(item, read.result())


def lacking(me: int, block: Block, has: dict[tuple[int, Name], int], *, is_draining: bool) -> list[int]:
    """The owners to which this node should copy a block: none if a node before it in order has the block.

    If this node is sure of the block, one that has it and isn't sure doesn't count: it can't copy. A draining node
    relies on no other: when it reports that it may be stopped, each owner has each of its blocks.
    """
    owners = block.owners
    before = owners[: owners.index(me)] if me in owners else owners
    copies = {pb.OFFERED_STORED_SURELY} if block.is_sure else _HAVE
    if not is_draining and any(has[owner, block.name] in copies for owner in before):
        return []
    return [owner for owner in owners if owner != me and has[owner, block.name] not in _HAVE]


async def _messages(start: pb.CopyStart, payload: memoryview) -> AsyncIterator[pb.CopyRequest]:
    yield pb.CopyRequest(start=start)
    step = MESSAGE_SMALL_BYTES_MAX // 2  # a node of an earlier version takes no larger message of a copy
    for first in range(0, len(payload), step):
        yield pb.CopyRequest(chunk=bytes(payload[first : first + step]))
