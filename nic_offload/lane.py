"""A lane: writes landed blocks to a drive without a call of the application (`lane.c`).

The application lends a lane *ground*: pages, and generations for the records on them. Receivers that use the lane
give it the blocks they receive. It writes each block as a record, then notifies its peer, and then the application,
which adds the block to its index.

What always holds: records are reported in the order of their generations, and only when all earlier ones are on the
drive.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError
from nic_offload.vault import KeyName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.fabric import Fabric
    from nic_offload.vault import RecordCipher

__all__ = ["Ground", "Lane", "Lanes", "RecordFormat", "Written"]

_WRITTEN = struct.Struct("=6QiII4x")
_TAKEN_MAX = 256
assert _WRITTEN.size == ffi.sizeof("struct tk_written")


class RecordFormat(NamedTuple):
    """The first fields of a record's header, and the key and name of its tag."""

    magic: bytes
    version: int
    kind: int
    secret: bytes
    name: bytes

    def put_into(self, setup: Any) -> None:
        """Write it into the setup of a lane or a reader."""
        setup.version, setup.kind = self.version, self.kind
        ffi.memmove(setup.magic, self.magic, len(self.magic))
        ffi.memmove(setup.secret, self.secret, len(self.secret))
        ffi.memmove(setup.name, self.name, len(self.name))


class Ground(NamedTuple):
    """Contiguous pages, and a generation for each record that fits there."""

    page: int
    generation: int
    pages: int
    records: int


class Written(NamedTuple):
    """A record that is on the drive, or never will be."""

    id: int  # as its receiver reported it
    tag: int  # of that receiver
    generation: int
    offset: int
    ended_ns: int
    key_id: int
    result: int  # 0, or a negative errno
    is_answered: int  # the lane acknowledges it to its peer, if requested
    key_number: int

    @property
    def key(self) -> KeyName | None:
        """The key it was encrypted with, whatever key its domain has now; None: it is in the clear."""
        return KeyName(self.key_number - 1, self.key_id) if self.key_number else None


class Lane:
    """The lane of a fabric and a drive; closed with the fabric."""

    def __init__(
        self,
        fabric: Fabric,
        tag: int,
        drive_fd: int,
        depth: int,
        bytes_max: int,
        record: RecordFormat,
        cipher: RecordCipher | None = None,
    ) -> None:
        """`tag` is that of its events; at most `depth` writes are under way at a time, and about `bytes_max` bytes.

        With a cipher it writes encrypted records, and takes no block whose domain's key is not in the vault.
        """
        setup = ffi.new("struct tk_lane_setup *")
        setup.tag, setup.fd, setup.depth, setup.bytes_max = tag, drive_fd, depth, bytes_max
        record.put_into(setup)
        if cipher is not None:
            setup.encryption = cipher.setup[0]
        self._cipher = cipher  # kept, because the core uses its vault
        out = ffi.new("struct tk_lane **")
        code = lib.tk_lane_open(fabric.handle, setup, out)
        if code:
            raise FabricError.from_code("Opening a lane to a drive", code)
        self._fabric = fabric
        self.handle: Any = out[0]
        self._out = ffi.new("struct tk_written[]", _TAKEN_MAX)
        self._left = ffi.new("struct tk_ground *")
        self._used = ffi.new("uint32_t *")

    @property
    def begun(self) -> int:
        """How many records it has begun."""
        return 0 if self._fabric.closed else int(lib.tk_lane_begun(self.handle))

    def lend(self, ground: Ground) -> tuple[int, Ground] | None:
        """Replace its ground, and return the old one as `seal` does; None if it has failed."""
        lent = ffi.new("struct tk_ground *", tuple(ground))
        if self._fabric.closed or lib.tk_lane_lend(self.handle, lent, self._left, self._used):
            return None
        return self._used[0], self._ground_left()

    @property
    def left(self) -> Ground:
        """The ground that it has not used."""
        if self._fabric.closed:
            return Ground(0, 0, 0, 0)
        lib.tk_lane_left(self.handle, self._left)
        return self._ground_left()

    def _ground_left(self) -> Ground:
        left = self._left
        return Ground(left.page, left.generation, left.pages, left.records)

    def clear(self, generation: int) -> None:
        """Let it report records below this generation: all lower ones that are not its own are on the drive."""
        if not self._fabric.closed:
            lib.tk_lane_clear(self.handle, generation)

    def seal(self) -> tuple[int, Ground]:
        """Take its ground back; returns how many records are, or will be, on it, and the rest."""
        if self._fabric.closed:
            return 0, Ground(0, 0, 0, 0)
        used = int(lib.tk_lane_seal(self.handle, self._left))
        return used, self._ground_left()

    def fail(self) -> None:
        """Begin no more writes and acknowledge nothing: later blocks are not kept."""
        if not self._fabric.closed:
            lib.tk_lane_fail(self.handle)

    def take(self) -> list[Written]:
        """Take some of the records that have ended; if the list is full there may be more."""
        if self._fabric.closed:
            return []
        count = lib.tk_lane_take(self.handle, self._out, _TAKEN_MAX)
        rows = _WRITTEN.iter_unpack(ffi.buffer(self._out, count * _WRITTEN.size))
        return list(map(Written._make, rows))


class Lanes:
    """The lanes of a store's drives, in their order; None for a drive without one."""

    def __init__(self, lanes: Sequence[Lane | None], homes: bytes) -> None:
        """`homes` has the position of the drive of each lot."""
        assert len(homes) == lib.TK_LOTS, "a home for each lot"
        assert max(homes) < len(lanes) <= lib.TK_DRIVES_MAX, "homes are drives"
        self.handle: Any = ffi.new("struct tk_lanes *")
        for at, lane in enumerate(lanes):
            self.handle.lanes[at] = ffi.NULL if lane is None else lane.handle
        ffi.memmove(self.handle.homes, homes, len(homes))
