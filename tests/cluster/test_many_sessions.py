"""A user with so many sessions that they take longer to come than a node may be silent."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cluster.map import DRAINING
from kvstore.errors import NoSpace, WrongEpoch
from kvstore.limits import SESSIONS_MOVE_MS, SESSIONS_SILENT_MS
from kvstore.node.session_moves import SessionMoves
from kvstore.wire import upkeep_pb2 as pb
from tests.cluster.simulated import run
from tests.cluster.simulated_homes import FAILOVER_S, TENANT, SimulatedHomes, nothing
from tests.cluster.test_standby_history import OneAtATime, a_home_and_its_standby

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvstore.cluster.primacy import Term
    from tests.cluster.simulated_homes import Node

EACH_S = SESSIONS_MOVE_MS / 1000 / 4


async def a_home_that_takes(world: SimulatedHomes, count: int) -> tuple[Node, Node, Term, list[str]]:
    """A former home with many sessions, a home, its term, and the sessions that have come there."""
    world.delays_s = world.drive_delays_s = (0.001,)
    former, home, _ = await a_home_and_its_standby(world, "ada")
    sends: Any = former.moves
    takes: Any = home.moves
    taken = list[str]()

    async def sessions_of(_: Any, request: pb.SendSessionsRequest) -> AsyncIterator[pb.TakeSessionRequest]:
        for number in range(count):
            yield pb.TakeSessionRequest(ticket=request.ticket, session=str(number))

    async def store(_: Any, request: pb.TakeSessionRequest) -> bool:
        await asyncio.sleep(EACH_S)
        taken.append(request.session)
        return True

    sends.sessions_of, takes._store, takes.hand_overs.note = sessions_of, store, nothing
    await former.membership.announce(DRAINING)
    await asyncio.sleep(FAILOVER_S)
    return former, home, await home.primacy.enter("", "ada"), taken


def test_sessions_that_keep_coming_are_waited_for() -> None:
    """Or else none would ever be taken or, with one copy, those that have not come in time would be lost."""

    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        count = 2 * SESSIONS_SILENT_MS // int(EACH_S * 1000)
        _, home, term, taken = await a_home_that_takes(world, count)
        await home.moves.arrive(term, TENANT, "ada")
        assert taken == [str(number) for number in range(count)], "each of them once"
        leases.cancel()

    run(history())


def test_a_node_that_is_the_home_no_longer_does_not_go_on_to_take_sessions() -> None:
    """The next home asks it what it has taken, and waits for the end."""

    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        former, home, term, taken = await a_home_that_takes(world, 1000)
        arriving = asyncio.create_task(home.moves.arrive(term, TENANT, "ada"))
        await asyncio.sleep(SESSIONS_MOVE_MS / 1000)
        await former.membership.announce("")
        await asyncio.sleep(2 * SESSIONS_MOVE_MS / 1000)
        assert arriving.done()
        with pytest.raises(WrongEpoch):
            await arriving
        assert 0 < len(taken) < 4 * SESSIONS_MOVE_MS / 1000 / EACH_S
        leases.cancel()

    run(history())


def test_a_home_without_room_for_a_session_takes_none_until_it_has() -> None:
    """Or else the session would be lost, although its former home still has it."""

    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        _, home, term, taken = await a_home_that_takes(world, 3)
        takes: Any = home.moves
        room = 2  # for so many of them

        async def keep(_: Any, __: str, request: pb.TakeSessionRequest, ___: Any) -> bool:
            if len(taken) >= room:
                raise NoSpace("The drive has no room for a session.")
            if request.session not in taken:
                taken.append(request.session)
            return True

        takes._store, takes._keep = partial(SessionMoves._store, takes), keep
        takes._node.watchers = SimpleNamespace(session=nothing)
        for _ in range(2 * SESSIONS_SILENT_MS // 1000):
            with pytest.raises(NoSpace):
                await home.moves.arrive(term, TENANT, "ada")
            await asyncio.sleep(1)
        assert home.primacy.untaken(term, TENANT.name, "ada") is not None
        room = 4
        await home.moves.arrive(term, TENANT, "ada")
        assert taken == ["0", "1", "2"]
        leases.cancel()

    run(history())
