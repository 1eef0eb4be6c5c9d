"""Landing slots and their leases: memory that clients write into, and which client may write to a slot until when.

A slot is `[header page | payload | padding to the page's end]`, so the drive can take header and payload in one write
from where the payload landed. Each connection has a landing area of its own, with a random key: no client can write
into another's slots.

A slot's life: FREE -> LEASED (a client may write) -> WRITING (its flag came with the lease's generation)
-> FREE. A slot whose lease ends before its flag came is QUARANTINED: the client's late write may still be in flight, so
the slot is not reused until the client confirms that it is not (`abort`), or its connection is closed.

What always holds: a generation is given out once in the life of a node; a slot in any state but FREE is
never leased. `Slots` does no I/O and has no notion of time: tests drive it directly.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.errors import Overloaded
from kvstore.limits import HEADER_BYTES, LEASE_MARGIN_MS, LEASES_MAX, PAGE_BYTES
from kvstore.node.fair import Places
from kvstore.storage.sealing import NO_DOMAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.durability import Durability
    from kvstore.node.connection import Connection
    from kvstore.node.session_traces import SessionTrace
    from kvstore.node.span_notes import PutTrace
    from nic_offload.fabric import Event

__all__ = ["LandedLease", "LandingLayout", "Lease", "LeaseTable", "SlotState", "Slots", "Tracked", "pages_of"]

_FLAG_BYTES = 8


def pages_of(length_bytes: int) -> int:
    """How many pages a record with such a payload takes, its header page included."""
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
    """The state of a slot, and so what may happen to it next."""

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
    flag_ns: int = 0  # when its flag was seen, if that came with the block; 0: unknown
    trace: SessionTrace | None = None  # of the session that the block is for, if its client said so
    is_taken: bool = False  # its key has another block: whatever lands is not kept, and `landed` is not said
    traced: PutTrace | None = None  # who adds up what becomes of the put's leases, for its spans

    def ended_in_vain(self, now_ns: int) -> bool:
        """Whether its client, which gives up some time before the lease ends, held it as long as it could."""
        granted_ns = self.deadline_ns - self.leased_ns
        margin_ns = min(LEASE_MARGIN_MS * 1_000_000, granted_ns // 2)
        return self.deadline_ns - now_ns <= margin_ns * 5 // 4  # the way there and back takes time too


class Tracked(Protocol):
    """What is traced and timed of a block on its way: a lease, or a block that came by a grant."""

    length: int
    durability: Durability
    leased_ns: int
    landed_ns: int
    flag_ns: int
    trace: SessionTrace | None
    traced: PutTrace | None


class LandedLease(NamedTuple):
    """A block that has landed and is to be stored, as a `FairQueue` has it."""

    connection: Connection
    lease: Lease
    event: Event

    @property
    def tenant(self) -> bytes:
        """The tenant whose turn it takes."""
        return self.connection.tenant

    @property
    def flow(self) -> int:
        """Through which of its tenant's connections it came."""
        return self.connection.number

    @property
    def size_bytes(self) -> int:
        """How many bytes count against its turn."""
        return self.lease.length


class Slots:
    """The lease table of one connection. Leases are named by their generation.

    After `erase` no slot keeps what it had: `wipe` overwrites the given number of bytes of a slot when its lease ends,
    or when `wipe_free` finds it free.
    """

    def __init__(self, count: int, wipe: Callable[[int, int], None]) -> None:
        self.count = count
        self._wipe = wipe
        self._free = list(range(count - 1, -1, -1))
        self._leases: dict[int, Lease] = {}
        self.busy = 0  # slots that are leased, or hold what is being written
        self._left: dict[int, int] = {}  # how many bytes blocks may have left, by slots
        self._to_wipe: dict[int, int] = {}  # likewise, of erased blocks

    def take(self, count: int) -> list[int]:
        """Take free slots, all or none; each must be given to `hold` next."""
        if count > len(self._free):
            raise Overloaded(
                f"The connection has {len(self._free)} of {self.count} landing slots free and {count} were"
                f" requested; wait for puts to finish, or attach with more slots."
            )
        return [self._free.pop() for _ in range(count)]

    def hold(self, lease: Lease) -> None:
        """Enter a lease of a taken slot."""
        assert lease.generation not in self._leases
        self._leases[lease.generation] = lease
        self._left[lease.slot] = max(lease.length, self._left.get(lease.slot, 0))
        self.busy += 1

    def lease(self, generation: int) -> Lease:
        """One that is held."""
        return self._leases[generation]

    def landed(self, generation: int) -> Lease | None:
        """The flag came: from now on the bytes are ours. None when the lease is not waiting for it."""
        lease = self._leases.get(generation)
        if lease is None or lease.state is not SlotState.LEASED:
            return None
        lease.state = SlotState.WRITING
        return lease

    def finished(self, generation: int) -> Lease:
        """The drive is done with the slot, one way or the other."""
        lease = self._leases.pop(generation)
        assert lease.state is SlotState.WRITING
        self.busy -= 1
        self._release(lease)
        return lease

    def expired(self, generation: int) -> Lease | None:
        """The lease's time is over. None when its block has landed or it was given back."""
        lease = self._leases.get(generation)
        if lease is None or lease.state is not SlotState.LEASED:
            return None
        lease.state = SlotState.QUARANTINED
        self.busy -= 1
        return lease

    def abort(self, slot: int, generation: int) -> Lease | None:
        """The client promises not to write. None when there is nothing to give back any more."""
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
        """Let all bytes that blocks have left be overwritten, in slots in use when their leases end."""
        for slot, length in self._left.items():
            self._to_wipe[slot] = max(length, self._to_wipe.get(slot, 0))
        self._left = {lease.slot: lease.length for lease in self._leases.values()}

    def wipe_free(self) -> bool:
        """Overwrite one free slot that has bytes of erased blocks; False if there is none."""
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
        """Overloaded, if the connection's tenant may not have so many more."""
        if count > self._places.left(connection.tenant):
            raise Overloaded("The tenant's share of the node's leases is used up; wait for puts to finish.")

    def add(self, generation: int, connection: Connection) -> None:
        """Enter one."""
        self._connections[generation] = connection
        self._places.take(connection.tenant)

    def get(self, generation: int) -> Connection | None:
        """The connection that has this generation; None if none has."""
        return self._connections.get(generation)

    def of(self, generation: int) -> Connection:
        """The connection that has this generation; one must have it."""
        return self._connections[generation]

    def end(self, generation: int) -> Connection:
        """Remove one that there is; whose it was."""
        connection = self._connections.pop(generation)
        self._places.give_back(connection.tenant)
        return connection

    def pop(self, generation: int) -> Connection | None:
        """Remove one, if it is there; whose it was."""
        return self.end(generation) if generation in self._connections else None
