"""The warm-up: which blocks are in memory again after a start, when it ends, and what it leaves alone."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.limits import PAGE_BYTES
from kvstore.miss import MissReason
from kvstore.node.landing import pages_of
from kvstore.node.warm_up import WarmUp
from kvstore.storage.disk import DiskDone
from tests.client.test_promises import flip_a_bit_of, put
from tests.conftest import MIB, ClientWithBuffers
from tests.nic_offload.rig import wait_until
from tests.node.in_process import HOT_BYTES, NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.node import Node

WAIT_S = 20.0
EACH = MIB - PAGE_BYTES  # with its header a piece of 1 MiB
in_process = pytest.mark.node("in process", capacity_bytes=128 * MIB)


def warm_up(node: NodeInProcess) -> None:
    node.run(node.call(WarmUp).run())


def in_memory(node: NodeInProcess, keys: Sequence[bytes]) -> list[bool]:
    def told(inside: Node) -> list[bool]:
        tenant = next(iter(inside.connections.values())).tenant
        entries = inside.store.lookup([(tenant, key) for key in keys])
        return [entry is not None and inside.hot.pages.has(entry.generation) for entry in entries]

    return node.call(told)  # type: ignore[no-any-return]


def stored(node: NodeInProcess) -> int:
    return node.call(lambda inside: inside.store.statistics().blocks)  # type: ignore[no-any-return]


def hot_is_free(node: NodeInProcess) -> bool:
    """Whether no piece of the hot memory is in use."""
    return node.call(lambda inside: inside.hot.pages.take(HOT_BYTES // PAGE_BYTES)) is not None


def test_a_restarted_node_needs_no_drive_for_its_newest_blocks(
    tmp_path: Path, node: NodeProcess, rig: ClientWithBuffers
) -> None:
    blocks = [rig.block(number, 100_000) for number in range(8)]
    put(rig, blocks)
    node.stop()
    node.start()
    assert "8 blocks are in memory again" in node.log()
    for block in blocks:
        piece = rig.source[block.offset : block.offset + block.length]
        flip_a_bit_of(tmp_path / "node" / "drive-0.kv", piece, 50_000)
    with Client(node.target, slots=8, block_bytes_max=MIB) as client:
        to = client.register(rig.target)
        got = client.get([Block(one.key, to, one.offset, one.length) for one in blocks], timeout_s=WAIT_S)
    assert got == [Hit(one.key) for one in blocks]
    assert all(rig.is_exact(one) for one in blocks)


@in_process
def test_half_of_the_memory_is_filled_with_the_newest_blocks(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    fitting = HOT_BYTES // 2 // (pages_of(EACH) * PAGE_BYTES)
    blocks = [rig.block(number, EACH) for number in range(fitting + 16)]
    for first in range(0, len(blocks), 8):
        put(rig, blocks[first : first + 8])
    warm_up(node)
    assert in_memory(node, [one.key for one in blocks]) == [False] * 16 + [True] * fitting


@in_process
def test_of_the_blocks_that_it_reads_the_oldest_are_evicted_first(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    blocks = [rig.block(number, EACH) for number in range(16)]
    for first in (0, 8):
        put(rig, blocks[first : first + 8])
    warm_up(node)
    pages = pages_of(EACH)

    def take_all_but_eight(inside: Node) -> None:
        for _ in range(HOT_BYTES // (pages * PAGE_BYTES) - 8):
            assert inside.hot.pages.take(pages) is not None

    node.call(take_all_but_eight)
    assert in_memory(node, [one.key for one in blocks]) == [False] * 8 + [True] * 8


@in_process
def test_only_so_many_of_the_newest_blocks_are_read(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.warm_up.WARM_BLOCKS_MAX", 5)
    monkeypatch.setattr("kvstore.node.warm_up.WARM_BLOCKS_STEP", 2)
    blocks = [rig.block(number, 10_000) for number in range(12)]
    for block in blocks:
        put(rig, [block])
    warm_up(node)
    assert in_memory(node, [one.key for one in blocks]) == [False] * 7 + [True] * 5


@in_process
def test_expired_blocks_take_no_room(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, over = rig.block(0, 10_000), rig.block(1, HOT_BYTES // 8)
    put(rig, [block])
    rig.client.put_inline(over.key, bytes(10_000), expires_unix_ms=time.time_ns() // 1_000_000 + 60_000)
    monkeypatch.setattr(
        "kvstore.node.warm_up.WARM_SHARE", HOT_BYTES // (2 * pages_of(10_000) * PAGE_BYTES) + 1
    )
    now_ms = time.time_ns() // 1_000_000

    def later(inside: Node) -> None:
        monkeypatch.setattr(inside.clock, "wall_ms", lambda: now_ms + 120_000, raising=False)

    node.call(later)
    warm_up(node)
    assert in_memory(node, [block.key]) == [True]


@in_process
def test_it_ends_in_time_though_the_drive_does_not_answer(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.warm_up.WARM_MS", 50)
    block = rig.block(0, 100_000)
    put(rig, [block])
    held: list[Any] = []

    def hold(inside: Node) -> None:
        vars(inside.store)["get"] = lambda *read: held.append(read)

    def release(inside: Node) -> None:
        del vars(inside.store)["get"]
        for read in held:
            inside.store.get(*read)

    node.call(hold)
    began_s = time.monotonic()
    warm_up(node)
    assert 0.04 < time.monotonic() - began_s < WAIT_S / 2
    assert len(held) == 1
    assert not hot_is_free(node)
    node.call(release)
    wait_until(lambda: hot_is_free(node), "what is read later is dropped")
    assert in_memory(node, [block.key]) == [False]


class Failing:
    """A drive that can't be read now."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk
        self.reads = 0
        self._tags: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def submit(self, ops: Sequence[Any]) -> int:
        count: int = self._disk.submit(ops)
        self._tags |= {op.tag for op in ops[:count] if op.kind.name == "READ"}
        return count

    def reap(self) -> list[DiskDone]:
        ended = self._disk.reap()
        self.reads += sum(one.tag in self._tags for one in ended)
        return [DiskDone(one.tag, -errno.EIO) if one.tag in self._tags else one for one in ended]


@in_process
def test_a_drive_that_can_not_be_read_for_a_moment_loses_no_block(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reads that fail are the last ones."""
    monkeypatch.setattr("kvstore.node.warm_up.WARM_BLOCKS_STEP", 4)
    blocks = [rig.block(number, 10_000) for number in range(16)]
    put(rig, blocks)

    def fail(inside: Node) -> Failing:
        traffic: Any = inside.store.drives[0]._traffic
        traffic._disk = Failing(traffic._disk)
        return traffic._disk  # type: ignore[no-any-return]

    def mend(inside: Node) -> None:
        traffic: Any = inside.store.drives[0]._traffic
        traffic._disk = traffic._disk._disk

    failing: Failing = node.call(fail)
    warm_up(node)
    assert failing.reads == 4
    node.call(mend)
    assert stored(node) == len(blocks)
    assert rig.client.get([rig.wanted(one) for one in blocks], timeout_s=WAIT_S) == [
        Hit(one.key) for one in blocks
    ]
    assert all(rig.is_exact(one) for one in blocks)


@in_process
@pytest.mark.parametrize("at", [77_777, -4000])
def test_a_damaged_block_is_left_to_the_get_that_finds_it(
    tmp_path: Path, node: NodeInProcess, rig: ClientWithBuffers, at: int
) -> None:
    """In its payload, or in its header."""
    block, other = rig.block(0, 100_000), rig.block(1, 100_000)
    put(rig, [block, other])
    piece = rig.source[block.offset : block.offset + block.length]
    flip_a_bit_of(tmp_path / "node" / "drive-0.kv", piece, at)
    warm_up(node)
    assert in_memory(node, [block.key, other.key]) == [False, True]
    assert stored(node) == 2
    miss = rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)[0]
    assert not isinstance(miss, Hit)
    assert miss.reason is MissReason.CORRUPT
    put(rig, [block])
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    assert rig.is_exact(block)


@in_process
def test_it_is_no_use_of_a_block(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(rig, [rig.block(number, 10_000) for number in range(4)])
    guarded: list[int] = []
    keeping = node.call(lambda inside: inside.store.drives[0].keeping)
    monkeypatch.setattr(keeping, "guard", lambda generations, _: guarded.extend(generations))
    warm_up(node)
    assert guarded == []
