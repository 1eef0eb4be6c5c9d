"""The engine's KV memory as plain bytes: where the page of a layer's block lies.

What always holds: a page's bytes are contiguous and no other page's. An engine whose cache is not so, or lies in a
device's memory, gets a LayoutError and goes without.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvstore.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.engines.vllm.identity import Group

__all__ = ["KvMemory", "Plane"]


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
        self._kept = list(caches.values())  # the buffers lie over them
        self.planes = [
            [self._plane(name, caches[name], group, blocks) for name in group.layer_names] for group in groups
        ]
        self._rows = [
            [self._rows_of(plane, blocks, group.page_bytes) for plane in of_group]
            for group, of_group in zip(groups, self.planes, strict=True)
        ]

    def _plane(self, name: str, cache: torch.Tensor, group: Group, blocks: int) -> Plane:
        if cache.device.type != "cpu":
            raise LayoutError(
                f"The KV of {name} lies in the memory of a {cache.device.type} device; "
                "only an OffloadingSpec takes it through host memory."
            )
        if blocks < 1 or cache.shape[0] % blocks:
            raise LayoutError(f"The KV of {name} has the shape {tuple(cache.shape)}, not block by block.")
        kernel_blocks = cache.shape[0] // blocks  # a kernel's block may be a part of the engine's
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
        if page > group.page_bytes or stride < page or (kernel_blocks > 1 and stride != page):
            raise LayoutError(
                f"The pages of {name} have {page} bytes every {stride}, not {group.page_bytes}."
            )
        storage = cache.untyped_storage()
        start = storage.data_ptr()
        if start not in self._storages:
            self._storages[start] = len(self.buffers)
            self.buffers.append((ctypes.c_char * storage.nbytes()).from_address(start))
        return Plane(self._storages[start], cache.data_ptr() - start, stride)

    def _rows_of(self, plane: Plane, blocks: int, page_bytes: int) -> torch.Tensor:
        buffer = torch.frombuffer(self.buffers[plane.buffer], dtype=torch.uint8)
        return buffer.as_strided((blocks, page_bytes), (plane.stride, 1), plane.begin)

    def rows(self, group: int) -> list[torch.Tensor]:
        """The pages of all blocks as rows of bytes, layer by layer."""
        return self._rows[group]

    def pages(self, group: int, block: int) -> list[tuple[int, int]]:
        """The buffer and the offset of each of a block's pages, layer by layer."""
        return [(plane.buffer, plane.begin + block * plane.stride) for plane in self.planes[group]]

    def bytes_of(self, buffer: int, offset: int, length: int) -> memoryview:
        """A page, to be read or written in place."""
        return memoryview(self.buffers[buffer]).cast("B")[offset : offset + length]
