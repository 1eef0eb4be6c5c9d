"""Memory that blocks are received into or sent from: page-aligned, resident before it is needed, copied in pieces."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
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
    "copy_runs",
    "hide_from_dumps",
    "populate",
    "set_aside",
    "undumped",
]

_F_SEAL_FUTURE_WRITE = 0x10  # what is mapped to be written stays so, and nothing else is


def allocate(length: int) -> mmap.mmap:
    """Zeroed memory in huge pages where the kernel has them, all of it present; NoMemory if there is not as much.

    It is in no core dump.

    It takes a while for a large piece, and lets other threads run meanwhile.
    """
    memory = set_aside(length)
    try:
        populate(memory, 0, length)
    except FabricError:
        memory.close()
        raise
    return memory


def allocate_shared(length: int) -> tuple[mmap.mmap, int]:
    """The same, and a descriptor through which other processes can map it, to be read, and change nothing."""
    try:
        fd = os.memfd_create("triggerkv-hot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _not_had(length, error) from error
    try:
        os.ftruncate(fd, length)
        memory = mmap.mmap(fd, length)
    except OSError as error:
        os.close(fd)
        raise _not_had(length, error) from error
    try:
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


def allocate_mapped(length: int) -> tuple[mmap.mmap, int]:
    """Zeroed memory that is there as it is used, and a descriptor through which another process can map it.

    That one can write to it, and not change its size. It is in no core dump of ours.
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
    """Where it begins; so for as long as it is not closed."""
    view = ffi.from_buffer(memory)
    address = int(ffi.cast("uintptr_t", view))
    ffi.release(view)
    return address


def _not_had(length: int, error: OSError) -> FabricError:
    return FabricError.from_code(f"Getting {length} bytes of memory", -(error.errno or errno.ENOMEM))


def undumped(length: int) -> mmap.mmap:
    """Zeroed memory that is there as it is used, and is in no core dump."""
    memory = mmap.mmap(-1, length)
    hide_from_dumps(memory)
    return memory


def set_aside(length: int) -> mmap.mmap:
    """Addresses for as much memory, none of which is there yet; NoMemory if there are not as many."""
    try:
        return mmap.mmap(-1, length)
    except OSError as error:
        raise _not_had(length, error) from error


def populate(memory: mmap.mmap, start: int, length: int) -> None:
    """Have a part of it there, in whole pages; NoMemory if there is not as much."""
    view = ffi.from_buffer(memory)
    code = lib.tk_memory_populate(view + start, length)
    ffi.release(view)
    if code:
        raise FabricError.from_code(f"Getting {length} bytes of memory", code)


def hide_from_dumps(memory: mmap.mmap) -> None:
    """Have it in no core dump."""
    memory.madvise(mmap.MADV_DONTDUMP)


def copy_runs(runs: Buffer, sources: Sequence[int], target: int) -> None:
    """Copy pieces of several sources, given by their addresses, in one call without the GIL.

    `runs` has four 64-bit numbers for each: which source, from where in it, to where in the target, how many bytes.
    The caller vouches for the memory behind them.
    """
    table = ffi.from_buffer("struct tk_run[]", runs)
    lib.tk_copy_runs(table, len(table), ffi.new("uint64_t[]", list(sources)), target)


class Runs:
    """Pieces of several sources that make up one target, to be copied as often as there are such sources."""

    def __init__(self, runs: Sequence[tuple[int, int, int, int]]) -> None:
        """Each run is: which source, from where, to where, how many bytes."""
        self._runs = ffi.new("struct tk_run[]", list(runs))
        self.source_bytes = [0] * (1 + max((run[0] for run in runs), default=-1))
        for piece, source, _, length in runs:
            self.source_bytes[piece] = max(self.source_bytes[piece], source + length)
        self.target_bytes = max((target + length for _, _, target, length in runs), default=0)

    def copy(self, sources: Sequence[int], target: int) -> None:
        """Copy, given the addresses of the sources and of the target; the caller vouches for the memory behind them."""
        lib.tk_copy_runs(self._runs, len(self._runs), ffi.new("uint64_t[]", list(sources)), target)
