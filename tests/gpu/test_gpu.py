"""The CUDA device and the spine above it on a real GPU: order, graphs, exact bytes, latency, bandwidth."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block
from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.groups import Load, Wanted
from kvstore.engines.vllm.loading import Loads
from kvstore.engines.vllm.page_transport import open_transport
from kvstore.engines.vllm.settings import Settings
from kvstore.names import block_key
from nic_offload.device import Copy
from nic_offload.flags import FlagWord, FlagWords
from nic_offload.memory import address_of
from tests.conftest import ClientWithBuffers, small_node
from tests.device.engine import wait_for
from tests.device.tensors import BLOCKS, LAYERS, PAGE_BYTES, SHAPES, identity_of, names
from tests.gpu.conftest import library

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nic_offload.cuda_device import CudaDevice

LARGE, ROUNDS, STORES = 64 << 20, 300, 10_000
WITH_GPU_DIRECT = 116  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED


def seen(word: FlagWord, value: int) -> None:
    until = time.monotonic() + 20
    while word.load() < value:
        assert time.monotonic() < until, f"the word is {word.load()}, not {value}"
        os.sched_yield()


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_visible_flag_implies_visible_bytes(torch: Any, device: CudaDevice, *, by_kernel: bool) -> None:
    """The last bytes of a large copy are read in the instant in which the flag is seen."""
    device._writes_values = not by_kernel
    memory, stream = mmap.mmap(-1, LARGE), device.open_stream()
    block = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    with FlagWords.create(1) as words:
        staged, flag = device.map(address_of(memory), LARGE), device.map(words[0].address, 8)
        for turn in range(1, ROUNDS + 1):
            value = turn % 251 + 1  # never what was there before
            block.fill_(value)
            device.wait(stream, device.record(device.current_stream()))
            device.copy(stream, [Copy(address_of(memory), block.data_ptr(), LARGE)])
            device.store(stream, flag.device_address, turn)
            device.wait(device.current_stream(), device.record(stream))
            seen(words[0], turn)
            assert memory[LARGE - 4096 :] == bytes([value]) * 4096, turn
            assert set(memory[:: LARGE // 4096]) == {value}, turn
        staged.close()
        flag.close()


def test_a_flag_waits_only_for_its_own_stream(torch: Any, device: CudaDevice) -> None:
    with FlagWords.create(2) as words:
        flags = device.map(words[0].address, 16)
        held, free = torch.cuda.Stream(), device.open_stream()
        with torch.cuda.stream(held):
            torch.cuda._sleep(2_000_000_000)  # about a second
        began = time.monotonic()
        device.store(held.cuda_stream, flags.device_address, 1)
        device.store(free, flags.device_address + 8, 1)
        seen(words[1], 1)
        assert words[0].load() == 0, time.monotonic() - began
        seen(words[0], 1)
        flags.close()


def test_bytes_go_through_the_devices_own_memory(torch: Any, device: CudaDevice) -> None:
    source = torch.randint(0, 256, (LARGE,), dtype=torch.uint8, device="cuda")
    target, stream = torch.zeros_like(source), device.open_stream()
    with device.allocate(LARGE) as own:
        device.wait(stream, device.record(device.current_stream()))
        device.copy(stream, [Copy(own.address, source.data_ptr(), LARGE)])
        if device._made("cuDeviceGetAttribute", ctypes.c_int, WITH_GPU_DIRECT, device._number):
            device.see_arrivals()
        device.copy(stream, [Copy(target.data_ptr(), own.address, LARGE)])
        device.wait(device.current_stream(), device.record(stream))
        assert torch.equal(source, target)


def test_a_graph_continues_counting_at_each_launch(torch: Any, device: CudaDevice) -> None:
    memory, stream, total = mmap.mmap(-1, 1 << 20), device.open_stream(), device.open_total()
    block = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    with FlagWords.create(1) as words:
        staged, flag = device.map(address_of(memory), 1 << 20), device.map(words[0].address, 8)
        with device.capture(stream) as graph:
            device.copy(stream, [Copy(address_of(memory), block.data_ptr(), 1 << 20)])
            device.count(stream, flag.device_address, total, 16)
        assert words[0].load() == 0
        for turn in range(1, 101):
            block.fill_(turn)
            device.wait(stream, device.record(device.current_stream()))
            graph.launch(stream)
            seen(words[0], 16 * turn)
            assert set(memory[:]) == {turn}
        staged.close()
        flag.close()


@pytest.mark.parametrize("by_kernel", [False, True])
def test_ten_thousand_stores_arrive_in_order_beside_a_running_matmul(
    torch: Any, device: CudaDevice, *, by_kernel: bool
) -> None:
    device._writes_values = not by_kernel
    stream, busy = device.open_stream(), torch.cuda.Stream()
    one = torch.randn(4096, 4096, device="cuda")
    with FlagWords.create(1) as words:
        flag = device.map(words[0].address, 8)
        with torch.cuda.stream(busy):
            for _ in range(200):
                torch.matmul(one, one)
        last = 0
        for value in range(1, STORES + 1):
            device.store(stream, flag.device_address, value)
            now = words[0].load()
            assert last <= now <= value
            last = now
        seen(words[0], STORES)
        torch.cuda.synchronize()
        flag.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_vllm_layouts_are_restored_exactly(
    torch: Any, device: CudaDevice, shape: str, tmp_path: Path
) -> None:
    def caches() -> dict[str, Any]:
        made: dict[str, Any] = {}
        whole: dict[int, Any] = {}
        for name, array in zip(names(), SHAPES[shape](), strict=True):
            base = array if array.base is None else array.base
            while base.base is not None:
                base = base.base
            if id(base) not in whole:
                whole[id(base)] = base, torch.from_numpy(base).view(torch.int16).flatten().cuda()
            strides = tuple(stride // 2 for stride in array.strides)
            offset = (array.ctypes.data - base.ctypes.data) // 2
            made[name] = torch.as_strided(whole[id(base)][1], array.shape, strides, offset)
        return made

    identity = identity_of("e")
    wanted = [Wanted(0, block, secrets.token_bytes(32)) for block in (3, 4, 9)]
    with small_node(tmp_path / "node") as node:
        settings = Settings.of_vllm({"node": node.target, "host_bytes": 64 * LAYERS * PAGE_BYTES})
        before = caches()
        memory = DeviceMemory(device, before, identity.groups, 0, BLOCKS)
        transport = open_transport(settings, identity, memory)
        transport.saves.begin(wanted)
        for name, cache in before.items():
            cache.random_()
            transport.saves.layer_done(name)
        kept = {name: cache.clone() for name, cache in before.items()}
        transport.saves.settle(is_sound=True)
        for cache in before.values():
            cache.zero_()
        outcomes: list[Any] = []

        def came() -> bool:
            outcomes.extend(transport.saves.ended())
            return bool(outcomes)

        wait_for(came, "the acknowledgement")
        assert len(outcomes[0].stored) == len(wanted)
        transport.before_loads()
        loaded = Loads(transport, memory, 20, 20).load(Load("r", wanted))
        transport.after_loads()
        assert loaded.missing == []
        for name, cache in before.items():
            axis = 0 if cache.shape[0] != 2 else 1
            per_block = cache.shape[axis] // BLOCKS
            for block in (3, 4, 9):
                rows = torch.arange(block * per_block, (block + 1) * per_block, device="cuda")
                assert torch.equal(cache.index_select(axis, rows), kept[name].index_select(axis, rows)), name


def test_a_conversation_of_a_model_on_the_gpu_resumes_bit_for_bit(torch: Any, tmp_path: Path) -> None:
    transformers = library("transformers")
    from kvstore.engines.transformers import CacheStore  # noqa: PLC0415  # it imports transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 100, (1, 700), device="cuda")
    live = transformers.DynamicCache(config=config)
    with small_node(tmp_path / "node") as node, torch.no_grad(), CacheStore(node.target, model) as store:
        assert store.copies is not None, "the GPU copies, not the CPU"
        chat = store.session("ada", "on the GPU")
        for end in (300, 301, 640):
            model(tokens[:, live.get_seq_length() : end], past_key_values=live)
            assert chat.save(live, tokens[:, :end]).error is None
        model(
            tokens, past_key_values=transformers.DynamicCache(config=config)
        )  # the allocator uses memory again
        back = chat.resume(tokens)
        assert (back.tokens, back.miss) == (640, None)
        for one, other in zip(live.layers, back.cache.layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


def test_latency_from_the_launch_of_a_store_to_landed(
    device: CudaDevice, figure: Callable[[str, float], None], tmp_path: Path
) -> None:
    with small_node(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)
        with FlagWords.create(1) as words:
            flag, stream = device.map(words[0].address, 8), device.open_stream()
            for name, by_gpu in (("gpu", True), ("host", False)):
                times = []
                for turn in range(200):
                    value = words[0].load() + 1
                    key = block_key(name.encode(), turn.to_bytes(4), secrets.token_bytes(8))
                    puts = rig.client.arm([Block(key, rig.from_region, 0, 65536, value)], words[0])
                    began_ns = time.monotonic_ns()
                    if by_gpu:
                        device.store(stream, flag.device_address, value)
                    else:
                        words[0].store(value)
                    assert puts.wait_landed(10)
                    (result,) = puts.wait(10)
                    assert result.error is None
                    times.append(result.landed_ns - began_ns)
                figure(f"store by {name} to landed, 64 KiB, p50 us", statistics.median(times) / 1000)
            flag.close()
        rig.close()


def test_bandwidth_of_captures_against_a_pinned_copy(
    torch: Any, device: CudaDevice, figure: Callable[[str, float], None]
) -> None:
    memory, stream = mmap.mmap(-1, LARGE), device.open_stream()
    block = torch.empty(LARGE, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
    staged = device.map(address_of(memory), LARGE)
    page = 32 << 10
    copies = [Copy(address_of(memory) + at, block.data_ptr() + at, page) for at in range(0, LARGE, page)]

    def seconds(run: Callable[[], object]) -> float:
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    ceiling = seconds(lambda: pinned.copy_(block, non_blocking=True))
    pages = seconds(lambda: device.copy(stream, copies))
    figure("pinned copy, GB/s", LARGE / ceiling / 1e9)
    figure("captures in pages of 32 KiB, GB/s", LARGE / pages / 1e9)
    figure("captures against a pinned copy", ceiling / pages)
    staged.close()
