"""Blocks put by grants: the node's side of one connection (`receiver.c`).

Each block is read once from its slot, into a room that was provided in advance, and can be read from there, on the
shelf, before its client gets `landed`. Received blocks are taken in batches.

What always holds: a room holds one block, and then belongs to the taker; without rooms, clients wait. The receivers of
a shelf are used by one thread: they hand blocks over in the same memory.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from nic_offload.fabric import Endpoint, Fabric
    from nic_offload.lane import Lanes
    from nic_offload.sender import Area
    from nic_offload.shelf import Shelf

__all__ = ["CAME", "Came", "Receiver", "Room", "State", "packed_rooms"]

_ROOM = struct.Struct("=QII")
CAME = struct.Struct("=6Q5I4B32s16s16s")
_STATE = struct.Struct("=7Ii")
_ROOMS_AT_ONCE = 256
assert _ROOM.size == ffi.sizeof("struct tk_room")
assert CAME.size == ffi.sizeof("struct tk_came")
assert _STATE.size == ffi.sizeof("struct tk_receiver_state")


class Room(NamedTuple):
    """Pages for one block, the first for a header."""

    address: int
    pages: int
    number: int


def packed_rooms(rooms: Iterable[Room]) -> bytes:
    """Return rooms as receivers and shelves take them: an array of `tk_room`s."""
    return b"".join([_ROOM.pack(*room) for room in rooms])


class Came(NamedTuple):
    """A block that has arrived."""

    id: int
    address: int  # of its room's first page
    ack_generation: int
    expires_unix_ms: int
    landed_ns: int
    fired_ns: int  # when its flag was seen, by its client's clock; 0: an earlier version
    ack_word: int
    room: int
    length: int
    crc32c: int
    metadata_bytes: int  # the metadata ends at the room's second page, followed by the head
    durability: int
    listed: int
    is_stored: int  # its name is or may be stored: it is not listed, and a client that waits for `landed` has no answer
    under_way: int  # the number, from 1, of the lane that writes it; 0: none does
    key: bytes
    fingerprint: bytes
    domain: bytes  # its key encrypts the block; zeros: the owner's own


class State(NamedTuple):
    """The state of a receiver."""

    rooms: int  # of the size last requested
    wanted_pages: int  # that size; 0: nothing has arrived yet
    starved: int  # whether a put waits for a room, and none was given since
    differed: int  # puts refused since the last call, because other bytes arrived than were sent;
    taken: int  # because another block has the key;
    expired: int  # because the block expired before it arrived;
    unsaid: int  # because the put named no domain
    broken: int  # a code: an invalid put arrived, and nothing more is taken


class Receiver:
    """Receives the puts of a connection; closed when its endpoint is."""

    def __init__(
        self,
        fabric: Fabric,
        shelf: Shelf,
        endpoint: Endpoint,
        tag: int,
        peer: int,
        area: Area,
        length_max: int,
        owner: bytes,
        acks: tuple[int, int, int],
        codes: tuple[int, int, int, int, int],
        remote: tuple[int, int] = (0, 0),
        shared: bytes = b"",
        unsaid_code: int = 0,
    ) -> None:
        """`area` is in our own memory. `acks` are base, key and number of the client's words; `codes` are their codes.

        These are: landed; other bytes arrived than were sent; another block has the key; expired; written. `remote` is
        address and key by which the client names the flags; needed if the endpoint is sealed. `shared` is the client's
        name for its owner's own domain; a put that names no domain gets the word `unsaid_code`, unless that is 0.
        """
        setup = ffi.new("struct tk_receiver_setup *")
        setup.endpoint, setup.tag, setup.peer = endpoint.handle, tag, peer
        setup.flags, setup.slots, setup.slot_bytes = area.flags, area.slots, area.slot_bytes
        setup.first_generation, setup.slots_count = area.first_generation, area.slots_count
        setup.remote_flags, setup.remote_key = remote
        setup.length_max = length_max
        setup.ack_base, setup.ack_key, setup.ack_words = acks
        setup.landed_code, setup.differs_code, setup.taken_code, setup.expired_code, setup.written_code = (
            codes
        )
        setup.unsaid_code = unsaid_code
        ffi.memmove(setup.owner, owner, len(owner))
        ffi.memmove(setup.shared, shared, len(shared))
        out = ffi.new("struct tk_receiver **")
        code = lib.tk_receiver_open(shelf.handle, setup, out)
        if code:
            raise FabricError.from_code("Opening a receiver", code)
        self._fabric = fabric
        self._handle: Any = out[0]
        self._out = shelf.arrivals  # not one each: a node may have thousands of receivers
        self._state = ffi.new("struct tk_receiver_state *")

    def use(self, lanes: Lanes | None, *, is_limited: bool = False) -> None:
        """Hand arrivals from now on to lanes, or to none. `is_limited`: no more pages than they were lent."""
        self._lanes = lanes  # kept, because the core has their address
        lib.tk_receiver_use(self._handle, ffi.NULL if lanes is None else lanes.handle, is_limited)

    def lend(self, pages: int) -> None:
        """Let blocks take `pages` more on lanes, headers included."""
        lib.tk_receiver_lend(self._handle, pages)

    def recall(self) -> int:
        """Let blocks take no more pages, and return how many of the lent ones are left."""
        return int(lib.tk_receiver_recall(self._handle))

    def feed(self, rooms: Buffer) -> None:
        """Provide `packed_rooms`."""
        rows = ffi.from_buffer("struct tk_room[]", rooms)
        code = lib.tk_receiver_feed(self._handle, rows, len(rows))
        if code:
            raise FabricError.from_code("Giving room to blocks", code)

    def take(self, *, every: bool = True) -> tuple[list[Came], State]:
        """Take some of the arrived blocks that no lane writes; if the list is full there may be more.

        Without `every`, blocks that wait for a full lane stay.
        """
        count = lib.tk_receiver_take(self._handle, every, self._out, len(self._out), self._state)
        rows = CAME.iter_unpack(ffi.buffer(self._out, count * CAME.size))
        return list(map(Came._make, rows)), State._make(_STATE.unpack(ffi.buffer(self._state)))

    def rooms(self) -> list[int]:
        """Take unused rooms back; returns their numbers."""
        numbers: list[int] = []
        out = ffi.new("struct tk_room[]", _ROOMS_AT_ONCE)
        while count := lib.tk_receiver_rooms(self._handle, out, _ROOMS_AT_ONCE):
            numbers += [out[at].number for at in range(count)]
        return numbers

    def close(self) -> None:
        """Free it, after its endpoint was closed and everything was taken."""
        if self._handle is not None and not self._fabric.closed:
            lib.tk_receiver_close(self._handle)
        self._handle = None
