"""Blocks for several nodes: what is said of a block and its memory once, whichever nodes have it.

What always holds: memory is registered with a node's client when that node is first used, and its pieces are named
there in the same order, so that each node is given the same bytes.
"""

from __future__ import annotations

import struct
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.blocks import Block
from nic_offload.pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

    from kvstore.client.client import Client
    from kvstore.client.nodes import Everywhere

__all__ = ["ClusterBlock", "ClusterPieces", "blocks_on"]

_PIECE = struct.Struct("=IIQ")


class ClusterPieces:
    """Pieces of memory that are one block's bytes, in their order: what `Pieces` is for one node."""

    def __init__(self, memories: Sequence[Everywhere], rows: Buffer) -> None:
        """`rows` has 16 bytes for each piece: which of the memories it is in (4), its length (4), its offset (8)."""
        self.memories = memories if isinstance(memories, tuple) else tuple(memories)
        self.rows = rows
        self.length = sum(length for _, length, _ in _PIECE.iter_unpack(rows))

    @classmethod
    def of(cls, memory: Everywhere, pieces: Iterable[tuple[int, int]]) -> ClusterPieces:
        """Pieces of one memory, each an offset and a length."""
        return cls((memory,), b"".join([_PIECE.pack(0, length, offset) for offset, length in pieces]))

    def copied(self) -> bytes:
        """A copy of their current contents."""
        return b"".join(
            [
                self.memories[memory].copied(offset, length)
                for memory, length, offset in _PIECE.iter_unpack(self.rows)
            ]
        )


class ClusterBlock(NamedTuple):
    """A block, and where its bytes are, or shall be, in memory that `ClusterClient.register` has registered."""

    key: bytes
    memory: Everywhere
    offset: int
    length: int
    threshold: int = 1  # a put fires when the flag word is at least this
    pieces: ClusterPieces | None = None  # where its bytes are instead, in their order; see `of_pieces`
    whole: int = 0  # length of the stored block of which this is a part, in a get; 0: this is all of it
    skip: int = 0  # bytes of it before this part

    @classmethod
    def of_pieces(
        cls, key: bytes, pieces: ClusterPieces, *, threshold: int = 1, whole: int = 0, skip: int = 0
    ) -> ClusterBlock:
        """As `Block.of_pieces`: a put gathers them when it fires, and a get scatters them."""
        return cls(key, pieces.memories[0], 0, pieces.length, threshold, pieces, whole, skip)

    def copied(self) -> bytes | None:
        """A copy of its bytes as they are in memory; None if the memory has a part of it only."""
        if self.whole and self.length != self.whole:
            return None
        if self.pieces is not None:
            return self.pieces.copied()
        return self.memory.copied(self.offset, self.length)


def blocks_on(client: Client, blocks: Sequence[ClusterBlock]) -> list[Block]:
    """The same blocks for one node's client."""
    here: list[Block] = []
    for _, of_same in groupby(
        blocks, lambda block: None if block.pieces is None else id(block.pieces.memories)
    ):
        some = list(of_same)
        pieces: Sequence[Pieces | None] = [None] * len(some)
        if (first := some[0].pieces) is not None:
            pieces = Pieces.each(
                [memory.at(client) for memory in first.memories],
                [block.pieces.rows for block in some if block.pieces is not None],
            )
        here += [
            Block(
                block.key,
                block.memory.at(client) if its is None else its.regions[0],
                block.offset,
                block.length,
                block.threshold,
                its,
                block.whole,
                block.skip,
            )
            for block, its in zip(some, pieces, strict=True)
        ]
    return here
