"""Flag words rung by a real GPU, and what a host that sees them sees. Skipped where there is no CuPy or no GPU."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nic_offload.cuda import CudaDoorbell, CudaFlags, load_cupy
from nic_offload.errors import CudaUnavailable, FabricUnavailable
from nic_offload.fabric import EventKind
from nic_offload.flags import FlagWord, FlagWords
from nic_offload.library import load
from nic_offload.staging import PinnedStaging
from tests.nic_offload.rig import Pair, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
LARGE = 64 * MIB
ROUNDS = 300


@pytest.fixture
def gpu() -> Any:
    try:
        return load_cupy()
    except CudaUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def torch(gpu: Any) -> Any:  # noqa: ARG001 - without a GPU there is nothing to ask PyTorch for
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        pytest.skip(f"PyTorch does not import here: {error}")
    if not module.cuda.is_available():
        pytest.skip("CuPy sees a GPU here and PyTorch does not: it is built without CUDA, or for another one")
    return module


@pytest.fixture
def words(gpu: Any) -> Iterator[FlagWords]:  # noqa: ARG001 - skips first
    with FlagWords.create(130) as some:
        yield some


@pytest.fixture
def flags(words: FlagWords) -> Iterator[CudaFlags]:
    with CudaFlags(words) as some:
        yield some


def seen(word: FlagWord, value: int) -> None:
    wait_until(lambda: word.load() == value, f"the word to become {value}; it is {word.load()}")


def test_the_host_sees_what_was_rung(words: FlagWords, flags: CudaFlags) -> None:
    flags.ring(0, 1)
    seen(words[0], 1)
    flags.ring(129, (1 << 64) - 1)
    seen(words[129], (1 << 64) - 1)
    flags.ring(1, 7, count=128)
    wait_until(lambda: all(words[i].load() == 7 for i in range(1, 129)), "128 words")
    assert (words[0].load(), words[129].load()) == (1, (1 << 64) - 1)


def test_a_ring_waits_for_its_stream_and_for_no_other(gpu: Any, words: FlagWords, flags: CudaFlags) -> None:
    held, free = gpu.cuda.Stream(non_blocking=True), gpu.cuda.Stream(non_blocking=True)
    with FlagWords.create(1) as gate, CudaFlags(gate) as opener:
        spin = gpu.RawKernel(
            'extern "C" __global__ void spin(volatile unsigned long long *w) { while (!*w) { } }', "spin"
        )
        with held:
            spin((1,), (1,), (opener._memory.device_address,))
        try:
            flags.ring(0, 1, stream=held)
            flags.ring(1, 1, stream=free)
            seen(words[1], 1)
            assert words[0].load() == 0
        finally:
            gate[0].store(1)  # or the spinning kernel never ends
        seen(words[0], 1)


def test_who_sees_the_flag_sees_all_bytes(gpu: Any) -> None:
    """The last bytes of a large copy are looked at in the instant in which the flag is seen."""
    stream = gpu.cuda.Stream(non_blocking=True)
    block = gpu.empty(LARGE, dtype=gpu.uint8)
    with PinnedStaging(1, LARGE) as staging:
        for turn in range(1, ROUNDS + 1):
            slot = staging.reserve(LARGE)
            value = turn % 251 + 1  # never what the slot held before
            with stream:
                block.fill(value)
            staging.stage(slot, int(block.data.ptr), LARGE, stream)
            word = slot.word
            while word.load() < slot.threshold:
                os.sched_yield()
            tail = staging.memory[LARGE - 4096 :]
            sample = staging.memory[:: LARGE // 4096]
            assert tail == bytes([value]) * 4096, turn
            assert sample == bytes([value]) * len(sample), turn
            staging.release(slot)


def test_a_kernels_own_stores_to_host_memory_come_before_the_flag(
    gpu: Any, flags: CudaFlags, words: FlagWords
) -> None:
    """Not a copy but a kernel that writes mapped memory, many blocks of it, and then the ring."""
    count = 1 << 16
    with FlagWords.create(count) as data, CudaFlags(data) as mapped:
        write = gpu.RawKernel(
            'extern "C" __global__ void write(unsigned long long *w, unsigned long long v)'
            "{ w[blockIdx.x * blockDim.x + threadIdx.x] = v; }",
            "write",
        )
        memory = data[0]._words
        assert memory is not None
        view = memoryview(memory._map)[: count * 8].cast("Q")
        for turn in range(1, ROUNDS + 1):
            write((count // 256,), (256,), (mapped._memory.device_address, gpu.uint64(turn)))
            flags.ring(0, turn)
            while words[0].load() < turn:
                os.sched_yield()
            assert set(view.tolist()) == {turn}
        view.release()


def test_a_stream_of_pytorch_rings(torch: Any, words: FlagWords, flags: CudaFlags) -> None:
    stream = torch.cuda.Stream()
    flags.ring(0, 3, stream=stream)
    seen(words[0], 3)
    flags.ring(1, 4, stream=torch.cuda.current_stream())
    seen(words[1], 4)


def test_a_graph_of_cupy_counts_on_at_each_replay(gpu: Any, words: FlagWords, flags: CudaFlags) -> None:
    stream = gpu.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        flags.ring_next(2, 16, count=3, stream=stream)
        graph = stream.end_capture()
    assert [words[i].load() for i in range(2, 5)] == [0, 0, 0]
    for turn in range(1, 101):
        graph.launch(stream)
        wait_until(lambda turn=turn: [words[i].load() for i in range(2, 5)] == [16 * turn] * 3, "three words")  # type: ignore[misc]
    flags.reset(2, 8, stream=stream)
    seen(words[2], 8)
    graph.launch(stream)
    seen(words[2], 24)
    seen(words[3], 16 * 101)
    stream.synchronize()


def test_a_graph_of_pytorch_counts_on_at_each_replay(torch: Any, words: FlagWords, flags: CudaFlags) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flags.ring_next(0, 1, stream=torch.cuda.current_stream())
    assert words[0].load() == 0
    for turn in range(1, 101):
        graph.replay()
        seen(words[0], turn)
    torch.cuda.synchronize()


def test_a_doorbell_is_given_the_step_each_time(gpu: Any) -> None:
    """A page of ordinary memory stands in for the NIC's, and the test for its adder."""
    stream = gpu.cuda.Stream(non_blocking=True)
    with FlagWords.create(1) as words, CudaDoorbell(words[0].address, io_memory=False) as doorbell:
        with stream:
            stream.begin_capture()
            doorbell.ring(16, stream=stream)
            graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
            seen(words[0], 16)
            stream.synchronize()
            words[0].store(0)


def test_a_block_goes_from_the_gpu_to_a_peer_with_no_call_after_stage(gpu: Any) -> None:
    try:
        provider = load().best_provider()
    except FabricUnavailable as error:
        pytest.skip(str(error))
    length = MIB
    stream = gpu.cuda.Stream(non_blocking=True)
    with Pair(provider) as pair, PinnedStaging(3, MIB) as staging:
        region = pair.near.fabric.register(staging.memory, remote_write=False)
        for turn in range(1, 51):
            wanted = os.urandom(length)
            block = gpu.asarray(np.frombuffer(wanted, np.uint8))
            stream.wait_event(gpu.cuda.get_current_stream().record())
            slot = staging.reserve(length)
            pair.there.arm(
                pair.there.put(turn, length, flag=(0, turn))._replace(
                    region=region,
                    source=slot.source,
                    trigger=pair.near.counter(slot.word),
                    threshold=slot.threshold,
                )
            )
            staging.stage(slot, int(block.data.ptr), length, stream)
            seen(pair.far.word(0), turn)
            assert pair.far.bytes_at(0, length) == wanted
            assert pair.near.final(turn).kind == EventKind.DONE
            staging.release(slot)
        region.close()
