"""Host pools like SGLang's in ordinary memory: the same calls, and the same three layouts of pages.

The real ones need SGLang's whole run time (Triton, its kernels), which no CPU here runs.
"""

from __future__ import annotations

from typing import Any

import torch

PAGE = 4


class _HostPool:
    storage_format_tag = None
    kinds = 2

    def __init__(
        self,
        layout: str = "page_first",
        *,
        pages: int = 16,
        layers: int = 3,
        heads: int = 2,
        dim: int = 16,
        dtype: Any = torch.bfloat16,
    ) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        self.layer_num, self.head_num, self.head_dim = layers, heads, dim
        self.size = pages * PAGE
        row = heads * dim
        dims = (
            (self.kinds, layers, self.size, row)
            if layout == "layer_first"
            else (self.kinds, self.size, layers, row)
        )
        self.kv_buffer = torch.zeros(dims, dtype=dtype)

    @property
    def logical_page_size(self) -> int:
        return self.page_size

    def fill(self, seed: int) -> None:
        raw = self.kv_buffer.view(torch.uint8)
        raw.copy_(
            torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        )

    def page(self, number: int) -> torch.Tensor:
        """A page's bytes, all pieces of it."""
        axis = 2 if self.layout == "layer_first" else 1
        return self.kv_buffer.view(torch.uint8).narrow(axis, number * PAGE, PAGE).clone()

    def indices(self, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        begin, pointers = self.kv_buffer.data_ptr(), []
        row = self.head_num * self.head_dim * self.dtype.itemsize
        for index in indices.tolist()[::PAGE]:
            if self.layout == "layer_first":
                pointers += [
                    begin + ((kind * self.layer_num + layer) * self.size + index) * row
                    for layer in range(self.layer_num)
                    for kind in range(self.kinds)
                ]
            else:
                pointers += [
                    begin + (kind * self.size + index) * self.layer_num * row for kind in range(self.kinds)
                ]
        piece = PAGE * row * (1 if self.layout == "layer_first" else self.layer_num)
        return pointers, [piece] * len(pointers)


class MHAHostPool(_HostPool):
    """K and V of several layers; in `layer_first` a page has two pieces a layer, in `page_first` two."""


class MLAHostPool(_HostPool):
    """A latent, equal on all ranks: one piece."""

    kinds = 1
