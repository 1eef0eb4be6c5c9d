"""A node that has just started is asked for sessions, or to keep copies, before it knows its cluster."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kvstore.cluster.map import DRAINING
from kvstore.errors import WrongEpoch
from kvstore.wire import upkeep_pb2 as pb
from tests.cluster.simulated import run
from tests.cluster.simulated_homes import FAILOVER_S, TENANT, Node, SimulatedHomes, nothing, orders
from tests.cluster.test_standby_history import OneAtATime, a_home_and_its_standby, append

if TYPE_CHECKING:
    from kvstore.cluster.primacy import Term


async def restarted(world: SimulatedHomes, node: Node) -> None:
    """A node's process is replaced by another, which others still have on their maps."""
    await world.nodes.pop(node.name).end(kindly=False)
    world.begin(node.name)


async def taken_at_last(node: Node, term: Term) -> list[str]:
    for _ in range(60):
        with suppress(WrongEpoch):
            await node.moves.arrive(term, TENANT, "ada")
            break
        await asyncio.sleep(0.5)
    epoch, values = node.drive.get("ada", (-1, []))
    return values if epoch == term.epoch else []


def a_fast_world() -> SimulatedHomes:
    world = OneAtATime(1)
    world.delays_s = world.drive_delays_s = (0.001,)
    return world


@pytest.mark.parametrize("has_taken", [True, False])
def test_a_former_home_that_has_just_started_sends_sessions_when_it_knows_its_cluster(
    *, has_taken: bool
) -> None:
    """It knows of etcd's losses, by which its epochs are higher, and of the lots, by which it knows its takeovers."""

    async def history() -> None:
        world = a_fast_world()
        leases = asyncio.create_task(world.etcd.run())
        await a_home_and_its_standby(world, "grace")
        await world.etcd.restore()
        await asyncio.sleep(FAILOVER_S)
        (home,) = [one for one in world.nodes.values() if await orders(one, "ada")]
        (other,) = [one for one in world.nodes.values() if one is not home]
        for one in (home, other):
            one.moves.hand_overs.note = nothing
        await append(home, await home.primacy.enter("", "ada"), "ada", "v1")
        former, state = home, DRAINING
        for _ in range(1 if has_taken else 2):
            await home.membership.announce(state)
            await asyncio.sleep(FAILOVER_S)
            former, state = (home, "") if state else (other, state)
            term = await (other if former is home else home).primacy.enter("", "ada")
        await restarted(world, former)
        assert await taken_at_last(other if former is home else home, term) == ["v1"]
        leases.cancel()

    run(history())


def test_a_node_that_has_just_started_keeps_no_copies_in_an_epoch_that_it_can_not_know() -> None:
    async def history() -> None:
        world = a_fast_world()
        leases = asyncio.create_task(world.etcd.run())
        home, standby, term = await a_home_and_its_standby(world, "ada")
        record = await home.primacy.amend(term)
        started = Node(world.etcd, world.rng, standby.name, {}, world=world)
        started.membership._member = None  # it has not reached itself so far, and joins later
        request = pb.FollowSessionsRequest(
            node=record.node, lease=record.lease, lot=term.lot, epoch=record.epoch, copies=record.copies
        )
        answer = await started.moves.copies.follow(request)
        assert "does not know its cluster yet" in answer.refused
        await started.end(kindly=False)
        leases.cancel()

    run(history())


def test_sessions_are_not_sent_or_copied_by_epochs_of_a_history_that_a_node_does_not_know() -> None:
    """Etcd was restored from a backup, and one of two nodes has heard of it: their epochs are not the same."""

    async def history() -> None:
        world = a_fast_world()
        leases = asyncio.create_task(world.etcd.run())
        home, standby, term = await a_home_and_its_standby(world, "ada")
        await append(home, term, "ada", "v2")
        record = await home.primacy.amend(term)
        for asked in (home.primacy.history, "", "another"):
            sending = pb.SendSessionsRequest(node=standby.name, user="ada", epoch=record.epoch, history=asked)
            following = pb.FollowSessionsRequest(
                node=record.node,
                lease=record.lease,
                lot=term.lot,
                epoch=record.epoch,
                copies=record.copies,
                history=asked,
            )
            answer = await standby.moves.copies.follow(following)
            if asked == "another":
                assert "another history" in answer.refused
                with pytest.raises(WrongEpoch, match="another history"):
                    await home.moves.send(TENANT, sending)
            else:  # empty: of an earlier version
                assert answer.ticket
                assert not answer.refused
                await home.moves.send(TENANT, sending)
        leases.cancel()

    run(history())
