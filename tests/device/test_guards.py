"""A full ring, streams in any order, and a device that refuses work: a block is not stored, or not loaded."""

from __future__ import annotations

import itertools
import secrets
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.engines.vllm import groups
from kvstore.engines.vllm.groups import Load, Wanted
from kvstore.errors import CudaUnavailable, DeviceError
from kvstore.limits import VLLM_DEVICE_WINDOWS
from kvstore.testing import MemoryNode
from nic_offload.host_device import HostDevice
from tests.device.engine import Engine, random_values, wait_for
from tests.device.tensors import LAYERS, PAGE_BYTES, names, pages, running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nic_offload.device import Mapped
    from tests.device.engine import Values

SHAPE = "[2, blocks] NHD"
BLOCK_BYTES = LAYERS * PAGE_BYTES


class Refusing(HostDevice):
    """Refuses the calls that are named."""

    def __init__(self, seed: int = 0) -> None:
        self.refused: set[str] = set()
        super().__init__(seed)

    def _check(self, call: str) -> None:
        if call in self.refused:
            raise DeviceError(f"{call} failed: an illegal memory access was encountered (700).")

    def map(self, address: int, length: int, *, io_memory: bool = False) -> Mapped:
        self._check("map")
        return super().map(address, length, io_memory=io_memory)

    def copy(self, stream: Any, copies: Any) -> None:
        self._check("copy")
        super().copy(stream, copies)

    def store(self, stream: Any, word: int, value: int) -> None:
        if "store" in self.refused:
            raise CudaUnavailable("The compiler NVRTC has no kernel for this GPU.")
        super().store(stream, word, value)

    def record(self, stream: Any) -> Any:
        self._check("record")
        return super().record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        self._check("wait")
        super().wait(stream, event)


@pytest.fixture(scope="module")
def memory_node() -> Iterator[MemoryNode]:
    with MemoryNode() as node:
        yield node


@pytest.fixture
def device() -> Refusing:
    return Refusing()


@pytest.fixture
def engine(memory_node: MemoryNode, device: Refusing) -> Iterator[Engine]:
    one = engine_of(memory_node, device)
    yield one
    device.refused.clear()
    device.run()
    one.close()


def engine_of(node: MemoryNode, device: HostDevice, **settings: Any) -> Engine:
    given = {"transport": "memory", "save_timeout_ms": 2000, **settings}
    return Engine(node, SHAPE, device, **given)


def wanted_of(*blocks: int) -> list[Wanted]:
    return [Wanted(0, block, secrets.token_bytes(32)) for block in blocks]


def totals(engine: Engine) -> dict[str, int]:
    of = engine.outcomes
    return {
        name: sum(getattr(one, name) for one in of) // LAYERS
        for name in ("pages", "failed", "skipped", "withheld")
    }


def is_exact(engine: Engine, wanted: Sequence[Wanted], values: Values) -> None:
    blocks = [one.block for one in wanted]
    assert engine.load(wanted).missing == []
    seen = engine.seen(blocks)
    for block in blocks:
        assert [seen[block, at] for at in range(LAYERS)] == [
            values[block][at].tobytes() for at in range(LAYERS)
        ]


def stored_at_last(engine: Engine, values: Values) -> list[Wanted]:
    """Step until there is room for two blocks: memory comes back with the thread's next turn."""
    wanted: list[Wanted] = []

    def are_stored() -> bool:
        wanted[:] = wanted_of(1, 2)
        engine.step(wanted, values)
        return len(engine.saved(2)) == 2

    wait_for(are_stored, "there is room again")
    return wanted


@pytest.mark.parametrize("seed", range(12))
def test_bytes_are_exact_in_any_order_of_streams(memory_node: MemoryNode, seed: int) -> None:
    device = HostDevice(seed)
    engine = engine_of(memory_node, device)
    with running(device):
        for _ in range(3):
            wanted = wanted_of(1, 2, 20)
            values = random_values(SHAPE, [1, 2, 20])
            engine.step(wanted, values)
            assert len(engine.saved(3)) == 3
            is_exact(engine, wanted, values)
    engine.close()


@pytest.mark.parametrize("again", [(5,), (4, 5, 5), (0, 3)], ids=["one draft layer", "drafts", "others"])
def test_layers_that_a_step_computes_again_are_stored_with_their_last_values(
    memory_node: MemoryNode, monkeypatch: pytest.MonkeyPatch, again: tuple[int, ...]
) -> None:
    """A draft model computes its layers for each token that it drafts, all in one step."""
    monkeypatch.setattr(groups, "OBJECT_BYTES_MAX", 3 * PAGE_BYTES)
    for seed in range(6):
        device = HostDevice(seed)
        engine = engine_of(memory_node, device)
        with running(device):
            wanted, values = wanted_of(1, 2, 20), random_values(SHAPE, [1, 2, 20])
            engine.step(wanted, values, again=again)
            assert len(engine.saved(3)) == 3
            assert totals(engine) == {"pages": 3, "failed": 0, "skipped": 0, "withheld": 0}
            is_exact(engine, wanted, values)
        engine.close()


def make_two_objects_of_a_block(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "OBJECT_BYTES_MAX", 3 * PAGE_BYTES)
    vars(engine.identity.groups[0]).pop("runs", None)  # made with the limit of before


def test_an_object_whose_layer_is_computed_again_waits_for_the_last_copy(
    engine: Engine, device: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_two_objects_of_a_block(engine, monkeypatch)
    wanted, values = wanted_of(5), random_values(SHAPE, [5])
    client: Any = engine.transport._client  # type: ignore[attr-defined]
    (first, second) = engine.identity.groups[0].objects([wanted[0].digest], 0)

    def stored() -> list[bool]:
        return [type(one).__name__ == "Stored" for one in client.exists([first, second], timeout_s=5)]

    engine.step(wanted, values, again=[5])
    flag = engine.transport.saves._flag  # type: ignore[attr-defined]
    while not flag.has(2):  # all layers were copied once, and the last is to be computed again
        assert device.step()
    wait_for(lambda: stored()[0], "the object whose layers are not computed again")
    assert stored() == [True, False]
    with running(device):
        assert len(engine.saved(1)) == 1
        is_exact(engine, wanted, values)


def test_nothing_is_sent_before_the_device_has_copied_it(
    engine: Engine, device: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_two_objects_of_a_block(engine, monkeypatch)
    wanted, values = wanted_of(5), random_values(SHAPE, [5])
    (first, second) = engine.identity.groups[0].objects([wanted[0].digest], 0)
    client: Any = engine.transport._client  # type: ignore[attr-defined]

    def stored() -> list[bool]:
        return [type(one).__name__ == "Stored" for one in client.exists([first, second], timeout_s=5)]

    engine.step(wanted, values)
    assert stored() == [False, False]
    flag = engine.transport.saves._flag  # type: ignore[attr-defined]
    while not flag.has(1):
        assert device.step()
    assert not flag.has(2), "the flag of the last layers comes later"
    wait_for(
        lambda: stored() == [True, False], "the first layers leave while the last are still to be copied"
    )
    with running(device):
        assert len(engine.saved(1)) == 1
        is_exact(engine, wanted, values)


def test_a_full_ring_skips_blocks_and_the_compute_stream_continues(
    memory_node: MemoryNode, device: Refusing
) -> None:
    engine = engine_of(memory_node, device, host_bytes=2 * BLOCK_BYTES, save_timeout_ms=50)
    values = random_values(SHAPE, [1, 2])
    first, second = wanted_of(1, 2), wanted_of(1, 2)
    engine.step(first, values)
    engine.step(second, values)
    engine.saved(2)
    assert totals(engine)["skipped"] == 2
    with running(device):
        engine.saved(2)
        assert totals(engine) == {"pages": 2, "failed": 0, "skipped": 2, "withheld": 0}
        is_exact(engine, stored_at_last(engine, values), values)
        wait_for(lambda: not device.compute.work, "the compute stream")
    engine.close()


def test_memory_of_an_abandoned_put_is_not_reused_while_a_copy_may_arrive(
    memory_node: MemoryNode, device: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.engines.vllm.device_saves.VLLM_DEVICE_COPY_MS", 50)
    engine = engine_of(memory_node, device, host_bytes=2 * BLOCK_BYTES, save_timeout_ms=50)
    values = random_values(SHAPE, [1, 2])
    engine.step(wanted_of(1, 2), values)
    engine.saved(2)  # the device has not moved: they are given up
    assert totals(engine)["failed"] == 2
    engine.step(wanted_of(1, 2), values)
    engine.saved(2)
    assert totals(engine)["skipped"] == 2, "a copy into the first ones' memory is still queued"
    with running(device):
        flag = engine.transport.saves._flag  # type: ignore[attr-defined]
        wait_for(lambda: flag.has(flag.last), "the copies")
        is_exact(engine, stored_at_last(engine, values), values)
    engine.close()


def test_an_inconsistent_or_incomplete_step_is_withheld(engine: Engine, device: Refusing) -> None:
    values = random_values(SHAPE, [1])
    with running(device):
        engine.step(wanted_of(1), values, is_sound=False)
        engine.saved(1)
        saves = engine.transport.saves
        saves.begin(wanted_of(1))
        for name in names()[:-1]:
            saves.layer_done(name)
        saves.settle(is_sound=True)
        engine.saved(1)
        assert totals(engine) == {"pages": 0, "failed": 0, "skipped": 0, "withheld": 2}
        wanted = wanted_of(1)
        engine.step(wanted, values)
        assert len(engine.saved(1)) == 1, "the memory was free again"
        is_exact(engine, wanted, values)


@pytest.mark.parametrize("accepts", [0, 1, 2])
def test_memory_of_a_transport_that_could_not_be_made_is_not_registered_any_more(
    memory_node: MemoryNode, accepts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, mapped = Refusing(), list[int]()

    def map_some(address: int, length: int) -> Mapped:
        if len(mapped) == accepts:
            device.refused.add("map")
        mapped.append(address)
        return Refusing.map(device, address, length)

    monkeypatch.setattr(device, "map", map_some)
    with pytest.raises(DeviceError):
        Engine(memory_node, SHAPE, device, transport="memory")
    assert len(mapped) == accepts + 1
    assert not device._mapped


def test_a_device_that_can_not_store_to_a_flag_is_refused_when_it_is_opened(memory_node: MemoryNode) -> None:
    """Otherwise no memory for copies would ever be given back, and no block be stored."""
    device = Refusing()
    device.refused.add("store")
    with pytest.raises(CudaUnavailable, match="has no kernel"):
        engine_of(memory_node, device)
    assert not device._mapped


@pytest.mark.parametrize("call", ["copy", "record", "wait", "store"])
def test_a_device_that_refuses_work_costs_the_step_and_not_the_engine(
    engine: Engine, device: Refusing, call: str
) -> None:
    values = random_values(SHAPE, [1])
    with running(device):
        device.refused.add(call)
        engine.step(wanted_of(1), values)
        engine.saved(1)
        assert totals(engine) == {"pages": 0, "failed": 1, "skipped": 0, "withheld": 0}
        device.refused.clear()
        wanted = wanted_of(1)
        engine.step(wanted, values)
        assert len(engine.saved(1)) == 1
        is_exact(engine, wanted, values)


@pytest.mark.parametrize("call", [2, LAYERS], ids=["in a layer", "at the end"])
def test_a_device_without_a_current_stream_costs_the_step_and_not_the_engine(
    engine: Engine, device: Refusing, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The device is asked for its current stream once a layer and at the end."""
    values, calls = random_values(SHAPE, [1]), itertools.count()

    def current_stream() -> Any:
        if next(calls) == call:
            raise DeviceError("CUDA error: an illegal memory access was encountered")
        return device.compute

    with running(device):
        with monkeypatch.context() as patched:
            patched.setattr(device, "current_stream", current_stream)
            engine.step(wanted_of(1), values)
        engine.saved(1)
        assert totals(engine) == {"pages": 0, "failed": 1, "skipped": 0, "withheld": 0}
        wanted = wanted_of(1)
        engine.step(wanted, values)
        assert len(engine.saved(1)) == 1
        is_exact(engine, wanted, values)


@pytest.mark.parametrize("call", ["copy", "record", "wait", "store"])
def test_a_refused_step_that_filled_the_ring_gives_it_back(memory_node: MemoryNode, call: str) -> None:
    """Later steps find no room until then, so it can't depend on a block of theirs."""
    device = Refusing()
    engine = engine_of(memory_node, device, host_bytes=2 * BLOCK_BYTES)
    values = random_values(SHAPE, [1, 2])
    with running(device):
        device.refused.add(call)
        engine.step(wanted_of(1, 2), values)
        engine.saved(2)
        device.refused.clear()
        is_exact(engine, stored_at_last(engine, values), values)
    engine.close()


@pytest.mark.parametrize("call", ["copy", "record"])
def test_a_load_that_the_device_refuses_is_a_miss_and_the_next_one_is_not(
    engine: Engine, device: Refusing, call: str
) -> None:
    wanted, values = wanted_of(1, 2), random_values(SHAPE, [1, 2])
    with running(device):
        engine.step(wanted, values)
        engine.saved(2)
        for _ in range(2 * VLLM_DEVICE_WINDOWS):
            engine.transport.before_loads()
            device.refused.add(call)
            assert len(engine.loads.load(Load("r", wanted)).missing) == 2
            device.refused.clear()
            engine.transport.after_loads()
        is_exact(engine, wanted, values)


@pytest.mark.parametrize("call", ["record", "wait"])
def test_copies_that_the_compute_stream_can_not_wait_for_are_done_before_the_engine_goes_on(
    engine: Engine, device: Refusing, call: str
) -> None:
    """It computes these blocks itself then, and a late copy would overwrite them."""
    wanted, values = wanted_of(1), random_values(SHAPE, [1])
    gate = threading.Event()
    with running(device):
        engine.step(wanted, values)
        engine.saved(1)
        engine.transport.before_loads()
        loads = engine.transport._stream  # type: ignore[attr-defined]
        loads.queue(gate.is_set)
        assert engine.loads.load(Load("r", wanted)).missing == []
        opens = threading.Timer(0.2, gate.set)
        opens.start()
        device.refused.add(call)
        with pytest.raises(DeviceError):
            engine.transport.after_loads()
        device.refused.clear()
        assert gate.is_set()
        assert pages(engine.caches[names()[0]])[1].tobytes() == values[1][0].tobytes()
        opens.join()


def test_pages_that_the_node_lacks_are_misses_and_their_blocks_are_not_written(
    engine: Engine, device: Refusing
) -> None:
    wanted, values = wanted_of(1, 2), random_values(SHAPE, [1, 2])
    with running(device):
        engine.step(wanted[:1], values)
        engine.saved(1)
        for cache in engine.caches.values():
            engine.compute(cache, 2, pages(cache)[2] + 7)
        assert [one.block for one in engine.load(wanted).missing] == [2]
        seen = engine.seen([2])
        assert {bytes(value) for value in seen.values()} == {b"\x07\x00" * (PAGE_BYTES // 2)}


def test_a_load_writes_to_blocks_only_after_earlier_computations_with_them(
    engine: Engine, device: Refusing
) -> None:
    wanted, values = wanted_of(1), random_values(SHAPE, [1])
    with running(device):
        engine.step(wanted, values)
        engine.saved(1)
    for cache in engine.caches.values():
        engine.compute(cache, 1, pages(cache)[1] * 0 + 9)  # a kernel of an earlier step, not run yet
    engine.transport.before_loads()
    loaded = engine.loads.load(Load("r", wanted))
    loads = engine.transport._stream  # type: ignore[attr-defined]
    while loads.work and loads.work[0]():  # the device is as unkind as it may be
        loads.work.popleft()
    engine.transport.after_loads()
    with running(device):
        seen = engine.seen([1])
    assert loaded.missing == []
    assert [seen[1, at] for at in range(LAYERS)] == [values[1][at].tobytes() for at in range(LAYERS)]


def test_a_machine_that_refuses_page_locked_memory_says_so(memory_node: MemoryNode, device: Refusing) -> None:
    device.refused.add("map")
    with pytest.raises(DeviceError, match="map failed"):
        engine_of(memory_node, device)
