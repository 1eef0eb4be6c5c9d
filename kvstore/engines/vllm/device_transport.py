"""Moves pages between a device and the node, by the client's transport.

What is saved goes through page-locked memory. Objects are fetched into windows of memory (`load_memory`); those that
arrived, whole and checked, are copied into the engine's blocks on a stream for loads. That stream waits for the
engine's earlier work, and the compute stream waits for it (`before_loads`, `after_loads`); a thread waits for copies
only before it reuses a window.

What always holds: what `page_transport` guarantees, except that fetched bytes are in place after `after_loads`, in the
order of the compute stream. A window is filled again only after it was copied. Page-locked memory is bounded:
`host_bytes` for saves, and a few windows.
"""

from __future__ import annotations

import mmap
import queue
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any

from kvstore.client import Hit
from kvstore.clock import SystemClock
from kvstore.engines.copy_flag import CopyFlag
from kvstore.engines.stores import block_at
from kvstore.engines.vllm.device_saves import DeviceSaves
from kvstore.engines.vllm.load_memory import LoadMemory
from kvstore.engines.vllm.sending import PutSender
from kvstore.errors import KvError
from kvstore.limits import SLAB_BYTES, VLLM_DEVICE_COPY_MS, VLLM_DEVICE_POLL_MS, VLLM_DEVICE_WINDOWS
from nic_offload.device import Copy
from nic_offload.memory import address_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.client import Client, ClusterClient
    from kvstore.engines.stores import Store
    from kvstore.engines.vllm.device_memory import DeviceMemory
    from kvstore.engines.vllm.page_transport import Object
    from kvstore.engines.vllm.settings import Settings

__all__ = ["DeviceTransport"]


@dataclass
class _Window:
    """Some of the memory, and the last copies out of it."""

    offset: int
    is_used: bool = False  # there have been some
    copied: Any = None  # the event behind the last ones; None: the device has not accepted one yet


class DeviceTransport:
    """The device transport of a worker."""

    def __init__(
        self,
        client: Client | ClusterClient,
        memory: DeviceMemory,
        copies: mmap.mmap,
        settings: Settings,
        object_bytes: int,
        slots: int,
    ) -> None:
        self._client: Store = client
        self._device, self._clock = memory.device, SystemClock()
        self._stream = memory.device.open_stream()
        self._window_bytes = -(-max(SLAB_BYTES, object_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._all_windows = [_Window(number * self._window_bytes) for number in range(VLLM_DEVICE_WINDOWS)]
        self._windows: queue.Queue[_Window] = queue.Queue()
        for window in self._all_windows:
            self._windows.put(window)
        with ExitStack() as undo:  # the driver must not know memory of a transport that was not made
            windows_bytes = VLLM_DEVICE_WINDOWS * self._window_bytes
            self._arrivals = undo.enter_context(LoadMemory(client, memory.device, windows_bytes))
            self._mapped = undo.enter_context(memory.device.map(address_of(copies), len(copies)))
            side = memory.device.open_stream()
            flag = CopyFlag(memory.device, side)
            undo.callback(flag.close)
            timeout_s = settings.save_timeout_ms / 1000
            sender = PutSender(client, client.register(copies), slots, timeout_s, flag.word)
            undo.pop_all()
        self.name = self._arrivals.name
        self.saves = DeviceSaves(memory, copies, sender, flag, side)

    def before_loads(self) -> None:
        """Loads write to blocks only after earlier work on them has ended."""
        self._device.wait(self._stream, self._device.record(self._device.current_stream()))

    def after_loads(self) -> None:
        """Work queued from now on comes after the loads that have ended.

        If the device refuses that, this thread waits for their copies: the engine computes these blocks next.
        """
        try:
            self._device.wait(self._device.current_stream(), self._device.record(self._stream))
        except KvError:
            self._become_free(self._all_windows, self._clock.monotonic_ns() + VLLM_DEVICE_COPY_MS * 1_000_000)
            raise

    def _is_free(self, window: _Window) -> bool:
        copied = window.copied
        return not window.is_used or (copied is not None and self._device.is_done(copied))

    def _become_free(self, windows: Sequence[_Window], until_ns: int) -> bool:
        """Wait for the copies out of these windows; whether they are done in time."""
        pause = Event()
        while not all(map(self._is_free, windows)):
            if not self._left_s(until_ns):
                return False
            pause.wait(VLLM_DEVICE_POLL_MS / 1000)
        return True

    def fetch(self, objects: Sequence[Object], timeout_s: float) -> list[bool]:
        """Fetch pages into the windows, and queue their copies."""
        until_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        here: list[bool] = []
        for some in self._parts(objects):
            window = self._take(until_ns)
            if window is None:
                here += [False] * len(some)
                continue
            try:
                here += self._fetch(window, some, until_ns)
            finally:
                self._windows.put(window)
        return here

    def _parts(self, objects: Sequence[Object]) -> Iterator[Sequence[Object]]:
        first, size = 0, 0
        for at, one in enumerate(objects):
            if size + one.length > self._window_bytes:
                yield objects[first:at]
                first, size = at, 0
            size += one.length
        if objects:
            yield objects[first:]

    def _left_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

    def _take(self, until_ns: int) -> _Window | None:
        """A window without pending copies, if one becomes available in time."""
        try:
            window = self._windows.get(timeout=self._left_s(until_ns))
        except queue.Empty:
            return None
        is_free = False
        try:
            if window.is_used and window.copied is None:
                window.copied = self._device.record(self._stream)
            is_free = self._become_free([window], until_ns)
        finally:
            if not is_free:
                self._windows.put(window)
        return window if is_free else None

    def _fetch(self, window: _Window, objects: Sequence[Object], until_ns: int) -> list[bool]:
        places, at = [], window.offset
        for one in objects:
            places.append(at)
            at += one.length
        here = self._brought(objects, places, until_ns)
        copies = [
            copy
            for one, place, is_here in zip(objects, places, here, strict=True)
            if is_here
            for copy in self._copies(one, place)
        ]
        if copies:
            self._arrivals.see()
            window.is_used, window.copied = True, None  # some may be queued even if one is refused
            self._device.copy(self._stream, copies)
            window.copied = self._device.record(self._stream)
        return here

    def _copies(self, one: Object, place: int) -> Iterator[Copy]:
        source = self._arrivals.address + place
        for page in one.pieces:
            for address, length in page:
                yield Copy(address, source, length)
                source += length

    def _brought(self, objects: Sequence[Object], places: Sequence[int], until_ns: int) -> list[bool]:
        blocks = [
            block_at(one.key, self._arrivals.region, place, one.length)
            for one, place in zip(objects, places, strict=True)
        ]
        outcomes = self._client.get(blocks, timeout_s=self._left_s(until_ns))
        return [isinstance(outcome, Hit) for outcome in outcomes]
