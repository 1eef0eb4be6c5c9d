"""The engine's KV memory as plain bytes: the address of each layer's page of a block.

What always holds: a page's bytes are contiguous, and pages don't overlap. Any other cache, or one in a device's memory,
is a LayoutError, and the engine runs without the store.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import LayoutError
from nic_offload.memory import copy_runs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvstore.engines.vllm.groups import Group

__all__ = ["PIECE", "KvMemory", "Plane"]

PIECE = np.dtype(
    [("buffer", "<u4"), ("length", "<u4"), ("offset", "<u8")]
)  # in the form of `nic_offload.pieces`


@dataclass(frozen=True, slots=True)
class Plane:
    """All blocks of one layer: page `block` begins at `begin + block * stride` of a buffer."""

    buffer: int
    begin: int
    stride: int


class KvMemory:
    """All KV memory of one worker."""

    def __init__(
        self, caches: Mapping[str, torch.Tensor], groups: Sequence[Group], shard: int, blocks: int
    ) -> None:
        self.groups = groups
        self.shard = shard
        self.buffers: list[Any] = []
        self._storages: dict[int, int] = {}
        self._kept = list(caches.values())  # the buffers are views of them
        self.planes = [
            [self._plane(name, caches[name], group, blocks) for name in group.layer_names] for group in groups
        ]
        self.addresses = [ctypes.addressof(buffer) for buffer in self.buffers]
        self._buffers = [np.array([plane.buffer for plane in planes], np.uint64) for planes in self.planes]
        self._begins = [np.array([plane.begin for plane in planes], np.uint64) for planes in self.planes]
        self._strides = [np.array([plane.stride for plane in planes], np.uint64) for planes in self.planes]

    def _plane(self, name: str, cache: torch.Tensor, group: Group, blocks: int) -> Plane:
        if cache.device.type != "cpu":
            raise LayoutError(
                f"The KV of {name} is in the memory of a {cache.device.type} device; "
                "TriggerKvTieringConnector takes it through host memory."
            )
        if blocks < 1 or cache.shape[0] % blocks:
            raise LayoutError(f"The KV of {name} has the shape {tuple(cache.shape)}, not block by block.")
        kernel_blocks = cache.shape[0] // blocks  # a kernel's block may be smaller than the engine's
        inner = sorted(
            (stride, size)
            for stride, size in zip(cache.stride()[1:], cache.shape[1:], strict=True)
            if size > 1
        )
        dense = 1
        for stride, size in inner:
            if stride != dense:
                raise LayoutError(f"The KV of {name} has gaps inside its blocks.")
            dense *= size
        element = cache.element_size()
        page = dense * element * kernel_blocks
        stride = cache.stride(0) * element * kernel_blocks
        is_padded = page < group.page_bytes == stride  # else the padding is another page's bytes
        is_page = page == group.page_bytes or is_padded
        if not is_page or stride < page or (kernel_blocks > 1 and stride != page):
            raise LayoutError(
                f"The pages of {name} have {page} bytes every {stride}, not {group.page_bytes}."
            )
        storage = cache.untyped_storage()
        start = storage.data_ptr()
        if start not in self._storages:
            self._storages[start] = len(self.buffers)
            self.buffers.append((ctypes.c_char * storage.nbytes()).from_address(start))
        return Plane(self._storages[start], cache.data_ptr() - start, stride)

    def _offsets(self, group: int, blocks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        numbers = np.array(blocks, np.uint64)[:, None]
        offsets: np.ndarray[Any, np.dtype[np.uint64]] = self._begins[group] + numbers * self._strides[group]
        return offsets

    def pieces(self, group: int, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        """Where the pages of blocks are: a row of `PIECE` for each layer, block by block."""
        offsets = self._offsets(group, blocks)
        rows = np.empty(offsets.shape, PIECE)
        rows["buffer"], rows["length"], rows["offset"] = (
            self._buffers[group],
            self.groups[group].page_bytes,
            offsets,
        )
        return rows

    def copy(self, group: int, blocks: Sequence[int], target: int) -> None:
        """Copy blocks to an address, contiguously, each with its pages layer by layer."""
        offsets = self._offsets(group, blocks)
        page_bytes = self.groups[group].page_bytes
        runs = np.empty((*offsets.shape, 4), np.uint64)
        runs[..., 0], runs[..., 1] = self._buffers[group], offsets
        runs[..., 2] = np.arange(offsets.size, dtype=np.uint64).reshape(offsets.shape) * np.uint64(page_bytes)
        runs[..., 3] = page_bytes
        copy_runs(runs.data, self.addresses, target)

    def bytes_of(self, buffer: int, offset: int, length: int) -> memoryview:
        """A view of a page, to be read or written in place."""
        return memoryview(self.buffers[buffer]).cast("B")[offset : offset + length]
