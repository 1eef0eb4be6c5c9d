"""The CUDA device's calls of the driver, tested without a GPU, against a stand-in for the library."""

from __future__ import annotations

import ctypes
import mmap
import secrets
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstore.engines.vllm.groups import Wanted
from kvstore.testing import MemoryNode
from nic_offload.cuda_device import _SIGNATURES, CudaDevice, load_driver
from nic_offload.device import Copy
from nic_offload.errors import CudaUnavailable, DeviceError
from nic_offload.flags import FlagWords
from nic_offload.host_device import HostDevice
from nic_offload.memory import address_of
from tests.device.engine import Engine, random_values
from tests.device.fake_driver import MEMORY, FakeCuda, FakeDriver
from tests.device.tensors import LAYERS, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.device import Device


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def cuda(driver: FakeDriver) -> Iterator[FakeCuda]:
    device = FakeCuda(driver)
    yield device
    driver.is_reset, driver.code_of_copy = False, 0
    device.close()
    assert not driver.contexts
    assert driver.retained == 0
    assert not driver.memory
    assert set(driver._things) <= {0}, "all that was made is destroyed"


@pytest.mark.parametrize("seed", range(4))
def test_the_spine_on_cuda_is_exact_in_any_order_of_streams(seed: int) -> None:
    driver = FakeDriver(seed=seed, writes_values=bool(seed % 2))
    device = FakeCuda(driver)
    with MemoryNode() as node, running(cast("HostDevice", device)):
        engine = Engine(node, "[2, blocks] HND", cast("HostDevice", device), transport="memory")
        wanted = [Wanted(0, block, secrets.token_bytes(32)) for block in (3, 8)]
        values = random_values("[2, blocks] HND", (3, 8))
        engine.step(wanted, values)
        assert len(engine.saved(2)) == 2
        assert engine.load(wanted).missing == []
        seen = engine.seen((3, 8))
        for block in (3, 8):
            exact = [values[block][at].tobytes() for at in range(LAYERS)]
            assert [seen[block, at] for at in range(LAYERS)] == exact
        engine.close()


def graph_counts_on(device: Any) -> None:
    """Capture copies and a counted flag once; each launch copies the current bytes."""
    device = cast("Device", device)
    memory, source = mmap.mmap(-1, 4096), (ctypes.c_ubyte * 64)()
    with FlagWords.create(2) as words:
        stream, total = device.open_stream(), device.open_total()
        flags, staged = device.map(words[0].address, 16), device.map(address_of(memory), 4096)
        with device.capture(stream) as graph:
            device.copy(stream, [Copy(address_of(memory), ctypes.addressof(source), 64)])
            device.count(stream, flags.device_address + 8, total, 16)
        for turn in range(1, 5):
            ctypes.memset(source, turn, 64)
            graph.launch(stream)
            event = device.record(stream)
            assert not device.is_done(event)
            assert words[1].load() == 16 * (turn - 1)
            while cast("Any", device).step():
                pass
            assert device.is_done(event)
            assert words[1].load() == 16 * turn
            assert memory[:64] == bytes([turn]) * 64
        staged.close()
        flags.close()


def test_a_graph_continues_counting_at_each_launch(cuda: FakeCuda) -> None:
    graph_counts_on(cuda)


def test_a_capture_that_ends_in_an_error_leaves_no_graph(cuda: FakeCuda) -> None:
    stream = cuda.open_stream()
    with pytest.raises(KeyError), cuda.capture(stream):
        raise KeyError(stream)
    with cuda.capture(stream) as graph:
        cuda.copy(stream, [])
    graph.launch(stream)


def test_a_graph_of_the_host_device_continues_counting_too() -> None:
    graph_counts_on(HostDevice())


@pytest.mark.parametrize("writes_values", [True, False])
def test_a_flag_is_stored_in_stream_order(*, writes_values: bool) -> None:
    driver = FakeDriver(writes_values=writes_values)
    device = FakeCuda(driver)
    with FlagWords.create(1) as words:
        mapped, stream = device.map(words[0].address, 8), device.open_stream()
        device.store(stream, mapped.device_address, 7)
        device.ring_doorbell(stream, mapped.device_address, 9)
        assert words[0].load() == 0
        assert driver.host.step()
        assert words[0].load() == 7
        driver.host.run()
        assert words[0].load() == 9
        mapped.close()
        mapped.close()
        assert not driver.registered
    device.close()
    device.close()


def test_a_host_device_rings_a_doorbell_in_stream_order() -> None:
    device = HostDevice()
    with FlagWords.create(2) as words, device.map(words[0].address, 16, io_memory=True) as mapped:
        stream = device.open_stream()
        device.store(stream, mapped.device_address, 7)
        device.ring_doorbell(stream, mapped.device_address + 8, 3)
        assert device.step()
        assert [words[0].load(), words[1].load()] == [7, 0]
        device.run()
        assert [words[0].load(), words[1].load()] == [7, 3]


@pytest.mark.parametrize("in_order", [True, False])
def test_what_a_nic_wrote_is_flushed_unless_the_gpu_keeps_its_order(*, in_order: bool) -> None:
    driver = FakeDriver(orders_arrivals=in_order)
    device = FakeCuda(driver)
    with device.allocate(4096) as memory:
        assert memory.address in driver.memory
        device.see_arrivals()
        device.see_arrivals()
        assert driver.flushes == (0 if in_order else 2)
    assert not driver.memory
    device.close()


@pytest.mark.parametrize("what", ["mapped memory", "the device's memory", "the device"])
def test_what_queued_work_needs_is_given_back_once_it_is_done(driver: FakeDriver, what: str) -> None:
    device, memory, source = FakeCuda(driver), mmap.mmap(-1, 4096), (ctypes.c_ubyte * 64)(*range(64))
    own, stream = device.allocate(4096), device.open_stream()
    mapped = device.map(address_of(memory), 4096)
    device.copy(stream, [Copy(address_of(memory), ctypes.addressof(source), 64)])
    parts: dict[str, Any] = {"mapped memory": mapped, "the device's memory": own, "the device": device}
    parts[what].close()
    assert memory[:64] == bytes(range(64))


def test_a_doorbell_is_mapped_as_io_memory_and_a_flag_is_not(cuda: FakeCuda, driver: FakeDriver) -> None:
    with (
        FlagWords.create(1) as flag,
        FlagWords.create(1) as doorbell,
        cuda.map(flag[0].address, 8),
        cuda.map(doorbell[0].address, 8, io_memory=True),
    ):
        assert driver.io_memory == {doorbell[0].address & -mmap.PAGESIZE}


def test_after_a_reset_every_call_is_an_error_without_a_crash(cuda: FakeCuda, driver: FakeDriver) -> None:
    stream, event = cuda.open_stream(), cuda.record(0)
    driver.is_reset = True
    calls = (
        cuda.open_stream,
        lambda: cuda.copy(stream, [Copy(1, 2, 3)]),
        lambda: cuda.store(stream, 0, 1),
        lambda: cuda.wait(stream, event),
        lambda: cuda.is_done(event),
        lambda: cuda.record(stream),
    )
    for call in calls:
        with pytest.raises(DeviceError, match=r"illegal memory access \(700\)"):
            call()


def test_what_pytorch_raises_for_its_stream_after_a_reset_is_a_device_error(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_index: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = FakeCuda(driver)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(current_stream=refuse)))
    with pytest.raises(DeviceError, match="illegal memory access"):
        CudaDevice.current_stream(device)
    device.close()


def test_too_little_page_locked_memory_is_an_error_that_says_so(cuda: FakeCuda, driver: FakeDriver) -> None:
    driver.code_of_copy = MEMORY
    with pytest.raises(DeviceError, match=r"cuMemHostRegister_v2 failed: out of memory \(2\)"):
        cuda.map(4096, 4096)


def test_a_closed_device_refuses_work(driver: FakeDriver) -> None:
    device = FakeCuda(driver)
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.open_stream()


@pytest.mark.parametrize(("gpus", "index", "word"), [(0, 0, "no usable GPU"), (2, 2, "2 GPUs, and no GPU 2")])
def test_a_missing_gpu_is_reported(gpus: int, index: int, word: str) -> None:
    with pytest.raises(CudaUnavailable, match=word):
        CudaDevice(index, FakeDriver(gpus=gpus))


def test_a_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    with pytest.raises(CudaUnavailable, match=r"no CUDA driver .*libcuda.so.1: cannot open"):
        load_driver()


def test_the_stand_in_has_every_function_with_as_many_arguments() -> None:
    for name, types in _SIGNATURES.items():
        code = getattr(FakeDriver, name).__code__
        assert code.co_flags & 4 or code.co_argcount == len(types) + 1, name


def test_importing_loads_neither_a_driver_nor_torch() -> None:
    code = "import sys, nic_offload.cuda_device; assert not {'torch', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
