"""A GPU behind the seam of `device`: the CUDA driver through ctypes. PyTorch owns the tensors; CuPy is not needed.

What always holds: importing this loads nothing; opening a device without a driver or a GPU is a CudaUnavailable that
says which is missing. Every call makes the device's primary context, which PyTorch uses too, current on the calling
thread while it lasts, so any thread may call. A flag is stored by cuStreamWriteValue64, which puts a memory barrier
before it, or, on a GPU without it and in graphs, by the kernels of `flag_kernel.cu`.

What it doesn't do: wait for the GPU, except in `close` of mapped memory and of the device. It has never run on a GPU:
see docs/gpu.md.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from contextlib import ExitStack, contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from nic_offload.device import DeviceBytes, Mapped
from nic_offload.errors import CudaUnavailable, DeviceError
from nic_offload.nvrtc import compiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nic_offload.device import Copy

__all__ = ["CudaDevice", "load_driver"]

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamWriteValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
    "cuMemsetD8_v2": (c_uint64, ctypes.c_ubyte, c_size_t),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
}
_NOT_READY, _NOT_SUPPORTED = 600, 801
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_ORDER_OF_ARRIVALS = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
_THIS_CONTEXT, _OWNER = 0, 100  # whose view of what NICs wrote into its memory
_NON_BLOCKING = 1  # a stream that does not wait for the legacy default stream
_NO_TIMING = 2
_PORTABLE, _DEVICE_MAP, _IO_MEMORY = 1, 2, 4
_THREAD_LOCAL = 1  # a capture that other threads' calls don't invalidate


def load_driver() -> Any:
    """The driver's library, with the types of the functions that are used here."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailable(f"There is no CUDA driver on this machine ({error}).") from error
    for name, types in _SIGNATURES.items():
        try:
            getattr(library, name).argtypes = types
        except AttributeError as error:
            raise CudaUnavailable(f"The CUDA driver is too old: it has no {name}; CUDA 12 has.") from error
    return library


class _CudaMapped(Mapped):
    def __init__(self, device: CudaDevice, start: int, device_address: int) -> None:
        self._device, self._start = device, start
        self.device_address = device_address

    def close(self) -> None:
        if self._start:
            start, self._start = self._start, 0
            self._device.unmap(start)


class _CudaBytes(DeviceBytes):
    def __init__(self, device: CudaDevice, address: int) -> None:
        self._device, self.address = device, address

    def close(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            self._device.free(address)


class _Event:
    """Destroyed when nothing refers to it; the driver keeps it until the stream has passed it."""

    def __init__(self, device: CudaDevice, handle: int) -> None:
        self._device, self.handle = device, handle

    def __del__(self) -> None:
        self._device.forget_event(self.handle)


class _Graph:
    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.handle = 0

    def launch(self, stream: int) -> None:
        self._device.call("cuGraphLaunch", self.handle, stream)


class CudaDevice:
    """One GPU; streams are the driver's handles, so those of PyTorch (`stream.cuda_stream`) are taken too."""

    def __init__(self, index: int = 0, driver: Any = None) -> None:
        self._driver = load_driver() if driver is None else driver
        self._context: int | None = None
        self._streams: list[int] = []
        self._totals: list[int] = []
        self._graphs: list[int] = []
        self._module = 0
        self._functions: dict[bytes, int] = {}
        self._loading = threading.Lock()
        self._writes_values = True
        self.index = index
        self._orders_arrivals: bool | None = None
        count, device, context = c_int(), c_int(), c_void_p()
        code = self._driver.cuInit(0) or self._driver.cuDeviceGetCount(byref(count))
        if code:
            raise CudaUnavailable(f"CUDA finds no usable GPU: {self._said(code)}.")
        if not 0 <= index < count.value:
            raise CudaUnavailable(f"This machine has {count.value} GPUs, and no GPU {index}.")
        code = self._driver.cuDeviceGet(byref(device), index)
        code = code or self._driver.cuDevicePrimaryCtxRetain(byref(context), device.value)
        if code:
            raise CudaUnavailable(f"GPU {index} can't be used: {self._said(code)}.")
        self._number, self._context = device.value, context.value

    # --- calls of the driver

    def _said(self, code: int) -> str:
        text = c_char_p()
        self._driver.cuGetErrorString(code, byref(text))
        return f"{(text.value or b'an unknown error').decode()} ({code})"

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Make the device's context current on the calling thread meanwhile."""
        if self._context is None:
            raise DeviceError("The GPU's handle is closed.")
        if code := self._driver.cuCtxPushCurrent_v2(self._context):
            raise DeviceError(f"The GPU can't be used any more: {self._said(code)}.")
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent_v2(byref(c_void_p()))

    def _check(self, name: str, code: int) -> None:
        if code:
            raise DeviceError(f"{name} failed: {self._said(code)}.")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver, in the device's context."""
        with self._here():
            self._check(name, getattr(self._driver, name)(*arguments))

    def _made(self, name: str, kind: Any, *arguments: Any) -> int:
        out = kind()
        self.call(name, byref(out), *arguments)
        return int(out.value or 0)

    # --- the seam

    def open_stream(self) -> int:
        """Create a stream."""
        self._streams.append(self._made("cuStreamCreate", c_void_p, _NON_BLOCKING))
        return self._streams[-1]

    def current_stream(self) -> int:
        """PyTorch's current stream of the calling thread; the default stream in a process without PyTorch."""
        torch = sys.modules.get("torch")
        try:
            return 0 if torch is None else int(torch.cuda.current_stream(self.index).cuda_stream)
        except RuntimeError as error:
            raise DeviceError(f"PyTorch has no current stream any more: {error}") from error

    def map(self, address: int, length: int, *, io_memory: bool = False) -> Mapped:
        """Page-lock and map whole pages; `io_memory` is a NIC's doorbell."""
        start = address & -mmap.PAGESIZE
        end = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = _DEVICE_MAP | (_IO_MEMORY if io_memory else _PORTABLE)
        self.call("cuMemHostRegister_v2", start, end - start, flags)
        try:
            on_device = self._made("cuMemHostGetDevicePointer_v2", c_uint64, start, 0)
        except DeviceError:
            self.unmap(start)
            raise
        return _CudaMapped(self, start, on_device + address - start)

    def unmap(self, start: int) -> None:
        """Wait for the GPU, then unmap; if the GPU is gone there is nothing to unmap."""
        try:
            self.call("cuCtxSynchronize")
        finally:
            self.call("cuMemHostUnregister", start)

    def allocate(self, length: int) -> _CudaBytes:
        """Take memory from the driver, beside PyTorch's."""
        return _CudaBytes(self, self._made("cuMemAlloc_v2", c_uint64, length))

    def free(self, address: int) -> None:
        """Wait for the GPU, then free; if the GPU is gone there is nothing to free."""
        try:
            self.call("cuCtxSynchronize")
        finally:
            self.call("cuMemFree_v2", address)

    def see_arrivals(self) -> None:
        """Flush writes of NICs, unless the GPU has them in order."""
        if self._orders_arrivals is None:
            order = self._made("cuDeviceGetAttribute", c_int, _ORDER_OF_ARRIVALS, self._number)
            self._orders_arrivals = order >= _OWNER
        if not self._orders_arrivals:
            self.call("cuFlushGPUDirectRDMAWrites", _THIS_CONTEXT, _OWNER)

    def copy(self, stream: int, copies: Iterable[Copy]) -> None:
        """Queue copies, in any direction."""
        with self._here():
            run = self._driver.cuMemcpyAsync
            for target, source, length in copies:
                self._check("cuMemcpyAsync", run(target, source, length, stream))

    def store(self, stream: int, word: int, value: int) -> None:
        """Queue a store after a system-wide barrier."""
        if self._writes_values:
            with self._here():
                code = self._driver.cuStreamWriteValue64_v2(stream, word, value, 0)
            if code != _NOT_SUPPORTED:
                self._check("cuStreamWriteValue64", code)
                return
            self._writes_values = False
        self._launch(b"tk_ring", stream, word, value)

    def open_total(self) -> int:
        """Make a total, and load the kernel, which can't be done during a capture."""
        total = self._made("cuMemAlloc_v2", c_uint64, 8)
        self._totals.append(total)
        self.call("cuMemsetD8_v2", total, 0, 8)
        self._launch(b"tk_ring_next", 0, total, total, 0)
        self.call("cuCtxSynchronize")
        return total

    def count(self, stream: int, word: int, total: int, step: int) -> None:
        """Queue the kernel that adds to the total and stores it."""
        self._launch(b"tk_ring_next", stream, word, total, step)

    def ring_doorbell(self, stream: int, doorbell: int, step: int) -> None:
        """Queue a store to a NIC's doorbell, which adds the step to its counter."""
        self._launch(b"tk_ring_doorbell", stream, doorbell, step)

    def record(self, stream: int) -> _Event:
        """Queue an event."""
        event = _Event(self, self._made("cuEventCreate", c_void_p, _NO_TIMING))
        self.call("cuEventRecord", event.handle, stream)
        return event

    def wait(self, stream: int, event: _Event) -> None:
        """Hold the stream until the event."""
        self.call("cuStreamWaitEvent", stream, event.handle, 0)

    def is_done(self, event: _Event) -> bool:
        """Ask the driver, which also reports failed work here."""
        with self._here():
            code = self._driver.cuEventQuery(event.handle)
        if code == _NOT_READY:
            return False
        self._check("Work on the GPU", code)
        return True

    def forget_event(self, handle: int) -> None:
        """Destroy an event that nothing refers to; errors are ignored, since there is no caller to report them to."""
        if self._context is not None:
            self._driver.cuEventDestroy_v2(handle)

    @contextmanager
    def capture(self, stream: int) -> Iterator[_Graph]:
        """Capture a graph; it can be launched until the device is closed."""
        made = _Graph(self)
        self.call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        with ExitStack() as undo:
            try:
                yield made
            finally:
                graph = self._made_last("cuStreamEndCapture", stream)
                undo.callback(self.call, "cuGraphDestroy", graph)
            made.handle = self._made("cuGraphInstantiateWithFlags", c_void_p, graph, 0)
        self._graphs.append(made.handle)

    def _made_last(self, name: str, *arguments: Any) -> int:
        out = c_void_p()
        self.call(name, *arguments, byref(out))
        return int(out.value or 0)

    def _launch(self, name: bytes, stream: int, *numbers: int) -> None:
        function = self._functions.get(name) or self._load(name)
        values = [c_uint64(number) for number in numbers]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, pointers, None)

    def _load(self, name: bytes) -> int:
        with self._loading:
            if not self._module:
                major = self._made("cuDeviceGetAttribute", c_int, _MAJOR, self._number)
                minor = self._made("cuDeviceGetAttribute", c_int, _MINOR, self._number)
                code = compiled(10 * major + minor).machine_code
                self._module = self._made("cuModuleLoadData", c_void_p, code)
            self._functions[name] = self._made("cuModuleGetFunction", c_void_p, self._module, name)
            return self._functions[name]

    def close(self) -> None:
        """Wait for the GPU, and release all that this handle owns; the context stays PyTorch's."""
        if self._context is None:
            return
        try:
            self.call("cuCtxSynchronize")
            for graph in self._graphs:
                self.call("cuGraphExecDestroy", graph)
            for stream in self._streams:
                self.call("cuStreamDestroy_v2", stream)
            for total in self._totals:
                self.call("cuMemFree_v2", total)
            if self._module:
                self.call("cuModuleUnload", self._module)
        finally:
            self._context = None
            self._driver.cuDevicePrimaryCtxRelease_v2(self._number)
