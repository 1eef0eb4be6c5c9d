"""Our connector, with a record of every object's bytes: when it is saved, and when it has been loaded."""

from __future__ import annotations

import os
import random
from collections import Counter
from ctypes import string_at
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.client import RegisteredMemory
from kvstore.engines.vllm import worker
from kvstore.engines.vllm.connector import TriggerKvConnector
from kvstore.engines.vllm.connector_metadata import Plan
from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.kv_memory import KvMemory
from kvstore.engines.vllm.offloading import TriggerKvOffloadingSpec
from kvstore.engines.vllm.tier import TriggerKvTier
from kvstore.engines.vllm.worker import Working
from nic_offload.host_device import HostDevice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from kvstore.engines.vllm.connector_metadata import Wanted
    from kvstore.engines.vllm.loading import Loaded
    from kvstore.engines.vllm.page_transport import Object
    from nic_offload.device import Copy
    from nic_offload.host_device import HostStream

__all__ = [
    "BrokenConnector",
    "LossyConnector",
    "LossyTier",
    "OnDeviceConnector",
    "RecordingConnector",
    "RecordingSpec",
    "RecordingTier",
]


class RecordingConnector(TriggerKvConnector):
    """Writes lines of `saved KEY DIGEST` and `loaded KEY DIGEST`."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert isinstance(self._working, Working)
        assert self._identity is not None
        with Path(os.environ["TEST_DIGESTS"]).open("a") as lines:
            lines.write(f"layout {self._identity.layout.hex()} -\n")
        take = self._working._take

        def record(loaded: Loaded) -> None:
            missing = set(loaded.missing)
            self._record("loaded", [wanted for wanted in loaded.load.blocks if wanted not in missing])
            take(loaded)

        self._working._take = record  # type: ignore[method-assign]

    def wait_for_save(self) -> None:
        plan: Any = self._connector_metadata
        if isinstance(plan, Plan):
            self._record("saved", plan.saves)
        super().wait_for_save()

    def take_events(self) -> Iterable[Any]:
        events = list(super().take_events())
        with Path(os.environ["TEST_DIGESTS"]).open("a") as lines:
            lines.writelines(
                f"event {event.block_hashes[0].hex()} {len(event.token_ids)}\n" for event in events
            )
        return events

    def _record(self, what: str, blocks: Iterable[Wanted]) -> None:
        assert isinstance(self._working, Working)
        memory = self._working.memory
        assert isinstance(memory, KvMemory)
        with Path(os.environ["TEST_DIGESTS"]).open("a") as lines:
            for wanted in blocks:
                group = memory.groups[wanted.group]
                (rows,) = memory.pieces(wanted.group, [wanted.block])
                for key, run in zip(group.objects([wanted.digest], 0), group.runs, strict=True):
                    pages = [
                        memory.bytes_of(buffer, offset, length)
                        for buffer, length, offset in rows[run.start : run.stop].tolist()
                    ]
                    digest = blake2b(b"".join(pages), digest_size=16).hexdigest()
                    lines.write(f"{what} {key.hex()} {digest}\n")


class LossyConnector(RecordingConnector):
    """Some blocks are lost between look-up and load, and other bytes are in their place."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert isinstance(self._working, Working)
        memory, transport = self._working.memory, self._working._loads._transport
        assert isinstance(memory, KvMemory)
        fetch, dice = transport.fetch, random.Random(7)

        def lossy(objects: Sequence[Object], timeout_s: float) -> list[bool]:
            here = fetch(objects, timeout_s)
            for at, one in enumerate(objects):
                if dice.random() < 0.15:
                    for buffer, length, offset in one.pieces.tolist():
                        place = memory.bytes_of(buffer, offset, length)
                        place[:] = np.float32(dice.uniform(1, 9)).tobytes() * (length // 4)
                    here[at] = False
            return here

        transport.fetch = lossy  # type: ignore[method-assign]


class BrokenConnector(TriggerKvConnector):
    """Loads of found blocks always fail."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert isinstance(self._working, Working)
        transport: Any = self._working._loads._transport
        transport.fetch = lambda objects, timeout_s: [False] * len(objects)  # noqa: ARG005


class RecordingSpec(TriggerKvOffloadingSpec):
    """Records an OffloadingSpec's chunks when the engine has filled them, and when it is about to read them."""

    def get_manager(self) -> Any:
        manager = super().get_manager()
        host = manager._host
        fill, hold = host.end_fill, host.hold

        def end_fill(keys: Sequence[bytes], *, filled: bool) -> None:
            record("saved", keys)
            fill(keys, filled=filled)

        def hold_keys(keys: Sequence[bytes]) -> list[int]:
            numbers: list[int] = hold(keys)
            record("loaded", keys)
            return numbers

        def record(what: str, keys: Sequence[bytes]) -> None:
            with Path(os.environ["TEST_DIGESTS"]).open("a") as lines:
                for key in keys:
                    begin = host._slots[key].number * host._slot_bytes
                    memory = host._region
                    content = (
                        memory.copied(begin, host._slot_bytes)
                        if isinstance(memory, RegisteredMemory)
                        else string_at(memory.address + begin, host._slot_bytes)
                    )
                    lines.write(f"{what} {key.hex()} {blake2b(content, digest_size=16).hexdigest()}\n")

        host.end_fill, host.hold = end_fill, hold_keys
        return manager


class RecordingTier(TriggerKvTier):
    """Records a tier's chunks when vLLM stores them, and when they have been loaded."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        _write([f"layout {self._layout.hex()} -"])

    def submit_store(self, job_metadata: Any) -> None:
        more = self._more(job_metadata.req_context)
        self._record("saved", zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True), more)
        super().submit_store(job_metadata)

    def _loaded(self, job_id: int, job: Any, moved: Any) -> Any:
        came = zip(job.keys, job.chunks, moved.whole, strict=True)
        self._record("loaded", ((key, chunk) for key, chunk, is_here in came if is_here), job.more)
        return super()._loaded(job_id, job, moved)

    def take_events(self) -> Iterable[Any]:
        events = list(super().take_events())
        _write([f"event {key.hex()} {event.medium.value}" for event in events for key in event.keys])
        return events

    def _record(self, what: str, chunks: Iterable[tuple[bytes, int]], more: bytes) -> None:
        recorded = list(chunks)
        names = self._names(key + more for key, _ in recorded)
        pool = np.asarray(self._primary_kv_view)
        _write(
            f"{what} {name.hex()} {blake2b(pool[chunk].tobytes(), digest_size=16).hexdigest()}"
            for name, (_, chunk) in zip(names, recorded, strict=True)
        )


class LossyTier(RecordingTier):
    """Some chunks are lost between look-up and load, and other bytes are in their place."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        get, dice = self._carrier.get, random.Random(7)

        def lossy(places: Sequence[Any], *, timeout_s: float) -> list[bool]:
            here = get(places, timeout_s=timeout_s)
            for at, one in enumerate(places):
                if dice.random() < 0.15:
                    chunk = (one.address - self._address) // self._size
                    self._pool[chunk] = dice.randrange(1, 99)
                    here[at] = False
            return here

        self._pool = np.asarray(self._primary_kv_view)
        self._carrier.get = lossy  # type: ignore[assignment,method-assign]

    def shutdown(self) -> None:
        del self._pool
        super().shutdown()


def _write(lines: Iterable[str]) -> None:
    with Path(os.environ["TEST_DIGESTS"]).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


class _Eager(HostDevice):
    """A device that has done all of its work when a call returns, as the CPU has that it stands for."""

    def copy(self, stream: HostStream, copies: Iterable[Copy]) -> None:
        super().copy(stream, copies)
        self.run()

    def store(self, stream: HostStream, word: int, value: int) -> None:
        super().store(stream, word, value)
        self.run()

    def record(self, stream: HostStream) -> Any:
        event = super().record(stream)
        self.run()
        return event

    def wait(self, stream: HostStream, event: Any) -> None:
        super().wait(stream, event)
        self.run()


class OnDeviceConnector(TriggerKvConnector):
    """Takes the KV of vLLM for CPUs for a device's. Writes how often each step computed each layer."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        worker._memory = lambda caches, *given: DeviceMemory(_Eager(), caches, *given)
        super().register_kv_caches(kv_caches)
        assert isinstance(self._working, Working)
        self._layers: Counter[str] = Counter()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None:
        self._layers[layer_name] += 1
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **more)

    def wait_for_save(self) -> None:
        with Path(os.environ["TEST_DIGESTS"]).open("a") as lines:
            lines.write(f"layers {max(self._layers.values(), default=0)} {len(self._layers)}\n")
        self._layers.clear()
        super().wait_for_save()
