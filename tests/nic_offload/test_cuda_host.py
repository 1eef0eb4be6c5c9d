"""What `nic_offload.cuda` asks of CUDA, seen on a machine without a GPU: a stand-in for CuPy does as it is told."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from nic_offload.cuda import CudaDoorbell, CudaFlags
from nic_offload.errors import CudaUnavailable, KvError
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.nic_offload.fake_cupy import FakeCupy, FakeStream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from mmap import mmap

PAGE = 4096


@pytest.fixture
def words() -> Iterator[FlagWords]:
    with FlagWords.create(600) as some:
        yield some


@pytest.fixture
def flags(cupy: FakeCupy, words: FlagWords) -> Iterator[CudaFlags]:
    with CudaFlags(words) as some:
        assert all(not stream.work for stream in cupy.streams)
        yield some


def address_of(memory: mmap) -> int:
    with memoryview(memory) as view:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))


def values(words: FlagWords) -> dict[int, int]:
    return {index: words[index].load() for index in range(len(words)) if words[index].load()}


def test_a_ring_stores_when_its_stream_gets_there_and_only_there(
    cupy: FakeCupy, words: FlagWords, flags: CudaFlags
) -> None:
    stream = FakeStream(cupy)
    flags.ring(599, (1 << 64) - 1, stream=stream)
    flags.ring(3, 7, count=2, stream=stream)
    flags.ring(5, 9)
    assert values(words) == {}
    stream.run()
    assert values(words) == {599: (1 << 64) - 1, 3: 7, 4: 7}
    cupy.current.run()
    assert values(words)[5] == 9


def test_a_stream_of_pytorch_is_used_as_it_is(cupy: FakeCupy, words: FlagWords, flags: CudaFlags) -> None:
    stream = FakeStream(cupy)
    flags.ring(0, 1, stream=SimpleNamespace(cuda_stream=stream.ptr))
    assert len(stream.work) == 1
    assert cupy.current is cupy.streams[0]
    stream.run()
    assert values(words) == {0: 1}


def test_the_total_counts_on_by_itself_and_can_be_set(
    cupy: FakeCupy, words: FlagWords, flags: CudaFlags
) -> None:
    flags.ring_next(1, 16, count=2)
    (replayed,) = cupy.current.work
    for _ in range(3):
        replayed()
    assert values(words) == {1: 48, 2: 48}
    flags.reset(2, 5)
    cupy.current.work.append(replayed)
    cupy.current.run()
    assert values(words) == {1: 80, 2: 21}
    flags.reset(1, count=2)
    cupy.current.run()
    assert values(words) == {}


@pytest.mark.parametrize(("index", "count"), [(-1, 1), (600, 1), (599, 2), (0, 0), (0, -1), (0, 601)])
def test_words_that_are_not_there_are_refused(
    cupy: FakeCupy, flags: CudaFlags, index: int, count: int
) -> None:
    for ring in (flags.ring, flags.ring_next, flags.reset):
        with pytest.raises(KvError, match="words, and a launch"):
            ring(index, 1, count=count)
    assert not cupy.current.work


def test_more_words_than_a_launch_has_threads_are_refused(cupy: FakeCupy) -> None:
    with FlagWords.create(2000) as words, CudaFlags(words) as flags:
        flags.ring(0, 1, count=1024)
        cupy.current.run()
        assert len(values(words)) == 1024
        with pytest.raises(KvError, match="at most 1024"):
            flags.ring(0, 1, count=1025)


def test_close_waits_for_what_was_launched_and_then_unmaps(cupy: FakeCupy, words: FlagWords) -> None:
    flags = CudaFlags(words)
    ((length, _),) = cupy.mapped.values()
    assert length == 2 * PAGE
    flags.ring(1, 4)
    flags.close()
    flags.close()
    assert values(words) == {1: 4}
    assert not cupy.mapped
    with pytest.raises(KvError, match="its handle is closed"):
        flags.ring(1, 5)


def test_words_that_are_mapped_already_are_refused(words: FlagWords, flags: CudaFlags) -> None:
    with pytest.raises(KvError, match="CUDA did not map 8192 bytes"):
        CudaFlags(words)
    flags.ring(0, 1)


def test_a_doorbell_gets_the_step_whatever_it_holds(cupy: FakeCupy) -> None:
    memory = allocate(PAGE)
    address = address_of(memory) + 128
    with CudaDoorbell(address) as doorbell:
        ((start, (length, flags)),) = cupy.mapped.items()
        assert (start, length, flags) == (address - 128, PAGE, 2 | 4)  # mapped, and not memory but a device
        doorbell.ring(3)
        (replayed,) = cupy.current.work
        replayed()
        assert memory[128:136] == (3).to_bytes(8, "little")
        memory[128:136] = bytes(8)  # who adds takes it away
        replayed()
        assert memory[128:136] == (3).to_bytes(8, "little")
    assert not cupy.mapped


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch, words: FlagWords) -> None:
    FakeCupy.install(monkeypatch, devices=0)
    with pytest.raises(CudaUnavailable, match="has no GPU for it"):
        CudaFlags(words)


def test_without_cupy_the_error_says_so(monkeypatch: pytest.MonkeyPatch, words: FlagWords) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(CudaUnavailable, match="needs CuPy"):
        CudaFlags(words)


def test_importing_touches_neither_cupy_nor_torch() -> None:
    check = (
        "import sys; import nic_offload.cuda, nic_offload.staging;"
        "print(sorted({'cupy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
