"""A client of several nodes: all clients agree on homes, and a lost node affects only its own users."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Hit, Nodes
from kvstore.errors import Closed, ConfigError, NodeUnavailable
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.conftest import small_node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

WAIT_S = 20.0
PAGE = 4096
THREE = ["10.0.0.1:7070", "10.0.0.2:7070", "10.0.0.3:7070"]
USERS = [f"user {number}" for number in range(3000)]


def homes(nodes: Nodes) -> dict[str, str]:
    return {user: nodes.home(user) for user in USERS}


def test_clients_with_the_same_nodes_agree_on_evenly_distributed_homes() -> None:
    with Nodes(THREE) as one, Nodes([*reversed(THREE), THREE[0]]) as other:
        assert homes(one) == homes(other)
        for target in THREE:
            share = sum(home == target for home in homes(one).values()) / len(USERS)
            assert 0.28 < share < 0.39


def test_a_new_node_takes_users_and_moves_no_others() -> None:
    with Nodes(THREE[:2]) as two, Nodes(THREE) as three:
        before, after = homes(two), homes(three)
        moved = [user for user in USERS if before[user] != after[user]]
        assert {after[user] for user in moved} == {THREE[2]}
        assert 0.28 < len(moved) / len(USERS) < 0.39


def test_a_node_of_twice_the_weight_has_twice_the_users() -> None:
    with Nodes(THREE[:2], weights={THREE[0]: 2}) as nodes:
        share = sum(home == THREE[0] for home in homes(nodes).values()) / len(USERS)
    assert 0.61 < share < 0.72


def test_users_of_the_same_name_in_two_tenants_are_placed_separately() -> None:
    with Nodes(THREE, tenant="acme") as acme, Nodes(THREE, tenant="zeta") as zeta:
        same = sum(acme.home(user) == zeta.home(user) for user in USERS) / len(USERS)
    assert same < 0.45


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    with (
        small_node(tmp_path / "one") as one,
        small_node(tmp_path / "two") as two,
    ):
        yield [one, two]


def test_a_lost_node_is_a_miss_for_its_own_users_only(pair: list[NodeProcess]) -> None:
    memory = allocate(64 * PAGE)
    memory[:] = random.Random(1).randbytes(len(memory))
    content = bytes(memory)
    with (
        Nodes([node.target for node in pair]) as nodes,
        FlagWords.create(1) as flags,
        nodes.register(memory) as everywhere,
    ):
        blocks = {}
        for number in range(32):
            client = nodes.of(f"user {number}")
            kv = everywhere.at(client)
            blocks[number] = Block(block_key(bytes([number])), kv, number * PAGE, PAGE)
            flags[0].store(0)
            puts = client.arm([blocks[number]], flags[0])
            flags[0].store(1)
            assert [result.error for result in puts.wait(WAIT_S)] == [None]
        lost = {number for number in blocks if nodes.home(f"user {number}") == pair[0].target}
        assert 0 < len(lost) < 32
        pair[0].kill()
        memory[:] = bytes(len(memory))
        began = time.monotonic()
        for number, block in blocks.items():
            (outcome,) = nodes.of(f"user {number}").get([block], timeout_s=WAIT_S)
            at = slice(block.offset, block.offset + PAGE)
            if number in lost:
                assert isinstance(outcome, Miss)
                assert outcome.reason is MissReason.NODE_AWAY
                assert not any(memory[at])
            else:
                assert outcome == Hit(block.key)
                assert memory[at] == content[at]
        assert time.monotonic() - began < WAIT_S
        client = nodes.at(pair[0].target)
        with pytest.raises(NodeUnavailable):
            client.reserve([blocks[min(lost)]])
        pair[0].start()
        client.status(wait_s=WAIT_S)
        assert client.get([blocks[min(lost)]], timeout_s=WAIT_S) == [Hit(blocks[min(lost)].key)]


@pytest.mark.parametrize(
    ("targets", "weights", "why"),
    [
        ([], None, "1 to 64 nodes, not 0"),
        ([f"h:{port}" for port in range(65)], None, "not 65"),
        (THREE, {"elsewhere:1": 1}, "is not one of the nodes"),
        (THREE, {THREE[0]: 0}, "A node's weight is 1 to"),
    ],
)
def test_invalid_lists_of_nodes_are_refused(
    targets: list[str], weights: dict[str, int] | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        Nodes(targets, weights=weights)


def test_a_single_address_is_one_node() -> None:
    with Nodes("10.0.0.5:7070") as nodes:
        assert nodes.reach.nodes == ("10.0.0.5:7070",)


def test_an_unlisted_node_and_a_closed_client_are_refused() -> None:
    with Nodes(THREE) as nodes, pytest.raises(ConfigError, match="not one of the nodes"):
        nodes.at("elsewhere:1")
    with pytest.raises(Closed, match="are closed"):
        nodes.of("user 1")
