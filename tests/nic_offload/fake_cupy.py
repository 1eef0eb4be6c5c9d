"""A stand-in for CuPy on a machine without a GPU: streams are queues that run when they are told to.

What always holds: device addresses are not host addresses, so whoever mixes them up reads or writes nowhere and
fails; memory that is not mapped (any more) is out of reach; nothing that was queued runs before `run` or a wait.

What it doesn't do: anything that only a GPU can show, such as the order in which others see its stores.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

__all__ = ["FakeCupy", "FakeStream"]

APART = 1 << 44  # from a mapped host address to what the GPU calls it
PAGE = 4096


class FakeError(Exception):
    """What the runtime raises."""


class FakeArray:
    """Memory of the GPU."""

    def __init__(self, count: int, dtype: Any) -> None:
        self.host = np.zeros(count, dtype)
        self.data = SimpleNamespace(ptr=int(self.host.ctypes.data) + 2 * APART)


class FakeStream:
    """A queue of work."""

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        self.work: list[Callable[[], None]] = []
        cupy.streams.append(self)
        self.ptr = len(cupy.streams)
        self.cuda_stream: int  # only a stand-in for a stream of PyTorch has it

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()

    synchronize = run

    def __enter__(self) -> Self:
        self._cupy.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._cupy.entered.pop()


class FakeKernel:
    """One of the kernels of flag_kernel.cu, as its text says it works."""

    def __init__(self, cupy: FakeCupy, name: str) -> None:
        self._cupy = cupy
        self._run: Callable[..., None] = self._next if name == "tk_ring_next" else self._ring

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        assert grid == (1,)
        plain = [one.data.ptr if isinstance(one, FakeArray) else int(one) for one in arguments]
        self._cupy.current.work.append(lambda: self._run(block[0], *plain))

    def _ring(self, threads: int, words: int, value: int) -> None:
        for thread in range(threads):
            self._cupy.word(words + 8 * thread).value = value

    def _next(self, threads: int, words: int, totals: int, step: int) -> None:
        for thread in range(threads):
            total = self._cupy.word(totals + 8 * thread)
            total.value += step
            self._cupy.word(words + 8 * thread).value = total.value


class FakeCupy:
    """What `import cupy` gives, as far as nic_offload uses it."""

    uint64 = np.uint64

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.streams: list[FakeStream] = []
        self.mapped: dict[int, tuple[int, int]] = {}  # start: length, flags
        self.arrays: list[FakeArray] = []
        self.entered = [FakeStream(self)]
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=FakeError,
                getDeviceCount=lambda: self.devices,
                hostRegister=self._register,
                hostUnregister=self._unregister,
                pointerGetAttributes=lambda start: SimpleNamespace(devicePointer=start + APART),
                memcpyAsync=self._copy,
                memcpyDeviceToHost=2,
            ),
            Device=self._device,
            ExternalStream=lambda handle, _device: self.streams[handle - 1],
            get_current_stream=lambda: self.current,
        )

    @classmethod
    def install(cls, patch: pytest.MonkeyPatch, devices: int = 1) -> FakeCupy:
        """Be what `import cupy` gives until the test ends."""
        fake = cls(devices)
        patch.setitem(sys.modules, "cupy", fake)
        return fake

    @property
    def current(self) -> FakeStream:
        return self.entered[-1]

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:  # noqa: N802 - CuPy's own name
        assert options

        def get_function(name: str) -> FakeKernel:
            assert f"__global__ void {name}(" in code
            return FakeKernel(self, name)

        return SimpleNamespace(get_function=get_function)

    def zeros(self, count: int, dtype: Any) -> FakeArray:
        self.arrays.append(FakeArray(count, dtype))
        return self.arrays[-1]

    def word(self, address: int) -> ctypes.c_uint64:
        """A word, by what the GPU calls it."""
        for start, (length, _) in self.mapped.items():
            if 0 <= address - start - APART <= length - 8:
                return ctypes.c_uint64.from_address(address - APART)
        self._array(address, 8)
        return ctypes.c_uint64.from_address(address - 2 * APART)

    def _array(self, address: int, length: int) -> None:
        inside = [a for a in self.arrays if 0 <= address - a.data.ptr <= a.host.nbytes - length]
        assert inside, f"illegal address {address:#x}"

    def _register(self, start: int, length: int, flags: int) -> None:
        assert start % PAGE == 0
        assert length % PAGE == 0
        for other, (taken, _) in self.mapped.items():
            if start < other + taken and other < start + length:
                raise FakeError("already registered")
        self.mapped[start] = length, flags

    def _unregister(self, start: int) -> None:
        del self.mapped[start]

    def _copy(self, target: int, source: int, length: int, kind: int, stream: int) -> None:
        def run() -> None:
            assert kind == 2
            self._array(source, length)
            assert any(s <= target and target + length <= s + n for s, (n, _) in self.mapped.items())
            ctypes.memmove(target, source - 2 * APART, length)

        self.streams[stream - 1].work.append(run)

    def _device(self) -> Any:
        def synchronize() -> None:
            for stream in self.streams:
                stream.run()

        class Device(contextlib.nullcontext[None]):
            id = 0

        device: Any = Device()
        device.synchronize = synchronize
        return device
