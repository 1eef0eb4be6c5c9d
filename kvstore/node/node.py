"""The node: connections, the store and the fabric, joined by one thread of control.

It handles a put from its lease to its last acknowledgement, and passes fetches and inline blocks to their own modules.
Everything here runs in the asyncio loop's thread; bytes are moved by the C core and by io_uring, which report through
two eventfds that the loop watches.

What always holds: an acknowledgement is sent only after the store has reported that durability; a block whose flag
arrived before its client left is still stored; every wait has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from kvstore.config import show_size
from kvstore.durability import Durability
from kvstore.errors import BeingErased, KeyTaken, LeaseExpired, NoMemory, Overloaded, ProtocolError
from kvstore.limits import (
    HOT_BYTES_DEFAULT,
    LANDING_BYTES_MAX,
    LEASE_TIMEOUT_MS,
    LEASE_TIMEOUT_MS_MAX,
    QUARANTINE_TIMEOUT_MS,
    SLOTS_PER_CLIENT_MAX,
    TURN_STEP_PUTS,
)
from kvstore.node.cold_calls import COLD_TAG, ColdCalls
from kvstore.node.connection import Connection, check_block_length, check_count, refuse_expired
from kvstore.node.connection_calls import already_stored
from kvstore.node.deletions import Deletions, Erasures
from kvstore.node.fabric_address import FabricAddress, check_length, fabric_domain
from kvstore.node.fabric_answers import FabricCalls
from kvstore.node.fail_stop import or_stop
from kvstore.node.fair_queue import FairQueue, Places
from kvstore.node.fetching import Fetches
from kvstore.node.granted_puts import Granted
from kvstore.node.hot import HotMemory
from kvstore.node.inline import InlineBlocks
from kvstore.node.landing import LandedLease, LandingLayout, LeaseTable
from kvstore.node.lookup_history import Lookups
from kvstore.node.pins import Pins
from kvstore.node.prefetch import Prefetches
from kvstore.node.readiness import Readiness
from kvstore.node.session_traces import Traces
from kvstore.node.span_notes import End
from kvstore.node.stalled import Stalled
from kvstore.node.ticks import Ticks
from kvstore.node.time_slices import Turns
from kvstore.node.timings import Timings
from kvstore.node.watching import Watchers
from kvstore.steps import Step
from kvstore.storage.eviction.types import Reason
from kvstore.wire.ack import AckCode, code_of_error
from nic_offload.fabric import EventKind
from nic_offload.memory import set_aside
from nic_offload.trigger import WordPut, put_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.cluster.membership import Membership
    from kvstore.errors import KvError
    from kvstore.node.call_spans import NodeSpans
    from kvstore.node.connection import AckArea, BlockRequest
    from kvstore.node.landing import Lease
    from kvstore.node.lookup_log import LookupLog
    from kvstore.node.same_machine import Sharing
    from kvstore.node.tenants import Credentials, Tenant
    from kvstore.node.upkeep import Upkeep
    from kvstore.storage.eviction_events import Listener
    from kvstore.storage.items import PutDone
    from kvstore.storage.store import Store
    from kvstore.wire.seal import Seal
    from nic_offload.fabric import Endpoint, Event, Fabric
    from nic_offload.sockaddr import Ip, SocketAddress

__all__ = ["Node"]

log = logging.getLogger(__name__)

_FILLER_NICE: Final = 10  # of the thread that allocates memory for puts: it runs when others are idle
_ERASED: Final = "The erase domain of the block was erased after it had landed."


class Node:
    """A storage node over one store and one fabric, both of which its server owns."""

    def __init__(
        self,
        store: Store,
        fabric: Fabric,
        clock: Clock,
        hot_bytes: int = HOT_BYTES_DEFAULT,
        lookup_log: LookupLog | None = None,
        spans: NodeSpans | None = None,
        address: FabricAddress | None = None,
        tenants_known: Callable[[], int] = lambda: 1,
    ) -> None:
        """`tenants_known` returns how many tenants share the node's resources."""
        self.address = address or FabricAddress("127.0.0.1")
        self.readiness = Readiness()
        self.at_endpoint: Callable[[Endpoint, Ip], object] = lambda *_: None  # with endpoint and client
        self.membership: Membership | None = None  # of a cluster
        self.upkeep: Upkeep | None = None  # of copies of blocks
        self.sharing: Sharing | None = None  # of the hot memory, with clients on this machine
        self.store, self.fabric, self.spans = store, fabric, spans
        self.hot = HotMemory(
            fabric, hot_bytes, lambda: self._loop.call_soon(self.fetches.pump), tenants_known
        )
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        self.connections: dict[int, Connection] = {}  # of attached clients, by number
        self._numbers = itertools.count(1)
        # Tags of fetches and generations of leases: one sequence from a random start, so that no old word fits.
        self._tags = itertools.count(secrets.randbits(48) + 1)
        self._leased = LeaseTable(tenants_known)  # until the drive is done or the lease has ended
        self._due: FairQueue[LandedLease] = FairQueue()  # to be stored
        self._goes_on = False  # that continues in the loop's next round
        self.freed = asyncio.Event()  # set when memory that outlived its connection is freed
        self.places = Places(self.address.clients_max(), tenants_known)
        # Other providers pin all registered memory, whether or not anything lands in it.
        self._pins = fabric.provider not in {"net", "tcp", "tcp;ofi_rxm", "sockets", "shm", "memory"}
        self.landing = Places(LANDING_BYTES_MAX, tenants_known)  # bytes that clients hold
        self._is_ending = False
        self._filler = ThreadPoolExecutor(1, "kvstore-landing", os.nice, (_FILLER_NICE,))
        self._closing: set[Connection] = set()  # closed, with blocks still going to the drive
        self.began_ns = self.ticked_ns = clock.monotonic_ns()  # `ticked_ns`: when the loop last ran the timer
        self.timings, self.turns = Timings(clock), Turns(clock)
        self.counters = self.timings.counters
        self.watchers = Watchers(clock, tenants_known)
        self.pins, self.deletions, self.erasures = Pins(store, clock), Deletions(clock), Erasures(clock)
        self.block_listeners: list[Listener] = [self.watchers.blocks, self.pins.changed]
        store.listen(self._blocks_changed)
        self.granted = Granted(self, tenants_known)
        self.fetches = Fetches(
            fabric,
            store,
            self.hot,
            self.granted,
            self._tags,
            clock,
            self.counters,
            self.timings,
            tenants_known,
            self.turns,
            traced=spans is not None,
        )
        self.fabric_calls = FabricCalls(self, self._tags, ColdCalls(self))
        self.inline = InlineBlocks(
            store, self.hot, self.granted, clock, self.counters, self.timings, tenants_known
        )
        self._stalled = Stalled(clock, self.detach)
        self.traces, self.lookups = Traces(clock), Lookups(store, clock, lookup_log, spans)
        self.prefetches = Prefetches(store, self.hot, lambda: self.fetches.are_waiting)
        self._loop.add_reader(fabric.fileno(), or_stop(self._fabric_events))
        self._loop.add_reader(store.fileno(), or_stop(self._drive_events))
        self.ticks = Ticks(self, or_stop(self._tick))

    def __len__(self) -> int:
        return len(self.connections)

    @property
    def leases(self) -> int:
        """How many slots are leased, or contain blocks that are not on the drive yet."""
        return len(self._leased)

    def _blocks_changed(self, rows: NDArray[Any], reason: Reason | None) -> None:
        self.hot.changed(rows, are_new=reason is None, are_erased=reason is Reason.ERASED)
        if reason is not None:
            self.granted.removed(rows, are_replaced=reason is Reason.SUPERSEDED)
        for listener in self.block_listeners:
            listener(rows, reason)

    def _tick(self) -> None:
        """Run periodic work."""
        self.ticked_ns = self.clock.monotonic_ns()
        self.catch_up(every=False)
        self.hot.pages.look_again()
        self.granted.tick()
        self.fabric_calls.cold.tick()
        self.pins.expire()
        self.prefetches.pump()
        self._stalled.look(self.connections.values())
        self.fabric.shrink()
        self.store.poll()

    # --- connections

    async def attach(
        self,
        tenant: Tenant,
        credentials: Credentials,
        caller: str,
        peer_address: bytes,
        provider: str,
        acks: AckArea,
        block_bytes_max: int,
        slots: int,
        seal: Seal | None = None,
    ) -> tuple[Connection, bytes]:
        """Open a connection with its own landing area; returns it and the fabric address for its client.

        `caller` is the source of the call, in gRPC's form. Without a `seal`, fabric messages are not authenticated.
        """
        if provider != self.fabric.provider:
            raise ProtocolError(
                f"The node's fabric is {self.fabric.provider} and the client's is {provider};"
                " start one with the other's."
            )
        check_block_length(block_bytes_max)
        client = self.address.believed(peer_address, caller, self.fabric)
        async with self.turns.of(tenant.id, rest=3):  # opening an endpoint takes milliseconds
            if self._is_ending:  # what such a client puts would be lost
                raise Overloaded("The node is stopping; attach again when it has been started.")
            return self._attached(
                tenant, credentials, client, peer_address, acks, block_bytes_max, slots, seal
            )

    def _attached(
        self,
        tenant: Tenant,
        credentials: Credentials,
        client: SocketAddress | None,
        peer_address: bytes,
        acks: AckArea,
        block_bytes_max: int,
        slots: int,
        seal: Seal | None,
    ) -> tuple[Connection, bytes]:
        if not self.places.left(tenant.id):
            raise Overloaded(
                f"{len(self.connections)} clients are attached, of the {self.places.capacity} that the node's"
                f" ports (--fabric-ports) and descriptors allow, and the tenant has used its share; detach some."
            )
        layout = self._layout(tenant, block_bytes_max, slots)
        try:
            memory = set_aside(layout.total_bytes)
            domain = fabric_domain(tenant.id, self.connections.values(), self.fabric.domains_max)
            opened = self.address.open(self.fabric, client, domain)
            known_as = peer_address if client is None else client.packed(self.fabric.ip_version)
            try:
                if client is None:
                    check_length(peer_address, opened.address, self.fabric)
                else:
                    self.at_endpoint(opened.endpoint, client.ip)
                connection = Connection(
                    next(self._numbers),
                    tenant,
                    credentials,
                    self.fabric,
                    opened.endpoint,
                    known_as,
                    acks,
                    layout,
                    memory,
                    seal,
                )
            except BaseException:
                opened.endpoint.close()
                with contextlib.suppress(BufferError):  # the raised error may refer to it for longer
                    memory.close()
                raise
        except NoMemory as error:
            raise Overloaded(
                f"The node's machine lacks the {show_size(layout.total_bytes)} of memory for a client's"
                f" {layout.slots} slots; attach with fewer, or later."
            ) from error
        self.places.take(tenant.id)
        if self._pins:
            self.landing.take(tenant.id, connection.all_there())
        self.connections[connection.number] = connection
        log.info("attached with %d slots", layout.slots, extra=connection.about())
        return connection, opened.address

    def _layout(self, tenant: Tenant, block_bytes_max: int, slots: int) -> LandingLayout:
        granted = min(max(slots, 1), SLOTS_PER_CLIENT_MAX)
        if self._pins:
            granted = min(
                granted, self.landing.left(tenant.id) // LandingLayout(1, block_bytes_max).slot_bytes
            )
        if granted < 1:
            raise Overloaded("The tenant's share of the node's landing memory is used up.")
        return LandingLayout(granted, block_bytes_max)

    def _let_land(self, connection: Connection, slots: int) -> None:
        """Allocate missing memory for this many more slots of a connection; Overloaded if it can't."""
        layout, new = connection.layout, connection.slots_not_there(slots)
        if not new:
            return
        size_bytes = new * layout.slot_bytes
        if size_bytes > self.landing.left(connection.tenant):
            raise Overloaded(
                f"The tenant's share of the node's landing memory has no {show_size(size_bytes)} left for {new} more"
                " slots; wait for puts to finish, or detach clients."
            )
        try:
            rest = connection.have_slots(new)
        except NoMemory as error:
            raise Overloaded(
                f"The node's machine lacks the {show_size(size_bytes)} of memory for {new} more slots; try again later."
            ) from error
        self.landing.take(connection.tenant, size_bytes)
        if rest is not None:  # it takes no longer than the arrival of the bytes
            connection.filling += 1
            filling = self._loop.run_in_executor(self._filler, rest)
            filling.add_done_callback(lambda done: self._filled(connection, done))

    def _filled(self, connection: Connection, done: asyncio.Future[None]) -> None:
        connection.filling -= 1
        failed = None if done.cancelled() else done.exception()
        if connection.closed:
            self._free_if_idle(connection)
        elif failed is not None:
            log.warning("%s The connection is closed.", failed, extra=connection.about())
            self.detach(connection)

    def left(self, connection: Connection) -> None:
        """Close the connection of a client that has left. Puts that reached it before count as sent."""
        if not connection.closed:
            self._fabric_events()
        self.detach(connection)

    def detach(self, connection: Connection) -> None:
        """Close a connection. Blocks that have landed are still stored; other puts are dropped."""
        if connection.closed:
            return
        connection.close()
        if self.sharing is not None:
            self.sharing.withdraw(connection)
        self.catch_up()
        del self.connections[connection.number]
        self.granted.close(connection)
        self.fetches.forget(connection)
        self.fabric_calls.close(connection)
        self._closing.add(connection)
        self.places.give_back(connection.tenant)
        self._free_if_idle(connection)
        log.info("detached", extra=connection.about())

    def _free_if_idle(self, connection: Connection) -> None:
        # Every leased slot still ends with an event: its block had landed, or its watch was withdrawn.
        if connection.closed and not connection.slots.busy and not connection.filling:
            self._closing.discard(connection)
            self.freed.set()
            self.landing.give_back(connection.tenant, connection.landing_bytes)
            connection.free_memory()

    def catch_up(self, *, every: bool = True) -> None:
        """Process the C core's own work; `every` part of it before a request is answered."""
        self.granted.take_all(every=every)
        self.fabric_calls.served()

    def later(self, delay_s: float, do: Callable[..., object], *arguments: object) -> None:
        """Run something later, on the loop."""
        self._loop.call_later(delay_s, or_stop(do), *arguments)

    def connection(self, number: int, owner: Tenant | None) -> Connection:
        """The connection with this number. A connection of another tenant is treated as nonexistent."""
        connection = self.connections.get(number)
        if connection is None or (owner is not None and owner.id != connection.tenant):
            raise ProtocolError(
                f"There is no connection {number}; attach first, and attach again after a loss."
            )
        return connection

    # --- puts

    def reserve(
        self,
        connection: Connection,
        blocks: Sequence[BlockRequest],
        durability: Durability,
        lease_ms: int,
        expires_unix_ms: int,
    ) -> list[Lease | None]:
        """Lease slots for blocks; None where the block is stored already."""
        check_count(len(blocks))
        lease_ms = lease_ms or LEASE_TIMEOUT_MS
        if lease_ms > LEASE_TIMEOUT_MS_MAX:
            raise ProtocolError(f"A lease lasts up to {LEASE_TIMEOUT_MS_MAX} ms, not {lease_ms}.")
        for block in blocks:
            connection.check(block, encrypts=self.store.keys is not None)
        refuse_expired(expires_unix_ms, self.clock.wall_ms())
        stored = already_stored(self, connection, blocks, durability, expires_unix_ms)
        wanted = [block for block, there in zip(blocks, stored, strict=True) if not there]
        if not wanted:
            return [None] * len(blocks)
        self._leased.refuse_more(connection, len(wanted))
        self._let_land(connection, len(wanted))
        now_ns = self.clock.monotonic_ns()
        deadline_ns = now_ns + lease_ms * 1_000_000
        leases = connection.lease(wanted, self._tags, durability, deadline_ns, expires_unix_ms)
        self.counters.leased += len(leases)
        for lease in leases:
            self._leased.add(lease.generation, connection)
            lease.leased_ns, lease.deadline_ns = now_ns, deadline_ns
        in_order = iter(leases)
        return [None if there else next(in_order) for there in stored]

    def abort(self, connection: Connection, leases: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
        """Release leases that a client returns: it promises not to write. One at its end counts as a late put.

        Returns how many were released, and the generations of those that were already over: their words have been put.
        """
        over = [generation for _, generation in leases if connection.slots.is_quarantined(generation)]
        aborted = (connection.slots.abort(slot, generation) for slot, generation in leases)
        released = [lease for lease in aborted if lease is not None]
        self.fabric.cancel([lease.generation for lease in released])
        now_ns = self.clock.monotonic_ns()
        for lease in released:
            self._leased.pop(lease.generation)
            if lease.generation not in over and lease.ended_in_vain(now_ns):
                self.timings.lease_failed(connection.tenant, lease, LeaseExpired("It was given back unused."))
                self.lookups.lease_over(connection.tenant, lease.key)
        if self.spans is not None:
            self.spans.ended(((lease, End.GIVEN_BACK) for lease in released), now_ns)
        return len(released), over

    def _drive_events(self) -> None:
        self.ticks.stir()
        self.poll_store()

    def poll_store(self) -> None:
        """Advance the drives' work, and report completions."""
        self.store.poll()
        self.granted.store_gathered()

    def _fabric_events(self) -> None:
        self.ticks.stir()
        landed: list[LandedLease] = []
        calls: list[Event] = []
        while events := self.fabric.reap():
            for event in events:
                self._fabric_event(event, landed, calls)
        self.counters.landed += len(landed)
        now_ns = self.clock.monotonic_ns()
        for _, lease, _ in landed:
            lease.landed_ns = now_ns
        if self.spans is not None:
            self.spans.landed(((lease, event.time_ns) for _, lease, event in landed), now_ns)
        self.traces.saw(Step.LANDED, (lease for _, lease, _ in landed))
        self._due.add(landed)
        if not self._goes_on:
            self._store_due()
        self.fabric_calls.landed(calls)
        self.fetches.pump()

    def _fabric_event(self, event: Event, landed: list[LandedLease], calls: list[Event]) -> None:
        match event.kind:
            case EventKind.LANDED:
                calls.append(event) if self.fabric_calls.is_one(event) else self._landed(event, landed)
            case EventKind.CAME:
                (self.fabric_calls.served if event.tag == COLD_TAG else self.granted.handle)(event.tag)
            case EventKind.READ:
                self.fetches.readers.read(event)
            case EventKind.WATCH_FAILED:
                self._lease_over(event)
            case _ if not self.fabric_calls.sent(event):
                self.fetches.sent(event)

    def _landed(self, event: Event, landed: list[LandedLease]) -> None:
        connection = self._leased.get(event.tag)
        lease = connection.slots.landed(event.tag) if connection is not None else None
        if connection is not None and lease is not None:
            landed.append(LandedLease(connection, lease, event))

    def _store_due(self) -> None:
        """Store landed blocks, their tenants in turn; of many, the rest in the loop's next round."""
        if due := list(itertools.islice(iter(self._due.take_any, None), TURN_STEP_PUTS)):
            self._store(due)
        self._goes_on = len(self._due) > 0
        if self._goes_on:
            self._loop.call_soon(or_stop(self._store_due))

    def _store(self, landed: Sequence[LandedLease]) -> None:
        since = self.erasures.began_since
        if erased := [one for one in landed if since(one.tenant, one.lease.domain, one.event.time_ns)]:
            landed = [one for one in landed if one not in erased]
            self._kept([one.ended(BeingErased(_ERASED)) for one in erased])
        if gone := [one for one in landed if self.deletions.is_since(one.name, one.event.time_ns)]:
            landed = [one for one in landed if one not in gone]
            self._kept([one.ended(None) for one in gone])
        items = [connection.item(lease, event.value) for connection, lease, event in landed]
        try:
            self.granted.before_others([one.name for one in landed])
            self.store.put(items, self._kept)
        except Overloaded:
            # The blocks are safe in their slots, which their clients can't reuse meanwhile: this is the back-pressure.
            self._loop.call_later(0.001, self._store, landed)

    def _kept(self, batch: Sequence[PutDone]) -> None:
        words, lengths, vain = list[WordPut](), list[int](), list[tuple[bytes, bytes]]()
        kept: dict[tuple[bytes, Durability], list[Lease]] = {}
        # Before acknowledgements, so that no span outlasts its parent.
        ended = None if self.spans is None else self._ends(batch)
        now_ns = self.clock.monotonic_ns()
        for done in batch:
            connection = self._leased.end(done.tag)
            lease = connection.slots.finished(done.tag)
            if done.error is None:
                lengths.append(lease.length)
                kept.setdefault((connection.tenant, done.durability), []).append(lease)
                is_landed = lease.durability is Durability.LANDED
                code = AckCode.LANDED if is_landed else AckCode(done.durability)
            else:
                code = self._not_kept(connection, lease, done.error)
                vain.append((connection.tenant, lease.key))
            if connection.closed:
                self._free_if_idle(connection)
            else:
                words.append(connection.word_put(lease.ack_word, lease.generation, code))
        self.counters.kept(lengths)
        if words:
            put_words(self.fabric, words)
        self.granted.free_names(vain)
        for (tenant, durability), leases in kept.items():
            self.timings.leases_kept(tenant, durability, leases)
            self.traces.saw(Step.KEPT, leases, durability.name.lower())
        if self.spans is not None and ended is not None:
            self.spans.ended(ended, now_ns)

    def _not_kept(self, connection: Connection, lease: Lease, error: KvError) -> AckCode:
        """Record why a block was not stored; returns the code for its word."""
        self.timings.lease_failed(connection.tenant, lease, error)
        level = logging.DEBUG if isinstance(error, KeyTaken) else logging.WARNING
        log.log(level, "a block could not be stored: %s", error, extra=connection.about())
        connection.failed(lease.generation, error)
        return code_of_error(error)

    def _ends(self, batch: Sequence[PutDone]) -> list[tuple[Lease, End]]:
        return [
            (self._leased.of(done.tag).slots.lease(done.tag), End.FAILED if done.error else End.KEPT)
            for done in batch
        ]

    def _lease_over(self, event: Event) -> None:
        connection = self._leased.pop(event.tag)
        lease = connection.slots.expired(event.tag) if connection is not None else None
        if connection is None or lease is None:
            return
        self.timings.lease_failed(connection.tenant, lease, LeaseExpired("Its lease has expired."))
        if self.spans is not None:
            self.spans.ended([(lease, End.EXPIRED)], self.clock.monotonic_ns())
        self.lookups.lease_over(connection.tenant, lease.key)
        if connection.closed:
            self._free_if_idle(connection)
            return
        put_words(self.fabric, [connection.word_put(lease.ack_word, lease.generation, AckCode.LEASE_EXPIRED)])
        self._loop.call_later(
            QUARANTINE_TIMEOUT_MS / 1000, self._end_if_quarantined, connection, lease.generation
        )

    def _end_if_quarantined(self, connection: Connection, generation: int) -> None:
        if not connection.closed and connection.slots.is_quarantined(generation):
            log.warning("an expired lease was not given back; connection closed", extra=connection.about())
            self.detach(connection)

    # --- the end

    async def _all_freed(self) -> None:
        while self._closing or len(self.granted):
            self.freed.clear()
            await self.freed.wait()

    async def close(self) -> None:
        """Close all connections, and wait, with a bound, until all landed blocks are on the drive."""
        self._is_ending = True
        self.prefetches.close()
        self.catch_up()
        for connection in list(self.connections.values()):
            self.detach(connection)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_freed(), QUARANTINE_TIMEOUT_MS / 1000)
        self.granted.end()
        self._filler.shutdown(wait=False, cancel_futures=True)
        self.ticks.cancel()
        self.lookups.close()
        self._loop.remove_reader(self.fabric.fileno())
        self._loop.remove_reader(self.store.fileno())
