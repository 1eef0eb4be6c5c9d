"""A lane: writes landed blocks to a drive without a call of the application (`lane.c`).

The application lends a lane *ground*: pages, and generations for the records on them. Receivers that use the lane
give it the blocks they receive. It writes each block as a record, then notifies its peer, and then the application,
which adds the block to its index. The application doesn't know the block before, unless it asks (`under_way`).

What always holds: records are reported in the order of their generations, and only when all earlier ones are on the
drive. A record that `begun` counts was reported, has ended, or is found by the next `under_way`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError
from nic_offload.receiver import CAME, Came
from nic_offload.vault import KeyName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.fabric import Fabric
    from nic_offload.vault import RecordCipher

__all__ = ["NO_GROUND", "Ground", "Lane", "LaneState", "Lanes", "RecordFormat", "Written", "written_in"]

_WRITTEN = struct.Struct(f"{CAME.format}5Qi3I")
_TAKEN_MAX = 1024
_STATE = struct.Struct("=" + 3 * "QQII" + "III4x")
assert _STATE.size == ffi.sizeof("struct tk_lane_state")
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


class LaneState(NamedTuple):
    """What a lane has, and how many records it has begun there."""

    left: Ground  # of the ground in use; its generation tells which that is; 0: none yet
    next: Ground  # all of the ground it goes on to when a record doesn't fit; no pages: there is none
    before: Ground  # what was left of the ground before the one in use
    used: int  # records begun on the ground in use,
    used_before: int  # and on the one before
    wanted_pages: int  # by the largest block that waits for ground; 0: none does


NO_GROUND = LaneState(Ground(0, 0, 0, 0), Ground(0, 0, 0, 0), Ground(0, 0, 0, 0), 0, 0, 0)


class Written(NamedTuple):
    """A record that is on the drive, or never will be; from `under_way`, one that is being written."""

    came: Came  # the block, which its receiver doesn't report
    tag: int  # of that receiver
    generation: int
    offset: int
    ended_ns: int
    key_id: int
    result: int  # 0, or a negative errno
    is_answered: int  # the lane acknowledges it to its peer, if requested
    key_number: int
    was_reported: int  # `under_way` has returned it already

    @property
    def key(self) -> KeyName | None:
        """The key it was encrypted with, whatever key its domain has now; None: it is in the clear."""
        return KeyName(self.key_number - 1, self.key_id) if self.key_number else None


def written_in(rows: bytes) -> list[Written]:
    """Return records that a lane has returned, each a `struct tk_written`."""
    fields = len(Came._fields)
    return [Written(Came._make(row[:fields]), *row[fields:]) for row in _WRITTEN.iter_unpack(rows)]


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
        self._state = ffi.new("struct tk_lane_state *")

    @property
    def begun(self) -> int:
        """How many records it has begun."""
        return 0 if self._fabric.closed else int(lib.tk_lane_begun(self.handle))

    def state(self) -> LaneState:
        """Return what it has."""
        if self._fabric.closed:
            return NO_GROUND
        lib.tk_lane_state(self.handle, self._state)
        return self._read_state()

    def lend(self, ground: Ground) -> LaneState | None:
        """Set its next ground, in place of one there; return its state just before, or None if it has failed."""
        lent = ffi.new("struct tk_ground *", tuple(ground))
        if self._fabric.closed or lib.tk_lane_lend(self.handle, lent, self._state):
            return None
        return self._read_state()

    def seal(self) -> LaneState | None:
        """Take all its ground back; return its state just before, or None if the fabric is closed."""
        if self._fabric.closed:
            return None
        lib.tk_lane_seal(self.handle, self._state)
        return self._read_state()

    def _read_state(self) -> LaneState:
        words = _STATE.unpack(ffi.buffer(self._state))
        return LaneState(Ground(*words[:4]), Ground(*words[4:8]), Ground(*words[8:12]), *words[12:])

    def expect(self, *, ground: bool) -> None:
        """Say whether more ground will come: then blocks that find too little of it wait, and an event tells of it."""
        if not self._fabric.closed:
            lib.tk_lane_expect(self.handle, ground)

    def clear(self, generation: int) -> None:
        """Let it report records below this generation: all lower ones that are not its own are on the drive."""
        if not self._fabric.closed:
            lib.tk_lane_clear(self.handle, generation)

    def fail(self) -> None:
        """Begin no more writes and acknowledge nothing: later blocks are not kept."""
        if not self._fabric.closed:
            lib.tk_lane_fail(self.handle)

    def take(self) -> bytes:
        """Take some of the records that have ended, for `written_in`; none if there are none."""
        return self._rows(lib.tk_lane_take)

    def under_way(self) -> bytes:
        """Return some of the records under way that were not returned before; only their blocks and tags are valid."""
        return self._rows(lib.tk_lane_under_way)

    def _rows(self, take: Any) -> bytes:
        if self._fabric.closed:
            return b""
        count = take(self.handle, self._out, _TAKEN_MAX)
        return bytes(ffi.buffer(self._out, count * _WRITTEN.size))


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
