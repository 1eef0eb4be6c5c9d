"""A device whose memory is this machine's, and whose streams are queues that run only on request.

`run` takes work from the streams in a random order that events allow; so a forgotten wait shows as wrong bytes, and so
does a flag without its copy.

What always holds: work of one stream runs in order, and work queued after `wait` runs after the event. A copy has
exactly one side in mapped memory, as a page-locked copy has, unless it is from the device's own memory; device
addresses of mapped memory differ from its host addresses, so that mixing them up fails. The device's own memory has no
access by the CPU at its address, and the device sees what was written there only after `see_arrivals`.

What it doesn't do: run by itself, or show what only a GPU can, such as the order in which others see its stores.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nic_offload.device import DeviceBytes, Mapped
from nic_offload.errors import DeviceError
from nic_offload.flags import FlagWord
from nic_offload.memory import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nic_offload.device import Copy

__all__ = ["HostDevice", "HostStream"]

_APART = 1 << 44  # from a mapped host address to its device address


class _Event:
    is_done = False


class HostStream:
    """A queue. A piece of work that returns False can't run yet."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], bool]] = deque()
        self.captured: list[Callable[[], bool]] | None = None

    def queue(self, work: Callable[[], bool]) -> None:
        """Queue work, to run after all that was queued before."""
        (self.work if self.captured is None else self.captured).append(work)


class _Graph:
    def __init__(self) -> None:
        self.work: list[Callable[[], bool]] = []

    def launch(self, stream: HostStream) -> None:
        for one in self.work:
            stream.queue(one)


class _HostMapped(Mapped):
    def __init__(self, device: HostDevice, address: int) -> None:
        self._device, self._address = device, address
        self.device_address = address + _APART

    def close(self) -> None:
        self._device.unmap(self._address)


class _HostBytes(DeviceBytes):
    """`there` is what others write to through the device's address, and `here` what the device sees."""

    def __init__(self, device: HostDevice, length: int) -> None:
        self._device = device
        fd = os.memfd_create("triggerkv-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, length)
        self._apart = mmap.mmap(fd, length, prot=0)
        self.there, self.here = mmap.mmap(fd, length), mmap.mmap(-1, length)
        os.close(fd)
        self.address = address_of(self._apart)

    def close(self) -> None:
        self._device.free(self)


class HostDevice:
    """Its calls may come from any thread."""

    index = 0

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - an order of work
        self._lock = threading.RLock()
        self._streams: list[HostStream] = []
        self._mapped: dict[int, int] = {}
        self._own: list[_HostBytes] = []
        self._totals: list[ctypes.c_uint64] = []
        self.compute = self.open_stream()

    def open_stream(self) -> HostStream:
        """Create a stream."""
        with self._lock:
            self._streams.append(HostStream())
            return self._streams[-1]

    def current_stream(self) -> HostStream:
        """The one stream that computes."""
        return self.compute

    def map(self, address: int, length: int, *, io_memory: bool = False) -> Mapped:  # noqa: ARG002
        """Record the memory; doorbells are not told apart."""
        with self._lock:
            self._mapped[address] = length
        return _HostMapped(self, address)

    def unmap(self, address: int) -> None:
        """Run all that was queued, then forget the memory."""
        if address in self._mapped:
            self.run()
            with self._lock:
                del self._mapped[address]

    def allocate(self, length: int) -> _HostBytes:
        """Make memory."""
        self._own.append(_HostBytes(self, length))
        return self._own[-1]

    def free(self, memory: _HostBytes) -> None:
        """Run all that was queued, then forget the memory."""
        if memory in self._own:
            self.run()
            self._own.remove(memory)

    def see_arrivals(self) -> None:
        """The device sees what was written until now."""
        for memory in self._own:
            memory.here[:] = memory.there[:]

    def _seen_at(self, address: int, length: int) -> int | None:
        """Where the device itself has bytes of its own memory."""
        for memory in self._own:
            if 0 <= (offset := address - memory.address) <= len(memory.here) - length:
                return address_of(memory.here) + offset
        return None

    def copy(self, stream: HostStream, copies: Iterable[Copy]) -> None:
        """Queue copies, each on its own."""
        for target, given, length in copies:
            own = self._seen_at(given, length)
            source = given if own is None else own
            if self._is_mapped(target, length) + self._is_mapped(source, length) != (own is None):
                raise DeviceError(
                    f"A copy of {length} bytes needs one side in mapped memory, and has {target:#x} and {source:#x}."
                )

            def work(target: int = target, source: int = source, length: int = length) -> bool:
                ctypes.memmove(target, source, length)
                return True

            stream.queue(work)

    def store(self, stream: HostStream, word: int, value: int) -> None:
        """Queue a release store."""
        address = self._word(word)

        def work() -> bool:
            FlagWord(address).store(value)
            return True

        stream.queue(work)

    def open_total(self) -> int:
        """Make a total, addressed like the device's own memory."""
        self._totals.append(ctypes.c_uint64(0))
        return ctypes.addressof(self._totals[-1])

    def count(self, stream: HostStream, word: int, total: int, step: int) -> None:
        """Queue an addition and a release store."""
        address, sum_up = self._word(word), ctypes.c_uint64.from_address(total)

        def work() -> bool:
            sum_up.value += step
            FlagWord(address).store(sum_up.value)
            return True

        stream.queue(work)

    def ring_doorbell(self, stream: HostStream, doorbell: int, step: int) -> None:
        """Queue a store; a stand-in's doorbell is a word of memory."""
        self.store(stream, doorbell, step)

    def record(self, stream: HostStream) -> _Event:
        """Queue an event."""
        event = _Event()

        def work() -> bool:
            event.is_done = True
            return True

        stream.queue(work)
        return event

    def wait(self, stream: HostStream, event: _Event) -> None:
        """Hold the stream until the event."""
        stream.queue(lambda: event.is_done)

    def is_done(self, event: _Event) -> bool:
        """Whether it was reached."""
        return event.is_done

    @contextmanager
    def capture(self, stream: HostStream) -> Iterator[_Graph]:
        """Collect what is queued."""
        graph = _Graph()
        stream.captured = graph.work
        try:
            yield graph
        finally:
            stream.captured = None

    def step(self) -> bool:
        """Run one piece of work of some stream; False if none can."""
        with self._lock:
            for stream in self._dice.sample(self._streams, len(self._streams)):
                if stream.work and stream.work[0]():
                    stream.work.popleft()
                    return True
        return False

    def run(self) -> None:
        """Run until no work is left that can run."""
        while self.step():
            pass

    def close(self) -> None:
        """Run what is left."""
        self.run()

    def _is_mapped(self, address: int, length: int) -> bool:
        with self._lock:
            return any(
                start <= address and address + length <= start + n for start, n in self._mapped.items()
            )

    def _word(self, device_address: int) -> int:
        address = device_address - _APART
        if not self._is_mapped(address, 8):
            raise DeviceError(f"There is no mapped word at the device's address {device_address:#x}.")
        return address
