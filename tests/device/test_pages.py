"""Where a block's bytes are in the caches of vLLM's backends."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvstore.engines.vllm.device_memory import DeviceMemory, pages_of
from kvstore.errors import LayoutError
from nic_offload.host_device import HostDevice
from tests.device.tensors import BLOCKS, PAGE_BYTES, SHAPES, HostTensor, caches_of, identity_of, names, pages

RUNS = {  # of a page, as they lie in memory
    "[2, blocks] NHD": 2,
    "[2, blocks] HND": 2,
    "[blocks, 2] NHD": 1,
    "[blocks, 2] HND": 1,
    "[blocks, 2], stored [2, blocks]": 2,
    "kernel blocks of half the size": 2,
    "MLA": 1,
    "all layers of a block together": 1,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_runs_of_a_block_are_exactly_its_bytes(shape: str) -> None:
    caches = caches_of(shape)
    memory = DeviceMemory(HostDevice(), caches, identity_of("e").groups, 0, BLOCKS)
    for name in names():
        for block in (0, 1, BLOCKS - 1):
            pages(caches[name])[block] = 1
            addresses, length = memory.runs(name, [block])
            assert addresses.shape == (1, RUNS[shape])
            assert length * RUNS[shape] == PAGE_BYTES
            for address in addresses[0].tolist():
                run = (ctypes.c_uint16 * (length // 2)).from_address(address)
                assert set(run) == {1}
                run[:] = [0] * (length // 2)
            assert not any(cache.array.any() for cache in caches.values())


@pytest.mark.parametrize(
    ("shape", "strides", "blocks", "word"),
    [
        ((2, 2, 16, 2, 8), (512, 256, 16, 8, 1), 2, "two-block cache is ambiguous"),
        ((2, 4, 8, 2, 8), (512, 128, 16, 8, 1), 2, "two-block cache is ambiguous"),
        ((7, 5), (5, 1), 4, "no dimension"),
        ((4, 0), (0, 1), 4, "no dimension"),
        ((), (), 4, "not block by block"),
        ((4, 8), (8, 1), 0, "not block by block"),
        ((4, 16, 8), (64, 4, 1), 4, "overlap"),
        ((4, 65, 8), (1040, 16, 1), 4, "more than 64 pieces"),
    ],
)
def test_a_cache_that_is_not_block_by_block_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], blocks: int, word: str
) -> None:
    with pytest.raises(LayoutError, match=word):
        pages_of(shape, strides, 2, blocks)


def test_a_page_of_another_size_than_the_engine_states_is_refused() -> None:
    caches = {name: HostTensor(np.zeros((BLOCKS, 16), np.uint16)) for name in names()}
    with pytest.raises(LayoutError, match="have 32 bytes, not 4096"):
        DeviceMemory(HostDevice(), caches, identity_of("e").groups, 0, BLOCKS)
