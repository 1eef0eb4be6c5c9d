"""The seam to a device with its own memory: streams that copy, store flags and wait for each other.

Two implementations: `cuda_device` (a GPU, through the CUDA driver) and `host_device` (this machine's memory, for tests
and machines without a GPU). Everything above this seam is the same code on both.

What always holds: a call only queues work on a stream, in order, and returns; only `close` waits for the device. A flag
that `store` or `count` writes is seen only after all earlier work of its stream is visible to every
thread. A call that can't be queued raises DeviceError; after a reset of the device every call does.

What it doesn't do: own the memory that is copied or mapped. The caller keeps both until the work is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

__all__ = ["Copy", "Device", "DeviceBytes", "Graph", "Mapped"]


class Copy(NamedTuple):
    """Bytes between the device's memory and mapped host memory, or within the device's, by address."""

    target: int
    source: int
    length: int


class Mapped(Handle):
    """Host memory that is page-locked and mapped for the device until `close`, which waits for the device."""

    device_address: int


class DeviceBytes(Handle):
    """Memory of the device itself, until `close`, which waits for the device. No CPU touches it."""

    address: int


class Graph(Protocol):
    """Work that was captured once; one call queues all of it again."""

    def launch(self, stream: Any) -> None:
        """Queue all of it."""
        ...


class Device(Protocol):
    """One device. Each kind of device has its own types of streams and events."""

    index: int  # its number among the CUDA devices, by which a fabric registers its memory

    def open_stream(self) -> Any:
        """Create a stream; it ends with the device's handle."""
        ...

    def current_stream(self) -> Any:
        """The stream that the calling thread computes on; DeviceError, as of any call, after a reset."""
        ...

    def map(self, address: int, length: int, *, io_memory: bool = False) -> Mapped:
        """Page-lock and map host memory, DeviceError if there is not enough; `io_memory`: a NIC's doorbell."""
        ...

    def allocate(self, length: int) -> DeviceBytes:
        """Memory of the device's own; DeviceError if there is not enough."""
        ...

    def see_arrivals(self) -> None:
        """Let work that is queued from now on see what a NIC has written into its memory."""
        ...

    def copy(self, stream: Any, copies: Iterable[Copy]) -> None:
        """Queue copies."""
        ...

    def store(self, stream: Any, word: int, value: int) -> None:
        """Queue a store to a mapped word, given by its device address."""
        ...

    def open_total(self) -> int:
        """Make a 64-bit total of the device's own, 0, for `count`."""
        ...

    def count(self, stream: Any, word: int, total: int, step: int) -> None:
        """Queue: add to the total, and store it to the mapped word. In a graph each launch adds again."""
        ...

    def ring_doorbell(self, stream: Any, doorbell: int, step: int) -> None:
        """Queue a store to a NIC's mapped doorbell, which adds the step to its counter."""
        ...

    def record(self, stream: Any) -> Any:
        """Queue an event."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Queue: nothing later on this stream runs before the event."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether the event was reached."""
        ...

    def capture(self, stream: Any) -> AbstractContextManager[Graph]:
        """Capture work that is queued on the stream meanwhile, instead of running it."""
        ...

    def close(self) -> None:
        """Wait for the device, and release all that this handle owns."""
        ...
