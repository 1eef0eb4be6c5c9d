"""Tensors of a host device: vLLM's KV caches as numpy arrays with PyTorch's names; a device that runs in a thread."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.engines.vllm.groups import Group, Identity
from kvstore.layout import Layer, Layout, Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nic_offload.host_device import HostDevice

__all__ = [
    "BLOCKS",
    "HEADS",
    "LAYERS",
    "SHAPES",
    "TOKENS",
    "HostTensor",
    "caches_of",
    "identity_of",
    "running",
]

BLOCKS, TOKENS, HEADS, NUMBERS, LAYERS = 24, 16, 2, 32, 6


class HostTensor:
    """The part of a PyTorch tensor that is used here."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.shape = array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)


def _zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.uint16)


def _hnd(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A cache whose memory is [..., heads, tokens, numbers], seen as [..., tokens, heads, numbers]."""
    return array.swapaxes(-3, -2)


# As vLLM's backends for GPUs have them. Of the last, a block's pages of all layers lie side by side.
SHAPES: dict[str, Callable[[], list[np.ndarray[Any, Any]]]] = {
    "[2, blocks] NHD": lambda: [_zeros(2, BLOCKS, TOKENS, HEADS, NUMBERS) for _ in range(LAYERS)],
    "[2, blocks] HND": lambda: [_hnd(_zeros(2, BLOCKS, HEADS, TOKENS, NUMBERS)) for _ in range(LAYERS)],
    "[blocks, 2] NHD": lambda: [_zeros(BLOCKS, 2, TOKENS, HEADS, NUMBERS) for _ in range(LAYERS)],
    "[blocks, 2] HND": lambda: [_hnd(_zeros(BLOCKS, 2, HEADS, TOKENS, NUMBERS)) for _ in range(LAYERS)],
    "[blocks, 2], stored [2, blocks]": lambda: [
        _zeros(2, BLOCKS, TOKENS, HEADS, NUMBERS).swapaxes(0, 1) for _ in range(LAYERS)
    ],
    "kernel blocks of half the size": lambda: [
        _zeros(2, 2 * BLOCKS, TOKENS // 2, HEADS, NUMBERS) for _ in range(LAYERS)
    ],
    "MLA": lambda: [_zeros(BLOCKS, TOKENS, 2 * HEADS * NUMBERS) for _ in range(LAYERS)],
    "all layers of a block together": lambda: list(
        _zeros(BLOCKS, LAYERS, 2, TOKENS, HEADS, NUMBERS).swapaxes(0, 1)
    ),
}
PAGE_BYTES = 2 * TOKENS * HEADS * NUMBERS * 2


def names() -> tuple[str, ...]:
    return tuple(f"model.layers.{number}.attn" for number in range(LAYERS))


def caches_of(shape: str) -> dict[str, HostTensor]:
    return {name: HostTensor(array) for name, array in zip(names(), SHAPES[shape](), strict=True)}


def pages(cache: HostTensor) -> np.ndarray[Any, Any]:
    """The same memory with the engine's blocks first."""
    array = cache.array
    if array.shape[0] == 2:
        array = array.swapaxes(0, 1)
    if array.shape[0] == 2 * BLOCKS:
        array = np.moveaxis(array.reshape(BLOCKS, 2, *array.shape[1:]), 1, 0).swapaxes(0, 1)
    return array


def identity_of(engine: str, window_tokens: int = 0) -> Identity:
    layout = Layout(
        model="m",
        weights="w",
        dtype="bfloat16",
        block_tokens=TOKENS,
        layers=(Layer(HEADS, NUMBERS, NUMBERS),) * LAYERS,
        order=Order.OPAQUE,
        engine=engine,
    )
    return Identity((Group(0, TOKENS, window_tokens, names(), (layout,), PAGE_BYTES),), layout.canonical)


@contextmanager
def running(device: HostDevice) -> Iterator[None]:
    """Run the device in a thread for the time of the `with` block."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            if not device.step():
                over.wait(0.0005)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)
