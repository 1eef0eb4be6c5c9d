"""Memory that blocks are received into or sent from: page-aligned, resident before it is needed, copied in pieces."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

__all__ = [
    "Runs",
    "address_of",
    "allocate",
    "allocate_mapped",
    "allocate_shared",
    "collapse",
    "copy_runs",
    "hide_from_dumps",
    "map_aligned",
    "populate",
    "set_aside",
    "shares_huge_pages",
    "undumped",
]

_HUGE_PAGE_BYTES = 2 << 20
_MAPPED_ELSEWHERE_MAX = 8  # tries
_F_SEAL_FUTURE_WRITE = 0x10  # existing writable mappings stay, and no new ones are allowed


def allocate(length: int) -> mmap.mmap:
    """Zeroed memory, in huge pages where the kernel has them, all of it present; NoMemory if there is not enough.

    It is in no core dump.

    A large piece takes a while; other threads run meanwhile.
    """
    memory = set_aside(length)
    try:
        populate(memory, 0, length)
    except FabricError:
        memory.close()
        raise
    return memory


def allocate_shared(length: int) -> tuple[mmap.mmap, int]:
    """The same, and a descriptor through which other processes can map it read-only.

    It is in huge pages, whatever the system's setting for shared memory is, if the kernel is 6.1 or later.
    """
    try:
        fd = os.memfd_create("triggerkv-hot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _not_had(length, error) from error
    try:
        os.ftruncate(fd, length)
        memory = map_aligned(fd, length)
    except OSError as error:
        os.close(fd)
        raise _not_had(length, error) from error
    try:
        collapse(fd, length)
        populate(memory, 0, length)
        fcntl.fcntl(
            fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL,
        )
    except (FabricError, OSError) as error:
        memory.close()
        os.close(fd)
        raise error if isinstance(error, FabricError) else _not_had(length, error) from error
    return memory, fd


def map_aligned(fd: int, length: int, rights: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Map shared memory, at a multiple of a huge page's size: elsewhere its huge pages would be mapped as small ones.

    It may be elsewhere if other threads map memory at the same moment.
    """
    memory = mmap.mmap(fd, length, prot=rights)
    with ExitStack() as elsewhere:
        for _ in range(_MAPPED_ELSEWHERE_MAX if length >= _HUGE_PAGE_BYTES else 0):
            if address_of(memory) % _HUGE_PAGE_BYTES == 0 or not (around := lib.tk_memory_make_hole(length)):
                break
            try:
                another = mmap.mmap(fd, length, prot=rights)
            except OSError:  # no more addresses, perhaps
                break
            finally:
                lib.tk_memory_leave_hole(around, length)
            elsewhere.enter_context(memory)  # until the end, it keeps its place taken
            memory = another
        return memory


def allocate_mapped(length: int) -> tuple[mmap.mmap, int]:
    """Zeroed memory, allocated on first use, and a descriptor through which another process can map it.

    That process can write to it, but not change its size. It is in no core dump of ours.
    """
    fd = -1
    try:
        fd = os.memfd_create("triggerkv-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, length)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise _not_had(length, error) from error
    hide_from_dumps(memory)
    return memory, fd


def address_of(memory: Buffer) -> int:
    """Where it begins, as long as it is not closed."""
    view = ffi.from_buffer(memory)
    address = int(ffi.cast("uintptr_t", view))
    ffi.release(view)
    return address


def _not_had(length: int, error: OSError) -> FabricError:
    return FabricError.from_code(f"Getting {length} bytes of memory", -(error.errno or errno.ENOMEM))


def undumped(length: int) -> mmap.mmap:
    """Zeroed memory that is allocated on first use, and is in no core dump."""
    memory = mmap.mmap(-1, length)
    hide_from_dumps(memory)
    return memory


def set_aside(length: int) -> mmap.mmap:
    """Reserve addresses for this much memory, without allocating it; NoMemory if there are not enough."""
    try:
        return mmap.mmap(-1, length)
    except OSError as error:
        raise _not_had(length, error) from error


def populate(memory: mmap.mmap, start: int, length: int) -> None:
    """Allocate a part of it, in whole pages; NoMemory if there is not enough."""
    view = ffi.from_buffer(memory)
    code = lib.tk_memory_populate(view + start, length)
    ffi.release(view)
    if code:
        raise FabricError.from_code(f"Getting {length} bytes of memory", code)


def collapse(fd: int, length: int) -> int:
    """Allocate shared memory, which must not be in use yet, in huge pages; returns how much is in them."""
    return int(lib.tk_memory_collapse(fd, length))


def shares_huge_pages() -> bool:
    """Whether shared memory can be in huge pages here."""
    fd = os.memfd_create("triggerkv-page", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _HUGE_PAGE_BYTES)
        return collapse(fd, _HUGE_PAGE_BYTES) == _HUGE_PAGE_BYTES
    finally:
        os.close(fd)


def hide_from_dumps(memory: mmap.mmap) -> None:
    """Exclude it from core dumps."""
    memory.madvise(mmap.MADV_DONTDUMP)


def copy_runs(runs: Buffer, sources: Sequence[int], target: int) -> None:
    """Copy pieces of several sources, given by their addresses, in one call without the GIL.

    `runs` has four 64-bit numbers for each piece: which source, offset in it, offset in the target, length.
    The caller guarantees that the memory is valid.
    """
    table = ffi.from_buffer("struct tk_run[]", runs)
    lib.tk_copy_runs(table, len(table), ffi.new("uint64_t[]", list(sources)), target)


class Runs:
    """Pieces of several sources that make up one target; the list can be used again for other sources."""

    def __init__(self, runs: Sequence[tuple[int, int, int, int]]) -> None:
        """Each run is: which source, offset in it, offset in the target, length."""
        self._runs = ffi.new("struct tk_run[]", list(runs))
        self.source_bytes = [0] * (1 + max((run[0] for run in runs), default=-1))
        for piece, source, _, length in runs:
            self.source_bytes[piece] = max(self.source_bytes[piece], source + length)
        self.target_bytes = max((target + length for _, _, target, length in runs), default=0)

    def copy(self, sources: Sequence[int], target: int) -> None:
        """Copy, given the addresses of the sources and the target; the caller guarantees that the memory is valid."""
        lib.tk_copy_runs(self._runs, len(self._runs), ffi.new("uint64_t[]", list(sources)), target)
