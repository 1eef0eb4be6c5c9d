"""Copies between a cache's tensors on a device and the bytes of blocks in page-locked memory.

They are queued on a stream of our own, which waits for what the model computed and for which the model's next work
waits. Behind the copies of a save the stream stores the next number to a flag word, which fires the puts that were
armed on it: the CPU does nothing between them.

What always holds: the bytes are those of `copies`. The memory is used again only after all copies to or from it are
done; if they are not within a bound, or if the device refuses work, it is a DeviceError, and nothing of it counts.
What it doesn't do: register a device's memory with the fabric.
"""

from __future__ import annotations

import logging
from itertools import groupby
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvstore.clock import SystemClock
from kvstore.engines.copy_flag import CopyFlag
from kvstore.engines.device_release import release
from kvstore.engines.transformers.copies import newest, torch_errors
from kvstore.errors import DeviceError
from kvstore.limits import ENGINE_DEVICE_COPY_MS, ENGINE_DEVICE_POLL_MS
from nic_offload.device import Copy
from nic_offload.memory import address_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence

    from kvstore.engines.transformers.shapes import LayerShape, Shapes
    from kvstore.engines.transformers.token_blocks import Piece
    from nic_offload.device import Device

__all__ = ["DeviceCopies", "DeviceGathered"]

log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """K or V of one layer in contiguous blocks of one shape: where each head's run of tokens lies in the memory."""

    layer: int
    which: int  # 0: K, 1: V
    end: int  # of the last block's tokens
    begin: int  # of the first block's part, in bytes from the memory's begin
    block_bytes: int
    blocks: int
    heads: int
    tokens: int  # of each block
    token_bytes: int

    @property
    def run_bytes(self) -> int:
        """All tokens of a head in one block."""
        return self.tokens * self.token_bytes

    def copies(
        self, memory: int, tensor: int, head_bytes: int, first_token: int
    ) -> Iterator[tuple[int, int]]:
        """The addresses of each run in the memory and in a tensor, whose tokens begin with the first block's here."""
        block = np.arange(self.blocks, dtype=np.uint64)[:, None]
        head = np.arange(self.heads, dtype=np.uint64)
        run = np.uint64(self.run_bytes)
        there = np.uint64(memory + self.begin) + block * np.uint64(self.block_bytes) + head * run
        first = tensor + first_token * self.token_bytes
        here = np.uint64(first) + block * run + head * np.uint64(head_bytes)
        return zip(there.ravel().tolist(), here.ravel().tolist(), strict=True)


def _parts(shapes: Shapes, some: Sequence[Piece]) -> Iterator[_Part]:
    """Contiguous blocks, part by part; parts without a token are left out."""
    at = 0
    for _, group in groupby(some, key=lambda piece: (piece.end - piece.begin, piece.kept)):
        alike = list(group)
        first, begin = alike[0], at
        counts = shapes.counts(first.end - first.begin, first.kept)
        for number, (layer, count) in enumerate(zip(shapes.layers, counts, strict=True)):
            for which, numbers in enumerate((layer.k_numbers, layer.v_numbers)):
                token_bytes = numbers * shapes.dtype.itemsize
                where = (begin, first.length, len(alike), layer.heads, count, token_bytes)
                if layer.heads * count * token_bytes:
                    yield _Part(number, which, alike[-1].end, *where)
                begin += layer.heads * count * token_bytes
        at += len(alike) * first.length


class DeviceCopies:
    """The copies of one store. One thread uses it at a time."""

    def __init__(self, device: Device, memory: mmap.mmap) -> None:
        self.device, self._memory = device, memory
        self._stream = device.open_stream()
        self._begin = address_of(memory)
        self._mapped = device.map(self._begin, len(memory))
        try:
            self.flag = CopyFlag(device, self._stream)
        except BaseException:
            self._mapped.close()
            raise
        self._is_unmarked = False  # copies may be queued that no number of the flag is behind
        self._lost: list[object] = []  # tensors that pending copies of a failed load may write to
        self._clock = SystemClock()

    def save(
        self,
        shapes: Shapes,
        cache: Sequence[tuple[torch.Tensor, torch.Tensor]],
        cached_tokens: int,
        some: Sequence[Piece],
    ) -> None:
        """Queue the copies of blocks, which fire what is armed on the flag's next number."""
        # A layer's memory need not be dense, as after a cut: its copy is computed before our stream goes on.
        with torch_errors():
            dense = [
                tuple(tensor if _is_dense(tensor) else tensor.contiguous() for tensor in kv) for kv in cache
            ]
        copies = []
        for part in _parts(shapes, some):
            tensor = dense[part.layer][part.which]
            first = tensor.shape[2] - (cached_tokens - part.end) - part.blocks * part.tokens
            runs = part.copies(self._begin, tensor.data_ptr(), _head_bytes(tensor), first)
            copies += [Copy(target, source, part.run_bytes) for target, source in runs]
        self._queue(copies)

    def load(self, runs: Sequence[Copy], into: object) -> None:
        """Copy out of the memory into tensors, before the model's later work; returns when it may be used again."""
        try:
            self._queue(runs)
            self.settle()
        except BaseException:
            self._lost.append(into)
            raise

    def _queue(self, copies: Sequence[Copy]) -> None:
        """Queue copies between the model's work until now and its later work, and behind them the flag's next number.

        The device may refuse any of them; then the next `settle` stores a number behind what was queued.
        """
        device = self.device
        device.wait(self._stream, device.record(device.current_stream()))
        self._is_unmarked = True
        device.copy(self._stream, copies)
        device.wait(device.current_stream(), device.record(self._stream))
        self.flag.store_next(self._stream)
        self._is_unmarked = False

    def settle(self) -> None:
        """Wait until no copy to or from the memory is pending; DeviceError if that takes too long."""
        if self._is_unmarked:
            self.flag.store_next(self._stream)
            self._is_unmarked = False
        until_ns = self._clock.monotonic_ns() + ENGINE_DEVICE_COPY_MS * 1_000_000
        pause = Event()
        while not self.flag.has(self.flag.last):
            if self._clock.monotonic_ns() > until_ns:
                raise DeviceError(
                    "The device has not done its copies in time; its memory is not used meanwhile."
                )
            pause.wait(ENGINE_DEVICE_POLL_MS / 1000)
        self._lost.clear()

    def address(self, offset: int) -> int:
        """Of a byte of the memory."""
        return self._begin + offset

    def close(self) -> None:
        """Release what is page-locked once the device has ended its work; later, and by itself, if that takes long."""
        error = release([self._mapped, self.flag], (self._memory, self._lost))
        if error is not None:
            log.warning("Page-locked memory was not released: %s", error)


class DeviceGathered:
    """As `copies.Gathered`, into tensors on the device."""

    def __init__(self, shapes: Shapes, copies: DeviceCopies, place: torch.device) -> None:
        self._shapes, self._copies, self._place = shapes, copies, place
        self._parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in shapes.layers]

    def add(self, _memory: torch.Tensor, some: Sequence[Piece]) -> None:
        """Copy blocks from the memory, which may be reused afterwards."""
        runs: list[Copy] = []
        for part in _parts(self._shapes, some):
            numbers = part.token_bytes // self._shapes.dtype.itemsize
            shape = (part.heads, part.blocks * part.tokens, numbers)
            with torch_errors():
                tensor = torch.empty(shape, dtype=self._shapes.dtype, device=self._place)
            head_bytes = part.blocks * part.run_bytes
            addresses = part.copies(self._copies.address(0), tensor.data_ptr(), head_bytes, 0)
            runs += [Copy(target, source, part.run_bytes) for source, target in addresses]
            self._parts[part.layer][part.which].append(tensor)
        self._copies.load(runs, self._parts)

    def layers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer; for a windowed layer, of its newest tokens."""
        for layer, (k, v) in zip(self._shapes.layers, self._parts, strict=True):
            yield self._newest(layer, k, layer.k_numbers), self._newest(layer, v, layer.v_numbers)

    def _newest(self, layer: LayerShape, parts: Sequence[torch.Tensor], numbers: int) -> torch.Tensor:
        if not parts:
            empty = (1, layer.heads, 0, numbers)
            return torch.empty(empty, dtype=self._shapes.dtype, device=self._place)
        return newest(layer, parts)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a head's tokens lie one after the other."""
    _, _, token, number = tensor.stride()
    return bool(number == 1 and token == tensor.shape[3])


def _head_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.stride(1) * tensor.element_size())
