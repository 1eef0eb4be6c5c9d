"""A client of a whole cluster: spreading, replicas, and the cost of a member that dies or hangs."""

from __future__ import annotations

import os
import secrets
import signal
import struct
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.client import ClusterBlock, ClusterClient, Hit, Nodes, Stored
from kvstore.client.grpc_blocks import InlineCalls
from kvstore.cluster.map import Map
from kvstore.durability import Durability
from kvstore.engines.carrier import Carrier, Place
from kvstore.engines.common_settings import EngineSettings
from kvstore.errors import Closed, Expired, InvalidArgument, KeyTaken, KvError, NodeUnavailable
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.reach import Reach
from nic_offload.flags import FlagWords
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client import RegisteredMemory
    from kvstore.demo.node_process import NodeProcess

COUNT, BYTES = 120, 8192
WAIT_S = 10.0


class ThreeNodes:
    """Three nodes given by address, and any number of clients."""

    def __init__(self, nodes: list[NodeProcess], stack: ExitStack) -> None:
        self._stack, self.nodes = stack, nodes
        self.source = bytearray(secrets.token_bytes(COUNT * BYTES))
        self.target = bytearray(COUNT * BYTES)
        self.killed: list[NodeProcess] = []
        name = secrets.token_bytes(8)
        self.keys = [block_key(name, number.to_bytes(4)) for number in range(COUNT)]

    def client(self, replicas: int = 1, **more: object) -> ClusterClient:
        targets = [node.target for node in self.nodes]
        client = ClusterClient(targets, replicas=replicas, slots=16, block_bytes_max=1 << 20, **more)  # type: ignore[arg-type]
        return self._stack.enter_context(client)

    def blocks(self, memory: RegisteredMemory, threshold: int = 1) -> list[ClusterBlock]:
        return [ClusterBlock(key, memory, at * BYTES, BYTES, threshold) for at, key in enumerate(self.keys)]

    def kill(self, number: int) -> NodeProcess:
        lost = self.nodes[number]
        lost.kill()
        self.killed.append(lost)
        return lost

    def put(self, client: ClusterClient) -> None:
        with client.register(self.source) as memory:
            results = client.put(self.blocks(memory), timeout_s=WAIT_S)
        assert {one.error for one in results} == {None}
        assert {one.durability for one in results} == {Durability.WRITTEN}

    def got(self, client: ClusterClient, timeout_s: float = WAIT_S) -> list[Hit | Miss]:
        """Get blocks; each hit must be exact."""
        self.target[:] = bytes(len(self.target))
        with client.register(self.target) as memory:
            outcomes = client.get(self.blocks(memory), timeout_s=timeout_s)
        for at, outcome in enumerate(outcomes):
            piece = slice(at * BYTES, (at + 1) * BYTES)
            assert isinstance(outcome, Miss) or self.target[piece] == self.source[piece]
        return outcomes


@pytest.fixture(scope="module")
def three(module_folder: Path) -> Iterator[list[NodeProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(small_node(module_folder / f"node{number}")) for number in range(3)]


@pytest.fixture
def world(three: list[NodeProcess]) -> Iterator[ThreeNodes]:
    with ExitStack() as stack:
        world = ThreeNodes(three, stack)
        yield world
        for node in world.killed:
            node.start()


def hits(outcomes: list[Hit | Miss]) -> int:
    return sum(isinstance(one, Hit) for one in outcomes)


def counts(world: ThreeNodes, client: ClusterClient) -> dict[str, int]:
    return {
        node.target: sum(not isinstance(one, Miss) for one in client.nodes.at(node.target).exists(world.keys))
        for node in world.nodes
    }


def test_blocks_are_spread_and_found_where_they_were_put(world: ThreeNodes) -> None:
    client = world.client()
    world.put(client)
    assert hits(world.got(client)) == COUNT
    there = counts(world, client)
    assert sum(there.values()) == COUNT
    assert min(there.values()) > COUNT // 8
    assert client.prefix(world.keys).blocks == COUNT
    assert client.prefix([*world.keys[:7], block_key(b"none"), *world.keys]).blocks == 7
    other = world.client()
    assert hits(world.got(other)) == COUNT, "whoever has the same map finds them"
    assert client.delete(world.keys[:3]) == [True] * 3
    assert [type(one) for one in client.exists(world.keys[:4])][:3] == [Miss] * 3
    assert hits(world.got(other)) == COUNT - 3


@pytest.mark.parametrize("transport", ["auto", "grpc"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_nodes_that_need_longer_than_a_first_try_are_waited_for(
    world: ThreeNodes, replicas: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client(replicas=replicas, transport=transport)
    world.put(client)
    monkeypatch.setattr("kvstore.client.cluster_reads.CLUSTER_FIRST_TRY_MS", 0.01)
    assert hits(world.got(client)) == COUNT
    assert not any(isinstance(one, Miss) for one in client.exists(world.keys, timeout_s=WAIT_S))
    assert client.prefix(world.keys, timeout_s=WAIT_S).blocks == COUNT


def test_grpc_blocks_are_spread_too(world: ThreeNodes) -> None:
    client = world.client(replicas=2)
    pages = [(key, bytes(world.source[at * 64 : at * 64 + 64])) for at, key in enumerate(world.keys)]
    assert {one.error for one in client.put_many_inline(pages)} == {None}
    assert sum(counts(world, client).values()) == 2 * COUNT
    told = list(client.get_many_inline([(key, 64) for key in world.keys]))
    assert told == [data for _, data in pages]
    assert client.put_inline(block_key(b"one"), b"its bytes") is Durability.WRITTEN
    assert client.get_inline(block_key(b"one"), 9) == b"its bytes"
    missed = client.get_inline(block_key(b"another"), 9)
    assert isinstance(missed, Miss)
    assert missed.reason is MissReason.UNKNOWN


def test_calls_in_a_forked_child_fail_at_once(world: ThreeNodes) -> None:
    """The threads that call several nodes are the parent's."""
    client = world.client()
    world.put(client)
    child = os.fork()
    if not child:
        try:
            client.exists(world.keys)
        except Closed:
            os._exit(0)
        finally:
            os._exit(1)
    codes: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        codes.append(os.waitstatus_to_exitcode(status))
        return pid == child

    try:
        wait_until(has_ended, "the child ends", WAIT_S)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    assert codes[-1] == 0
    assert hits(world.got(client)) == COUNT


def test_one_flag_fires_the_puts_to_both_owners(world: ThreeNodes) -> None:
    client = world.client(replicas=2)
    with client.register(world.source) as memory, FlagWords.create(1) as flags:
        blocks = [
            ClusterBlock(key, memory, at * BYTES, BYTES, threshold=1 + at // 60)
            for at, key in enumerate(world.keys)
        ]
        puts = client.arm(blocks, flags[0])
        assert {type(one) for one in client.exists(world.keys)} == {Miss}
        flags[0].store(1)
        wait_until(lambda: sum(counts(world, client).values()) == COUNT, "60 blocks are on two nodes each")
        assert not puts.has_ended
        flags[0].store(2)
        results = puts.wait(WAIT_S)
        assert puts.has_ended
    assert {one.error for one in results} == {None}
    assert [one.key for one in results] == world.keys
    assert sum(counts(world, client).values()) == 2 * COUNT
    assert all(0 < one.fired_ns <= one.landed_ns <= one.durable_ns for one in results)


def test_if_one_node_refuses_nothing_is_armed_at_the_others(world: ThreeNodes) -> None:
    client = world.client(replicas=2)
    with client.register(world.source) as memory, FlagWords.create(1) as flags:
        client.arm(world.blocks(memory, threshold=9), flags[0]).abandon()
        client.nodes.at(world.nodes[1].target).close()
        with pytest.raises(Closed):
            client.arm(world.blocks(memory), flags[0])
        flags[0].store(1)
        time.sleep(0.3)
    for number in (0, 2):
        assert client.nodes.at(world.nodes[number].target).prefix(world.keys).blocks == 0


def test_with_two_replicas_nothing_is_lost_with_a_node(world: ThreeNodes) -> None:
    client = world.client(replicas=2)
    world.put(client)
    world.kill(1)
    assert hits(world.got(client)) == COUNT
    assert client.prefix(world.keys).blocks == COUNT
    fresh = world.client(replicas=2)
    assert hits(world.got(fresh)) == COUNT


def test_blocks_put_while_an_owner_was_off_the_map_are_found_without_the_other(
    world: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client(replicas=2)
    whole = client.nodes.map
    off, lost = world.nodes[0].target, world.nodes[1]
    without = Map.of(1, [one for one in whole.members if one.node != off])
    with monkeypatch.context() as patched:
        patched.setattr(Nodes, "map", without)
        world.put(client)
    assert counts(world, client)[off] == 0
    world.kill(1)
    assert any(client.owners(key) == [lost.target, off] for key in world.keys)
    assert hits(world.got(client)) == COUNT


def test_a_map_change_during_a_call_does_not_reach_the_caller(
    world: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call is split by the map with all nodes; one of them is on no later map."""
    client = world.client(replicas=2)
    whole, left = client.nodes.map, world.nodes[0].target
    without = Map.of(1, [one for one in whole.members if one.node != left])
    maps: Iterator[Map] = iter(())

    @contextmanager
    def changes() -> Iterator[None]:
        nonlocal maps
        maps = chain([whole], repeat(without))
        with monkeypatch.context() as patched:
            patched.setattr(Nodes, "map", property(lambda _: next(maps)))
            yield

    with changes():
        assert {one.error for one in client.put_many_inline((key, bytes(BYTES)) for key in world.keys)} == {
            None
        }
    assert counts(world, client) == {node.target: 0 if node.target == left else COUNT for node in world.nodes}
    with changes():
        assert set(client.get_many_inline([(key, BYTES) for key in world.keys[:64]])) == {bytes(BYTES)}
    with changes(), client.pin(world.keys) as pin:
        assert pin.pinned == [True] * COUNT
    with changes():
        assert client.delete(world.keys) == [True] * COUNT
    with changes():
        world.put(client)
    with changes():
        assert hits(world.got(client)) == COUNT
    with changes(), client.register(world.source) as memory:
        puts = client.arm(world.blocks(memory))
        assert {one.error for one in puts.wait(WAIT_S)} == {None}
        puts.abandon()


def test_blocks_that_a_joining_node_takes_over_are_found_at_their_old_owner(
    world: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client()
    whole, joins = client.nodes.map, world.nodes[2].target
    before = Map.of(1, [one for one in whole.members if one.node != joins])
    with monkeypatch.context() as patched:
        patched.setattr(Nodes, "map", before)
        world.put(client)
    moved = [key for key in world.keys if client.owners(key) == [joins]]
    assert len(moved) > COUNT // 8

    def has_them() -> bool:
        assert hits(world.got(client)) == COUNT
        return client.nodes.at(joins).prefix(moved).blocks == len(moved)

    wait_until(has_them, "it has what it took", 2 * WAIT_S)


@pytest.mark.parametrize("way", ["fabric", "grpc"])
def test_a_block_fetched_from_the_second_owner_is_put_back_to_the_first(
    world: ThreeNodes, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client(replicas=2)
    first = world.nodes[1].target
    whole = client.nodes.map
    with monkeypatch.context() as patched:  # it was off the map
        patched.setattr(Nodes, "map", Map.of(1, [one for one in whole.members if one.node != first]))
        world.put(client)
    theirs = [key for key in world.keys if client.owners(key)[0] == first]
    assert len(theirs) > COUNT // 8
    there = client.nodes.at(first)

    def are_back() -> bool:
        """Get the blocks until both nodes have them; a new node accepts no copies at first."""
        if way == "fabric":
            assert hits(world.got(client)) == COUNT
        else:
            told = list(client.get_many_inline([(key, BYTES) for key in world.keys]))
            assert b"".join(one for one in told if isinstance(one, bytes)) == world.source
        world.target[:] = bytes(len(world.target))  # what is put back is no longer there
        return there.prefix(theirs).blocks == len(theirs)

    wait_until(are_back, "they are on both again", 2 * WAIT_S)
    at = [world.keys.index(key) for key in theirs]
    assert list(there.get_many_inline([(key, BYTES) for key in theirs])) == [
        bytes(world.source[one * BYTES : (one + 1) * BYTES]) for one in at
    ]


def test_a_block_deleted_after_it_was_read_is_not_put_back(
    world: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client(replicas=2)
    world.put(client)
    first = world.nodes[1].target
    theirs = [key for key in world.keys if client.owners(key)[0] == first]
    client.nodes.at(first).delete(theirs[1:2])  # a node that was replaced knows of no deletion; this one does
    put, begun, goes_on, failed = InlineCalls.put, threading.Event(), threading.Event(), []

    def late(*given: object, **more: object) -> object:
        """Delete the block everywhere between its read and its repair."""
        begun.set()
        assert goes_on.wait(WAIT_S)
        try:
            return put(*given, **more)  # type: ignore[arg-type]
        except KvError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(InlineCalls, "put", late)
    assert hits(world.got(client)) == COUNT
    assert begun.wait(WAIT_S)
    assert client.delete(theirs) == [True] * len(theirs)
    goes_on.set()
    wait_until(lambda: len(failed) == 1, "the copy is refused", WAIT_S)
    assert isinstance(failed[0], Expired)
    assert [type(one) for one in client.exists(theirs)] == [Miss] * len(theirs)
    monkeypatch.setattr(InlineCalls, "put", put)
    client.nodes.at(first).put_inline(theirs[1], b"put anew")
    assert client.nodes.at(first).get_inline(theirs[1], 8) == b"put anew", "which is no copy"


def test_a_block_that_is_put_back_keeps_its_time_to_live(
    world: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client(replicas=2)
    first, whole = world.nodes[1].target, client.nodes.map
    ends_ms = time.time_ns() // 1_000_000 + 3_600_000
    with monkeypatch.context() as patched:  # it was off the map
        patched.setattr(Nodes, "map", Map.of(1, [one for one in whole.members if one.node != first]))
        pages = [(key, world.source[at * BYTES : (at + 1) * BYTES]) for at, key in enumerate(world.keys)]
        assert {one.error for one in client.put_many_inline(pages, expires_unix_ms=ends_ms)} == {None}
    theirs = [key for key in world.keys if client.owners(key)[0] == first]

    def ends() -> list[int]:
        """When the copies expire; a new node accepts none at first."""
        assert hits(world.got(client)) == COUNT
        there = client.nodes.at(first).exists(theirs)
        return [one.expires_unix_ms for one in there if isinstance(one, Stored)]

    wait_until(lambda: len(ends()) == len(theirs) > COUNT // 8, "they are on both again", 2 * WAIT_S)
    assert set(ends()) == {ends_ms}


def test_repairs_are_bounded(world: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.repairs.REPAIR_BYTES_MAX", 3 * BYTES)
    client = world.client(replicas=2)
    world.put(client)
    put = threading.Event()
    monkeypatch.setattr(InlineCalls, "put", lambda *_, **__: put.wait(WAIT_S))
    for node in world.nodes:
        client.nodes.at(node.target).delete(
            [key for key in world.keys if client.owners(key)[0] == node.target]
        )
    assert hits(world.got(client)) == COUNT
    assert client._repairs._held_bytes == 3 * BYTES
    put.set()
    wait_until(lambda: client._repairs._held_bytes == 0, "they are let go", WAIT_S)


def test_with_one_replica_only_the_lost_nodes_blocks_are_missed_with_the_reason(world: ThreeNodes) -> None:
    client = world.client()
    world.put(client)
    there = counts(world, client)
    lost = world.kill(1)
    outcomes = world.got(client)
    assert hits(outcomes) == COUNT - there[lost.target]
    assert {one.reason for one in outcomes if isinstance(one, Miss)} == {MissReason.NODE_AWAY}
    away = [one for one in client.exists(world.keys) if isinstance(one, Miss)]
    assert {one.reason for one in away} == {MissReason.NODE_AWAY}
    assert len(away) == there[lost.target]


def test_a_hanging_node_costs_its_blocks_a_first_try_and_the_others_nothing(world: ThreeNodes) -> None:
    client = world.client(replicas=2)
    world.put(client)
    hangs = world.nodes[2]
    stop(hangs.pid)
    try:
        began = time.monotonic()
        assert hits(world.got(client, timeout_s=6)) == COUNT
        assert time.monotonic() - began < 4
    finally:
        os.kill(hangs.pid, signal.SIGCONT)
    wait_until(lambda: hits(world.got(client)) == COUNT, "all is as before")


def test_a_put_of_two_replicas_is_acknowledged_only_by_two(world: ThreeNodes) -> None:
    client = world.client(replicas=2, call_timeout_ms=1500)
    theirs = {key for key in world.keys if world.nodes[0].target in client.owners(key)}
    assert 0 < len(theirs) < COUNT
    world.kill(0)
    with client.register(world.source) as memory:
        results = client.put(world.blocks(memory), timeout_s=5)
    assert {one.key for one in results if one.error is not None} == theirs
    assert all(one.durability is None for one in results if one.error is not None)
    assert hits(world.got(client)) == COUNT, "one copy of each is there all the same"


def test_with_acks_any_one_of_two_is_enough(world: ThreeNodes) -> None:
    client = world.client(replicas=2, acks="any", call_timeout_ms=1500)
    world.put(client)  # with both
    world.client(replicas=2).delete(world.keys)  # `client` may think that a busy node is down
    hangs = world.nodes[0]
    stop(hangs.pid)
    try:
        began = time.monotonic()
        world.put(client)
        assert time.monotonic() - began < 5
        assert hits(world.got(client)) == COUNT
    finally:
        os.kill(hangs.pid, signal.SIGCONT)


def test_an_absent_owner_and_one_with_another_block_is_key_taken(world: ThreeNodes) -> None:
    """Not an absent node: a get of any copy finds one under that key."""
    client = world.client(replicas=2, acks="any", call_timeout_ms=1500)
    key = block_key(secrets.token_bytes(8), b"taken")
    away, there = client.owners(key)
    assert client.nodes.at(there).put_inline(key, b"another") is Durability.WRITTEN
    world.kill([node.target for node in world.nodes].index(away))
    (result,) = client.put_many_inline([(key, b"one")])
    assert isinstance(result.error, KeyTaken)
    assert result.has_block


@pytest.mark.parametrize("acks", ["all", "any"])
def test_a_put_fails_if_an_owner_has_another_block_even_if_one_copy_is_enough(
    world: ThreeNodes, acks: str
) -> None:
    """Otherwise a client that reads from that owner would get older bytes than an acknowledged put."""
    client = world.client(replicas=2, acks=acks)
    for at in range(2):
        key = block_key(secrets.token_bytes(8), b"taken")
        client.nodes.at(client.owners(key)[at]).put_inline(key, b"another")
        (result,) = client.put_many_inline([(key, b"one")])
        assert isinstance(result.error, KeyTaken)
        assert result.has_block
        assert client.delete([key]) == [True]
        assert client.put_inline(key, b"one") is Durability.WRITTEN
        with client.register(bytearray(b"two")) as memory:
            (armed,) = client.put([ClusterBlock(key, memory, 0, 3)])
        assert isinstance(armed.error, KeyTaken)


def test_with_one_node_left_two_copies_are_not_promised(tmp_path: Path) -> None:
    with (
        small_node(tmp_path / "node") as node,
        ClusterClient([node.target], replicas=2) as client,
    ):
        (result,) = client.put_many_inline([(block_key(b"one"), b"its bytes")])
        assert isinstance(result.error, NodeUnavailable)
        assert "2 copies are required" in str(result.error)
        with pytest.raises(NodeUnavailable):
            client.put_inline(block_key(b"two"), b"its bytes")
        assert client.get_inline(block_key(b"one"), 9) == b"its bytes"


def test_a_deletion_that_a_member_has_not_confirmed_is_not_acknowledged(world: ThreeNodes) -> None:
    client = world.client(replicas=2, call_timeout_ms=1500)
    world.put(client)
    world.kill(0)
    with pytest.raises(KvError):
        client.delete(world.keys[:5])
    assert [type(one) for one in client.exists(world.keys[:5])] == [Miss] * 5, "the others did it"
    world.killed.pop().start()
    wait_until(lambda: any(not isinstance(one, Miss) for one in client.exists(world.keys[:5])), "as was said")
    client.delete(world.keys[:5])
    assert [type(one) for one in client.exists(world.keys[:5])] == [Miss] * 5


def test_a_pin_holds_on_each_owner(world: ThreeNodes) -> None:
    client = world.client(replicas=2)
    world.put(client)
    with client.pin([*world.keys[:3], block_key(b"none")], time_to_live_ms=10_000) as pin:
        assert pin.pinned == [True, True, True, False]
    world.kill(0)
    with client.pin(world.keys[:3], time_to_live_ms=10_000) as pin:
        assert pin.pinned == [True] * 3


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_an_engines_blocks_survive_the_loss_of_a_node(world: ThreeNodes, transport: str) -> None:
    """For the code that the adapters of SGLang, LMCache and vLLM's tier share."""
    reach = Reach(tuple(node.target for node in world.nodes), transport=transport, call_timeout_ms=1500)
    memory = np.frombuffer(world.source, dtype=np.uint8)
    came = np.zeros(len(memory), dtype=np.uint8)
    begin, back = int(memory.ctypes.data), int(came.ctypes.data)
    with Carrier(EngineSettings(reach, replicas=2), b"an engine's", BYTES) as carrier:
        carrier.register(begin, len(memory))
        assert carrier.transport == transport
        carrier.register(back, len(came))
        places = [Place(key, begin + at * BYTES, BYTES) for at, key in enumerate(world.keys)]
        assert all(carrier.put(places))
        world.kill(0)
        assert all(carrier.present([(key, BYTES) for key in world.keys]))
        assert carrier.prefix(world.keys) == COUNT
        assert all(carrier.get([Place(key, back + at * BYTES, BYTES) for at, key in enumerate(world.keys)]))
        assert came.tobytes() == bytes(world.source)
        more = [
            Place(block_key(key, b"more"), begin + at * BYTES, BYTES) for at, key in enumerate(world.keys)
        ]
        assert all(carrier.put(more)), "on one node at least"


def test_blocks_in_pieces_of_two_memories_survive_the_loss_of_a_node(world: ThreeNodes) -> None:
    """As an engine has them: a block's bytes are in pages of several layers."""
    half, row = BYTES // 2, struct.Struct("=IIQ")
    source = [bytearray(world.source[at * half : (at + COUNT) * half]) for at in (0, COUNT)]
    target = [bytearray(COUNT * half) for _ in source]

    def blocks(memories: list[RegisteredMemory]) -> list[ClusterBlock]:
        """Blocks in pieces; the pages in the second memory are in reverse order."""
        return [
            ClusterBlock.of_pieces(
                key,
                memories,
                row.pack(0, half, at * half) + row.pack(1, half, (COUNT - 1 - at) * half),
            )
            for at, key in enumerate(world.keys)
        ]

    client = world.client(2, call_timeout_ms=1500)
    here, there = ([client.register(one) for one in memories] for memories in (source, target))
    assert {one.error for one in client.put(blocks(here), timeout_s=WAIT_S)} == {None}
    first = blocks(here)[0]
    assert first.copied() == bytes(source[0][:half] + source[1][-half:])
    assert client.get_inline(first.key, BYTES) == first.copied()
    world.kill(0)
    assert hits(client.get(blocks(there), timeout_s=WAIT_S)) == COUNT
    assert target == source


def test_more_replicas_than_possible_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="replicas must be 1 to 2, not 3"):
        ClusterClient(["127.0.0.1:1"], replicas=3)
