"""Look-ups, pins and deletions of stored blocks, over a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.client import Prefix, Stored
from kvstore.clock import SystemClock
from kvstore.durability import Durability
from kvstore.errors import NodeUnavailable, Overloaded
from kvstore.limits import BATCH_BLOCKS_MAX, PIN_TIMEOUT_MS, PIN_TIMEOUT_MS_MAX, PINS_OF_TENANT_MAX
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.storage.eviction.types import Guard
from kvstore.wire import blocks_pb2 as pb
from kvstore.wire import blocks_pb2_grpc
from kvstore.wire.kvstore_pb2 import BlockName
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.node import Node

pytestmark = pytest.mark.node("shared")

MIB = 1 << 20


def key(number: int) -> bytes:
    return block_key(b"block", number.to_bytes(4))


@pytest.fixture
def node_here(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "data") as node:
        yield node


def test_exists_agrees_with_get(node: NodeProcess, tenant: str) -> None:
    over_ms = SystemClock().wall_ms() + 60_000
    with (
        small_client(node.target, tenant=tenant) as client,
        small_client(node.target, tenant=tenant, layout=b"another") as other,
    ):
        client.put_inline(key(0), b"a" * 1000)
        client.put_inline(key(1), b"b" * 5000, expires_unix_ms=over_ms)
        other.put_inline(key(2), b"c")
        soon_ms = SystemClock().wall_ms() + 1_500  # for the put, on a busy machine
        client.put_inline(key(3), b"d", expires_unix_ms=soon_ms)
        gone = Miss(MissReason.EXPIRED, "it was removed when its time to live had ended")
        wait_until(lambda: client.exists([key(3)])[0] == gone, "its time is over")
        assert client.exists([key(1), key(9), key(0), key(2), key(0), key(3)]) == [
            Stored(key(1), 5000, over_ms, client.fingerprint),
            Miss(MissReason.UNKNOWN),
            Stored(key(0), 1000, 0, client.fingerprint),
            Miss(MissReason.LAYOUT),
            Stored(key(0), 1000, 0, client.fingerprint),
            client.get_inline(key(3), 1),
        ]
        assert client.exists([key(2)], any_layout=True) == [Stored(key(2), 1, 0, other.fingerprint)]
        assert client.exists([key(0), key(1)], lengths=[1000, 4999]) == [
            Stored(key(0), 1000, 0, client.fingerprint),
            Miss(MissReason.LENGTH, "5000 bytes are stored"),
        ]
        assert client.exists([]) == []


def test_a_prefix_ends_at_the_first_block_that_a_get_would_miss(node: NodeProcess, tenant: str) -> None:
    with (
        small_client(node.target, tenant=tenant) as client,
        small_client(node.target, tenant=tenant, layout=b"another") as other,
    ):
        for number in range(5):
            client.put_inline(key(number), b"x")
        other.put_inline(key(6), b"x")
        keys = [key(number) for number in range(5)]
        assert client.prefix(keys) == Prefix(5, None)
        assert client.prefix([*keys, key(5), *keys]) == Prefix(5, Miss(MissReason.UNKNOWN))
        assert client.prefix([*keys, key(6)]) == Prefix(5, Miss(MissReason.LAYOUT))
        assert client.prefix([key(5), *keys]) == Prefix(0, Miss(MissReason.UNKNOWN))
        assert client.prefix([]) == Prefix(0, None)
        long = [key(number % 5) for number in range(2 * BATCH_BLOCKS_MAX + 7)]
        assert client.prefix(long) == Prefix(len(long), None)
        assert client.prefix([*long, key(7), *long]).blocks == len(long)
        assert len(client.exists(long)) == len(long)


@pytest.mark.parametrize("durability", [Durability.LANDED, Durability.WRITTEN, Durability.SYNCED])
def test_a_deleted_block_is_missed_and_explained(
    node: NodeProcess, tenant: str, durability: Durability
) -> None:
    with small_client(node.target, tenant=tenant) as client:
        client.put_inline(key(0), b"a" * 1000)
        client.put_inline(key(1), b"b" * 1000)
        assert client.delete([key(0), key(2)], durability=durability) == [True, False]
        assert client.get_inline(key(0), 1000) == Miss(MissReason.UNKNOWN, "it was deleted")
        assert client.exists([key(0)]) == [client.get_inline(key(0), 1000)]
        gone, there, never = client.explain([key(0), key(1), key(2)])
        assert (gone.stored, gone.reason) == (False, "DELETED")
        assert gone.removed_unix_ms > 0
        assert str(gone).startswith("The block was deleted ")
        assert (there.stored, there.reason, str(there)) == (True, None, "The block is stored.")
        assert (never.stored, never.reason) == (False, None)
        node.kill()
        node.start()
        client.status(wait_s=20.0)
        assert [isinstance(one, Stored) for one in client.exists([key(0), key(1)])] == [False, True]


def test_a_pinned_block_is_not_evicted_with_its_neighbours(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "data", 16 * MIB) as node, small_client(node.target) as client:
        for number in range(4):
            client.put_inline(key(number), bytes([number]) * 300_000)
        with client.pin([key(1), key(99), key(3)]) as pin:
            assert pin.pinned == [True, False, True]
            for number in range(4, 80):
                client.put_inline(key(number), b"x" * 300_000)
            stored = [isinstance(one, Stored) for one in client.exists([key(number) for number in range(4)])]
            assert stored == [False, True, False, True]
            assert client.get_inline(key(3), 300_000) == b"\3" * 300_000
            assert client.explain([key(0)])[0].reason == "SPACE"
            assert node.call(leased) == 2
        assert node.call(leased) == 0
        for number in range(80, 160):
            client.put_inline(key(number), b"x" * 300_000)
        assert not any(isinstance(one, Stored) for one in client.exists([key(1), key(3)]))


def leased(node: Node) -> int:
    return node.store.statistics().eviction.guarded.get(Guard.LEASE, 0)


def test_a_pin_expires_even_if_its_client_has_died(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        client.put_inline(key(0), b"x")
        client.pin([key(0)], time_to_live_ms=1)
        forgotten = client.pin([key(0)], time_to_live_ms=600_000)
    wait_until(lambda: node_here.call(lambda node: node.pins.count) == 1, "the short pin has ended")
    assert node_here.call(leased) == 1
    assert forgotten.pinned == [True]


def test_the_duration_and_number_of_pins_are_bounded(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client, grpc.insecure_channel(node_here.target) as channel:
        client.put_inline(key(0), b"x")
        stub: Any = blocks_pb2_grpc.BlocksStub(channel)  # type: ignore[no-untyped-call]
        for asked_ms, given_ms in ((0, PIN_TIMEOUT_MS), (2**32 - 1, PIN_TIMEOUT_MS_MAX), (5000, 5000)):
            answer = stub.Pin(pb.PinRequest(keys=[key(0)], time_to_live_ms=asked_ms), timeout=20)
            assert answer.time_to_live_ms == given_ms
            assert stub.Unpin(pb.UnpinRequest(pins=[answer.pin]), timeout=20).ended == 1
        for _ in range(PINS_OF_TENANT_MAX):  # none ends by its time, however long this takes
            client.pin([key(0)], time_to_live_ms=PIN_TIMEOUT_MS_MAX)
        with pytest.raises(Overloaded, match="maximum number of pins"):
            client.pin([key(0)])
        with small_client(node_here.target, tenant="another") as another:
            another.put_inline(key(0), b"x")
            another.pin([key(0)]).close()
        assert node_here.call(lambda node: node.pins.count) == PINS_OF_TENANT_MAX


def test_a_tenant_pins_a_bounded_share_of_the_drives_all_or_none(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "data", 16 * MIB) as node, small_client(node.target) as client:
        for number in range(5):
            client.put_inline(key(number), b"x" * MIB)
        with pytest.raises(Overloaded, match="at most 4 MiB of this node"):
            client.pin([key(number) for number in range(5)])
        assert node.call(leased) == 0
        pin = client.pin([key(number) for number in range(3)])
        with pytest.raises(Overloaded):
            client.pin([key(3)])
        pin.close()
        client.pin([key(3)])
        assert node.call(leased) == 1


def test_a_pin_belongs_to_its_tenant(node_here: NodeInProcess) -> None:
    with (
        small_client(node_here.target, tenant="a") as one,
        small_client(node_here.target, tenant="b") as other,
    ):
        one.put_inline(key(0), b"x")
        assert other.pin([key(0)]).pinned == [False]
        pin = one.pin([key(0)])
        calls = other._blocks
        assert calls.unpin(pin._numbers) == 0
        assert node_here.call(leased) == 1
        pin.close()
        assert node_here.call(leased) == 0
        assert one._blocks.unpin([1, 2]) == 0


def test_ended_pins_leave_nothing_behind(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        client.put_inline(key(0), b"x")
        for _ in range(PINS_OF_TENANT_MAX + 50):
            client.pin([key(0)], time_to_live_ms=600_000).close()
        assert node_here.call(lambda node: len(node.pins._deadlines)) <= PINS_OF_TENANT_MAX
        assert node_here.call(lambda node: (node.pins._bytes, node.pins._of_tenant)) == ({}, {})


def test_deleting_a_block_removes_it_from_its_pin(node_here: NodeInProcess) -> None:
    with small_client(node_here.target) as client:
        client.put_inline(key(0), b"x")
        with client.pin([key(0)]):
            assert client.delete([key(0)]) == [True]
            client.put_inline(key(0), b"y")
            assert node_here.call(lambda node: node.pins.count) == 0
            assert client.statistics().pins == 0
        assert node_here.call(leased) == 0


def test_removed_blocks_no_longer_count_in_their_pins(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "data", 16 * MIB) as node, small_client(node.target) as client:
        for number in range(12):
            client.put_inline(key(number), bytes([number]) * MIB)
            with client.pin([key(number), key(number), key(100)]) as pin:
                assert pin.pinned == [True, True, False]
            client.pin([key(number)], time_to_live_ms=600_000)
            client.pin([key(number)], time_to_live_ms=600_000)
            client.delete([key(number)])
        for number in range(3):
            client.put_inline(key(number), bytes([number]) * MIB)
        pin = client.pin([key(number) for number in range(3)])
        client.delete([key(1)])
        assert node.call(leased) == 2
        assert node.call(lambda node: node.pins.count) == 1
        pin.close()
        assert node.call(leased) == 0
        assert node.call(lambda node: (node.pins._bytes, node.pins._of_tenant, node.pins._of_block)) == (
            {},
            {},
            {},
        )


@pytest.mark.parametrize(
    ("name", "request_", "why"),
    [
        (
            "Exists",
            pb.ExistsRequest(blocks=[BlockName(key=b"short", fingerprint=bytes(16))]),
            "32 bytes, not 5",
        ),
        ("Delete", pb.DeleteRequest(keys=[b"x" * 33]), "32 bytes, not 33"),
        ("Explain", pb.ExplainRequest(keys=[b""]), "32 bytes, not 0"),
        ("Pin", pb.PinRequest(keys=[key(0), b""]), "32 bytes, not 0"),
        ("Prefix", pb.PrefixRequest(keys=[key(0), b""], fingerprint=bytes(16)), "32 bytes, not 0"),
        ("Exists", pb.ExistsRequest(), "takes 1 to 1024 blocks, not 0"),
        ("Delete", pb.DeleteRequest(keys=[bytes(32)] * 1025), "not 1025"),
        ("Delete", pb.DeleteRequest(keys=[bytes(32)], durability=9), "no durability 9"),  # type: ignore[arg-type]
        ("Prefix", pb.PrefixRequest(keys=[bytes(32)]), "fingerprint has 16 bytes, not 0"),
        ("Unpin", pb.UnpinRequest(pins=[1] * 1025), "not 1025"),
    ],
)
def test_invalid_requests_are_refused(node_here: NodeInProcess, name: str, request_: Any, why: str) -> None:
    with grpc.insecure_channel(node_here.target) as channel:
        stub: Any = blocks_pb2_grpc.BlocksStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError, match=why) as caught:
            getattr(stub, name)(request_, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_without_a_node_each_call_is_one_typed_error(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "data") as node:
        client = small_client(node.target)
        client.put_inline(key(0), b"x")
        pin = client.pin([key(0)])
    with client:
        for call in (client.exists, client.prefix, client.explain, client.delete, client.pin):
            with pytest.raises(NodeUnavailable):
                call([key(0)])
        pin.close()
