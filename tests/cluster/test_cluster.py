"""Real nodes on a real etcd, and clients that know one of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.client import Client, ClusterClient, Nodes, as_request
from kvstore.cluster.etcd import Etcd
from kvstore.cluster.etcd_options import EtcdReach
from kvstore.cluster.map import TOO_OLD, Member
from kvstore.engines.common_settings import EngineSettings
from kvstore.engines.stores import open_store
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.wire import cluster_pb2, cluster_pb2_grpc
from tests.cluster.ahead import made_ahead
from tests.cluster.real_etcd import RealEtcd
from tests.commands.here import run_here
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from contextlib import ExitStack
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from tests.cluster.ahead import Ahead

WAIT_S = 20.0
USERS = [f"user {number}" for number in range(60)]


class Cluster:
    """One etcd and three nodes; a client that knows the first."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.etcd = stack.enter_context(RealEtcd(folder / "etcd"))
        self.nodes: list[NodeProcess] = []
        for number in range(3):
            self.add(folder / f"node{number}")
        self.client = self.clients(self.nodes[0])
        self.settled(self.nodes)

    def add(self, data: Path, *more: str) -> NodeProcess:
        told = ("--cluster", f"{','.join(self.etcd.endpoints)}/test", *more)
        node = self._stack.enter_context(small_node(data, arguments=told))
        self.nodes.append(node)
        return node

    def clients(self, *known: NodeProcess) -> Nodes:
        reach = [node.target for node in known]
        return self._stack.enter_context(Nodes(reach, slots=16, block_bytes_max=1 << 20))

    def settled(self, nodes: list[NodeProcess], within_s: float = WAIT_S) -> None:
        wanted = {node.target for node in nodes}
        wait_until(
            lambda: {one.node for one in self.client.map.members} == wanted, f"{wanted} are the map", within_s
        )

    def listed(self) -> set[str]:
        async def ask() -> set[str]:
            etcd = Etcd(EtcdReach(self.etcd.endpoints, "test"))
            listed = await etcd.listed(b"/triggerkv/test/members/")
            await etcd.close()
            return {Member.decoded(value).node for value, _ in listed.values.values()}

        return asyncio.run(ask())

    def homes(self) -> dict[str, str]:
        return {user: self.client.home(user) for user in USERS}

    def fill(self) -> None:
        for user in USERS:
            self.client.of(user).put_inline(key(user), user.encode())

    def hits(self) -> set[str]:
        return {user for user in USERS if self.got(user) == user.encode()}

    def got(self, user: str) -> bytes | Miss:
        return self.client.of(user).get_inline(key(user), len(user))


def key(user: str) -> bytes:
    return block_key(b"cluster", user.encode())


clusters = made_ahead("cluster", Cluster)


@pytest.fixture
def cluster(clusters: Ahead[Cluster]) -> Iterator[Cluster]:
    with clusters.one() as cluster:
        yield cluster


def test_users_of_a_killed_node_move_to_the_others_and_return_with_it(cluster: Cluster) -> None:
    cluster.fill()
    assert cluster.hits() == set(USERS)
    before = cluster.homes()
    lost = cluster.nodes[1]
    theirs = {user for user, home in before.items() if home == lost.target}
    assert 0 < len(theirs) < len(USERS)
    lost.kill()
    began = time.monotonic()
    some = min(theirs)
    away = cluster.got(some)
    assert isinstance(away, Miss)
    assert away.reason is MissReason.NODE_AWAY
    cluster.settled([cluster.nodes[0], cluster.nodes[2]])
    assert time.monotonic() - began < 12
    assert {user for user, home in cluster.homes().items() if home != before[user]} == theirs
    assert cluster.hits() == set(USERS) - theirs, "and nobody else has lost anything"
    missed = cluster.got(some)
    assert isinstance(missed, Miss)
    assert missed.reason is not MissReason.NODE_AWAY
    lost.start()
    cluster.settled(cluster.nodes)
    assert cluster.homes() == before
    wait_until(lambda: cluster.hits() == set(USERS), "what it had is there again", WAIT_S)


def test_a_joining_node_takes_its_share_and_a_stopping_one_leaves_at_once(cluster: Cluster) -> None:
    before = cluster.homes()
    fourth = cluster.add(cluster.folder / "node3")
    cluster.settled(cluster.nodes)
    moved = {user for user, home in cluster.homes().items() if home != before[user]}
    assert {cluster.client.home(user) for user in moved} == {fourth.target}
    assert 0 < len(moved) < len(USERS) // 2
    assert fourth.target in cluster.listed()
    fourth.stop()
    assert fourth.target not in cluster.listed(), "it doesn't wait for the end of a lease"
    cluster.settled(cluster.nodes[:3])
    assert cluster.homes() == before


def test_without_etcd_everything_continues_with_the_current_map(cluster: Cluster) -> None:
    cluster.fill()
    (member,) = cluster.etcd.members
    member.kill()
    time.sleep(7)  # beyond the lease of every node
    assert cluster.hits() == set(USERS)
    late = cluster.clients(cluster.nodes[2])  # which never spoke with etcd, nor ever will
    assert {one.node for one in late.map.members} == {node.target for node in cluster.nodes}
    shown = command(cluster.nodes[0])
    assert shown.returncode == 0
    assert "etcd has not answered it for" in shown.stdout
    member.start(cluster.etcd.members)
    wait_until(
        lambda: "etcd has not answered" not in command(cluster.nodes[0]).stdout, "etcd is back", WAIT_S
    )
    cluster.settled(cluster.nodes)
    assert cluster.hits() == set(USERS)


def test_a_client_keeps_following_when_the_node_it_learned_the_map_from_hangs_or_dies(
    cluster: Cluster,
) -> None:
    """It was given one node only; the map lists the others."""
    assert len(cluster.client.map.members) == 3
    told_by, others = cluster.nodes[0], cluster.nodes[1:]
    stop(told_by.pid)
    try:
        cluster.settled(others, 40)
        fourth = cluster.add(cluster.folder / "node3")
        cluster.settled([*others, fourth], 40)
    finally:
        os.kill(told_by.pid, signal.SIGCONT)
    cluster.settled([*others, fourth, told_by], 40)


def test_of_two_processes_with_the_same_folder_the_later_is_the_member(cluster: Cluster) -> None:
    original = cluster.nodes[2]
    original.stop()
    copy = cluster.folder / "copy"
    shutil.copytree(cluster.folder / "node2", copy)
    original.start()
    cluster.settled(cluster.nodes[:3])
    twin = cluster.add(copy)
    cluster.settled([*cluster.nodes[:2], twin])
    shown = command(original)
    assert shown.returncode == 3
    assert "is not a member: another process has taken its place" in shown.stdout
    time.sleep(3)
    cluster.settled([*cluster.nodes[:2], twin], 1)
    twin.stop()
    cluster.settled(cluster.nodes[:2])
    assert "another process has taken its place" in original.log()


def test_the_command_shows_the_nodes_and_their_shares(cluster: Cluster) -> None:
    shown = command(cluster.nodes[1])
    assert shown.returncode == 0
    head, *rows = shown.stdout.splitlines()
    assert head.split() == ["node", "name", "weight", "users", "version"]
    assert {row.split()[0] for row in rows} == {node.target for node in cluster.nodes}
    assert sum(float(row.split()[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.3)


def test_a_nodes_zone_is_in_every_map(cluster: Cluster) -> None:
    other = cluster.add(cluster.folder / "node3", "--cluster-zone", "rack 2")
    cluster.settled(cluster.nodes)
    zones = {one.node: one.zone for one in cluster.client.map.members}
    assert zones == {node.target: "rack 2" if node is other else "" for node in cluster.nodes}
    now = cluster.client.map
    for user in USERS:
        some = [now.members[at].node for at in now.owners(b"", key(user))[:2]]
        assert other.target in some, "one copy in two is in the zone that has one node"
    shown = command(cluster.nodes[1]).stdout.splitlines()
    assert shown[0].split()[-1] == "zone"
    assert [row for row in shown if row.endswith("rack 2")] == [
        row for row in shown if row.startswith(other.target)
    ]


def test_a_request_is_explained_by_all_nodes(cluster: Cluster) -> None:
    targets = [node.target for node in cluster.nodes]
    keys = [key(user) for user in USERS]
    with ClusterClient([targets[0]], slots=16, block_bytes_max=1 << 20) as client:
        client.put_many_inline([(one, one * 8) for one in keys[:-1]])
        with as_request("cmpl-7"):
            assert [isinstance(one, Miss) for one in client.exists(keys)] == [False] * (len(keys) - 1) + [
                True
            ]
        (owner,) = client.owners(keys[-1])
    done = explained(cluster.nodes[1], "cmpl-7")
    assert (done.returncode, done.stderr) == (0, "")
    shown, note, _ = done.stdout.partition("A block that one node misses is requested from its next owners")
    assert note, "some have hits, and some misses"
    parts = dict(part.split(":\n", 1) for part in shown.strip("\n").split("\n\n127.0.0.1") if part)
    parts = {f"127.0.0.1{name.removeprefix('127.0.0.1')}": text for name, text in parts.items()}
    assert parts.keys() == set(targets), "each has some of these blocks"
    assert "MISS  never stored" in parts[owner]
    documents = json.loads(explained(cluster.nodes[1], "cmpl-7", "--json").stdout)
    blocks = [one["blocks"] for some in documents.values() for one in some["lookups"]]
    assert sum(blocks) >= len(keys)
    missing = explained(cluster.nodes[1], "cmpl-8")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr.startswith("kvstore: The nodes remember no look-up of cmpl-8, but ")
    stop(cluster.nodes[2].pid)
    try:
        done = explained(cluster.nodes[1], "cmpl-7", "--call-timeout-ms", "1000")
    finally:
        os.kill(cluster.nodes[2].pid, signal.SIGCONT)
    assert done.returncode == 0
    assert f"kvstore: {targets[2]} did not answer: " in done.stderr
    assert f"{targets[0]}:\n" in done.stdout


def test_a_single_node_is_in_no_cluster(tmp_path: Path) -> None:
    with small_node(tmp_path / "node") as node, Nodes([node.target]) as nodes:
        assert [one.node for one in nodes.map.members] == [node.target]
        assert nodes.map.revision == 0
        shown = command(node)
    assert (shown.returncode, shown.stdout) == (3, "The node is in no cluster.\n")


def explained(node: NodeProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return run_here("explain", *words, "--node", node.target)


def command(node: NodeProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return run_here("cluster", *(words or ("status",)), "--node", node.target)


def test_a_client_without_support_for_lots_gets_unreachable_members(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.nodes[0].target) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
        for knows, nodes in (
            (False, [one.node for one in TOO_OLD]),
            (True, sorted(node.target for node in cluster.nodes)),
        ):
            call = stub.Map(cluster_pb2.MapRequest(places_by_lots=knows), timeout=10)
            assert sorted(one.node for one in next(call).members) == nodes
            call.cancel()


@pytest.mark.parametrize("backup", [False, True], ids=["lost", "restored"])
def test_maps_continue_after_etcd_has_lost_data(cluster: Cluster, *, backup: bool) -> None:
    """A node that dies afterwards leaves the maps of nodes and clients; nothing is restarted."""
    cluster.fill()
    (member,) = cluster.etcd.members
    data = member.folder / member.name
    if backup:
        member.kill()
        shutil.copytree(data, cluster.folder / "backup")
        member.start(cluster.etcd.members)
        wait_until(lambda: "etcd has not" not in command(cluster.nodes[0]).stdout, "etcd is back", WAIT_S)
    fourth = cluster.add(cluster.folder / "node3")
    cluster.settled(cluster.nodes)
    fourth.kill()
    cluster.settled(cluster.nodes[:3])
    member.kill()
    shutil.rmtree(data)
    if backup:
        shutil.copytree(cluster.folder / "backup", data)
    revision = cluster.client.map.revision
    member.start(cluster.etcd.members)
    wait_until(lambda: cluster.client.map.revision > revision, "a map of the new history", WAIT_S)
    cluster.settled(cluster.nodes[:3])
    assert [one.node for one in cluster.client.map.absent] == [fourth.target], "no deletion does without it"
    cluster.nodes[2].kill()
    cluster.settled(cluster.nodes[:2])
    fourth.start()
    cluster.settled([*cluster.nodes[:2], fourth])


def test_an_engine_given_one_node_uses_the_whole_cluster(cluster: Cluster, tmp_path: Path) -> None:
    def opened(node: NodeProcess) -> Client | ClusterClient:
        return open_store(EngineSettings.of({"nodes": [node.target]}, where="a test"), b"layout")

    with opened(cluster.nodes[1]) as client:
        assert isinstance(client, ClusterClient)
        assert {one.node for one in client.nodes.map.members} == {node.target for node in cluster.nodes}
    with small_node(tmp_path / "alone") as alone, opened(alone) as client:
        assert isinstance(client, Client)
    with opened(alone) as client:
        assert isinstance(client, Client), "it doesn't answer"
