"""Moves blocks between this process's memory and a node, in a cluster the home of their user.

In a cluster puts go to all nodes that must have the user's blocks, and gets to their home. If a device fills the
memory, puts are armed on its flag beforehand, and leave as its copies are done.

What always holds: when a put has returned, its blocks survive a crash of the node or it returned the error, and nothing
reads the memory any more; after a get, all blocks before the first miss are in memory, byte for byte. One thread uses
it at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvstore.client import Block, Client, ClusterBlock, Hit, RegisteredMemory
from kvstore.limits import BATCH_BLOCKS_MAX, ENGINE_MOVE_MS, ENGINE_MOVING_BYTES
from nic_offload.memory import allocate

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.client import ArmedPuts, ClusterPuts, Nodes
    from kvstore.engines.transformers.device_copies import DeviceCopies
    from kvstore.engines.transformers.token_blocks import Piece
    from kvstore.miss import Miss
    from nic_offload.fabric import Region
    from nic_offload.flags import FlagWord

__all__ = ["Mover", "batches"]

_TIMEOUT_S: Final = ENGINE_MOVE_MS / 1000


def batches(some: Sequence[Piece], limit_bytes: int) -> Iterator[list[Piece]]:
    """Cut a sequence into parts that fit into the memory."""
    part: list[Piece] = []
    size = 0
    for piece in some:
        if part and (size + piece.length > limit_bytes or len(part) == BATCH_BLOCKS_MAX):
            yield part
            part, size = [], 0
        part.append(piece)
        size += piece.length
    if part:
        yield part


class Mover:
    """A client, or those of several nodes, with memory for blocks in flight."""

    def __init__(self, client: Client | Nodes, block_bytes_max: int, slots: int) -> None:
        self.client = client
        self._slots = slots
        self._memory: mmap.mmap = allocate(max(ENGINE_MOVING_BYTES, block_bytes_max))
        self.memory = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.region = client.register(self._memory)

    def client_of(self, user: str) -> Client:
        """The client of the node that stores a user's blocks, now."""
        return self.client if isinstance(self.client, Client) else self.client.of(user)

    def region_at(self, client: Client) -> Region:
        """The memory as registered with a client."""
        return self.region.at(client) if isinstance(self.region, RegisteredMemory) else self.region

    @property
    def capacity_bytes(self) -> int:
        """How many bytes can be in flight."""
        return len(self._memory)

    @property
    def buffer(self) -> mmap.mmap:
        """The memory itself."""
        return self._memory

    def put_copied(
        self, user: str, some: Sequence[Piece], copies: DeviceCopies, queue: Callable[[], None]
    ) -> None:
        """As `put`, of blocks that the device copies into the memory once `queue` was called."""
        copies.settle()  # a copy of an earlier save would change these blocks
        self._put(user, some, copies, queue)

    def put(self, user: str, some: Sequence[Piece]) -> None:
        """Store blocks that are contiguous in the memory; raises the KvError of the first that is not stored."""
        self._put(user, some, None, lambda: None)

    def _put(
        self, user: str, some: Sequence[Piece], copies: DeviceCopies | None, queue: Callable[[], None]
    ) -> None:
        word, threshold = (None, 1) if copies is None else (copies.flag.word, copies.flag.last + 1)
        at = 0
        places: list[tuple[Piece, int]] = []
        for piece in some:
            places.append((piece, at))
            at += piece.length
        for first in range(0, len(places), self._slots):
            puts = self._arm(user, places[first : first + self._slots], word, threshold)
            try:
                if not first:
                    queue()
                results = puts.wait(_TIMEOUT_S)
            finally:  # whatever was raised: the memory is reused next, and the flag counts on
                puts.abandon()
            for result in results:
                if result.error is not None and not result.has_block:
                    raise result.error

    def _arm(
        self, user: str, places: Sequence[tuple[Piece, int]], word: FlagWord | None, threshold: int
    ) -> ArmedPuts | ClusterPuts:
        """Arm puts of these pieces of the memory: in a cluster to all nodes that must have the user's blocks."""
        if isinstance(self.client, Client):
            region = self.region_at(self.client)
            blocks = [
                Block(piece.key, region, at, piece.length, threshold, domain=piece.domain)
                for piece, at in places
            ]
            return self.client.arm(blocks, word)
        assert isinstance(self.region, RegisteredMemory)
        memory = self.region
        everywhere = [
            ClusterBlock(piece.key, memory, at, piece.length, threshold, domain=piece.domain)
            for piece, at in places
        ]
        return self.client.arm(user, everywhere, word)

    def get(self, user: str, some: Sequence[Piece]) -> tuple[int, Miss | None]:
        """Get blocks into the memory, contiguously; returns how many arrived, and why the next did not."""
        client, at, blocks = self.client_of(user), 0, list[Block]()
        region = self.region_at(client)
        for piece in some:
            blocks.append(Block(piece.key, region, at, piece.length))
            at += piece.length
        for number, outcome in enumerate(client.get(blocks)):
            if not isinstance(outcome, Hit):
                return number, outcome
        return len(some), None

    def close(self) -> None:
        """Release the memory and the client."""
        self.client.close()  # first: it ends all operations on the memory
        self.region.close()
