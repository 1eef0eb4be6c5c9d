"""A synthetic day of a store, replayed through each policy, to compare their hits.

Only the order is asserted, never a time.
"""

from __future__ import annotations

import random
import subprocess
import sys
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.lru import Lru
from kvstore.storage.eviction.s3fifo import S3Fifo
from kvstore.storage.eviction.types import Record, Watermarks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.storage.eviction.policy import Policy

CAPACITY = 4000
BLOCK_PAGES = 2
SESSIONS = 400
SESSION_BLOCKS = 10


class Ask(NamedTuple):
    """A session that is requested from its beginning; missing blocks are put."""

    session: int
    blocks: int
    counts: bool  # a scan's own hits are not what anybody is after


def zipf_sessions(rng: random.Random, asks: int) -> Iterator[Ask]:
    weights = list(accumulate(1 / rank for rank in range(1, SESSIONS + 1)))
    for session in rng.choices(range(1, SESSIONS + 1), cum_weights=weights, k=asks):
        yield Ask(session, rng.randrange(1, SESSION_BLOCKS + 1), counts=True)


def with_scans(asks: Iterator[Ask], every: int, sessions: int) -> Iterator[Ask]:
    """Add a scan: many sessions that are put once and never requested again."""
    scanned = 1_000_000
    for count, ask in enumerate(asks, 1):
        yield ask
        if count % every == 0:
            for _ in range(sessions):
                scanned += 1
                yield Ask(scanned, SESSION_BLOCKS, counts=False)


def replay(asks: Iterator[Ask], make_policy: Callable[[], Policy], capacity: int = CAPACITY) -> float:
    """The share of hits among the counted blocks, with a store that accepts everything that fits."""
    core = Evictor(make_policy(), Watermarks(40, 80), now_ms=0)
    stored: dict[tuple[int, int], int] = {}
    names: dict[int, tuple[int, int]] = {}
    next_generation = 1
    hits = total = 0
    for now_ms, ask in enumerate(asks):
        wanted = [(ask.session, position) for position in range(ask.blocks)]
        there = [name for name in wanted if name in stored]
        assert there == wanted[: len(there)], "what is left of a session is a prefix"
        core.touched([stored[name] for name in there], now_ms)
        if ask.counts:
            hits += len(there)
            total += ask.blocks
        records = []
        for session, position in wanted[len(there) :]:
            name64 = session << 20 | position
            records.append(Record(next_generation, BLOCK_PAGES, name64, 0, session, position))
            stored[session, position] = next_generation
            names[next_generation] = (session, position)
            next_generation += 1
        assert core.admitted(records, now_ms) == {}
        plan = core.plan(free_pages=capacity - len(stored) * BLOCK_PAGES, now_ms=now_ms)
        for victim in plan.victims:
            del stored[names.pop(victim.generation)]
        assert len(stored) * BLOCK_PAGES <= capacity
    return hits / total


def test_under_scans_s3_fifo_keeps_more_than_lru() -> None:
    for seed in range(2):
        day = partial(with_scans, every=50, sessions=150)
        lru = replay(day(zipf_sessions(random.Random(seed), 1500)), Lru)
        s3 = replay(day(zipf_sessions(random.Random(seed), 1500)), partial(S3Fifo, CAPACITY))
        assert s3 > lru


def test_a_scan_costs_lru_more_than_s3_fifo() -> None:
    def cost(make_policy: Callable[[], Policy]) -> float:
        quiet = replay(zipf_sessions(random.Random(1), 1500), make_policy)
        return quiet - replay(with_scans(zipf_sessions(random.Random(1), 1500), 50, 150), make_policy)

    assert cost(Lru) > cost(partial(S3Fifo, CAPACITY))


def test_more_room_keeps_more() -> None:
    for make_policy in (Lru, partial(S3Fifo, CAPACITY)):
        small = replay(zipf_sessions(random.Random(2), 2000), make_policy)
        assert replay(zipf_sessions(random.Random(2), 2000), make_policy, 2 * CAPACITY) > small


ALONE = """
import builtins, sys
real = builtins.__import__
def guarded(name, *rest):
    if name.split(".")[0] in {"lmdb", "cffi", "numpy", "torch", "grpc"} or name.startswith("nic_offload._"):
        raise ImportError(name + " is not on this machine")
    return real(name, *rest)
builtins.__import__ = guarded

from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.types import Record, Watermarks
from kvstore.storage.eviction.policies import POLICY_NAMES, new_policy

for name in POLICY_NAMES:
    core = Evictor(new_policy(name, 100), Watermarks(10, 20), now_ms=0)
    core.admitted([Record(generation, 2, generation) for generation in range(1, 51)], 0)
    core.touched([1], 1)
    print(name, [victim.generation for victim in core.plan(free_pages=0, now_ms=2).victims])
"""


def test_a_simulator_replays_the_policies_without_the_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=30
    )
    lru, s3fifo = done.stdout.splitlines()
    assert lru == "lru [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]"
    assert s3fifo == lru.replace("lru", "s3fifo")
