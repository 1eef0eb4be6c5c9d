"""An engine whose KV groups differ in block size, layout, number format and layers, on a host device."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.engines.vllm import groups
from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.groups import Group, Identity, Load, Wanted
from kvstore.engines.vllm.loading import Loads
from kvstore.engines.vllm.page_transport import open_transport
from kvstore.engines.vllm.settings import Settings
from kvstore.layout import Layer, Layout, Order
from kvstore.testing import MemoryNode
from nic_offload.host_device import HostDevice
from tests.device.engine import WAIT_S, wait_for
from tests.device.tensors import HostTensor, running

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = 12
Array = np.ndarray[Any, Any]


def _hnd(array: Array) -> Array:
    return array.swapaxes(-3, -2)


# For each group: tokens of a block, its number format, how many layers, a layer's memory, and the place of its blocks.
KINDS: dict[str, tuple[int, str, int, Callable[[], Array], int]] = {
    "full, [2, blocks], kernel blocks of half the size": (
        32,
        "bfloat16",
        3,
        lambda: np.zeros((2, 2 * BLOCKS, 16, 2, 8), np.uint16),
        1,
    ),
    "a window, [blocks, 2] HND, FP8": (
        16,
        "float8_e4m3",
        2,
        lambda: _hnd(np.zeros((BLOCKS, 2, 3, 16, 24), np.uint8)),
        0,
    ),
    "MLA": (64, "bfloat16", 1, lambda: np.zeros((BLOCKS, 64, 40), np.uint16), 0),
}


def blocks_first(kind: str, cache: HostTensor) -> Array:
    """A view of a cache by the engine's blocks, each with its numbers in the order of its memory."""
    array, at = cache.array, KINDS[kind][4]
    parts = array.shape[at] // BLOCKS
    return np.moveaxis(array.reshape(*array.shape[:at], BLOCKS, parts, *array.shape[at + 1 :]), at, 0)


def group_of(number: int, kind: str) -> Group:
    tokens, dtype, layers, memory, _ = KINDS[kind]
    one = memory()
    layout = Layout(
        model="m",
        weights="w",
        dtype=dtype,
        block_tokens=tokens,
        layers=(Layer(1, 8, 8),) * layers,
        order=Order.OPAQUE,
        engine=kind,
    )
    names = tuple(f"layers.{number}.{layer}" for layer in range(layers))
    return Group(number, tokens, 0, names, (layout,), one.nbytes // BLOCKS)


Which = tuple[int, str, int]  # group, layer, block


class Worker:
    """A worker's memory and transport."""

    def __init__(self, node: MemoryNode, device: HostDevice) -> None:
        self.device = device
        self.groups = tuple(group_of(number, kind) for number, kind in enumerate(KINDS))
        identity = Identity(self.groups, b"".join(group.shards[0].canonical for group in self.groups))
        self.caches = {
            name: HostTensor(KINDS[kind][3]())
            for group, kind in zip(self.groups, KINDS, strict=True)
            for name in group.layer_names
        }
        self.memory = DeviceMemory(device, self.caches, self.groups, 0, BLOCKS)
        settings = Settings.of_vllm({"node": node.target, "provider": "memory", "host_bytes": 1 << 20})
        self.transport = open_transport(settings, identity, self.memory)

    def page(self, which: Which) -> Array:
        """A layer's page of a block. Each group has memory of its own here, so block numbers don't clash."""
        group, name, block = which
        page: Array = blocks_first(tuple(KINDS)[group], self.caches[name])[block]
        return page

    def write(self, which: Which, values: Array) -> None:
        """A kernel that writes a page."""

        def kernel() -> bool:
            self.page(which)[...] = values
            return True

        self.device.compute.queue(kernel)

    def save(self, wanted: list[Wanted], values: dict[Which, Array]) -> None:
        """A step that computes blocks; their memory is used for others at once."""
        saves = self.transport.saves
        saves.begin(wanted)
        for name in self.caches:
            for which, computed in values.items():
                if which[1] == name:
                    self.write(which, computed)
            saves.layer_done(name)
        saves.settle(is_sound=True)
        for which, written in values.items():
            self.write(which, np.full_like(written, 0x5A))
        stored: set[tuple[int, bytes]] = set()

        def are_stored() -> bool:
            stored.update(name for one in saves.ended() for name in one.stored)
            return len(stored) == len(wanted)

        wait_for(are_stored, "all blocks stored")

    def load(self, wanted: list[Wanted]) -> list[Wanted]:
        """A step that loads blocks; returns the missing ones."""
        self.transport.before_loads()
        loaded = Loads(self.transport, self.memory, WAIT_S, WAIT_S).load(Load("r", wanted))
        self.transport.after_loads()
        return loaded.missing

    def seen(self, pages: list[Which]) -> dict[Which, bytes]:
        """What a kernel reads from pages."""
        seen: dict[Which, bytes] = {}

        def kernel() -> bool:
            seen.update({which: self.page(which).tobytes() for which in pages})
            return True

        self.device.compute.queue(kernel)
        wait_for(lambda: seen, "the compute stream")
        return seen


@pytest.mark.parametrize("object_pages", [1, 100])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_groups_that_differ_are_stored_and_loaded_exactly(
    seed: int, object_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "OBJECT_BYTES_MAX", object_pages * 4096)
    device = HostDevice(seed)
    with MemoryNode() as node, running(device):
        one = Worker(node, device)
        to = {1: 11, 7: 0, 8: 5}
        wanted = [
            Wanted(group.number, block, secrets.token_bytes(32)) for group in one.groups for block in to
        ]
        values: dict[Which, Array] = {}
        for group, block, *_ in wanted:
            for name in one.groups[group].layer_names:
                page = one.page((group, name, block))
                written = np.frombuffer(secrets.token_bytes(page.nbytes), page.dtype)
                values[group, name, block] = written.reshape(page.shape)
        one.save(wanted, values)
        assert one.load([each._replace(block=to[each.block]) for each in wanted]) == []
        moved = {(group, name, to[block]): written for (group, name, block), written in values.items()}
        seen = one.seen(list(moved))
    assert seen == {which: written.tobytes() for which, written in moved.items()}
