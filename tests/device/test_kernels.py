"""The digest of an engine's attention kernels, which the names of its blocks include."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.engines.vllm.kernels import combined, form_of, kernels_of
from tests.device.tensors import BLOCKS, SHAPES, HostTensor, caches_of, names

if TYPE_CHECKING:
    from collections.abc import Mapping


def layers_of(caches: Mapping[str, Any], backend: str = "FLASH") -> dict[str, Any]:
    """Layers of vLLM, as far as they are looked at."""
    for cache in caches.values():
        cache.dtype = cache.array.dtype
    kind = SimpleNamespace(full_cls_name=lambda: ("backends", backend))
    return {
        name: SimpleNamespace(kv_cache=cache, get_attn_backend=lambda: kind) for name, cache in caches.items()
    }


def digest(shape: str, backend: str = "FLASH") -> bytes | None:
    return kernels_of(layers_of(caches_of(shape), backend), [names()], BLOCKS)


def test_engines_with_other_backends_or_views_of_their_memory_have_other_digests() -> None:
    flash = digest("[2, blocks] NHD")
    assert flash is not None
    assert digest("[2, blocks] NHD") == flash
    assert digest("[2, blocks] NHD", "TRITON") != flash
    alike = {"[2, blocks] NHD", "[blocks, 2] NHD", "[blocks, 2], stored [2, blocks]"}  # K before V, in each
    alike |= {"all layers of a block together"}
    found = {shape: digest(shape) for shape in SHAPES}
    assert {shape for shape, one in found.items() if one == flash} == alike
    assert found["[2, blocks] HND"] == found["[blocks, 2] HND"]
    assert len(set(found.values())) == 4, "NHD, HND, kernel blocks of half the size, MLA"


@pytest.mark.parametrize("kernel_blocks", [1, 2, 4])
def test_the_size_of_a_kernels_block_counts_and_the_number_of_blocks_does_not(kernel_blocks: int) -> None:
    def form(blocks: int, parts: int, *, kv_first: bool) -> list[list[int]]:
        counted = (2, blocks * parts) if kv_first else (blocks * parts, 2)
        cache = HostTensor(np.zeros((*counted, 16 // parts, 3, 8), np.uint16))
        return form_of(cache.shape, cache.stride(), blocks)

    for kv_first in (False, True):
        assert form(5, kernel_blocks, kv_first=kv_first) == form(7, kernel_blocks, kv_first=kv_first)
        others = [form(5, parts, kv_first=kv_first) for parts in (1, 2, 4) if parts != kernel_blocks]
        assert form(5, kernel_blocks, kv_first=kv_first) not in others
    is_alike = form(5, kernel_blocks, kv_first=True) == form(5, kernel_blocks, kv_first=False)
    assert is_alike == (kernel_blocks == 1), "K of all parts comes first, or each part has its K and V"


def test_layers_that_vllm_does_not_show_have_no_digest() -> None:
    layers = layers_of(caches_of("MLA"))
    assert kernels_of(layers, [names()], BLOCKS) is not None
    assert kernels_of({}, [names()], BLOCKS) is None
    del layers[names()[-1]].get_attn_backend
    assert kernels_of(layers, [names()], BLOCKS) is None


def test_the_kernels_of_all_ranks_count() -> None:
    one, other = b"a" * 16, b"b" * 16
    both = combined({(0, 0): one, (0, 1): other})
    assert both == combined({(0, 1): other, (0, 0): one})
    assert len({both, combined({(0, 0): one, (0, 1): one}), combined({(0, 0): other, (0, 1): one})}) == 3
