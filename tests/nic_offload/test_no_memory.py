"""Out of memory in the progress thread: it pauses, the process survives, and no report is lost."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nic_offload.rig import Pair, wait_until

WORDS = 2_000
TIMEOUT_S = 60
CHILD = "from tests.nic_offload.test_no_memory import puts_without_memory as run; run()"
REFUSES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/prctl.h>
#include <stddef.h>
static int is_scarce;
int refusals;
void memory_is_scarce(int scarce) { __atomic_store_n(&is_scarce, scarce, __ATOMIC_SEQ_CST); }
void *realloc(void *memory, size_t size)
{
	static void *(*real)(void *, size_t);
	char name[16] = "";
	if (!real)
		real = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
	if (__atomic_load_n(&is_scarce, __ATOMIC_SEQ_CST) && !prctl(PR_GET_NAME, name) && !strcmp(name, "triggerkv")) {
		__atomic_add_fetch(&refusals, 1, __ATOMIC_SEQ_CST);
		return NULL;
	}
	return real(memory, size);
}
"""


def puts_without_memory() -> None:
    """Run in a process of its own: arm puts while allocations fail."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    refusals = ctypes.c_int.in_dll(library, "refusals")
    with Pair("net") as pair:
        near, word = pair.near, pair.near.word(0)
        pair.there.arm(*(pair.there.notify(tag, 1, tag, fires=(word, 1)) for tag in range(WORDS)))
        library.memory_is_scarce(1)
        word.store(1)
        wait_until(lambda: refusals.value > 20, "it waits for memory")
        near.reap()
        assert len(near.finals()) < WORDS
        library.memory_is_scarce(0)
        ended = near.all_final(range(WORDS))
        assert {event.status for event in ended.values()} <= {0, -errno.ENOMEM}


@pytest.mark.skipif(
    "san.so" in os.environ.get("LD_PRELOAD", ""),
    reason="a sanitizer replaces malloc, and only one library can",
)
def test_without_memory_the_thread_waits_for_some(tmp_path: Path) -> None:
    built = tmp_path / "scarce.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-x", "c", "-o", str(built), "-", "-ldl"]
    subprocess.run(command, input=REFUSES, text=True, check=True, timeout=TIMEOUT_S)
    subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"LD_PRELOAD": str(built)},
        check=True,
        timeout=TIMEOUT_S,
    )
