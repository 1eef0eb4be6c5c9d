"""An acknowledged put keeps its promise: after a crash, and when the key has another block."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Hit
from kvstore.durability import Durability
from kvstore.errors import KeyTaken
from tests.client.test_promises import flip_a_bit_of, put
from tests.conftest import ClientWithBuffers
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess
from tests.node.test_granted_puts import HeldWrites

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Block
    from kvstore.client.blocks import PutResult

pytestmark = pytest.mark.node("in process")

LENGTH = 100_000
WAIT_S = 20.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "node"


@pytest.mark.parametrize("torn", [False, True])
def test_a_block_found_by_a_scan_is_not_reported_as_stored_before_it_was_verified(
    data: Path,
    torn: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    with NodeInProcess(data) as node:
        first = ClientWithBuffers(node)
        put(first, [first.block(0, LENGTH)])
        first.client.close()
    shutil.rmtree(data / "index-0")
    if torn:
        flip_a_bit_of(data / "drive-0.kv", first.source[:LENGTH], LENGTH - 1)
    with NodeInProcess(data) as node:
        rig = ClientWithBuffers(node)
        rig.name, rig.source[:] = first.name, first.source[:]
        block = rig.block(0, LENGTH)
        reservation = rig.client.reserve([block])
        assert reservation.already_stored == 0
        reservation.give_back()
        assert rig.client.statistics().blocks_doubted == 1
        put(rig, [block])
        assert rig.client.statistics().blocks_doubted == 0
        reservation = rig.client.reserve([block])
        assert reservation.already_stored == 1
        reservation.give_back()
        assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
        assert rig.is_exact(block)
        rig.close()
        first.flags.close()


def test_a_block_fetched_over_the_fabric_is_reported_as_stored_again(data: Path) -> None:
    with NodeInProcess(data) as node:
        first = ClientWithBuffers(node)
        put(first, [first.block(0, LENGTH)])
        first.close()
    shutil.rmtree(data / "index-0")
    with NodeInProcess(data) as node:
        rig = ClientWithBuffers(node)
        rig.name = first.name
        block = rig.block(0, LENGTH)
        assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
        reservation = rig.client.reserve([block])
        assert reservation.already_stored == 1
        reservation.give_back()
        rig.close()


@pytest.mark.parametrize("durability", [Durability.WRITTEN, Durability.SYNCED])
def test_of_two_puts_of_one_key_with_different_bytes_one_fails_with_key_taken(
    rig: ClientWithBuffers, durability: Durability
) -> None:
    same = [rig.block(0, LENGTH), rig.block(0, LENGTH)]
    other = rig.block(0, LENGTH, offset=5 * LENGTH)
    puts = [rig.client.reserve([block], durability=durability).arm(rig.flags[0]) for block in (*same, other)]
    rig.flags[0].store(1)
    results = [result for one in puts for result in one.wait(WAIT_S)]
    taken = [result for result in results if isinstance(result.error, KeyTaken)]
    assert len(taken) in (1, 2), "whichever came first"
    assert all(result.error is None for result in results if result not in taken)
    assert all(result.has_block for result in results)
    told = rig.client.statistics()
    assert (told.puts, told.puts_key_taken, told.puts_failed) == (3 - len(taken), len(taken), len(taken))


def _put_landed(rig: ClientWithBuffers, block: Block) -> PutResult:
    rig.flags[0].store(0)
    puts = rig.client.reserve([block], durability=Durability.LANDED).arm(rig.flags[0])
    rig.flags[0].store(block.threshold)
    (result,) = puts.wait(WAIT_S)
    return result


def test_landed_is_never_sent_for_a_block_whose_length_differs_from_the_stored_one(
    rig: ClientWithBuffers, node: NodeInProcess
) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    for _ in range(20):  # slots and words come back: there are 16 slots
        result = _put_landed(rig, rig.block(0, LENGTH - 1))
        assert isinstance(result.error, KeyTaken)
        assert f"{block.key.hex()} already has a block with another length or layout" in str(result.error)
        assert result.durability is None
    counters = node.node.counters
    wait_until(lambda: counters.puts_key_taken == 20, "the node notes what it has said")
    assert (counters.puts, node.call(lambda one: one.leases)) == (1, 0)
    rows = node.call(lambda one: list(one.timings.puts.values()))
    assert sum(row.failed for row in rows) == counters.puts_failed == 20, "of the same failures"
    assert {row.failure for row in rows if row.failed} == {"KeyTaken"}
    assert _put_landed(rig, rig.block(1, LENGTH)).error is None
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    assert rig.is_exact(block)


def test_landed_is_never_sent_for_other_bytes_under_a_key(rig: ClientWithBuffers) -> None:
    block, other = rig.block(0, LENGTH), rig.block(0, LENGTH, offset=5 * LENGTH)
    late = rig.client.reserve([other], durability=Durability.LANDED)  # nothing to compare it with yet
    put(rig, [block])
    (result,) = late.arm(rig.flags[0]).wait(WAIT_S)
    assert isinstance(result.error, KeyTaken)
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    assert rig.is_exact(block)


@pytest.mark.node("in process", lane=False)
def test_landed_is_sent_for_a_reserved_block_once_it_can_be_read(
    rig: ClientWithBuffers, node: NodeInProcess
) -> None:
    drive, block = HeldWrites(node), rig.block(0, LENGTH)
    puts = rig.client.reserve([block], durability=Durability.LANDED).arm(None)
    wait_until(lambda: rig.client.statistics().leases == 1, "it has landed")
    assert not puts.wait_landed(0.2)
    drive.release()
    (result,) = puts.wait(WAIT_S)
    assert (result.error, result.durability) == (None, Durability.LANDED)
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    assert rig.is_exact(block)


def test_an_inline_put_of_other_bytes_fails_with_key_taken(rig: ClientWithBuffers) -> None:
    key = rig.key(1)
    rig.client.put_inline(key, b"the first")
    rig.client.put_inline(key, b"the first", durability=Durability.SYNCED)
    with pytest.raises(KeyTaken, match=f"{key.hex()} already has a block with other bytes"):
        rig.client.put_inline(key, b"the other")
    results = rig.client.put_many_inline([(key, b"the first"), (key, b"the other")])
    assert [type(result.error) for result in results] == [type(None), KeyTaken]
    assert rig.client.get_inline(key, 9) == b"the first"
    assert rig.client.statistics().puts_key_taken == 2
