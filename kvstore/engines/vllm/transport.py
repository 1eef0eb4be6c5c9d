"""How pages move: over the fabric, straight out of the engine's memory and into it, or inside gRPC, copied.

Both ways have the same calls, and the same promises: `fetch` returns within its time, says of each page whether its
exact bytes are in place, and leaves nothing under way; `saves` is as `saving` says.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.client import Block, Client, Hit
from kvstore.clock import SystemClock
from kvstore.engines.vllm.saving import SLOTS_BYTES, Saved, Saves
from kvstore.errors import FabricError, KvError
from kvstore.limits import BATCH_BLOCKS_MAX, SLOTS_PER_CLIENT_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engines.vllm.identity import Identity
    from kvstore.engines.vllm.memory import KvMemory
    from kvstore.engines.vllm.plan import Wanted
    from kvstore.engines.vllm.settings import Settings

__all__ = ["Page", "Transport", "open_client", "open_transport"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_INLINE_QUEUE_BYTES = 128 << 20  # copied and not yet sent; what comes while it is full is not stored
_SLOTS_MIN = 16


class Page(NamedTuple):
    """A page and its place."""

    key: bytes
    buffer: int
    offset: int
    length: int


class _Saving(Protocol):
    def begin(self, blocks: Sequence[Wanted]) -> None: ...
    def layer_done(self, name: str) -> None: ...
    def settle(self) -> None: ...
    def ended(self) -> list[Saved]: ...


class Transport(Protocol):
    """One of the two ways."""

    name: str

    @property
    def saves(self) -> _Saving:
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
    slots = min(SLOTS_PER_CLIENT_MAX, max(_SLOTS_MIN, SLOTS_BYTES // page_bytes))
    client = open_client(settings, identity, page_bytes, slots)
    timeout_s = settings.save_timeout_ms / 1000
    if settings.transport != "inline":
        try:
            return _OverFabric(client, memory, slots, timeout_s)
        except FabricError as error:
            if settings.transport == "fabric":
                client.close()
                raise
            log.warning("There is no fabric here (%s); blocks are sent inside gRPC.", error)
    return _InsideRpc(client, memory)


class _OverFabric:
    """RDMA between the engine's registered memory and the node."""

    def __init__(self, client: Client, memory: KvMemory, slots: int, timeout_s: float) -> None:
        self._client = client
        self._regions = [client.register(buffer) for buffer in memory.buffers]
        self.saves: _Saving = Saves(client, memory, self._regions, slots, timeout_s)
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

    def __init__(self, client: Client, memory: KvMemory) -> None:
        self._client, self._memory = client, memory
        self.saves: _Saving = _Copies(client, memory)

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


class _Copies:
    """Saves that copy at the end of a step, and send from a thread of their own."""

    def __init__(self, client: Client, memory: KvMemory) -> None:
        self._client, self._memory = client, memory
        self._blocks: Sequence[Wanted] = ()
        self._thread = ThreadPoolExecutor(1, "kvstore-save")
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._ended: deque[Saved] = deque()

    def begin(self, blocks: Sequence[Wanted]) -> None:
        self._blocks = blocks

    def layer_done(self, name: str) -> None:
        pass  # all of it is copied when the step is over

    def settle(self) -> None:
        blocks, self._blocks = self._blocks, ()
        for wanted in blocks:
            group = self._memory.groups[wanted.group]
            keys = group.pages(wanted.digest, self._memory.shard)
            size = len(keys) * group.page_bytes
            with self._lock:
                if self._queued_bytes + size > _INLINE_QUEUE_BYTES:
                    self._ended.append(Saved([], failed=len(keys)))
                    continue
                self._queued_bytes += size
            copies = [
                bytes(self._memory.bytes_of(buffer, offset, group.page_bytes))
                for buffer, offset in self._memory.pages(wanted.group, wanted.block)
            ]
            self._thread.submit(self._send, wanted, keys, copies)

    def ended(self) -> list[Saved]:
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def _send(self, wanted: Wanted, keys: Sequence[bytes], copies: Sequence[bytes]) -> None:
        size = sum(map(len, copies))
        saved = Saved([], failed=len(keys))
        try:
            for key, copy in zip(keys, copies, strict=True):
                self._client.put_inline(key, copy)
            saved = Saved([(wanted.group, wanted.digest)], len(keys), size)
        except KvError as error:
            log.debug("A block was not stored: %s", error)
        finally:
            self._ended.append(saved)
            with self._lock:
                self._queued_bytes -= size
