"""Memory that blocks land in or leave from: page-aligned, and there before it is needed."""

from __future__ import annotations

import mmap

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

__all__ = ["allocate"]


def allocate(length: int) -> mmap.mmap:
    """Zeroed memory in huge pages where the kernel has them, all of it present.

    It takes a while for a large piece, and lets other threads run meanwhile.
    """
    memory = mmap.mmap(-1, length)
    view = ffi.from_buffer(memory)
    code = lib.tk_memory_populate(view, length)
    ffi.release(view)
    if code:
        memory.close()
        raise FabricError.from_code(f"Getting {length} bytes of memory", code)
    return memory
