"""Returns freed memory of the process's heap to the operating system after load.

malloc keeps freed memory, mostly in the arenas of gRPC's threads, and thousands of calls leave tens of MiB there.
`malloc_trim` doesn't return the free memory at the end of an arena. By default that may be twice the largest buffer
ever freed, up to 64 MiB for each arena, so this module sets a lower limit (`HEAP_END_BYTES_MAX`).
Objects that refer to each other in a cycle stay until Python's garbage collector runs. When it runs depends on the
number of objects, not on their size, so this module runs it when the heap has grown. Calls and connections leave no
cycles, but libraries may.

What always holds: objects that existed when the node began to serve are not scanned again, so a collection takes
milliseconds.
What it doesn't do: touch memory in use, or help with a C library that lacks glibc's calls.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

from kvstore.limits import (
    HEAP_BUFFER_BYTES_MAX,
    HEAP_END_BYTES_MAX,
    HEAP_FREE_BYTES_MAX,
    HEAP_GROWN_BYTES_MAX,
)

__all__ = ["Heap", "used_bytes"]

# In glibc's `struct mallinfo2`: bytes of mmapped pieces, other bytes in use, and free bytes that the heap still has.
_LARGE, _USED, _FREE = 4, 7, 8
_Numbers = ctypes.c_size_t * 10
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of `mallopt`


class _Mallinfo(ctypes.Structure):
    _fields_ = [("numbers", _Numbers)]


_MALLINFO = getattr(ctypes.CDLL(None), "mallinfo2", None)  # found once: that takes longer than the call
if _MALLINFO is not None:
    _MALLINFO.restype = _Mallinfo


class Heap:
    """The heap of this process. Used in one thread only."""

    def __init__(self) -> None:
        gc.freeze()
        with suppress(AttributeError):  # a C library without it
            ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, HEAP_END_BYTES_MAX)
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, HEAP_BUFFER_BYTES_MAX)
        self._used_bytes, self._has_freed = used_bytes(), False

    def give_back(self) -> int:
        """Return free heap memory to the system if there is much of it; returns how much there was."""
        used_bytes, free_bytes = _read_mallinfo()
        if self._has_freed or used_bytes > self._used_bytes + HEAP_GROWN_BYTES_MAX:
            before_bytes = used_bytes
            gc.collect()
            used_bytes, free_bytes = _read_mallinfo()
            # Memory that is still in use may become free in the same way.
            self._has_freed = before_bytes - used_bytes > HEAP_GROWN_BYTES_MAX // 8
            self._used_bytes = used_bytes
        self._used_bytes = min(self._used_bytes, used_bytes)
        if free_bytes > HEAP_FREE_BYTES_MAX:
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
        return free_bytes


def used_bytes() -> int:
    """The bytes that malloc has given out, in all threads; 0 where the C library doesn't report them."""
    return _read_mallinfo()[0]


def _read_mallinfo() -> tuple[int, int]:
    """The bytes in use, and the free ones; 0 where the C library doesn't report them."""
    if _MALLINFO is None:
        return 0, 0
    numbers = _MALLINFO().numbers
    return int(numbers[_LARGE] + numbers[_USED]), int(numbers[_FREE])
