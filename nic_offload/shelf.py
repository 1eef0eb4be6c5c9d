"""The shelf and its desks: blocks that the C core sends on request, without Python.

A `Shelf` lists blocks of one registered region by owner and name. A peer's calls arrive at a `Desk`. Calls that
request only blocks on the shelf are answered by the progress thread: each block is sent if its checksum still
matches, followed by its acknowledgement. Calls for blocks whose places on the drives are known are answered too, if
there are rooms for readers (`nic_offload.reader`) to read them into, and so are look-ups of blocks that are all listed.
All other calls are landings, as without a desk.

What always holds: a block that is not listed is not sent; `take` says whether a block's memory may be reused; an
answered call is reported once, by `served`, and if these reports aren't fetched, calls go to the application again.
The caller decides whether a block may be sent, and must unlist it as soon as it may not; that ends its place as well.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError
from nic_offload.memory import address_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from nic_offload.fabric import Endpoint, Fabric, Region
    from nic_offload.reader import Reader

__all__ = [
    "IN_MEMORY",
    "RENAMED_USED",
    "ColdCall",
    "ColdRow",
    "Desk",
    "Served",
    "Shelf",
    "Shelved",
    "directory_bytes",
    "place_of",
]

_SHELVED = struct.Struct("=16s32s16sQQII")
_SERVED = struct.Struct("=4Q8I")
_COLD_HEAD = struct.Struct("=16sI4x")
_COLD_ROW = struct.Struct("=32s2I3Q3Ii")
assert _SHELVED.size == ffi.sizeof("struct tk_shelved")
assert _SERVED.size == ffi.sizeof("struct tk_served")
assert _COLD_HEAD.size == ffi.sizeof("struct tk_cold_head")
assert _COLD_ROW.size == ffi.sizeof("struct tk_cold_row")
_SERVED_BYTES = 1 << 20
_ROOMS_AT_ONCE = 256
_ARRIVALS_AT_ONCE = 256
_NAME_BYTES = 48
_PLACE_BYTES = ffi.sizeof("struct tk_place")
_WORD_MASK = (1 << 64) - 1
IN_MEMORY = (1 << 32) - 1
RENAMED_USED = int(lib.TK_RENAMED_USED)


def directory_bytes(blocks: int) -> int:
    """The size of a directory with a slot for each of so many blocks, rounded up."""
    slots = 1 << max(blocks - 1, 1023).bit_length()
    return int(lib.TK_DIRECTORY_HEAD_BYTES) + slots * int(lib.TK_DIRECTORY_SLOT_BYTES)


class Shelved(NamedTuple):
    """A block that may be requested."""

    owner: bytes
    key: bytes
    fingerprint: bytes
    id: int  # never used for another block
    address: int
    length: int
    crc32c: int


class ColdRow(NamedTuple):
    """A block of a call that was answered from the drives."""

    key: bytes
    length: int
    ack_word: int
    ack_generation: int
    target: int
    target_key: int
    skip: int
    part: int
    room: int  # where it was read into, or IN_MEMORY
    status: int  # 0, or why it was not sent: then the application has to send it, unless it was cancelled (-ECANCELED)


class ColdCall(NamedTuple):
    """What such a call requested."""

    fingerprint: bytes
    shares: bool  # its client accepts locations of single blocks in our memory
    rows: Sequence[ColdRow]


class Served(NamedTuple):
    """A call that was answered, all of it over."""

    desk: int  # its tag
    began_ns: int
    ended_ns: int
    size_bytes: int
    blocks: int
    ids: Sequence[int]  # of these; none of a look-up, which sends nothing
    is_prefix: bool  # it was a look-up
    metadata: bytes
    corrupt: int  # blocks that were found corrupt: their caller got a miss
    failed: int  # blocks of which it is not known whether they arrived
    cold: ColdCall | None  # None: all blocks were in memory


def place_of(drive: Any, page: Any, generation: Any) -> Any:
    """Return the place, as in `tk_place`, of a record on the drive of this number; or of many, in arrays of words."""
    return page | drive << lib.TK_PLACE_DRIVE_BIT | (generation << lib.TK_PLACE_GENERATION_BIT) & _WORD_MASK


class Shelf:
    """The shelf of a fabric; closed with it."""

    def __init__(self, fabric: Fabric, region: Region) -> None:
        out = ffi.new("struct tk_shelf **")
        code = lib.tk_shelf_open(fabric.handle, region.handle, out)
        if code:
            raise FabricError.from_code("Opening a shelf", code)
        self._fabric = fabric
        self.handle: Any = out[0]
        self._served = ffi.new("char[]", _SERVED_BYTES)
        self.has_more = False  # for `served`
        self.arrivals: Any = ffi.new("struct tk_came[]", _ARRIVALS_AT_ONCE)  # taken from any one receiver

    def __len__(self) -> int:
        return 0 if self._fabric.closed else int(lib.tk_shelf_count(self.handle))

    @property
    def came(self) -> int:
        """The number of blocks ever received by receivers: each is counted before it is acknowledged."""
        return 0 if self._fabric.closed else int(lib.tk_shelf_came(self.handle))

    def waiting(self, at_most: int) -> list[int]:
        """The tags of receivers with blocks to take, among them all blocks that `came` counts; cheap, no lock."""
        tags = ffi.new("uint64_t[]", at_most)
        count = 0 if self._fabric.closed else lib.tk_shelf_waiting(self.handle, tags, at_most)
        return list(tags[0:count])

    def put(self, blocks: Sequence[Shelved]) -> None:
        """List blocks; a block replaces one of the same owner and key."""
        if self._fabric.closed:  # a node's last reads from the drive end after its fabric
            return
        rows = ffi.from_buffer("struct tk_shelved[]", b"".join([_SHELVED.pack(*block) for block in blocks]))
        code = lib.tk_shelf_put(self.handle, rows, len(blocks))
        if code:
            raise FabricError.from_code(f"Putting {len(blocks)} blocks on the shelf", code)

    def unlist(self, names: bytes, *, others_only: bool = False) -> None:
        """Stop sending blocks, given by owner and key, and forget their places.

        `others_only`: blocks that have landed and have not been renamed yet stay, and so do the places.
        """
        if not self._fabric.closed:
            lib.tk_shelf_unlist(self.handle, names, len(names) // _NAME_BYTES, others_only)

    def take(self, ids: Sequence[int]) -> list[bool]:
        """Stop sending blocks; returns of each whether its memory may be reused now."""
        count = len(ids)
        if self._fabric.closed or not count:
            return [True] * count
        free = ffi.new("uint8_t[]", count)
        lib.tk_shelf_take(
            self.handle, ffi.from_buffer("uint64_t[]", struct.pack(f"={count}Q", *ids)), count, free
        )
        return [one == 1 for one in ffi.unpack(free, count)]

    @property
    def uses(self) -> tuple[int, int]:
        """The C function that `take` calls, and its first argument, while the fabric is open."""
        function = ffi.addressof(lib, "tk_shelf_take")
        return int(ffi.cast("uintptr_t", function)), int(ffi.cast("uintptr_t", self.handle))

    def rename(self, ids: Buffer, new_ids: Buffer) -> bytes:
        """Give blocks other ids, all in words of 64 bits.

        Returns 0 for each that is not known, or whose new id is in use; RENAMED_USED for those with which calls were
        answered under the ids that they had landed with. `served` reports other uses.
        """
        olds, news = (ffi.from_buffer("uint64_t[]", some) for some in (ids, new_ids))
        count = len(olds)
        if self._fabric.closed or not count:
            return bytes(count)
        done = ffi.new("uint8_t[]", count)
        lib.tk_shelf_rename(self.handle, olds, news, count, done)
        return bytes(ffi.buffer(done))

    def stored(self, names: bytes, *, are_stored: bool) -> None:
        """Note names, owner and key of each, under which something is stored from now on, or no longer.

        A block that arrives under a stored name is not listed, nor acknowledged before its bytes were compared.
        """
        if not self._fabric.closed:
            lib.tk_shelf_stored(self.handle, names, len(names) // _NAME_BYTES, are_stored)

    def share(self, memory: mmap.mmap) -> None:
        """List its blocks there too, for clients that map it: `directory_bytes`, zeroed. The shelf is empty."""
        code = lib.tk_shelf_share(self.handle, ffi.cast("void *", address_of(memory)), len(memory))
        if code:
            raise FabricError.from_code("Sharing the directory of a node's memory", code)

    def use_readers(self, readers: Mapping[int, Reader], tag: int, bytes_max: int) -> None:
        """Answer calls from these drives, with up to `bytes_max` being read at a time; events CAME have this tag."""
        setup = ffi.new("struct tk_cold_setup *")
        for number, reader in readers.items():
            setup.readers[number] = reader.handle
        setup.tag, setup.bytes_max = tag, bytes_max
        lib.tk_shelf_use_readers(self.handle, setup)

    def place(self, rows: bytes) -> None:
        """Note where names are stored: owner, key and `place_of` of each, in eight bytes."""
        if not self._fabric.closed:
            places = ffi.from_buffer("struct tk_place[]", rows)
            lib.tk_shelf_place(self.handle, places, len(rows) // _PLACE_BYTES)

    def feed(self, rooms: Buffer) -> None:
        """Give it `packed_rooms` to read blocks into, of one size, which must not be below that of the rooms it has."""
        rows = ffi.from_buffer("struct tk_room[]", rooms)
        code = lib.tk_shelf_feed(self.handle, rows, len(rows))
        if code:
            raise FabricError.from_code("Giving rooms to a shelf", code)

    def rooms(self) -> list[int]:
        """Take its unused rooms back; returns their numbers."""
        numbers: list[int] = []
        out = ffi.new("struct tk_room[]", _ROOMS_AT_ONCE)
        while not self._fabric.closed and (count := lib.tk_shelf_rooms(self.handle, out, _ROOMS_AT_ONCE)):
            numbers += [out[at].number for at in range(count)]
        return numbers

    @property
    def wanted(self) -> tuple[int, int]:
        """The pages of the room last requested, 0 if none was, and how many rooms of that size it has."""
        state = ffi.new("struct tk_cold_state *")
        if not self._fabric.closed:
            lib.tk_shelf_cold_state(self.handle, state)
        return state.wanted_pages, state.rooms

    def open_desk(
        self,
        endpoint: Endpoint,
        peer: int,
        owner: bytes,
        tag: int,
        acks: tuple[int, int, int],
        codes: tuple[int, int],
        bytes_max: int,
        places: tuple[int, int],
        *,
        shares: bool,
    ) -> Desk:
        """Open a desk for one peer. `acks` are base, key and number of its words; `codes` mean served, and corrupt.

        `places` are the address of the first flag of its calls, and where it reads answers. If it `shares`, the peer
        has the region mapped, and gets locations of blocks if it requests them.
        """
        setup = ffi.new("struct tk_desk_setup *")
        setup.endpoint, setup.peer, setup.tag = endpoint.handle, peer, tag
        setup.ack_base, setup.ack_key, setup.ack_words = acks
        setup.served_code, setup.corrupt_code = codes
        setup.bytes_max, setup.shares = bytes_max, shares
        setup.flags, setup.answers = places
        ffi.memmove(setup.owner, owner, len(owner))
        out = ffi.new("struct tk_desk **")
        code = lib.tk_desk_open(self.handle, setup, out)
        if code:
            raise FabricError.from_code("Opening a desk", code)
        return Desk(self._fabric, out[0])

    def served(self) -> Iterator[Served]:
        """The calls that were answered since the last time, and the direct reads noted by now.

        Those that come while these are being processed are left: then `has_more` is set at the end.
        """
        begins, count = True, 1
        while not self._fabric.closed:
            count = lib.tk_served_take(self.handle, self._served, _SERVED_BYTES, begins)
            if count <= 0:
                break
            begins = False
            yield from _served_in(bytes(ffi.buffer(self._served, count)))
        self.has_more = count < 0


def _served_in(data: bytes) -> Iterator[Served]:
    at = 0
    while at < len(data):
        (
            desk,
            began_ns,
            ended_ns,
            size_bytes,
            length,
            blocks,
            metadata_bytes,
            corrupt,
            failed,
            cold,
            is_prefix,
            _,
        ) = _SERVED.unpack_from(data, at)
        ids_at = at + _SERVED.size
        ids = 0 if is_prefix else blocks
        metadata_at = ids_at + 8 * ids
        rows_at = metadata_at + metadata_bytes
        yield Served(
            desk,
            began_ns,
            ended_ns,
            size_bytes,
            blocks,
            struct.unpack_from(f"={ids}Q", data, ids_at),
            bool(is_prefix),
            data[metadata_at:rows_at],
            corrupt,
            failed,
            _cold_in(data[rows_at : at + length]) if cold else None,
        )
        at += length


def _cold_in(data: bytes) -> ColdCall:
    fingerprint, shares = _COLD_HEAD.unpack_from(data)
    rows = _COLD_ROW.iter_unpack(data[_COLD_HEAD.size :])
    return ColdCall(fingerprint, bool(shares), list(map(ColdRow._make, rows)))


class Desk:
    """Where one peer's calls arrive. It leaves all of them to the application until `answers` is set."""

    def __init__(self, fabric: Fabric, handle: Any) -> None:
        self._fabric = fabric
        self.handle = handle
        self.pointer = int(ffi.cast("uintptr_t", handle))

    def answers(self, *, answers: bool) -> None:
        """Set whether it answers what it can."""
        lib.tk_desk_answers(self.handle, answers)

    def log(self, address: int) -> None:
        """Let the peer read blocks directly, and note that in this log, `direct.LOG_BYTES` long; 0: no longer."""
        lib.tk_desk_log(self.handle, ffi.cast("void *", address))

    def cancel(self, generations: Sequence[int]) -> int:
        """Stop sending blocks that are being read, by their words' generations; returns how many were not sent."""
        count = lib.tk_desk_cancel(
            self._fabric.handle, self.handle, ffi.new("uint64_t[]", list(generations)), len(generations)
        )
        if count < 0:
            raise FabricError.from_code("Cancelling what a desk reads", count)
        return int(count)

    def close(self) -> None:
        """Free it, after its endpoint was closed."""
        if not self._fabric.closed:
            lib.tk_desk_close(self.handle)
        self.pointer = 0
