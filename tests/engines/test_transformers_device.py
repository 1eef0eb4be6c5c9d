"""A model's KV through a device's copies and flag: the code for CUDA, with a host device instead."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from transformers import DynamicCache  # noqa: E402

from kvstore.client import ArmedPuts, Client, Session  # noqa: E402
from kvstore.engines import device_release  # noqa: E402
from kvstore.engines.transformers import CacheStore, device_copies, moving  # noqa: E402
from kvstore.engines.transformers.copies import scatter  # noqa: E402
from kvstore.engines.transformers.token_blocks import pieces  # noqa: E402
from kvstore.errors import DeviceError, LayoutError, NodeUnavailable  # noqa: E402
from kvstore.miss import MissReason  # noqa: E402
from nic_offload.device import Copy  # noqa: E402
from nic_offload.errors import NoMemory  # noqa: E402
from nic_offload.host_device import HostDevice  # noqa: E402
from tests.device.tensors import running  # noqa: E402
from tests.engines.test_transformers import _model, _run, _same, _tokens  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.demo.node_process import NodeProcess
    from nic_offload.device import Mapped
    from nic_offload.host_device import HostStream


def _computed(kind: str, count: int) -> tuple[Any, Any, DynamicCache]:
    """A model, tokens, and the cache after computing them."""
    model, tokens = _model(kind), _tokens(count)
    live = DynamicCache(config=model.config)
    _run(model, tokens, live)
    return model, tokens, live


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "sliding", "mixed"])
def test_kv_saved_by_a_device_is_resumed_bit_for_bit_by_a_device_and_by_the_cpu(
    node: NodeProcess, kind: str, dtype: Any
) -> None:
    model, tokens = _model(kind, dtype=dtype), _tokens(300)
    live = DynamicCache(config=model.config)
    for turn, end in enumerate((70, 71, 200)):
        _run(model, tokens[:, :end], live)
        device = HostDevice(turn)
        with running(device), CacheStore(node.target, model, block_tokens=16, device=device) as store:
            saved = store.session("ada", f"device {kind} {dtype}").save(live, tokens)
        assert (saved.tokens, saved.error) == (end, None)
    for other in (HostDevice(9), None):
        started = running(other) if other is not None else running(HostDevice())
        with started, CacheStore(node.target, model, block_tokens=16, device=other) as store:
            back = store.session("ada", f"device {kind} {dtype}").resume(tokens)
        assert (back.tokens, back.miss) == (200, None)
        assert _same(back.cache, live)
        assert torch.equal(_run(model, tokens, back.cache), _run(model, tokens, _copy(live, model))), (
            "and it goes on"
        )


def _copy(cache: Any, model: Any) -> Any:
    copied = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        copied.update(layer.keys.clone(), layer.values.clone(), number)
        if hasattr(layer, "cumulative_length"):
            copied.layers[number].cumulative_length = layer.cumulative_length
    return copied


def test_kv_saved_by_the_cpu_is_resumed_by_a_device_in_several_parts(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is reused, each time only after the copies out of it are done."""
    model, tokens, live = _computed("mixed", 300)
    with CacheStore(node.target, model, block_tokens=16) as store:
        assert store.session("ada", "parts").save(live, tokens).error is None
        block_bytes = store.shapes.block_bytes(16, [16])
    monkeypatch.setattr(moving, "ENGINE_MOVING_BYTES", 3 * block_bytes)
    device = HostDevice(4)
    with running(device), CacheStore(node.target, model, block_tokens=16, device=device) as store:
        chat = store.session("ada", "parts")
        back = chat.resume(_tokens(301))
        assert (back.tokens, back.miss) == (300, None)
        assert _same(back.cache, live)
        again = store.session("ada", "parts by a device")
        assert again.save(live, tokens).error is None
    with CacheStore(node.target, model, block_tokens=16) as store:
        assert _same(store.session("ada", "parts by a device").resume(_tokens(301)).cache, live)


def test_puts_are_armed_before_the_copies_and_fired_by_the_device(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application makes one call for all blocks, and none between the device's copies and their flag."""
    model, tokens, live = _computed("full", 160)
    device, happened = HostDevice(1), []
    arm, copy = Client.arm, HostDevice.copy

    def arming(self: Any, blocks: Any, *given: Any, **named: Any) -> Any:
        puts = arm(self, blocks, *given, **named)
        happened.append(("arm", len(blocks), puts.progress()[0]))
        return puts

    def copying(self: Any, stream: HostStream, copies: Iterable[Copy]) -> None:
        copy(self, stream, copies)
        happened.append(("copy", 0, 0))

    monkeypatch.setattr(Client, "arm", arming)
    monkeypatch.setattr(HostDevice, "copy", copying)
    with CacheStore(node.target, model, block_tokens=16, device=device) as store, running(device):
        assert store.session("ada", "armed").save(live, tokens).error is None
    assert happened == [("arm", 10, 0), ("copy", 0, 0)]


@pytest.mark.parametrize("seed", range(8))
def test_copies_run_after_their_source_is_computed_and_before_it_is_overwritten(seed: int) -> None:
    """Streams run in any order that their events allow: the test queues the model's stream by hand."""
    shapes = CacheStore("127.0.0.1:9", _model("full"), block_tokens=16, weights="w").shapes
    some = list(pieces(shapes, list(range(32)), [32]))
    k, v = (torch.zeros(1, 2, 32, 16) for _ in range(2))
    cache = [(k, v)] * len(shapes.layers)
    memory, expected = mmap.mmap(-1, 1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    device = HostDevice(seed)
    copies = device_copies.DeviceCopies(device, memory)
    right = torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(seed))

    def write(tensor: Any, values: Any) -> None:
        device.compute.queue(lambda: bool(tensor.copy_(values) is tensor))

    write(k, right)
    write(v, -right)
    copies.save(shapes, cache, 32, some)
    write(k, torch.full_like(k, 7.0))  # the model goes on, and uses the memory for something else
    write(v, torch.full_like(v, 7.0))
    with running(device):
        copies.settle()
        scatter(shapes, [(right, -right)] * len(shapes.layers), 32, expected, some)
        size = sum(piece.length for piece in some)
        assert memory[:size] == expected[:size].numpy().tobytes()

        gathered = device_copies.DeviceGathered(shapes, copies, torch.device("cpu"))
        gathered.add(torch.frombuffer(memory, dtype=torch.uint8), some)
        memory[:size] = bytes(size)  # it is used again
        for back in gathered.layers():
            assert torch.equal(back[0], right)
            assert torch.equal(back[1], -right)
    copies.close()


def test_copies_of_a_load_run_after_earlier_work_on_their_target_and_before_later_work() -> None:
    device = HostDevice()
    source, target = mmap.mmap(-1, 4096), bytearray(4096)
    copies = device_copies.DeviceCopies(device, source)
    source[:] = b"k" * 4096
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    earlier: list[bytes] = []
    later: list[bytes] = []

    def before() -> bool:
        """The memory's previous owner is still writing, slowly."""
        earlier.append(bytes(target[:1]))
        if len(earlier) < 200:
            return False
        target[:] = b"x" * 4096
        return True

    def after() -> bool:
        later.append(bytes(target))
        return True

    device.compute.queue(before)
    with running(device):
        copies.load([Copy(address, copies.address(0), 4096)], target)
        device.compute.queue(after)
    device.run()
    assert set(earlier) == {b"\0"}
    assert later == [b"k" * 4096]
    copies.close()


def test_a_cache_on_several_devices_is_refused(node: NodeProcess) -> None:
    """The copies wait for the work of one device only."""
    model, tokens, live = _computed("full", 100)
    live.layers[2].values = live.layers[2].values.to("meta")
    with (
        CacheStore(node.target, model, block_tokens=16, device=HostDevice()) as store,
        pytest.raises(LayoutError, match="Layer 2 of the cache is on meta, and the model on cpu"),
    ):
        store.session("ada", "two devices").save(live, tokens)


class _Refusing(HostDevice):
    """A device that refuses copies, as after a reset."""

    refuses = False

    def copy(self, stream: HostStream, copies: Iterable[Copy]) -> None:
        if self.refuses:
            raise DeviceError("The device was reset.")
        super().copy(stream, copies)


def _raises(error: BaseException) -> Callable[..., Any]:
    def call(*_given: Any, **_named: Any) -> Any:
        raise error

    return call


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ((device_copies, "_is_dense"), FULL),
        ((HostDevice, "copy"), RuntimeError("a bug in the device's code")),
        ((ArmedPuts, "wait"), KeyboardInterrupt()),
    ],
    ids=["a full device", "a bug", "an interrupt"],
)
def test_whatever_ends_a_save_its_blocks_are_never_stored_with_the_bytes_of_the_next(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, fails: tuple[Any, str], error: BaseException
) -> None:
    model, tokens, live = _computed("full", 160)
    other = DynamicCache(config=model.config)
    others = (tokens + 17) % 90 + 3
    _run(model, others, other)
    user, device = f"{fails[1]} fails", HostDevice(1)  # no other user's blocks are taken for theirs
    with (
        running(device),
        CacheStore(node.target, model, block_tokens=16, device=device, weights=user) as store,
    ):
        first = store.session(user, "first")
        with monkeypatch.context() as patched:
            patched.setattr(*fails, _raises(error))
            if error is FULL:
                saved = first.save(live, tokens)
                assert isinstance(saved.error, DeviceError)
                assert "CUDA out of memory" in str(saved.error)
            else:
                with pytest.raises(type(error)):
                    first.save(live, tokens)
        assert store.session(user, "next").save(other, others).error is None
        assert first.save(live, tokens).error is None
        for name, asked, before in (("first", tokens, live), ("next", others, other)):
            longer = torch.cat([asked, asked[:, :1]], dim=1)
            back = store.session(user, name).resume(longer)
            assert (back.tokens, back.miss) == (160, None)
            assert _same(back.cache, before), name


@pytest.mark.parametrize(
    ("by_device", "fails"),
    [
        (True, (torch, "empty")),
        (True, (DynamicCache, "update")),
        (False, (torch.Tensor, "to")),
        (False, (DynamicCache, "update")),
    ],
    ids=["to copy into", "of the cache", "to copy into by the CPU", "of the cache by the CPU"],
)
def test_a_device_without_memory_for_a_conversation_is_a_miss(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, fails: tuple[Any, str], *, by_device: bool
) -> None:
    model, tokens, live = _computed("full", 100)
    device = HostDevice(3)
    given = device if by_device else None
    with running(device), CacheStore(node.target, model, block_tokens=16, device=given) as store:
        chat = store.session("ada", f"no memory {fails[1]} {by_device}")
        assert chat.save(live, tokens).error is None
        with monkeypatch.context() as patched:
            patched.setattr(*fails, _raises(FULL))
            back = chat.resume(_tokens(101))
        assert back.tokens == 0
        assert back.miss is not None
        assert "CUDA out of memory" in str(back.miss)
        assert _same(chat.resume(_tokens(101)).cache, live)


def test_a_device_that_refuses_the_cpus_copies_is_a_failed_save(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens, live = _computed("full", 100)
    with CacheStore(node.target, model, block_tokens=16) as store:
        chat = store.session("ada", "the CPU may not read")
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "copy_", _raises(RuntimeError("CUDA error: unspecified failure")))
            saved = chat.save(live, tokens)
        assert isinstance(saved.error, DeviceError)
        assert chat.save(live, tokens).error is None


def test_a_node_that_is_away_is_a_miss_while_copies_are_pending(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "_TIMEOUT_S", 0.2)
    model, tokens, live = _computed("full", 100)
    device = HostDevice(3)  # it stands still
    with CacheStore(node.target, model, block_tokens=16, device=device) as store:
        chat = store.session("ada", "away")
        assert chat.save(live, tokens).error is not None
        monkeypatch.setattr(Session, "info", _raises(NodeUnavailable("The node does not answer.")))
        monkeypatch.setattr(device_copies.DeviceCopies, "settle", _raises(DeviceError("It stands still.")))
        back = chat.resume(tokens)
        assert back.miss is not None
        assert (back.tokens, back.cache.get_seq_length(), back.miss.reason) == (0, 0, MissReason.NODE_AWAY)
        device.run()


def test_a_new_home_with_which_memory_can_not_be_registered_is_a_miss(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens, live = _computed("full", 100)
    with CacheStore(node.target, model, block_tokens=16) as store:
        chat = store.session("ada", "moved")
        assert chat.save(live, tokens).error is None
        with monkeypatch.context() as patched:
            patched.setattr(moving.Mover, "region_at", _raises(NoMemory("There is no memory to register.")))
            back = chat.resume(_tokens(101))
        assert back.miss is not None
        assert (back.tokens, back.cache.get_seq_length(), back.miss.reason) == (0, 0, MissReason.NODE_AWAY)
        assert _same(chat.resume(_tokens(101)).cache, live)


def test_a_refusing_device_stores_and_resumes_nothing_and_the_chat_continues(
    node: NodeProcess,
) -> None:
    model, tokens, live = _computed("full", 100)
    device = _Refusing(2)
    with running(device), CacheStore(node.target, model, block_tokens=16, device=device) as store:
        chat = store.session("ada", "refused")
        device.refuses = True
        saved = chat.save(live, tokens)
        assert isinstance(saved.error, DeviceError)
        assert (saved.tokens, chat.resume(_tokens(101)).tokens) == (0, 0)
        device.refuses = False
        assert chat.save(live, tokens).error is None
        device.refuses = True
        back = chat.resume(_tokens(101))
        assert (back.tokens, back.cache.get_seq_length()) == (0, 0)
        assert back.miss is not None
        assert "was reset" in back.miss.detail
        device.refuses = False
        assert _same(chat.resume(_tokens(101)).cache, live)


def test_memory_is_not_reused_while_a_copy_into_it_is_pending(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(device_copies, "ENGINE_DEVICE_COPY_MS", 100)
    model, tokens, others = _model("full"), _tokens(100), _tokens(100, seed=6)
    live, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    _run(model, tokens, live)
    _run(model, others, other)
    device = HostDevice(3)  # it stands still
    with CacheStore(node.target, model, block_tokens=16, device=device) as store:
        first, second = store.session("ada", "stands still"), store.session("ada", "comes next")
        assert first.save(live, tokens).error is not None
        waiting = second.save(other, others)
        assert isinstance(waiting.error, DeviceError)
        assert "has not done its copies in time" in str(waiting.error)
        with running(device):
            assert second.save(other, others).error is None
            assert _same(second.resume(_tokens(101, seed=6)).cache, other)
            assert first.resume(_tokens(101)).tokens == 0, "the late copies were sent nowhere"
            assert first.save(live, tokens).error is None
            assert _same(first.resume(_tokens(101)).cache, live)


class _RefusingInTheMiddle(HostDevice):
    """A device that accepts some copies of a call, and then refuses the next."""

    accepts: int | None = None

    def copy(self, stream: HostStream, copies: Iterable[Copy]) -> None:
        if self.accepts is None:
            super().copy(stream, copies)
            return
        super().copy(stream, list(copies)[: self.accepts])
        self.accepts = None
        raise DeviceError("The device has no memory for another copy.")


@pytest.mark.parametrize("loads", [False, True])
def test_copies_before_a_refused_one_are_waited_for(node: NodeProcess, *, loads: bool) -> None:
    model, tokens, live = _computed("full", 100)
    others, other = _tokens(100, seed=6), DynamicCache(config=model.config)
    _run(model, others, other)
    device, gate = _RefusingInTheMiddle(3), threading.Event()
    with running(device), CacheStore(node.target, model, block_tokens=16, device=device) as store:
        first, second = store.session("ada", "stored"), store.session("ada", "refused")
        assert first.save(live, tokens).error is None
        device.compute.queue(gate.is_set)
        device.accepts = 40
        if loads:
            assert first.resume(_tokens(101)).tokens == 0
        else:
            assert isinstance(second.save(other, others).error, DeviceError)
        opens = threading.Timer(0.3, gate.set)
        opens.start()
        assert _same(first.resume(_tokens(101)).cache, live)
        assert gate.is_set()
        opens.join()


class _Reset(HostDevice):
    """A device whose every call fails after a reset."""

    is_reset = False

    def unmap(self, address: int) -> None:
        if self.is_reset:
            raise DeviceError("cuCtxSynchronize failed: the device was reset (700).")
        super().unmap(address)


def test_a_store_closes_after_a_reset_of_its_device(
    node: NodeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens, live = _computed("full", 100)
    device = _Reset(2)
    with (
        running(device),
        caplog.at_level(logging.WARNING),
        CacheStore(node.target, model, block_tokens=16, device=device) as store,
    ):
        assert store.session("ada", "reset").save(live, tokens).error is None
        device.is_reset = True
    assert ["not released" in one.getMessage() for one in caplog.records] == [True]


def test_a_store_closes_within_a_bound_while_its_device_stands_still(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_release, "ENGINE_DEVICE_CLOSE_MS", 50)
    model, gate = _model("full"), threading.Event()
    device = _Reset(2)

    def stands_still(address: int) -> None:
        gate.wait()
        HostDevice.unmap(device, address)

    monkeypatch.setattr(device, "unmap", stands_still)
    with caplog.at_level(logging.WARNING):
        CacheStore(node.target, model, block_tokens=16, device=device).close()
    gate.set()
    assert ["has not ended its work in time" in one.getMessage() for one in caplog.records] == [True]


def test_tensors_that_a_late_copy_may_write_to_outlive_a_closed_store(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_release, "ENGINE_DEVICE_CLOSE_MS", 50)
    monkeypatch.setattr(device_copies, "ENGINE_DEVICE_COPY_MS", 50)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # a log entry refers to frames
    model, tokens, live = _computed("full", 100)
    with CacheStore(node.target, model, block_tokens=16) as store:
        assert store.session("ada", "late").save(live, tokens).error is None
    made: list[weakref.ref[Any]] = []
    empty, gate = torch.empty, threading.Event()

    def noted(*given: Any, **named: Any) -> Any:
        tensor = empty(*given, **named)
        made.append(weakref.ref(tensor))
        return tensor

    class Slow(HostDevice):
        def unmap(self, address: int) -> None:
            gate.wait()
            super().unmap(address)

    device = Slow(3)
    store = CacheStore(node.target, model, block_tokens=16, device=device)
    device.run()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", noted)
        assert store.session("ada", "late").resume(_tokens(101)).tokens == 0
    store.close()
    del store
    gc.collect()
    assert made
    assert all(one() is not None for one in made)
    gate.set()


class _Full(HostDevice):
    def map(self, address: int, length: int, *, io_memory: bool = False) -> Mapped:  # noqa: ARG002
        raise DeviceError(f"{length} bytes at {address:#x} could not be page-locked.")


def test_without_page_locked_memory_the_cpu_copies(
    node: NodeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens, live = _computed("full", 100)
    with (
        caplog.at_level(logging.WARNING),
        CacheStore(node.target, model, block_tokens=16, device=_Full()) as store,
    ):
        chat = store.session("ada", "no room")
        assert chat.save(live, tokens).error is None
        assert _same(chat.resume(_tokens(101)).cache, live)
    assert [one.getMessage().split(":")[0] for one in caplog.records] == ["The CPU copies this model's KV"]
