"""A node that has more put into it than its drive holds, for a while: bytes stay exact and its memory stays bounded.

TRIGGERKV_SOAK_S=n goes on for n seconds instead of 10.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from kvstore.client import Block, Hit
from kvstore.demo import node_process
from kvstore.demo.node_process import NodeProcess
from kvstore.miss import MissReason
from tests.conftest import MIB, ClientWithBuffers

SOAK_S = int(os.environ.get("TRIGGERKV_SOAK_S", "10"))
BATCH = 16
WARM_BYTES = 256 * MIB  # put before the memory is first looked at: more than the drive holds
GROWTH_BYTES_MAX = (
    24 * MIB
)  # histories of look-ups and evictions fill up in the first minutes, and then no more
WAIT_S = 30.0


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(120 + 2 * SOAK_S)
def test_a_small_drive_accepts_an_endless_stream_of_puts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not forked: those allocate memory when it is first used, which would count as growth.
    monkeypatch.setattr(node_process, "subprocess", subprocess)
    rng = random.Random(7)
    with NodeProcess(tmp_path / "node", capacity="96MiB") as node:
        rig = ClientWithBuffers(node, slots=BATCH)
        known: dict[bytes, tuple[int, int]] = {}
        put_bytes = hits = misses = number = 0
        before_bytes = 0
        until = time.monotonic() + SOAK_S
        while time.monotonic() < until or not before_bytes:
            blocks = [some_block(rig, rng, number + i) for i in range(BATCH)]
            number += BATCH
            put(rig, blocks)
            known |= {block.key: (block.offset, block.length) for block in blocks}
            put_bytes += sum(block.length for block in blocks)
            got, gone = get_some(rig, rng.sample(sorted(known), BATCH), known)
            hits, misses = hits + got, misses + len(gone)
            for key in gone:
                del known[key]  # what went for room doesn't come back by itself
            if not before_bytes and put_bytes > WARM_BYTES:
                before_bytes = resident_bytes(node.pid)
        grown_bytes = resident_bytes(node.pid) - before_bytes
        assert hits
        assert misses
        assert grown_bytes < GROWTH_BYTES_MAX, f"after {number} blocks the node has {grown_bytes} bytes more"
        assert rig.client.status(wait_s=WAIT_S).blocks < number
        rig.close()


def some_block(rig: ClientWithBuffers, rng: random.Random, number: int) -> Block:
    length = rng.choice([4096, 50_000, 200_000, MIB])
    return Block(rig.key(number), rig.from_region, rng.randrange(15 * MIB), length)


def put(rig: ClientWithBuffers, blocks: list[Block]) -> None:
    rig.flags[0].store(0)
    puts = rig.client.arm(blocks, rig.flags[0])
    rig.flags[0].store(1)
    assert [result.error for result in puts.wait(WAIT_S)] == [None] * len(blocks)


def get_some(
    rig: ClientWithBuffers, keys: list[bytes], known: dict[bytes, tuple[int, int]]
) -> tuple[int, list[bytes]]:
    """Get blocks, each exact or evicted; returns their number and the evicted ones."""
    wanted = [Block(key, rig.to_region, at * MIB, known[key][1]) for at, key in enumerate(keys)]
    hits, gone = 0, []
    for block, outcome in zip(wanted, rig.client.get(wanted, timeout_s=WAIT_S), strict=True):
        if isinstance(outcome, Hit):
            at, length = known[block.key]
            assert rig.target[block.offset : block.offset + length] == rig.source[at : at + length]
            hits += 1
        else:
            # The last 16,384 that went are remembered.
            assert outcome.reason in (MissReason.EVICTED, MissReason.UNKNOWN), str(outcome)
            gone.append(block.key)
    return hits, gone
