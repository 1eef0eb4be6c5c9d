"""vLLM's OffloadingConnector with its own CPU pool, and our node as a tier behind it (`tier`).

    --kv-transfer-config '{"kv_connector": "TriggerKvTieringConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [{"type": "triggerkv", "node": "127.0.0.1:7070"}]}}'

It is vLLM's connector with vLLM's `TieringOffloadingSpec`. It also gives each of our tiers the identity of the chunks
and a request's adapter (`model_hints`), and notifies it of a cache reset, after which the weights may differ, and of
steps that compute nothing. An idle engine would pass a step, and then sleep for a millisecond, between a look-up, its
answer, a load, and its end: here all of them happen within one step, if they take milliseconds.

What always holds: chunks stored before a reset are not found after it. No step that computes or copies anything waits.
What it doesn't do: anything else; pool, copies and scheduling are vLLM's, and other tiers may be used besides ours.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.clock import SystemClock
from kvstore.engines.vllm.handshake import ReportsKernels
from kvstore.engines.vllm.model_hints import Engine, engine_of, record_adapter
from kvstore.engines.vllm.settings import ENGINE
from kvstore.engines.vllm.tier import TriggerKvTier
from kvstore.errors import ConfigError
from kvstore.limits import VLLM_TIER_STEP_MS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TriggerKvTieringConnector"]

_SPEC = {"spec_name": "TieringOffloadingSpec"}
_NO_STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class TriggerKvTieringConnector(ReportsKernels, OffloadingConnector):  # type: ignore[misc]
    """The scheduler has one instance, with the tiers, and so has each worker, without."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._engines: list[Engine] = []
        self._clock = SystemClock()
        self._has_work = False  # whether this step computes or copies anything
        self._until_ns = 0  # until when it may wait

        def with_engine(tier: dict[str, Any]) -> dict[str, Any]:
            if role is not KVConnectorRole.SCHEDULER:
                return tier
            self._engines.append(engine_of(vllm_config, kv_cache_config, tier.get("weights", "")))
            return tier | {ENGINE: self._engines[-1]}

        super().__init__(_with(vllm_config, with_engine), role, kv_cache_config)

    def _identified(self, kernels: bytes) -> None:
        for engine in self._engines:
            engine.identified(kernels)

    def on_new_request(self, request: Any) -> None:
        """Record the adapter of a request."""
        record_adapter(self._engines, request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's; an idle engine waits for its tiers here, as it would by steps that compute nothing."""
        if not self._until_ns:  # all requests of a step wait for one time together
            self._until_ns = self._clock.monotonic_ns() + VLLM_TIER_STEP_MS * 1_000_000
        for engine in self._engines:
            engine.expected = (lambda: self._keys(request, num_computed_tokens)) if self._has_time() else None
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        for engine in self._engines:
            engine.expected = None
        while found[0] is None and self._may_wait():
            found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def _has_time(self) -> bool:
        return self._clock.monotonic_ns() < self._until_ns

    def _keys(self, request: Any, num_computed_tokens: int) -> list[bytes]:
        """The keys that vLLM looks up one by one, in its order; none if the order depends on the answers."""
        groups = self.scheduler.config.kv_group_configs
        if len(groups) > 1 or groups[0].sliding_window_size_in_chunks is not None:
            return []
        (group,) = groups
        first = num_computed_tokens // group.tokens_per_chunk + 1
        hashes = request.block_hashes[first * group.hashes_per_chunk - 1 :: group.hashes_per_chunk]
        return [make_offload_key(one, group.group_idx) for one in hashes]

    def _may_wait(self) -> bool:
        """Begin look-ups and loads that the step has asked for; whether the step may wait for them."""
        if not self._has_time() or not all(engine.is_idle for engine in self._engines):
            return False
        manager = self.scheduler.manager
        tiers = manager.secondary_tiers
        if not all(isinstance(tier, TriggerKvTier) for tier in tiers):
            return False  # others expect the end of a step once a step
        manager.on_schedule_end(_NO_STEP)
        return any(tier.is_awaited for tier in tiers)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record that the step has something to compute or to copy, for which it doesn't wait."""
        self._has_work = True
        for engine in self._engines:
            engine.is_idle = False
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Record whether this step computes or copies anything."""
        meta = super().build_connector_meta(scheduler_output)
        is_idle = not scheduler_output.num_scheduled_tokens and not self._has_work
        self._has_work, self._until_ns = False, 0
        for engine in self._engines:
            engine.is_idle = is_idle
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


def _with(vllm_config: Any, with_engine: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
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
        with_engine(tier) if is_ours else tier for tier, is_ours in zip(tiers, ours, strict=True)
    ]
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = replace(transfer, kv_connector_extra_config=extra)
    return changed
