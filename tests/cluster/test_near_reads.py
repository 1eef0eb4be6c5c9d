"""Reads of the nearest copy with real nodes of two zones, of which a client has stated one."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import ClusterBlock, ClusterClient, Hit, as_request
from kvstore.client.grpc_blocks import InlineCalls
from kvstore.engines.common_settings import EngineSettings
from kvstore.engines.stores import open_store
from kvstore.errors import Expired, KvError
from kvstore.miss import Miss
from kvstore.names import block_key
from tests.cluster.real_etcd import RealEtcd
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

COUNT, BYTES, WAIT_S = 60, 4096, 20.0
ZONES = ("rack-1", "rack-2", "rack-1")
NEAR = 1  # the only node in its zone, so it has a copy of each block


class ZonedCluster:
    """A cluster of three nodes in two zones, and blocks that are on two nodes each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        etcd = stack.enter_context(RealEtcd(folder / "etcd"))
        self.nodes: list[NodeProcess] = []
        for at, zone in enumerate(ZONES):
            told = ("--cluster", f"{etcd.endpoints[0]}/zones", "--cluster-zone", zone)
            self.nodes.append(stack.enter_context(small_node(folder / f"node{at}", arguments=told)))
        self.client = self.of_zone("")
        self.settled(self.client)

    def of_zone(self, zone: str, **more: Any) -> ClusterClient:
        targets = [self.nodes[0].target]
        of_clients: dict[str, Any] = {
            "slots": 16,
            "block_bytes_max": 1 << 20,
            "call_timeout_ms": 3_000,
            **more,
        }
        return self._stack.enter_context(ClusterClient(targets, replicas=2, zone=zone, **of_clients))

    def settled(self, client: ClusterClient) -> None:
        wait_until(lambda: len(client.nodes.map.members) == len(ZONES), "all are members", WAIT_S)

    @property
    def near(self) -> NodeProcess:
        return self.nodes[NEAR]

    def put(self) -> list[bytes]:
        name = secrets.token_bytes(8)
        keys = [block_key(name, bytes([number])) for number in range(COUNT)]
        results = self.client.put_many_inline([(key, payload(key)) for key in keys])
        assert {one.error for one in results} == {None}
        return keys

    def put_far(self) -> list[bytes]:
        """Put blocks on their first owners only, where these are not the nearest node."""
        keys = [block_key(secrets.token_bytes(8)) for _ in range(COUNT)]
        far = [key for key in keys if self.client.owners(key)[0] != self.near.target]
        for key in far:
            self.client.nodes.at(self.client.owners(key)[0]).put_inline(key, payload(key))
        return far

    def sent(self) -> list[int]:
        """The number of blocks that each node has sent."""
        told = [self.client.nodes.at(node.target).statistics() for node in self.nodes]
        return [one.hits_memory + one.hits_drive for one in told]


def payload(key: bytes) -> bytes:
    return key * (BYTES // len(key))


def got(client: ClusterClient, keys: list[bytes]) -> int:
    """The number of hits, each of them exact."""
    outcomes = list(client.get_many_inline([(key, BYTES) for key in keys]))
    for key, outcome in zip(keys, outcomes, strict=True):
        assert isinstance(outcome, Miss) or outcome == payload(key)
    return sum(not isinstance(one, Miss) for one in outcomes)


@pytest.fixture(scope="module")
def racks(module_folder: Path) -> Iterator[ZonedCluster]:
    with ExitStack() as stack:
        yield ZonedCluster(module_folder, stack)


def test_all_blocks_are_read_from_the_node_in_the_clients_zone(racks: ZonedCluster) -> None:
    keys = racks.put()
    client = racks.of_zone("rack-2")
    before = racks.sent()
    memory = bytearray(COUNT * BYTES)
    with client.register(memory) as everywhere:
        blocks = [ClusterBlock(key, everywhere, at * BYTES, BYTES) for at, key in enumerate(keys)]
        assert {type(one) for one in client.get(blocks)} == {Hit}
    assert memory == b"".join(payload(key) for key in keys)
    assert got(client, keys) == COUNT
    assert client.prefix(keys).blocks == COUNT
    after = racks.sent()
    assert [now - then for then, now in zip(before, after, strict=True)] == [0, 2 * COUNT, 0]
    assert got(racks.client, keys) == COUNT
    first = sum(racks.client.owners(key)[0] == racks.near.target for key in keys)
    assert racks.sent()[NEAR] - after[NEAR] == first < COUNT, "without a zone the first owner is asked"


def test_an_engine_sets_its_zone_like_any_client(racks: ZonedCluster) -> None:
    keys = racks.put()
    extra = {"node": racks.nodes[0].target, "replicas": 2, "zone": "rack-2"}
    before = racks.sent()
    with open_store(EngineSettings.of(extra, where="an engine"), b"") as store:
        assert isinstance(store, ClusterClient)
        assert got(store, keys) == COUNT
    assert [now - then for then, now in zip(before, racks.sent(), strict=True)] == [0, COUNT, 0]


def test_blocks_that_the_nearest_node_lacks_are_read_elsewhere_and_put_back_to_it(
    racks: ZonedCluster,
) -> None:
    keys = racks.put_far()
    client = racks.of_zone("rack-2")
    near = racks.client.nodes.at(racks.near.target)

    def are_back() -> bool:
        """Get the blocks until both nodes have them; a new node accepts no copies at first."""
        assert got(client, keys) == len(keys)
        return near.prefix(keys).blocks == len(keys)

    wait_until(are_back, "it has its copies again", WAIT_S)


def test_a_deletion_ends_reads_of_the_nearest_copy_too(
    racks: ZonedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block read before it was deleted everywhere is not put back to the nearest node either."""
    keys = racks.put()
    client = racks.of_zone("rack-2")
    late, early, *_ = racks.put_far()
    near = racks.client.nodes.at(racks.near.target)
    wait_until(
        lambda: got(client, [early]) == near.prefix([early]).blocks == 1, "copies are taken again", WAIT_S
    )
    put, begun, goes_on, failed = InlineCalls.put, threading.Event(), threading.Event(), []

    def put_later(*given: object, **more: object) -> object:
        if late not in given:  # the other one may be put back once more
            return put(*given, **more)  # type: ignore[arg-type]
        begun.set()
        assert goes_on.wait(WAIT_S)
        try:
            return put(*given, **more)  # type: ignore[arg-type]
        except KvError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(InlineCalls, "put", put_later)
    assert got(client, [late, *keys]) == 1 + COUNT
    assert begun.wait(WAIT_S)
    assert racks.client.delete([late, *keys]) == [True] * (1 + COUNT)
    goes_on.set()
    wait_until(lambda: len(failed) == 1, "the copy is refused", WAIT_S)
    assert isinstance(failed[0], Expired)
    assert got(client, [late, *keys]) == 0
    assert got(racks.client, [late, *keys]) == 0


def test_a_nearest_node_that_hangs_or_dies_costs_a_first_try_and_no_block(racks: ZonedCluster) -> None:
    keys = racks.put()
    client = racks.of_zone("rack-2")
    assert got(client, keys[:1]) == 1
    stop(racks.near.pid)
    try:
        began = time.monotonic()
        assert got(client, keys) == COUNT
        assert time.monotonic() - began < 4
        began = time.monotonic()
        assert got(client, keys) == COUNT
        assert time.monotonic() - began < 1, "it is not asked again until it answers"
    finally:
        os.kill(racks.near.pid, signal.SIGCONT)
    before = racks.sent()[NEAR]

    def is_read_again() -> bool:
        assert got(client, keys) == COUNT
        return racks.sent()[NEAR] > before

    wait_until(is_read_again, "it is read first again", WAIT_S)
    racks.near.kill()
    try:
        assert got(client, keys) == COUNT
        assert got(racks.of_zone("rack-2"), keys) == COUNT, "also by a client that has not met it"
    finally:
        racks.near.start()
        racks.settled(racks.client)


def test_the_status_lists_the_nodes_that_are_read_first(racks: ZonedCluster) -> None:
    lines = command("rack-2", "cluster", "status")
    assert lines[-1] == f"zone rack-2, set for this client: copies on {racks.near.target} are read first"
    assert command("rack-9", "cluster", "status")[-1] == (
        "zone rack-9, set for this client, has no node to read from: reads use the first owners"
    )
    assert not any("set for this client" in line for line in command("", "cluster", "status"))
    said = json.loads("\n".join(command("rack-2", "cluster", "status", "--json")))
    assert said["read_first"] == {"zone": "rack-2", "nodes": [racks.near.target]}
    planned = command("", "cluster", "plan", "10.0.0.9:7070", "--zone", "rack-2", "--json")
    assert json.loads("\n".join(planned))["joins"]


def test_look_ups_are_explained_with_the_zone_of_each_node(racks: ZonedCluster) -> None:
    keys = racks.put()
    with as_request("near-7"):
        assert got(racks.of_zone("rack-2"), keys) == COUNT
    shown = command("", "explain", "near-7")
    assert [line for line in shown if line.startswith("127.0.0.1:")] == [f"{racks.near.target}, zone rack-2:"]


@pytest.fixture(autouse=True)
def command_node(racks: ZonedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIGGERKV_NODE", racks.nodes[0].target)


def command(zone: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "TRIGGERKV_ZONE": zone},
    )
    return done.stdout.splitlines()
