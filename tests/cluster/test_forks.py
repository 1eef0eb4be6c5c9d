"""A fork reads one session and makes another: what it says when its node may be the home no longer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.node.sessions_service import SessionsService
from kvstore.wire import sessions_pb2 as pb
from tests.cluster.simulated import run
from tests.cluster.simulated_homes import TENANT
from tests.cluster.test_standby_history import OneAtATime, a_home_and_its_standby

if TYPE_CHECKING:
    from tests.cluster.simulated_homes import Node


class Aborted(Exception):
    """How a call has ended."""


class Context:
    """A caller."""

    async def abort(self, code: grpc.StatusCode, *_: Any) -> None:
        raise Aborted(code)


def service_of(node: Node, begun: list[str]) -> SessionsService:
    """The service of a simulated node, with one session."""
    real: Any = SimpleNamespace(
        membership=node.membership, upkeep=SimpleNamespace(moves=node.moves), counters=None
    )
    gate: Any = SimpleNamespace(tenants=SimpleNamespace(placed_as=lambda name: name))
    service: Any = SessionsService(real, gate)

    async def changed(*_: Any) -> int:
        begun.append("fork")
        epoch, values = node.drive["ada"]
        node.drive["ada"] = epoch, [*values, "fork"]
        return 1

    service._enter = lambda *_: TENANT
    service._stored = lambda *_: SimpleNamespace(manifest=SimpleNamespace(blocks=1))
    service._changed = changed
    made: SessionsService = service
    return made


@pytest.mark.parametrize("is_over", [False, True])
def test_a_fork_that_was_done_is_not_said_to_have_not_been_done(*, is_over: bool) -> None:
    """The standby does not answer, nor does etcd, so the step may not be acknowledged."""

    async def history() -> None:
        world = OneAtATime(1)
        leases = asyncio.create_task(world.etcd.run())
        home, standby, _ = await a_home_and_its_standby(world, "ada")
        if is_over:
            await asyncio.sleep(1)
            home.primacy._known_ns = 0  # etcd has not answered for a while
        world.cut_off, home.way.is_away = {standby.name}, True
        begun = list[str]()
        source = pb.SessionName(user="ada", session="chat", map_revision=1)
        fork = pb.SessionName(user="ada", session="fork", map_revision=1)
        call: Any = service_of(home, begun).ForkSession
        with pytest.raises(Aborted) as ended:
            await call(pb.ForkSessionRequest(source=source, name=fork), Context())
        wanted = grpc.StatusCode.FAILED_PRECONDITION if is_over else grpc.StatusCode.DEADLINE_EXCEEDED
        assert ended.value.args == (wanted,)
        assert bool(begun) != is_over
        leases.cancel()

    run(history())
