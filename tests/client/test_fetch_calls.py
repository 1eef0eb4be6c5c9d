"""The call for a get: which locks are held while it is made, and what an interrupted one leaves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client
from kvstore.client.call_routes import Asking
from kvstore.client.fabric_caller import FabricCalls
from kvstore.client.gets import Get
from kvstore.client.transfer_watch import watched_by
from kvstore.errors import RegionBusy
from kvstore.names import block_key
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.client.blocks import PutResult
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.transfer_watch import Metadata
    from kvstore.demo.node_process import NodeProcess
    from nic_offload.fabric import Region

pytestmark = pytest.mark.node("shared")


@pytest.fixture
def client(node: NodeProcess) -> Iterator[Client]:
    with Client(node.target) as client:
        client.attach()
        yield client


def is_free(client: Client) -> bool:
    """Whether another thread can take the client's lock now."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(client._core.lock.acquire(blocking=False))
        if taken[0]:
            client._core.lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return taken[0]


def unknown(region: Region) -> list[Block]:
    return [Block(block_key(b"never put"), region, 0, 4096)]


def test_a_sessions_steps_are_collected_without_the_clients_lock(client: Client) -> None:
    """They ask about puts of other nodes' clients, which may do the same at that moment."""
    found: list[bool] = []

    class Steps:
        def metadata(self) -> Metadata:
            found.append(is_free(client))
            return ()

        def armed(self, blocks: Sequence[Block], puts: ArmedPuts) -> None: ...

        def put_ended(self, block: Block, result: PutResult) -> None: ...

    with client.register(bytearray(4096)) as region, watched_by(Steps()):
        client.getting(unknown(region)).wait()
    assert found == [True]


@pytest.fixture
def over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FabricCalls, "begin", lambda *_, **__: None)


@pytest.mark.usefixtures("over_grpc")
def test_memory_is_bound_to_an_endpoint_with_the_clients_lock_held(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gets would register it twice, or with an endpoint that was closed since."""
    found: list[bool] = []
    named = Get._named

    def naming(get: Get) -> object:
        found.append(is_free(client))
        return named(get)

    monkeypatch.setattr(Get, "_named", naming)
    with client.register(bytearray(4096)) as region:
        client.get(unknown(region))
    assert set(found) == {False}


@pytest.mark.usefixtures("over_grpc")
def test_a_get_that_is_interrupted_while_it_is_requested_leaves_its_memory_free(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Asking, "_fetch_by_rpc", interrupted)
    region = client.register(bytearray(4096))
    with pytest.raises(KeyboardInterrupt):
        client.get(unknown(region))

    def is_closed() -> bool:
        try:
            region.close()
        except RegionBusy:
            return False
        return True

    wait_until(is_closed, "nothing of the get uses the region")
