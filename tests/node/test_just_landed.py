"""Blocks that have landed and are not in the index yet are found by every kind of call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Hit, Stored
from kvstore.durability import Durability
from kvstore.miss import Miss, MissReason
from nic_offload.fabric import Fabric
from nic_offload.lane import Lane
from tests.conftest import MIB, ClientWithBuffers, small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess
from tests.node.test_granted_puts import WAIT_S, HeldWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.client import Block

pytestmark = pytest.mark.node("in process", lane=False)

LENGTH = 5000
reap = Fabric.reap


@pytest.fixture
def landed(node: NodeInProcess, rig: ClientWithBuffers) -> Iterator[Block]:
    """Land a block whose write doesn't end."""
    assert rig.client.put([rig.block(0, LENGTH)])[0].error is None
    drive, block = HeldWrites(node), rig.block(1, LENGTH)
    put = rig.client.arm([block])
    assert put.wait_landed(WAIT_S)
    yield block
    drive.release()
    assert put.wait(WAIT_S)[0].durability is Durability.WRITTEN


def test_it_is_fetched_over_grpc(rig: ClientWithBuffers, landed: Block) -> None:
    payload = rig.source[landed.offset : landed.offset + LENGTH]
    assert rig.client.get_inline(landed.key, LENGTH, timeout_s=WAIT_S) == payload
    assert list(rig.client.get_many_inline([(landed.key, LENGTH)], timeout_s=WAIT_S)) == [payload]


def test_its_length_and_layout_are_compared(
    node: NodeInProcess, rig: ClientWithBuffers, landed: Block
) -> None:
    short = rig.block(1, LENGTH - 1, region=rig.to_region)
    (outcome,) = rig.client.get([short], timeout_s=WAIT_S)
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.LENGTH
    inline = rig.client.get_inline(landed.key, LENGTH - 1, timeout_s=WAIT_S)
    assert isinstance(inline, Miss)
    assert inline.reason is MissReason.LENGTH
    assert rig.client.exists([landed.key], lengths=[7]) == [
        Miss(MissReason.LENGTH, f"{LENGTH} bytes are stored")
    ]
    with small_client(node.target, layout=b"another") as other:
        region = other.register(bytearray(2 * MIB))
        (outcome,) = other.get([rig.block(1, LENGTH, region=region)], timeout_s=WAIT_S)
        assert outcome == Miss(MissReason.LAYOUT)
        assert other.get_inline(landed.key, LENGTH, timeout_s=WAIT_S) == Miss(MissReason.LAYOUT)
        assert other.exists([landed.key]) == [Miss(MissReason.LAYOUT)]
        (stored,) = other.exists([landed.key], any_layout=True)
        assert isinstance(stored, Stored)
        assert stored.length == LENGTH


def test_a_later_put_of_its_key_is_not_read_instead(rig: ClientWithBuffers, landed: Block) -> None:
    """The store will refuse that put."""
    other = rig.block(1, LENGTH, offset=5 * MIB)
    put = rig.client.arm([other])
    assert put.wait_landed(WAIT_S)
    assert rig.source[other.offset :][:LENGTH] != (payload := rig.source[landed.offset :][:LENGTH])
    assert rig.client.get_inline(landed.key, LENGTH, timeout_s=WAIT_S) == payload
    assert list(rig.client.get_many_inline([(landed.key, LENGTH)], timeout_s=WAIT_S)) == [payload]


def test_bytes_that_changed_in_memory_are_not_sent(
    node: NodeInProcess, rig: ClientWithBuffers, landed: Block
) -> None:
    (one,) = node.call(lambda node: list(node.granted.just_landed._blocks.values()))
    payload = node.call(lambda node: node.hot.payload(one.piece, LENGTH))
    was, payload[0] = payload[0], payload[0] ^ 1
    outcome = rig.client.get_inline(landed.key, LENGTH, timeout_s=0.5)  # the store doesn't answer
    payload[0] = was
    assert isinstance(outcome, Miss)


def test_it_is_fetched_from_memory_along_with_an_unknown_one(tmp_path: Path) -> None:
    """Python answers such a call, often before it has learned that a lane has written the block."""
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)
        for number in range(8):
            block = rig.block(number, LENGTH)
            assert rig.client.put([block])[0].error is None
            outcomes = rig.client.get(
                [rig.wanted(block), rig.block(99, region=rig.to_region)], timeout_s=WAIT_S
            )
            assert outcomes == [Hit(block.key), Miss(MissReason.UNKNOWN)]
            there = slice(block.offset, block.offset + LENGTH)
            assert rig.source[there] == rig.target[there]
        stats = rig.client.statistics()
        assert (stats.hits_memory, stats.hits_drive) == (8, 0)
        rig.close()


def test_a_call_sees_blocks_that_wait_for_a_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane is full, and the core keeps a block to itself until a call might need it from Python."""
    monkeypatch.setattr("kvstore.node.drive_lanes.LANE_BYTES_MAX", 2 * MIB)
    cleared, clear = list[tuple[Lane, int]](), Lane.clear
    with NodeInProcess(tmp_path / "node", 1 << 30) as node:
        rig = ClientWithBuffers(node)
        assert rig.client.arm([rig.block(0)]).wait(WAIT_S)[0].error is None
        monkeypatch.setattr(Lane, "clear", lambda lane, until: cleared.append((lane, until)))
        for first in range(1, 61, 4):  # mostly the node has been notified by then
            blocks = [rig.block(number) for number in range(first, first + 4)]
            puts = rig.client.arm(blocks)
            assert puts.wait_landed(WAIT_S)
            short = [rig.block(number, MIB - 1, region=rig.to_region) for number in range(first, first + 4)]
            reasons = {
                outcome.reason
                for outcome in rig.client.get(short, timeout_s=WAIT_S)
                if isinstance(outcome, Miss)
            }
            assert reasons == {MissReason.LENGTH}
            for lane, until in cleared:
                clear(lane, until)
            assert not any(put.error for put in puts.wait(WAIT_S))
        assert rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S) == [
            Hit(block.key) for block in blocks
        ]
        monkeypatch.undo()
        rig.close()


def append(rig: ClientWithBuffers, key: bytes) -> bool:
    return rig.client.session("ada", "chat").append([key], tokens=16) == 1


def pin(rig: ClientWithBuffers, key: bytes) -> bool:
    return rig.client.pin([key]).pinned == [True]


def prefetch(rig: ClientWithBuffers, key: bytes) -> bool:
    read = rig.client.prefetch([key])
    return (read.unread, read.missing) == ([], {})


@pytest.mark.parametrize("use", [append, pin, prefetch])
def test_a_call_that_needs_it_stored_waits_for_the_drive(
    node: NodeInProcess, rig: ClientWithBuffers, use: Callable[[ClientWithBuffers, bytes], bool]
) -> None:
    assert rig.client.put([rig.block(0, LENGTH)])[0].error is None
    drive, block = HeldWrites(node), rig.block(1, LENGTH)
    assert rig.client.put([block], durability=Durability.LANDED)[0].error is None
    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(use, rig, block.key)
        assert not wait([used], 0.2).done
        drive.release()
        assert used.result(WAIT_S)


def test_its_memory_becomes_the_hot_copy(rig: ClientWithBuffers) -> None:
    blocks = [rig.block(number, LENGTH) for number in range(8)]
    assert all(one.error is None for one in rig.client.put(blocks))
    before = rig.client.statistics().hits_memory
    assert rig.client.get([rig.wanted(block) for block in blocks]) == [Hit(block.key) for block in blocks]
    assert rig.client.statistics().hits_memory == before + 8


def test_in_a_reserved_slot_it_stays_deleted_though_the_node_had_not_noted_it_yet(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C core acknowledges a block as landed; the node's thread learns of it later, as when it is busy."""
    blocks = [rig.block(number, LENGTH) for number in range(2)]
    reserved = rig.client.reserve(blocks)
    with monkeypatch.context() as patch:
        patch.setattr(Fabric, "reap", lambda fabric: [] if fabric is node.node.fabric else reap(fabric))
        puts = reserved.arm(None)
        assert puts.wait_landed(WAIT_S)
        rig.client.delete([blocks[0].key])
    node.call(lambda one: one._fabric_events())
    assert not any(put.error for put in puts.wait(WAIT_S))
    wait_until(lambda: rig.client.prefix([blocks[1].key]).blocks == 1, "the other is stored", WAIT_S)
    assert [type(one) for one in rig.client.exists([block.key for block in blocks])] == [Miss, Stored]


def test_in_a_reserved_slot_it_stays_deleted(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    node.call(lambda one: setattr(one, "_goes_on", True))  # what lands waits, as behind many others
    blocks = [rig.block(number, LENGTH) for number in range(3)]
    puts = rig.client.reserve(blocks, durability=Durability.LANDED).arm(None)
    wait_until(lambda: node.call(lambda one: len(one._due)) == len(blocks), "they wait", WAIT_S)
    rig.client.delete([blocks[0].key])
    node.call(lambda one: one._store_due())
    assert not any(put.error for put in puts.wait(WAIT_S))
    others = [block.key for block in blocks[1:]]
    wait_until(lambda: rig.client.prefix(others).blocks == 2, "the others are stored", WAIT_S)
    assert [type(one) for one in rig.client.exists([block.key for block in blocks])] == [Miss, Stored, Stored]
    assert rig.client.statistics().leases == 0
    assert rig.client.put([blocks[0]])[0].error is None  # after the deletion
    assert rig.client.prefix([blocks[0].key]).blocks == 1
