"""Nodes whose etcd has lost its data, in simulated time."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from kvstore.cluster.etcd import Listed
from kvstore.cluster.etcd_history import EtcdMemory, History
from tests.cluster.simulated import FakeEtcd, run
from tests.cluster.test_membership import STEPS, Process, SimulatedMembers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", range(10))
def test_maps_continue_after_etcd_has_lost_its_data(seed: int) -> None:
    """A node that is lost afterwards leaves them, and one that was absent before stays absent."""

    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(seed)
        leases = asyncio.create_task(etcd.run())
        some = [Process(etcd, rng, name, port) for port, name in enumerate("abcd", 1)]
        await asyncio.sleep(10)
        for absent in some[2:]:
            await absent.end(kindly=False)
            await asyncio.sleep(20)
        before = some[0].told
        assert before.names == {"a", "b"}
        await etcd.restore()
        for _ in range(400):
            await asyncio.sleep(0.05)
            for one in some[:2]:
                assert one.told.names | {absent.name for absent in one.told.absent} == set("abcd"), (
                    "at any time"
                )
        for one in some[:2]:
            assert one.told.members == before.members
            assert one.told.absent == before.absent == tuple(other.member for other in some[2:])
            assert one.told.revision > before.revision
            assert one.membership.memory.losses == 1
        await some[1].end(kindly=False)
        await asyncio.sleep(20)
        assert some[0].told.names == {"a"}
        leases.cancel()

    run(history())


@pytest.mark.parametrize("seed", range(10))
def test_a_node_forgotten_after_a_loss_is_on_no_map(seed: int) -> None:
    """Also if another node, which had no answer from etcd meanwhile, still lists it as absent."""

    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(seed)
        leases = asyncio.create_task(etcd.run())
        late, other = (Process(etcd, rng, name, port) for port, name in enumerate("ab", 1))
        await asyncio.sleep(10)
        backup = etcd.state()
        absent = Process(etcd, rng, "c", 3)
        await asyncio.sleep(2)
        await absent.end(kindly=False)
        await asyncio.sleep(20)
        late.way.is_away = True
        await etcd.restore(backup)
        while "c" not in etcd.known():  # noqa: ASYNC110 - time is simulated
            await asyncio.sleep(0.05)
        while not await other.membership.forget("c"):  # noqa: ASYNC110 - time is simulated
            await asyncio.sleep(0.05)
        late.way.is_away = False
        await asyncio.sleep(30)
        for one in (late, other):
            assert one.told.names == {"a", "b"}
            assert not one.told.absent
        assert late.told.revision == other.told.revision
        leases.cancel()

    run(history())


def test_a_restarted_node_remembers_what_its_etcd_had(tmp_path: Path) -> None:
    """All nodes were restarted: the maps of their clients continue."""

    async def history() -> None:
        etcd, rng, file = FakeEtcd(), random.Random(1), tmp_path / "cluster.json"
        leases = asyncio.create_task(etcd.run())
        one = Process(etcd, rng, "a", 1, EtcdMemory("test", file))
        await asyncio.sleep(2)
        revision = one.told.revision
        await one.end(kindly=False)
        await etcd.restore()
        again = Process(etcd, rng, "a", 1, EtcdMemory("test", file))
        await asyncio.sleep(2)
        assert again.told.revision > revision
        assert again.membership.memory.losses == 1
        await again.end(kindly=False)
        other = FakeEtcd()
        elsewhere = Process(other, rng, "a", 1, EtcdMemory("another", file))
        await asyncio.sleep(2)
        assert elsewhere.told.revision == other.revision, "another cluster's etcd has lost nothing"
        leases.cancel()

    run(history())


def test_an_unwritable_folder_is_logged_and_the_node_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def history() -> None:
        one = Process(FakeEtcd(), random.Random(1), "a", 1, EtcdMemory("test", tmp_path / "none" / "file"))
        await asyncio.sleep(2)
        assert one.told.members == (one.member,)

    run(history())
    assert "can't be written: No such file" in caplog.text


def test_a_lower_revision_of_the_same_history_is_a_loss_and_so_is_an_offset_below_the_remembered_one() -> (
    None
):
    memory = EtcdMemory("test", chance=random.Random(1))
    first = History(0, "a", 8192)
    assert not memory.takes(History(), 5)
    assert memory.takes(first, 10)
    assert memory.takes(first, 10)
    assert not memory.takes(first, 9)
    assert not memory.takes(History(9, "b", 8192), 100)
    assert memory.takes(memory.next(8192), 1)
    assert (memory.losses, memory.revision > 10) == (1, True)


def test_a_record_of_an_earlier_process_restored_from_a_backup_is_not_a_later_one() -> None:
    async def history() -> None:
        etcd, rng, memory = FakeEtcd(), random.Random(1), EtcdMemory("test")
        leases = asyncio.create_task(etcd.run())
        earlier = Process(etcd, rng, "a", 1, memory)
        await asyncio.sleep(2)
        backup = etcd.state()
        await earlier.end(kindly=False)
        one = Process(etcd, rng, "a", 2, memory)
        await asyncio.sleep(10)
        assert one.told.members == (one.member,)
        await etcd.restore(backup)
        for number in range(30):
            await etcd.put(b"/triggerkv/test.other/%d" % number, b"", 0, only_new=False, lasting=b"")
        await asyncio.sleep(20)
        assert one.membership.outside == ""
        assert one.told.members == (one.member,)
        leases.cancel()

    run(history())


def test_another_record_of_a_known_revision_is_of_another_history() -> None:
    """Etcd was restored, and its next write, of the same key, has the revision of a lost one."""
    key, other = b"/members/node0", b"/members/node1"
    earlier = Listed(8, {key: (b"ours", 5), other: (b"theirs", 6)}, {key: 8, other: 7})
    assert earlier._replace(revision=9).may_follow(earlier)
    assert earlier._replace(
        values={**earlier.values, key: (b"a copy's", 7)}, written={key: 9, other: 7}, revision=9
    ).may_follow(earlier)
    for lost in (
        {"values": {**earlier.values, key: (b"a copy's", 7)}},
        {"values": {**earlier.values, other: (b"theirs", 7)}},
        {"written": {key: 6, other: 7}},
        {"revision": 7},
    ):
        assert not earlier._replace(**lost).may_follow(earlier)


def test_of_two_processes_of_one_folder_only_one_is_on_the_map_after_a_restore() -> None:
    """The history that failed: the restore's next write had the revision that the other process had seen."""

    async def history() -> None:
        world = SimulatedMembers(5965)
        leases = asyncio.create_task(world.etcd.run())
        for _ in range(STEPS):
            await world.step()
        await world.settle()
        world.check()
        leases.cancel()

    run(history())
