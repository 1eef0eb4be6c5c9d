"""Repair in simulated time: nodes die, return with old blocks, are cut off, fill up, drain; clients put and delete.

Each history ends with a quiet time. Then every acknowledged block that was not deleted is on both of its owners, no
deletion has been undone, and no node has sent faster than it may. A drained node has left nothing that only it had.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, cast

import pytest
from grpc.aio import AioRpcError

from kvstore.cluster.etcd import EtcdAway
from kvstore.cluster.map import DRAINING, Map, Member, lots_record
from kvstore.cluster.membership import _GONE, NO_MAP_DIGEST
from kvstore.limits import UPKEEP_EVERY_MS, UPKEEP_RETRY_MS
from kvstore.node import upkeep
from kvstore.node.cluster_service import _map_response
from tests.cluster.reports import all_copies_are_made, members_are
from tests.cluster.simulated import FakeEtcd, run
from tests.cluster.simulated_nodes import CLIENT, TENANTS, Network, Process, Store, all_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.storage.index import Name

HISTORIES = int(os.environ.get("TRIGGERKV_CLUSTER_SEEDS", "40"))
STEPS, CLIENTS, FIRST, MOST = 14, 3, 3, 5
CALL_S, DELETE_S, LOOK_S = 5.0, 15.0, 0.2
QUIET_S = 700.0  # longer than between two scans of a map that doesn't change
BYTES, BYTES_PER_S, AT_ONCE = 2048, 16 << 10, 2
COUNT, JOINS_WITHIN_S = 40, 12.0
LOTS = 1 << 14


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks make several slices and offers, and are long enough for the rate to matter."""
    monkeypatch.setattr(upkeep, "UPKEEP_BYTES_PER_S", BYTES_PER_S)
    monkeypatch.setattr(upkeep, "UPKEEP_ASKED_BLOCKS", 8)
    monkeypatch.setattr(upkeep, "UPKEEP_OFFERED_BLOCKS", 4)


class RepairHistory:
    def __init__(self, seed: int) -> None:
        self.rng, self.reader_rng = random.Random(seed), random.Random(f"reader {seed}")
        self.read = 0  # blocks that a reader found
        self.read_deleted: list[str] = []
        self.etcd, self.network = FakeEtcd(), Network(self.rng)
        self.stores: dict[Member, Store] = {}  # of members that may live again
        self.stored: dict[Name, float] = {}  # acknowledged and not deleted since, and when
        self.deleting: set[Name] = set()
        self.deleted: set[Name] = set()  # acknowledged
        self.from_elsewhere: set[tuple[str, Name]] = set()  # deleted blocks that a new node had
        self.lost: set[Name] = set()  # with the only drive that had them
        self.drained = self.nodes = self.keys = 0
        self.is_over = False

    @property
    def processes(self) -> dict[str, Process]:
        return self.network.processes

    def begin(self, member: Member | None = None) -> None:
        if member is None:
            self.nodes += 1
            member = Member(f"node{self.nodes}", f"10.0.0.{self.nodes}:1")
            self.stores[member] = store = Store(self.rng)
            for name in sorted(self.deleted):  # it has stood alone, with what it had from elsewhere
                store.put(name, BYTES, 0)
                self.from_elsewhere.add((member.name, name))
        Process(self.etcd, self.network, member, self.stores[member])

    def holders(self, name: Name) -> list[Process]:
        return [one for one in self.processes.values() if name in one.store.blocks]

    def owners(self, now: Map, name: Name) -> list[Member]:
        placed_as, replicas = TENANTS[name[0]]
        return [now.members[at] for at in now.owners(placed_as.encode(), name[1])[:replicas]]

    # --- clients

    def view(self) -> tuple[Map, int] | None:
        """The map that a client has from some node, which may be an old one, and its digest."""
        if not self.processes:
            return None
        membership = self.rng.choice(list(self.processes.values())).membership
        return (membership.map, membership.digest) if membership.map.members else None

    async def client(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self.rng.random() * 2)
            settled = sorted(self.stored.keys() - self.deleting)
            if settled and self.rng.random() < 0.3:
                await self.delete(self.rng.choice(settled))
            elif copied := sorted(self.stored.keys() & self.expected()):  # the worst moment
                await self.delete(self.rng.choice(copied))
            else:
                await self.put()

    def expected(self) -> set[Name]:
        """The blocks whose copies are in flight."""
        return {name for one in self.processes.values() for name in one.upkeep.waited._by_name}

    async def put(self) -> None:
        self.keys += 1
        tenant, (_, replicas) = self.rng.choice(list(TENANTS.items()))
        name = tenant, self.keys.to_bytes(4) * 8
        if (view := self.view()) is None:
            return
        now, _ = view
        await asyncio.sleep(self.rng.random() * self.rng.choice((0, 0, 3)))
        owners = [owner.node for owner in self.owners(now, name)]

        async def store(process: Process) -> None:
            process.put(name, BYTES)

        done = await all_of([self.network.call(CLIENT, owner, store, CALL_S) for owner in owners])
        if done == [None] * replicas:
            self.stored[name] = asyncio.get_running_loop().time()

    async def delete(self, name: Name) -> None:
        """Delete a block as `kvstore.client.cluster_removals` does."""
        self.deleting.add(name)
        loop, asked = asyncio.get_running_loop(), 0
        until_s = loop.time() + DELETE_S
        while loop.time() < until_s:
            if (view := self.view()) is None:
                return
            now, digest = view
            nodes = [*now.members, *now.absent]
            answers = await all_of(
                [self.network.call(CLIENT, one.node, lambda to: to.delete(name), CALL_S) for one in nodes]
            )
            if any(isinstance(one, AioRpcError) for one in answers):
                return
            if any(told != one.name for one, (_, told) in zip(nodes, answers, strict=True)):
                return
            digests = {by for by, _ in answers[: len(now.members)]}
            if asked == digest and digests == {digest}:
                self.deleted.add(name)
                return
            asked = digest

    async def reader(self) -> None:
        """Read blocks by maps that may be old, the second owner first in half of the reads."""
        rng = self.reader_rng
        while not self.is_over:
            await asyncio.sleep(rng.random())
            names, maps = sorted(self.deleted), [one.membership.map for one in self.processes.values()]
            if rng.random() < 0.3:
                names = sorted(self.stored)
            if not names or not (now := rng.choice(maps) if maps else None) or not now.members:
                continue
            name = rng.choice(names)
            is_deleted = name in self.deleted
            order = list(now.owners(TENANTS[name[0]][0].encode(), name[1]))
            order[:2] = order[:2] if rng.random() < 0.5 else order[1::-1]
            for at in order:
                await asyncio.sleep(rng.random() * 0.3)
                node = now.members[at]
                process = self.processes.get(node.node)
                if process is None or frozenset((CLIENT, node.node)) in self.network.is_cut:
                    continue
                if process.membership.outside == _GONE:
                    continue  # drained, and started again although it must not be: deletions don't call it
                if name in process.store.blocks:
                    self.read += 1
                    if is_deleted and (node.name, name) not in self.from_elsewhere:
                        self.read_deleted.append(f"{name} on {node.name}")
                    break

    # --- what happens to nodes

    async def step(self) -> None:
        rng = self.rng
        alive = list(self.processes.values())
        dead = [member for member in self.stores if member.node not in self.processes]
        what = rng.choice(("dies", "returns", "joins", "etcd", "link", "client", "drain", "full", "lost"))
        one = rng.choice(alive) if alive else None
        if what == "dies" and one is not None and len(alive) > 1:
            await one.end(kindly=rng.random() < 0.4)
        elif (what == "returns" or not alive) and dead:
            self.begin(rng.choice(dead))
        elif what == "joins" and len(self.stores) < MOST:
            self.begin()
        elif what == "lost" and dead and one is not None and rng.random() < 0.5:
            await self.lose(rng.choice(dead), one)
        elif one is None:
            pass
        elif what == "etcd":
            one.way.is_away = not one.way.is_away and self.is_followed_without(one)
        elif what in {"link", "client"}:
            other = CLIENT if what == "client" else rng.choice(alive).member.node
            self.network.is_cut ^= {frozenset((one.member.node, other))}
        elif what == "drain":
            with suppress(EtcdAway):
                await one.membership.announce("" if one.membership.state else DRAINING)
        elif what == "full":
            one.store.is_full = not one.store.is_full
        await asyncio.sleep(rng.random() * rng.choice((0.1, 4, 16)))

    def is_followed_without(self, one: Process) -> bool:
        """Whether another member of a node's map follows etcd, so that clients of that map learn of new members."""
        return any(
            other.membership.lease and other.membership.digest == one.membership.digest
            for other in self.processes.values()
            if other is not one and not other.way.is_away
        )

    async def lose(self, member: Member, by: Process) -> None:
        """Lose a node with its drive, and forget it."""
        with suppress(EtcdAway):
            if await by.membership.forget(member.name):
                gone = self.stores.pop(member)
                left = [name for store in self.stores.values() for name in store.blocks]
                self.lost |= gone.blocks.keys() - set(left)

    async def watch_drains(self) -> None:
        """Stop each node that reports that it may be stopped; all owners then have its blocks.

        Those that were put before its map changed, or so soon afterwards that the client may have had the map before.
        """
        loop = asyncio.get_running_loop()
        changed: dict[Process, tuple[int, float]] = {}  # its map's last change, and when that was seen
        while True:
            await asyncio.sleep(LOOK_S)
            for one in list(self.processes.values()):
                if self.processes.get(one.member.node) is not one:
                    continue  # it was killed while another one ended
                if one.membership.outside == _GONE:
                    await self.empty(one)  # it was killed when it had drained, before it was stopped
                    continue
                since, changed_s = changed.get(one, (0, 0.0))
                if since != one.membership.since:
                    changed[one] = one.membership.since, (changed_s := loop.time())
                if not one.upkeep.has_drained or not one.membership.is_seen:
                    continue
                for name in one.store.blocks.keys() - self.deleting:
                    having = {member.name for member, store in self.stores.items() if name in store.blocks}
                    is_sure = one.upkeep.eligibility.is_sure(
                        cast("Any", one.store), one.store.blocks[name].generation
                    )
                    if is_sure and self.stored.get(name, inf) < changed_s + UPKEEP_RETRY_MS / 1000 - LOOK_S:
                        owners = self.owners(one.membership.map, name)
                        left = {
                            owner.name for owner in owners if owner in self.stores
                        }  # others have drained too
                        # A node with the map before may have copied it here during the scan, and has it itself.
                        are_enough = len(having - {one.member.name}) >= TENANTS[name[0]][1]
                        assert left <= having or are_enough, "an owner lacks what a drained node has"
                    elif having == {one.member.name}:
                        self.lost.add(
                            name
                        )  # put by an old map, perhaps after the last scan, or perhaps deleted
                with suppress(KeyError):
                    del self.stores[one.member]
                    self.drained += 1
                await one.end(kindly=True, for_good=True)

    async def empty(self, one: Process) -> None:
        """Do what a node asks for that was started again after a drain: stop it, and empty its folder."""
        self.stores.pop(one.member, None)
        self.lost |= one.store.blocks.keys() - {
            name for store in self.stores.values() for name in store.blocks
        }
        await one.end()

    # --- the end

    async def settle(self) -> None:
        self.is_over = True
        self.network.is_cut.clear()
        for store in self.stores.values():
            store.is_full = False
        for one in self.processes.values():
            one.way.is_away = False
        for member in self.stores:
            if member.node not in self.processes:
                self.begin(member)
        await asyncio.sleep(30)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + QUIET_S
        while self.missing() and loop.time() < until_s:  # noqa: ASYNC110 - time is simulated
            await asyncio.sleep(5)

    def missing(self) -> list[str]:
        """The differences from the wanted state."""
        said = []
        for name in sorted(self.stored.keys() - self.deleting - self.lost):
            holders = self.holders(name)
            if not holders:
                said.append(f"{name} is lost")
            for one in holders:
                owners = {owner.node for owner in self.owners(one.membership.map, name)}
                is_all = owners <= {has.member.node for has in holders}
                if TENANTS[name[0]][1] > 1 and one.is_sure(name) and not is_all:
                    said.append(f"{name} is on {[has.member.name for has in holders]}, not on {owners}")
        return said

    def check(self) -> None:
        assert not self.missing()
        assert not self.read_deleted, "a read returned a deleted block"
        there = {(member.name, name) for member, store in self.stores.items() for name in store.blocks}
        undone = {(node, name) for node, name in there - self.from_elsewhere if name in self.deleted}
        assert not undone, "a deletion was undone"
        assert self.network.most_at_once <= AT_ONCE
        for sent in self.network.sent.values():
            for at, (first_s, _) in enumerate(sent):
                total = 0
                for now_s, length in sent[at:]:
                    total += length
                    assert total <= BYTES_PER_S * (now_s - first_s) + AT_ONCE * BYTES + 1


async def history(seed: int, *, pauses: bool = False) -> RepairHistory:
    """A random history; with `pauses`, all leases sometimes end at once."""
    world = RepairHistory(seed)
    await world.etcd.put(b"/triggerkv/test/nodes/lots", lots_record(LOTS), 0, only_new=True, lasting=b"")
    background = [asyncio.create_task(world.etcd.run()), asyncio.create_task(world.watch_drains())]
    for _ in range(FIRST):
        world.begin()
    await asyncio.sleep(2)
    clients = [asyncio.create_task(world.client()) for _ in range(CLIENTS)]
    clients.append(asyncio.create_task(world.reader()))
    for _ in range(STEPS):
        await world.step()
        if pauses and world.rng.random() < 0.4:
            await world.etcd.drop(list(world.etcd.leases))
    await world.settle()
    await asyncio.gather(*clients)
    for task in background:
        if task.done():
            task.result()
    world.check()
    return world


@pytest.mark.timeout(120 + HISTORIES // 5)
@pytest.mark.parametrize("tenth", range(10))
@pytest.mark.parametrize("pauses", [False, True])
def test_after_failures_blocks_are_on_their_owners_and_deleted_ones_are_nowhere(
    tenth: int, *, pauses: bool
) -> None:
    async def one(seed: int) -> None:
        done.append(await history(seed, pauses=pauses))

    done: list[RepairHistory] = []
    for seed in range(tenth, HISTORIES // 2 if pauses else HISTORIES, 10):
        try:
            run(one(seed))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert sum(len(sent) for world in done for sent in world.network.sent.values()) > 0
    assert any(world.deleted for world in done)
    assert any(world.read for world in done)


def test_no_deletion_is_done_while_a_node_that_has_just_joined_is_held_back() -> None:
    """All leases ended at once, so the others' map stays for a moment; it lacks that node, which may have the block."""

    async def one() -> None:
        world = RepairHistory(1)
        leases = asyncio.create_task(world.etcd.run())
        for _ in range(FIRST):
            world.begin()
        await asyncio.sleep(5)
        members = list(world.processes.values())
        await world.etcd.drop(list(world.etcd.leases))
        world.begin()
        held = 0
        for _ in range(100):
            await asyncio.sleep(0.05)
            held += any(one.membership.reported_digest == NO_MAP_DIGEST for one in members)
        assert held > 5
        await asyncio.sleep(10)
        assert (
            len({one.membership.reported_digest for one in world.processes.values()} - {NO_MAP_DIGEST}) == 1
        )
        leases.cancel()

    run(one())


def test_after_a_pause_of_etcd_blocks_with_one_copy_are_copied() -> None:
    async def one() -> None:
        world = RepairHistory(1)
        leases = asyncio.create_task(world.etcd.run())
        for _ in range(2):
            world.begin()
        await asyncio.sleep(60)
        here, there = world.processes.values()
        name = next(iter(TENANTS)), b"k" * 32
        here.put(name, BYTES)
        await world.etcd.drop(list(world.etcd.leases))
        await asyncio.sleep(60)
        assert name in there.store.blocks
        assert 0 < there.upkeep.age_ms <= 60_000
        leases.cancel()

    run(one())


def test_a_failed_copy_is_soon_retried_also_after_a_clean_scan() -> None:
    async def one() -> None:
        world = RepairHistory(1)
        leases = asyncio.create_task(world.etcd.run())
        world.begin()
        world.begin()
        await asyncio.sleep(60)
        here, there = world.processes.values()
        assert here.upkeep.looked == here.membership.since != 0
        name = next(iter(TENANTS)), b"k" * 32
        here.put(name, BYTES)
        world.network.is_cut.add(frozenset((here.member.node, there.member.node)))
        await asyncio.sleep(UPKEEP_EVERY_MS / 1000)
        assert here.upkeep.found.one_copy == 1
        world.network.is_cut.clear()
        await asyncio.sleep(60)
        assert name in there.store.blocks
        leases.cancel()

    run(one())


def test_a_copy_that_is_no_longer_expected_is_not_counted_as_made_and_soon_retried() -> None:
    async def one() -> None:
        world = RepairHistory(1)
        leases = asyncio.create_task(world.etcd.run())
        world.begin()
        await asyncio.sleep(20)
        (here,) = world.processes.values()
        name = next(iter(TENANTS)), b"k" * 32
        here.put(name, BYTES)
        world.begin()
        _, there = world.processes.values()
        waited: Any = there.upkeep.waited
        add = waited.add

        def add_and_drop(*offer: Any) -> None:
            add(*offer)
            waited.cancel([name])  # as if another node had offered it too
            waited.add = add

        waited.add = add_and_drop
        while len(here.membership.map.members) < 2 or here.upkeep.known is None:  # noqa: ASYNC110 - simulated
            await asyncio.sleep(0.05)
        assert (name in there.store.blocks, here.upkeep.known.one_copy) == (False, 1)
        await asyncio.sleep(20)
        assert (name in there.store.blocks, here.upkeep.known.one_copy) == (True, 0)
        leases.cancel()

    run(one())


@pytest.mark.parametrize("seed", range(8))
def test_when_all_nodes_report_no_single_copies_any_node_may_be_lost(seed: int) -> None:
    """One of three is lost, and an empty node joins before, while or after the others have made copies for it."""

    async def one() -> None:
        world = RepairHistory(seed)
        leases = asyncio.create_task(world.etcd.run())
        for _ in range(FIRST):
            world.begin()
        await asyncio.sleep(20)
        stays, lost, _ = world.processes.values()
        names = [(next(iter(TENANTS)), number.to_bytes(4) * 8) for number in range(COUNT)]
        for name in names:
            for owner in world.owners(stays.membership.map, name):
                world.processes[owner.node].put(name, BYTES)
        await lost.end()
        await asyncio.sleep(JOINS_WITHIN_S * seed / 8)
        world.begin()
        nodes = list(world.processes.values())
        until_s = asyncio.get_running_loop().time() + QUIET_S
        while not are_safe(nodes):
            assert asyncio.get_running_loop().time() < until_s
            await asyncio.sleep(0.05)
        assert min(len(world.holders(name)) for name in names) > 1
        leases.cancel()

    run(one())


def are_safe(nodes: Sequence[Process]) -> bool:
    """Whether the nodes' reports show all members, and two copies of every block."""
    reports = [_map_response(one.membership, one.upkeep, one.membership.map, Map(0), "") for one in nodes]
    return members_are(reports, [one.member.node for one in nodes]) and all_copies_are_made(reports)
