"""A failed attach, at either end, leaves nothing behind, and its error is one sentence."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.client import Block, Client, Hit
from kvstore.durability import Durability
from kvstore.errors import FabricError, KvError, NoMemory, Overloaded
from kvstore.limits import LEASES_MAX, PAGE_BYTES
from kvstore.node import connection as connection_module
from kvstore.node import node as node_module
from kvstore.node.heap import used_bytes
from kvstore.node.landing import Lease
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.kvstore_pb2_grpc import KvStoreStub
from nic_offload.memory import allocate
from nic_offload.sockaddr import SocketAddress, ip_of
from nic_offload.trigger import watch_landings
from tests.client.test_promises import put
from tests.conftest import ClientWithBuffers, small_client, small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

MORE_THAN_THERE_IS = 1 << 46
WAIT_S = 20.0


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def test_an_endpoint_allocates_little_memory_for_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends none. Each client of `tcp;ofi_rxm` once took 68 MiB, and all others waited for the allocation."""
    monkeypatch.setenv(
        "FI_STARTS_FRESH", "1"
    )  # or the node is forked with the libfabric of `tests/warm_start.py`
    with small_node(tmp_path / "node", provider="tcp;ofi_rxm") as node:
        before_bytes = memory_bytes(node.pid)
        with small_client(node.target, provider="tcp;ofi_rxm") as client:
            client.attach()
            assert memory_bytes(node.pid) - before_bytes < 32 << 20


def is_as_before(node: NodeInProcess) -> bool:
    """Whether no client is attached, and nothing is held for one."""
    return bool(
        node.call(
            lambda inside: (
                not len(inside)
                and not inside.landing.total
                and not inside.fabric.endpoints
                and inside.fabric.regions == {inside.hot.region}
            )
        )
    )


def test_an_attach_that_fails_in_the_client_ends_at_the_node(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node once kept the connection and its slots until the client was closed."""
    rig = ClientWithBuffers(node)
    fabric = rig.client.fabric

    def refused(_: bytes) -> int:
        raise FabricError("Adding a peer failed.")

    with monkeypatch.context() as patched:
        patched.setattr(fabric, "add_peer", refused)
        with pytest.raises(FabricError, match="Adding a peer"):
            rig.client.attach()
    wait_until(lambda: is_as_before(node), "the node has let the connection go")
    assert not fabric.endpoints
    put(rig, [rig.block(0, 1000)])  # and the client goes on
    rig.close()


def test_an_attach_without_a_usable_address_leaves_nothing_at_the_node(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(node.target, slots=1, block_bytes_max=4096) as client:
        with monkeypatch.context() as patched:
            patched.setattr("kvstore.client.own_address.SocketAddress.encoded", b"")
            with pytest.raises(KvError):
                client.attach()
        wait_until(lambda: is_as_before(node), "nothing is left")
        client.attach()


def test_an_attach_that_fails_half_way_leaves_nothing_at_the_node(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise FabricError("The provider has had enough.")

    with Client(node.target, slots=1, block_bytes_max=4096) as client:
        with monkeypatch.context() as patched:
            patched.setattr("kvstore.node.node.Connection", fails)
            with pytest.raises(KvError):
                client.attach()
        wait_until(lambda: is_as_before(node), "nothing is left")
        client.attach()


def test_an_invalid_address_of_ack_words_is_the_clients_error(node: NodeInProcess) -> None:
    """It used to be an internal error of the node, for which the audit log has no line."""
    with grpc.insecure_channel(node.target) as channel:
        stub = KvStoreStub(channel)  # type: ignore[no-untyped-call]
        wanted = pb.AttachRequest(
            block_bytes_max=4096,
            slots=1,
            provider=node.call(lambda one: one.fabric.provider),
            fabric_address=SocketAddress(ip_of("127.0.0.1"), 9).encoded,
            ack_words=8,
            ack_base=(1 << 64) - 1,
        )
        for more in ({}, {"puts_by_grants": True}, {"answers_base": 8}):
            wanted.MergeFrom(pb.AttachRequest(**more))
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.Attach(iter([wanted]), timeout=WAIT_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_until(lambda: is_as_before(node), "nothing is left")


def test_a_node_without_memory_for_a_client_is_overloaded(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to report a protocol error."""
    rig = ClientWithBuffers(node)
    with monkeypatch.context() as patched:
        patched.setattr(node_module, "set_aside", lambda _: allocate(MORE_THAN_THERE_IS))
        with pytest.raises(Overloaded, match=r"lacks the [\d.]+ .iB of memory for a client's \d+ slots"):
            rig.client.attach()
    assert is_as_before(node)
    block = rig.block(0, 1000)
    with monkeypatch.context() as patched:
        patched.setattr(connection_module, "populate", lambda *_: allocate(MORE_THAN_THERE_IS))
        with pytest.raises(Overloaded, match=r"lacks the [\d.]+ .iB of memory for 1 more slots"):
            rig.client.reserve([block])
    assert node.call(lambda inside: inside.landing.total) == 0
    put(rig, [block])
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    rig.close()


def test_memory_is_granted_with_the_first_put_and_grows_with_the_puts_in_flight(node: NodeInProcess) -> None:
    rig = ClientWithBuffers(node)
    rig.client.attach()
    seen = [node.call(lambda inside: inside.landing.total)]
    for blocks in (1, 1, 3, 2, 3):
        rig.client.reserve([rig.block(at, 1000) for at in range(blocks)]).give_back()
        seen.append(node.call(lambda inside: inside.landing.total))
    slot = seen[1]
    assert seen == [0, slot, slot, 3 * slot, 3 * slot, 3 * slot]
    assert slot >= 1 << 20
    rig.close()
    wait_until(lambda: is_as_before(node), "all of it is given back")


def test_a_client_that_only_made_gets_leaves_nothing_behind(node: NodeInProcess) -> None:
    """Returning landing memory that it never had was once an error, and the rest of its cleanup was skipped."""
    rig = ClientWithBuffers(node)
    assert not isinstance(rig.client.get([rig.wanted(rig.block(0, 1000))], timeout_s=WAIT_S)[0], Hit)
    (connection,) = node.call(lambda inside: list(inside.connections.values()))
    assert node.call(lambda inside: inside.landing.total) == 0
    rig.close()
    wait_until(lambda: is_as_before(node), "nothing is left")
    assert node.call(lambda _: connection._memory.closed)


def test_no_client_attaches_to_a_node_that_is_stopping(node: NodeInProcess) -> None:
    """What it puts would not be stored: the clients attached before have been detached for the stop."""
    with small_client(node.target) as client, small_client(node.target) as other:
        client.attach()
        node.run(node.node.close())
        wait_until(lambda: not client.is_attached, "it notices", WAIT_S)
        for one in (client, other):
            with pytest.raises(Overloaded, match="stopping"):
                one.attach()
        assert not node.call(lambda inside: inside.connections)


def test_a_failed_allocation_is_a_typed_error() -> None:
    with pytest.raises(NoMemory, match="memory"):
        allocate(MORE_THAN_THERE_IS)


def test_a_get_is_a_miss_if_there_is_no_memory_for_its_client(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = ClientWithBuffers(node)
    with monkeypatch.context() as patched:
        patched.setattr(node_module, "set_aside", lambda _: allocate(MORE_THAN_THERE_IS))
        (outcome,) = rig.client.get([Block(rig.key(0), rig.to_region, 0, 10)], timeout_s=WAIT_S)
    assert "memory" in str(outcome)
    rig.to_region.close()
    rig.close()


def test_a_tenant_uses_its_share_of_the_landing_memory_and_no_more(node: NodeInProcess) -> None:
    rig = ClientWithBuffers(node)
    rig.client.attach()
    slots = 8

    def share(inside: Any) -> None:
        inside.landing.capacity = 2 * slots * (1 << 20) + slots * 8192
        inside.landing._tenants = lambda: 2

    node.call(share)
    rig.client.reserve([rig.block(at, 1000) for at in range(slots)]).give_back()
    with pytest.raises(Overloaded, match="share of the node's landing memory"):
        rig.client.reserve([rig.block(at, 1000) for at in range(slots + 1)])
    put(rig, [rig.block(0, 1000)])
    rig.close()


def test_memory_for_the_watches_of_many_leases_is_freed_with_the_leases(node: NodeInProcess) -> None:
    """As many leases as a tenant may have when there are two."""
    rig = ClientWithBuffers(node)
    rig.client.attach()
    (connection,) = node.call(lambda inside: list(inside.connections.values()))
    generations = range(1 << 50, (1 << 50) + LEASES_MAX // 2)
    watches = [
        connection._watch(Lease(0, one, bytes(32), bytes(16), 100, Durability.WRITTEN, 0, 0), 0)
        for one in generations
    ]
    gc.collect()  # what earlier tests have left
    before = used_bytes()
    node.call(lambda inside: watch_landings(inside.fabric, watches))
    assert used_bytes() - before > 6 << 20
    node.call(lambda inside: inside.fabric.cancel(generations))
    wait_until(lambda: used_bytes() - before < 3 << 20, "the memory is free")
    rig.close()
