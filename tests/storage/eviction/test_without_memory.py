"""The C code without memory, and with violated invariants, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

START = """
import resource
from pathlib import Path

from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.types import Guard, Reason, Refusal, Watermarks
from kvstore.storage.eviction.policies import new_policy
from kvstore.storage.extents import Extents

MIB = 1 << 20

def leave(mib):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + mib * MIB, resource.RLIM_INFINITY))
"""

ADMITS = """
import sys
core = Evictor(new_policy(sys.argv[1], 1 << 40), Watermarks(0, 0), now_ms=0)
core.admitted([(1, 1, 1, 0, 0, 0, 0, 1)], 0)  # with all that a first call takes
leave(60)
BATCH = 512
batches = refusals = 0
for at in range(60_000):
    first = 10 + at * BATCH
    columns = int(sys.argv[2])  # every block expires, and has an owner
    records = [(one, 9, one, columns and 10**9, 0, 0, columns, one) for one in range(first, first + BATCH)]
    before = core.statistics()
    try:
        assert core.admitted(records, 0) == {}
    except MemoryError:
        assert core.statistics() == before, "something of it was done"
        assert first not in core and first + BATCH - 1 not in core and core.at(first) is None
        refusals += 1
        if refusals == 3:
            break
        core.gone(range(first - BATCH, first), Reason.DELETED, 0)  # there is room for as many as these again
        assert core.admitted(records, 0) == {}
    batches += 1
assert refusals == 3 and batches > 20, (refusals, batches)
left = len(core)
while victims := core.plan(free_pages=0, waiting_pages=10**9, now_ms=1).victims:
    left -= len(victims)
assert left == len(core) == 0, (left, len(core))
print("ok")
"""

JOINS = """
core = Evictor(new_policy("lru", 1 << 40), Watermarks(0, 0), now_ms=0)
blocks = 250_000
for first in range(1, blocks, 500):
    core.admitted([(one, 1, 0, 0, 0, 0, 0, 0) for one in range(first, first + 500)], 0)
core.hold([1], Guard.LEASE)
spare = bytearray(4 * MIB)
leave(4)
full = joined = 0
for session in range(1, 50):
    for first in range(0, 20_000, 50):  # few at a time: the refusals need memory too
        refused = core.joined(range(1 + first, 51 + first), session, first, 0)
        assert set(refused.values()) <= {Refusal.FULL}
        full += len(refused)
        joined += 50 - len(refused)
        assert core.statistics().session_links == joined
    if full > 1000:
        break
assert full > 300 and 1000 < joined < 900_000, (full, joined)
assert core.protect_session(1, 50, now_ms=0) in (None, Refusal.FULL)
core.unprotect_session(1, 0)
core.release([1], Guard.LEASE, 0)
del spare  # room for what goes is made before it goes
while core.plan(free_pages=0, waiting_pages=10**9, now_ms=1).more:
    pass
assert (len(core), core.statistics().session_links, core.statistics().sessions) == (0, 0, 0)
print("ok")
"""

EXTENTS = """
extents = Extents(0, 1 << 30)
start = extents.allocate(1 << 29)
extents.pin(1 << 29)
leave(12)
freed = 0
for page in range(0, 1 << 29, 2):
    before = (extents.free_pages, extents.free_extents, extents.pinned)
    try:
        extents.release(page, 1)
    except MemoryError:
        assert (extents.free_pages, extents.free_extents, extents.pinned) == before
        break
    freed += 1
assert freed > 10_000
assert extents.free_at(page - 2) == 1 and extents.free_at(page) == 0
pinned = 0
try:
    for at in range(1, 1 << 24):
        extents.pin(at)
        pinned += 1
except MemoryError:
    assert extents.pinned == pinned + 1
for at in range(1, pinned + 1):
    extents.unpin(at)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
extents.release(1, 1)
assert extents.free_at(0) == 3
assert extents.allocate(2) == 0
assert extents.free_pages == (1 << 29) + freed - 1
print("ok")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def is_ok(done: subprocess.CompletedProcess[str]) -> bool:
    assert done.returncode == 0, done.stderr
    return done.stdout == "ok\n"


def test_without_memory_a_batch_is_refused_as_a_whole_and_the_rest_continues() -> None:
    assert is_ok(run(ADMITS, "lru", "0"))
    assert is_ok(run(ADMITS, "lru", "1"))
    assert is_ok(run(ADMITS, "s3fifo", "1"))


def test_without_memory_a_block_is_outside_its_session() -> None:
    assert is_ok(run(JOINS))


def test_without_memory_the_free_extents_stay_correct() -> None:
    assert is_ok(run(EXTENTS))


def test_a_bug_ends_the_process_with_one_sentence() -> None:
    twice = 'policy = new_policy("lru", 9)\npolicy.admitted(0, 1, 1)\npolicy.admitted(0, 1, 1)\n'
    done = run(twice)
    assert done.returncode == -signal.SIGABRT
    assert "does not hold; the node ends before it does harm." in done.stderr
