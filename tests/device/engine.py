"""A worker of an engine whose KV is on a host device, with the connector's own code around it."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.groups import Load, Wanted
from kvstore.engines.vllm.loading import Loads
from kvstore.engines.vllm.page_transport import Transport, open_transport
from kvstore.engines.vllm.settings import Settings
from nic_offload.host_device import HostDevice
from tests.device.tensors import BLOCKS, LAYERS, PAGE_BYTES, caches_of, identity_of, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engines.vllm.loading import Loaded
    from kvstore.engines.vllm.saving import Saved
    from tests.device.tensors import HostTensor

__all__ = ["WAIT_S", "Engine", "Values", "random_values", "wait_for"]

Values = dict[int, list[np.ndarray[Any, Any]]]
WAIT_S = 20.0


class HasTarget(Protocol):
    """A node."""

    @property
    def target(self) -> str:
        """Its address."""
        ...


def wait_for(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.001)


class Engine:
    """One worker with KV on a host device."""

    def __init__(
        self,
        node: HasTarget,
        shape: str = "[2, blocks] NHD",
        device: HostDevice | None = None,
        window_tokens: int = 0,
        **settings: Any,
    ) -> None:
        self.device = device or HostDevice()
        self.caches = caches_of(shape)
        self.identity = identity_of("e", window_tokens)
        self.memory = DeviceMemory(self.device, self.caches, self.identity.groups, 0, BLOCKS)
        given = {"node": node.target, "host_bytes": 64 * LAYERS * PAGE_BYTES, **settings}
        self.settings = Settings.of_vllm(given)
        self.transport: Transport = open_transport(self.settings, self.identity, self.memory)
        self.loads = Loads(self.transport, self.memory, WAIT_S, WAIT_S)
        self.outcomes: list[Saved] = []

    def compute(self, cache: HostTensor, block: int, values: np.ndarray[Any, Any]) -> None:
        """A kernel that writes a block's page, whenever the compute stream gets there."""

        def kernel() -> bool:
            pages(cache)[block] = values
            return True

        self.device.compute.queue(kernel)

    def step(
        self,
        wanted: Sequence[Wanted],
        values: Values,
        *,
        is_sound: bool = True,
        again: Sequence[int] = (),
    ) -> None:
        """A forward pass that fills blocks, and one that overwrites them at once.

        The layers with the numbers `again` are computed once more in it, and only then have their values.
        """
        saves = self.transport.saves
        saves.begin(wanted)
        order = [(at, at not in again) for at in range(LAYERS)] + [(at, True) for at in again]
        names = list(self.caches)
        for at, is_last in order:
            for one in wanted:
                written = values[one.block][at]
                self.compute(self.caches[names[at]], one.block, written if is_last else written ^ 0xFFFF)
            saves.layer_done(names[at])
        saves.settle(is_sound=is_sound)
        for cache in self.caches.values():
            for one in wanted:
                self.compute(cache, one.block, np.full_like(pages(cache)[one.block], 0xDEAD))

    def saved(self, blocks: int) -> list[tuple[int, bytes]]:
        """Wait for the results of this many blocks."""
        found: list[tuple[int, bytes]] = []
        known = 0

        def is_known() -> bool:
            nonlocal known
            for one in self.transport.saves.ended():
                self.outcomes.append(one)
                found.extend(one.stored)
                known += one.failed + one.skipped + one.withheld + one.pages
            return known >= blocks * LAYERS

        wait_for(is_known, "what became of the blocks")
        return found

    def load(self, targets: Sequence[Wanted]) -> Loaded:
        """Load blocks, as the engine's thread does, and use them after that only."""
        self.transport.before_loads()
        loaded = self.loads.load(Load("r", list(targets)))
        self.transport.after_loads()
        return loaded

    def seen(self, blocks: Sequence[int]) -> dict[tuple[int, int], bytes]:
        """The bytes that a kernel reads from blocks, layer by layer, once the compute stream runs it."""
        seen: dict[tuple[int, int], bytes] = {}
        for at, cache in enumerate(self.caches.values()):
            for block in blocks:

                def kernel(at: int = at, cache: HostTensor = cache, block: int = block) -> bool:
                    seen[block, at] = pages(cache)[block].tobytes()
                    return True

                self.device.compute.queue(kernel)
        wait_for(lambda: len(seen) == len(blocks) * LAYERS, "the compute stream")
        return seen

    def close(self) -> None:
        self.loads._threads.shutdown()
        self.transport.saves._thread.shutdown()
        self.transport._client.close()  # type: ignore[attr-defined]


def random_values(shape: str, blocks: Sequence[int]) -> Values:
    one = pages(next(iter(caches_of(shape).values())))[0]
    return {
        block: [
            np.frombuffer(secrets.token_bytes(one.nbytes), np.uint16).reshape(one.shape)
            for _ in range(LAYERS)
        ]
        for block in blocks
    }
