"""Where an engine's blocks are stored: a client of one node, or of a cluster.

If the settings name several nodes or replicas, blocks are spread over the nodes, each with the requested number of
replicas, by default as many as the cluster keeps for the tenant. A put then succeeds as soon as one node has the block.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvstore.client import Block, Client, ClusterBlock, ClusterClient, RegisteredMemory
from kvstore.client.map_follower import is_in_cluster
from kvstore.errors import DomainRequired, KvError, NotEncrypted
from kvstore.names import UNSAID
from kvstore.reach import GRPC
from nic_offload.pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from logging import Logger

    from typing_extensions import Buffer

    from kvstore.client import ArmedPuts, ClusterPin, ClusterPuts, Hit, Pin, Prefix, PutResult, Stored
    from kvstore.durability import Durability
    from kvstore.engines.common_settings import EngineSettings
    from kvstore.miss import Miss
    from nic_offload.fabric import Fabric, Region
    from nic_offload.flags import FlagWord

__all__ = ["Store", "block_at", "blocks_of_pieces", "is_about_domains", "name_of", "open_store"]

_ABOUT_DOMAINS: Final[dict[type, str]] = {
    NotEncrypted: "Requests that name an erase domain are not saved: %s",
    DomainRequired: "Requests that name no erase domain are not saved, until the engine's settings have `user` or"
    " `shared`: %s",
}


class Store(Protocol):
    """The client's methods that adapters call, of one node or a cluster. Each has its own type of block."""

    @property
    def transport(self) -> str:
        """How blocks are carried, as `Client.transport`."""
        ...

    @property
    def fabric(self) -> Fabric:
        """The fabric that carries them, as `Client.fabric`."""
        ...

    def register(self, memory: Buffer) -> Region | RegisteredMemory:
        """Register memory."""
        ...

    def arm(
        self, blocks: Sequence[Any], flag: FlagWord | None = None, *, timeout_s: float | None = None
    ) -> ArmedPuts | ClusterPuts:
        """Put blocks when the flag reaches their thresholds; without a flag, now. `timeout_s` is for attaching."""
        ...

    def get(self, blocks: Sequence[Any], *, timeout_s: float) -> Sequence[Hit | Miss]:
        """Get blocks."""
        ...

    def put_inline(self, key: bytes, data: bytes, *, domain: bytes = UNSAID) -> Durability:
        """Put one block over gRPC."""
        ...

    def get_inline(self, key: bytes, length: int, *, timeout_s: float) -> bytes | Miss:
        """Get one block over gRPC."""
        ...

    def put_many_inline(
        self, blocks: Iterable[tuple[bytes, memoryview]], *, timeout_s: float
    ) -> list[PutResult]:
        """Put many blocks over gRPC."""
        ...

    def get_many_inline(
        self, wanted: Sequence[tuple[bytes, int]], *, timeout_s: float
    ) -> Iterator[bytes | Miss]:
        """Get many blocks over gRPC."""
        ...

    def exists(
        self, keys: Sequence[bytes], *, lengths: Sequence[int] | None = None, timeout_s: float
    ) -> list[Stored | Miss]:
        """Look up blocks."""
        ...

    def prefix(self, keys: Sequence[bytes], *, timeout_s: float) -> Prefix:
        """Count the stored blocks, from the first, without a gap."""
        ...

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Delete blocks."""
        ...

    def pin(self, keys: Sequence[bytes], *, time_to_live_ms: int) -> Pin | ClusterPin:
        """Protect blocks from eviction."""
        ...

    def attach(self) -> None:
        """Attach to its nodes, so that look-ups go over the fabric."""
        ...

    def close(self) -> None:
        """End its connections. Puts that have not been acknowledged fail."""
        ...


def open_store(
    settings: EngineSettings, layout: bytes, *, device_memory: bool = False, **of_clients: Any
) -> Client | ClusterClient:
    """Create the client that the settings describe. If they name one node, it is asked whether it is in a cluster.

    `device_memory` is for a client of one node; a cluster's CPUs copy blocks that a node lacks.
    """
    if settings.is_clustered or is_in_cluster(settings.reach):
        return ClusterClient(
            settings.reach, replicas=settings.replicas, acks="any", layout=layout, **of_clients
        )
    return Client(settings.reach, layout=layout, device_memory=device_memory, **of_clients)


def name_of(client: Store) -> str:
    """How its blocks are carried, for logs."""
    if client.transport == GRPC:
        return "gRPC"
    return f"the fabric ({client.fabric.provider})"


def is_about_domains(error: KvError | None, log: Logger) -> bool:
    """Whether a put was refused for its erase domain, as all others will be: that is logged once."""
    words = _ABOUT_DOMAINS.get(type(error))
    if words is not None:
        _warn_once(log, words, str(error))
    return words is not None


@cache
def _warn_once(log: Logger, words: str, said: str) -> None:
    log.warning(words, said)


def block_at(
    key: bytes,
    memory: Region | RegisteredMemory,
    offset: int,
    length: int,
    domain: bytes = UNSAID,
    threshold: int = 1,
) -> Block | ClusterBlock:
    """A block in memory that the store has registered."""
    kind: Any = Block if not isinstance(memory, RegisteredMemory) else ClusterBlock
    made: Block | ClusterBlock = kind(key, memory, offset, length, domain=domain, threshold=threshold)
    return made


def blocks_of_pieces(
    memories: Sequence[Region | RegisteredMemory], given: Sequence[tuple[bytes, Buffer]]
) -> list[Block | ClusterBlock]:
    """Blocks in pieces of memory that the store has registered, each given by its key and its rows, as in `Pieces`."""
    some: Any = tuple(memories)
    if not isinstance(some[0], RegisteredMemory):
        each = Pieces.each(some, [rows for _, rows in given])
        return [Block.of_pieces(key, pieces) for (key, _), pieces in zip(given, each, strict=True)]
    return [ClusterBlock.of_pieces(key, some, rows) for key, rows in given]
