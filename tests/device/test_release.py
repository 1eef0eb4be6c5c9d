"""Releasing page-locked memory of a device that was reset, or that never ends its work."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.engines import device_release
from kvstore.engines.copy_flag import CopyFlag
from kvstore.engines.device_release import release
from kvstore.errors import DeviceError
from nic_offload.host_device import HostDevice


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
