"""Shared memory is allocated in full, and in huge pages if the kernel supports it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from nic_offload import memory
from nic_offload.errors import NoMemory
from nic_offload.memory import address_of, allocate_shared, collapse, map_aligned, shares_huge_pages

MIB = 1 << 20
HUGE = 2 * MIB


def mapped_kib(address: int, field: str) -> int:
    """A field of the mapping that begins at this address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{address:x}-") for line in lines)
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


@pytest.mark.skipif(not shares_huge_pages(), reason="this kernel has no huge pages for shared memory")
@pytest.mark.parametrize("length", [4 * HUGE, 4 * HUGE + 3 * 4096])
def test_shared_memory_is_in_huge_pages(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    huge: list[int] = []
    monkeypatch.setattr(memory, "collapse", lambda fd, size: huge.append(collapse(fd, size)))
    mapped, fd = allocate_shared(length)
    with mapped:
        assert huge == [4 * HUGE]
        assert mapped_kib(address_of(mapped), "Rss") == length // 1024
        assert not any(mapped[:])
    os.close(fd)


@pytest.mark.skipif(not shares_huge_pages(), reason="this kernel has no huge pages for shared memory")
@pytest.mark.parametrize("gap", [4096, 5 * 4096, HUGE - 4096, HUGE])
def test_shared_memory_is_mapped_in_huge_pages_wherever_others_end(gap: int) -> None:
    """In the process that allocates it, and in one that maps it to read."""
    with mmap.mmap(-1, gap):
        mapped, fd = allocate_shared(4 * HUGE)
    with mapped, mmap.mmap(-1, gap), map_aligned(fd, 4 * HUGE, mmap.PROT_READ) as read:
        assert not any(read[:])
        assert address_of(mapped) % HUGE == address_of(read) % HUGE == 0
        here, there = (mapped_kib(address_of(one), "ShmemPmdMapped") for one in (mapped, read))
        assert here == there
    os.close(fd)


def test_less_than_a_huge_page_can_be_shared_too() -> None:
    mapped, fd = allocate_shared(3 * 4096)
    with mapped:
        assert mapped_kib(address_of(mapped), "Rss") == 12
    os.close(fd)


def test_more_than_the_available_memory_is_refused() -> None:
    with pytest.raises(NoMemory):
        allocate_shared(1 << 60)
