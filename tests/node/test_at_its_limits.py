"""A node at its limits: how soon calls are refused, and what stalled readers cost the others.

The node is a separate process. Test machines do other work as well, so measurements alternate, and each has three
tries, one of which has to meet the bound.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.errors import Overloaded
from kvstore.names import block_key, layout_fingerprint
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from kvstore.wire.status import RETRY_AFTER_MS
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.node(capacity="128MiB")

MIB = 1 << 20
WAIT_S = 60.0
TRIES = 12  # others may have the cores for seconds, and one that succeeds is enough
REFUSAL_MS_MAX = 10.0
STALLED = 100
CONNECTIONS = 10
SAMPLES = 200
MARGIN_MS = 5.0  # what a scheduler's hiccup is worth beside a p99 of a few milliseconds
LARGE, SMALL = block_key(b"large"), block_key(b"small")


def stalled_readers(stub: Any, count: int) -> list[Any]:
    """Calls for a large block that read nothing."""
    name = pb.BlockName(key=LARGE, fingerprint=layout_fingerprint(b""), length=8 * MIB)
    return [stub.Get(pb.GetRequest(tenant="stalled", name=name), timeout=WAIT_S) for _ in range(count)]


def millis(call: Callable[[], object]) -> float:
    began_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began_ns) / 1e6


def percentile(samples: list[float], percent: int) -> float:
    return sorted(samples)[min(len(samples) - 1, len(samples) * percent // 100)]


def assert_quick(refused: Callable[[], object]) -> None:
    """Check the median of fifty calls, with retries for a busy machine."""
    medians = []
    for _ in range(TRIES):
        medians.append(percentile([millis(refused) for _ in range(50)], 50))
        if medians[-1] < REFUSAL_MS_MAX:
            return
    pytest.fail(f"medians in ms: {medians}")


def test_a_caller_without_room_is_answered_within_ten_milliseconds(node: NodeProcess) -> None:
    with small_client(node.target, tenant="stalled") as client, grpc.insecure_channel(node.target) as channel:
        client.put_inline(LARGE, bytes(8 * MIB))
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        calls = stalled_readers(stub, STALLED)
        name = pb.BlockName(key=LARGE, fingerprint=layout_fingerprint(b""), length=8 * MIB)
        hints: list[int] = []

        def refused() -> bool:
            """Whether another reader on the same connection is refused while stalled ones hold its share."""
            call = stub.Get(pb.GetRequest(tenant="stalled", name=block_name_of_another(name)), timeout=WAIT_S)
            try:
                next(iter(call))
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
                trailers: Any = error.trailing_metadata()
                hints.append(int(dict(trailers)[RETRY_AFTER_MS]))
                return True
            return False

        wait_until(refused, "the house is full")
        assert_quick(lambda: refused() or pytest.fail("it was let in"))
        assert min(hints) > 0
        for call in calls:
            call.cancel()


def block_name_of_another(name: pb.BlockName) -> pb.BlockName:
    """A block that is not in memory, so that memory is needed for it."""
    return pb.BlockName(key=block_key(b"cold"), fingerprint=name.fingerprint, length=name.length)


def test_pins_beyond_the_bound_are_refused_within_ten_milliseconds(node: NodeProcess) -> None:
    with small_client(node.target) as client:
        for number in range(40):
            client.put_inline(block_key(bytes([number])), bytes(MIB))
        keys = [block_key(bytes([number])) for number in range(40)]

        def refused() -> None:
            with pytest.raises(Overloaded) as caught:
                client.pin(keys)
            assert caught.value.retry_after_ms > 0

        assert_quick(refused)


def test_a_hundred_stalled_readers_do_not_double_the_p99_of_others(node: NodeProcess) -> None:
    with ExitStack() as held:
        stalled = held.enter_context(small_client(node.target, tenant="stalled"))
        reader = held.enter_context(small_client(node.target, tenant="reads"))
        channels = [
            held.enter_context(
                grpc.insecure_channel(node.target, options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(CONNECTIONS)
        ]
        stalled.put_inline(LARGE, bytes(8 * MIB))
        reader.put_inline(SMALL, bytes(32 << 10))

        def p99_ms() -> float:
            return percentile(
                [millis(lambda: reader.get_inline(SMALL, 32 << 10)) for _ in range(SAMPLES)], 99
            )

        p99_ms()  # once, to get under way
        seen = []
        for _ in range(TRIES):
            alone_ms = p99_ms()
            calls = []
            for channel in channels:
                stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
                calls += stalled_readers(stub, STALLED // CONNECTIONS)
            p99_ms()  # until they stand still: to let them in is work
            beside_ms = p99_ms()
            standing = sum(not call.done() for call in calls)
            for call in calls:
                call.cancel()
            assert standing >= CONNECTIONS // 2, "who was let in stands still; the others were refused"
            seen.append((alone_ms, beside_ms))
            if beside_ms < 2 * alone_ms + MARGIN_MS:
                return
            wait_until(partial(all_ended, calls), "they have gone")
        pytest.fail(f"p99 in ms, alone and beside {STALLED} stalled readers: {seen}")


def all_ended(calls: list[Any]) -> bool:
    return all(call.done() for call in calls)
