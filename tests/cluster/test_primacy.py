"""Which node orders a user's sessions, in simulated time: nodes join, leave and are cut off.

The history is judged as a whole.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from kvstore.cluster.etcd import Found
from kvstore.cluster.etcd_history import EtcdMemory
from kvstore.cluster.map import DRAINING, Member
from kvstore.cluster.takeovers import Takeover
from kvstore.errors import DeadlineExceeded
from kvstore.limits import SESSIONS_EPOCHS_MAX, SESSIONS_KNOWN_MS, SESSIONS_MOVE_MS, SESSIONS_TAKING_MS
from kvstore.wire import upkeep_pb2 as pb
from tests.cluster.history import End, faults
from tests.cluster.simulated import HISTORY, FakeEtcd, run
from tests.cluster.simulated_homes import (
    CLIENTS,
    FAILOVER_S,
    SEEDS,
    STEPS,
    TENANT,
    Node,
    SimulatedHomes,
    orders,
)


@pytest.mark.parametrize("fifth", range(5))
def test_one_node_orders_each_session_soon_after_failures(fifth: int) -> None:
    async def history(seed: int) -> tuple[int, int]:
        world = SimulatedHomes(seed)
        leases = asyncio.create_task(world.etcd.run())
        for name in sorted(world.drives)[:3]:
            world.begin(name)
        clients = [asyncio.create_task(world.client(number)) for number in range(CLIENTS)]
        for _ in range(STEPS):
            await world.harm()
        await world.settle()
        world.is_over = True
        await asyncio.gather(*clients)
        await world.check()
        found = faults(world.history, may_lose_sessions=True)
        assert not found, found
        leases.cancel()
        return sum(one.end is End.DONE for one in world.history), world.moved

    done = moved = 0

    async def counted(seed: int) -> None:
        nonlocal done, moved
        of_seed = await history(seed)
        done, moved = done + of_seed[0], moved + of_seed[1]

    for seed in range(fifth, SEEDS, 5):
        try:
            run(counted(seed))
        except (AssertionError, ValueError) as error:
            error.add_note(f"seed {seed}")
            raise
    assert done > 10 * SEEDS / 5
    assert moved > 0, "sessions follow their users"


def test_a_node_that_loses_contact_with_etcd_stops_ordering_before_another_starts() -> None:
    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        nodes = [Node(etcd, rng, name, {}) for name in ("node1", "node2")]
        await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
        users = [f"user{number}" for number in range(20)]
        (of_first, *_) = [user for user in users if await orders(nodes[0], user)]
        assert not await orders(nodes[1], of_first)
        nodes[0].way.is_away = True
        cut_s, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        term = await nodes[0].primacy.enter("", of_first)
        while await orders(nodes[0], of_first):
            assert not await orders(nodes[1], of_first)
            await asyncio.sleep(0.1)
        assert loop.time() - cut_s <= SESSIONS_KNOWN_MS / 1000 + 0.2
        while not await orders(nodes[1], of_first):
            assert loop.time() - cut_s < FAILOVER_S
            await asyncio.sleep(0.1)
        assert (await nodes[1].primacy.enter("", of_first)).epoch == 1
        with pytest.raises(DeadlineExceeded, match="done too late"):
            await nodes[0].primacy.check(term, "", of_first)
        nodes[0].way.is_away = False
        await asyncio.sleep(FAILOVER_S)
        assert (await nodes[0].primacy.enter("", of_first)).epoch == 2, (
            "what it had of the first is not what there is"
        )
        leases.cancel()

    run(history())


def test_a_new_home_waits_until_the_old_one_must_have_noticed() -> None:
    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        nodes = [Node(etcd, rng, name, {}) for name in ("node1", "node2")]
        await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
        of_first = [user for user in map(str, range(20)) if await orders(nodes[0], user)]
        nodes[0].way.is_away = True
        key = b"/triggerkv/test/members/node1"  # it drains, and can't hear of it; no lease ends
        value, lease = etcd.values[key]
        draining = replace(Member.decoded(value), state=DRAINING).encoded()
        await etcd.put(key, draining, lease, only_new=False, lasting=b"")
        for _ in range(200):
            user = rng.choice(of_first)
            both = [await orders(node, user) for node in reversed(nodes)]
            assert not all(both)
            await asyncio.sleep(0.05)
        assert both == [True, False]

    run(history())


def test_a_restarted_node_continues_its_epoch_if_nobody_took_its_place() -> None:
    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        node = Node(etcd, rng, "node1", {})
        await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
        assert (await node.primacy.enter("", "ada")).epoch == 0
        await node.end(kindly=False)
        await asyncio.sleep(60)
        again = Node(etcd, rng, "node1", {})
        await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
        assert (await again.primacy.enter("", "ada")).epoch == 0
        leases.cancel()

    run(history())


def test_a_node_that_was_cut_off_waits_like_a_new_one() -> None:
    """Its lease survived; another may have taken its place meanwhile, and may have left it again."""

    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        node, loop = Node(etcd, rng, "node1", {}), asyncio.get_running_loop()
        await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
        node.way.tells_no_latest = True
        await asyncio.sleep(SESSIONS_KNOWN_MS / 1000 + 1)
        assert not await orders(node, "ada")
        lot = node.membership.map.lot_of(b"", b"ada")
        etcd.lots[node.way.reach.lots + b"%04d" % lot] = Found(b'["another",7,3]', 1)
        back_s, node.way.tells_no_latest = loop.time(), False
        for _ in range(100):
            if await orders(node, "ada"):
                break
            await asyncio.sleep(0.1)
        assert SESSIONS_TAKING_MS / 1000 - 1 < loop.time() - back_s < SESSIONS_TAKING_MS / 1000 + 5
        assert (await node.primacy.enter("", "ada")).epoch == 4
        leases.cancel()

    run(history())


async def two_nodes(etcd: FakeEtcd, rng: random.Random) -> tuple[dict[str, EtcdMemory], dict[str, Node], str]:
    """What two nodes remember of etcd, the nodes, and a user whose sessions node1 orders."""
    memories = {name: EtcdMemory("test") for name in ("node1", "node2")}
    nodes = {name: Node(etcd, rng, name, {}, memory) for name, memory in memories.items()}
    await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
    (user, *_) = [user for user in map(str, range(20)) if await orders(nodes["node1"], user)]
    return memories, nodes, user


@pytest.mark.parametrize("was_restored", [False, True])
def test_blocks_stored_before_etcd_lost_data_are_of_a_past_epoch(*, was_restored: bool) -> None:
    """Another node ordered the user's sessions meanwhile, and etcd no longer knows it."""

    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        memories, nodes, user = await two_nodes(etcd, rng)
        assert (await nodes["node1"].primacy.enter("", user)).epoch == 0
        backup = etcd.state()
        await nodes["node1"].end(kindly=False)
        await asyncio.sleep(FAILOVER_S)
        assert (await nodes["node2"].primacy.enter("", user)).epoch == 1
        await (etcd.restore(backup) if was_restored else etcd.restore())
        nodes["node1"] = Node(etcd, rng, "node1", {}, memories["node1"])
        until_s = asyncio.get_running_loop().time() + FAILOVER_S
        epochs = set()
        while asyncio.get_running_loop().time() < until_s:
            if await orders(nodes["node1"], user):
                epochs.add((await nodes["node1"].primacy.enter("", user)).epoch)
            await asyncio.sleep(0.1)
        assert epochs
        assert min(epochs) >= SESSIONS_EPOCHS_MAX
        leases.cancel()

    run(history())


def test_a_backup_without_its_history_is_known_to_be_old_by_nodes_that_saw_nothing_later() -> None:
    """As docs/cluster.md advises for a backup that no node may recognize."""

    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        memories, nodes, user = await two_nodes(etcd, rng)
        await nodes["node1"].end(kindly=False)
        backup = etcd.state()
        await asyncio.sleep(FAILOVER_S)
        assert (await nodes["node2"].primacy.enter("", user)).epoch == 1
        await nodes["node2"].end(kindly=False)
        for part in (1, 2):
            for key in [key for key in backup[part] if key.startswith(HISTORY)]:
                del backup[part][key]
        await etcd.restore(backup)
        node = Node(etcd, rng, "node1", {}, memories["node1"])
        await asyncio.sleep(FAILOVER_S)
        assert (await node.primacy.enter("", user)).epoch >= SESSIONS_EPOCHS_MAX
        leases.cancel()

    run(history())


def test_a_lot_without_a_record_is_not_taken_while_a_node_may_rely_on_data_that_etcd_lost() -> None:
    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        nodes = [Node(etcd, rng, name, {}) for name in ("node1", "node2")]
        await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
        (user, *_) = [user for user in map(str, range(20)) if await orders(nodes[0], user)]
        nodes[0].way.is_away = True  # it hears nothing of the loss
        await etcd.restore()
        both = [False, False]
        for _ in range(int(FAILOVER_S / 0.05)):
            both = [await orders(node, user) for node in nodes]
            assert not all(both)
            await asyncio.sleep(0.05)
        assert both == [False, True]
        leases.cancel()

    run(history())


def test_a_first_step_waits_for_a_session_that_is_being_stored_when_its_time_is_up() -> None:
    async def one() -> None:
        world, stored = SimulatedHomes(1), list[str]()
        world.drive_delays_s = (0.01,)
        leases = asyncio.create_task(world.etcd.run())
        world.begin("node0")
        await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
        primacy, moves = world.nodes["node0"].primacy, world.nodes["node0"].moves
        term = await primacy.enter("", "ada")
        await primacy._takeovers.begin(*term, Takeover("node1", 0, "", 0))
        assert primacy.untaken(term, "", "ada") == ("node1", 0, "", 0)
        assert primacy.untaken(term._replace(epoch=term.epoch + 1), "", "ada") is None, (
            "that of another epoch doesn't count"
        )

        async def ask(ticket: int, *_: object) -> bool:
            await moves.take_one(pb.TakeSessionRequest(ticket=ticket, session="chat"))
            return True

        async def store(_: object, request: pb.TakeSessionRequest) -> bool:
            await asyncio.sleep(2 * SESSIONS_MOVE_MS / 1000)
            stored.append(request.session)
            return True

        moves._ask, moves._store = ask, store  # type: ignore[method-assign,assignment]
        began_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(moves.arrive(term, TENANT, "ada") for _ in range(3)))
        assert stored == ["chat"], "once, and before the first step"
        assert asyncio.get_running_loop().time() - began_s < 2 * SESSIONS_MOVE_MS / 1000 + 0.1
        await moves.arrive(term, TENANT, "ada")
        assert stored == ["chat"]
        leases.cancel()

    run(one())
