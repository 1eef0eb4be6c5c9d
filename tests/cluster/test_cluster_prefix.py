"""Look-ups of a cluster: each node counts its own blocks, over the fabric once it is attached, and gaps are filled."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Prefix
from kvstore.miss import Miss
from kvstore.names import block_key
from tests.cluster.test_cluster_client import three, world  # noqa: F401 - fixtures
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from kvstore.client import ClusterClient
    from tests.cluster.test_cluster_client import ThreeNodes


def by_exists(client: ClusterClient, keys: list[bytes]) -> Prefix:
    """The same result, by a look-up of each block."""
    for blocks, found in enumerate(client.exists(keys)):
        if isinstance(found, Miss):
            return Prefix(blocks, found)
    return Prefix(len(keys), None)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_prefix_agrees_with_a_look_up_of_each_block(world: ThreeNodes, replicas: int) -> None:  # noqa: F811
    client = world.client(replicas=replicas)
    client.attach()
    assert all(client.nodes.at(node.target).is_attached for node in world.nodes)
    world.put(client)
    dice, lost = random.Random(3), set[bytes]()
    for _ in range(6):
        told = client.prefix(world.keys)
        asked = by_exists(client, world.keys)
        assert (told.blocks, told.miss) == (asked.blocks, asked.miss)
        assert told.blocks == (
            len(world.keys) if replicas == 2 else min([*map(world.keys.index, lost), len(world.keys)])
        )
        key = dice.choice(world.keys)
        lost.add(key)
        client.nodes.at(client.owners(key)[0]).delete([key])  # the first copy
    assert client.prefix([block_key(b"never put"), *world.keys]).blocks == 0
    assert client.prefix([]) == Prefix(0, None)


def test_a_gap_that_another_node_fills_is_not_a_gap(world: ThreeNodes) -> None:  # noqa: F811
    """The first owner's blocks after it count, even though its own look-up ended there."""
    client = world.client()
    world.put(client)
    key = world.keys[20]
    first, second = map(client.nodes.at, world.client(replicas=2).owners(key))
    second.put_inline(key, b"the same block")
    first.delete([key])
    assert client.prefix(world.keys).blocks == len(world.keys)


def test_nodes_that_share_their_memory_are_called_without_grpc(world: ThreeNodes) -> None:  # noqa: F811
    client = world.client()
    world.put(client)
    world.got(client)
    wait_until(
        lambda: client.prefix(world.keys) == Prefix(len(world.keys), None, is_shared=True), "in memory"
    )
    calls = [client.nodes.at(node.target).calls for node in world.nodes]
    assert client.prefix(world.keys).is_shared
    assert [client.nodes.at(node.target).calls for node in world.nodes] == calls


def test_an_absent_node_is_not_an_error(world: ThreeNodes) -> None:  # noqa: F811
    client = world.client()
    world.put(client)
    world.kill(0)
    client.attach()
    assert client.prefix(world.keys).blocks < len(world.keys)
