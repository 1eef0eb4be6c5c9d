"""`TriggerKvConnectorAdapter`: LMCache inside an engine's own process, with a node behind it.

    remote_storage_plugins: ["triggerkv"]
    extra_config:
      remote_storage_plugin.triggerkv.module_path: kvstore.engines.lmcache.connector
      remote_storage_plugin.triggerkv.class_name: TriggerKvConnectorAdapter
      triggerkv: {node: "127.0.0.1:7070"}

If LMCache is given a URL, it names the node: `triggerkv://127.0.0.1:7070`.

What always holds: only creating a connector raises, for an invalid configuration. Nothing blocks LMCache's event loop,
and each call ends by its deadline; a failure is a miss, or a chunk that is not stored. A returned chunk is exact.

What it doesn't do: store partial chunks, single layers or serialized chunks, whose lengths differ from a full chunk's;
list the node's blocks.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from lmcache.v1.storage_backend.connector import (
    ConnectorAdapter,
    extract_plugin_type,
    parse_remote_url,
)
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.client.async_calls import ended
from kvstore.engines.carrier import Carrier, part_keys
from kvstore.engines.common_settings import EngineSettings
from kvstore.engines.lmcache.objects import chunk_key, place
from kvstore.errors import FabricError
from kvstore.limits import LMCACHE_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.storage_backend.connector import ConnectorContext

__all__ = ["TriggerKvConnector", "TriggerKvConnectorAdapter"]

log = logging.getLogger(f"lmcache.{__name__}")  # whose handlers and level are LMCache's

_SCHEME = "triggerkv://"
_PLUGIN = "plugin://"

_WHERE = "extra_config.triggerkv"
T = TypeVar("T")


class TriggerKvConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]  # lmcache is in .venv-engines only
    """Makes connectors of this scheme, and of plugins of this name."""

    def __init__(self) -> None:
        super().__init__(_SCHEME)

    def can_parse(self, url: str) -> bool:
        """Whether a URL is one of ours."""
        plugin = extract_plugin_type(url.removeprefix(_PLUGIN)) if url.startswith(_PLUGIN) else None
        return url.startswith(_SCHEME) or plugin == "triggerkv"

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Make one from the settings in LMCache's `extra_config`, under `triggerkv`."""
        extra = (context.config.extra_config or {}) if context.config is not None else {}
        settings = dict(extra.get("triggerkv", {}))
        if context.url.startswith(_SCHEME):
            where = parse_remote_url(context.url)
            settings["node"] = f"{where.host}:{where.port}"
        return TriggerKvConnector(context, EngineSettings.of(settings, where=_WHERE))


class TriggerKvConnector(RemoteConnector):  # type: ignore[misc]
    """A node, for one worker."""

    def __init__(self, context: ConnectorContext, settings: EngineSettings) -> None:
        super().__init__(context.config, context.metadata)
        self._loop = context.loop
        self._memory = context.local_cpu_backend
        self._settings = settings
        shapes = [list(one) for one in self.meta_shapes]
        layout = f"lmcache {self.meta_fmt} {shapes} {self.meta_dtypes} {settings.weights}"
        self._carrier = Carrier(settings, layout.encode(), self.full_chunk_size_bytes)
        self._threads = ThreadPoolExecutor(LMCACHE_THREADS, "kvstore-lmcache")
        self._register()

    def _register(self) -> None:
        """Register LMCache's memory, if it is already allocated in one piece, so that chunks move without a copy."""
        allocator = getattr(self._memory, "memory_allocator", None)
        buffer = getattr(allocator, "buffer", None)
        if buffer is None or not hasattr(buffer, "data_ptr") or buffer.device.type != "cpu":
            log.info("LMCache's memory can't be registered; chunks are sent over gRPC.")
            return
        try:
            self._carrier.register(buffer.data_ptr(), buffer.nbytes)
        except FabricError:
            self._carrier.close()
            raise

    # --- what is there

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether a chunk could be got."""
        return await self._elsewhere("Looking for a chunk", lambda: self._prefix([key]) == 1, failed=False)

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Whether a chunk could be got; the caller waits."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """Return True: LMCache may call `batched_contains`."""
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Count the stored chunks, from the first, without a gap; the caller waits."""
        return _safely("Looking for chunks", lambda: self._prefix(keys), 0)

    async def batched_async_contains(
        self,
        lookup_id: str,
        keys: list[CacheEngineKey],
        pin: bool = False,  # noqa: FBT001, FBT002
    ) -> int:
        """Count the stored chunks, from the first, without a gap."""
        del lookup_id, pin  # a chunk evicted in between is a miss
        return await self._elsewhere("Looking for chunks", lambda: self._prefix(keys), 0)

    def _prefix(self, keys: Sequence[CacheEngineKey]) -> int:
        names = [part for key in keys for part in self._parts(key)]
        return self._carrier.prefix(names) * len(keys) // len(names) if names else 0

    def _parts(self, key: CacheEngineKey) -> list[bytes]:
        return part_keys(chunk_key(key, self._settings.weights), self.full_chunk_size_bytes)

    # --- getting

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Get a chunk into LMCache's memory."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Return True: LMCache may call `batched_get`."""
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Get chunks; None for each that is missing."""
        nothing: list[MemoryObj | None] = [None] * len(keys)
        return await self._elsewhere("Getting chunks", lambda: self._get(keys), nothing, _release)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:
        """Get chunks up to the first that is missing."""
        del lookup_id
        chunks = await self.batched_get(keys)
        count = next((number for number, one in enumerate(chunks) if one is None), len(chunks))
        _release(chunks[count:])
        return [one for one in chunks[:count] if one is not None]

    def _get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        chunks: list[MemoryObj | None] = [None] * len(keys)
        mine: list[MemoryObj] = []
        try:
            for _ in keys:
                one = self._memory.allocate(
                    self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False
                )
                if one is None:
                    break  # there is no memory for more
                mine.append(one)
            places = [
                place(chunk_key(key, self._settings.weights), one)
                for key, one in zip(keys, mine, strict=False)
            ]
            for number, is_here in enumerate(self._carrier.get(places)):
                if is_here:
                    chunks[number] = mine[number]
        finally:
            for one, given in zip(mine, chunks, strict=False):
                if given is None:
                    one.ref_count_down()
        return chunks

    # --- putting

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Store a chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Return True: LMCache may call `batched_put`."""
        return True

    async def batched_put(self, keys: list[CacheEngineKey], memory_objs: list[MemoryObj]) -> None:
        """Store the full chunks among these."""
        await self._elsewhere("Storing chunks", lambda: self._put(keys, memory_objs), None)

    def _put(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        places = [
            place(chunk_key(key, self._settings.weights), one)
            for key, one in zip(keys, chunks, strict=True)
            if one.get_size() == self.full_chunk_size_bytes
        ]
        stored = sum(self._carrier.put(places))
        if stored < len(chunks):
            log.debug("%d of %d chunks were not stored.", len(chunks) - stored, len(chunks))

    # --- the rest

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Delete a chunk; returns whether there was one."""
        return _safely("Deleting a chunk", lambda: self._carrier.delete(self._parts(key)) > 0, failed=False)

    async def list(self) -> list[str]:
        """Return an empty list: a node's blocks can't be listed."""
        return []

    async def close(self) -> None:
        """End pending transfers, with a deadline, and close the client."""

        def close() -> None:
            self._threads.shutdown(cancel_futures=True)
            self._carrier.close()

        await asyncio.to_thread(close)

    async def _elsewhere(
        self, doing: str, work: Callable[[], T], failed: T, undo: Callable[[T], None] | None = None
    ) -> T:
        """Call a function in a thread, so that LMCache's loop is not blocked.

        If this is cancelled, it waits for the function, which uses LMCache's memory, and undoes what it has done.
        """
        try:
            call = self._threads.submit(_safely, doing, work, failed)
        except RuntimeError as error:  # the connector is closed
            log.debug("%s: %s", doing, error)
            return failed
        under_way = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(under_way)
        except asyncio.CancelledError:
            if not call.cancel():  # it has begun
                await ended(under_way)
                if undo is not None:
                    undo(under_way.result())
            raise


def _release(chunks: Sequence[MemoryObj | None]) -> None:
    for one in chunks:
        if one is not None:
            one.ref_count_down()


def _safely(doing: str, work: Callable[[], T], failed: T) -> T:
    try:
        return work()
    except Exception:  # no error may stop the engine
        log.exception("%s failed.", doing)
        return failed
