"""How pages move: over the fabric, by RDMA into the engine's memory and out of copies of it, or inside gRPC.

Both ways have the same calls, and the same promises: `fetch` returns within its time, says of each page whether its
exact bytes are in place, and leaves nothing under way; `saves` is as `saving` says.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.client import Block, Client, Hit
from kvstore.clock import SystemClock
from kvstore.engines.vllm.saving import Saves, staging
from kvstore.engines.vllm.sending import FabricSender, InlineSender
from kvstore.errors import FabricError
from kvstore.limits import BATCH_BLOCKS_MAX, SLOTS_PER_CLIENT_MAX

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from kvstore.engines.vllm.identity import Identity
    from kvstore.engines.vllm.memory import KvMemory
    from kvstore.engines.vllm.settings import Settings

__all__ = ["Page", "Transport", "open_client", "open_transport"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_SLOTS_BYTES = 256 << 20  # of the node's memory, for what one worker has under way
_SLOTS_MIN = 16


class Page(NamedTuple):
    """A page and its place."""

    key: bytes
    buffer: int
    offset: int
    length: int


class Transport(Protocol):
    """One of the two ways."""

    name: str

    @property
    def saves(self) -> Saves:
        """Its saves."""
        ...

    def fetch(self, pages: Sequence[Page], timeout_s: float) -> list[bool]:
        """Bring pages into their places."""
        ...


def open_client(settings: Settings, identity: Identity, page_bytes: int, slots: int = 1) -> Client:
    """Make a client of the node under the engine's fingerprint; nothing is called yet."""
    return Client(
        settings.reach,
        layout=identity.layout,
        slots=slots,
        block_bytes_max=page_bytes,
    )


def open_transport(settings: Settings, identity: Identity, memory: KvMemory) -> Transport:
    """The fabric where it opens, unless told otherwise."""
    page_bytes = max(group.page_bytes for group in identity.groups)
    slots = min(SLOTS_PER_CLIENT_MAX, max(_SLOTS_MIN, _SLOTS_BYTES // page_bytes))
    copies = staging(memory, settings.host_bytes)
    client = open_client(settings, identity, page_bytes, slots)
    timeout_s = settings.save_timeout_ms / 1000
    if settings.transport != "inline":
        try:
            return _OverFabric(client, memory, copies, slots, timeout_s)
        except FabricError as error:
            if settings.transport == "fabric":
                client.close()
                raise
            log.warning("There is no fabric here (%s); blocks are sent inside gRPC.", error)
    return _InsideRpc(client, memory, copies)


class _OverFabric:
    """RDMA between the engine's registered memory and the node."""

    def __init__(
        self, client: Client, memory: KvMemory, copies: mmap.mmap, slots: int, timeout_s: float
    ) -> None:
        self._client = client
        self._regions = [client.register(buffer) for buffer in memory.buffers]
        sender = FabricSender(client, client.register(copies), slots, timeout_s)
        self.saves = Saves(memory, copies, sender)
        self.name = f"the fabric ({client.fabric.provider})"

    def fetch(self, pages: Sequence[Page], timeout_s: float) -> list[bool]:
        clock = SystemClock()
        until_ns = clock.monotonic_ns() + int(timeout_s * 1e9)
        here: list[bool] = []
        for first in range(0, len(pages), BATCH_BLOCKS_MAX):
            blocks = [
                Block(page.key, self._regions[page.buffer], page.offset, page.length)
                for page in pages[first : first + BATCH_BLOCKS_MAX]
            ]
            left_s = max(0.0, (until_ns - clock.monotonic_ns()) / 1e9)
            here += [isinstance(outcome, Hit) for outcome in self._client.get(blocks, timeout_s=left_s)]
        return here


class _InsideRpc:
    """Copies, made by the CPU."""

    name = "gRPC"

    def __init__(self, client: Client, memory: KvMemory, copies: mmap.mmap) -> None:
        self._client, self._memory = client, memory
        self.saves = Saves(memory, copies, InlineSender(client, copies))

    def fetch(self, pages: Sequence[Page], timeout_s: float) -> list[bool]:
        clock = SystemClock()
        until_ns = clock.monotonic_ns() + int(timeout_s * 1e9)
        here = []
        for page in pages:
            left_s = (until_ns - clock.monotonic_ns()) / 1e9
            got = self._client.get_inline(page.key, page.length, timeout_s=left_s) if left_s > 0 else None
            if is_whole := isinstance(got, bytes) and len(got) == page.length:
                self._memory.bytes_of(page.buffer, page.offset, page.length)[:] = got
            here.append(is_whole)
        return here
