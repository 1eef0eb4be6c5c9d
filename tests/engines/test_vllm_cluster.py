"""vLLM with our connector on a cluster: a node is lost and replaced in a conversation, which goes on with hits."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.client import ClusterClient, Stored
from kvstore.errors import KvError
from tests.cluster.real_etcd import RealEtcd
from tests.engines.digests import read_digests
from tests.engines.engine import PATIENT, Engine
from tests.engines.node import Node, until
from tests.engines.pages import layout_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.chats import Chats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPEC = {"kv_connector": "TriggerKvOffloadingConnector", "kv_connector_module_path": None}
SPEC_EXTRA = {"spec_name": "RecordingSpec", "spec_module_path": "tests.engines.recording"}
CLUSTERED = {"replicas": 2, "transport": "fabric", "call_timeout_ms": 1_000}


class Cluster:
    """Three nodes under etcd, and a client that looks at what each of them has."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._etcd = stack.enter_context(RealEtcd(folder / "etcd"))
        self.nodes = [self._added(f"node{number}") for number in range(3)]
        self.targets = ",".join(node.target for node in self.nodes)

    def _added(self, name: str) -> Node:
        arguments = ("--cluster", f"{self._etcd.endpoints[0]}/test", "--cluster-replicas", "2")
        return self._stack.enter_context(Node(self._folder / name, arguments=arguments))

    def looked_at_by(self, layout: bytes) -> None:
        """Watch it with a client of the engine's layout."""
        self._client = self._stack.enter_context(
            ClusterClient([node.target for node in self.nodes], replicas=2, layout=layout)
        )

    def replace(self, number: int) -> None:
        """A node with an empty drive and another address joins in place of one that was killed."""
        self.nodes[number] = self._added("replacement")

    def is_settled(self) -> bool:
        """Whether its members are the nodes, no more and no fewer."""
        return {one.node for one in self._client.nodes.map.members} == {node.target for node in self.nodes}

    def is_safe(self, keys: list[bytes]) -> bool:
        """Whether each of these is on both of its owners."""
        try:
            has = {
                node.target: [
                    isinstance(one, Stored) for one in self._client.nodes.at(node.target).exists(keys)
                ]
                for node in self.nodes
            }
        except KvError:
            return False
        owners = [self._client.owners(key) for key in keys]
        return all(len(of) == 2 and all(has[one][at] for one in of) for at, of in enumerate(owners))


def saved(engine: Engine) -> list[bytes]:
    return [bytes.fromhex(key) for key in sorted(read_digests(engine.digests)[0])]


def test_a_node_is_lost_and_replaced_in_a_conversation_and_the_cluster_is_safe_again_by_itself(
    model: Path, chats: Chats, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        engine = stack.enter_context(
            Engine(tmp_path, "cluster", model, cluster.targets, extra=CLUSTERED | PATIENT)
        )
        chats.check(engine, range(2))
        cluster.looked_at_by(layout_of(engine.digests / "cluster.txt"))
        until(cluster.is_settled, "all nodes are members")
        until(lambda: cluster.is_safe(saved(engine)), "what the first turns saved is on two nodes")

        cluster.nodes[1].kill()
        engine.forget()
        had = sum(len(prompt) - 64 for prompt in chats.prompts[1])
        assert chats.check(engine, range(2, 3)) >= had, "all of the turns before comes from the other nodes"

        cluster.replace(1)
        until(cluster.is_settled, "the lost node is off the map, and the new one is on it")
        engine.forget()
        had = sum(len(prompt) - 64 for prompt in chats.prompts[2])
        assert chats.check(engine, range(3, 4)) >= had
        until(lambda: cluster.is_safe(saved(engine)), "each block is on two nodes again")

        cluster.nodes[0].kill()  # one more may be lost now
        engine.forget()
        assert chats.check(engine, range(3, 4)) >= sum(len(prompt) - 64 for prompt in chats.last)
        assert engine.count("missing_blocks") == 0
        stored, loaded = read_digests(engine.digests)
        assert len(loaded) > 50
        assert not [key for key, digest in loaded if digest not in stored.get(key, ())]
        assert "Traceback" not in engine.log()


def test_the_offloading_spec_keeps_chunks_on_two_nodes(model: Path, chats: Chats, tmp_path: Path) -> None:
    """No etcd: these nodes are known by their names alone."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(tmp_path / f"node{number}")) for number in range(3)]
        engine = stack.enter_context(
            Engine(
                tmp_path,
                "spec",
                model,
                ",".join(node.target for node in nodes),
                transfer=SPEC,
                extra=CLUSTERED | PATIENT | SPEC_EXTRA,
            )
        )
        chats.check(engine, range(2))
        nodes[2].kill()
        engine.forget(connector=True)
        assert chats.check(engine, range(1, 3)) >= sum(len(prompt) - 64 for prompt in chats.prompts[1])
        assert "Traceback" not in engine.log()
