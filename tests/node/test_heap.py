"""The heap returns free memory, if there is much of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes
from kvstore.limits import HEAP_FREE_BYTES_MAX
from kvstore.node.heap import Heap
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def mapped():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
got = [ctypes.c_void_p(libc.malloc(60_000)) for _ in range(2 * HEAP_FREE_BYTES_MAX // 60_000)]
for one in got:
    ctypes.memset(one, 1, 60_000)
for one in got[:-1]:  # the last one holds the heap's end
    libc.free(one)
before = mapped()
assert Heap().give_back() > HEAP_FREE_BYTES_MAX
print(before - mapped() > HEAP_FREE_BYTES_MAX)
"""


IN_A_CYCLE = """
import gc
from kvstore.limits import HEAP_GROWN_BYTES_MAX
from kvstore.node.heap import Heap
def mapped():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
gc.disable()
heap = Heap()
held = [bytes(range(256)) * 4096 for _ in range(2 * HEAP_GROWN_BYTES_MAX >> 20)]
held.append(held)
before = mapped()
del held
heap.give_back()
print(before - mapped() > HEAP_GROWN_BYTES_MAX)
"""

IN_ANOTHER_THREAD = """
import ctypes
from threading import Thread
from kvstore.limits import HEAP_END_BYTES_MAX
from kvstore.node.heap import Heap
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def mapped():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def use(bytes_):
    got = ctypes.c_void_p(libc.malloc(bytes_))
    ctypes.memset(got, 1, bytes_)
    libc.free(got)
heap = Heap()
use(30 << 20)  # from now on malloc would keep twice as much
before = mapped()
thread = Thread(target=use, args=(20 << 20,))
thread.start()
thread.join()
heap.give_back()
print(mapped() - before < 2 * HEAP_END_BYTES_MAX)
"""


def test_memory_freed_at_the_end_of_another_threads_heap_is_returned() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_THREAD],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "True\n"


def test_cycles_are_collected_when_the_heap_has_grown() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_CYCLE], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "True\n"


def test_a_heap_with_much_free_memory_returns_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "True\n"
