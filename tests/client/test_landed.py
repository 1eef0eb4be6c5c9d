"""How long a put reads its source; and a client that moves nothing over a fabric opens none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.durability import Durability
from kvstore.errors import Overloaded
from kvstore.names import block_key
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from kvstore.demo.node_process import NodeProcess
    from tests.conftest import ClientWithBuffers


def test_a_put_lands_before_it_ends(rig: ClientWithBuffers) -> None:
    blocks = [rig.block(number) for number in range(4)]
    armed = rig.client.arm(blocks, rig.flags[0])
    assert not armed.wait_landed(0.05)
    assert not armed.has_ended
    rig.flags[0].store(4)
    assert armed.wait_landed(10)
    assert [one.durability for one in armed.wait(10)] == [Durability.WRITTEN] * 4
    assert armed.has_ended
    armed.abandon()  # there is nothing left to end
    assert rig.client.prefix([block.key for block in blocks]).blocks == 4


def test_abandoned_puts_are_never_sent_and_the_rest_are_stored(rig: ClientWithBuffers) -> None:
    blocks = [rig.block(number) for number in range(16)]
    armed = rig.client.arm(blocks, rig.flags[0])
    rig.flags[0].store(8)
    while armed.progress()[1] < 8:
        armed.wait_landed(0.01)
    armed.abandon()
    assert armed.wait_landed(10)
    rig.source[:] = bytes(len(rig.source))  # nobody reads it any more
    rig.flags[0].store(16)
    failed = [one.error is not None for one in armed.wait(10)]
    assert failed == [False] * 8 + [True] * 8
    assert rig.client.prefix([block.key for block in blocks]).blocks == 8
    wait_until(lambda: takes_sixteen(rig), "all slots are free again")


def takes_sixteen(rig: ClientWithBuffers) -> bool:
    try:
        rig.client.reserve([rig.block(number) for number in range(16, 32)]).give_back()
    except Overloaded:
        return False
    return True


def test_clients_that_only_query_or_use_grpc_open_no_fabric(node: NodeProcess) -> None:
    key = block_key(b"inline")
    with small_client(node.target, provider="no such provider") as client:
        client.put_inline(key, b"x" * 100)
        assert client.get_inline(key, 100) == b"x" * 100
        assert client.prefix([key], timeout_s=5).blocks == 1
        assert client.exists([key], timeout_s=5)[0].key == key  # type: ignore[union-attr]
