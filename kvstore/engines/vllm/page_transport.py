"""Moves pages between an engine's memory and a node: directly in host memory, through copies on a device.

Both have the same calls and guarantees: `fetch` returns by its deadline, reports for each object whether its exact
bytes are in place, and leaves nothing pending; `saves` is as in `saving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvstore.client import Hit
from kvstore.engines.stores import blocks_of_pieces, name_of, open_store
from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.device_transport import DeviceTransport
from kvstore.engines.vllm.saving import Saves, staging
from kvstore.engines.vllm.sending import PutSender
from kvstore.limits import ENGINE_SLOTS_MIN, SLOTS_PER_CLIENT_MAX, VLLM_SLOTS_BYTES

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from kvstore.client import Client, ClusterClient
    from kvstore.engines.stores import Store
    from kvstore.engines.vllm.groups import Identity
    from kvstore.engines.vllm.kv_memory import KvMemory
    from kvstore.engines.vllm.settings import Settings

__all__ = ["Object", "Transport", "open_client", "open_transport"]


class Object(NamedTuple):
    """Some or all layers of a block, and the addresses of their pages."""

    key: bytes
    pieces: Any  # rows of `kv_memory.PIECE`; on a device, the runs of each layer's page
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
        """Fetch pages into place."""
        ...

    def after_loads(self) -> None:
        """Called by the engine's thread when loads have ended, before it uses their blocks."""
        ...


def open_client(
    settings: Settings, identity: Identity, object_bytes: int, slots: int = 1, *, device_memory: bool = False
) -> Client | ClusterClient:
    """Make a client of the nodes under the engine's fingerprint; nothing is called yet."""
    return open_store(
        settings,
        identity.layout,
        slots=slots,
        block_bytes_max=object_bytes,
        device_memory=device_memory,
    )


def open_transport(settings: Settings, identity: Identity, memory: KvMemory | DeviceMemory) -> Transport:
    """The transport for this kind of memory."""
    object_bytes = max(group.object_bytes_max for group in identity.groups)
    slots = min(SLOTS_PER_CLIENT_MAX, max(ENGINE_SLOTS_MIN, VLLM_SLOTS_BYTES // object_bytes))
    copies = staging(memory, settings.host_bytes)
    is_on_device = isinstance(memory, DeviceMemory)
    client = open_client(settings, identity, object_bytes, slots, device_memory=is_on_device)
    try:
        if isinstance(memory, DeviceMemory):
            return DeviceTransport(client, memory, copies, settings, object_bytes, slots)
        return _HostTransport(client, memory, copies, slots, settings.save_timeout_ms / 1000)
    except Exception:
        client.close()
        raise


class _HostTransport:
    """Gets write directly into the engine's memory; puts read from copies of it."""

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
        sender = PutSender(client, client.register(copies), slots, timeout_s)
        self.saves = Saves(memory, copies, sender)
        self.name = name_of(client)

    def before_loads(self) -> None:
        """Nothing to do."""

    def after_loads(self) -> None:
        """Nothing to do."""

    def fetch(self, objects: Sequence[Object], timeout_s: float) -> list[bool]:
        """Get all objects at once, each into its pages."""
        blocks = blocks_of_pieces(self._regions, [(one.key, one.pieces.data) for one in objects])
        return [isinstance(outcome, Hit) for outcome in self._client.get(blocks, timeout_s=timeout_s)]
