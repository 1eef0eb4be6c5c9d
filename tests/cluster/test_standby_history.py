"""Sessions with a standby, in simulated time: one node at a time is lost, cut off or drained, and nothing is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvstore.cluster.etcd import EtcdAway, Found
from kvstore.cluster.map import DRAINING
from kvstore.cluster.primacy import Record, Term
from kvstore.cluster.takeovers import Takeover
from kvstore.errors import DeadlineExceeded, WrongEpoch
from kvstore.limits import SESSIONS_TAKING_MS
from kvstore.wire import upkeep_pb2 as pb
from tests.cluster.history import End, faults
from tests.cluster.simulated import run
from tests.cluster.simulated_homes import (
    CLIENTS,
    FAILOVER_S,
    SEEDS,
    STEPS,
    TENANT,
    Node,
    SimulatedHomes,
    nothing,
    orders,
)

HARMS = 6


class OneAtATime(SimulatedHomes):
    """Nodes with two copies of each session; when one is away, the others are there, and have caught up."""

    replicas = 2
    delays_s: tuple[float, ...] = (*(0.01,) * 30, 0.3, 2.0)

    async def have_caught_up(self) -> None:
        for _ in range(300):
            if not any(
                node.moves.standbys.lots_alone or node.moves.unknowing_homes for node in self.nodes.values()
            ):
                break
            await asyncio.sleep(0.1)

    async def harm(self) -> None:
        rng = self.rng
        await self.have_caught_up()
        name = rng.choice(sorted(self.nodes))
        node = self.nodes[name]
        kind = rng.choice(("killed", "stopped", "restarted", "cut off", "no etcd", "drained", "joins"))
        if kind == "joins" and (new := sorted(self.drives.keys() - self.nodes.keys())):
            self.begin(new[0])
        elif kind in {"killed", "stopped", "restarted"}:
            del self.nodes[name]
            await node.end(kindly=kind == "stopped")
        elif kind == "cut off":  # from the other nodes
            self.cut_off = {name}
        elif kind == "no etcd":
            node.way.is_away = True
        else:
            with suppress(EtcdAway):
                await node.membership.announce(DRAINING)
        await asyncio.sleep(rng.random() * (1 if kind == "restarted" else rng.choice((3, 12, 40))))
        if name not in self.nodes:
            self.begin(name)
        self.nodes[name].way.is_away = False
        self.cut_off = set()
        with suppress(EtcdAway):
            await self.nodes[name].membership.announce("")
        await asyncio.sleep(FAILOVER_S)


class TakenInTwoLives(OneAtATime):
    """One node at a time is lost; those that take its sessions are restarted when they have begun to."""

    restarts = 0

    async def harm(self) -> None:
        rng, loop = self.rng, asyncio.get_running_loop()
        await self.have_caught_up()
        lost = rng.choice(sorted(self.nodes))
        await self.nodes.pop(lost).end(kindly=False)
        until_s, restarted = loop.time() + 2 * FAILOVER_S, set[str]()
        while loop.time() < until_s:
            for name, node in list(self.nodes.items()):
                taking = [one for one in node.takeovers._noted.values() if not one.users]
                if taking and name not in restarted and rng.random() < 0.3:
                    restarted.add(name)
                    del self.nodes[name]
                    await node.end(kindly=False)
                    await asyncio.sleep(rng.random())
                    self.begin(name)
                    self.restarts += 1
            await asyncio.sleep(0.02)
        self.begin(lost)
        await asyncio.sleep(FAILOVER_S)


class AllAtOnce(SimulatedHomes):
    """The same under any failures at any time, of etcd's data too."""

    replicas = 2


class Count:
    def __init__(self) -> None:
        self.done = self.copied = self.removed = 0

    async def history(self, world: SimulatedHomes, harms: int, *, may_lose: bool) -> None:
        world.offers_copies = True
        leases = asyncio.create_task(world.etcd.run())
        for name in sorted(world.drives)[:3]:
            world.begin(name)
        clients = [asyncio.create_task(world.client(number)) for number in range(CLIENTS)]
        await asyncio.sleep(FAILOVER_S)
        for _ in range(harms):
            await world.harm()
        await world.settle()
        world.is_over = True
        await asyncio.gather(*clients)
        await world.check()
        found = faults(world.history, may_lose_sessions=may_lose)
        assert not found, found
        leases.cancel()
        self.done += sum(one.end is End.DONE for one in world.history)
        self.copied += world.copied
        self.removed += world.removed


@pytest.mark.parametrize("fifth", range(5))
def test_no_acknowledged_step_is_lost_with_one_node(fifth: int) -> None:
    count = Count()
    for seed in range(fifth, SEEDS, 5):
        try:
            run(count.history(OneAtATime(seed), HARMS, may_lose=False))
        except (AssertionError, ValueError) as error:
            error.add_note(f"seed {seed}")
            raise
    assert count.done > 10 * SEEDS / 5
    assert count.copied > SEEDS / 5
    assert count.removed > 0, "what is over is removed"


@pytest.mark.parametrize("fifth", range(5))
def test_no_acknowledged_step_is_lost_with_a_node_whose_successor_is_restarted(fifth: int) -> None:
    count, restarts = Count(), 0
    for seed in range(fifth, SEEDS // 2, 5):
        world = TakenInTwoLives(seed)
        try:
            run(count.history(world, HARMS // 2, may_lose=False))
        except (AssertionError, ValueError) as error:
            error.add_note(f"seed {seed}")
            raise
        restarts += world.restarts
    assert restarts > 0


@pytest.mark.parametrize(("is_restarted", "is_told"), [(True, True), (True, False), (False, False)])
def test_a_new_home_takes_sessions_whatever_happened_when_it_had_claimed_them(
    *, is_restarted: bool, is_told: bool
) -> None:
    """Its process may have ended, and etcd's answer may have been lost."""

    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, _ = await a_home_and_its_standby(world, "ada")
        await world.nodes.pop(home.name).end(kindly=False)
        await asyncio.sleep(FAILOVER_S)
        standby.way.loses_claims = not is_told
        if is_told:
            assert await orders(standby, "ada")
        else:
            assert not await orders(standby, "ada")
        standby.way.loses_claims = False
        if is_restarted:
            await world.nodes.pop(standby.name).end(kindly=False)
            world.begin(standby.name)
        assert await taken_over(world.nodes[standby.name], "ada") == ["v1"]
        leases.cancel()

    run(history())


def test_what_a_new_home_removed_before_it_was_restarted_does_not_come_back() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, _ = await a_home_and_its_standby(world, "ada")
        copies = standby.drive["ada"]
        await world.nodes.pop(home.name).end(kindly=False)
        assert await taken_over(standby, "ada") == ["v1"]
        standby.drive["ada"] = (
            copies  # that of its own epoch is removed; the copy that it was taken from is there
        )
        await world.nodes.pop(standby.name).end(kindly=False)
        world.begin(standby.name)
        assert await taken_over(world.nodes[standby.name], "ada") == []
        leases.cancel()

    run(history())


@pytest.mark.parametrize("fifth", range(5))
def test_a_standby_that_lacks_a_step_is_never_believed(fifth: int) -> None:
    """Two nodes may be lost at a time, and then sessions are; but none goes back to what it was before."""
    count = Count()
    for seed in range(fifth, SEEDS // 2, 5):
        try:
            run(count.history(AllAtOnce(seed), STEPS, may_lose=True))
        except (AssertionError, ValueError) as error:
            error.add_note(f"seed {seed}")
            raise
    assert count.copied > SEEDS / 10


async def a_home_and_its_standby(world: SimulatedHomes, user: str) -> tuple[Node, Node, Term]:
    """Two nodes, of which one has acknowledged a step."""
    for name in ("node0", "node1"):
        world.begin(name)
    await asyncio.sleep(SESSIONS_TAKING_MS / 1000 + 2)
    (home,) = [one for one in world.nodes.values() if await orders(one, user)]
    (standby,) = [one for one in world.nodes.values() if one is not home]
    term = await home.primacy.enter("", user)
    await append(home, term, user, "v1")
    record = await home.primacy.amend(term)
    assert (record.standby, standby.drive[user]) == (standby.name, (record.copies, ["v1"]))
    return home, standby, term


async def append(home: Node, term: Term, user: str, value: str) -> None:
    async with home.moves.standbys.changing(term, TENANT, user, "chat"):
        home.drive[user] = term.epoch, [*home.drive.get(user, (0, []))[1], value]


async def taken_over(node: Node, user: str) -> list[str]:
    """A user's session, when the node orders it; its drive may be too slow for the first attempts."""
    await asyncio.sleep(FAILOVER_S)
    term = await node.primacy.enter("", user)
    for _ in range(5):
        with suppress(WrongEpoch):
            await node.moves.arrive(term, TENANT, user)
            break
    epoch, values = node.drive.get(user, (-1, []))
    return values if epoch == term.epoch else []


def test_a_home_that_is_one_again_has_nothing_removed_before_it_has_taken_it() -> None:
    """Another user of the lot has it find a standby, which is the node that has the user's sessions."""

    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, _ = await a_home_and_its_standby(world, "ada")
        await home.membership.announce(DRAINING)
        assert await taken_over(standby, "ada") == ["v1"]
        standby.moves.hand_overs.note = nothing
        await append(standby, await standby.primacy.enter("", "ada"), "ada", "v2")
        await home.membership.announce("")
        await asyncio.sleep(FAILOVER_S)
        term = await home.primacy.enter("", "ada")
        await home.moves.standbys.prepare(term, TENANT, "grace")
        assert (await home.primacy.amend(term)).standby == standby.name
        assert await taken_over(home, "ada") == ["v1", "v2"]
        async with home.moves.standbys.reading(term, TENANT, "ada"):
            pass
        record = await home.primacy.amend(term)
        assert (record.standby, standby.drive["ada"]) == (standby.name, (record.copies, ["v1", "v2"]))
        await world.nodes.pop(home.name).end(kindly=False)
        assert await taken_over(standby, "ada") == ["v1", "v2"], (
            "the standby has what came after it was named"
        )
        leases.cancel()

    run(history())


async def moved(home: Node, other: Node, times: int) -> None:
    """Move a user's lot between two nodes, of which neither knows that there are other users in it."""
    for _ in range(times):
        for one in (home, other):
            one.moves.hand_overs.note = nothing
        await home.membership.announce(DRAINING)
        await asyncio.sleep(FAILOVER_S)
        term = await other.primacy.enter("", "ada")
        await other.moves.standbys.prepare(term, TENANT, "grace")
        await home.membership.announce("")
        await asyncio.sleep(FAILOVER_S)
        if not await orders(home, "ada"):
            return
        term = await home.primacy.enter("", "ada")
        await home.moves.standbys.prepare(term, TENANT, "grace")


def test_sessions_that_no_home_has_taken_are_found_wherever_they_are() -> None:
    """Other users of the lot have it move; the user comes back after many moves."""

    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, other, _ = await a_home_and_its_standby(world, "ada")
        await moved(home, other, 4)
        assert (await home.primacy.enter("", "ada")).epoch > 8
        assert await taken_over(home, "ada") == ["v1"]
        leases.cancel()

    run(history())


def test_a_silent_home_that_has_not_taken_sessions_is_waited_for() -> None:
    """Its standby can't know that an earlier home has them."""

    async def history() -> None:
        world = OneAtATime(1)
        world.delays_s = (0.01,)
        leases = asyncio.create_task(world.etcd.run())
        home, other, _ = await a_home_and_its_standby(world, "ada")
        await moved(home, other, 2)
        term = await home.primacy.enter("", "ada")
        world.cut_off = {other.name}
        for _ in range(2):
            with pytest.raises(WrongEpoch, match="former home or its standby"):
                await home.moves.arrive(term, TENANT, "ada")
        world.cut_off = set()
        assert await taken_over(home, "ada") == ["v1"]
        leases.cancel()

    run(history())


def test_what_a_home_has_taken_in_part_is_sent_to_the_next_one() -> None:
    """It may have come from the home's own copies, which it has replaced."""

    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, other, term = await a_home_and_its_standby(world, "ada")
        await home.primacy._takeovers.begin(*term, Takeover(home.name, 0, "", 0))
        home.moves.hand_overs.note = nothing
        await home.membership.announce(DRAINING)
        assert await taken_over(other, "ada") == ["v1"]
        leases.cancel()

    run(history())


def test_what_a_former_home_could_not_ask_etcd_about_is_asked_again() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, other, _ = await a_home_and_its_standby(world, "ada")
        other.way.is_away = True
        assert not await other.moves.leftovers.note_taken("", "ada", home.name, 0)
        other.way.is_away = False
        assert await other.moves.leftovers.note_taken("", "ada", home.name, 0)
        leases.cancel()

    run(history())


def test_a_term_of_an_earlier_history_of_etcd_has_no_epoch_for_other_nodes() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, _, term = await a_home_and_its_standby(world, "ada")
        await world.etcd.restore()
        await asyncio.sleep(FAILOVER_S)
        with pytest.raises(WrongEpoch, match="has lost its data"):
            home.primacy.recorded_epoch(term)
        leases.cancel()

    run(history())


def test_a_ticket_is_void_once_the_lot_has_another_home() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, term = await a_home_and_its_standby(world, "ada")
        record = await home.primacy.amend(term)
        key = home.way.reach.lots + b"%04d" % term.lot
        later = Record("node3", 77, record.next_epoch)
        world.etcd.lots[key] = Found(later.encoded(), world.etcd.lots[key].revision + 1)
        request = pb.SendSessionsRequest(node="node3", user="ada", epoch=record.copies)
        await standby.moves.send(TENANT, request)
        with pytest.raises(DeadlineExceeded, match="not at the node's standby"):
            await append(home, term, "ada", "v2")
        assert standby.drive["ada"] == (record.copies, ["v1"])
        leases.cancel()

    run(history())


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_standby_has_all_acknowledged_steps_or_none(*, is_cut_off: bool) -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, term = await a_home_and_its_standby(world, "ada")
        world.cut_off = {standby.name} if is_cut_off else set()
        await append(home, term, "ada", "v2")
        assert home.moves.standbys.lots_alone == is_cut_off
        del world.nodes[home.name]
        await home.end(kindly=False)
        world.cut_off = set()
        assert await taken_over(standby, "ada") == ([] if is_cut_off else ["v1", "v2"])
        leases.cancel()

    run(history())


def test_a_standby_that_was_away_gets_what_it_has_missed() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, term = await a_home_and_its_standby(world, "ada")
        world.cut_off = {standby.name}
        await append(home, term, "ada", "v2")
        world.cut_off = set()
        await asyncio.sleep(FAILOVER_S)
        assert home.moves.standbys.lots_alone == 0
        assert standby.drive["ada"] == ((await home.primacy.amend(term)).copies, ["v1", "v2"])
        leases.cancel()

    run(history())


def test_a_read_waits_for_the_step_under_way() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, term = await a_home_and_its_standby(world, "ada")
        world.cut_off = {standby.name}
        change = asyncio.create_task(append(home, term, "ada", "v2"))
        await asyncio.sleep(0.2)
        assert home.drive["ada"] == (term.epoch, ["v1", "v2"])
        assert not change.done()
        async with home.moves.standbys.reading(term, TENANT, "ada"):
            assert change.done(), "what a read has seen is not undone later"
        leases.cancel()

    run(history())


def test_no_first_step_is_made_before_the_standby_of_a_lost_home_has_sent_what_it_has() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        world.delays_s = (0.01,)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, _ = await a_home_and_its_standby(world, "another")
        (user, *_) = [user for user in map(str, range(20)) if await orders(home, user)]
        term = await home.primacy.enter("", user)
        await home.primacy._takeovers.begin(*term, Takeover("lost", 0, standby.name, 1))
        standby.drive[user] = 1, ["v1"]
        world.cut_off = {standby.name}
        with pytest.raises(WrongEpoch, match="former home or its standby"):
            await home.moves.arrive(term, TENANT, user)
        world.cut_off = set()
        await home.moves.arrive(term, TENANT, user)
        assert home.drive[user] == (term.epoch, ["v1"])
        leases.cancel()

    run(history())


def test_a_step_whose_end_at_the_standby_is_unknown_is_sent_again_as_a_whole() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, term = await a_home_and_its_standby(world, "ada")
        standby.drive["ada"] = standby.drive["ada"][0], []  # it has refused a step, say
        await append(home, term, "ada", "v2")
        assert standby.drive["ada"] == ((await home.primacy.amend(term)).copies, ["v1", "v2"])
        leases.cancel()

    run(history())


def test_a_step_whose_caller_has_given_up_is_sent_before_it_is_seen() -> None:
    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, term = await a_home_and_its_standby(world, "ada")

        async def given_up() -> None:
            async with home.moves.standbys.changing(term, TENANT, "ada", "chat"):
                home.drive["ada"] = term.epoch, ["v1", "v2"]
                await asyncio.sleep(1)

        step = asyncio.create_task(given_up())
        await asyncio.sleep(0.5)
        step.cancel()
        async with home.moves.standbys.reading(term, TENANT, "ada"):
            assert standby.drive["ada"][1] == ["v1", "v2"]
        leases.cancel()

    run(history())
