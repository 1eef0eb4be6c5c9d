"""SIGKILL at random moments: blocks acknowledged as written are exact afterwards; all others are exact or a miss.

With odd seeds the node encrypts.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Hit, PutResult
from kvstore.durability import Durability
from kvstore.errors import KvError
from kvstore.names import SHARED
from kvstore.sealing.masters import new_master_file
from tests.conftest import MIB, ClientWithBuffers, small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

ROUNDS = int(os.environ.get("TRIGGERKV_KILL_ROUNDS", "15"))
BLOCKS = 12
WAIT_S = 30.0
ROOM_BYTES = max(64 * MIB, ROUNDS * BLOCKS * (MIB + (1 << 16)))  # for all of them: none is to be evicted


@pytest.mark.timeout(120 + 10 * ROUNDS)
def test_every_block_acknowledged_as_written_survives_sigkill(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("TRIGGERKV_SEED", str(secrets.randbits(32))))
    record_property("TRIGGERKV_SEED", seed)
    rng = random.Random(seed)
    arguments: list[str] = []
    if seed % 2:
        new_master_file(tmp_path / "master.key")
        arguments = ["--master-key", f"file:{tmp_path / 'master.key'}"]
    node = small_node(tmp_path / "node", capacity=f"{ROOM_BYTES}", arguments=arguments)
    try:
        rig = ClientWithBuffers(node)
        acked: dict[bytes, tuple[int, int]] = {}
        tried: dict[bytes, tuple[int, int]] = {}
        written = killed_in_mid_put = 0
        for number in range(ROUNDS):
            results, blocks = one_round(rig, node, rng, number)
            for block, result in zip(blocks, results, strict=True):
                tried[block.key] = (block.offset, block.length)
                if result.error is None:
                    acked[block.key] = tried[block.key]
                    written += 1
                else:
                    killed_in_mid_put += 1
            node.start()
            rig.client.status(wait_s=WAIT_S)
            # All of this round's blocks, and some of every earlier one's.
            sample = [block.key for block in blocks] + rng.sample(sorted(tried), min(8, len(tried)))
            check(rig, {key: tried[key] for key in sample}, acked)
        check(rig, tried, acked)
        record_property("acknowledged", written)
        record_property("not acknowledged", killed_in_mid_put)
        assert written
        rig.close()
    finally:
        node.kill()


def one_round(
    rig: ClientWithBuffers, node: NodeProcess, rng: random.Random, number: int
) -> tuple[list[PutResult], list[Block]]:
    """Put some blocks and kill the node at a random moment: every fifth time, after an acknowledgement."""
    blocks = [
        Block(
            rig.key(number * BLOCKS + i),
            rig.from_region,
            rng.randrange(0, 15 * MIB),
            rng.choice([1, 4096, 100_000, MIB]),
            threshold=i + 1,
            domain=SHARED,
        )
        for i in range(BLOCKS)
    ]
    rig.flags[0].store(0)
    puts = rig.client.arm(
        blocks, rig.flags[0], durability=rng.choice([Durability.WRITTEN, Durability.SYNCED])
    )
    killer = threading.Timer(rng.choice([0.002, 0.01, 0.02, 0.04, 0.06]) * rng.random(), node.kill)
    if number % 5:
        killer.start()
    for i in range(BLOCKS):
        rig.flags[0].store(i + 1)
    if not number % 5:  # on a busy machine, none might be acknowledged otherwise
        wait_until(lambda: any(one.error is None for one in puts.wait(0.01)), "an acknowledgement", WAIT_S)
        killer.start()
    killer.join()
    return puts.wait(WAIT_S), blocks


def check(
    rig: ClientWithBuffers, blocks: dict[bytes, tuple[int, int]], acked: dict[bytes, tuple[int, int]]
) -> None:
    """Get blocks and compare them with those that were put."""
    names = sorted(blocks)
    for start in range(0, len(names), 8):
        keys = names[start : start + 8]
        rig.target[:] = b"\x5a" * len(rig.target)
        wanted = [Block(key, rig.to_region, 2 * i * MIB, blocks[key][1]) for i, key in enumerate(keys)]
        for block, outcome in zip(wanted, rig.client.get(wanted, timeout_s=WAIT_S), strict=True):
            offset, length = blocks[block.key]
            if isinstance(outcome, Hit):
                assert (
                    rig.target[block.offset : block.offset + length] == rig.source[offset : offset + length]
                )
            else:
                assert block.key not in acked, f"an acknowledged block is gone: {outcome}"
                assert rig.target[block.offset : block.offset + length] == b"\x5a" * length


def test_a_node_killed_during_a_get_causes_only_a_miss(tmp_path: Path) -> None:
    node = small_node(tmp_path / "node")
    try:
        rig = ClientWithBuffers(node)
        blocks = [rig.block(i) for i in range(16)]
        puts = rig.client.arm(blocks, rig.flags[0])
        rig.flags[0].store(16)
        assert all(result.error is None for result in puts.wait(WAIT_S))
        for delay_ms in (0, 1, 2, 4, 8, 16):
            killer = threading.Timer(delay_ms / 1000, node.kill)
            killer.start()
            try:
                outcomes = rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)
            except KvError as error:
                pytest.fail(f"a get raised because the node went away: {error}")
            killer.join()
            for block, outcome in zip(blocks, outcomes, strict=True):
                if isinstance(outcome, Hit):
                    assert rig.is_exact(block)
            node.start()
            rig.client.status(wait_s=WAIT_S)
        rig.close()
    finally:
        node.kill()
