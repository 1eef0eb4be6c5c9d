"""The memory of calls and connections is freed at once, because none of it is in a reference cycle.

Python's collector may not run for minutes after many clients have left.
"""

from __future__ import annotations

import gc
from collections import Counter
from importlib import import_module
from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.client import Block, Client
from kvstore.testing.memory_node import MemoryNode
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.blocks_pb2 import ExistsRequest
from kvstore.wire.blocks_pb2_grpc import BlocksStub
from kvstore.wire.kvstore_pb2_grpc import KvStoreStub
from nic_offload.memory import allocate
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 20
LENGTH = 4096


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def calls(node: MemoryNode, rounds: int) -> None:
    """Calls that are answered, refused and cancelled."""
    with grpc.insecure_channel(node.target) as channel:
        of_store, of_blocks = KvStoreStub(channel), BlocksStub(channel)  # type: ignore[no-untyped-call]
        wanted = pb.GetRequest(name=pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=LENGTH))
        for _ in range(rounds):
            of_store.Status(pb.StatusRequest())
            list(of_store.Get(wanted))
            of_store.Status.future(pb.StatusRequest()).cancel()
            with pytest.raises(grpc.RpcError):
                of_blocks.Exists(ExistsRequest())


def connections(node: MemoryNode, rounds: int) -> None:
    for number in range(rounds):
        with Client(node.target, provider="memory", slots=4, block_bytes_max=LENGTH) as client:
            region = client.register(allocate(LENGTH))
            client.put([Block(bytes([number]) * 32, region, 0, LENGTH)])
            client.get([Block(bytes([number]) * 32, region, 0, LENGTH)])


def there_are(*kinds: str) -> Counter[str]:
    return Counter(name for one in gc.get_objects() if (name := type(one).__name__) in kinds)


@pytest.mark.usefixtures("no_collector")
def test_calls_and_connections_leave_nothing_for_the_garbage_collector() -> None:
    kinds = "RPCState", "AbortError", "Connection", "PutArea", "Slots"
    with MemoryNode() as node:
        calls(node, 1)
        connections(node, 1)
        before = there_are(*kinds)  # gRPC awaits one call of each method
        calls(node, ROUNDS)
        connections(node, ROUNDS)
        few = ROUNDS // 4  # the last ones are still being taken apart
        wait_until(lambda: max((there_are(*kinds) - before).values(), default=0) < few, "they are gone", 10)
        assert getattr(import_module("grpc._cython.cygrpc").execute_batch, "frees_failed_batches", False), (
            "or what gRPC sends may stay"
        )
