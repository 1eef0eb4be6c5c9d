"""Landing slots and their leases: memory that clients write into, and which client may write to a slot until when.

A slot is `[header page | payload | padding to the page's end]`, so header and payload go to the drive in one write
from where the payload landed. Each connection has a landing area of its own, with a random key: no client can write
into another's slots.

A slot's life: FREE -> LEASED (a client may write) -> WRITING (its flag arrived with the lease's generation)
-> FREE. A slot whose lease ends before its flag arrives is QUARANTINED: the client's late write may still be in flight,
so the slot is not reused until the client confirms that it is not (`abort`), or its connection is closed.

What always holds: a generation is given out once in the life of a node; a slot in any state but FREE is
never leased. What it doesn't do: I/O, or read a clock, so tests drive `Slots` directly.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.durability import Durability
from kvstore.errors import Overloaded
from kvstore.limits import HEADER_BYTES, LEASE_MARGIN_MS, LEASES_MAX, PAGE_BYTES
from kvstore.node.fair_queue import Places
from kvstore.storage.items import PutDone
from kvstore.storage.sealing import NO_DOMAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.errors import KvError
    from kvstore.node.connection import Connection
    from kvstore.node.session_traces import SessionTrace
    from kvstore.node.span_notes import PutTrace
    from nic_offload.fabric import Event

__all__ = ["LandedLease", "LandingLayout", "Lease", "LeaseTable", "SlotState", "Slots", "Tracked", "pages_of"]

_FLAG_BYTES = 8


def pages_of(length_bytes: int) -> int:
    """How many pages a record with such a payload occupies, its header page included."""
    return (HEADER_BYTES + length_bytes + PAGE_BYTES - 1) // PAGE_BYTES


@dataclass(frozen=True, slots=True)
class LandingLayout:
    """The layout of a landing area: flag words first, then the slots. Offsets count from its start."""

    slots: int
    block_bytes_max: int

    @property
    def _flags_bytes(self) -> int:
        return (self.slots * _FLAG_BYTES + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES

    @property
    def slot_bytes(self) -> int:
        """A slot with its header page, in whole pages."""
        return pages_of(self.block_bytes_max) * PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """The whole area."""
        return self._flags_bytes + self.slots * self.slot_bytes

    def flag(self, slot: int) -> int:
        """The slot's flag word."""
        return slot * _FLAG_BYTES

    def header(self, slot: int) -> int:
        """The slot itself, which begins with its header page."""
        return self._flags_bytes + slot * self.slot_bytes

    def payload(self, slot: int) -> int:
        """The address at which the payload lands."""
        return self.header(slot) + HEADER_BYTES


class SlotState(enum.Enum):
    """The state of a slot, which determines what may happen to it next."""

    FREE = "free"
    LEASED = "leased"
    WRITING = "writing"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Lease:
    """One block on its way into one slot."""

    slot: int
    generation: int
    key: bytes
    fingerprint: bytes
    length: int
    durability: Durability
    ack_word: int
    expires_unix_ms: int
    domain: bytes = NO_DOMAIN
    state: SlotState = SlotState.LEASED
    leased_ns: int = 0
    deadline_ns: int = 0
    landed_ns: int = 0
    flag_ns: int = 0  # when its flag was seen, if that arrived with the block; 0: unknown
    trace: SessionTrace | None = None  # of the block's session, if the client named one
    traced: PutTrace | None = None  # collects the outcomes of the put's leases, for its spans

    def ended_in_vain(self, now_ns: int) -> bool:
        """Whether the client held the lease as long as it could: it gives up some time before the lease ends."""
        granted_ns = self.deadline_ns - self.leased_ns
        margin_ns = min(LEASE_MARGIN_MS * 1_000_000, granted_ns // 2)
        return self.deadline_ns - now_ns <= margin_ns * 5 // 4  # the round trip takes time too


class Tracked(Protocol):
    """The traced and timed fields of a block in flight: a lease, or a block that landed by a grant."""

    length: int
    durability: Durability
    leased_ns: int
    landed_ns: int
    flag_ns: int
    trace: SessionTrace | None
    traced: PutTrace | None


class LandedLease(NamedTuple):
    """A block that has landed and is to be stored, as an item of a `FairQueue`."""

    connection: Connection
    lease: Lease
    event: Event  # as of when the C core saw it, before the client could know that it had landed

    @property
    def tenant(self) -> bytes:
        """The tenant whose turn it takes."""
        return self.connection.tenant

    @property
    def name(self) -> tuple[bytes, bytes]:
        """The name that the store will have it under."""
        return self.connection.tenant, self.lease.key

    @property
    def flow(self) -> int:
        """The connection of its tenant on which it arrived."""
        return self.connection.number

    @property
    def size_bytes(self) -> int:
        """How many bytes count against its turn."""
        return self.lease.length

    def ended(self, error: KvError | None) -> PutDone:
        """The end of a put that the store never gets."""
        return PutDone(self.lease.generation, error, max(self.lease.durability, Durability.WRITTEN))


class Slots:
    """The lease table of one connection. Leases are named by their generation.

    After `erase` no slot keeps its bytes: `wipe` overwrites the given number of bytes of a slot when its lease ends,
    or when `wipe_free` finds it free.
    """

    def __init__(self, count: int, wipe: Callable[[int, int], None]) -> None:
        self.count = count
        self._wipe = wipe
        self._free = array("I", range(count - 1, -1, -1))  # a list would take an object for each
        self._leases: dict[int, Lease] = {}
        self.busy = 0  # slots that are leased or being written
        self._left: dict[int, int] = {}  # how many bytes blocks may have left, by slot
        self._to_wipe: dict[int, int] = {}  # the same, for erased blocks

    def take(self, count: int) -> list[int]:
        """Reserve free slots, all or none; each must be passed to `hold` next."""
        if count > len(self._free):
            raise Overloaded(
                f"The connection has {len(self._free)} of {self.count} landing slots free and {count} were"
                f" requested; wait for puts to finish, or attach with more slots."
            )
        return [self._free.pop() for _ in range(count)]

    def hold(self, lease: Lease) -> None:
        """Add a lease of a reserved slot."""
        assert lease.generation not in self._leases
        self._leases[lease.generation] = lease
        self._left[lease.slot] = max(lease.length, self._left.get(lease.slot, 0))
        self.busy += 1

    def lease(self, generation: int) -> Lease:
        """The lease of this generation, which must exist."""
        return self._leases[generation]

    def landed(self, generation: int) -> Lease | None:
        """The flag has arrived: from now on the bytes are ours. None if the lease is not waiting for it."""
        lease = self._leases.get(generation)
        if lease is None or lease.state is not SlotState.LEASED:
            return None
        lease.state = SlotState.WRITING
        return lease

    def finished(self, generation: int) -> Lease:
        """The drive is done with the slot, successfully or not."""
        lease = self._leases.pop(generation)
        assert lease.state is SlotState.WRITING
        self.busy -= 1
        self._release(lease)
        return lease

    def expired(self, generation: int) -> Lease | None:
        """The lease has expired. None if its block has landed or it was given back."""
        lease = self._leases.get(generation)
        if lease is None or lease.state is not SlotState.LEASED:
            return None
        lease.state = SlotState.QUARANTINED
        self.busy -= 1
        return lease

    def abort(self, slot: int, generation: int) -> Lease | None:
        """The client promises not to write. None if there is nothing left to give back."""
        lease = self._leases.get(generation)
        if lease is None or lease.slot != slot or lease.state is SlotState.WRITING:
            return None
        del self._leases[generation]
        self.busy -= lease.state is SlotState.LEASED
        self._release(lease)
        return lease

    def is_quarantined(self, generation: int) -> bool:
        """Whether the client still owes the promise for this lease."""
        lease = self._leases.get(generation)
        return lease is not None and lease.state is SlotState.QUARANTINED

    def erase(self) -> None:
        """Mark all bytes that blocks have left for overwriting; in slots in use, when their leases end."""
        for slot, length in self._left.items():
            self._to_wipe[slot] = max(length, self._to_wipe.get(slot, 0))
        self._left = {lease.slot: lease.length for lease in self._leases.values()}

    def leave(self) -> None:
        """Overwrite nothing from now on: the memory is about to be freed."""
        self._wipe = lambda *_: None

    def wipe_free(self) -> bool:
        """Overwrite one free slot that contains bytes of erased blocks; False if there is none."""
        slot = next((one for one in self._free if one in self._to_wipe), None)
        if slot is not None:
            self._wipe(slot, self._to_wipe.pop(slot))
        return slot is not None

    def in_state(self, state: SlotState) -> int:
        """How many slots are in this state."""
        if state is SlotState.FREE:
            return len(self._free)
        return sum(lease.state is state for lease in self._leases.values())

    def _release(self, lease: Lease) -> None:
        lease.state = SlotState.FREE
        self._free.append(lease.slot)
        if length := self._to_wipe.pop(lease.slot, 0):
            self._wipe(lease.slot, length)


class LeaseTable:
    """All leases of a node, by generation; each tenant has its share of `LEASES_MAX`."""

    def __init__(self, tenants_known: Callable[[], int]) -> None:
        self._places = Places(LEASES_MAX, tenants_known)
        self._connections: dict[int, Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def refuse_more(self, connection: Connection, count: int) -> None:
        """Overloaded, if the connection's tenant may not have this many more."""
        if count > self._places.left(connection.tenant):
            raise Overloaded("The tenant's share of the node's leases is used up; wait for puts to finish.")

    def add(self, generation: int, connection: Connection) -> None:
        """Add a lease."""
        self._connections[generation] = connection
        self._places.take(connection.tenant)

    def get(self, generation: int) -> Connection | None:
        """The connection with this lease; None if there is none."""
        return self._connections.get(generation)

    def of(self, generation: int) -> Connection:
        """The connection with this lease, which must exist."""
        return self._connections[generation]

    def end(self, generation: int) -> Connection:
        """Remove a lease, which must exist; returns its connection."""
        connection = self._connections.pop(generation)
        self._places.give_back(connection.tenant)
        return connection

    def pop(self, generation: int) -> Connection | None:
        """Remove a lease, if it exists; returns its connection."""
        return self.end(generation) if generation in self._connections else None
