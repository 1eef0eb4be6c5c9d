"""The heap gives back what was freed, and only when that is much."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes
from kvstore.limits import HEAP_FREE_BYTES_MAX
from kvstore.node.heap import give_back_heap
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
assert give_back_heap() > HEAP_FREE_BYTES_MAX
print(before - mapped() > HEAP_FREE_BYTES_MAX)
"""


def test_a_heap_with_much_that_is_free_gives_it_back() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "True\n"
