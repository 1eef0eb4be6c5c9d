"""Puts by grants: the client's side of one connection (`sender.c`).

A grant is a slot of the node that this client may write to, with its next generation. A put takes a grant when it
fires, and the node's first word returns it, renewed. So any number of puts may be armed, and the node is not called
before or after. Each payload is preceded by a description of the block: key, layout, durability, expiry, where to
acknowledge, and the checksum of the bytes as they were when they were sent.

What always holds: a put fires once, and its row of the group completes with the node's last word, or with an event
that says why there will be none. A batch is armed in one call of C (`puts.c`), whatever its size.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError
from nic_offload.flags import FlagWord
from nic_offload.group import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.counter import Counter
    from nic_offload.fabric import Endpoint, Fabric, Region
    from nic_offload.pieces import Pieces

__all__ = [
    "HEAD_PAGE_BYTES",
    "METADATA_BYTES_MAX",
    "Area",
    "Sender",
    "SharedArea",
    "name_put",
    "put",
    "put_row",
]

HEAD_PAGE_BYTES = int(lib.TK_HEAD_PAGE)  # of each slot, before its payload
METADATA_BYTES_MAX = HEAD_PAGE_BYTES - int(ffi.sizeof("struct tk_put_head"))
_GROUP = ffi.typeof("struct tk_group **")
_PUTS = struct.Struct("=7QiIIIIxxxx16s")
assert _PUTS.size == ffi.sizeof("struct tk_puts")
_ROW = struct.Struct("=4QII32s16s")
assert _ROW.size == ffi.sizeof("struct tk_put_row")


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


def put_row(
    region: Region,
    address: int,
    length: int,
    threshold: int,
    key: bytes,
    domain: bytes = b"",
    pieces: Pieces | None = None,
) -> bytes:
    """A block of a batch of puts: its bytes are at an address inside a registered region, or in `pieces`.

    A block without a key is named later (`name_put`), and not sent before. Its domain's key encrypts it; empty: none is
    named. The sender gathers pieces in `region`.
    """
    return _ROW.pack(
        region.pointer,
        address,
        threshold,
        0 if pieces is None else pieces.pointer,
        length,
        key != b"",
        key,
        domain,
    )


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


def put(
    fabric: Fabric,
    sender: Sender,
    tag: int,
    rows: Sequence[bytes],
    trigger: FlagWord | Counter | None,
    fingerprint: bytes,
    durability: int,
    *,
    expires_unix_ms: int = 0,
    deadline_ns: int = 0,
    metadata: tuple[bytes, bytes] = (b"", b""),
) -> Group:
    """Arm puts, all or none; without a `trigger` they fire at once. Each is a `put_row`; their tags are 2 apart.

    `deadline_ns`: of CLOCK_MONOTONIC, 0: none. `metadata`: of the first block, and of each of the others.
    """
    counter, word, bell, pipe_fd = 0, 0, 0, -1
    if isinstance(trigger, FlagWord):
        word, bell, pipe_fd = trigger.place
        fabric.keep_word(trigger)
    elif trigger is not None:
        counter = trigger.pointer
    first, other = metadata
    if first or other:
        first, other = first + bytes(-len(first) % 8), other + bytes(-len(other) % 8)
        if max(len(first), len(other)) > METADATA_BYTES_MAX:
            raise ValueError(f"A put has room for {METADATA_BYTES_MAX} bytes of metadata.")
    head = _PUTS.pack(
        tag,
        sender.pointer,
        counter,
        word,
        bell,
        deadline_ns,
        expires_unix_ms,
        pipe_fd,
        len(rows),
        len(first),
        len(other),
        durability,
        fingerprint,
    )
    out = ffi.new(_GROUP)
    code = lib.tk_put(fabric.handle, b"".join((head, *rows)), first + other, out)
    if code:
        raise FabricError.from_code(f"Arming {len(rows)} puts", code)
    return Group.owning(out[0], len(rows))


def name_put(group: Group, row: int, key: bytes, durability: int) -> None:
    """Name a block that was armed without a key."""
    code = lib.tk_put_name(group.handle, row, key, durability)
    if code:
        raise FabricError.from_code("Naming a put", code)
