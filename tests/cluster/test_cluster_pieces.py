"""A cluster's client with blocks of many pieces: gathered by a put, scattered by a get, whichever nodes have them."""

from __future__ import annotations

import secrets
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.client import ClusterBlock, ClusterClient, Hit, Nodes, as_request
from kvstore.cluster.map import Map
from kvstore.miss import Miss
from kvstore.names import block_key
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client import RegisteredMemory
    from kvstore.demo.node_process import NodeProcess

COUNT, PAGE, LAYERS = 40, 512, 6
BYTES = PAGE * LAYERS
WAIT_S = 20.0


class PiecesCluster:
    """Two nodes for each block, and an engine's memory: K and V apart, layer by layer, a page of each for a block."""

    def __init__(self, nodes: list[NodeProcess], stack: ExitStack) -> None:
        self.nodes = nodes
        targets = [node.target for node in nodes]
        self.client = stack.enter_context(
            ClusterClient(targets, replicas=2, slots=COUNT, block_bytes_max=1 << 20)
        )
        self.sources = [bytearray(secrets.token_bytes(COUNT * BYTES // 2)) for _ in "kv"]
        self.targets = [bytearray(COUNT * BYTES // 2) for _ in "kv"]
        name = secrets.token_bytes(8)
        self.keys = [block_key(name, number.to_bytes(4)) for number in range(COUNT)]
        self.source, self.target = (
            tuple(stack.enter_context(self.client.register(one)) for one in memories)
            for memories in (self.sources, self.targets)
        )

    def rows(self, at: int, layers: range = range(LAYERS)) -> bytes:
        """The pages of a block: of even layers in the first memory, of odd ones in the second."""
        return b"".join(
            struct.pack("=IIQ", layer % 2, PAGE, (layer // 2 * COUNT + at) * PAGE) for layer in layers
        )

    def blocks(self, memories: tuple[RegisteredMemory, ...]) -> list[ClusterBlock]:
        return [ClusterBlock.of_pieces(key, memories, self.rows(at)) for at, key in enumerate(self.keys)]

    def content(self, memories: list[bytearray], at: int, layers: range = range(LAYERS)) -> bytes:
        return b"".join(
            memories[memory][offset : offset + length]
            for memory, length, offset in struct.iter_unpack("=IIQ", self.rows(at, layers))
        )

    def put(self) -> None:
        assert {one.error for one in self.client.put(self.blocks(self.source), timeout_s=WAIT_S)} == {None}

    def got(self) -> int:
        for memory in self.targets:
            memory[:] = bytes(len(memory))
        outcomes = self.client.get(self.blocks(self.target), timeout_s=WAIT_S)
        for at, outcome in enumerate(outcomes):
            assert isinstance(outcome, Miss) or self.content(self.targets, at) == self.content(
                self.sources, at
            )
        return sum(isinstance(one, Hit) for one in outcomes)


@pytest.fixture(scope="module")
def three(module_folder: Path) -> Iterator[list[NodeProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(small_node(module_folder / f"node{number}")) for number in range(3)]


@pytest.fixture
def world(three: list[NodeProcess]) -> Iterator[PiecesCluster]:
    with ExitStack() as stack:
        yield PiecesCluster(three, stack)


def test_a_part_of_a_block_is_scattered_into_pieces_and_not_put_back_as_the_whole(
    world: PiecesCluster,
) -> None:
    world.put()
    first = world.client.nodes.at(world.client.owners(world.keys[5])[0])
    assert first.delete([world.keys[5]]) == [True]
    layers = range(2, 5)
    part = ClusterBlock.of_pieces(
        world.keys[5], world.target, world.rows(5, layers), whole=BYTES, skip=2 * PAGE
    )
    (outcome,) = world.client.get([part], timeout_s=WAIT_S)
    assert isinstance(outcome, Hit)
    assert world.content(world.targets, 5, layers) == world.content(world.sources, 5, layers)
    assert not any(world.content(world.targets, 5, range(2)))
    assert part.copied() is None
    whole = ClusterBlock.of_pieces(world.keys[5], world.target, world.rows(5))
    assert whole.copied() == world.content(world.targets, 5)


def test_a_block_that_an_owner_lacks_is_put_back_from_its_pieces(
    world: PiecesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.nodes[0].target
    whole = world.client.nodes.map
    with monkeypatch.context() as patched:  # it was off the map
        patched.setattr(Nodes, "map", Map.of(1, [one for one in whole.members if one.node != first]))
        world.put()
    there = world.client.nodes.at(first)
    theirs = [key for key in world.keys if world.client.owners(key)[0] == first]
    assert there.prefix(theirs).blocks == 0 < len(theirs)

    def are_back() -> bool:
        """Get the blocks until both nodes have them; a new node accepts no copies at first."""
        assert world.got() == COUNT
        return there.prefix(theirs).blocks == len(theirs)

    wait_until(are_back, "the blocks are at the node that lacked them", WAIT_S)
    for key in theirs:
        assert there.get_inline(key, BYTES) == world.content(world.sources, world.keys.index(key))


def test_each_node_gets_the_callers_request_id(world: PiecesCluster) -> None:
    """For `kvstore explain`: a request's look-ups are found by its id on every node called."""
    world.put()
    with as_request("cmpl-of-a-cluster"):
        assert world.got() == COUNT
    for node in world.nodes:
        client = world.client.nodes.at(node.target)
        assert client.looked_up("cmpl-of-a-cluster").lookups, node.target
