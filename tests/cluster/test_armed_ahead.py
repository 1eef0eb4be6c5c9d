"""Puts that are armed ahead while the map changes: real nodes, on a real etcd and on maps that a test sets."""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import pytest

from kvstore.client import AsyncClusterClient, ClusterBlock, ClusterClient, Hit, Nodes
from kvstore.cluster.map import Map
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, FabricError, NotRegistered
from kvstore.names import block_key
from nic_offload.flags import FlagWord, FlagWords
from tests.cluster.test_async_cluster import run
from tests.cluster.test_upkeep import RealCluster, command
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client import ArmedPuts, ClusterPuts, RegisteredMemory
    from kvstore.demo.node_process import NodeProcess

COUNT, BYTES, WAIT_S = 24, 4096, 20.0


class ArmedCluster:
    """Three nodes, a client that follows maps set by the test, and blocks behind a flag."""

    def __init__(self, nodes: list[NodeProcess], stack: ExitStack, patched: pytest.MonkeyPatch) -> None:
        self.nodes, self._stack, self._patched = nodes, stack, patched
        self.source = bytearray(secrets.token_bytes(COUNT * BYTES))
        name = secrets.token_bytes(8)
        self.keys = [block_key(name, bytes([number])) for number in range(COUNT)]
        self.flags = stack.enter_context(FlagWords.create(1))
        self.revision = 0
        with Nodes([node.target for node in nodes]) as given:
            self._whole = given.map
        self.set_map()

    @property
    def flag(self) -> FlagWord:
        return self.flags[0]

    def set_map(self, *without: NodeProcess) -> None:
        self.revision += 1
        left = {node.target for node in without}
        now = Map.of(self.revision, [one for one in self._whole.members if one.node not in left])
        self._patched.setattr(Nodes, "map", now)

    def client(self, replicas: int = 1, **more: object) -> ClusterClient:
        targets = [node.target for node in self.nodes]
        more = {"slots": 16, "block_bytes_max": 1 << 20, **more}
        client = ClusterClient(targets, replicas=replicas, **more)  # type: ignore[arg-type]
        return self._stack.enter_context(client)

    def memory(self, client: ClusterClient) -> RegisteredMemory:
        return client.register(self.source)

    def blocks(self, memory: RegisteredMemory) -> list[ClusterBlock]:
        return [ClusterBlock(key, memory, at * BYTES, BYTES) for at, key in enumerate(self.keys)]

    def armed(self, client: ClusterClient, lease_ms: int = 30_000) -> ClusterPuts:
        return client.arm(self.blocks(self.memory(client)), self.flag, lease_ms=lease_ms)

    def there(self, client: ClusterClient, node: NodeProcess) -> set[bytes]:
        """The blocks that a node has, each exact."""
        got = client.nodes._client(node.target).get_many_inline([(key, BYTES) for key in self.keys])
        found = {key: data for key, data in zip(self.keys, got, strict=True) if isinstance(data, bytes)}
        for key, data in found.items():
            at = self.keys.index(key) * BYTES
            assert data == self.source[at : at + BYTES]
        return set(found)

    def owned(self, client: ClusterClient, node: NodeProcess) -> set[bytes]:
        return {key for key in self.keys if node.target in client.owners(key)}


@pytest.fixture(scope="module")
def nodes(module_folder: Path) -> Iterator[list[NodeProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(small_node(module_folder / f"node{number}")) for number in range(3)]


@pytest.fixture
def world(nodes: list[NodeProcess], monkeypatch: pytest.MonkeyPatch) -> Iterator[ArmedCluster]:
    with ExitStack() as stack:
        yield ArmedCluster(nodes, stack, monkeypatch)


def armed_at(puts: ClusterPuts) -> dict[str, int]:
    """The number of open puts at each node."""
    parts = puts._places.open_parts()
    return {
        node: sum(cast("ArmedPuts", one)._group.open_rows for one in some) for node, some in parts.items()
    }


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_puts_that_wait_for_their_flag_follow_the_map(
    world: ArmedCluster, replicas: int, transport: str
) -> None:
    client = world.client(replicas, transport=transport)
    puts = world.armed(client)
    left, *stay = world.nodes
    assert world.owned(client, left)
    world.set_map(left)
    wait_until(lambda: left.target not in armed_at(puts), "nothing is armed at the node that left")
    wait_until(lambda: sum(armed_at(puts).values()) == replicas * COUNT, "all is armed at the others")
    assert not puts.has_ended
    world.flag.store(1)
    results = puts.wait(WAIT_S)
    assert [(one.key, one.error, one.durability) for one in results] == [
        (key, None, Durability.WRITTEN) for key in world.keys
    ]
    assert puts.wait_landed(0)
    assert puts.has_ended
    assert not world.there(client, left)
    for node in stay:
        assert world.there(client, node) == world.owned(client, node)


def test_puts_armed_after_all_others_have_ended_follow_the_map(world: ArmedCluster) -> None:
    client = world.client(1)
    assert world.armed(client).cancel() == COUNT
    wait_until(lambda: not client._arming._ahead._followed, "nothing is followed")
    puts = world.armed(client)
    left = world.nodes[0]
    assert left.target in armed_at(puts)
    world.set_map(left)
    wait_until(lambda: left.target not in armed_at(puts), "nothing is armed at the node that left")
    puts.abandon()


def test_puts_return_to_a_node_that_comes_back(world: ArmedCluster) -> None:
    client = world.client(2)
    puts = world.armed(client)
    before = armed_at(puts)
    world.set_map(world.nodes[1], world.nodes[2])
    wait_until(lambda: armed_at(puts) == {world.nodes[0].target: COUNT}, "one node is left for one copy")
    assert not puts.has_ended, "the other copy waits for an owner"
    world.set_map()
    wait_until(lambda: armed_at(puts) == before, "each is where it was")
    world.flag.store(1)
    assert {one.error for one in puts.wait(WAIT_S)} == {None}
    assert sum(len(world.there(client, node)) for node in world.nodes) == 2 * COUNT


def test_a_put_that_waits_for_an_owner_ends_by_its_deadline(world: ArmedCluster) -> None:
    client = world.client(2)
    puts = world.armed(client, lease_ms=4_000)
    world.set_map(world.nodes[1], world.nodes[2])
    (late, *_) = puts.wait(0.3)
    assert isinstance(late.error, DeadlineExceeded)
    assert "continues" in str(late.error)
    began = time.monotonic()
    results = puts.wait(WAIT_S)
    assert time.monotonic() - began < 10
    assert {type(one.error) for one in results} == {DeadlineExceeded}
    assert "did not reach the put's threshold" in str(results[0].error)
    world.set_map()
    world.flag.store(1)
    time.sleep(0.3)
    assert not any(world.there(client, node) for node in world.nodes), "what was told as failed stays so"


def test_cancelled_and_abandoned_puts_do_not_follow_the_map(world: ArmedCluster) -> None:
    client = world.client(2)
    first, second = world.armed(client), world.armed(client)
    world.set_map(world.nodes[1], world.nodes[2])
    wait_until(lambda: armed_at(first) == armed_at(second) == {world.nodes[0].target: COUNT}, "they follow")
    assert first.cancel() == 2 * COUNT
    second.abandon()
    world.set_map()
    time.sleep(0.3)
    assert armed_at(first) == armed_at(second) == {}
    for puts in (first, second):
        wait_until(lambda puts=puts: puts.has_ended, "they have ended")  # type: ignore[misc]
        assert {type(one.error) for one in puts.wait(0)} == {FabricError}
    world.flag.store(1)
    time.sleep(0.2)
    assert not any(world.there(client, node) for node in world.nodes)


def test_closed_memory_is_not_registered_again(world: ArmedCluster) -> None:
    client = world.client(1)
    memory = world.memory(client)
    memory.close()
    with pytest.raises(NotRegistered, match="closed"):
        client.arm(world.blocks(memory), world.flag)


def test_a_put_whose_node_restarts_is_armed_there_again(world: ArmedCluster) -> None:
    """Its owner stays the same; the flag is stored while the node is away."""
    client = world.client(1)
    puts = world.armed(client)
    owned = world.owned(client, world.nodes[0])
    world.nodes[0].kill()
    world.flag.store(1)
    assert not puts.wait_landed(0.5), "the sources are in use"
    assert {type(one.error) for one in puts.wait(0)} <= {DeadlineExceeded, type(None)}
    world.nodes[0].start()
    assert {one.error for one in puts.wait(WAIT_S)} == {None}
    assert world.there(client, world.nodes[0]) == owned


def test_with_acks_any_no_put_waits_for_the_other_owner(world: ArmedCluster) -> None:
    client = world.client(2, acks="any")
    puts, same = world.armed(client), world.armed(client)
    world.nodes[0].kill()
    try:
        world.flag.store(1)
        began = time.monotonic()
        assert puts.wait_landed(WAIT_S)
        assert {one.error for one in puts.wait(WAIT_S)} == {None}
        assert {one.error for one in same.wait(WAIT_S)} == {None}
        assert time.monotonic() - began < 5
        wait_until(lambda: same.has_ended, "what was told as done is not put again")
    finally:
        world.nodes[0].start()
    time.sleep(0.7)
    assert not world.there(client, world.nodes[0])


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_with_acks_any_a_late_owner_never_gets_what_the_source_holds_after_the_result(
    world: ArmedCluster, transport: str
) -> None:
    """Most puts to the node that is stopped wait for a slot when their blocks have their results."""
    client = world.client(2, acks="any", slots=4, transport=transport)
    puts, source = world.armed(client), bytes(world.source)
    late = world.nodes[0]
    os.kill(late.pid, signal.SIGSTOP)
    try:
        world.flag.store(1)
        results = puts.wait(0)
        while all(one.error is not None for one in results):
            results = puts.wait(0.01)
            assert not puts._places.still_read(results)
        assert {one.error for one in puts.wait(WAIT_S)} == {None}
        world.source[:] = secrets.token_bytes(len(source))
    finally:
        os.kill(late.pid, signal.SIGCONT)
    wait_until(lambda: puts.has_ended, "nothing is put later")
    world.source[:] = source
    assert all(world.there(client, node) <= world.owned(client, node) for node in world.nodes)


# --- on a real etcd


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_owner_is_killed_before_its_flag_or_drained(tmp_path: Path, replicas: int) -> None:
    """Three batches: flags are stored when a node was killed, when it is off the map, and after a drain."""
    source = bytearray(secrets.token_bytes(3 * COUNT * BYTES))
    keys = [block_key(b"ahead", number.to_bytes(4)) for number in range(3 * COUNT)]
    parts = [slice(at * COUNT, (at + 1) * COUNT) for at in range(3)]
    with ExitStack() as stack:
        cluster = RealCluster(tmp_path, stack, 3)
        lost, drained, _ = cluster.nodes
        reach = [node.target for node in cluster.nodes]
        client = stack.enter_context(
            ClusterClient(reach, replicas=replicas, slots=16, block_bytes_max=1 << 20)
        )
        flags = stack.enter_context(FlagWords.create(3))
        memory = client.register(source)
        blocks = [ClusterBlock(key, memory, at * BYTES, BYTES) for at, key in enumerate(keys)]
        puts = [client.arm(blocks[part], flags[at], lease_ms=120_000) for at, part in enumerate(parts)]
        for part in parts:
            assert any(lost.target in client.owners(key) for key in keys[part])
        lost.kill()
        flags[0].store(1)
        assert {one.error for one in puts[0].wait(60)} == {None}
        cluster.nodes.remove(lost)
        cluster.settled()
        flags[1].store(1)
        assert {one.error for one in puts[1].wait(60)} == {None}
        lost.start()
        cluster.nodes.append(lost)
        cluster.settled()
        assert command("drain", drained.target).returncode == 0
        wait_until(lambda: drained.target not in armed_at(puts[2]), "no put is at the drained node")
        flags[2].store(1)
        assert {one.error for one in puts[2].wait(60)} == {None}
        assert not any(cluster.there(drained, keys[parts[2]]))
        drained.stop()
        target = bytearray(len(source))
        got = client.register(target)
        outcomes = client.get([ClusterBlock(key, got, at * BYTES, BYTES) for at, key in enumerate(keys)])
        assert {type(one) for one in outcomes} == {Hit}
        assert target == source


def test_asyncio_behaves_the_same(world: ArmedCluster) -> None:
    async def work() -> None:
        targets = [node.target for node in world.nodes]
        async with AsyncClusterClient(targets, replicas=2, slots=16, block_bytes_max=1 << 20) as client:
            puts = await client.arm(world.blocks(await client.register(world.source)), world.flag)
            world.set_map(world.nodes[0])
            await client.call(
                wait_until, lambda: world.nodes[0].target not in armed_at(puts.armed), "they follow"
            )
            world.flag.store(1)
            assert {one.error for one in await puts.wait(WAIT_S)} == {None}
            assert not await client.call(world.there, client.sync, world.nodes[0])

    run(work())
