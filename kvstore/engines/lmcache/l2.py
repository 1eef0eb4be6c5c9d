"""`TriggerKvL2Adapter`: a plugin of LMCache's server, its second-level cache.

    {"type": "plugin", "module_path": "kvstore.engines.lmcache.l2", "class_name": "TriggerKvL2Adapter",
     "adapter_params": {"node": "127.0.0.1:7070"}}

Objects move directly from and to the server's L1 memory if it could be registered. Locks are pins on the node.

What always holds: only the constructor raises, for an invalid configuration. A submit returns at once; every task ends
by its deadline, has its result once, and signals its own descriptor. A bit of a load is set only if the exact bytes are
in the object.

What it doesn't do: list keys, or bound what the node keeps: the node evicts by itself.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvstore.engines.carrier import Carrier, part_keys
from kvstore.engines.common_settings import EngineSettings
from kvstore.engines.lmcache.locks import Locks
from kvstore.engines.lmcache.objects import formats, formats_of, object_key, place
from kvstore.errors import FabricError, LayoutError
from kvstore.limits import LMCACHE_FORMATS_MAX, LMCACHE_LOCK_MS, LMCACHE_TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

    from nic_offload.handle import Handle

__all__ = ["TriggerKvL2Adapter"]

log = logging.getLogger(f"lmcache.{__name__}")  # whose handlers and level are LMCache's

_BYTES = "uint8"  # the format of any object serialized by LMCache
T = TypeVar("T")


class _Tasks:
    """Tasks of one kind: a thread, a descriptor, and the results not taken yet."""

    def __init__(self, name: str) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.thread = ThreadPoolExecutor(1, f"kvstore-{name}")
        self.results: dict[int, Any] = {}
        self.waiting = 0


class TriggerKvL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # lmcache is in .venv-engines only
    """A node, for one server."""

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        self._settings = EngineSettings.of(config, where="adapter_params")
        self._carrier = Carrier(self._settings, b"lmcache mp")
        if l1_memory_desc is not None:
            stable = l1_memory_desc.stable_registration_size
            try:
                self._carrier.register(l1_memory_desc.ptr, l1_memory_desc.size if stable is None else stable)
            except FabricError:
                self._carrier.close()
                raise
        self._lock = threading.Lock()
        self._next_task = 0
        self._closed = False
        self._stores, self._lookups, self._loads = _Tasks("store"), _Tasks("lookup"), _Tasks("load")
        self._locks = Locks()
        self._formats = {_BYTES}  # formats in which objects were seen

    def get_store_event_fd(self) -> int:
        """The descriptor that signals finished stores."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """The descriptor that signals finished look-ups."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """The descriptor that signals finished loads."""
        return self._loads.fd

    # --- storing

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to store objects."""
        return self._submit(self._stores, lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        places = [place(self._name(key, one), one) for key, one in zip(keys, objects, strict=True)]
        done = self._carrier.put(places)
        stored = [(key, one.length) for key, one, is_in in zip(keys, places, done, strict=True) if is_in]
        if stored:
            self._notify_keys_stored([key for key, _ in stored], [size for _, size in stored])
        return L2StoreResult(all(done), sum(size for _, size in stored))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Take the results of stores."""
        with self._lock:
            results, self._stores.results = self._stores.results, {}
        return results

    # --- looking up

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Begin to look up objects, and to pin the stored ones."""
        return self._submit(self._lookups, lambda: self._look_up(keys, group_layout_descs), Bitmap(len(keys)))

    def _look_up(self, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc]) -> Bitmap:
        """An object may have been written as it is or serialized by LMCache; a load asks for the form it wants."""
        asked = []
        for number, key in enumerate(keys):
            desc = descs.get(key.object_group_id)
            said = {_BYTES} | ({formats(desc.dtypes)} if desc is not None else self._seen())
            asked += [(number, object_key(key, one, self._settings.weights)) for one in said]
        here = self._carrier.present([(name, 0) for _, name in asked])
        found = {number for (number, _), is_here in zip(asked, here, strict=True) if is_here}
        names = [name for (_, name), is_here in zip(asked, here, strict=True) if is_here]
        if names and (pin := self._carrier.pin(names, LMCACHE_LOCK_MS)) is not None:
            self._locks.add(pin, (keys[number] for number in found))
        self._notify_keys_accessed([keys[number] for number in sorted(found)])
        return _bits(len(keys), found)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Take the result of a look-up, once; None before it has ended and after it was taken."""
        return self._taken(self._lookups, task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Release objects for eviction. If the node can't be reached, their protection expires."""
        if over := self._locks.take(keys):
            self._later(self._lookups, lambda: _close(over))

    # --- loading

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to load objects."""
        return self._submit(self._loads, lambda: self._load(keys, objects), Bitmap(len(keys)))

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        here = self._carrier.get(
            [place(self._name(key, one), one) for key, one in zip(keys, objects, strict=True)]
        )
        return _bits(len(keys), {number for number, is_here in enumerate(here) if is_here})

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Take the result of a load, once; None before it has ended and after it was taken."""
        return self._taken(self._loads, task_id)

    # --- the rest

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, in every format in which they were seen here."""

        def delete() -> None:
            sizes = []
            gone = []
            for key in keys:
                names = [object_key(key, one, self._settings.weights) for one in self._seen()]
                lengths = self._carrier.lengths(names)
                if any(lengths) and self._carrier.delete(
                    [
                        part
                        for name, size in zip(names, lengths, strict=True)
                        for part in part_keys(name, size)
                    ]
                ):
                    gone.append(key)
                    sizes.append(sum(lengths))
            if gone:
                self._notify_keys_deleted(gone, sizes)

        self._later(self._stores, delete)

    def report_status(self) -> dict[str, Any]:
        """Return its state."""
        with self._lock:
            waiting = {
                name: one.waiting
                for name, one in (("store", self._stores), ("lookup", self._lookups), ("load", self._loads))
            }
        return {
            "is_healthy": not self._closed,
            "type": "triggerkv",
            "node": ",".join(self._settings.reach.nodes),
            "waiting": waiting,
            "locks": len(self._locks),
        }

    def close(self) -> None:
        """End pending transfers, with a deadline, and close the client."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.thread.shutdown(cancel_futures=True)
        _close(self._locks.take_all())
        self._carrier.close()
        for tasks in (self._stores, self._lookups, self._loads):
            os.close(tasks.fd)

    # --- tasks

    def _name(self, key: ObjectKey, memory: MemoryObj) -> bytes:
        written = formats_of(memory)
        with self._lock:
            if len(self._formats) < LMCACHE_FORMATS_MAX:
                self._formats.add(written)
        return object_key(key, written, self._settings.weights)

    def _seen(self) -> set[str]:
        with self._lock:
            return set(self._formats)

    def _submit(self, tasks: _Tasks, work: Callable[[], T], failed: T) -> int:
        def run() -> None:
            result = failed
            try:
                result = work()
            except LayoutError as error:
                log.warning("A task failed: %s", error)
            except Exception:  # no error may stop LMCache
                log.exception("A task failed.")
            finally:
                with self._lock:
                    tasks.results[number] = result
                    tasks.waiting -= 1
                os.eventfd_write(tasks.fd, 1)

        with self._lock:  # which `close` takes before it ends the threads
            number, self._next_task = self._next_task, self._next_task + 1
            if not self._closed and tasks.waiting < LMCACHE_TASKS_MAX:
                tasks.waiting += 1
                tasks.thread.submit(run)
            else:
                tasks.results[number] = failed
                if not self._closed:
                    os.eventfd_write(tasks.fd, 1)
        return number

    def _later(self, tasks: _Tasks, work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                work()
            except Exception:  # no error may stop LMCache
                log.exception("The node was not notified.")

        with self._lock:
            if not self._closed:
                tasks.thread.submit(run)

    def _taken(self, tasks: _Tasks, number: int) -> Any:
        with self._lock:
            return tasks.results.pop(number, None)


def _close(pins: list[Handle]) -> None:
    for pin in pins:
        pin.close()


def _bits(count: int, which: set[int]) -> Bitmap:
    bits = Bitmap(count)
    for number in which:
        bits.set(number)
    return bits
