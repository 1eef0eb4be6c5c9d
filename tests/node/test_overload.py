"""Callers that request too much or read nothing, and their neighbours."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.client import Block, Hit
from kvstore.miss import Miss
from kvstore.names import layout_fingerprint
from kvstore.node import inline
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from nic_offload.memory import allocate
from tests.client.test_promises import put
from tests.conftest import MIB, ClientWithBuffers, small_client
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
STALLED = 100


@pytest.fixture
def rig(node: NodeInProcess) -> Iterator[ClientWithBuffers]:
    rig = ClientWithBuffers(node, block_bytes_max=4 * MIB)
    yield rig
    rig.close()


def held_bytes(node: NodeInProcess) -> int:
    return node.call(lambda one: one.inline._shares.total_bytes)  # type: ignore[no-any-return]


def open_readers(stub: kvstore_pb2_grpc.KvStoreStub, key: bytes, length: int, count: int) -> list[Any]:
    """Calls for a block that read nothing: each window fills, and the bytes wait in the node."""
    name = pb.BlockName(key=key, fingerprint=layout_fingerprint(b""), length=length)
    request = pb.GetRequest(tenant="stalled", name=name)
    return [stub.Get(request, timeout=WAIT_S) for _ in range(count)]


def test_a_hundred_stalled_readers_leave_room_for_others_and_are_ended(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "INLINE_TIMEOUT_MS", 1500)
    put_key = rig.key(99)
    with small_client(node.target, tenant="stalled") as stalled:
        stalled.put_inline(put_key, bytes(16 * MIB))
    ours = [rig.block(number, MIB) for number in range(1, 4)]
    put(rig, ours)
    with grpc.insecure_channel(node.target) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        calls = open_readers(stub, put_key, 16 * MIB, STALLED)
        wait_until(lambda: held_bytes(node) >= 16 * MIB, "some of them hold memory")
        for _ in range(5):
            outcomes = rig.client.get([rig.wanted(block) for block in ours], timeout_s=WAIT_S)
            assert outcomes == [Hit(block.key) for block in ours]
        codes = {
            grpc.StatusCode.OK: 0,
            grpc.StatusCode.RESOURCE_EXHAUSTED: 0,
            grpc.StatusCode.DEADLINE_EXCEEDED: 0,
        }
        wait_until(lambda: held_bytes(node) == 0, "readers that stand still are ended")
        for call in calls:
            try:
                list(call)
            except grpc.RpcError as error:
                codes[error.code()] += 1
            else:
                codes[grpc.StatusCode.OK] += 1
    assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED] > 0, codes
    assert codes[grpc.StatusCode.DEADLINE_EXCEEDED] > 0, codes


def test_a_put_whose_bytes_do_not_arrive_is_ended_and_its_memory_freed(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "INLINE_TIMEOUT_MS", 200)
    with grpc.insecure_channel(node.target) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]

        ended = (
            threading.Event()
        )  # `parts` runs in a thread of gRPC's, which may come before there is a `call`

        def parts() -> Iterator[pb.PutRequest]:
            name = pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=MIB)
            yield pb.PutRequest(start=pb.PutStart(name=name))
            yield pb.PutRequest(chunk=b"only this")
            ended.wait(WAIT_S)

        call = stub.Put.future(parts(), timeout=WAIT_S)
        call.add_done_callback(lambda _: ended.set())
        assert call.exception(WAIT_S).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert held_bytes(node) == 0


def test_a_tenant_that_requests_everything_at_once_does_not_delay_another(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """Its thousand fetches are queued, and then one of another tenant, which is among the next to begin."""
    greedy = [rig.block(number, MIB) for number in range(16)]
    put(rig, greedy)
    with small_client(node.target, tenant="other") as other:
        other.put_inline(rig.key(50), b"o" * MIB)
        kv = other.register(allocate(MIB))
        assert isinstance(other.get([Block(rig.key(51), kv, 0, MIB)], timeout_s=WAIT_S)[0], Miss)  # attached

        def crowded(inside: Any) -> tuple[int, int]:
            """Queue the other's fetch behind a thousand in one turn of the loop; count those served before it."""
            first, second = sorted(inside.connections.values(), key=lambda one: one.number)[-2:]
            queue = inside.fetches._queued
            sizes = [_Waiting(first.tenant, first.number)] * 1000 + [_Waiting(second.tenant, second.number)]
            queue.add(sizes)
            before = 0
            while queue.take(lambda _: True).flow != second.number:
                before += 1
            left = len(queue)
            while queue.take(lambda _: True) is not None:
                pass
            return before, left

        before, left = node.call(crowded)
    assert before <= 1
    assert left == 1000 - before


class _Waiting:
    size_bytes = MIB

    def __init__(self, tenant: bytes, flow: int) -> None:
        self.tenant, self.flow = tenant, flow
