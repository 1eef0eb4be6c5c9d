"""Blocks of a cluster: described once, and turned into one node's blocks when their owner is known.

What always holds: the memory of a block, or of its pieces, is registered with each client when that client first needs
it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.blocks import Block
from kvstore.client.checks import check_blocks, check_keys, check_list
from kvstore.client.nodes import RegisteredMemory
from kvstore.errors import InvalidArgument, NotRegistered
from kvstore.names import UNSAID
from nic_offload.pieces import Pieces, pieces_said

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from kvstore.client.client import Client


__all__ = ["ClusterBlock", "ClusterPieces", "blocks_of", "keys_of"]


@dataclass(frozen=True, slots=True)
class ClusterPieces:
    """Where a block's bytes are, in order, as in `nic_offload.pieces.Pieces`."""

    memories: tuple[RegisteredMemory, ...]
    rows: Buffer  # 16 bytes for each piece: in which memory (4), its length (4), its offset (8)

    def copied(self) -> bytes:
        """A copy of the current contents of all pieces."""
        return b"".join(
            self.memories[number].copied(offset, length) for number, length, offset in pieces_said(self.rows)
        )


class ClusterBlock(NamedTuple):
    """A block, and the memory of `ClusterClient.register` that its bytes are in or go to.

    >>> from kvstore.client import ClusterBlock, ClusterClient
    >>> cluster = ClusterClient([client.target])
    >>> everywhere = cluster.register(memory)
    >>> ClusterBlock(key, everywhere, offset=0, length=4096).length
    4096
    """

    key: bytes
    memory: RegisteredMemory
    offset: int
    length: int
    threshold: int = 1  # a put fires when the flag word is at least this
    pieces: ClusterPieces | None = None  # where its bytes are instead of at `offset`; see `of_pieces`
    whole: int = 0  # in a get of a part: the length of the stored block; 0: this is all of it
    skip: int = 0  # bytes of the stored block before this part
    domain: bytes = UNSAID  # as of a `Block`

    @classmethod
    def of_pieces(
        cls,
        key: bytes,
        memories: Sequence[RegisteredMemory],
        rows: Buffer,
        *,
        threshold: int = 1,
        whole: int = 0,
        skip: int = 0,
        domain: bytes = UNSAID,
    ) -> ClusterBlock:
        """A block whose bytes are in pieces of registered memory, as `Block.of_pieces` has them.

        `rows` has 16 bytes for each piece: which of the memories it is in (4), its length (4), its offset (8).

        >>> from struct import pack
        >>> rows = pack("=IIQ", 0, 2048, 0) + pack("=IIQ", 0, 2048, 8192)
        >>> ClusterBlock.of_pieces(key, [everywhere], rows).length
        4096
        """
        check_list(memories, "memories")
        where = ClusterPieces(tuple(memories), rows)
        said = pieces_said(rows)
        if not said or max(number for number, _, _ in said) >= len(memories):
            raise InvalidArgument(
                f"The rows of a block's pieces name one of its {len(memories)} memories each."
            )
        length = sum(length for _, length, _ in said)
        return cls(key, where.memories[0], 0, length, threshold, where, whole, skip, domain)

    def copied(self) -> bytes | None:
        """A copy of its current contents; None if the memory holds only a part of it."""
        if self.whole and self.length != self.whole:
            return None
        if self.pieces is not None:
            return self.pieces.copied()
        return self.memory.copied(self.offset, self.length)


def keys_of(blocks: Sequence[ClusterBlock]) -> list[bytes]:
    """Their keys. Raises for anything but a list of such blocks."""
    check_blocks(blocks, ClusterBlock)  # a single block is a tuple, whose fields are not blocks
    for one in blocks:
        if not isinstance(one.pieces, ClusterPieces | None):
            raise InvalidArgument("A block of pieces is made by `ClusterBlock.of_pieces`.")
        memories = (one.memory,) if one.pieces is None else one.pieces.memories
        if not all(isinstance(memory, RegisteredMemory) for memory in memories):
            raise NotRegistered("A block's memory is what `ClusterClient.register` returns.")
    keys = [one.key for one in blocks]
    check_keys(keys)
    return keys


def blocks_of(client: Client, blocks: Sequence[ClusterBlock]) -> list[Block]:
    """The same for one node's client."""
    plain = [
        None
        if one.pieces
        else Block(
            one.key,
            one.memory.at(client),
            one.offset,
            one.length,
            one.threshold,
            whole=one.whole,
            skip=one.skip,
            domain=one.domain,
        )
        for one in blocks
    ]
    in_pieces: dict[tuple[RegisteredMemory, ...], list[tuple[int, ClusterPieces]]] = defaultdict(list)
    for at, one in enumerate(blocks):
        if one.pieces is not None:
            in_pieces[one.pieces.memories].append((at, one.pieces))
    for memories, some in in_pieces.items():
        regions = [memory.at(client) for memory in memories]
        for (at, _), pieces in zip(
            some, Pieces.each(regions, [where.rows for _, where in some]), strict=True
        ):
            one = blocks[at]
            plain[at] = Block.of_pieces(
                one.key,
                pieces,
                threshold=one.threshold,
                whole=one.whole,
                skip=one.skip,
                domain=one.domain,
            )
    return [one for one in plain if one is not None]
