"""A connection: one attached client, with its endpoint, landing area and leases.

What always holds: when `close` returns, nothing is written to the landing area any more (the endpoint is closed and the
key revoked); its memory is kept until the drive is done with the blocks that had landed.
"""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.config import show_size
from kvstore.durability import Durability
from kvstore.errors import DomainRequired, Expired, ProtocolError
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    DOMAIN_BYTES,
    FINGERPRINT_BYTES,
    GENERATION_MAX,
    KEY_BYTES,
    LANDING_AT_ONCE_BYTES,
)
from kvstore.names import SHARED, UNSAID, fits_domain
from kvstore.node.cancelling import Cancelled
from kvstore.node.landing import LandingLayout, Lease, Slots, SlotState
from kvstore.node.logs import about
from kvstore.storage.items import PutItem
from kvstore.storage.sealing import NO_DOMAIN
from kvstore.wire.ack import AckCode, ack_word
from nic_offload.memory import populate
from nic_offload.trigger import Landing, WordPut, watch_landings

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.errors import KvError
    from kvstore.node.tenants import Credentials, Tenant
    from kvstore.wire.seal import Seal
    from nic_offload.fabric import Endpoint, Fabric

__all__ = [
    "AckArea",
    "BlockRequest",
    "Connection",
    "check_block",
    "check_block_length",
    "check_count",
    "check_domain",
    "check_fingerprint",
    "check_generation",
    "check_key",
    "refuse_expired",
    "stored_domain",
]

_WORD_BYTES = 8


def check_count(blocks: int, blocks_max: int = BATCH_BLOCKS_MAX) -> None:
    """Refuse a call that names no block, or too many."""
    if not 1 <= blocks <= blocks_max:
        raise ProtocolError(f"A call takes 1 to {blocks_max} blocks, not {blocks}.")


def check_key(key: bytes) -> None:
    """Refuse an invalid key."""
    if len(key) != KEY_BYTES:
        raise ProtocolError(f"A block's key has {KEY_BYTES} bytes, not {len(key)}.")


def check_fingerprint(fingerprint: bytes) -> None:
    """Refuse an invalid fingerprint."""
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise ProtocolError(f"A layout fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}.")


def check_block(key: bytes, fingerprint: bytes, length: int) -> None:
    """Refuse an invalid name or length."""
    check_key(key)
    check_fingerprint(fingerprint)
    check_block_length(length)


def check_block_length(length: int) -> None:
    """Refuse a length that no block has."""
    if not BLOCK_BYTES_MIN <= length <= BLOCK_BYTES_MAX:
        raise ProtocolError(f"A block has 1 byte to {show_size(BLOCK_BYTES_MAX)}, not {length} bytes.")


def check_domain(key: bytes, domain: bytes, *, encrypts: bool) -> None:
    """Refuse an erase domain that is not that of the block's key; a node that encrypts requires one."""
    if domain and len(domain) != DOMAIN_BYTES:
        raise ProtocolError(f"An erase domain has {DOMAIN_BYTES} bytes, not {len(domain)}.")
    if domain == NO_DOMAIN:
        raise ProtocolError("An erase domain must not be all zeros.")
    if not fits_domain(key, domain):
        raise ProtocolError("The block's key was made for another erase domain than the one it is put into.")
    if encrypts and domain == UNSAID:
        raise DomainRequired


def stored_domain(domain: bytes) -> bytes:
    """The keyring's domain whose key encrypts a block: for a shared one, that of the tenant itself."""
    return NO_DOMAIN if domain in (UNSAID, SHARED) else domain


def refuse_expired(expires_unix_ms: int, now_ms: int) -> None:
    """Refuse an expiry in the past."""
    if 0 < expires_unix_ms <= now_ms:
        raise Expired("The requested time to live has already ended; nothing was put.")


def check_generation(generation: int) -> None:
    """Refuse a generation that does not fit into an acknowledgement word."""
    if not 0 < generation <= GENERATION_MAX:
        raise ProtocolError(f"A word's generation is 1 to {GENERATION_MAX}, not {generation}.")


@dataclass(frozen=True, slots=True)
class AckArea:
    """The location of a client's acknowledgement words."""

    base: int
    key: int
    words: int

    def __post_init__(self) -> None:
        if self.base % _WORD_BYTES:
            raise ProtocolError(
                f"Acknowledgement words begin at a multiple of {_WORD_BYTES}, not at {self.base}."
            )

    def target(self, word: int) -> int:
        """The address of one word."""
        if not 0 <= word < self.words:
            raise ProtocolError(
                f"The client has {self.words} acknowledgement words, and {word} is not one of them."
            )
        return self.base + word * _WORD_BYTES


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A block that a client wants to put."""

    key: bytes
    fingerprint: bytes
    length: int
    ack_word: int
    domain: bytes = UNSAID


class Connection:
    """An attached client."""

    def __init__(
        self,
        number: int,
        owner: Tenant,
        credentials: Credentials,
        fabric: Fabric,
        endpoint: Endpoint,
        peer_address: bytes,
        acks: AckArea,
        layout: LandingLayout,
        memory: mmap.mmap,
        seal: Seal | None = None,
    ) -> None:
        self.number = number
        self.owner = owner
        self.credentials = credentials
        self.tenant = owner.id
        self.acks = acks
        self.layout = layout
        self.slots = Slots(layout.slots, self._wipe)
        self.filling = 0  # how many other threads are allocating its memory
        # How many slots, from the first on, have memory: free ones are leased from the first on.
        self._slots_there = 0
        self.closed = False
        self.cancelled = Cancelled()
        self._failures: dict[int, KvError] = {}  # by the generations of their leases
        self.ended = asyncio.Event()
        self.fabric = fabric
        self._memory = memory
        self.endpoint = endpoint
        self.seal = seal  # None: its client has an earlier version, and doesn't authenticate messages
        if seal is not None:
            seal.put_on_node(endpoint)
        self.peer = fabric.add_peer(peer_address, endpoint.domain)
        self._region = fabric.register(self._memory, endpoint=self.endpoint)
        self.landing_key = self._region.key

    def failed(self, generation: int, error: KvError) -> None:
        """Remember why a put failed, for `why_failed`: at most as many as puts may be pending."""
        self._failures[generation] = error
        if len(self._failures) > self.layout.slots:
            del self._failures[next(iter(self._failures))]

    def why_failed(self, generations: Iterable[int]) -> list[tuple[int, KvError]]:
        """Return why these puts failed, as far as known, and forget it."""
        failures = ((generation, self._failures.pop(generation, None)) for generation in generations)
        return [(generation, error) for generation, error in failures if error is not None]

    def slots_not_there(self, wanted: int) -> int:
        """For how many slots memory must be allocated before this many more can be leased."""
        used = self.layout.slots - self.slots.in_state(SlotState.FREE)
        return max(0, min(self.layout.slots, used + wanted) - self._slots_there)

    def have_slots(self, count: int) -> Callable[[], None] | None:
        """Allocate the memory of this many more slots; NoMemory if there is not enough.

        Allocating much of it is slow and delays others: the rest is allocated by the returned function, on any thread.
        """
        start, size_bytes = self.layout.header(self._slots_there), count * self.layout.slot_bytes
        at_once = min(size_bytes, LANDING_AT_ONCE_BYTES)
        populate(self._memory, start, at_once)
        self._slots_there += count
        if at_once == size_bytes:
            return None
        return partial(self._have, start + at_once, start + size_bytes)

    def _have(self, start: int, end: int) -> None:
        """Populate in pieces, because the kernel blocks other changes of the process's memory meanwhile."""
        for at in range(start, end, LANDING_AT_ONCE_BYTES):
            populate(self._memory, at, min(LANDING_AT_ONCE_BYTES, end - at))

    def all_there(self) -> int:
        """Note that registration has allocated the memory of all slots; returns its size."""
        self._slots_there = self.layout.slots
        return self.landing_bytes

    @property
    def landing_bytes(self) -> int:
        """How many bytes of landing memory are allocated."""
        return self._slots_there * self.layout.slot_bytes

    def about(self) -> dict[str, Any]:
        """Its fields for a log line."""
        return about(connection=self.number, tenant=self.owner.name)

    def remote(self, offset: int) -> int:
        """The address of an offset in the landing area for the client's fabric."""
        return self._region.base + offset

    def slot_address(self, slot: int) -> int:
        """The address of the slot's header page in this process."""
        return self._region.address + self.layout.header(slot)

    def _wipe(self, slot: int, length: int) -> None:
        ctypes.memset(self._region.address + self.layout.payload(slot), 0, length)

    def check(self, block: BlockRequest, *, encrypts: bool) -> None:
        """Refuse a block that can't be put over this connection."""
        check_block(block.key, block.fingerprint, block.length)
        check_domain(block.key, block.domain, encrypts=encrypts)
        if block.length > self.layout.block_bytes_max:
            raise ProtocolError(
                f"The connection was attached for blocks of up to {self.layout.block_bytes_max} bytes,"
                f" and this one has {block.length}."
            )
        self.acks.target(block.ack_word)

    def lease(
        self,
        blocks: Sequence[BlockRequest],
        generations: Iterator[int],
        durability: Durability,
        deadline_ns: int,
        expires_unix_ms: int,
    ) -> list[Lease]:
        """Lease a slot for each block and watch for their flags. All or none."""
        leases = [
            Lease(
                slot=slot,
                generation=next(generations),
                key=block.key,
                fingerprint=block.fingerprint,
                length=block.length,
                durability=durability,
                ack_word=block.ack_word,
                expires_unix_ms=expires_unix_ms,
                domain=stored_domain(block.domain),
            )
            for slot, block in zip(self.slots.take(len(blocks)), blocks, strict=True)
        ]
        for lease in leases:
            self.slots.hold(lease)
        watch_landings(self.fabric, [self._watch(lease, deadline_ns) for lease in leases])
        return leases

    def item(self, lease: Lease, crc32c: int) -> PutItem:
        """Return what to store for a lease whose block has landed."""
        return PutItem(
            tenant=self.tenant,
            key=lease.key,
            fingerprint=lease.fingerprint,
            length=lease.length,
            crc32c=crc32c,
            slot_address=self.slot_address(lease.slot),
            expires_ms=lease.expires_unix_ms,
            durability=max(lease.durability, Durability.WRITTEN),
            tag=lease.generation,
            domain=lease.domain,
        )

    def _watch(self, lease: Lease, deadline_ns: int) -> Landing:
        return Landing(
            tag=lease.generation,
            endpoint=self.endpoint,
            word=self._region.address + self.layout.flag(lease.slot),
            generation=lease.generation,
            payload=self._region.address + self.layout.payload(lease.slot),
            length=lease.length,
            peer=self.peer,
            ack_target=self.acks.target(lease.ack_word),
            ack_key=self.acks.key,
            ack_value=ack_word(lease.generation, AckCode.LANDED),
            quiet=lease.durability is Durability.LANDED,  # its client would take it for readable
            deadline_ns=deadline_ns,
            region=self._region,
        )

    def word_put(self, word: int, generation: int, code: int) -> WordPut:
        """An acknowledgement word to send."""
        return WordPut(
            endpoint=self.endpoint,
            peer=self.peer,
            target=self.acks.target(word),
            target_key=self.acks.key,
            value=ack_word(generation, code),
        )

    def close(self) -> None:
        """Close it: afterwards nothing arrives over it, and nothing is sent."""
        if self.closed:
            return
        self.closed = True
        self.slots.leave()  # which referred to this connection, and would keep it until a garbage collection
        self.ended.set()
        self.endpoint.close()
        self._region.close()
        self.fabric.remove_peer(self.peer, self.endpoint.domain)

    def free_memory(self) -> None:
        """Free the landing area. The drive must be done with it."""
        assert self.closed
        self._memory.close()
