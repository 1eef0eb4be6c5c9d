"""Blocks put by some shards and got by others, through a real node."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Hit, ShardReader, Wanted
from kvstore.errors import LayoutError
from kvstore.layout import Layer, Layout, Order
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.conftest import small_client
from tests.test_layout import written

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.node("shared")

WAIT_S = 20.0
BLOCKS = 5
LAYERS = (Layer(8, 4, 4), Layer(4, 8, 2), Layer(1, 24, 0, split=False), Layer(8, 4, 4, alias_of=0))
PAGE = 4096


def layout_in(order: Order) -> Layout:
    return Layout("llama", "w1", "float32", 8, LAYERS, order)


def chained(block: int) -> bytes:
    return block_key(b"chain", block.to_bytes(4, "little"))


def content(layout: Layout, block: int) -> bytes:
    """The pattern of all blocks, with one byte of each number changed by the block's own number."""
    pattern = bytearray(written(layout))
    pattern[3::4] = bytes(byte ^ block for byte in pattern[3::4])
    return bytes(pattern)


def put_shards(
    node: NodeProcess, tenant: str, layout: Layout, shards: int, *, without: int | None = None
) -> None:
    """Put the blocks, each shard from an engine of its own; one shard may have none of the last block."""
    for shard in range(shards):
        mine = layout.of_shard(shard, shards)
        with small_client(node.target, tenant=tenant, layout=mine) as client, FlagWords.create(1) as flags:
            source = allocate(-(-mine.block_bytes * BLOCKS // PAGE) * PAGE)
            kv = client.register(source)
            blocks = []
            for block in range(BLOCKS - (shard == without)):
                at = block * mine.block_bytes
                source[at : at + mine.block_bytes] = content(mine, block)
                blocks.append(Block(mine.key(chained(block)), kv, at, mine.block_bytes))
            puts = client.arm(blocks, flags[0])
            flags[0].store(1)
            assert all(result.error is None for result in puts.wait(WAIT_S))


@pytest.mark.parametrize("order", [Order.HEADS_FIRST, Order.TOKENS_FIRST])
@pytest.mark.parametrize("wanted_shards", [1, 2, 4])
def test_blocks_put_by_two_shards_are_read_by_one_two_and_four(
    node: NodeProcess, tenant: str, order: Order, wanted_shards: int
) -> None:
    layout = layout_in(order)
    put_shards(node, tenant, layout, 2)
    for shard in range(wanted_shards):
        mine = layout.of_shard(shard, wanted_shards)
        with small_client(node.target, tenant=tenant, layout=mine) as client:
            room = mine.block_bytes + 64
            target = allocate(-(-room * BLOCKS // PAGE) * PAGE)
            target[:] = b"\xee" * len(target)
            kv = client.register(target)
            order_of_blocks = random.Random(shard).sample(range(BLOCKS), BLOCKS)
            with ShardReader(client, mine, stored_shards=2) as reader:
                outcomes = reader.get(
                    [Wanted(chained(block), kv, block * room) for block in order_of_blocks], timeout_s=WAIT_S
                )
            assert outcomes == [Hit(mine.key(chained(block))) for block in order_of_blocks]
            for block in range(BLOCKS):
                at = block * room
                assert target[at : at + mine.block_bytes] == content(mine, block)
                assert target[at + mine.block_bytes : at + room] == b"\xee" * 64


def test_a_block_with_a_missing_shard_is_a_miss_and_writes_nothing(node: NodeProcess, tenant: str) -> None:
    layout = layout_in(Order.HEADS_FIRST)
    put_shards(node, tenant, layout, 2, without=1)
    with small_client(node.target, tenant=tenant, layout=layout) as client:
        target = allocate(-(-layout.block_bytes * BLOCKS // PAGE) * PAGE)
        kv = client.register(target)
        wanted = [Wanted(chained(block), kv, block * layout.block_bytes) for block in range(BLOCKS)]
        with ShardReader(client, layout, stored_shards=2) as reader:
            outcomes = reader.get(wanted, timeout_s=WAIT_S)
        assert outcomes[:-1] == [Hit(layout.key(chained(block))) for block in range(BLOCKS - 1)]
        assert outcomes[-1] == Miss(MissReason.UNKNOWN)
        end = layout.block_bytes * (BLOCKS - 1)
        assert not any(target[end:])


def test_engines_with_several_layouts_store_the_same_tokens_side_by_side(
    node: NodeProcess, tenant: str
) -> None:
    """They once shared a key, and the second engine's puts always failed."""
    first = layout_in(Order.HEADS_FIRST)
    layouts = [first, layout_in(Order.TOKENS_FIRST), replace(first, isa="amx")]
    for layout in layouts:
        put_shards(node, tenant, layout, 1)
    for layout in layouts:
        with small_client(node.target, tenant=tenant, layout=layout) as client:
            kv = client.register(allocate(PAGE * 4))
            assert client.get(
                [Block(layout.key(chained(0)), kv, 0, layout.block_bytes)], timeout_s=WAIT_S
            ) == [Hit(layout.key(chained(0)))]


def test_a_key_under_another_layout_is_a_layout_miss(node: NodeProcess, tenant: str) -> None:
    layout = layout_in(Order.HEADS_FIRST)
    put_shards(node, tenant, layout, 1)
    other = layout_in(Order.TOKENS_FIRST)
    with small_client(node.target, tenant=tenant, layout=other) as client:
        kv = client.register(allocate(PAGE * 4))
        (miss,) = client.get([Block(layout.key(chained(0)), kv, 0, other.block_bytes)], timeout_s=WAIT_S)
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.LAYOUT


def test_a_place_outside_the_region_is_refused(node: NodeProcess, tenant: str) -> None:
    layout = layout_in(Order.HEADS_FIRST)
    with small_client(node.target, tenant=tenant, layout=layout) as client:
        kv = client.register(allocate(PAGE * 4))
        with (
            ShardReader(client, layout, stored_shards=2) as reader,
            pytest.raises(LayoutError, match="not in the region"),
        ):
            reader.get([Wanted(chained(0), kv, PAGE * 4 - layout.block_bytes + 1)])
