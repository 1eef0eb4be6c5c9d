"""A client's calls to its node over the fabric, each in one step of the C core (`caller.c`).

What always holds: a call is begun completely or not at all. If all places are in use it waits in order, behind at
most `WAITING` others. A place is reused after its answer: an answer that is only DONE frees it at once, an answer
with bytes when they have been read.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError
from nic_offload.memory import address_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from nic_offload.fabric import Endpoint, Region
    from nic_offload.group import Group

__all__ = ["PLACES", "WAITING", "WAITING_BYTES", "Call", "Caller"]

PLACES = int(lib.TK_CALL_PLACES)
WAITING = int(lib.TK_CALLS_WAITING)
WAITING_BYTES = int(lib.TK_CALLS_WAITING_BYTES)
_CALL = struct.Struct("=5Q4I4B16s4x")
assert _CALL.size == ffi.sizeof("struct tk_call")


class Call(NamedTuple):
    """A request without its metadata and its rows of blocks: see `struct tk_call` in attached.h."""

    tag: int
    deadline_ns: int
    blocks_deadline_ns: int
    expires_unix_ms: int
    group: Group
    row: int
    blocks: int
    lease_ms: int
    kind: int
    flags: int
    durability: int
    good_code: int
    fingerprint: bytes


class Caller:
    """Calls over a connection; closed when its endpoint is."""

    def __init__(
        self,
        endpoint: Endpoint,
        region: Region,
        peer: int,
        area: tuple[int, int],
        words: int,
        calls: int,
        answers: int,
        first_generation: int,
        ack_words: Sequence[int],
    ) -> None:
        """`area` says where the node's places are, and their key; `words`, `calls`, `answers` are addresses of ours."""
        setup = ffi.new(
            "struct tk_caller_setup *",
            {
                "endpoint": endpoint.handle,
                "region": region.handle,
                "peer": peer,
                "area": area[0],
                "area_key": area[1],
                "words": words,
                "calls": calls,
                "answers": answers,
                "first_generation": first_generation,
                "ack_words": ack_words,
            },
        )
        out = ffi.new("struct tk_caller **")
        code = lib.tk_caller_open(setup, out)
        if code:
            raise FabricError.from_code("Opening a caller", code)
        self._handle: Any = out[0]

    def share(
        self,
        memory: mmap.mmap,
        served_code: int,
        scattered_code: int,
        corrupt_code: int,
        late_code: int,
        rows: int = 0,
        rows_count: int = 0,
    ) -> None:
        """Allow reading blocks from the node's memory, which stays mapped here until this is closed.

        `rows`: the address of the rows in which the node gives locations of single blocks, and stores words, of our
        first `rows_count` words; 0: there are none.
        The codes of a group's row for such a block: it was read; read into its pieces as well; corrupt; too late.
        """
        shared = ffi.new("struct tk_shared *")
        shared.address, shared.length, shared.hold_ns = address_of(memory), len(memory), lib.TK_HELD_NS
        shared.rows, shared.rows_count = rows, rows_count
        shared.served_code, shared.scattered_code = served_code, scattered_code
        shared.corrupt_code, shared.late_code = corrupt_code, late_code
        lib.tk_caller_share(self._handle, shared)

    @property
    def shared_blocks(self) -> int:
        """How many blocks were read from the node's memory."""
        return int(lib.tk_caller_shared(self._handle))

    def call(self, call: Call, metadata: bytes, rows: bytes, wanted: Sequence[int] | None = None) -> int:
        """Make a call, now or when a place is free; a negative code if it can't be made this way.

        `wanted`: for each block of a fetch its destination in our own memory, and the pointer of the pieces into which
        it is copied if it can be read from the node's memory (0: none).
        """
        packed = _CALL.pack(
            call.tag,
            call.deadline_ns,
            call.blocks_deadline_ns,
            call.expires_unix_ms,
            call.group.pointer,
            call.row,
            call.blocks,
            len(metadata),
            call.lease_ms,
            call.kind,
            call.flags,
            call.durability,
            call.good_code,
            call.fingerprint,
        )
        whole = ffi.from_buffer("struct tk_call[]", packed)
        numbers = ffi.NULL if wanted is None else ffi.new("uint64_t[]", wanted)
        table = ffi.cast("struct tk_wanted *", numbers)
        return int(lib.tk_caller_call(self._handle, whole, metadata, rows, len(rows), table))

    @property
    def free_places(self) -> int:
        """How many calls would go out at once."""
        return int(lib.tk_caller_free(self._handle))

    def answer(self, tag: int) -> tuple[int, int] | None:
        """The place and generation of the bytes that answer the call of this tag; None: there are none."""
        generation = ffi.new("uint64_t *")
        place = int(lib.tk_caller_answer(self._handle, tag, generation))
        return None if place < 0 else (place, int(generation[0]))

    def read(self, tag: int) -> None:
        """Free the place of this call: its answer has been read."""
        lib.tk_caller_read(self._handle, tag)

    def close(self) -> None:
        """Free it, after its endpoint was closed."""
        if self._handle is not None:
            lib.tk_caller_close(self._handle)
            self._handle = None
