"""How our connectors' workers report their attention kernels (`kernels`) to the scheduler, by vLLM's handshake.

vLLM calls it once, after the KV memory was registered and before the first request. In a MultiConnector it hands the
first worker's answer to all connectors, and some of them refuse another's: beside such a one we answer nothing.

What always holds: while a scheduler doesn't know its workers' kernels, no other engine finds its blocks, nor does it
find theirs (`unshared`); the worker logs why.
"""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
)

from kvstore.engines.vllm.kernels import DIGEST_BYTES, combined, kernels_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Kernels", "ReportsKernels", "unshared"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's


def unshared() -> bytes:
    """A name for unknown kernels, which no other engine has."""
    return secrets.token_bytes(DIGEST_BYTES)


@dataclass(frozen=True)
class Kernels(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """One worker's."""

    digest: bytes


class ReportsKernels(ABC):
    """The part of a connector of ours, before vLLM's class."""

    _vllm_config: Any
    _kv_cache_config: Any

    def get_handshake_metadata(self) -> Kernels | None:
        """Return this worker's kernels, if vLLM's handshake can have them."""
        if not _may_answer(self, self._vllm_config.parallel_config.pipeline_parallel_size):
            return None
        digest = kernels_of(
            self._vllm_config.compilation_config.static_forward_context,
            [group.layer_names for group in self._kv_cache_config.kv_cache_groups],
            self._kv_cache_config.num_blocks,
        )
        if digest is None:
            log.warning(
                "vLLM doesn't say which kernels a layer has: other engines don't find what is stored."
            )
            return None
        return Kernels(digest)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Take the kernels of all workers, if they have reported them."""
        ours = {rank: one.digest for rank, one in metadata.items() if isinstance(one, Kernels)}
        if ours and len(ours) == len(metadata):
            self._identified(combined(ours))

    @abstractmethod
    def _identified(self, kernels: bytes) -> None:
        """Name blocks by these kernels from now on."""


def _may_answer(connector: Any, stages: int) -> bool:
    """Whether no other connector of this engine would get our answer and refuse it."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else connector
    others = [one for one in getattr(group, "_connectors", ()) if not isinstance(one, ReportsKernels)]
    if any(_takes_part(type(one)) for one in others) or (others and stages > 1):
        log.warning(
            "Another connector needs vLLM's handshake: other engines don't find what this one stores."
        )
        return False
    return True


def _takes_part(kind: type) -> bool:
    names = (
        "get_handshake_metadata",
        "set_xfer_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
    )
    return any(getattr(kind, name) is not getattr(KVConnectorBase_V1, name) for name in names)
