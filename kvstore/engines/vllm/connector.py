"""vLLM's KVConnectorBase_V1 over our node.

    --kv-transfer-config '{"kv_connector": "TriggerKvConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"node": "127.0.0.1:7070"}}'

(`plugin` registers the name with vLLM.) A `kv_producer` loads nothing, and a `kv_consumer` saves nothing.

What always holds: once the engine has started, nothing raises into it; it computes whatever could not be loaded. No
wait exceeds the deadlines of `settings`, and a node that is away costs next to nothing (the client's breaker). It owns
nothing that needs `shutdown`.
What it doesn't do: support a model whose KV can't be named by tokens (`identity` says which); it logs that and stays
inactive.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvstore.engines.vllm.connector_metadata import Plan, StoredReport
from kvstore.engines.vllm.handshake import ReportsKernels, unshared
from kvstore.engines.vllm.identity import identify
from kvstore.engines.vllm.scheduler import Scheduling
from kvstore.engines.vllm.settings import Settings
from kvstore.engines.vllm.stats import PromMetrics, Stats
from kvstore.engines.vllm.worker import Absent, Working
from kvstore.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from kvstore.engines.vllm.groups import Identity

__all__ = ["TriggerKvConnector"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's
F = TypeVar("F", bound="Callable[..., Any]")


def _or(otherwise: Callable[[], Any]) -> Callable[[F], F]:
    """Catch every error of a call that the engine makes: it gets this value instead, and the log has the reason."""

    def wrap(call: F) -> F:
        @functools.wraps(call)
        def guarded(self: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return call(self, *arguments, **named)
            except Exception:  # the engine could not do anything about it
                log.exception("%s failed; the engine computes missing blocks.", call.__name__)
                return otherwise()

        return cast("F", guarded)

    return wrap


def _nothing() -> None:
    return None


def _is_known_late(vllm_config: Any) -> bool:
    """Whether a step may be planned, or computed on another rank, before a failure of an earlier step's loads is known.

    A step that waits for its loads could then not tell what depends on them.
    """
    return bool(vllm_config.scheduler_config.async_scheduling) or vllm_config.parallel_config.world_size > 1


class TriggerKvConnector(ReportsKernels, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler has one instance, and so has each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.of_vllm(self._kv_transfer_config.kv_connector_extra_config)
        if _is_known_late(vllm_config):
            self._settings = replace(self._settings, load="async")
        self._scheduling: Scheduling | None = None
        self._working: Working | Absent | None = None
        self._identity: Identity | None = None
        try:
            self._identity = identify(vllm_config, kv_cache_config, self._settings.weights)
        except KvError as reason:
            if role is KVConnectorRole.SCHEDULER:  # once, not once a worker as well
                log.warning("KV is not stored: %s", reason)
            return
        events = vllm_config.kv_events_config
        if role is KVConnectorRole.SCHEDULER:
            with_events = events is not None and events.enable_kv_cache_events
            loads = self._kv_transfer_config.is_kv_consumer
            self._scheduling = Scheduling(
                self._settings,
                self._identity,
                with_events=with_events,
                may_wait=not _is_known_late(vllm_config),
                loads=loads,
                saves=self._kv_transfer_config.is_kv_producer,
                model=str(vllm_config.model_config.model),
                kernels=unshared(),
            )
            if loads and self._kv_transfer_config.kv_load_failure_policy != "recompute":
                log.warning(
                    'kv_load_failure_policy is not "recompute": a request whose KV does not arrive fails.'
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: KV that is not saved is computed."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """Each layer reports its end; a captured graph would not."""
        return True

    # --- the worker's side

    @_or(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the KV memory with the fabric, or fall back to gRPC."""
        if self._identity is None:
            return
        parallel = self._vllm_config.parallel_config
        try:
            self._working = Working(
                self._settings,
                self._identity,
                parallel.rank % parallel.tensor_parallel_size,
                self._kv_cache_config.num_blocks,
                kv_caches,
            )
        except (
            Exception
        ) as reason:  # whatever the error, requests that were promised blocks must not wait for ever
            log.warning("KV is not stored: %s", reason, exc_info=not isinstance(reason, KvError))
            self._working = Absent()

    @_or(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._working is not None and isinstance(connector_metadata, Plan):
            self._working.begin_step(connector_metadata)

    def has_connector_metadata(self) -> bool:
        """Whether this step's layers are to be reported: only if it saves blocks."""
        return super().has_connector_metadata() and self._working is not None and self._working.is_saving

    @_or(_nothing)
    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ARG002
        """Load the blocks of the plan."""
        if self._working is not None:
            self._working.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a step's loads end before it begins."""

    @_or(_nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:  # noqa: ARG002
        """Release the layer's pages."""
        if self._working is not None:
            self._working.layer_done(layer_name)

    @_or(_nothing)
    def wait_for_save(self) -> None:
        """End the step: nothing reads the engine's blocks after this."""
        if self._working is not None:
            self._working.end_step()

    @_or(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return which loads have ended, and which of them failed."""
        if self._working is None:
            return KVConnectorTransferResults()
        ended, failed = self._working.finished_loads()
        # With several groups a block's number is ambiguous; the whole request is rescheduled.
        is_whole = len(self._kv_cache_config.kv_cache_groups) > 1
        return KVConnectorTransferResults(
            finished_recving=ended, failed_recving=failed if is_whole else set()
        )

    @_or(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return which blocks were not loaded."""
        if self._working is None:
            return set()
        failed = self._working.failed_blocks()
        return failed if len(self._kv_cache_config.kv_cache_groups) == 1 else set()

    @_or(_nothing)
    def build_connector_worker_meta(self) -> StoredReport | None:
        """Report stored blocks to the scheduler's side."""
        return self._working.take_report() if self._working is not None else None

    # --- the scheduler's side

    def _identified(self, kernels: bytes) -> None:
        if self._scheduling is not None:
            self._scheduling.identified(kernels)

    @_or(_nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Receive the engine's block pool, which knows the requests' blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduling is not None:
            self._scheduling.bind(kv_cache_manager)

    @_or(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Look the request up while it waits to be scheduled."""
        if self._scheduling is not None:
            self._scheduling.new_request(request)

    @_or(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones can be loaded."""
        if self._scheduling is None:
            return 0, False
        return self._scheduling.matched(request, num_computed_tokens)

    @_or(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load."""
        if self._scheduling is not None:
            self._scheduling.allocated(request, blocks, num_external_tokens)

    @_or(Plan)
    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """Return the loads and saves of this step."""
        return self._scheduling.plan(scheduler_output) if self._scheduling is not None else Plan()

    @_or(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' reports."""
        if self._scheduling is not None:
            self._scheduling.settled(connector_output.invalid_block_ids or set())
            self._scheduling.process_report(connector_output.kv_connector_worker_meta)

    @_or(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Forget the request. Its blocks are free: nothing reads them."""
        if self._scheduling is not None:
            self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for an engine with several groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    @_or(lambda: ())
    def take_events(self) -> Iterable[Any]:
        """Return which blocks were stored."""
        return self._scheduling.take_events() if self._scheduling is not None else ()

    @_or(lambda: False)
    def reset_cache(self) -> bool:
        """Ignore everything stored so far: vLLM calls this when the weights have changed."""
        if self._scheduling is not None:
            self._scheduling.reset()
        return True

    # --- either side

    @_or(_nothing)
    def get_kv_connector_stats(self) -> Stats | None:
        """Return the counts since the last call."""
        if self._scheduling is not None:
            self._scheduling.count_rules()
        side = self._working or self._scheduling
        return side.stats.take() if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Rebuild counts that were serialized."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> PromMetrics:
        """Make the counters of vLLM's Prometheus page."""
        return PromMetrics(*arguments, **named)
