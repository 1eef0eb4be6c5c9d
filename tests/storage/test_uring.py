"""The real drive: whole transfers or errors, and nothing left in flight."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import StorageError
from kvstore.limits import PAGE_BYTES
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.uring import UringDisk

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20

Memory = tuple[mmap.mmap, int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "drive"
    file.write_bytes(bytes(MIB))
    return file


@pytest.fixture
def disk(path: Path) -> Iterator[UringDisk]:
    drive = UringDisk(path, queue_depth=4)
    yield drive
    drive.close()


@pytest.fixture
def memory() -> Memory:
    area = mmap.mmap(-1, MIB)
    return area, ctypes.addressof(ctypes.c_char.from_buffer(area))


def results(disk: UringDisk, count: int) -> dict[int, int]:
    ready = select.poll()
    ready.register(disk.fileno(), select.POLLIN)
    done: dict[int, int] = {}
    while len(done) < count:
        assert ready.poll(10_000)
        done.update(disk.reap())
    return done


def test_written_bytes_are_read_back(disk: UringDisk, memory: Memory) -> None:
    area, address = memory
    area[: 3 * PAGE_BYTES] = os.urandom(3 * PAGE_BYTES)
    assert disk.submit([DiskOp(DiskOpKind.WRITE, address, 3 * PAGE_BYTES, PAGE_BYTES, 2**63 + 5)]) == 1
    assert results(disk, 1) == {2**63 + 5: 3 * PAGE_BYTES}
    assert disk.submit([DiskOp(DiskOpKind.SYNC, 0, 0, 0, 7)]) == 1
    assert results(disk, 1) == {7: 0}
    assert disk.submit([DiskOp(DiskOpKind.READ, address + MIB // 2, 3 * PAGE_BYTES, PAGE_BYTES, 8)]) == 1
    assert results(disk, 1) == {8: 3 * PAGE_BYTES}
    assert area[MIB // 2 : MIB // 2 + 3 * PAGE_BYTES] == area[: 3 * PAGE_BYTES]
    assert disk.read_at(PAGE_BYTES, 3 * PAGE_BYTES) == area[: 3 * PAGE_BYTES]


def test_no_more_is_accepted_than_the_queue_takes(disk: UringDisk, memory: Memory) -> None:
    ops = [DiskOp(DiskOpKind.READ, memory[1] + n * PAGE_BYTES, PAGE_BYTES, 0, n) for n in range(9)]
    assert disk.submit(ops) == 4
    assert disk.submit(ops[4:]) == 0
    assert set(results(disk, 4)) == {0, 1, 2, 3}
    assert disk.submit(ops[4:]) == 4


def test_a_transfer_cut_short_by_the_end_of_the_file_is_an_error(
    disk: UringDisk, path: Path, memory: Memory
) -> None:
    os.truncate(path, 6 * PAGE_BYTES)
    half_there = DiskOp(DiskOpKind.READ, memory[1], 4 * PAGE_BYTES, 4 * PAGE_BYTES, 1)
    beyond = DiskOp(DiskOpKind.READ, memory[1], PAGE_BYTES, 8 * PAGE_BYTES, 2)
    disk.submit([half_there, beyond])
    assert results(disk, 2) == {1: -errno.EIO, 2: -errno.EIO}
    with pytest.raises(StorageError, match="ended after"):
        disk.read_at(4 * PAGE_BYTES, 4 * PAGE_BYTES)


def test_an_errno_of_the_kernel_is_the_result(disk: UringDisk, memory: Memory) -> None:
    disk.submit([DiskOp(DiskOpKind.WRITE, memory[1] + 1, PAGE_BYTES, 0, 1)])
    assert results(disk, 1) == {1: -errno.EINVAL}
    disk.submit([DiskOp(DiskOpKind.READ, 8, PAGE_BYTES, 0, 2)])
    assert results(disk, 1) == {2: -errno.EFAULT}


def test_close_waits_for_operations_in_flight(path: Path, memory: Memory) -> None:
    area, address = memory
    area[:] = b"\x77" * MIB
    disk = UringDisk(path)
    ops = [DiskOp(DiskOpKind.WRITE, address, MIB // 4, n * MIB // 4, n) for n in range(4)]
    assert disk.submit(ops) == 4
    disk.close()
    assert path.read_bytes() == b"\x77" * MIB


def test_holes_contain_no_data(tmp_path: Path) -> None:
    file = tmp_path / "holes"
    with file.open("wb") as handle:
        handle.truncate(MIB)
        handle.seek(64 * PAGE_BYTES)
        handle.write(b"x" * PAGE_BYTES)
    disk = UringDisk(file)
    assert list(disk.data_ranges(0)) == [(64 * PAGE_BYTES, 65 * PAGE_BYTES)]
    assert list(disk.data_ranges(65 * PAGE_BYTES)) == []
    disk.close()


def test_long_blocking_transfers_are_made_in_parts(tmp_path: Path) -> None:
    file = tmp_path / "drive"
    file.write_bytes(bytes(4 * MIB))
    disk = UringDisk(file)
    data = os.urandom(2 * MIB + PAGE_BYTES)
    disk.write_at(PAGE_BYTES, data)
    disk.sync()
    assert disk.read_at(PAGE_BYTES, len(data)) == data
    disk.close()


def test_a_file_without_direct_io_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not be opened"):
        UringDisk(tmp_path / "absent")
    with pytest.raises(StorageError, match="refuses O_DIRECT"):
        UringDisk(Path("/proc/self/comm"))
