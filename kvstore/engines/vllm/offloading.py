"""vLLM's OffloadingSpec over our node, deprecated: `tier` takes its place, behind vLLM's own pool of host memory.

    "kv_connector": "TriggerKvOffloadingConnector", "kv_connector_extra_config": {"node": "127.0.0.1:7070"}

What always holds: a hit of `lookup` is in this host's memory, checked, and stays until it is loaded; so no load fails,
which this interface could not report. Its memory is a file in /dev/shm that is unlinked once engine and worker have
mapped it. vLLM's block hashes must be the same in every process: with a `prefix_caching_hash_algo` that is not
cryptographic, set PYTHONHASHSEED. Two engines share a chunk only if they would share the connector's pages
(`identity`).
What it doesn't do: chunks of several blocks; ranks on several hosts; work under vLLM's own `OffloadingConnector`, which
doesn't give a spec enough to identify the model.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

from kvstore.config import show_size
from kvstore.engines.stores import open_store
from kvstore.engines.vllm.host import HostMemory, State
from kvstore.engines.vllm.model_hints import Adapter, Engine
from kvstore.engines.vllm.settings import ENGINE, Settings
from kvstore.errors import ConfigError
from kvstore.limits import BLOCK_BYTES_MAX, VLLM_SAVING_WAIT_S
from kvstore.names import block_key

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["TriggerKvOffloadingSpec"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_PAGE = mmap.PAGESIZE
_NAME_BYTES = 16
_RESULTS = {
    State.UNKNOWN: LookupResult.RETRY,
    State.ABSENT: LookupResult.MISS,
    State.FILLING: LookupResult.HIT_PENDING,
    State.HERE: LookupResult.HIT,
}


class _Slots(LoadStoreSpec):  # type: ignore[misc]
    """The slots of chunks in the host's memory, in the order of the engine's blocks."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


class TriggerKvOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """The common base of both sides."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._settings = Settings.of_vllm(self.extra_config)
        engine = self.extra_config.get(ENGINE)
        if not isinstance(engine, Engine):
            raise ConfigError(
                "A TriggerKvOffloadingSpec needs the model's identity: "
                'set kv_connector to "TriggerKvOffloadingConnector", not "OffloadingConnector".'
            )
        self._engine = engine
        if self.blocks_per_chunk != 1:
            raise ConfigError("A chunk is one block: leave out block_size and blocks_per_chunk.")
        self._rank_bytes = config.worker_kv_bytes_per_block
        ranks = max(1, config.parallel.world_size)
        self._slot_bytes = -(-self._rank_bytes * ranks // _PAGE) * _PAGE
        if not 0 < self._slot_bytes <= BLOCK_BYTES_MAX:
            raise ConfigError(
                f"A block has {show_size(self._slot_bytes)} on all ranks; the limit is {show_size(BLOCK_BYTES_MAX)}."
            )
        if self._settings.host_bytes < 2 * self._slot_bytes:
            raise ConfigError(f"host_bytes must hold some blocks of {show_size(self._slot_bytes)}.")
        # A MultiConnector may have several of us for one engine.
        name = _short(
            f"{config.engine_id} {','.join(self._settings.reach.nodes)} {self._settings.reach.tenant}"
        )
        self._path = Path("/dev/shm") / f"triggerkv-{name}"  # noqa: S108  # shared memory it is
        self._manager: _Manager | None = None

    def get_manager(self) -> OffloadingManager:
        """Make the scheduler's side."""
        if self._manager is None:
            self._claim()
            client = open_store(self._settings, self._engine.layout, block_bytes_max=self._slot_bytes)
            layout, named = self._engine.layout, self._settings.named
            host = HostMemory(
                client,
                self._memory(),
                self._slot_bytes,
                lambda key: named(block_key(layout, key)),
                timeout_s=self._settings.load_timeout_ms / 1000,
            )
            self._manager = _Manager(host, self._path, self._engine)
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Make a worker's side."""
        begin = self.config.parallel.rank * self._rank_bytes
        return _Worker(kv_caches, self._memory(), self._slot_bytes, begin)

    def _claim(self) -> None:
        """Reserve the memory for one manager, for the life of this process: two would overwrite each other's slots."""
        self._claimed = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._claimed)
            raise ConfigError(
                "Two offloading connectors of one engine need different nodes or tenants."
            ) from None

    def _memory(self) -> mmap.mmap:
        size = self._settings.host_bytes // self._slot_bytes * self._slot_bytes
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)


def _short(engine_id: str) -> str:
    return blake2b(engine_id.encode(), digest_size=12).hexdigest()


class _Manager(OffloadingManager):  # type: ignore[misc]
    """The scheduler's side."""

    def __init__(self, host: HostMemory, path: Path, engine: Engine) -> None:
        self._host = host
        self._path: Path | None = path
        self._engine = engine
        self._epoch = b""

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a chunk can be loaded now."""
        if not self._engine.loads:
            return LookupResult.MISS
        return _RESULTS[self._host.look(key + self._more(req_context))]

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> LoadStoreSpec:
        """Hold the slots of hits for a load."""
        return _Slots(self._host.hold(self._named(keys, req_context)))

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Release the slots of a completed load."""
        self._unname()
        self._host.release(self._named(keys, req_context))

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Mark chunks as recently used."""
        self._host.touch(self._named(keys, req_context))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        """Assign slots to missing chunks; none for an engine that doesn't save."""
        of_vllm = dict(zip(self._named(keys, req_context), keys, strict=True))
        given = self._host.begin_fill(list(of_vllm)) if self._engine.saves else []
        return PrepareStoreOutput(
            [of_vllm[key] for key, _ in given], _Slots([number for _, number in given]), []
        )

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:  # noqa: FBT001, FBT002  # vLLM's signature
        """The chunks are in their slots; send them to the node."""
        self._unname()
        self._host.end_fill(self._named(keys, req_context), filled=success)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Record the adapter of a request."""
        if (name := self._engine.adapters.pop(req_context.req_id, None)) is not None:
            req_context.set_state(Adapter(name))
        return RequestOffloadingContext()

    def _named(self, keys: Collection[bytes], req_context: Any) -> list[bytes]:
        more = self._more(req_context)
        return [key + more for key in keys]

    def _more(self, req_context: Any) -> bytes:
        """What vLLM's hashes lack; the same for all chunks of a request."""
        adapter = req_context.get_state(Adapter)
        return self._engine.epoch + self._epoch + (adapter.name if adapter is not None else b"")

    def on_schedule_end(self, context: Any) -> None:
        """Wait a moment for the node's answers instead of polling again at once."""
        if not context.new_req_ids:
            self._host.wait(VLLM_SAVING_WAIT_S)

    def reset_cache(self) -> None:
        """Ignore everything stored so far, here or on the node: the weights may have changed."""
        self._epoch = secrets.token_bytes(_NAME_BYTES)
        self._host.clear()

    def shutdown(self) -> None:
        """Unlink the file, if it still has a name."""
        self._unname()

    def _unname(self) -> None:
        """All workers have mapped the memory, so its file needs no name."""
        if self._path is not None:
            with suppress(FileNotFoundError):
                self._path.unlink()
            self._path = None


class _Worker(OffloadingWorker):  # type: ignore[misc]
    """A worker's side: it copies."""

    def __init__(self, caches: Any, memory: mmap.mmap, slot_bytes: int, begin: int) -> None:
        self._slots = torch.frombuffer(memory, dtype=torch.int8).view(-1, slot_bytes)
        self._parts = []  # group by group: tensors, and the offsets of their pages in a slot
        for refs in caches.group_data_refs:
            at, parts = begin, []
            for ref in refs:
                parts.append((caches.tensors[ref.tensor_idx].tensor, at, ref.page_size_bytes))
                at += ref.page_size_bytes
            self._parts.append(parts)
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks into slots."""
        for tensor, at, size, blocks, slots in self._pieces(src_spec, dst_spec):
            self._slots[slots, at : at + size] = tensor[blocks, :size].to("cpu")
        return self._done(job_id, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002, FBT001, FBT002  # vLLM's signature
        """Copy slots into blocks."""
        for tensor, at, size, blocks, slots in self._pieces(dst_spec, src_spec):
            tensor[blocks, :size] = self._slots[slots, at : at + size].to(tensor.device)
        return self._done(job_id, src_spec)

    def _pieces(self, blocks: Any, slots: _Slots) -> list[tuple[Any, int, int, Any, Any]]:
        assert len(blocks.block_ids) == len(slots.numbers)
        ids = torch.from_numpy(blocks.block_ids).long()
        numbers = torch.tensor(slots.numbers)
        pieces, first = [], 0
        for parts, count in zip(self._parts, blocks.group_sizes, strict=True):
            some = slice(first, first + count)
            pieces += [(tensor, at, size, ids[some], numbers[some]) for tensor, at, size in parts if count]
            first += count
        return pieces

    def _done(self, job_id: int, slots: _Slots) -> bool:
        size = len(slots.numbers) * self._slots.shape[1]
        self._ended.append(TransferResult(job_id, success=True, transfer_size=size, transfer_time=None))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The copies that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is pending: a submitted job is done when it returns."""
