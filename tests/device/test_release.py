"""A device that was reset, or that never ends its work: its memory is released, and an engine exits, within a bound."""

from __future__ import annotations

import gc
import secrets
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.engines import device_release
from kvstore.engines.copy_flag import CopyFlag
from kvstore.engines.device_release import release
from kvstore.engines.vllm.groups import Wanted
from kvstore.errors import DeviceError
from kvstore.limits import VLLM_DEVICE_COPY_MS
from kvstore.testing import MemoryNode
from nic_offload.host_device import HostDevice
from tests.device.engine import Engine, random_values
from tests.device.tensors import LAYERS
from tests.storage.fakes import FakeClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engines.vllm.saving import Copied

STEPS, SEND_MS = 20, 1000


class Memory:
    """Memory that the device writes to."""


class Part:
    """Closed once the device has ended its work."""

    def __init__(self, *, is_reset: bool = False) -> None:
        self.is_reset, self.has_ended = is_reset, threading.Event()
        self.is_closed = False

    def close(self) -> None:
        self.has_ended.wait()
        if self.is_reset:
            raise DeviceError("cuCtxSynchronize failed: an illegal memory access was encountered (700).")
        self.is_closed = True


def test_after_a_reset_all_parts_are_closed_and_the_first_error_is_returned() -> None:
    first, second = Part(is_reset=True), Part()
    first.has_ended.set()
    second.has_ended.set()
    error = release([first, second], Memory())
    assert isinstance(error, DeviceError)
    assert "illegal memory access" in str(error)
    assert second.is_closed


def test_a_device_that_never_ends_its_work_is_waited_for_within_a_bound_and_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_release, "ENGINE_DEVICE_CLOSE_MS", 20)
    part, memory = Part(), Memory()
    kept = weakref.ref(memory)
    with ThreadPoolExecutor(1) as pool:
        try:
            error = pool.submit(release, [part], memory).result(20)
            del memory
            gc.collect()
            assert isinstance(error, DeviceError)
            assert "stays page-locked" in str(error)
            assert kept() is not None, "the device may still write to it"
        finally:
            part.has_ended.set()
    for one in threading.enumerate():
        if one.name == "kvstore-release":
            one.join(20)
    assert part.is_closed
    gc.collect()
    assert kept() is None


def test_the_words_of_a_flag_are_released_though_its_device_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostDevice()
    flag = CopyFlag(device, device.open_stream())

    def gone(_address: int) -> None:
        raise DeviceError("The device was reset.")

    monkeypatch.setattr(device, "unmap", gone)
    with pytest.raises(DeviceError):
        flag.close()
    assert flag._words._fd < 0


class NoCopies:
    """A sender of objects that the device never copies: it takes all the time that it has."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.objects = clock, 0

    def send(self, objects: Sequence[Copied], copying_s: float = 0.0) -> Any:
        self.clock.now_ms += round(copying_s * 1000) + SEND_MS
        self.objects = len(objects)
        return self

    def outcome(self, wait_s: float) -> list[bool | None]:  # noqa: ARG002
        return [False] * self.objects


def test_an_engine_whose_device_hangs_exits_when_the_last_steps_time_is_over() -> None:
    """All batches that are queued wait for the same copies, and share one deadline."""
    clock = FakeClock()
    with MemoryNode() as node:
        engine = Engine(node, "[2, blocks] NHD", transport="memory")
        saves: Any = engine.transport.saves
        saves._clock, saves._sender = clock, NoCopies(clock)
        all_queued = threading.Event()
        saves._thread.submit(all_queued.wait)
        values = random_values("[2, blocks] NHD", [1])
        began_ns = clock.monotonic_ns()
        for _ in range(STEPS):
            engine.step([Wanted(0, 1, secrets.token_bytes(32))], values)
        all_queued.set()
        saves._thread.shutdown()  # as at the interpreter's exit, it ends when all that is queued has ended
        assert clock.monotonic_ns() - began_ns == (VLLM_DEVICE_COPY_MS + SEND_MS) * 1_000_000
        assert sum(one.failed for one in saves.ended()) == STEPS * LAYERS
        engine.device.run()
        engine.close()
