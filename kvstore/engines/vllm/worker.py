"""The worker's side: executes a plan on the KV memory of its rank.

What always holds: a promised block that did not arrive is reported to the engine, which computes it; a step saves
nothing unless every load that it waited for has succeeded; at the end of a step nothing reads the engine's blocks, and
only loads that it knows of write to them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.engines.vllm.connector_metadata import Load, Plan, StoredReport
from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.kv_memory import KvMemory
from kvstore.engines.vllm.loading import Loaded, Loads
from kvstore.engines.vllm.page_transport import open_transport
from kvstore.engines.vllm.stats import Stats
from kvstore.errors import KvError, LayoutError
from kvstore.limits import VLLM_STEP_LOAD_MS
from nic_offload.cuda_device import CudaDevice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvstore.engines.vllm.groups import Group, Identity
    from kvstore.engines.vllm.settings import Settings

__all__ = ["Absent", "Working"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's


class Working:
    """The connector's part in a worker."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        shard: int,
        blocks: int,
        caches: Mapping[str, torch.Tensor],
    ) -> None:
        self.memory = _memory(caches, identity.groups, shard, blocks)
        transport = open_transport(settings, identity, self.memory)
        self._transport, self._saves = transport, transport.saves
        timeout_s = settings.load_timeout_ms / 1000
        is_async = settings.is_async(len(identity.groups))
        step_timeout_s = min(timeout_s, VLLM_STEP_LOAD_MS / 1000) if is_async else timeout_s
        self._loads = Loads(transport, self.memory, timeout_s, step_timeout_s)
        self._plan = Plan()
        self._is_sound = True  # whether this step's results can be relied on
        self._failed_blocks: set[int] = set()
        self._stored: dict[tuple[int, bytes], int] = {}
        self.stats = Stats()
        log.info(
            "KV of %d groups is stored on %s, over %s.",
            len(identity.groups),
            ", ".join(settings.reach.nodes),
            transport.name,
        )

    def begin_step(self, plan: Plan) -> None:
        """Called before anything is computed."""
        self._plan = plan
        self._is_sound = not any(load.waits for load in plan.loads)
        self._saves.begin(plan.saves)

    @property
    def is_saving(self) -> bool:
        """Whether this step saves blocks."""
        return bool(self._plan.saves)

    def load(self) -> None:
        """Start the plan's loads, or make them now."""
        loads, self._plan.loads = self._plan.loads, []
        try:
            self._transport.before_loads()
        except KvError as error:  # no promise may be forgotten
            log.warning("Nothing is loaded: %s", error)
            begin, make = self._loads.give_up, Loaded.none_of
        else:
            begin, make = self._loads.begin, self._loads.load
        for load in loads:
            if not load.waits:
                begin(load)
        loaded = self._arrived([make(load) for load in loads if load.waits])
        for one in loaded:
            self._take(one)
        # Results computed from missing blocks must not be saved. Only vLLM knows which requests share them, so the
        # whole step is discarded; vLLM recomputes what it needs, and that is saved.
        self._is_sound = not any(one.missing for one in loaded)

    def layer_done(self, name: str) -> None:
        """A layer's KV of this step is written, or queued to be."""
        if self._is_sound:  # if a layer can't be saved, the step isn't
            self._saves.layer_done(name)

    def end_step(self) -> None:
        """The step has ended; the engine may reuse the blocks afterwards."""
        self._saves.settle(is_sound=self._is_sound)
        for saved in self._saves.ended():
            for name in saved.stored:
                self._stored[name] = 1
            self.stats.add("saved_pages", saved.pages)
            self.stats.add("saved_bytes", saved.bytes)
            self.stats.add("unsaved_pages", saved.failed)
            self.stats.add("skipped_pages", saved.skipped)
            self.stats.add("withheld_pages", saved.withheld)

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them that lack a block."""
        ended = self._arrived(self._loads.ended(wait=self._plan.is_idle))
        for loaded in ended:
            self._take(loaded)
        return (
            {loaded.load.request for loaded in ended},
            {loaded.load.request for loaded in ended if loaded.missing},
        )

    def _arrived(self, ended: list[Loaded]) -> list[Loaded]:
        """The loads that the engine may use from now on; none if its device can't be made to wait for them."""
        try:
            if ended:
                self._transport.after_loads()
        except KvError as error:
            log.warning("Loaded blocks are not used: %s", error)
            return [replace(one, missing=list(one.load.blocks), bytes=0) for one in ended]
        return ended

    def _take(self, loaded: Loaded) -> None:
        self._failed_blocks.update(wanted.block for wanted in loaded.missing)
        self.stats.add("loaded_bytes", loaded.bytes)
        self.stats.add("load_ns", loaded.ns)
        self.stats.add("missing_blocks", len(loaded.missing))

    def failed_blocks(self) -> set[int]:
        """Blocks that did not arrive, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StoredReport | None:
        """The blocks stored since the last call."""
        stored, self._stored = self._stored, {}
        return StoredReport(stored) if stored else None


def _memory(
    caches: Mapping[str, torch.Tensor], groups: Sequence[Group], shard: int, blocks: int
) -> KvMemory | DeviceMemory:
    """Memory of the host or of a GPU; KvMemory raises for any other kind."""
    places = {(cache.device.type, cache.device.index) for cache in caches.values()}
    if {kind for kind, _ in places} != {"cuda"}:
        return KvMemory(caches, groups, shard, blocks)
    if len(places) > 1:
        raise LayoutError("The KV of one worker lies on several GPUs.")
    ((_, index),) = places
    return DeviceMemory(CudaDevice(index or 0), caches, groups, shard, blocks)


class Absent:
    """The worker's side if blocks can't be moved: all promised blocks are missing, and computed."""

    is_saving = False

    def __init__(self) -> None:
        self.stats = Stats()
        self._loads: list[Load] = []
        self._ended: set[str] = set()
        self._failed_blocks: set[int] = set()

    def begin_step(self, plan: Plan) -> None:
        """Take the promises."""
        self._loads = plan.loads

    def load(self) -> None:
        """Break them."""
        loads, self._loads = self._loads, []
        for load in loads:
            # The end of a load that a step waits for is not reported: vLLM's scheduler would treat that as a bug.
            if not load.waits:
                self._ended.add(load.request)
            self._failed_blocks.update(wanted.block for wanted in load.blocks)
            self.stats.add("missing_blocks", len(load.blocks))

    def layer_done(self, name: str) -> None:
        """Nothing goes."""

    def end_step(self) -> None:
        """Nothing is pending."""

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """All loads have ended, and failed."""
        ended, self._ended = self._ended, set()
        return ended, ended

    def failed_blocks(self) -> set[int]:
        """All of them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StoredReport | None:
        """Nothing is stored."""
        return None
