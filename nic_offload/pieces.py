"""Pieces of registered memory that are one block's bytes, in order: an engine's pages (`pieces.c`).

A put gathers them when it fires, into one run that its NIC sends; a get scatters the block once it has arrived.
Pieces are listed in an array, so thousands of them cost no Python object each.

What always holds: each piece is inside one of the regions, and the pieces never change. While a put of them is
queued, their regions can't be closed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from nic_offload.fabric import Region

__all__ = ["Pieces", "pieces_said", "scatter"]

_PIECE = struct.Struct("=IIQ")
_ROWS = f"The rows of pieces are bytes, {_PIECE.size} for each piece."
assert _PIECE.size == ffi.sizeof("struct tk_piece")


class Pieces:
    """The pieces of a block. Their memory is freed when neither this object nor a put of the fabric uses it.

    >>> from nic_offload.pieces import Pieces
    >>> pieces = Pieces.of(kv, [(0, 2048), (8192, 2048)])
    >>> pieces.length
    4096
    """

    def __init__(self, regions: Sequence[Region], rows: Buffer) -> None:
        """`rows` has 16 bytes for each piece: which of the regions it is in (4), its length (4), its offset (8)."""
        self._open(regions, _handles_of(regions), rows)

    def _open(self, regions: Sequence[Region], handles: Any, rows: Buffer) -> Self:
        self.regions = tuple(regions)
        try:
            table = ffi.from_buffer("struct tk_piece[]", rows)
        except (BufferError, TypeError, ValueError):
            raise InvalidArgument(_ROWS) from None
        out = ffi.new("struct tk_pieces **")
        code = lib.tk_pieces_open(handles, len(self.regions), table, len(table), out)
        if code:
            raise FabricError.from_code(f"Naming {len(table)} pieces of registered memory", code)
        self._handle: Any = ffi.gc(out[0], lib.tk_pieces_close)
        self.pointer = int(ffi.cast("uintptr_t", self._handle))
        self.length = int(lib.tk_pieces_bytes(self._handle))
        return self

    def gathered(self) -> bytearray:
        """A copy of their current bytes, in their order.

        >>> len(pieces.gathered())
        4096
        """
        copy = bytearray(self.length)
        lib.tk_gather(self._handle, ffi.from_buffer(copy))
        return copy

    @classmethod
    def each(cls, regions: Sequence[Region], tables: Iterable[Buffer]) -> list[Pieces]:
        """The pieces of many blocks in the same regions; each table has the rows of one.

        >>> from struct import pack
        >>> rows = pack("=IIQ", 0, 2048, 0) + pack("=IIQ", 0, 2048, 8192)
        >>> [one.length for one in Pieces.each([kv], [rows, rows])]
        [4096, 4096]
        """
        handles = _handles_of(regions)
        shared = tuple(regions)
        if not isinstance(tables, Iterable):
            raise InvalidArgument(f"The tables are the rows of each block, not {type(tables).__name__}.")
        return [cls.__new__(cls)._open(shared, handles, rows) for rows in tables]  # noqa: SLF001 - of this class

    @classmethod
    def of(cls, region: Region, pieces: Iterable[tuple[int, int]]) -> Pieces:
        """Pieces of one region, each an offset and a length.

        >>> Pieces.of(kv, [(0, 2048), (8192, 2048)]).length
        4096
        """
        try:
            rows = b"".join([_PIECE.pack(0, length, offset) for offset, length in pieces])
        except (TypeError, ValueError, struct.error):
            raise InvalidArgument("Each piece of a region is an offset and a length.") from None
        return cls([region], rows)


def pieces_said(rows: Buffer) -> list[tuple[int, int, int]]:
    """Decode such an array: for each piece the number of its region, its length, its offset."""
    try:
        return list(_PIECE.iter_unpack(rows))
    except (BufferError, TypeError, struct.error):
        raise InvalidArgument(_ROWS) from None


def _handles_of(regions: Sequence[Region]) -> Any:
    try:
        is_on_gpu = any(region.gpu is not None for region in regions)
        handles = ffi.new("struct tk_region *[]", [region.handle or ffi.NULL for region in regions])
    except (AttributeError, TypeError):
        raise InvalidArgument("The regions of pieces are a list of what `Client.register` returns.") from None
    if is_on_gpu:
        raise InvalidArgument("Pieces are copied by the CPU, so they are not in a GPU's memory.")
    return handles


def scatter(blocks: Sequence[tuple[Pieces, int]]) -> None:
    """Copy blocks, each from its address, into their pieces, in one call without the GIL."""
    rows = ffi.new("struct tk_scattered[]", len(blocks))
    for row, (pieces, source) in zip(rows, blocks, strict=True):
        row.pieces = ffi.cast("struct tk_pieces *", pieces.pointer)
        row.source = source
    lib.tk_scatter(rows, len(blocks))
