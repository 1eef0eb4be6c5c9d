"""Draining nodes of a real cluster, and what a node knows of its blocks' copies."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from subprocess import DEVNULL
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from grpc.aio import AioRpcError

from kvcli.running import Status
from kvstore.cluster.map import DRAINING, Map, Member
from kvstore.commands import cluster_command
from kvstore.commands.cluster_command import _as_numbers, _upkeep_lines
from kvstore.errors import KvError
from kvstore.limits import UPKEEP_FREE_SHARE
from kvstore.node.cluster_service import _map_response
from kvstore.node.metrics import _of_upkeep
from kvstore.node.upkeep import Found, Upkeep
from kvstore.node.upkeep_service import UpkeepService
from kvstore.reach import Reach
from kvstore.wire import upkeep_pb2, upkeep_pb2_grpc
from kvstore.wire.cluster_pb2 import UpkeepState
from kvstore.wire.upkeep_pb2 import DrainRequest, DrainResponse
from tests.cluster.simulated import run
from tests.cluster.simulated_nodes import Context, Process
from tests.cluster.test_repair_history import RepairHistory
from tests.cluster.test_upkeep import COUNT, WAIT_S, RealCluster, command, data, one_key, told
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path


def test_a_drained_node_can_be_stopped_without_leaving_single_copies(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        keys, once = world.put(), world.put_one_copy(COUNT)
        drained = world.nodes[0]
        shown = command("drain", drained.target)
        assert world.on_two([*keys, *once]), "already now"
        assert shown.stdout == f"The other nodes have all blocks of {drained.target}: it may be stopped.\n"
        assert "draining" in command("status", "--node", world.nodes[1].target).stdout
        assert not any(drained.target in world.client.owners(key) for key in keys)
        found = world.client.get_many_inline([(key, len(data(key))) for key in [*keys, *once]])
        assert list(found) == [data(key) for key in [*keys, *once]]
        more = world.put()
        assert not any(world.there(drained, more))
        drained.stop()
        world.nodes.remove(drained)
        world.settled()
        assert [list(told(node).absent) for node in world.nodes] == [[], []], "it need not be forgotten"
        assert world.client.delete(keys[:1]) == [True]
        keys = keys[1:]
        assert world.on_two([*keys, *once, *more])


def test_a_draining_node_is_read_last_and_can_become_a_member_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        drains = world.nodes[0]
        keys, once = world.put(), world.put_one_copy(COUNT)
        assert command("drain", drains.target).returncode == 0

        def comes_last() -> bool:
            now = world.client.nodes.map
            return all(now.members[now.owners(b"", key)[-1]].node == drains.target for key in keys)

        wait_until(comes_last, "it comes last", WAIT_S)
        for late in once:
            assert world.client.get_inline(late, len(data(late))) == data(late)
        assert command("join", drains.target).stdout == f"{drains.target} is an ordinary member again.\n"
        wait_until(lambda: not world.client.nodes.map.draining, "it is one again", WAIT_S)


def test_a_drain_that_would_leave_too_few_members_is_refused_at_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        first, second, third = world.nodes
        assert command("drain", first.target).returncode == 0
        began_s = time.monotonic()
        refused = command("drain", second.target)
        assert time.monotonic() - began_s < 5
        assert refused.returncode not in {0, 3}
        assert "can't be drained: too few others would stay (1, and blocks should be on 2)" in refused.stderr
        assert not any(one.draining for one in told(third).members if one.node == second.target)
        assert command("join", first.target).returncode == 0
        asked = [sys.executable, "-m", "kvstore", "cluster", "drain"]
        at_once = [
            subprocess.Popen([*asked, one.target], stdout=DEVNULL, stderr=DEVNULL) for one in world.nodes
        ]
        ends = [one.wait(WAIT_S) for one in at_once]
        draining = [one.node for one in told(third).members if one.draining]
        assert len(draining) <= 1
        assert sum(end == 0 for end in ends) == len(draining)


def test_blocks_that_may_have_been_deleted_do_not_block_a_drain(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        keys = world.put()
        away, *stay = world.nodes
        theirs = [key for key in keys if away.target in world.client.owners(key)]
        away.stop()
        world.nodes = stay
        world.settled()

        def are_deleted() -> bool:  # one may copy a block to the other between its two deletions
            return not any(any(world.client.nodes.at(node.target).delete(theirs)) for node in stay)

        wait_until(are_deleted, "they are deleted, as if the node had been forgotten", WAIT_S)
        away.start()
        world.nodes = [away, *stay]
        world.settled()
        wait_until(lambda: told(away).upkeep.unsure == len(theirs), "it has scanned them", WAIT_S)
        drained = command("drain", away.target)
        assert drained.returncode == 3
        assert f"except {len(theirs)} that may have been deleted while it was away" in drained.stdout
        assert "these are lost unless they are put again" in drained.stdout


def test_a_drain_says_that_blocks_of_sessions_have_no_room_elsewhere(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 2, ("--cluster-replicas", "1"))
        nodes = world.client.nodes
        chat, keys = nodes.session("ada", "chat"), [one_key() for _ in range(4)]
        drained = next(node for node in world.nodes if node.target == nodes.home("ada"))
        other = next(node for node in world.nodes if node is not drained)
        filled = list[bytes]()
        one = nodes.at(other.target)
        left = one.statistics().capacity_bytes // UPKEEP_FREE_SHARE
        while one.statistics().free_bytes - 32 * 15_000 >= left:  # nothing is evicted: that leaves room
            filled.append(one_key())
            one.put_inline(filled[-1], filled[-1] * 15_000)
        for key in keys:
            nodes.of("ada").put_inline(key, key * 15_000)

        def is_appended() -> bool:
            with suppress(KvError):
                return chat.append(keys, tokens=16) == len(keys)
            return False

        wait_until(is_appended, "the home orders sessions", 3 * WAIT_S)
        shown = command("drain", drained.target)
        assert (shown.returncode, "4 blocks for which the others have no room" in shown.stdout) == (3, True)
        assert not any(world.there(other, keys))
        one.delete(filled)
        wait_until(lambda: command("drain", drained.target).returncode == 0, "there is room", 3 * WAIT_S)
        assert all(world.there(other, keys))


def test_a_call_cannot_make_a_node_off_the_map_a_member_again() -> None:
    """It was drained, or forgotten."""
    membership: Any = SimpleNamespace(lease=0, outside="its folder's node was drained", state="")
    node: Any = SimpleNamespace(membership=membership, upkeep=SimpleNamespace(), counters=None)
    gate: Any = SimpleNamespace(enter_operator=lambda *_: None)
    ended: list[str] = []

    class Context:
        async def abort(self, _code: object, why: str, _trailers: object) -> None:
            ended.append(why)
            raise ConnectionAbortedError

    for undo in (True, False):
        with suppress(ConnectionAbortedError):
            asyncio.run(
                UpkeepService(node, gate).Drain(upkeep_pb2.DrainRequest(undo=undo), Context())  # type: ignore[arg-type]
            )
    assert ended == ["The node is not on the map of its cluster: its folder's node was drained."] * 2


def test_a_node_reports_counts_only_of_a_full_scan_under_the_current_map() -> None:
    upkeep = Upkeep.__new__(Upkeep)
    membership: Any = SimpleNamespace(since=0, away_ms=0, outside="")
    upkeep._membership, upkeep.replicas = membership, 2
    upkeep.is_looking, upkeep.copied_blocks, upkeep.copied_bytes = True, 0, 0
    upkeep.looked, upkeep.ended, upkeep.found = 0, Found(), Found(one_copy=1)
    left: Any = SimpleNamespace(
        standbys=SimpleNamespace(lots_alone=3), hand_overs=SimpleNamespace(copies_left=7)
    )
    upkeep.moves = left
    upkeep._node = SimpleNamespace(clock=SimpleNamespace(monotonic_ns=lambda: 9_000_000_000))  # type: ignore[assignment]
    for membership.since, upkeep.looked, is_known in (
        (0, 0, False),
        (7, 0, False),
        (8, 7, False),
        (8, 8, True),
    ):
        upkeep.ended = Found(one_copy=5, ended_ns=2_000_000_000)
        assert (upkeep.known is not None) == is_known
        state = _map_response(membership, upkeep, Map(0), Map(0), "").upkeep
        assert (state.unknown, state.one_copy) == (not is_known, 5 if is_known else 0)
        assert state.age_ms == (7_000 if is_known else 0)
        assert (state.lots_alone, state.session_blocks_left) == (3, 7)
        (metric,) = [one for one in _of_upkeep(upkeep) if one.name == "kvstore_cluster_one_copy_blocks"]
        assert math.isnan(metric.samples[0].value) != is_known


def test_unknown_counts_are_shown_as_unknown() -> None:
    known, unknown = UpkeepState(one_copy=3), UpkeepState(unknown=True)
    assert _upkeep_lines({"a": known, "b": known}) == ["blocks with one copy: 6"]
    alone = UpkeepState(lots_alone=2, session_blocks_left=9)
    assert _upkeep_lines({"a": alone, "b": alone})[1:] == [
        "groups of users whose sessions have one copy: 4",
        "blocks of sessions still to be copied: 18",
    ]
    assert _upkeep_lines({"a": known, "b": unknown}) == [
        "blocks with one copy: 3 or more (1 of 2 nodes have not scanned their blocks by this map)"
    ]
    assert _upkeep_lines({"a": UpkeepState(), "b": unknown})[0].startswith("blocks with one copy: unknown (")
    assert _upkeep_lines({"a": known, "b": None}) == [
        "blocks with one copy: 3 or more",
        "Not reporting the state of its copies: b.",
    ]
    aged = UpkeepState(one_copy=3, unsure=1, age_ms=61_500)
    assert _upkeep_lines({"a": aged, "b": UpkeepState(age_ms=5_000)}) == [
        "blocks with one copy: 3 (1 may have been deleted while their node was away: put them again; as of 61 s ago)"
    ]
    assert _as_numbers(unknown)["one_copy"] is None  # type: ignore[index]


def test_a_node_has_drained_according_to_a_full_scan() -> None:
    upkeep = Upkeep.__new__(Upkeep)
    me = Member("a", "a:1", state=DRAINING)
    upkeep._membership = membership = SimpleNamespace(  # type: ignore[assignment]
        name="a", since=8, state=DRAINING
    )
    hand_overs = SimpleNamespace(have_ended=True)
    upkeep.moves = SimpleNamespace(hand_overs=hand_overs)  # type: ignore[assignment]
    membership.map = Map.of(1, [me, Member("b", "b:1")])
    upkeep.looked, upkeep.ended, upkeep.found = 8, Found(one_copy=2, unsure=1), Found()
    assert not upkeep.has_drained
    upkeep.ended = Found(one_copy=1, unsure=1)
    assert upkeep.has_drained
    hand_overs.have_ended = False
    assert not upkeep.has_drained, "sessions of its users are left"
    hand_overs.have_ended = True
    membership.state = ""
    assert not upkeep.has_drained, "the drain has been cancelled, and the map doesn't have it yet"


def test_a_node_whose_drain_was_cancelled_is_a_member_again_also_after_a_restart() -> None:
    async def one(seed: int) -> None:
        cluster = RepairHistory(seed)
        leases = asyncio.create_task(cluster.etcd.run())
        for _ in range(3):
            cluster.begin()
        await asyncio.sleep(20)
        node, *others = cluster.processes.values()

        async def drain(*, undo: bool = False) -> DrainResponse:
            answer: DrainResponse = await node.service.Drain(DrainRequest(undo=undo), Context())
            return answer

        while not ((told := await drain()).looked and not told.left):  # noqa: ASYNC110 - time is simulated
            await asyncio.sleep(0.5)
        await asyncio.sleep(cluster.rng.random() * 5)
        await drain(undo=True)
        assert not node.upkeep.has_drained
        await asyncio.sleep(cluster.rng.random() * 10)
        await node.end()
        await asyncio.sleep(20)
        assert {len(other.membership.map.absent) for other in others} == {1}, "deletions wait for it"
        cluster.begin(node.member)
        await asyncio.sleep(20)
        assert {len(other.membership.map.members) for other in others} == {3}
        leases.cancel()

    for seed in range(8):
        run(one(seed))


def with_three_nodes(history: Callable[[RepairHistory, Process], Coroutine[Any, Any, None]]) -> None:
    """Run a history of three nodes, of which it is given the first."""

    async def one() -> None:
        cluster = RepairHistory(1)
        leases = asyncio.create_task(cluster.etcd.run())
        for _ in range(3):
            cluster.begin()
        await asyncio.sleep(20)
        await history(cluster, next(iter(cluster.processes.values())))
        leases.cancel()

    run(one())


async def put_and_drain(cluster: RepairHistory, node: Process) -> None:
    """Put a block with one replica on a node that is about to drain; the other nodes get it."""
    name = b"once".ljust(16), bytes(32)
    node.put(name, 4096)
    await node.service.Drain(DrainRequest(), Context())
    await asyncio.sleep(0.5)
    assert node.upkeep.is_draining
    assert not node.upkeep.has_drained
    while not node.upkeep.has_drained:  # noqa: ASYNC110 - time is simulated
        await asyncio.sleep(0.1)
    assert len(cluster.holders(name)) == 2


def test_a_block_of_a_client_that_had_the_map_before_a_drain_is_copied() -> None:
    async def one(cluster: RepairHistory, node: Process) -> None:
        await node.service.Drain(DrainRequest(), Context())
        await asyncio.sleep(4)
        await put_and_drain(cluster, node)

    with_three_nodes(one)


def test_a_second_drain_scans_anew() -> None:
    """Its map is the same as that of the first one, but blocks have come in between."""

    async def one(cluster: RepairHistory, node: Process) -> None:
        await node.service.Drain(DrainRequest(), Context())
        await asyncio.sleep(20)
        assert node.upkeep.has_drained
        await node.service.Drain(DrainRequest(undo=True), Context())
        await asyncio.sleep(0.5)
        await put_and_drain(cluster, node)

    with_three_nodes(one)


def test_a_drain_that_is_waited_for_ends_when_it_is_cancelled() -> None:
    async def one(_: RepairHistory, node: Process) -> None:
        for undo in (False, True):
            await node.service.Drain(DrainRequest(undo=undo), Context())
            await asyncio.sleep(2)
            if not undo:
                await node.service.Drain(DrainRequest(has_begun=True), Context())
        with pytest.raises(AioRpcError, match="it is an ordinary member"):
            await node.service.Drain(DrainRequest(has_begun=True), Context())
        await asyncio.sleep(2)
        assert (node.membership.state, node.membership.map.draining) == ("", ())

    with_three_nodes(one)


def test_the_command_begins_a_drain_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for progress must not begin what `kvstore cluster join` has cancelled meanwhile."""
    have_begun: list[bool] = []

    def drain_of(request: DrainRequest, timeout: float) -> DrainResponse:
        assert timeout > 0
        have_begun.append(request.has_begun)
        return DrainResponse(looked=len(have_begun) == 3)

    monkeypatch.setattr(upkeep_pb2_grpc, "UpkeepStub", lambda _: SimpleNamespace(Drain=drain_of))
    monkeypatch.setattr(cluster_command, "DRAIN_LOOK_S", 0.001)
    reach = Reach.of({"nodes": ["127.0.0.1:1"]})
    assert cluster_command.drain(reach, "127.0.0.1:1", undo=False, as_json=True) == Status.DONE
    assert have_begun == [False, True, True]


def test_a_drain_that_etcd_did_not_confirm_is_written_when_retried() -> None:
    async def one(_: RepairHistory, node: Process) -> None:
        for undo in (False, True):
            node.way.is_away = True
            with pytest.raises(AioRpcError):
                await node.service.Drain(DrainRequest(undo=undo), Context())
            node.way.is_away = False
            await asyncio.sleep(2)
            await node.service.Drain(DrainRequest(undo=undo), Context())
            await asyncio.sleep(2)
            assert bool(node.membership.map.draining) != undo

    with_three_nodes(one)
