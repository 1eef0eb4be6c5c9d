"""Pieces of registered memory that are one block's bytes, in order: an engine's pages (`pieces.c`).

A put gathers them when it fires, into one run that its NIC sends; a get scatters the block once it has arrived.
Pieces are listed in an array, so thousands of them cost no Python object each.

What always holds: each piece is inside one of the regions, and the pieces never change. While a put of them is
queued, their regions can't be closed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

    from nic_offload.fabric import Region

__all__ = ["Pieces", "pieces_said", "scatter"]

_PIECE = struct.Struct("=IIQ")
assert _PIECE.size == ffi.sizeof("struct tk_piece")


class Pieces:
    """The pieces of a block. Their memory is freed when neither this object nor a put of the fabric uses it."""

    def __init__(self, regions: Sequence[Region], rows: Buffer, *, handles: Any = None) -> None:
        """`rows` has 16 bytes for each piece: which of the regions it is in (4), its length (4), its offset (8)."""
        self.regions = regions if isinstance(regions, tuple) else tuple(regions)
        handles = _handles_of(self.regions) if handles is None else handles
        table = ffi.from_buffer("struct tk_piece[]", rows)
        out = ffi.new("struct tk_pieces **")
        code = lib.tk_pieces_open(handles, len(self.regions), table, len(table), out)
        if code:
            raise FabricError.from_code(f"Naming {len(table)} pieces of registered memory", code)
        self._handle: Any = ffi.gc(out[0], lib.tk_pieces_close)
        self.pointer = int(ffi.cast("uintptr_t", self._handle))
        self.length = int(lib.tk_pieces_bytes(self._handle))

    def gathered(self) -> bytearray:
        """A copy of their current bytes, in their order."""
        copy = bytearray(self.length)
        lib.tk_gather(self._handle, ffi.from_buffer(copy))
        return copy

    @classmethod
    def each(cls, regions: Sequence[Region], tables: Iterable[Buffer]) -> list[Pieces]:
        """The same for many blocks in the same regions."""
        shared = tuple(regions)
        handles = _handles_of(shared)
        return [cls(shared, rows, handles=handles) for rows in tables]

    @classmethod
    def of(cls, region: Region, pieces: Iterable[tuple[int, int]]) -> Pieces:
        """Pieces of one region, each an offset and a length."""
        return cls([region], b"".join([_PIECE.pack(0, length, offset) for offset, length in pieces]))


def pieces_said(rows: Buffer) -> list[tuple[int, int, int]]:
    """Decode such an array: for each piece the number of its region, its length, its offset."""
    return list(_PIECE.iter_unpack(rows))


def _handles_of(regions: Sequence[Region]) -> Any:
    return ffi.new("struct tk_region *[]", [region.handle or ffi.NULL for region in regions])


def scatter(blocks: Sequence[tuple[Pieces, int]]) -> None:
    """Copy blocks, each from its address, into their pieces, in one call without the GIL."""
    rows = ffi.new("struct tk_scattered[]", len(blocks))
    for row, (pieces, source) in zip(rows, blocks, strict=True):
        row.pieces = ffi.cast("struct tk_pieces *", pieces.pointer)
        row.source = source
    lib.tk_scatter(rows, len(blocks))
