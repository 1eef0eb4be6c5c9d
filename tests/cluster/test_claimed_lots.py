"""A node that takes a lot and is lost before it has a standby: who had the lot has all, until the first step."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvstore.cluster.map import DRAINING
from tests.cluster.simulated import run
from tests.cluster.simulated_homes import FAILOVER_S, SimulatedHomes, nothing, orders
from tests.cluster.test_standby_history import append, taken_over

if TYPE_CHECKING:
    from tests.cluster.simulated_homes import Node


class WithReplicas(SimulatedHomes):
    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        super().__init__(1)
        self.delays_s = self.drive_delays_s = (0.001,)


async def former_and_next_home(world: WithReplicas) -> tuple[Node, Node]:
    """The first has made a step of a user's session, and drains; the other is about to take its lot."""
    for name in ("node0", "node1"):
        world.begin(name)
    await asyncio.sleep(FAILOVER_S)
    (home,) = [one for one in world.nodes.values() if await orders(one, "ada")]
    (other,) = [one for one in world.nodes.values() if one is not home]
    for node in world.nodes.values():
        node.moves.hand_overs.note = nothing
    await append(home, await home.primacy.enter("", "ada"), "ada", "v1")
    await home.membership.announce(DRAINING)
    await asyncio.sleep(FAILOVER_S)
    return home, other


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("does", ["nothing", "a step"])
def test_a_node_that_takes_a_lot_and_is_lost(replicas: int, does: str) -> None:
    """What its users had is lost once it may have acknowledged a step alone, and not before: no state comes back."""

    async def history() -> None:
        world = WithReplicas(replicas)
        leases = asyncio.create_task(world.etcd.run())
        home, other = await former_and_next_home(world)
        term = await other.primacy.enter("", "ada")
        if does == "a step":
            assert await taken_over(other, "ada") == ["v1"]
            await append(other, term, "ada", "v2")
        await world.nodes.pop(other.name).end(kindly=False)
        await asyncio.sleep(FAILOVER_S)
        assert await taken_over(home, "ada") == ([] if does == "a step" else ["v1"])
        leases.cancel()

    run(history())
