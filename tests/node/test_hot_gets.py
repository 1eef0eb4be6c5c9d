"""Gets that the hot memory answers: without the drive, never with another record's bytes, never with broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.miss import Miss, MissReason
from tests.client.test_promises import flip_a_bit_of, put
from tests.conftest import MIB, Rig
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.node.hot import HotStatistics
    from kvstore.node.node import Node

WAIT_S = 20.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "node") as process:
        yield process


@pytest.fixture
def rig(node: NodeInProcess) -> Iterator[Rig]:
    rig = Rig(node)  # type: ignore[arg-type]
    yield rig
    rig.close()


def hot(node: NodeInProcess) -> HotStatistics:
    def told(inside: Node) -> HotStatistics:
        inside.take_note()
        return inside.hot.pages.statistics()

    return node.call(told)  # type: ignore[no-any-return]


def get(rig: Rig, *blocks: Block) -> list[Any]:
    rig.target[:] = bytes(len(rig.target))
    return rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)


def test_the_second_get_needs_no_drive(tmp_path: Path, node: NodeInProcess, rig: Rig) -> None:
    blocks = [rig.block(number, 200_000) for number in range(4)]
    put(rig, blocks)
    assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
    assert hot(node).kept == 4
    for block in blocks:
        piece = rig.source[block.offset : block.offset + block.length]
        flip_a_bit_of(tmp_path / "node" / "drive-0.kv", piece, 5000)
    assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
    assert all(rig.is_exact(block) for block in blocks)
    assert hot(node).found == 4


@pytest.mark.parametrize("on_shelf", [False, True])
def test_bytes_that_changed_in_memory_come_from_the_drive_instead(
    node: NodeInProcess,
    rig: Rig,
    on_shelf: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """The node's own thread reads them anew at once; the C core, which reads no drive, says that they are missed."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]

    def damage(inside: Node) -> None:
        piece = inside.hot.pages.find(next(iter(inside.hot.pages._probation)))
        assert piece is not None
        inside.hot.payload(piece, 100_000)[77_777] ^= 1
        inside.hot.pages.release(piece)
        assert len(inside.hot.shelf) == 1
        if not on_shelf:
            inside.hot.shelf.take(piece.generation)

    node.call(damage)
    if on_shelf:
        assert [one.reason for one in get(rig, block)] == [MissReason.CORRUPT]
        assert bytes(rig.target) == bytes(len(rig.target))
    for _ in range(2):
        assert get(rig, block) == [Hit(block.key)]
        assert rig.is_exact(block)
    assert rig.client.status().corrupt_found == 0


def test_a_block_that_was_replaced_is_not_served_from_memory(node: NodeInProcess, rig: Rig) -> None:
    """A name is written anew once its first block is over, with other bytes under another generation."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]
    tenant = next(iter(node.call(lambda inside: list(inside._connections.values())))).tenant
    (entry,) = node.call(lambda inside: inside.store.lookup([(tenant, block.key)]))
    node.call(lambda inside: inside.store.quarantine(tenant, block.key, entry.generation))
    rig.source[: block.length] = bytes(reversed(rig.source[: block.length]))
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]
    assert rig.is_exact(block)


def test_another_layout_or_length_finds_nothing_in_memory(node: NodeInProcess, rig: Rig) -> None:
    block = rig.block(0, 100_000)
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]
    shorter = Block(block.key, rig.to_region, block.offset, 50_000)
    (outcome,) = rig.client.get([shorter], timeout_s=WAIT_S)
    assert not isinstance(outcome, Hit)
    with Client(node.target, layout=b"another", slots=1, block_bytes_max=MIB) as other:
        region = other.register(bytearray(MIB))
        (outcome,) = other.get([Block(block.key, region, 0, block.length)], timeout_s=WAIT_S)
        assert not isinstance(outcome, Hit)
    assert hot(node).found == 0


def test_more_than_the_memory_holds_goes_through_it(node: NodeInProcess, rig: Rig) -> None:
    """Inline gets and fetches share it; those that find no room wait for it, and nobody waits for ever."""
    blocks = [rig.block(number, 1 << 20) for number in range(16)]
    put(rig, blocks)
    whole = node.call(lambda inside: inside.hot.pages.take(inside.hot.pages._pages - 600))
    for _ in range(3):
        assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
        assert all(rig.is_exact(block) for block in blocks)
    rest = node.call(lambda inside: inside.hot.pages.take(600))
    assert rest is not None
    waiting = rig.client.get([rig.wanted(blocks[0])], timeout_s=0.3)
    assert not isinstance(waiting[0], Hit)
    node.call(lambda inside: inside.hot.pages.release(rest))
    wait_until(lambda: not rig.client._breaker.is_open, "the client tries again")
    assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
    node.call(lambda inside: inside.hot.pages.release(whole))


def test_an_inline_get_finds_and_leaves_blocks_there_too(
    tmp_path: Path, node: NodeInProcess, rig: Rig
) -> None:
    data = rig.source[:100_000]
    rig.client.put_inline(rig.key(0), data)
    assert rig.client.get_inline(rig.key(0), len(data)) == data
    flip_a_bit_of(tmp_path / "node" / "drive-0.kv", data, 5000)
    assert rig.client.get_inline(rig.key(0), len(data)) == data
    assert hot(node).found == 1

    def damage(inside: Node) -> None:
        piece = inside.hot.pages.find(next(iter(inside.hot.pages._protected)))
        assert piece is not None
        inside.hot.payload(piece, 100_000)[77_777] ^= 1
        inside.hot.pages.release(piece)

    node.call(damage)
    outcome = rig.client.get_inline(rig.key(0), len(data))
    assert isinstance(outcome, Miss), "the drive's bytes are broken as well"


def test_an_inline_get_replaces_bytes_that_changed_in_memory(
    tmp_path: Path, node: NodeInProcess, rig: Rig
) -> None:
    data = rig.source[:100_000]
    rig.client.put_inline(rig.key(0), data)
    assert rig.client.get_inline(rig.key(0), len(data)) == data

    def damage(inside: Node) -> None:
        piece = inside.hot.pages.find(next(iter(inside.hot.pages._probation)))
        assert piece is not None
        inside.hot.payload(piece, 100_000)[77_777] ^= 1
        inside.hot.pages.release(piece)

    node.call(damage)
    assert rig.client.get_inline(rig.key(0), len(data)) == data
    flip_a_bit_of(tmp_path / "node" / "drive-0.kv", data, 5000)
    assert rig.client.get_inline(rig.key(0), len(data)) == data, "the drive's bytes have taken their place"
