"""Copies between a cache's tensors and the bytes of blocks, one per layer for all blocks of one shape."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvstore.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.engines.transformers.shapes import LayerShape, Shapes
    from kvstore.engines.transformers.token_blocks import Piece

__all__ = ["Gathered", "newest", "scatter", "torch_errors"]


@contextmanager
def torch_errors() -> Iterator[None]:
    """What PyTorch raises for a device, above all that its memory is full, as DeviceError."""
    try:
        yield
    except RuntimeError as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise DeviceError(f"PyTorch could not use the device's memory: {why}") from error


class _Plane(NamedTuple):
    """A view of one layer of blocks of one shape, as [block][head][token][number], over their bytes."""

    layer: int
    end: int  # within the last block's tokens
    k: torch.Tensor
    v: torch.Tensor


def _planes(shapes: Shapes, memory: torch.Tensor, some: Sequence[Piece]) -> Iterator[_Plane]:
    """Contiguous blocks in memory, which is a tensor of bytes."""
    at = 0
    for _, group in groupby(some, key=lambda piece: (piece.end - piece.begin, piece.kept)):
        alike = list(group)
        first = alike[0]
        rows = memory[at : at + len(alike) * first.length].view(len(alike), first.length)
        at += rows.numel()
        begin = 0
        for number, (layer, count) in enumerate(
            zip(shapes.layers, shapes.counts(first.end - first.begin, first.kept), strict=True)
        ):
            parts = []
            for numbers in (layer.k_numbers, layer.v_numbers):
                size = layer.heads * count * numbers * shapes.dtype.itemsize
                shape = (len(alike), layer.heads, count, numbers)
                if size:
                    parts.append(rows[:, begin : begin + size].view(shapes.dtype).view(shape))
                else:  # torch can't view an empty tensor of bytes as numbers
                    parts.append(rows.new_empty(shape, dtype=shapes.dtype))
                begin += size
            yield _Plane(number, alike[-1].end, *parts)


def scatter(
    shapes: Shapes,
    cache: Sequence[tuple[torch.Tensor, torch.Tensor]],
    cached_tokens: int,
    memory: torch.Tensor,
    some: Sequence[Piece],
) -> None:
    """Copy from a cache's tensors, each of which ends with the newest token."""
    for plane in _planes(shapes, memory, some):
        for tensor, target in zip(cache[plane.layer], (plane.k, plane.v), strict=True):
            blocks, heads, count, numbers = target.shape
            if not target.numel():
                continue
            behind = cached_tokens - plane.end
            end = tensor.shape[2] - behind
            source = tensor[0, :, end - blocks * count : end]
            with torch_errors():
                target.copy_(source.view(heads, blocks, count, numbers).permute(1, 0, 2, 3))


class Gathered:
    """The parts of each layer that have arrived, in order."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._shapes = shapes
        self._device = device
        self._parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in shapes.layers]

    def add(self, memory: torch.Tensor, some: Sequence[Piece]) -> None:
        """Copy blocks from memory, which may be reused afterwards."""
        for plane in _planes(self._shapes, memory, some):
            for parts, source in zip(self._parts[plane.layer], (plane.k, plane.v), strict=True):
                blocks, heads, count, numbers = source.shape
                with torch_errors():
                    together = source.permute(1, 0, 2, 3).to(self._device, copy=True)
                    parts.append(together.reshape(heads, blocks * count, numbers))

    def layers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer; for a windowed layer, of its newest tokens."""
        for layer, (k, v) in zip(self._shapes.layers, self._parts, strict=True):
            yield newest(layer, k), newest(layer, v)


def newest(layer: LayerShape, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tokens of parts as one tensor of a cache; of a windowed layer only those that it keeps."""
    whole = torch.cat(list(parts), dim=1).unsqueeze(0)
    return whole if layer.window is None else whole[:, :, -layer.window + 1 :]
