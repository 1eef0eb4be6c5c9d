# ruff: noqa: N802, N815 - the driver's own names
"""A stand-in for the CUDA driver's library: its functions, over the streams of a host device.

What always holds: calls that need a context fail without one on their thread, as the driver's do; handles that were
never given out, or are destroyed, are refused; so is giving back what queued work may need. What it doesn't do: what
only a GPU can show.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from nic_offload.cuda_device import CudaDevice
from nic_offload.flags import FlagWord
from nic_offload.host_device import HostDevice, HostStream

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FakeCuda", "FakeDriver"]

INVALID, MEMORY, NO_DEVICE, NO_CONTEXT, NOT_READY, NOT_SUPPORTED, ILLEGAL = 1, 2, 100, 201, 600, 801, 700
APART = 1 << 44
CONTEXT = 0xC0


def _out(reference: Any, value: int | bytes) -> int:
    reference._obj.value = value
    return 0


class FakeDriver:
    """The functions of `libcuda.so.1` that are used."""

    def __init__(
        self, *, gpus: int = 1, seed: int = 0, writes_values: bool = True, orders_arrivals: bool = False
    ) -> None:
        self.host = HostDevice(seed)
        self.gpus, self.writes_values = gpus, writes_values
        self.orders_arrivals, self.flushes = orders_arrivals, 0
        self.is_reset = False
        self.code_of_copy = 0
        self.memory: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.io_memory: set[int] = set()  # of these
        self.retained = 0
        self._local = threading.local()
        self._things: dict[int, Any] = {0: self.host.compute}
        self._next = 0x1000
        self.captured: list[Callable[[], bool]] | None = None

    def new(self, reference: Any, thing: Any) -> int:
        self._next += 16
        self._things[self._next] = thing
        return _out(reference, self._next)

    @property
    def contexts(self) -> list[int]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[int] = self._local.stack
        return stack

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        free = (
            "cuInit",
            "cuDeviceGet",
            "cuDeviceGetCount",
            "cuDevicePrimary",
            "cuCtxPush",
            "cuGetError",
            "cuEventDestroy",
        )
        is_free = name.startswith(free) and name != "cuDeviceGetAttribute"
        if not name.startswith("cu") or is_free:
            return found
        if not self.contexts:
            return lambda *_: NO_CONTEXT
        return (lambda *_: ILLEGAL) if self.is_reset and name != "cuCtxPopCurrent_v2" else found

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return 0 if self.gpus else NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:
        return _out(count, self.gpus)

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return _out(device, index)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert device < self.gpus
        return _out(value, {75: 9, 76: 0, 118: 100 if self.orders_arrivals else 0}[attribute])

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        assert device < self.gpus
        self.retained += 1
        return _out(context, CONTEXT)

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        assert device < self.gpus
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        assert context == CONTEXT
        self.contexts.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        return _out(context, self.contexts.pop())

    def cuCtxSynchronize(self) -> int:
        self.host.run()
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return _out(
            text, {MEMORY: b"out of memory", ILLEGAL: b"an illegal memory access"}.get(code, b"an error")
        )

    def _expect_idle(self) -> None:
        assert not any(stream.work for stream in self.host._streams), "work is queued"

    # --- streams and events

    def queue(self, stream: int, work: Callable[[], bool]) -> int:
        if self.captured is not None and stream == self._capturing:
            self.captured.append(work)
        else:
            self._things[stream].queue(work)
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        assert flags == 1
        return self.new(stream, self.host.open_stream())

    def cuStreamDestroy_v2(self, stream: int) -> int:
        self._expect_idle()
        del self._things[stream]
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        assert flags == 2
        return self.new(event, None)

    def cuEventRecord(self, event: int, stream: int) -> int:
        self._things[event] = self.host.record(self._things[stream])
        return 0

    def cuEventQuery(self, event: int) -> int:
        return 0 if self._things[event].is_done else NOT_READY

    def cuEventDestroy_v2(self, event: int) -> int:
        del self._things[event]
        return 0

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        assert flags == 0
        self.host.wait(self._things[stream], self._things[event])
        return 0

    # --- memory

    def cuMemHostRegister_v2(self, start: int, length: int, flags: int) -> int:
        assert start % 4096 == length % 4096 == 0
        assert flags in (3, 6)
        if self.code_of_copy == MEMORY:
            return MEMORY
        self.registered[start] = length
        if flags == 6:
            self.io_memory.add(start)
        return 0

    def cuMemHostUnregister(self, start: int) -> int:
        self._expect_idle()
        del self.registered[start]
        return 0

    def cuMemHostGetDevicePointer_v2(self, pointer: Any, start: int, flags: int) -> int:
        assert flags == 0
        return _out(pointer, start + APART) if start in self.registered else INVALID

    def _is_locked(self, address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + n for start, n in self.registered.items())

    def cuMemcpyAsync(self, target: int, source: int, length: int, stream: int) -> int:
        if self.code_of_copy:
            return self.code_of_copy
        assert self._is_locked(target, length) != self._is_locked(source, length)
        return self.queue(stream, lambda: ctypes.memmove(target, source, length) is not None)

    def cuMemAlloc_v2(self, address: Any, length: int) -> int:
        memory = (ctypes.c_ubyte * length)()
        self.memory[ctypes.addressof(memory)] = memory
        return _out(address, ctypes.addressof(memory))

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        assert (target, scope) == (0, 100)
        self.flushes += 1
        return 0

    def cuMemsetD8_v2(self, address: int, value: int, length: int) -> int:
        ctypes.memset(address, value, length)
        return 0

    def cuMemFree_v2(self, address: int) -> int:
        self._expect_idle()
        del self.memory[address]
        return 0

    # --- flags

    def _word(self, address: int) -> FlagWord:
        if address in self.memory:
            return FlagWord(address)
        assert self._is_locked(address - APART, 8)
        return FlagWord(address - APART)

    def _queue_store(self, stream: int, word: FlagWord, value: int) -> int:
        def run() -> bool:
            word.store(value)
            return True

        return self.queue(stream, run)

    def cuStreamWriteValue64_v2(self, stream: int, address: int, value: int, flags: int) -> int:
        assert flags == 0, "anything else leaves the barrier out"
        if not self.writes_values:
            return NOT_SUPPORTED
        word = self._word(address)
        return self._queue_store(stream, word, value)

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        assert code.startswith(b"\x7fELF")
        return self.new(module, code)

    def cuModuleUnload(self, module: int) -> int:
        del self._things[module]
        self._things = {
            handle: thing for handle, thing in self._things.items() if not isinstance(thing, bytes)
        }
        return 0

    def cuModuleGetFunction(self, function: Any, module: int, name: bytes) -> int:
        assert name in self._things[module]
        return self.new(function, name)

    def cuLaunchKernel(self, function: int, *given: Any) -> int:
        *sizes, shared, stream, pointers, extra = given
        assert (sizes, shared, extra) == ([1] * 6, 0, None)
        name = self._things[function]
        values = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers]
        word = self._word(values[0])
        if name == b"tk_ring_next":
            total, step = ctypes.c_uint64.from_address(values[1]), values[2]

            def run() -> bool:
                total.value += step
                word.store(total.value)
                return True

            return self.queue(stream, run)
        assert name in (b"tk_ring", b"tk_ring_doorbell")
        return self._queue_store(stream, word, values[1])

    # --- graphs

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> int:
        assert mode == 1
        self.captured, self._capturing = [], stream
        return 0

    def cuStreamEndCapture(self, stream: int, graph: Any) -> int:
        assert stream == self._capturing
        work, self.captured = self.captured, None
        return self.new(graph, work)

    def cuGraphInstantiateWithFlags(self, made: Any, graph: int, flags: int) -> int:
        assert flags == 0
        return self.new(made, list(self._things[graph]))

    def cuGraphLaunch(self, graph: int, stream: int) -> int:
        for work in self._things[graph]:
            self._things[stream].queue(work)
        return 0

    def cuGraphDestroy(self, graph: int) -> int:
        del self._things[graph]
        return 0

    cuGraphExecDestroy = cuGraphDestroy


class FakeCuda(CudaDevice):
    """The CUDA device's own code over that driver; the engine computes on its default stream."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__(driver=driver)
        self.driver = driver

    @property
    def compute(self) -> HostStream:
        return self.driver.host.compute

    def current_stream(self) -> int:
        return 0

    def step(self) -> bool:
        return self.driver.host.step()
