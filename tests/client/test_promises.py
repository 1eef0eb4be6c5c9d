"""Promises in case of failure: damage is detected, late bytes don't arrive, landed blocks outlive their client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Hit
from kvstore.miss import Miss, MissReason
from tests.conftest import MIB, ClientWithBuffers, small_client, small_node
from tests.stopping import stop

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess
    from kvstore.wire.observing_pb2 import StatisticsResponse

pytestmark = pytest.mark.node("shared")

WAIT_S = 20.0


def put(rig: ClientWithBuffers, blocks: list[Block]) -> None:
    """Put blocks through reserved slots, so that they are on the drive and not in the node's memory."""
    rig.flags[0].store(0)
    puts = rig.client.reserve(blocks).arm(rig.flags[0])
    rig.flags[0].store(max(block.threshold for block in blocks))
    assert all(result.error is None for result in puts.wait(WAIT_S))


def flip_a_bit_of(drive: Path, content: bytes, at: int) -> None:
    """Flip a bit of the record with this payload, on the drive."""
    with drive.open("r+b") as file:
        whole = file.read()
        begin = whole.find(content[:4096])
        assert begin > 0
        assert whole.find(content[:4096], begin + 1) < 0
        file.seek(begin + at)
        file.write(bytes([whole[begin + at] ^ 1]))


def corrupt(told: StatisticsResponse) -> int:
    """The number of misses because of corruption."""
    return sum(one.blocks for one in told.misses if one.reason == MissReason.CORRUPT)


@pytest.mark.parametrize("at", [0, 5000, 99_999, -1, -4096])
def test_a_flipped_bit_on_the_drive_is_a_miss_and_none_of_the_bytes_are_sent(
    node: NodeProcess, rig: ClientWithBuffers, at: int
) -> None:
    """Offsets below 0 are in the header page."""
    block = rig.block(0, 100_000)
    rig.client.put_inline(block.key, rig.source[:100_000])  # which leaves no copy in the node's memory
    found, before = rig.client.status().corrupt_found, rig.client.statistics()
    at = at if at != -1 else -4096 + 100  # in the fields that the header's tag covers
    flip_a_bit_of(node.data / "drive-0.kv", rig.source[:100_000], at)
    rig.target[:] = b"\x5a" * len(rig.target)
    (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.CORRUPT
    assert rig.target[:] == b"\x5a" * len(rig.target)
    assert rig.client.status().corrupt_found == found + 1
    after = rig.client.statistics()
    assert corrupt(after) == corrupt(before) + 1
    assert (after.hits_drive, after.got_bytes) == (before.hits_drive, before.got_bytes)
    put(rig, [block])  # it is forgotten, so it can be put again
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    assert rig.is_exact(block)


def test_an_inline_get_detects_the_damage_too(node: NodeProcess, rig: ClientWithBuffers) -> None:
    data = rig.source[:100_000]
    rig.client.put_inline(rig.key(0), data)
    flip_a_bit_of(node.data / "drive-0.kv", data, 77_777)
    outcome = rig.client.get_inline(rig.key(0), len(data))
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.CORRUPT


def test_no_byte_arrives_after_a_get_has_given_up(node: NodeProcess) -> None:
    rig = ClientWithBuffers(node)
    blocks = [rig.block(i) for i in range(8)]
    put(rig, blocks)
    canary = b"\x5a" * len(rig.target)
    missed = 0
    for wait_s in (0.0, 0.001, 0.002, 0.004, 0.006):
        rig.client.reserve([rig.block(9)]).give_back()  # attached, so that the stop falls into the get itself
        rig.target[:] = canary
        stopper = threading.Timer(wait_s, stop, (node.pid,))
        stopper.start()
        if wait_s == 0.0:
            stopper.join()
        outcomes = rig.client.get([rig.wanted(block) for block in blocks], timeout_s=0.2)
        stopper.join()
        after = rig.target[:]
        for block, outcome in zip(blocks, outcomes, strict=True):
            if isinstance(outcome, Hit):
                assert rig.is_exact(block)
            else:
                missed += 1
        os.kill(node.pid, signal.SIGCONT)
        # The node goes on with whatever it had queued; a later connection's answer is behind all of that.
        rig.client.status(wait_s=WAIT_S)
        assert rig.client.get_inline(blocks[0].key, MIB) == rig.source[:MIB]
        assert rig.target[:] == after
    assert missed
    rig.close()


def test_a_landed_block_survives_its_client(tmp_path: Path) -> None:
    """A large one, whose checksum is still being computed when its client closes."""
    size = 60 * MIB
    script = (
        "import sys\n"
        "from kvstore.client import Block, Client\n"
        "from kvstore.durability import Durability\n"
        "from nic_offload.flags import FlagWords\n"
        "size = int(sys.argv[2])\n"
        "client = Client(sys.argv[1], slots=1, block_bytes_max=size)\n"
        "flags = FlagWords.create(1)\n"
        "region = client.register(bytearray(range(256)) * (size // 256))\n"
        "block = Block(b'k' * 32, region, 0, size)\n"
        "puts = client.arm([block], flags[0], durability=Durability.LANDED)\n"
        "flags[0].store(1)\n"
        "while not puts.progress()[1]: pass\n"
        "client.close()\n"
    )
    with small_node(tmp_path / "node") as node:
        ended = subprocess.run(
            [sys.executable, "-c", script, node.target, str(size)], check=False, timeout=WAIT_S
        )
        assert ended.returncode == 0
        with small_client(node.target) as client:
            into = bytearray(size)
            block = Block(b"k" * 32, client.register(into), 0, size)
            until_s = time.monotonic() + WAIT_S
            while client.get([block]) != [Hit(block.key)]:
                assert time.monotonic() < until_s, "the block was acknowledged as landed and is not there"
            assert into == bytearray(range(256)) * (size // 256)


def test_many_clients_put_and_get_concurrently(node: NodeProcess) -> None:
    script = (
        "import sys\n"
        "from kvstore.client import Block, Client, Hit\n"
        "from nic_offload.flags import FlagWords\n"
        "me = int(sys.argv[2])\n"
        "with Client(sys.argv[1], slots=4, block_bytes_max=1 << 18) as client, FlagWords.create(1) as flags:\n"
        "    data, into = bytearray([me]) * (1 << 20), bytearray(1 << 20)\n"
        "    source, target = client.register(data), client.register(into)\n"
        "    for turn in range(5):\n"
        "        flags[0].store(0)\n"
        "        keys = [bytes([me, turn, i]) + bytes(29) for i in range(4)]\n"
        "        blocks = [Block(key, source, i << 18, 1 << 18) for i, key in enumerate(keys)]\n"
        "        puts = client.arm(blocks, flags[0])\n"
        "        flags[0].store(1)\n"
        "        assert all(result.error is None for result in puts.wait(30))\n"
        "        into[:] = bytes(1 << 20)\n"
        "        wanted = [Block(key, target, i << 18, 1 << 18) for i, key in enumerate(keys)]\n"
        "        assert client.get(wanted) == [Hit(key) for key in keys]\n"
        "        assert into == data\n"
    )
    clients = [subprocess.Popen([sys.executable, "-c", script, node.target, str(i + 1)]) for i in range(6)]
    try:
        assert [client.wait(60) for client in clients] == [0] * len(clients)
    finally:
        for client in clients:
            client.kill()


def test_a_node_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kvstore.demo.node_process import NodeProcess\n"
        "print(NodeProcess(Path(sys.argv[1]), capacity='16MiB').pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "node")],
        stdout=subprocess.PIPE,
        check=False,
        timeout=WAIT_S,
    )
    pid = int(ended.stdout)
    until_s = time.monotonic() + WAIT_S
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < until_s
        time.sleep(0.02)
