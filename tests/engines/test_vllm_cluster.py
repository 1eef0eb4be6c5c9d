"""vLLM with a cluster of three nodes and two copies of each chunk: one node is lost and replaced."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.cluster.real_etcd import RealEtcd
from tests.cluster.reports import all_copies_are_made, members_are
from tests.cluster.test_upkeep import told
from tests.engines.engine import PATIENT, Engine
from tests.engines.node import Node, until
from tests.engines.test_vllm import SPEC, SPEC_EXTRA
from tests.engines.test_vllm_tier import check_digests, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.chats import Chats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def are_the_members(nodes: list[Node]) -> bool:
    return members_are(map(told, nodes), [node.target for node in nodes])


def all_is_on_two(nodes: list[Node]) -> bool:
    return all_copies_are_made([told(node) for node in nodes])


@pytest.mark.parametrize("way", ["tier", "connector"])
def test_a_node_is_killed_in_the_middle_of_conversations_and_replaced(
    place: Path, model: Path, chats: Chats, tmp_path: Path, way: str
) -> None:
    """They continue with hits and the same output; all blocks return to two nodes without intervention."""
    with ExitStack() as stack:
        etcd = stack.enter_context(RealEtcd(tmp_path / "etcd"))
        of_cluster = ("--cluster", f"{etcd.endpoints[0]}/chats", "--cluster-replicas", "2")

        def add(name: str) -> Node:
            return stack.enter_context(Node(tmp_path / name, arguments=of_cluster))

        first, lost, last = (add(f"node{number}") for number in range(3))
        until(lambda: are_the_members([first, lost, last]), "three members")
        more = {"replicas": 2, "transport": "fabric", "call_timeout_ms": 1_000}
        if way == "tier":
            engine = stack.enter_context(start(place, "members", model, first.target, **more))
            forget = engine.drop_pool
        else:
            extra = PATIENT | more
            engine = stack.enter_context(Engine(place, "members", model, first.target, extra=extra))
            forget = engine.forget
        chats.check(engine, range(2))

        lost.kill()
        forget()
        again = sum(len(prompt) - 64 for prompt in chats.prompts[1])
        assert chats.check(engine, range(1, 2)) >= again
        assert chats.check(engine, range(2, 3)) >= again

        new = add("node3")
        until(lambda: are_the_members([first, last, new]), "the new member")
        until(lambda: all_is_on_two([first, last, new]), "two copies of all")

        last.kill()  # what it had is on the two others: what was there before, and what the new one was given
        forget()
        assert chats.check(engine, range(3, 4)) >= sum(len(prompt) - 64 for prompt in chats.prompts[2])
        check_digests(engine)
        assert "Traceback" not in engine.log()


def test_the_offloading_spec_keeps_chunks_on_two_nodes(model: Path, chats: Chats, tmp_path: Path) -> None:
    """Without etcd: these nodes are only configured."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(tmp_path / f"node{number}")) for number in range(3)]
        engine = stack.enter_context(
            Engine(
                tmp_path,
                "spec",
                model,
                ",".join(node.target for node in nodes),
                transfer=SPEC,
                extra={"replicas": 2, "call_timeout_ms": 1_000} | PATIENT | SPEC_EXTRA,
            )
        )
        chats.check(engine, range(2))
        nodes[2].kill()
        engine.forget(connector=True)
        assert chats.check(engine, range(1, 3)) >= sum(len(prompt) - 64 for prompt in chats.prompts[1])
        assert "Traceback" not in engine.log()
