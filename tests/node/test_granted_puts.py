"""Blocks put by grants while a drive is busy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Hit, Stored
from kvstore.durability import Durability
from kvstore.errors import KeyTaken, Overloaded
from kvstore.miss import Miss
from kvstore.node.drive_lanes import LANE_TAG
from kvstore.node.granted_puts import Granted
from kvstore.storage.block_writes import Puts
from nic_offload.shelf import Shelf
from tests.conftest import MIB, ClientWithBuffers, small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.node.node import Node
    from kvstore.storage.items import PutItem, PutsDone

pytestmark = pytest.mark.node("in process", lane=False)

WAIT_S = 20.0
LANE_WAIT_S = 1.0  # for which a block waits for a lane, however long the drive takes; then Python writes it


class HeldWrites:
    """A drive whose writes end only at `release`, from the node's view, without a timer."""

    def __init__(self, node: NodeInProcess) -> None:
        self._node = node
        self.put: list[int] = []  # blocks, of each call
        node.call(self._hold)

    def _hold(self, node: Node) -> None:
        put: Any = node.store.put

        def noted(items: Sequence[PutItem], done: PutsDone) -> None:
            self.put.append(len(items))
            put(items, done)

        node.ticks.cancel()
        node._loop.remove_reader(node.store.fileno())
        vars(node.store)["put"] = noted

    def release(self) -> None:
        self._node.call(lambda node: node._loop.add_reader(node.store.fileno(), node._drive_events))


def gathered(node: NodeInProcess) -> int:
    count: int = node.call(lambda node: sum(len(one.unheard) for one in node.granted._areas.values()))
    return count


@pytest.mark.parametrize(("length", "calls"), [(10_000, 3), (600_000, 9)])
def test_small_blocks_that_arrive_during_a_write_are_written_together(
    node: NodeInProcess, rig: ClientWithBuffers, length: int, calls: int
) -> None:
    blocks = [rig.block(number, length) for number in range(10)]
    assert rig.client.put(blocks[:1])[0].durability is Durability.WRITTEN
    drive = HeldWrites(node)
    puts = []
    for count, block in enumerate(blocks[1:], 1):
        puts.append(rig.client.arm([block]))
        assert puts[-1].wait_landed(WAIT_S)
        together = calls < 9 and count > 1
        wait_until(lambda: sum(drive.put) == (1 if together else count), "what is not gathered goes at once")  # noqa: B023
    wait_until(lambda: sum(drive.put) + gathered(node) == 9, "the node has heard of all of them", WAIT_S)
    drive.release()
    assert all(one.durability is Durability.WRITTEN for put in puts for one in put.wait(WAIT_S))
    assert (drive.put[0], sum(drive.put)) == (1, 9)
    assert len(drive.put) <= calls


@pytest.mark.parametrize("durability", [Durability.LANDED, Durability.WRITTEN])
def test_an_acknowledged_block_is_found_along_with_an_unknown_one(
    tmp_path: Path, durability: Durability
) -> None:
    """A get of blocks in memory is answered by the core; this one by Python, which learns of puts in batches."""
    with NodeInProcess(tmp_path / "laned") as node:
        rig = ClientWithBuffers(node)
        for number in range(200):
            stored, unknown = rig.block(2 * number, 4096), rig.block(2 * number + 1, 4096)
            (put,) = rig.client.arm([stored], durability=durability).wait(WAIT_S)
            assert put.error is None
            if number % 2:
                assert isinstance(rig.client.exists([stored.key])[0], Stored), number
            found, missed = rig.client.get([rig.wanted(stored), rig.wanted(unknown)], timeout_s=WAIT_S)
            assert (number, isinstance(found, Hit), isinstance(missed, Miss)) == (number, True, True)
            assert rig.is_exact(stored)
        rig.close()


def test_what_has_landed_is_found_before_the_nodes_python_has_been_notified(tmp_path: Path) -> None:
    """It is notified between two steps of its loop, and this put lands during one."""
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)
        first, block = rig.block(0, 4096), rig.block(1, 4096)
        assert rig.client.put([first], durability=Durability.SYNCED)[0].error is None

        def put_and_look(inside: Node) -> bool:
            rig.client.arm([block], durability=Durability.SYNCED)
            wait_until(lambda: inside.hot.shelf.came > inside.granted._heard, "it has landed")
            inside.granted.take_all()
            return block.key in {key for _, key in inside.granted.just_landed.names}

        assert node.call(put_and_look)
        rig.close()


def test_idle_clients_cost_a_look_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up first processes what another client has just put."""
    looked: list[int] = []
    came = Granted.came

    def noted(granted: Granted, number: int, *, every: bool = False) -> None:
        looked.append(number)
        came(granted, number, every=every)

    monkeypatch.setattr(Granted, "came", noted)
    with NodeInProcess(tmp_path / "node") as node:
        rigs = [ClientWithBuffers(node) for _ in range(4)]
        for rig in rigs:
            rig.client.attach()
        for number in range(50):
            block = rigs[0].block(number, 4096)
            (put,) = rigs[0].client.arm([block], durability=Durability.LANDED).wait(WAIT_S)
            assert put.error is None
            assert isinstance(rigs[1].client.exists([block.key])[0], Stored)
        assert set(looked) == {min(node.call(lambda one: list(one.connections)))}
        wait_until(lambda: node.call(lambda one: one.counters.puts) == 50, "the store has all")
        looked.clear()
        assert isinstance(rigs[1].client.exists([block.key])[0], Stored)
        assert looked == []
        for rig in rigs:
            rig.close()


def test_blocks_that_arrive_with_a_lanes_block_are_stored_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver reports a block once, and not if it was processed before on behalf of a lane's."""
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)
        assert rig.client.arm([rig.block(0, 4096)]).wait(WAIT_S)[0].error is None
        told = Granted.handle

        def only_lanes(granted: Granted, number: int) -> None:
            if number == LANE_TAG:
                told(granted, number)

        monkeypatch.setattr(Granted, "handle", only_lanes)
        for number in range(1, 21, 2):
            expiring, laned = rig.block(number, 4096), rig.block(number + 1, 4096)
            puts = rig.client.arm([expiring], expires_unix_ms=time.time_ns() // 1_000_000 + 600_000)
            assert puts.wait_landed(WAIT_S)
            assert rig.client.arm([laned]).wait(WAIT_S)[0].error is None
            assert puts.wait(WAIT_S)[0].error is None, "which no lane takes"
        rig.close()


def counted_by_python(monkeypatch: pytest.MonkeyPatch) -> list[PutItem]:
    """Count the blocks that no lane writes from now on."""
    by_python: list[PutItem] = []
    accept = Puts.accept

    def counted(puts: Puts, items: Sequence[PutItem], done: PutsDone) -> None:
        by_python.extend(items)
        accept(puts, items, done)

    monkeypatch.setattr(Puts, "accept", counted)
    return by_python


@pytest.mark.parametrize(
    ("capacity", "length", "at_once", "count"),
    [(1 << 30, 4096, 50, 3000), (1 << 30, 1 << 20, 20, 120), (64 << 20, 32 << 10, 50, 4000)],
    ids=["small", "large", "on a full drive"],
)
def test_a_stream_of_blocks_is_written_by_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int, length: int, at_once: int, count: int
) -> None:
    """Ground is reserved in time; blocks that find none, or a full lane, wait. Python writes none of them."""
    with NodeInProcess(tmp_path / "node", capacity) as node:
        rig = ClientWithBuffers(node)
        by_python, quick = counted_by_python(monkeypatch), 0
        for first in range(1, count + 1, at_once):
            blocks = [rig.block(number, length) for number in range(first, first + at_once)]
            began = time.monotonic()
            assert not any(put.error for put in rig.client.arm(blocks).wait(WAIT_S))
            if time.monotonic() - began < LANE_WAIT_S:
                assert not by_python
                quick += 1
            by_python.clear()
        assert quick
        rig.close()


def test_an_idle_lane_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive had no ground for it then."""
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)
        lane = node.call(lambda node: node.store.drives[0]._writes.ground.lane)
        lane.expect(ground=False)
        accepted = counted_by_python(monkeypatch)
        assert rig.client.arm([rig.block(0)]).wait(WAIT_S)[0].error is None
        assert len(accepted) == 1
        assert rig.client.arm([rig.block(1)]).wait(WAIT_S)[0].error is None
        assert len(accepted) == 1
        rig.close()


def test_a_block_deleted_before_its_put_ended_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the core still knows it because it is being sent."""
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)
        assert rig.client.arm([rig.block(0, 4096)]).wait(WAIT_S)[0].error is None
        wait_until(lambda: node.call(lambda one: one.hot.pages.statistics().kept) == 1, "it is kept")
        monkeypatch.setattr(Shelf, "rename", lambda _, ids, __: b"\1" * (memoryview(ids).nbytes // 8))
        for number in range(1, 21):
            block = rig.block(number, 4096)
            assert rig.client.arm([block], durability=Durability.LANDED).wait(WAIT_S)[0].error is None
            assert rig.client.delete([block.key])[0]
        wait_until(lambda: node.call(lambda one: len(one.granted)) == 0, "all have ended")
        assert node.call(lambda one: one.hot.pages.statistics().kept) == 1
        rig.close()


def full(*_: object) -> None:
    raise Overloaded("The drive's queue of puts is full.")


def test_blocks_of_a_client_that_left_can_be_deleted_while_they_wait_for_a_full_drive(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    blocks = [rig.block(number, 5000) for number in range(2)]
    keys = [block.key for block in blocks]
    with small_client(node.target) as other:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(node.node.store, "put", full)
            puts = rig.client.arm(blocks, durability=Durability.LANDED)
            assert not any(one.error for one in puts.wait(WAIT_S))
            rig.client.close()
            wait_until(lambda: not node.call(len), "it has left", WAIT_S)
            assert node.call(lambda one: len(one.granted)) == 2
            other.delete(keys[:1])
        wait_until(lambda: other.prefix(keys[1:]).blocks == 1, "the other is stored", WAIT_S)
        assert [type(one) for one in other.exists(keys)] == [Miss, Stored]
        wait_until(
            lambda: not node.call(lambda one: len(one.granted) + len(one.granted._leaving)), "nothing is left"
        )


def test_a_clean_stop_stores_landed_blocks_that_wait_for_a_full_drive(tmp_path: Path) -> None:
    left = 100  # tries
    with NodeInProcess(tmp_path / "node") as node:
        rig, put = ClientWithBuffers(node), node.node.store.put

        def full_at_first(items: Sequence[PutItem], done: PutsDone) -> None:
            nonlocal left
            left -= 1
            put(items, done) if left < 0 else full()

        vars(node.node.store)["put"] = full_at_first
        blocks = [rig.block(number, 5000) for number in range(2)]
        puts = rig.client.arm(blocks, durability=Durability.LANDED)
        assert not any(one.error for one in puts.wait(WAIT_S))
    with NodeInProcess(tmp_path / "node") as node, small_client(node.target) as other:
        assert other.prefix([block.key for block in blocks]).blocks == 2
    rig.close()


def test_the_first_of_two_blocks_of_a_key_that_land_over_two_connections_is_stored(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """The node's Python hears of the other one first: its client waits for more than `landed`."""
    with small_client(node.target) as other:
        region, key = other.register(rig.source), rig.key(0)
        for client, source in ((rig.client, rig.from_region), (other, region)):
            assert client.put([Block(rig.key(9), source, 0, 5000)])[0].error is None
        expires = int(time.time() * 1000) + 600_000  # the core doesn't list such a block
        first = Block(key, rig.from_region, 0, 5000)
        (landed,) = rig.client.arm([first], durability=Durability.LANDED, expires_unix_ms=expires).wait(
            WAIT_S
        )
        (refused,) = other.put([Block(key, region, MIB, 5000)])
        assert landed.error is None
        assert isinstance(refused.error, KeyTaken)
        assert other.get_inline(key, 5000) == rig.source[:5000]
