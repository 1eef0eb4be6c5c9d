"""Puts by grants: the client's side of one connection (`sender.c`).

A grant is a slot of the node that this client may write to, with its next generation. A put takes a grant when it
fires, and the node's first word returns it, renewed. So any number of puts may be armed, and the node is not called
before or after. Each payload is preceded by a description of the block: key, layout, durability, expiry, where to
acknowledge, and the checksum of the bytes as they were when they were sent.

What always holds: a put fires once, and its row of the group completes with the node's last word, or with an event
that says why there will be none. The description of a block is read when its put fires, and must not move until then:
the owner of the puts keeps it in a `Heads`.
"""

from __future__ import annotations

import struct
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.counter import Counter
    from nic_offload.fabric import Endpoint, Fabric, Region
    from nic_offload.group import Group
    from nic_offload.pieces import Pieces

__all__ = [
    "HEAD_PAGE_BYTES",
    "METADATA_BYTES_MAX",
    "Area",
    "GrantedPut",
    "Heads",
    "Sender",
    "SharedArea",
    "send",
]

HEAD_PAGE_BYTES = int(lib.TK_HEAD_PAGE)  # of each slot, before its payload
_HEAD = struct.Struct("=IIQQQIIIBB2x32s16s16s16x")
assert _HEAD.size == ffi.sizeof("struct tk_put_head")
METADATA_BYTES_MAX = HEAD_PAGE_BYTES - _HEAD.size
_OPERATION = struct.Struct("=19Q6I")
assert _OPERATION.size == ffi.sizeof("struct tk_operation")


class Area(NamedTuple):
    """The node's slots as its client's fabric addresses them."""

    flags: int
    slots: int
    slot_bytes: int
    key: int
    slots_count: int
    first_generation: int


class SharedArea(NamedTuple):
    """The same area, mapped here: its flags, its slots, the words for our puts, and the node's doorbell."""

    flags: int
    slots: int
    words: int
    doorbell: int


class Heads:
    """Descriptions of blocks, in memory that doesn't move."""

    def __init__(
        self,
        keys: Sequence[bytes],
        fingerprint: bytes,
        durability: int,
        expires_unix_ms: int = 0,
        metadata: tuple[bytes, bytes] = (b"", b""),
        domains: Sequence[bytes] = (),
    ) -> None:
        """A block without a key is named later. `metadata`: of the first block, and of each of the others.

        `domains`: for each block the domain whose key encrypts it; empty: none is named.
        """
        first, others = [one + bytes(-len(one) % 8) for one in metadata]
        size, pack = max(len(first), len(others)), _HEAD.pack
        if size > METADATA_BYTES_MAX:
            raise ValueError(f"A put has room for {METADATA_BYTES_MAX} bytes of metadata, not {size}.")
        self._stride = size + _HEAD.size
        self._memory: Any = ffi.new("char[]", self._stride * len(keys))
        ffi.buffer(self._memory)[:] = b"".join(
            [
                (bytes(size - len(said)) + said if size else b"")
                + pack(
                    0,
                    len(said),
                    0,
                    0,
                    expires_unix_ms,
                    0,
                    0,
                    0,
                    0,
                    durability if key else 0,
                    key,
                    fingerprint,
                    domain,
                )
                for key, said, domain in zip(
                    keys, chain((first,), repeat(others)), domains or repeat(b""), strict=False
                )
            ]
        )
        self._first = int(ffi.cast("uintptr_t", self._memory)) + size

    def address(self, number: int) -> int:
        """The address of the head with this number."""
        return self._first + number * self._stride

    def name(self, number: int, key: bytes, durability: int) -> None:
        """Name a block late, whose durability was 0: until then it can't be sent."""
        head = ffi.cast("struct tk_put_head *", self.address(number))
        ffi.memmove(head.key, key, len(key))
        head.durability = durability


class GrantedPut(NamedTuple):
    """Put a piece of a registered region. Without a `trigger` it fires at once."""

    tag: int  # the watch for its acknowledgements has the next one
    region: Region
    source: int  # an address inside the region
    length: int
    head: int  # an address in `Heads`
    trigger: Counter | None
    threshold: int
    deadline_ns: int  # CLOCK_MONOTONIC; 0: none
    group: Group
    row: int
    pieces: Pieces | None = None  # the bytes; `region` is then where the sender gathers them


class Sender:
    """Sends puts over a connection; closed when its endpoint is."""

    def __init__(
        self,
        endpoint: Endpoint,
        region: Region,
        peer: int,
        area: Area,
        words: int,
        words_count: int,
        first_word: int,
        heads: int,
        first_ack_generation: int,
        grace_ns: int,
        good_max: int,
        shared: SharedArea | None = None,
    ) -> None:
        """`words` and `heads` are addresses in the region, which has a page for the head of each slot.

        With a `shared` area nothing goes over the fabric, and its words are watched instead of `words`.
        """
        shared = shared or SharedArea(0, 0, words, -1)
        setup = ffi.new(
            "struct tk_sender_setup *",
            {
                "endpoint": endpoint.handle,
                "region": region.handle,
                "peer": peer,
                "flags": area.flags,
                "slots": area.slots,
                "slot_bytes": area.slot_bytes,
                "area_key": area.key,
                "words": shared.words,
                "heads": heads,
                "first_generation": area.first_generation,
                "first_ack_generation": first_ack_generation,
                "grace_ns": grace_ns,
                "first_word": first_word,
                "words_count": words_count,
                "slots_count": area.slots_count,
                "good_max": good_max,
                "doorbell": shared.doorbell,
                "shared_flags": shared.flags,
                "shared_slots": shared.slots,
            },
        )
        out = ffi.new("struct tk_sender **")
        code = lib.tk_sender_open(setup, out)
        if code:
            raise FabricError.from_code("Opening a sender", code)
        self._handle: Any = out[0]
        self.endpoint = endpoint
        self.peer = peer
        self.pointer = int(ffi.cast("uintptr_t", out[0]))
        self.slots_count = area.slots_count

    def gather(self, region: Region, address: int, slot_bytes: int) -> None:
        """Gather puts of pieces there, with `slot_bytes` for each slot. Called once, before the first of them."""
        code = lib.tk_sender_gather(self._handle, region.handle, address, slot_bytes)
        if code:
            raise FabricError.from_code("Giving a sender memory for pieces", code)

    @property
    def shared_puts(self) -> int:
        """How many puts went into the node's memory without the fabric."""
        return int(lib.tk_sender_shared(self._handle)) if self.pointer else 0

    def close(self) -> None:
        """Free it, after its endpoint was closed."""
        if self.pointer:
            lib.tk_sender_close(self._handle)
            self.pointer = 0


def send(fabric: Fabric, sender: Sender, puts: Sequence[GrantedPut]) -> None:
    """Arm the puts, all or none."""
    endpoint, peer, pointer = sender.endpoint.pointer, sender.peer, sender.pointer
    flags, pack = lib.TK_FLAG_PUT | lib.TK_ACKED_PUT, _OPERATION.pack
    packed = [
        pack(
            put.tag,
            endpoint,
            peer,
            put.source,
            0,
            0,
            0,
            0,
            0,
            0 if put.trigger is None else put.trigger.pointer,
            put.threshold,
            0,
            0,
            put.deadline_ns,
            put.region.pointer,
            put.group.pointer,
            pointer,
            put.head,
            0 if put.pieces is None else put.pieces.pointer,
            put.length,
            0,
            flags,
            put.row,
            0,
            0,
        )
        for put in puts
    ]
    rows = ffi.from_buffer("struct tk_operation[]", b"".join(packed))
    code = lib.tk_arm(fabric.handle, rows, len(puts))
    if code:
        raise FabricError.from_code(f"Arming {len(puts)} puts", code)
