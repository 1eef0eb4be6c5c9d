"""How pages move: over the fabric, by RDMA into the engine's memory and out of copies of it, or inside gRPC.

Both ways have the same calls, and the same promises: `fetch` returns within its time, says of each object whether its
exact bytes are in place, and leaves nothing under way; `saves` is as `saving` says.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvstore.client import Hit
from kvstore.clock import SystemClock
from kvstore.engines.stores import blocks_of_pieces, open_store
from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.device_transport import DeviceTransport
from kvstore.engines.vllm.saving import Saves, staging
from kvstore.engines.vllm.sending import FabricSender, InlineSender
from kvstore.errors import FabricError
from kvstore.limits import SLOTS_PER_CLIENT_MAX, VLLM_SLOTS_BYTES

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from kvstore.client import Client, ClusterClient
    from kvstore.engines.stores import Store
    from kvstore.engines.vllm.groups import Identity
    from kvstore.engines.vllm.kv_memory import KvMemory
    from kvstore.engines.vllm.settings import Settings

__all__ = ["Object", "Transport", "open_client", "open_transport"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_SLOTS_MIN = 16


class Object(NamedTuple):
    """Some or all layers of a block, and the places of their pages."""

    key: bytes
    pieces: Any  # rows of `kv_memory.PIECE`; on a device, of each layer the runs of its page
    length: int


class Transport(Protocol):
    """One of the two transports."""

    name: str

    @property
    def saves(self) -> Saves:
        """Its saves."""
        ...

    def before_loads(self) -> None:
        """Called by the engine's thread before it begins loads; DeviceError if nothing can be loaded."""
        ...

    def fetch(self, objects: Sequence[Object], timeout_s: float) -> list[bool]:
        """Bring pages into their places."""
        ...

    def after_loads(self) -> None:
        """Called by the engine's thread when loads have ended, before it uses their blocks."""
        ...


def open_client(
    settings: Settings, identity: Identity, object_bytes: int, slots: int = 1
) -> Client | ClusterClient:
    """Make a client of the nodes under the engine's fingerprint; nothing is called yet."""
    return open_store(settings, identity.layout, slots=slots, block_bytes_max=object_bytes)


def open_transport(settings: Settings, identity: Identity, memory: KvMemory | DeviceMemory) -> Transport:
    """The fabric where it opens, unless told otherwise."""
    object_bytes = max(group.object_bytes_max for group in identity.groups)
    slots = min(SLOTS_PER_CLIENT_MAX, max(_SLOTS_MIN, VLLM_SLOTS_BYTES // object_bytes))
    copies = staging(memory, settings.host_bytes)
    client = open_client(settings, identity, object_bytes, slots)
    if isinstance(memory, DeviceMemory):
        try:
            return DeviceTransport(client, memory, copies, settings, object_bytes, slots)
        except Exception:
            client.close()
            raise
    timeout_s = settings.save_timeout_ms / 1000
    if settings.transport != "inline":
        try:
            return _OverFabric(client, memory, copies, slots, timeout_s)
        except FabricError as error:
            if settings.transport == "fabric":
                client.close()
                raise
            log.warning("No fabric is available (%s); blocks are sent inside gRPC.", error)
    return _InsideRpc(client, memory, copies)


class _HostMemory:
    """Nothing to do before and after loads."""

    def before_loads(self) -> None:
        pass

    def after_loads(self) -> None:
        pass


class _OverFabric(_HostMemory):
    """RDMA between the engine's registered memory and the node."""

    def __init__(
        self,
        client: Client | ClusterClient,
        memory: KvMemory,
        copies: mmap.mmap,
        slots: int,
        timeout_s: float,
    ) -> None:
        self._client: Store = client
        self._regions = tuple([client.register(buffer) for buffer in memory.buffers])
        sender = FabricSender(client, client.register(copies), slots, timeout_s)
        self.saves = Saves(memory, copies, sender)
        self.name = f"the fabric ({client.fabric.provider})"

    def fetch(self, objects: Sequence[Object], timeout_s: float) -> list[bool]:
        blocks = blocks_of_pieces(self._regions, [(one.key, one.pieces.data) for one in objects])
        return [isinstance(outcome, Hit) for outcome in self._client.get(blocks, timeout_s=timeout_s)]


class _InsideRpc(_HostMemory):
    """Copies, made by the CPU."""

    name = "gRPC"

    def __init__(self, client: Store, memory: KvMemory, copies: mmap.mmap) -> None:
        self._client, self._memory = client, memory
        self.saves = Saves(memory, copies, InlineSender(client, copies))

    def fetch(self, objects: Sequence[Object], timeout_s: float) -> list[bool]:
        clock = SystemClock()
        until_ns = clock.monotonic_ns() + int(timeout_s * 1e9)
        here = []
        for one in objects:
            left_s = (until_ns - clock.monotonic_ns()) / 1e9
            got = self._client.get_inline(one.key, one.length, timeout_s=left_s) if left_s > 0 else None
            if is_whole := isinstance(got, bytes) and len(got) == one.length:
                at = 0
                for buffer, length, offset in one.pieces.tolist():
                    self._memory.bytes_of(buffer, offset, length)[:] = got[at : at + length]
                    at += length
            here.append(is_whole)
        return here
