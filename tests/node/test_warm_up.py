"""The warm-up: which blocks are in memory again after a start, and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.limits import PAGE_BYTES
from kvstore.miss import MissReason
from kvstore.node.landing import pages_of
from kvstore.node.prefetch import Prefetches
from kvstore.node.warm_up import WarmUp
from tests.client.test_promises import flip_a_bit_of, put
from tests.conftest import MIB, ClientWithBuffers
from tests.nic_offload.rig import wait_until
from tests.node.in_process import HOT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.node import Node
    from kvstore.node.prefetch import Asked, Wish
    from tests.node.in_process import NodeInProcess

WAIT_S = 20.0
EACH = MIB - PAGE_BYTES  # with its header a piece of 1 MiB
in_process = pytest.mark.node("in process", capacity_bytes=128 * MIB)


def warmed(node: NodeInProcess) -> WarmUp:
    warm_up: WarmUp = node.call(WarmUp)
    node.run(warm_up.run())
    return warm_up


def in_memory(node: NodeInProcess, keys: Sequence[bytes]) -> list[bool]:
    def told(inside: Node) -> list[bool]:
        tenant = next(iter(inside.connections.values())).tenant
        entries = inside.store.lookup([(tenant, key) for key in keys])
        return [entry is not None and inside.hot.pages.has(entry.generation) for entry in entries]

    return node.call(told)  # type: ignore[no-any-return]


def test_a_restarted_node_needs_no_drive_for_its_newest_blocks(
    tmp_path: Path, node: NodeProcess, rig: ClientWithBuffers
) -> None:
    blocks = [rig.block(number, 100_000) for number in range(8)]
    put(rig, blocks)
    node.stop()
    node.start()
    wait_until(lambda: "8 blocks are in memory again" in node.log(), "they are read")
    for block in blocks:
        piece = rig.source[block.offset : block.offset + block.length]
        flip_a_bit_of(tmp_path / "node" / "drive-0.kv", piece, 50_000)
    with Client(node.target, slots=8, block_bytes_max=MIB) as client:
        to = client.register(rig.target)
        got = client.get([Block(one.key, to, one.offset, one.length) for one in blocks], timeout_s=WAIT_S)
    assert got == [Hit(one.key) for one in blocks]
    assert all(rig.is_exact(one) for one in blocks)


@in_process
def test_at_most_half_of_the_memory_is_filled_with_the_newest_blocks(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    fitting = HOT_BYTES // 2 // (pages_of(EACH) * PAGE_BYTES)
    blocks = [rig.block(number, EACH) for number in range(fitting + 16)]
    for first in range(0, len(blocks), 8):
        put(rig, blocks[first : first + 8])
    warm_up = warmed(node)
    there = in_memory(node, [one.key for one in blocks])
    assert there == [False] * 16 + [True] * fitting
    assert (warm_up.blocks, warm_up.size_bytes) == (fitting, fitting * EACH)


@in_process
def test_only_so_many_of_the_newest_blocks_are_read(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.warm_up.WARM_BLOCKS_MAX", 5)
    monkeypatch.setattr("kvstore.node.warm_up.WARM_BLOCKS_STEP", 2)
    blocks = [rig.block(number, 10_000) for number in range(12)]
    for block in blocks:
        put(rig, [block])
    assert warmed(node).blocks == 5
    assert in_memory(node, [one.key for one in blocks]) == [False] * 7 + [True] * 5


@in_process
def test_it_ends_once_the_blocks_of_clients_fill_half_of_the_memory(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    old = [rig.block(number, EACH) for number in range(16)]
    for first in (0, 8):
        put(rig, old[first : first + 8])
    warm_up: WarmUp = node.call(WarmUp)
    later = [rig.block(number, EACH) for number in range(16, 16 + HOT_BYTES // 2 // MIB)]
    for first in range(0, len(later), 8):
        put(rig, later[first : first + 8])
        rig.client.get([rig.wanted(one) for one in later[first : first + 8]], timeout_s=WAIT_S)
    node.run(warm_up.run())
    assert warm_up.blocks == 0
    assert not any(in_memory(node, [one.key for one in old]))


@in_process
def test_blocks_that_were_deleted_meanwhile_are_left_out(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    blocks = [rig.block(number, 10_000) for number in range(6)]
    put(rig, blocks)
    warm_up: WarmUp = node.call(WarmUp)
    assert rig.client.delete([blocks[1].key]) == [True]
    fitting = node.run(warm_up._fitting(*warm_up._newest[0]))
    assert len(fitting) == 5
    assert rig.client.delete([blocks[4].key]) == [True]
    node.run(warm_up._read_all(fitting))
    assert in_memory(node, [one.key for one in blocks]) == [True, False, True, True, False, True]


@in_process
def test_blocks_of_many_tenants_take_few_prefetches(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[int] = []
    real = Prefetches.queue

    def queue(self: Prefetches, wish: Wish) -> Asked:
        queued.append(len(wish.wanted))
        return real(self, wish)

    monkeypatch.setattr(Prefetches, "queue", queue)
    with Client(node.target, tenant="other", slots=8, block_bytes_max=MIB) as other:
        for number in range(20):
            (rig.client, other)[number % 2].put_inline(rig.key(number), b"a block")
        warm_up = warmed(node)
    assert (warm_up.blocks, queued) == (20, [10, 10])


@in_process
def test_a_damaged_block_does_not_come_into_memory_and_can_be_put_again(
    tmp_path: Path, node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    block, other = rig.block(0, 100_000), rig.block(1, 100_000)
    put(rig, [block, other])
    piece = rig.source[block.offset : block.offset + block.length]
    flip_a_bit_of(tmp_path / "node" / "drive-0.kv", piece, 77_777)
    assert warmed(node).blocks == 1
    assert in_memory(node, [block.key, other.key]) == [False, True]
    miss = rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)[0]
    assert not isinstance(miss, Hit)
    assert miss.reason is MissReason.CORRUPT
    put(rig, [block])
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    assert rig.is_exact(block)
