"""`TriggerKvStorage`: SGLang's dynamic storage backend.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "triggerkv",
      "module_path": "kvstore.engines.sglang.storage", "class_name": "TriggerKvStorage", "interface_v1": 1,
      "node": "127.0.0.1:7070"}'

With `interface_v1` pages move directly from and to the registered host pool, piece by piece; without it SGLang copies
each page into a flat tensor, and that is stored. The two don't see each other's pages.

What always holds: only the constructor raises, for an invalid configuration. Every call ends by its deadline; a failure
is a miss, or a page that is not stored. A page is True only if its exact bytes are in place.

What it doesn't do: list stored blocks. `clear` deletes those this process has stored, as far as it remembers.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvstore.engines.carrier import Carrier, Place, part_keys
from kvstore.engines.common_settings import EngineSettings
from kvstore.engines.sglang.hits import Found, usable
from kvstore.engines.sglang.pools import Pool, anchor_layout
from kvstore.engines.sglang.storage_metrics import Moved
from kvstore.errors import FabricError, LayoutError
from kvstore.limits import SGLANG_REMEMBERED_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )

__all__ = ["TriggerKvStorage"]

log = logging.getLogger(f"sglang.{__name__}")  # whose handlers and level are the engine's

_KV = "kv"
_OF_SGLANG = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
    }
    | {
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
        "file_storage_path",
    }
)
T = TypeVar("T")


class TriggerKvStorage(HiCacheStorage):  # type: ignore[misc]  # sglang is in .venv-engines only
    """A node, for one rank of an engine."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        del kwargs  # parameters that SGLang may add one day
        extra = dict(storage_config.extra_config or {})
        self._settings = EngineSettings.of(
            extra, where="--hicache-storage-backend-extra-config", of_engine=_OF_SGLANG
        )
        self._config = storage_config
        self._in_pieces = bool(extra.get("interface_v1", 0))
        self._pools: dict[str, Pool] = {}
        self._lock = threading.Lock()
        self._carrier: Carrier | None = None
        self._closed = False
        self._ours: OrderedDict[bytes, None] = OrderedDict()  # the objects we have stored, oldest first
        self._moved = Moved()

    # --- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the pool of the KV itself."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a further pool."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != _KV:  # already registered by the other call
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host: Any) -> None:
        try:
            pool = Pool.of(name, host, self._config, self._settings.weights)
            carrier = self._open(max(pool.sizes, default=0))
            if pool.pieces and (self._in_pieces or name != _KV):
                for buffer in pool.buffers():
                    if buffer.device.type == "cpu":
                        carrier.register(buffer.data_ptr(), buffer.nbytes)
            self._pools[name] = pool
            log.info("The pool %s has %d pieces a page, %d bytes.", name, pool.pieces, sum(pool.sizes))
        except FabricError:
            raise  # only if it was declared
        except Exception:
            log.exception("The pool %s can't be stored; SGLang continues without it.", name)

    def _open(self, piece_bytes: int) -> Carrier:
        with self._lock:
            if self._closed:
                raise LayoutError("The storage is closed.")
            if self._carrier is None:
                layout = anchor_layout(self._config, self._settings.weights)
                self._carrier = Carrier(self._settings, layout, *([piece_bytes] if piece_bytes else []))
            return self._carrier

    # --- pages in the pool

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Fetch pages into the pool; returns for each whether its exact bytes are there."""
        del extra_info
        return self._get_pages(_KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages from the pool; returns for each whether it is stored."""
        del extra_info
        if not self._config.is_storage_writer:
            return [True] * len(keys)  # another rank has the same bytes, and stores them
        return self._set_pages(_KV, keys, host_indices)

    def _get_pages(self, name: str, pages: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        def get() -> list[bool]:
            pool, carrier = self._pools[name], self._open(0)
            places = pool.places(pages, indices)
            with self._moved.fetching() as moved:
                here = _whole(carrier.get(places), len(pages))
                moved(sum(here), sum(here) * sum(pool.sizes))
            return here

        return self._safely("Getting pages", get, [False] * len(pages))

    def _set_pages(self, name: str, pages: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        def put() -> list[bool]:
            pool, carrier = self._pools[name], self._open(0)
            places = pool.places(pages, indices)
            with self._moved.storing() as moved:
                here = _whole(self._put(carrier, places), len(pages))
                moved(sum(here), sum(here) * sum(pool.sizes))
            return here

        return self._safely("Storing pages", put, [False] * len(pages))

    # --- pages of several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest prefix that every required pool has, and each pool's own."""
        kv_pages = self.batch_exists(keys, extra_info)

        def look() -> PoolTransferResult:
            found = [
                Found.of(one, self._present(str(one.name), keys[:kv_pages])) for one in pool_transfers or []
            ]
            lengths = usable(kv_pages, found)
            hits = {one.name: one.reach for one in found if one.reach}
            if kv_pages:
                hits[_KV] = kv_pages
            return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

        return self._safely("Looking for pages", look, PoolTransferResult.empty())

    def _present(self, name: str, pages: Sequence[str]) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or not pool.pieces:
            return [False] * len(pages)
        blocks = [one for page in pages for one in zip(pool.keys(page), pool.sizes, strict=True)]
        return _whole(self._open(0).present(blocks), len(pages))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fetch pages into several pools."""
        del extra_info
        return {
            one.name: self._get_pages(str(one.name), one.keys or [], one.host_indices) for one in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        del extra_info
        return {
            one.name: self._set_pages(str(one.name), one.keys or [], one.host_indices) for one in transfers
        }

    # --- pages as flat tensors

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Fill a tensor; None if the page is missing or there is no tensor to fill."""
        del target_sizes
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Fill a tensor for each key; None for a missing page."""
        del target_sizes
        targets = list(target_locations or [None] * len(keys))

        def get() -> list[torch.Tensor | None]:
            wanted = [number for number, one in enumerate(targets) if _is_plain(one)]
            places = [_place(self._flat_key(keys[number]), targets[number]) for number in wanted]
            got: list[torch.Tensor | None] = [None] * len(keys)
            with self._moved.fetching() as moved:
                for number, is_here in zip(wanted, self._open(0).get(places), strict=True):
                    got[number] = targets[number] if is_here else None
                here = [one.nbytes for one in got if one is not None]
                moved(len(here), sum(here))
            return got

        return self._safely("Getting pages", get, [None] * len(keys))

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store a tensor's bytes."""
        del target_location, target_sizes
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store tensors' bytes; returns whether all of them are stored."""
        del target_locations, target_sizes

        def put() -> bool:
            tensors = [one.detach().contiguous().cpu() for one in values or []]
            if len(tensors) != len(keys):
                return False
            places = [_place(self._flat_key(key), one) for key, one in zip(keys, tensors, strict=True)]
            with self._moved.storing() as moved:
                done = self._put(self._open(0), places)
                moved(sum(done), sum(one.length for one, is_in in zip(places, done, strict=True) if is_in))
            return all(done)

        return self._safely("Storing pages", put, failed=False)

    def exists(self, key: str) -> bool:
        """Whether a page could be got."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Count the stored pages, from the first, without a gap."""
        del extra_info

        def look() -> int:
            pool, carrier = self._pools[_KV], self._open(0)
            if not self._in_pieces:
                return carrier.prefix([self._flat_key(key) for key in keys])
            if not pool.pieces:
                return len(keys)  # an index only: its pages' bytes are in other pools
            names = [
                part
                for key in keys
                for name, size in zip(pool.keys(key), pool.sizes, strict=True)
                for part in part_keys(name, size)
            ]
            return carrier.prefix(names) * len(keys) // len(names) if names else 0

        return self._safely("Looking for pages", look, 0)

    # --- the rest

    def clear(self) -> None:
        """Delete what this process has stored, as far back as it remembers."""

        def delete() -> None:
            with self._lock:
                ours, self._ours = list(self._ours), OrderedDict()
            found = self._open(0).delete(ours)
            log.info("Deleted %d of the %d objects that this process stored.", found, len(ours))

        self._safely("Clearing", delete, None)

    def get_stats(self) -> Any:
        """The transfers since the last call, in the form of SGLang's metrics; None if those are off."""
        if not self._config.enable_storage_metrics:
            return None
        return self._safely("Giving statistics", self._moved.taken, None)

    def close(self) -> None:
        """Release the node and the pools' memory."""
        with self._lock:
            carrier, self._carrier, self._closed = self._carrier, None, True
        if carrier is not None:
            self._safely("Closing", carrier.close, None)

    def _flat_key(self, key: str) -> bytes:
        return self._pools[_KV].flat_key(key)

    def _put(self, carrier: Carrier, places: Sequence[Place]) -> list[bool]:
        done = carrier.put(places)
        with self._lock:
            for place, is_in in zip(places, done, strict=True):
                if is_in:
                    self._ours.update(dict.fromkeys(part_keys(place.key, place.length)))
            while len(self._ours) > SGLANG_REMEMBERED_MAX:
                self._ours.popitem(last=False)
        return done

    def _safely(self, doing: str, work: Callable[[], T], failed: T) -> T:
        try:
            return work()
        except KeyError as error:
            log.debug("%s: there is no pool %s.", doing, error)
        except LayoutError as error:
            log.warning("%s: %s", doing, error)
        except Exception:  # no error may stop the engine
            log.exception("%s failed.", doing)
        return failed


def _whole(done: Sequence[bool], pages: int) -> list[bool]:
    """Return for each page whether all of its pieces are done."""
    pieces = len(done) // max(1, pages)
    return [all(done[page * pieces : (page + 1) * pieces]) for page in range(pages)]


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_contiguous() and tensor.device.type == "cpu"


def _place(key: bytes, tensor: torch.Tensor) -> Place:
    return Place(key, tensor.data_ptr(), tensor.nbytes)
