"""vLLM's OffloadingConnector with our spec, which it gives the model's identity; deprecated for `tiering_connector`.

    --kv-transfer-config '{"kv_connector": "TriggerKvOffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"node": "127.0.0.1:7070"}}'

vLLM gives a spec the model's name and little more. This connector adds the identity of the chunks (`identity`), whether
this engine saves and loads (`kv_role`), and requests' adapters by their content.

What always holds: chunks of a model that can't be identified are not stored, and the log has the reason.
What it doesn't do: anything else; all of its work is vLLM's.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvstore.engines.vllm.handshake import ReportsKernels
from kvstore.engines.vllm.model_hints import engine_of, record_adapter
from kvstore.engines.vllm.settings import ENGINE, Settings

__all__ = ["TriggerKvOffloadingConnector"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_SPEC = {"spec_name": "TriggerKvOffloadingSpec", "spec_module_path": "kvstore.engines.vllm.offloading"}


class TriggerKvOffloadingConnector(ReportsKernels, OffloadingConnector):  # type: ignore[misc]
    """The scheduler has one instance, and so has each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settings = Settings.of_vllm(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:  # once, not once a worker as well
            log.warning("TriggerKvOffloadingConnector is deprecated: use TriggerKvTieringConnector.")
        self._engine = engine_of(vllm_config, kv_cache_config, settings.weights)
        super().__init__(_with(vllm_config, {ENGINE: self._engine}), role, kv_cache_config)

    def _identified(self, kernels: bytes) -> None:
        self._engine.identified(kernels)

    def on_new_request(self, request: Any) -> None:
        """Record the adapter of a request."""
        record_adapter([self._engine], request)
        super().on_new_request(request)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        """Make the counters of vLLM's Prometheus page."""
        return super().build_prom_metrics(_with(vllm_config, {}), *arguments, **named)


def _with(vllm_config: Any, more: dict[str, Any]) -> Any:
    """The same configuration with our spec named; a MultiConnector makes such copies for its parts, too."""
    transfer = vllm_config.kv_transfer_config
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = replace(
        transfer, kv_connector_extra_config=_SPEC | transfer.kv_connector_extra_config | more
    )
    return changed
