"""The engine's KV memory on a device: the runs of bytes that make up each layer's page of a block.

A backend's cache is `[blocks, 2, ...]`, `[2, blocks, ...]` or, for MLA, `[blocks, tokens, numbers]`, its inner
dimensions in any order (NHD or HND). In each case a layer's page of a block is a few dense runs, taken in address
order; `identity` names that order by the backend, its layout and vLLM's version.

What always holds: the runs of a page have exactly the page's bytes, and no two of them overlap. Any other cache is a
LayoutError, and the engine runs without the store.
What it doesn't do: copy; `device_saves` and `device_transport` do.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvstore.errors import LayoutError
from kvstore.limits import DEVICE_PAGE_RUNS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.engines.vllm.groups import Group
    from nic_offload.device import Device

__all__ = ["DeviceMemory", "Pages", "Run", "pages_of"]

Addresses = np.ndarray[Any, np.dtype[np.uint64]]


_KEYS_AND_VALUES = 2


class Pages(NamedTuple):
    """All blocks of one layer: block `n` has its runs `n * stride` bytes after those of block 0."""

    stride: int
    run_bytes: int  # each run has as many
    offsets: tuple[int, ...]  # of the runs of block 0


def pages_of(shape: Sequence[int], strides: Sequence[int], element_bytes: int, blocks: int) -> Pages:
    """Find the runs of a cache's blocks. A kernel's block may be smaller than the engine's; then several form one."""
    if blocks < 1 or not shape:
        raise LayoutError(f"A cache of the shape {tuple(shape)} is not block by block.")
    if shape[0] == _KEYS_AND_VALUES == blocks:
        raise LayoutError("The dimension that counts the blocks of a two-block cache is ambiguous.")
    at = next((at for at in (0, 1) if at < len(shape) and not shape[at] % blocks), None)
    if at is None or not prod(shape):
        raise LayoutError(f"A cache of the shape {tuple(shape)} has no dimension for its {blocks} blocks.")
    of_block = shape[at] // blocks
    inner = [(strides[at], of_block)] + [
        (stride, size) for i, (stride, size) in enumerate(zip(strides, shape, strict=True)) if i != at
    ]
    dense = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(one for one in inner if one[1] > 1):
        if stride == dense and not outer:
            dense *= size
        else:
            outer.append((stride, size))
    offsets, reach = [0], dense
    for stride, size in outer:
        if stride < reach:
            raise LayoutError(f"A cache of the shape {tuple(shape)} has pages that overlap.")
        offsets = [offset + number * stride for number in range(size) for offset in offsets]
        reach = stride * (size - 1) + reach
        if len(offsets) > DEVICE_PAGE_RUNS_MAX:
            raise LayoutError(
                f"A page of the shape {tuple(shape)} is in more than {DEVICE_PAGE_RUNS_MAX} pieces."
            )
    return Pages(
        strides[at] * of_block * element_bytes,
        dense * element_bytes,
        tuple(sorted(offset * element_bytes for offset in offsets)),
    )


class Run(NamedTuple):
    """Bytes of the device's memory."""

    address: int
    length: int


class DeviceMemory:
    """All KV memory of one worker, on one device."""

    def __init__(
        self,
        device: Device,
        caches: Mapping[str, Any],
        groups: Sequence[Group],
        shard: int,
        blocks: int,
    ) -> None:
        self.device = device
        self.groups = groups
        self.shard = shard
        self._kept = list(caches.values())  # keeps the memory at these addresses alive
        self._pages: dict[str, tuple[int, Pages]] = {}
        for group in groups:
            for name in group.layer_names:
                cache = caches[name]
                pages = pages_of(cache.shape, cache.stride(), cache.element_size(), blocks)
                if (found := pages.run_bytes * len(pages.offsets)) != group.page_bytes:
                    raise LayoutError(f"The pages of {name} have {found} bytes, not {group.page_bytes}.")
                self._pages[name] = int(cache.data_ptr()), pages

    def pieces(self, group: int, blocks: Sequence[int]) -> list[list[list[Run]]]:
        """Return the runs of the page, for each layer of each block."""
        of_layers = [self.runs(name, blocks) for name in self.groups[group].layer_names]
        return [
            [[Run(address, length) for address in runs[at].tolist()] for runs, length in of_layers]
            for at in range(len(blocks))
        ]

    def runs(self, name: str, blocks: Sequence[int]) -> tuple[Addresses, int]:
        """Addresses of the runs of a layer's pages, a row for each block, and the length of a run."""
        begin, pages = self._pages[name]
        numbers = np.array(blocks, np.uint64)[:, None]
        offsets = np.array(pages.offsets, np.uint64)
        return np.uint64(begin) + numbers * np.uint64(pages.stride) + offsets, pages.run_bytes
