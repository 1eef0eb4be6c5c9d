"""What our connectors pass to a spec or a tier because vLLM doesn't: the model, and a request's adapter.

vLLM passes the model's name and little more; its block hashes include an adapter's name and path. Here both are
identified by their content (`identity`, `weights`).

What always holds: a model that can't be named is neither saved nor loaded, and the log says why.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvstore.engines.vllm.handshake import unshared
from kvstore.engines.vllm.identity import identify_chunks
from kvstore.engines.vllm.weights import adapter_name
from kvstore.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Adapter", "Engine", "engine_of", "record_adapter"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_NAME_BYTES = 16


@dataclass(slots=True)
class Engine:
    """A connector's knowledge of its engine."""

    layout: bytes  # the identity of its chunks; b"": unknown, and none is stored
    saves: bool = True
    loads: bool = True
    adapters: dict[str, bytes] = field(default_factory=dict)  # of requests on their way to the manager
    epoch: bytes = b""  # of the kernels and weights: another one finds nothing of what was stored before
    expected: Callable[[], list[bytes]] | None = None  # all keys of the request that is being looked up
    is_idle: bool = False  # whether the last step computed and copied nothing, and so far this one

    def identified(self, kernels: bytes) -> None:
        """Name chunks by the workers' attention kernels, on which their bytes depend; before the first request."""
        self.epoch = kernels

    def reset(self) -> None:
        """Ignore everything stored so far: the weights may have changed."""
        self.epoch = secrets.token_bytes(_NAME_BYTES)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A request's adapter by content: the engine's own hashes have its path."""

    name: bytes


def engine_of(vllm_config: Any, kv_cache_config: Any, weights: str) -> Engine:
    """Identify the engine's chunks, and whether it saves and loads (`kv_role`)."""
    transfer = vllm_config.kv_transfer_config
    try:
        layout = identify_chunks(vllm_config, kv_cache_config, weights)
    except KvError as reason:
        log.warning("KV is not stored: %s", reason)
        return Engine(b"", saves=False, loads=False)
    return Engine(layout, saves=transfer.is_kv_producer, loads=transfer.is_kv_consumer, epoch=unshared())


def record_adapter(engines: Iterable[Engine], request: Any) -> None:
    """Record the adapter of a new request."""
    if request.lora_request is not None:
        name = blake2b(
            adapter_name(request.lora_request.lora_path).encode(), digest_size=_NAME_BYTES
        ).digest()
        for engine in engines:
            engine.adapters[request.request_id] = name
