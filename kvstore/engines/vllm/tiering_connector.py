"""vLLM's OffloadingConnector with its own CPU pool, and our node as a tier behind it (`tier`).

    --kv-transfer-config '{"kv_connector": "TriggerKvTieringConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [{"type": "triggerkv", "node": "127.0.0.1:7070"}]}}'

It is vLLM's connector with vLLM's `TieringOffloadingSpec`. It also gives each of our tiers the identity of the chunks
and a request's adapter (`model_hints`), and notifies it of a cache reset, after which the weights may differ, and of
steps that compute nothing.

What always holds: chunks stored before a reset are not found after it.
What it doesn't do: anything else; pool, copies and scheduling are vLLM's, and other tiers may be used besides ours.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.engines.vllm.model_hints import Engine, engine_of, tell_adapter
from kvstore.engines.vllm.settings import ENGINE
from kvstore.engines.vllm.tier import TriggerKvTier
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TriggerKvTieringConnector"]

_SPEC = {"spec_name": "TieringOffloadingSpec"}


class TriggerKvTieringConnector(OffloadingConnector):  # type: ignore[misc]
    """The scheduler has one instance, with the tiers, and so has each worker, without."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._engines: list[Engine] = []

        def tell(tier: dict[str, Any]) -> dict[str, Any]:
            if role is not KVConnectorRole.SCHEDULER:
                return tier
            self._engines.append(engine_of(vllm_config, kv_cache_config, tier.get("weights", "")))
            return tier | {ENGINE: self._engines[-1]}

        super().__init__(_with(vllm_config, tell), role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """Record the adapter of a request."""
        tell_adapter(self._engines, request)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Record whether this step computes anything."""
        meta = super().build_connector_meta(scheduler_output)
        for engine in self._engines:
            engine.is_idle = not scheduler_output.num_scheduled_tokens
        return meta

    def reset_cache(self) -> bool | None:
        """Ignore everything stored so far; pending jobs end first, under their old names."""
        is_reset: bool | None = super().reset_cache()
        for engine in self._engines:
            engine.reset()
        return is_reset

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        """Make the counters of vLLM's Prometheus page."""
        return super().build_prom_metrics(_with(vllm_config, lambda tier: tier), *arguments, **named)


def _with(vllm_config: Any, tell: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The same configuration with vLLM's tiering spec named and our tiers' settings added."""
    with suppress(ValueError):  # it is already registered
        SecondaryTierFactory.register_tier("triggerkv", TriggerKvTier.__module__, TriggerKvTier.__name__)
    transfer = vllm_config.kv_transfer_config
    extra = _SPEC | transfer.kv_connector_extra_config
    tiers = [dict(tier) for tier in extra.get("secondary_tiers") or ()]
    ours = [issubclass(SecondaryTierFactory.get_tier_class(tier), TriggerKvTier) for tier in tiers]
    if not any(ours):
        raise ConfigError('secondary_tiers has no tier of type "triggerkv".')
    extra["secondary_tiers"] = [
        tell(tier) if is_ours else tier for tier, is_ours in zip(tiers, ours, strict=True)
    ]
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = replace(transfer, kv_connector_extra_config=extra)
    return changed
