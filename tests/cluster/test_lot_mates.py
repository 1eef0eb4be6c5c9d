"""Users whose sessions are ordered together, because they fall into one lot, in simulated time.

When one of them uses a session, the lot moves, and the others' sessions stay where they are until they come, or their
former home offers them: another node may be lost or drained in between.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cluster.etcd import EtcdAway
from kvstore.cluster.map import DRAINING, Map
from tests.cluster.simulated import run
from tests.cluster.simulated_homes import FAILOVER_S, SEEDS, TENANT, nothing, orders
from tests.cluster.test_standby_history import (
    HARMS,
    Count,
    OneAtATime,
    a_home_and_its_standby,
    append,
    taken_over,
)

if TYPE_CHECKING:
    from tests.cluster.simulated_homes import Node, SimulatedHomes


@pytest.fixture(autouse=True)
def _one_lot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Map, "lot_of", lambda *_: 7)


class Lost(OneAtATime):
    """One node at a time is lost, cut off or drained, with users who come seldom."""

    pause_s = 30.0


class Drained(Lost):
    """Nodes are only drained, and come back."""

    async def harm(self) -> None:
        rng = self.rng
        await self.have_caught_up()
        node = self.nodes[rng.choice(sorted(self.nodes))]
        for state in (DRAINING, ""):
            with suppress(EtcdAway):
                await node.membership.announce(state)
            await asyncio.sleep(7 + rng.random() * rng.choice((12, 40)))


@pytest.mark.parametrize("kind", [Lost, Drained])
def test_no_acknowledged_step_is_lost_whoever_shares_the_lot(kind: type[Lost]) -> None:
    count = Count()
    for seed in range(SEEDS):
        try:
            run(count.history(kind(seed), HARMS, may_lose=False))
        except (AssertionError, ValueError) as error:
            error.add_note(f"seed {seed}")
            raise
    assert count.done > 10 * SEEDS
    assert count.copied > SEEDS / 10


@pytest.mark.parametrize("has_come", [False, True])
def test_a_user_who_had_not_come_before_the_home_was_lost_is_found_at_the_home_before(
    *, has_come: bool
) -> None:
    """The standby knows from whom the lost home had the lot. A user who had come is not found there as they were."""

    async def history() -> None:
        world = OneAtATime(1)
        world.delays_s = (0.01,)
        leases = asyncio.create_task(world.etcd.run())
        first, *_ = await a_home_and_its_standby(world, "ada")
        world.begin("node2")
        await asyncio.sleep(FAILOVER_S)
        for node in world.nodes.values():
            node.moves.hand_overs.note = nothing
        await first.membership.announce(DRAINING)
        await asyncio.sleep(FAILOVER_S)
        home, after = [one for one in world.nodes.values() if one is not first]
        if not await orders(home, "ada"):
            home, after = after, home
        term = await home.primacy.enter("", "ada")
        assert await taken_over(home, "grace") == []
        await append(home, term, "grace", "v2")
        if has_come:
            assert await taken_over(home, "ada") == ["v1"]
            async with home.moves.standbys.changing(term, TENANT, "ada", "chat"):
                pass
            del home.drive["ada"], after.drive["ada"]  # the user removes it
        assert (await home.primacy.amend(term)).standby == after.name
        await world.nodes.pop(home.name).end(kindly=False)
        assert await taken_over(after, "ada") == ([] if has_come else ["v1"])
        assert await taken_over(after, "grace") == ["v2"]
        leases.cancel()

    run(history())


async def lost_to_a_standby_that_had_begun_to_take_it(world: SimulatedHomes, home: Node, after: Node) -> None:
    """A home is back when another node claims its lot; later that is its standby, and then the home is lost."""
    claim = after.way.claim

    async def late(*args: Any, **named: Any) -> bool:
        world.begin(home.name)
        await asyncio.sleep(1)
        return await claim(*args, **named)

    await world.nodes.pop(home.name).end(kindly=False)
    await asyncio.sleep(FAILOVER_S)
    after.way.claim = late  # type: ignore[method-assign]
    assert not await orders(after, "ada")
    after.way.claim = claim  # type: ignore[method-assign]
    await asyncio.sleep(FAILOVER_S)
    home = world.nodes[home.name]
    term = await home.primacy.enter("", "grace")
    (wanted,) = [epoch for _, epoch in after.takeovers._noted if epoch > term.epoch + 1]
    world.cut_off = {after.name}
    await append(home, term, "grace", "v3")
    world.cut_off = set()
    await asyncio.sleep(FAILOVER_S)
    record = await home.primacy.amend(term)
    assert (record.standby, record.copies) == (after.name, wanted)
    await world.nodes.pop(home.name).end(kindly=False)


def test_what_a_standby_had_begun_to_take_over_in_vain_is_not_what_its_home_took_over() -> None:
    """The copies get the epoch that it had wanted."""

    async def history() -> None:
        world = OneAtATime(1)
        world.delays_s = world.drive_delays_s = (0.001,)
        leases = asyncio.create_task(world.etcd.run())
        first, *_ = await a_home_and_its_standby(world, "ada")
        world.begin("node2")
        await asyncio.sleep(FAILOVER_S)
        for node in world.nodes.values():
            node.moves.hand_overs.note = nothing
        await first.membership.announce(DRAINING)
        await asyncio.sleep(FAILOVER_S)
        home, after = [one for one in world.nodes.values() if one is not first]
        if not await orders(home, "ada"):
            home, after = after, home
        assert await taken_over(home, "grace") == []
        await append(home, await home.primacy.enter("", "grace"), "grace", "v2")
        await lost_to_a_standby_that_had_begun_to_take_it(world, home, after)
        assert await taken_over(after, "ada") == ["v1"]
        assert await taken_over(after, "grace") == ["v2", "v3"]
        leases.cancel()

    run(history())


@pytest.mark.parametrize("has_come", [False, True])
def test_a_home_knows_of_the_home_before_the_one_that_it_had_a_lot_from(*, has_come: bool) -> None:
    """A lot goes to another node and comes back. If that node is lost then, only its answer to another user says so."""

    async def history() -> None:
        world = OneAtATime(1)
        world.delays_s = world.drive_delays_s = (0.001,)
        leases = asyncio.create_task(world.etcd.run())
        home, *_ = await a_home_and_its_standby(world, "ada")
        world.begin("node2")
        await asyncio.sleep(FAILOVER_S)
        (home,) = [one for one in world.nodes.values() if await orders(one, "ada")]
        for node in world.nodes.values():
            node.moves.hand_overs.note = nothing
        assert await taken_over(home, "ada") == ["v1"]
        await append(home, await home.primacy.enter("", "ada"), "ada", "v2")
        await home.membership.announce(DRAINING)
        await asyncio.sleep(FAILOVER_S)
        (other,) = [one for one in world.nodes.values() if await orders(one, "ada")]
        if has_come:
            assert await taken_over(other, "ada") == ["v1", "v2"]
            await other.moves.standbys._touch(await other.primacy.enter("", "ada"))
            del other.drive["ada"]  # the user removes it
        await home.membership.announce("")
        await asyncio.sleep(FAILOVER_S)
        assert await taken_over(home, "grace") == []
        await append(home, await home.primacy.enter("", "grace"), "grace", "v3")
        await world.nodes.pop(other.name).end(kindly=False)
        await asyncio.sleep(FAILOVER_S)
        assert home.moves.standbys.lots_alone == 0
        assert await taken_over(home, "ada") == ([] if has_come else ["v1", "v2"])
        leases.cancel()

    run(history())
