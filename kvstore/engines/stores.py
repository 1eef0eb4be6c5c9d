"""What an engine's blocks go to: a client of one node, or one of a cluster's nodes.

Where several nodes are named, or several replicas, blocks are spread over the nodes, and each is kept on as many as
are asked for; a block is then stored as soon as one node has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvstore.client import Block, Client, ClusterBlock, ClusterClient, Everywhere
from kvstore.names import SHARED
from nic_offload.pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from kvstore.client import ArmedPuts, ClusterPin, ClusterPuts, Hit, Pin, Prefix, PutResult, Stored
    from kvstore.durability import Durability
    from kvstore.engines.common_settings import EngineSettings
    from kvstore.miss import Miss
    from nic_offload.fabric import Region

__all__ = ["Store", "block_at", "blocks_of_pieces", "open_store"]


class Store(Protocol):
    """The calls needed of a node's or a cluster's client; each has its own kind of blocks."""

    def register(self, memory: Buffer) -> Region | Everywhere:
        """Register memory."""
        ...

    def arm(self, blocks: Sequence[Any]) -> ArmedPuts | ClusterPuts:
        """Put blocks now."""
        ...

    def get(self, blocks: Sequence[Any], *, timeout_s: float) -> Sequence[Hit | Miss]:
        """Get blocks."""
        ...

    def put_inline(self, key: bytes, data: bytes, *, domain: bytes = SHARED) -> Durability:
        """Put one inside gRPC."""
        ...

    def get_inline(self, key: bytes, length: int, *, timeout_s: float) -> bytes | Miss:
        """Get one inside gRPC."""
        ...

    def put_many_inline(
        self, blocks: Iterable[tuple[bytes, memoryview]], *, timeout_s: float
    ) -> list[PutResult]:
        """Put many inside gRPC."""
        ...

    def get_many_inline(
        self, wanted: Sequence[tuple[bytes, int]], *, timeout_s: float
    ) -> Iterator[bytes | Miss]:
        """Get many inside gRPC."""
        ...

    def exists(
        self, keys: Sequence[bytes], *, lengths: Sequence[int] | None = None, timeout_s: float
    ) -> list[Stored | Miss]:
        """Say what is stored."""
        ...

    def prefix(self, keys: Sequence[bytes], *, timeout_s: float) -> Prefix:
        """Say how many are stored, from the first on."""
        ...

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Delete blocks."""
        ...

    def pin(self, keys: Sequence[bytes], *, time_to_live_ms: int) -> Pin | ClusterPin:
        """Keep blocks from being evicted."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


def open_store(settings: EngineSettings, layout: bytes, **of_clients: Any) -> Client | ClusterClient:
    """Make the client of what the settings name; nothing is called yet."""
    if settings.is_clustered:
        return ClusterClient(
            settings.reach, replicas=settings.replicas, acks="any", layout=layout, **of_clients
        )
    return Client(settings.reach, layout=layout, **of_clients)


def block_at(
    key: bytes, memory: Region | Everywhere, offset: int, length: int, domain: bytes = SHARED
) -> Block | ClusterBlock:
    """A block in memory that the store has registered."""
    kind: Any = Block if not isinstance(memory, Everywhere) else ClusterBlock
    made: Block | ClusterBlock = kind(key, memory, offset, length, domain=domain)
    return made


def blocks_of_pieces(
    memories: Sequence[Region | Everywhere], given: Sequence[tuple[bytes, Buffer]]
) -> list[Block | ClusterBlock]:
    """Blocks in pieces of memory that the store has registered: of each its key, and its rows as in `Pieces`."""
    some: Any = tuple(memories)
    if not isinstance(some[0], Everywhere):
        each = Pieces.each(some, [rows for _, rows in given])
        return [Block.of_pieces(key, pieces) for (key, _), pieces in zip(given, each, strict=True)]
    return [ClusterBlock.of_pieces(key, some, rows) for key, rows in given]
