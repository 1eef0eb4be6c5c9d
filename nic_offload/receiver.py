"""Blocks put with grants: the node's side of one connection (`receiver.c`).

Each block is read once from its slot, into a room that was provided in advance, and can be read from there, on the
shelf, before its client is told that it landed. Received blocks are taken in batches.

What always holds: a room holds one block, and then belongs to the taker; without rooms, clients wait.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.fabric import Endpoint, Fabric
    from nic_offload.lane import Lanes
    from nic_offload.sender import Area
    from nic_offload.shelf import Shelf

__all__ = ["Came", "Receiver", "Room", "State"]

_ROOM = struct.Struct("=QII")
_CAME = struct.Struct("=6Q5I4B32s16s16s")
_STATE = struct.Struct("=7Ii")
_TAKEN_MAX = 256
assert _ROOM.size == ffi.sizeof("struct tk_room")
assert _CAME.size == ffi.sizeof("struct tk_came")
assert _STATE.size == ffi.sizeof("struct tk_receiver_state")


class Room(NamedTuple):
    """Pages for one block, the first for a header."""

    address: int
    pages: int
    number: int


class Came(NamedTuple):
    """A block that has come."""

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
    metadata_bytes: int  # which are before the room's second page, followed by the head
    durability: int
    listed: int
    is_stored: int  # or may be: not listed, and a client that wants to hear `landed` has not heard it
    under_way: int  # to a drive, by the lane of this number, from 1 on; 0: by none
    key: bytes
    fingerprint: bytes
    domain: bytes  # whose key it is encrypted with; zeros: its owner's own


class State(NamedTuple):
    """How a receiver stands."""

    rooms: int  # of the size that was wanted last
    wanted_pages: int  # that size; 0: nothing has come yet
    starved: int  # whether a put waits for one, and none was given since
    differed: int  # how many were refused since then: other bytes came than were sent;
    taken: int  # another block has the key;
    expired: int  # its life was over before it came;
    unsaid: int  # it named no domain
    broken: int  # a code: what came was no put, and nothing more is taken


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
        told: tuple[int, int] = (0, 0),
        shared: bytes = b"",
        unsaid_code: int = 0,
    ) -> None:
        """`area` is in our own memory. `acks` are base, key and number of the client's words; `codes` what they say.

        That is: landed; other bytes came than were sent; another block has the key; its life was over; written. `told`
        is what the client calls the flags, address and key; needed where the endpoint is sealed. `shared` is as which
        domain it names its owner's own; a put that names none gets the word `unsaid_code`, unless that is 0.
        """
        setup = ffi.new("struct tk_receiver_setup *")
        setup.endpoint, setup.tag, setup.peer = endpoint.handle, tag, peer
        setup.flags, setup.slots, setup.slot_bytes = area.flags, area.slots, area.slot_bytes
        setup.first_generation, setup.slots_count = area.first_generation, area.slots_count
        setup.told_flags, setup.told_key = told
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
        self._out = ffi.new("struct tk_came[]", _TAKEN_MAX)
        self._state = ffi.new("struct tk_receiver_state *")

    def use(self, lanes: Lanes | None, *, is_limited: bool = False) -> None:
        """Hand arrivals from now on to lanes, or to none. `is_limited`: no more than they were lent pages for."""
        self._lanes = lanes  # of which the core has the address
        lib.tk_receiver_use(self._handle, ffi.NULL if lanes is None else lanes.handle, is_limited)

    def lend(self, pages: int) -> None:
        """Let blocks take so many more pages on lanes, headers included."""
        lib.tk_receiver_lend(self._handle, pages)

    def recall(self) -> int:
        """Let them take no more, and return what is left of what was lent."""
        return int(lib.tk_receiver_recall(self._handle))

    def feed(self, rooms: Sequence[Room]) -> None:
        """Grant it slots."""
        packed = ffi.from_buffer("struct tk_room[]", b"".join([_ROOM.pack(*room) for room in rooms]))
        code = lib.tk_receiver_feed(self._handle, packed, len(rooms))
        if code:
            raise FabricError.from_code("Giving room to blocks", code)

    def take(self, *, every: bool = True) -> tuple[list[Came], State]:
        """Take some of the arrived blocks; if the list is full there may be more.

        Not `every`: those that wait for a lane, which is full, are left to it.
        """
        count = lib.tk_receiver_take(self._handle, every, self._out, _TAKEN_MAX, self._state)
        rows = _CAME.iter_unpack(ffi.buffer(self._out, count * _CAME.size))
        return list(map(Came._make, rows)), State._make(_STATE.unpack(ffi.buffer(self._state)))

    def rooms(self) -> list[int]:
        """Take back what is unused; the rooms' numbers."""
        numbers: list[int] = []
        out = ffi.new("struct tk_room[]", _TAKEN_MAX)
        while count := lib.tk_receiver_rooms(self._handle, out, _TAKEN_MAX):
            numbers += [out[at].number for at in range(count)]
        return numbers

    def close(self) -> None:
        """Its endpoint is closed; nothing lies in it any more."""
        if self._handle is not None and not self._fabric.closed:
            lib.tk_receiver_close(self._handle)
        self._handle = None
