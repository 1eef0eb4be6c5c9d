"""Look-ups over the fabric: the same answers as over gRPC; without the node's Python if all blocks are in memory."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Prefix, as_request
from kvstore.client.fabric_caller import FabricCalls
from kvstore.client.link import Link
from kvstore.errors import DeadlineExceeded, NodeUnavailable, Overloaded
from kvstore.limits import BATCH_BLOCKS_MAX
from kvstore.lookups import Kind, Outcome, Run
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.node.fabric_answers import FabricCalls as FabricCallsOfNode
from kvstore.node.tenants import token_digest
from nic_offload.group import Group
from nic_offload.memory import allocate
from tests.conftest import ClientWithBuffers, small_client, small_node
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.fabric_answers import CallArea
    from kvstore.wire.fabric_call import Call, Rows

COUNT = 8


@pytest.fixture(autouse=True)
def no_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients here make a call for each look-up; those that make none are in `test_direct_reads`."""
    monkeypatch.setattr(Link, "_open_direct", lambda *_: None)


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "node", shares_memory=True) as node:
        yield node


@pytest.fixture
def rig(inside: NodeInProcess) -> Iterator[ClientWithBuffers]:
    rig = ClientWithBuffers(inside)
    yield rig
    rig.close()


def put(rig: ClientWithBuffers) -> list[bytes]:
    """Put blocks, and get them, so that they are in the node's memory."""
    blocks = [rig.block(number, 4096) for number in range(COUNT)]
    assert all(result.error is None for result in rig.client.put(blocks))
    keys = [block.key for block in blocks]
    wait_until(
        lambda: bool(rig.client.get(blocks)) and rig.client.prefix(keys).is_shared, "they are in memory"
    )
    return keys


def link_of(client: Client) -> Link:
    assert client._core.link is not None
    return client._core.link


def python_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks of each call over the fabric that the node's Python executes from now on."""
    counted: list[int] = []
    done = FabricCallsOfNode._done

    def count(
        calls: FabricCallsOfNode, area: CallArea, call: Call, rows: Rows
    ) -> Coroutine[None, None, bytes]:
        counted.append(len(rows))
        return done(calls, area, call, rows)

    monkeypatch.setattr(FabricCallsOfNode, "_done", count)
    return counted


def test_blocks_in_memory_are_counted_without_python(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put(rig)
    calls, asked = python_calls(monkeypatch), rig.client.calls
    long = keys * (2 * BATCH_BLOCKS_MAX // COUNT + 1)
    assert rig.client.prefix(keys) == Prefix(COUNT, None, is_shared=True)
    assert rig.client.prefix(long) == Prefix(len(long), None, is_shared=True)
    assert (calls, rig.client.calls) == ([], asked)
    assert not link_of(rig.client).operations


def test_other_look_ups_mean_the_same_as_over_grpc(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, never, deleted = put(rig), block_key(b"never put"), block_key(b"deleted")
    foreign = block_key(b"of another layout")
    rig.client.put_inline(deleted, b"x")
    rig.client.delete([deleted])
    with small_client(rig.client.target, layout=b"another") as other:
        other.put_inline(foreign, b"x")
    long = keys * (BATCH_BLOCKS_MAX // COUNT)
    calls = python_calls(monkeypatch)
    with small_client(rig.client.target) as by_grpc:
        for asked in (
            [*keys, never, *keys],
            [never],
            [*keys, deleted],
            [foreign, *keys],
            [*long, never, *long],
            [],
        ):
            told = rig.client.prefix(asked)
            assert told == by_grpc.prefix(asked)
            assert not told.is_shared
        assert rig.client.prefix([*keys, deleted]).miss == Miss(MissReason.UNKNOWN, "it was deleted")
        assert not by_grpc.is_attached
    # The C core answers the first and the third call of the long one.
    assert calls == [2 * COUNT + 1, 1, COUNT + 1, COUNT + 1, BATCH_BLOCKS_MAX, COUNT + 1]


def test_blocks_of_others_are_not_counted(inside: NodeInProcess, rig: ClientWithBuffers) -> None:
    """Although they are in the node's memory, under the same keys."""
    keys = put(rig)
    others: list[dict[str, Any]] = [{"layout": b"another"}, {"tenant": "another"}]
    for given, reason in zip(others, (MissReason.LAYOUT, MissReason.UNKNOWN), strict=True):
        with small_client(inside.target, **given) as other:
            other.attach()
            told = other.prefix(keys)
            assert (told.blocks, told.is_shared) == (0, False)
            assert told.miss is not None
            assert told.miss.reason is reason


def test_a_look_up_in_memory_is_recorded_with_its_request(rig: ClientWithBuffers) -> None:
    keys = put(rig)
    with as_request("chat-7"):
        rig.client.prefix(keys)
    (told,) = rig.client.looked_up("chat-7").lookups
    assert (told.kind, told.runs) == (Kind.PREFIX, (Run(COUNT, Outcome.STORED),))


def test_a_deleted_block_is_no_longer_counted(rig: ClientWithBuffers) -> None:
    keys = put(rig)
    rig.client.delete(keys[3:4])
    assert rig.client.prefix(keys) == Prefix(3, Miss(MissReason.UNKNOWN, "it was deleted"))


def test_a_look_up_whose_link_is_lost_is_made_over_grpc(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, wait = put(rig), Group.wait

    def lose_and_wait(group: Group, first: int, timeout_s: float) -> bool:
        monkeypatch.setattr(Group, "wait", wait)
        rig.client._core.lose(link_of(rig.client), NodeUnavailable("It is gone."))
        return group.wait(first, timeout_s)

    keys = [*keys, block_key(b"never put")]  # which the C core leaves to Python, so that there is time
    monkeypatch.setattr(Group, "wait", lose_and_wait)
    assert rig.client.prefix(keys).blocks == COUNT
    assert not rig.client.is_attached


def test_calls_that_the_fabric_does_not_accept_are_made_over_grpc(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, begin = put(rig), FabricCalls.begin
    made: list[object] = []

    def begin_one(calls: FabricCalls, *given: object, **named: object) -> object:
        made.append(None if made else begin(calls, *given, **named))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(FabricCalls, "begin", begin_one)
    long = keys * (2 * BATCH_BLOCKS_MAX // COUNT)
    assert rig.client.prefix(long) == Prefix(len(long), None)
    assert len(made) == 2
    monkeypatch.setattr(FabricCalls, "begin", lambda *_, **__: None)
    assert rig.client.prefix(keys) == Prefix(COUNT, None)


def test_a_node_of_an_earlier_version_is_called_over_grpc(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put(rig)
    monkeypatch.setattr(link_of(rig.client), "answers_prefixes", False)
    asked = rig.client.calls
    assert rig.client.prefix(keys) == Prefix(COUNT, None)
    assert rig.client.calls == asked + 1


def test_a_look_up_ends_by_its_deadline_and_leaves_nothing_behind(node: NodeProcess) -> None:
    with small_client(node.target) as client:
        key = block_key(b"x")
        client.attach()
        client.prefix([key])
        link = link_of(client)
        stop(node.pid)
        try:
            with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
                client.prefix([key], timeout_s=0.1)
        finally:
            os.kill(node.pid, signal.SIGCONT)
        wait_until(lambda: client.prefix([key]).blocks == 0 and not link.operations, "the late answer")
        assert client._core.link is link


def test_a_tenants_rate_counts_prefix_look_ups(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme")}"]\nrequests_per_s = 4\n')
    with (
        small_node(tmp_path / "node", arguments=("--tenants", str(tenants))) as node,
        small_client(node.target, token="acme") as client,
    ):
        client.attach()
        region = client.register(allocate(4096))
        block = Block(block_key(b"1"), region, 0, 4096)
        client.put([block])
        with pytest.raises(Overloaded):
            all(client.prefix([block.key]).blocks for _ in range(20))
