"""A reader: sends blocks from a drive to peers without the application (`reader.c`).

The application gives it records in batches: the place of each, the expected header, the pages to read it into, and
the destination of its payload. Each is then an operation like any other: it can be cancelled, and it ends with its
endpoint; a failure is reported. When all have ended, an event SENT has the batch's tag.

What always holds: nothing of a record is sent if its header or CRC is not the expected one. The pages of a batch, and
its extents on the drive, must not change until its READ has been reported, which may be before or after SENT.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.fabric import Fabric, Region
    from nic_offload.lane import RecordFormat
    from nic_offload.vault import RecordCipher

__all__ = ["SHARES", "Reader", "Reading"]

_READING = struct.Struct("=11Q5I4x32s16s16s")
SHARES = int(lib.TK_SHARED_PUT)
assert _READING.size == ffi.sizeof("struct tk_reading")


class Reading(NamedTuple):
    """A record to be read and put, field by field as in core.h."""

    tag: int
    endpoint: int  # its pointer
    peer: int
    address: int  # of the header's page, inside the region
    target: int
    target_key: int
    flag_target: int
    flag_key: int
    flag_value: int
    offset: int
    generation: int
    length: int
    crc32c: int
    skip: int
    part: int
    shares: int  # SHARES: the peer reads the payload itself, if it has our memory mapped; 0: it doesn't
    key: bytes
    owner: bytes
    fingerprint: bytes


class Reader:
    """The reader of a fabric and a drive; closed with the fabric."""

    def __init__(
        self,
        fabric: Fabric,
        drive_fd: int,
        depth: int,
        record: RecordFormat,
        cipher: RecordCipher | None = None,
    ) -> None:
        """At most `depth` reads are under way at a time. With a cipher it reads encrypted records, too."""
        setup = ffi.new("struct tk_reader_setup *")
        setup.fd, setup.depth = drive_fd, depth
        record.put_into(setup)
        if cipher is not None:
            setup.encryption = cipher.setup[0]
        self._cipher = cipher  # kept, because the core uses its vault
        out = ffi.new("struct tk_reader **")
        code = lib.tk_reader_open(fabric.handle, setup, out)
        if code:
            raise FabricError.from_code("Opening a reader of a drive", code)
        self._fabric = fabric
        self.handle: Any = out[0]

    def put(self, region: Region, tag: int, readings: Sequence[Reading]) -> None:
        """Read the records and put their payloads, all or none; READ and SENT will have this tag."""
        if self._fabric.closed:
            raise FabricError("The fabric is closed.")
        pack = _READING.pack
        rows = ffi.from_buffer("struct tk_reading[]", b"".join([pack(*one) for one in readings]))
        code = lib.tk_reader_put(self.handle, region.handle, tag, rows, len(readings))
        if code:
            raise FabricError.from_code(f"Reading {len(readings)} records", code)
