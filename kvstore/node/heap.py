"""The process's heap: what an attack, or a crowd, has made it grow by is given back to the machine.

malloc keeps what was freed, in the arenas of gRPC's threads above all, and thousands of calls leave tens of MiB there.
What it doesn't do: touch memory that somebody has. A C library without glibc's calls keeps what it keeps.
"""

from __future__ import annotations

import ctypes
from typing import Final

from kvstore.limits import HEAP_FREE_BYTES_MAX

__all__ = ["give_back_heap"]

_FREE: Final = 8  # `fordblks` in glibc's `struct mallinfo2`: bytes that are free and still the heap's
_Numbers = ctypes.c_size_t * 10


class _Mallinfo(ctypes.Structure):
    _fields_ = [("numbers", _Numbers)]


def give_back_heap() -> int:
    """Give free memory back if the heap has much of it; how much it had."""
    libc = ctypes.CDLL(None)
    try:
        told, trim = libc.mallinfo2, libc.malloc_trim
    except AttributeError:
        return 0
    told.restype = _Mallinfo
    free_bytes = int(told().numbers[_FREE])
    if free_bytes > HEAP_FREE_BYTES_MAX:
        trim(ctypes.c_size_t(0))
    return free_bytes
