"""Blocks written by lanes, which Python learns of in batches (`kvstore.node.lane_blocks`)."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Hit, Stored
from kvstore.durability import Durability
from kvstore.errors import StorageError
from kvstore.node.lane_blocks import LaneBlocks
from kvstore.storage.index import Index
from nic_offload.lane import Lane
from nic_offload.shelf import Shelf
from tests.client.test_granted import is_settled
from tests.conftest import ClientWithBuffers
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.node.node import Node
    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

LENGTH = 5000
COUNT = 40


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that are taken as arrays."""
    sizes: list[int] = []
    take = LaneBlocks.take

    def counted(self: LaneBlocks, drive: object, rows: Sequence[object]) -> object:
        sizes.append(len(rows))
        return take(self, drive, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(LaneBlocks, "take", counted)
    return sizes


@pytest.fixture
def rig(node: NodeInProcess, rig: ClientWithBuffers) -> ClientWithBuffers:
    """A client that has put something, so that the lane has ground."""
    put(rig, range(1000, 1008))
    settled(node)
    return rig


def put(rig: ClientWithBuffers, numbers: range, durability: Durability = Durability.LANDED) -> None:
    blocks = [rig.block(number, LENGTH) for number in numbers]
    for first in range(0, len(blocks), 8):
        assert [one.error for one in rig.client.put(blocks[first : first + 8], durability=durability)] == [
            None
        ] * len(blocks[first : first + 8])


def settled(node: NodeInProcess) -> None:
    wait_until(lambda: is_settled(node), "the index has them")


def held_bytes(node: NodeInProcess) -> int:
    """The hot memory held by receivers, beyond their empty rooms."""

    def held(inside: Node) -> int:
        inside.granted.empty()
        return sum(inside.hot.shares._held.values())

    return int(node.call(held))


def test_many_blocks_are_processed_together_as_if_one_by_one(
    node: NodeInProcess, rig: ClientWithBuffers, together: list[int]
) -> None:
    before = rig.client.statistics()
    put(rig, range(8))
    settled(node)
    put(rig, range(8, COUNT), Durability.WRITTEN)
    settled(node)
    assert sum(together) == COUNT
    told = rig.client.statistics()
    assert (told.puts, told.put_bytes) == (before.puts + COUNT, before.put_bytes + COUNT * LENGTH)
    blocks = [rig.wanted(rig.block(number, LENGTH)) for number in range(COUNT)]
    assert all(isinstance(one, Stored) for one in rig.client.exists([block.key for block in blocks]))
    assert rig.client.get(blocks) == [Hit(block.key) for block in blocks]
    assert rig.client.statistics().hits_memory == COUNT, "their memory is the hot copy"
    assert held_bytes(node) == 0


def test_a_query_in_between_sees_blocks_on_lanes(
    node: NodeInProcess, rig: ClientWithBuffers, together: list[int]
) -> None:
    """Each is requested at once, many during their writes."""
    for number in range(COUNT):
        put(rig, range(number, number + 1))
        assert isinstance(rig.client.exists([rig.key(number)])[0], Stored)
        if number % 4 == 0:
            assert rig.client.delete([rig.key(number)]) == [True]
    settled(node)
    found = rig.client.exists([rig.key(number) for number in range(COUNT)])
    assert [isinstance(one, Stored) for one in found] == [number % 4 > 0 for number in range(COUNT)]
    assert sum(together) < COUNT
    assert held_bytes(node) == 0


def test_a_block_that_the_core_no_longer_lists_is_stored_like_any_other(
    node: NodeInProcess, rig: ClientWithBuffers, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rig.client.statistics()
    monkeypatch.setattr(Shelf, "rename", lambda _self, ids, _new_ids: bytes(memoryview(ids).nbytes // 8))
    put(rig, range(8))
    settled(node)
    assert sum(together) > 4, "most of them"
    monkeypatch.undo()
    told = rig.client.statistics()
    assert (told.puts, told.put_bytes) == (before.puts + 8, before.put_bytes + 8 * LENGTH)
    blocks = [rig.wanted(rig.block(number, LENGTH)) for number in range(8)]
    assert rig.client.get(blocks) == [Hit(block.key) for block in blocks]
    assert held_bytes(node) == 0


def test_blocks_that_the_index_refuses_are_lost_and_counted(
    node: NodeInProcess, rig: ClientWithBuffers, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_index: Index, _blocks: object) -> None:
        raise StorageError("The index is broken.")

    monkeypatch.setattr(Index, "publish_rows", fails)
    put(rig, range(8))
    settled(node)
    assert sum(together) > 4, "most of them"
    assert node.call(lambda inside: (inside.counters.puts, inside.counters.landed_failed)) == (8, 8)
    assert held_bytes(node) == 0
    (result,) = rig.client.put([rig.block(9, LENGTH)], durability=Durability.WRITTEN)
    assert isinstance(result.error, StorageError), "the drive takes no more"


def test_a_key_that_a_lane_is_writing_is_put_by_another_client(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has the second block, and learns of the first by then: only one of them is stored."""
    cleared, clear = list[tuple[Lane, int]](), Lane.clear
    monkeypatch.setattr(Lane, "clear", lambda lane, until: cleared.append((lane, until)))
    node.call(lambda inside: inside.granted._lanes.seal())  # the ground that was cleared already
    with closing(ClientWithBuffers(node)) as another:
        another.name, another.source[:] = rig.name, rig.source[:]
        another.client.attach()  # before anything is asked for
        puts = [one.client.arm([one.block(number, LENGTH) for number in range(4)]) for one in (rig, another)]
        assert all(put.wait_landed(10) for put in puts)
        node.call(lambda inside: inside.catch_up(every=False))
        monkeypatch.undo()
        for lane, until in cleared:
            clear(lane, until)
        assert [one.error for put in puts for one in put.wait(10)] == [None] * 8
    settled(node)

    def counts(inside: Node) -> tuple[int, int]:
        (drive,) = inside.store.drives
        return len(drive._index), len(drive.keeping.core)

    assert node.call(counts) == (12, 12)
