"""Users whose sessions are ordered together, because they fall into one lot, in simulated time.

When one of them uses a session, the lot moves, and the others' sessions stay where they are until they come, or their
former home offers them: another node may be lost or drained in between.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

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
