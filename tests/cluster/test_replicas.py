"""The number of copies of a client that names none: what its cluster keeps for its tenant."""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.client import ClusterClient
from kvstore.client.block_calls import Stored
from kvstore.engines.common_settings import EngineSettings
from kvstore.engines.stores import open_store
from kvstore.errors import NodeUnavailable
from kvstore.limits import REPLICAS_MAX, WATCH_HEARTBEAT_MS
from kvstore.names import block_key
from kvstore.node.tenants import token_digest
from tests.cluster.real_etcd import RealEtcd
from tests.cluster.test_map_follower import MapNodes, told, world
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

__all__ = ["world"]
WAIT_S = 2 * WATCH_HEARTBEAT_MS / 1000
TOKENS = {name: secrets.token_urlsafe() for name in ("acme", "cache")}


class Pair:
    """Two nodes that keep two copies, except of the blocks of one tenant."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack, self._tenants = stack, folder / "tenants.toml"
        self.set(cache=1)
        (folder / "secret").write_text(secrets.token_urlsafe(32))
        etcd = stack.enter_context(RealEtcd(folder / "etcd"))
        more = ["--cluster", f"{etcd.endpoints[0]}/test", "--cluster-replicas", "2"]
        more += ["--tenants", str(self._tenants), "--cluster-secret", str(folder / "secret")]
        self.nodes = [
            stack.enter_context(small_node(folder / f"node{at}", arguments=more)) for at in range(2)
        ]

    def set(self, **replicas: int) -> None:
        rows = (f'[{name}]\ntokens_sha256 = ["{token_digest(token)}"]\n' for name, token in TOKENS.items())
        numbers = (f"replicas = {replicas[name]}\n" if name in replicas else "" for name in TOKENS)
        self._tenants.write_text("".join(row + number for row, number in zip(rows, numbers, strict=True)))

    def client(self, tenant: str, replicas: int | None = None) -> ClusterClient:
        targets = [node.target for node in self.nodes]
        client = ClusterClient(targets, token=TOKENS[tenant], replicas=replicas)
        self._stack.enter_context(client)
        wait_until(lambda: len(client.nodes.map.members) == 2, "both are members", WAIT_S)
        return client


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


def copies(client: ClusterClient, nodes: list[NodeProcess]) -> int:
    """On how many nodes a new block is, once its put is acknowledged."""
    key = block_key(secrets.token_bytes(8))
    client.put_inline(key, b"a block")
    assert len(client.owners(key)) == client.replicas
    return sum(isinstance(client.nodes.at(node.target).exists([key])[0], Stored) for node in nodes)


def test_a_client_that_names_no_number_puts_as_many_copies_as_its_tenant_has(pair: Pair) -> None:
    acme, cache = pair.client("acme"), pair.client("cache")
    assert copies(acme, pair.nodes) == 2
    assert copies(cache, pair.nodes) == 1
    assert pair.client("acme", replicas=1).replicas == 1, "what the client says counts"
    pair.set(acme=1, cache=2)
    for node in pair.nodes:
        os.kill(node.pid, signal.SIGHUP)
    wait_until(lambda: (acme.replicas, cache.replicas) == (1, 2), "the file was changed", WAIT_S)
    assert copies(cache, pair.nodes) == 2
    pair.nodes[0].kill()
    with pytest.raises(NodeUnavailable):
        copies(cache, pair.nodes)


def test_an_engine_that_names_no_number_stores_as_many_copies_as_its_tenant_has(pair: Pair) -> None:
    def engines(tenant: str, **settings: object) -> int:
        extra = {"nodes": [node.target for node in pair.nodes], "token": TOKENS[tenant]} | settings
        with open_store(EngineSettings.of(extra, where="an engine"), b"an engine's") as store:
            assert isinstance(store, ClusterClient)
            wait_until(lambda: len(store.nodes.map.members) == 2, "both are members", WAIT_S)
            return store.replicas

    assert (engines("acme"), engines("cache")) == (2, 1)
    assert (engines("acme", replicas=1), engines("cache", replicas=2)) == (1, 2), "its settings count"


def test_a_number_that_is_unknown_is_one_and_a_later_versions_is_what_this_one_can(world: MapNodes) -> None:
    answers = {0: 0, 1: 1, REPLICAS_MAX + 3: REPLICAS_MAX}
    found = world.follow()
    for revision, (number, wanted) in enumerate(answers.items(), start=1):
        answer = told(revision, "a:1")
        answer.replicas = number
        world.one.tell(answer)
        wait_until(lambda revision=revision: found.map.revision == revision, "the map", WAIT_S)  # type: ignore[misc]
        assert found.replicas == wanted
