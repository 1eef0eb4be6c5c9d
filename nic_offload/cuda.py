"""Flag words that a GPU rings: host words and NIC doorbells, mapped for it, stored to from its streams.

`CudaFlags` maps `FlagWords`; a launch on a stream makes all that the stream did before it visible to everybody,
then stores one word, or some adjoining ones. `CudaDoorbell` does the same to a doorbell, which adds what is
stored. Streams are CuPy's or PyTorch's, also while they are captured into a graph.

What always holds: importing this needs neither CuPy nor a GPU; making a handle does, and says in one sentence
what is missing. Nothing is compiled, loaded or allocated by a ring, so it may be captured. No kernel that was
launched through a handle stores after its `close` has returned.

What it doesn't do: keep a word from going backwards (give each word to one way of ringing), know about graphs
that are replayed after `close` (the memory they store to is then unmapped: drop them first), or wait for a store
(`FlagWord.load` shows it). Its figures: none yet, see docs/gpu.md.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
from functools import cache
from typing import TYPE_CHECKING, Any

from nic_offload.errors import CudaUnavailable, KvError
from nic_offload.handle import Handle
from nic_offload.nvrtc import KERNEL_SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.flags import FlagWords

__all__ = ["CudaDoorbell", "CudaFlags", "MappedMemory", "load_cupy"]

COUNT_MAX = 1024  # words of one launch: the threads of one block
_WORD_BYTES = 8

# Flags of cudaHostRegister, which CuPy does not name.
_PORTABLE, _MAPPED, _IO_MEMORY = 1, 2, 4


def load_cupy() -> Any:
    """CuPy, if it is there and sees a GPU; otherwise the error says which of the two is missing."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise CudaUnavailable(
            f"Ringing flags from a GPU needs CuPy, which can't be imported ({error}):"
            " install the package's extra 'cuda'."
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise CudaUnavailable(f"CuPy is installed, but CUDA finds no usable GPU: {error}.") from error
    if not count:
        raise CudaUnavailable("CuPy is installed, but this machine has no GPU for it.")
    return cupy


@cache
def _compiled() -> tuple[Any, Any, Any]:
    """The kernels, compiled once a process; CuPy keeps what it compiled on disk as well."""
    cupy = load_cupy()
    module = cupy.RawModule(code=KERNEL_SOURCE.read_text(), options=("-std=c++17",))
    ring, following = module.get_function("tk_ring"), module.get_function("tk_ring_next")
    return ring, following, module.get_function("tk_ring_doorbell")


def _kernels(cupy: Any) -> tuple[Any, Any, Any]:
    """The kernels, loaded on the current GPU.

    CUDA loads code when it is first launched, which a capture does not survive: so each is launched here, on
    a word of the GPU's own.
    """
    ring, following, doorbell = _compiled()
    word = cupy.zeros(1, dtype=cupy.uint64)
    ring((1,), (1,), (word, cupy.uint64(0)))
    doorbell((1,), (1,), (word, cupy.uint64(0)))
    following((1,), (1,), (word, word, cupy.uint64(0)))
    cupy.cuda.get_current_stream().synchronize()
    return ring, following, doorbell


class MappedMemory(Handle):
    """Pages of this process that one GPU (the current one) can read and write; unmapped by `close`.

    The memory has to outlive the handle. Whole pages are mapped, so two handles must not share one.
    """

    def __init__(self, address: int, length: int, *, io_memory: bool = False) -> None:
        self.cupy = load_cupy()
        self._device = self.cupy.cuda.Device()
        start = address & -mmap.PAGESIZE
        end = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = _MAPPED | (_IO_MEMORY if io_memory else _PORTABLE)
        runtime = self.cupy.cuda.runtime
        try:
            runtime.hostRegister(start, end - start, flags)
        except runtime.CUDARuntimeError as error:
            raise KvError(
                f"CUDA did not map {end - start} bytes at {start:#x} for the GPU: {error}."
            ) from error
        self._start: int | None = start
        try:
            on_device = int(runtime.pointerGetAttributes(start).devicePointer)
        except runtime.CUDARuntimeError as error:
            self.close()
            raise KvError(f"CUDA gave no device address for {start:#x}: {error}.") from error
        self.device_address = on_device + address - start

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[Any]:
        """Make a stream the current one of CuPy: CuPy's own, PyTorch's, or None for the one that is current."""
        if self._start is None:
            raise KvError("This memory is no longer mapped for the GPU: its handle is closed.")
        streams = self.cupy.cuda
        handle = getattr(stream, "cuda_stream", None)  # PyTorch's name for the driver's stream
        with self._device:
            if handle is not None:
                stream = streams.ExternalStream(handle, self._device.id)
            with contextlib.nullcontext() if stream is None else stream:
                yield streams.get_current_stream()

    def close(self) -> None:
        """Wait for everything that the GPU was given to do, then unmap."""
        if self._start is None:
            return
        start, self._start = self._start, None
        with self._device:
            self._device.synchronize()
            self.cupy.cuda.runtime.hostUnregister(start)


class CudaFlags(Handle):
    """The words of a `FlagWords`, to be rung from the current GPU. Close it before the words.

    A word is rung by value (`ring`), or counted on by `ring_next`, whose total lives on the GPU; `reset`
    leads from one way to the other. Values are the caller's to keep going up.
    """

    def __init__(self, words: FlagWords) -> None:
        self._count = len(words)
        self._words = words
        cupy = load_cupy()
        self._ring, self._next, _ = _kernels(cupy)
        self._totals = cupy.zeros(self._count, dtype=cupy.uint64)
        cupy.cuda.get_current_stream().synchronize()  # the streams that ring need not be this one
        self._memory = MappedMemory(words[0].address, self._count * _WORD_BYTES)

    def ring(self, index: int, value: int, *, count: int = 1, stream: Any = None) -> None:
        """Once the stream gets there, store the value to `count` words from `index` on."""
        word, _ = self._at(index, count)
        with self._memory.on(stream):
            self._ring((1,), (count,), (word, self._memory.cupy.uint64(value)))

    def ring_next(self, index: int, step: int = 1, *, count: int = 1, stream: Any = None) -> None:
        """The same with a total that counts on by `step`: in a graph, at each replay of it."""
        word, total = self._at(index, count)
        with self._memory.on(stream):
            self._next((1,), (count,), (word, total, self._memory.cupy.uint64(step)))

    def reset(self, index: int, value: int = 0, *, count: int = 1, stream: Any = None) -> None:
        """Set both the words and the totals behind `ring_next`, in stream order.

        Arm the next puts only once the word shows the value: until then it shows what fires them.
        """
        word, total = self._at(index, count)
        number = self._memory.cupy.uint64(value)
        with self._memory.on(stream):
            self._ring((1,), (count,), (total, number))
            self._ring((1,), (count,), (word, number))

    def close(self) -> None:
        """Wait for the GPU, then unmap the words; they stay the host's."""
        self._memory.close()

    def _at(self, index: int, count: int) -> tuple[int, int]:
        """Where word `index` and its total are, for the GPU."""
        if index < 0 or not 1 <= count <= min(COUNT_MAX, self._count - index):
            raise KvError(
                f"There are {self._count} flag words, and a launch rings at most {COUNT_MAX} of them, not"
                f" {count} from word {index}."
            )
        offset = index * _WORD_BYTES
        return self._memory.device_address + offset, int(self._totals.data.ptr) + offset


class CudaDoorbell(Handle):
    """A counter of the NIC that adds what is stored to its doorbell, mapped for the current GPU.

    `address` is where the doorbell is mapped in this process. `io_memory` is False only where ordinary memory
    stands in for a doorbell and other code does the adding.
    """

    def __init__(self, address: int, *, io_memory: bool = True) -> None:
        _, _, self._ring = _kernels(load_cupy())
        self._memory = MappedMemory(address, _WORD_BYTES, io_memory=io_memory)

    def ring(self, step: int = 1, *, stream: Any = None) -> None:
        """Once the stream gets there, add `step`: the argument may be frozen in a graph, for the NIC counts."""
        with self._memory.on(stream):
            self._ring((1,), (1,), (self._memory.device_address, self._memory.cupy.uint64(step)))

    def close(self) -> None:
        """Wait for the GPU, then unmap the doorbell."""
        self._memory.close()
