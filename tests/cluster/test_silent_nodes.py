"""A hung node costs a client one short wait, whatever the call, and is called again once it answers."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.client import ClusterBlock, ClusterClient
from kvstore.client.silent_nodes import SilentNodes
from kvstore.errors import Closed, KvError, NodeUnavailable
from kvstore.limits import (
    BREAKER_MS_MIN,
    CLUSTER_PROBE_AFTER_MS,
    CLUSTER_PROBE_LATE_MS,
    CLUSTER_PROBE_MS,
    CLUSTER_PROBES_LATE_MAX,
)
from kvstore.miss import Miss
from kvstore.names import block_key
from kvstore.reach import Reach
from nic_offload.flags import FlagWords
from tests.cluster.real_etcd import RealEtcd
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until
from tests.stopping import stop
from tests.wire.test_status import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvstore.client import Client
    from kvstore.demo.node_process import NodeProcess

WAIT_S = 20.0
ONCE_S = (CLUSTER_PROBE_AFTER_MS + CLUSTER_PROBE_MS) / 1000
BYTES, BLOCKS = 4096, 12


class SilentNodesRig:
    """Three nodes, and a client with blocks on all of them."""

    def __init__(self, folder: Path, stack: ExitStack, transport: str) -> None:
        etcd = stack.enter_context(RealEtcd(folder / "etcd"))
        told = ("--cluster", f"{etcd.endpoints[0]}/test")
        self.nodes: list[NodeProcess] = [
            stack.enter_context(small_node(folder / f"node{number}", arguments=told)) for number in range(3)
        ]
        targets = [node.target for node in self.nodes]
        self.client = stack.enter_context(
            ClusterClient(targets, replicas=2, slots=32, block_bytes_max=1 << 20, transport=transport)
        )
        wait_until(lambda: len(self.client.nodes.map.members) == 3, "three members", WAIT_S)
        self.memory = mmap.mmap(-1, BLOCKS * BYTES)
        self.kv = stack.enter_context(self.client.register(self.memory))
        self.keys = [block_key(b"silent", b"%d" % number) for number in range(BLOCKS)]
        self.blocks = [ClusterBlock(key, self.kv, at * BYTES, BYTES) for at, key in enumerate(self.keys)]
        assert self.failed(self.client.put(self.blocks, timeout_s=WAIT_S)) == 0
        self.puts = 0

    @staticmethod
    def failed(results: object) -> int:
        assert isinstance(results, list)
        return sum(isinstance(one, Miss) or getattr(one, "error", None) is not None for one in results)

    def new(self) -> list[bytes]:
        self.puts += 1
        return [block_key(b"new", b"%d %d" % (self.puts, number)) for number in range(BLOCKS)]

    def put(self) -> list[object]:
        some = [block._replace(key=key) for block, key in zip(self.blocks, self.new(), strict=True)]
        return list(self.client.put(some, timeout_s=WAIT_S))

    def put_inline(self) -> list[object]:
        return list(
            self.client.put_many_inline([(key, bytes(BYTES)) for key in self.new()], timeout_s=WAIT_S)
        )

    def get(self) -> list[object]:
        return list(self.client.get(self.blocks, timeout_s=WAIT_S))

    def get_inline(self) -> list[object]:
        return list(self.client.get_many_inline([(key, BYTES) for key in self.keys], timeout_s=WAIT_S))

    def exists(self) -> list[object]:
        return list(self.client.exists(self.keys))

    def pin(self) -> list[object]:
        with self.client.pin(self.keys) as pin:
            return list(pin.pinned)


@pytest.fixture
def rig(tmp_path: Path, transport: str) -> Iterator[SilentNodesRig]:
    with ExitStack() as stack:
        yield SilentNodesRig(tmp_path, stack, transport)


def is_silent(rig: SilentNodesRig, node: str) -> bool:
    try:
        rig.client._calls.silent.check(node)
    except NodeUnavailable:
        return True
    return False


class Answer:
    """Of a probe: none in time, as is known after a moment."""

    def __init__(self) -> None:
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def exception(self) -> Failure:
        return Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "")


@pytest.mark.parametrize(
    ("late_ms", "probes"), [(0, 1), (CLUSTER_PROBE_LATE_MS, 1 + CLUSTER_PROBES_LATE_MAX)]
)
def test_a_busy_machine_does_not_take_a_node_for_silent_at_once(
    monkeypatch: pytest.MonkeyPatch, late_ms: int, probes: int
) -> None:
    """Its own thread was late, so the answer may have been."""
    silent_nodes = sys.modules[SilentNodes.__module__]
    times, probed, dropped = count(0, BREAKER_MS_MIN + late_ms), list[str](), list[int]()
    monkeypatch.setattr(silent_nodes, "_now_ms", lambda: next(times))
    monkeypatch.setattr(silent_nodes, "close_channel", lambda _: None)
    silent = SilentNodes(lambda _: Reach(("10.0.0.1:1",)), lambda _: dropped.append(len(probed)))

    def probe(node: str) -> object:
        probed.append(node)
        return silent_nodes._Probe(None, Answer())

    monkeypatch.setattr(silent, "_probe", probe)
    silent.suspect("a node")
    wait_until(lambda: bool(dropped), "it is silent", WAIT_S)
    silent.close()
    assert dropped == [probes]


@pytest.mark.parametrize(
    ("transport", "first"), [("auto", "put"), ("auto", "get"), ("grpc", "put"), ("auto", "pin")]
)
def test_a_hanging_node_costs_one_short_wait_in_all(
    rig: SilentNodesRig, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    calls: dict[str, Callable[[], list[object]]] = {
        name: getattr(rig, name) for name in ("put", "put_inline", "get", "get_inline", "exists", "pin")
    }

    def took_s(name: str) -> float:
        began_s = time.monotonic()
        failed = rig.failed(calls[name]())
        assert failed == 0 or name.startswith("put"), "one copy is there"
        return time.monotonic() - began_s

    for name in calls:
        took_s(name)
    hangs, called, calling = rig.client.owners(rig.keys[0])[0], list[str](), rig.client._calls.calling
    pid = next(node.pid for node in rig.nodes if node.target == hangs)

    def noted(node: str) -> AbstractContextManager[Client]:
        called.append(node)
        return calling(node)

    monkeypatch.setattr(rig.client._calls, "calling", noted)
    stop(pid)
    try:
        assert ONCE_S / 2 < took_s(first) < WAIT_S / 2, "one wait, shorter than its deadline"
        wait_until(lambda: is_silent(rig, hangs), "it is known to be silent", WAIT_S)
        called.clear()
        assert max(took_s(name) for name in (*calls, *calls)) < WAIT_S / 2
        assert set(called) == {node.target for node in rig.nodes} - {hangs}, "and no other wait"
        with pytest.raises(KvError, match="does not answer"):
            rig.client.delete(rig.keys)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: rig.failed(rig.put()) == 0, "the node is called again", WAIT_S)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_a_slow_call_does_not_make_a_node_silent(rig: SilentNodesRig) -> None:
    """A put that waits for its flag, and so has no answer."""
    with pytest.MonkeyPatch.context() as patch:
        dropped: list[str] = []
        patch.setattr(rig.client._calls.silent, "_drop", dropped.append)
        waiting = [
            block._replace(key=key, threshold=7) for block, key in zip(rig.blocks, rig.new(), strict=True)
        ]
        with FlagWords.create(1) as flags:
            puts = rig.client.arm(waiting, flags[0])
            assert rig.failed(puts.wait(2 * ONCE_S)) == BLOCKS
            flags[0].store(7)
            assert rig.failed(puts.wait(WAIT_S)) == 0
        assert dropped == []


@pytest.mark.parametrize("transport", ["auto", "grpc"])
@pytest.mark.parametrize("name", ["get", "get_inline", "exists", "pin", "put"])
def test_a_node_given_up_right_before_the_call_is_not_the_callers_mistake(
    rig: SilentNodesRig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its client is closed between the look at the map and the call."""
    nodes, lost = rig.client.nodes, rig.nodes[1].target
    client_of, dropped = nodes._client, list[str]()

    def given_up_late(target: str) -> Client:
        client = client_of(target)
        if target == lost and not dropped:
            dropped.append(target)
            nodes._drop(target)
        return client

    monkeypatch.setattr(nodes, "_client", given_up_late)
    assert rig.failed(getattr(rig, name)()) == 0 or name == "put", "the other copy is there"
    assert dropped == [lost]
    assert rig.failed(getattr(rig, name)()) == 0, "it is called again"


@pytest.mark.parametrize("transport", ["auto"])
def test_calls_of_a_client_closed_by_its_user_raise_closed(rig: SilentNodesRig) -> None:
    rig.client.nodes.at(rig.nodes[1].target).close()
    with pytest.raises(Closed):
        rig.exists()
    rig.client.close()
    with pytest.raises(Closed):
        rig.exists()


@pytest.mark.parametrize("transport", ["auto"])
def test_clients_on_a_nodes_machine_call_it_for_each_get(rig: SilentNodesRig) -> None:
    """A cluster confirms deletions without a node that hangs, whose memory they could still read."""
    assert rig.failed(rig.get()) == 0
    for node in rig.nodes:
        link = rig.client.nodes.at(node.target)._core.link
        assert link is not None
        assert link.mapped.hot is not None
        assert link.mapped.directory is None
        assert link.direct is None
