"""A client's own end of the fabric: its address, what it accepts from a node, and that it connects first."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block
from kvstore.client.own_address import OwnSide, say_first_word
from kvstore.errors import (
    AddressRefused,
    ConfigError,
    DeadlineExceeded,
    NodeUnavailable,
    Overloaded,
    ProtocolError,
)
from kvstore.miss import Miss, MissReason
from kvstore.reach import Reach
from nic_offload.sockaddr import SocketAddress, ip_of
from tests.conftest import small_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.core import Core
    from kvstore.client.link import Link
    from kvstore.demo.node_process import NodeProcess
    from nic_offload.fabric import Fabric

pytestmark = pytest.mark.node("shared")

ESTABLISHED = "01"
TIMEOUT_S = 5.0


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with OwnSide(Reach(("localhost:7070",), provider="net")).open_fabric() as one:  # of both families
        yield one


def connections_to(port: int) -> list[str]:
    """The peers connected to this port of the machine, from the kernel's tables."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return [row[1] for row in rows if row[3] == ESTABLISHED and row[2].endswith(f":{port:04X}")]


def test_a_client_connects_to_the_nodes_fabric_when_it_attaches(node: NodeProcess) -> None:
    with small_client(node.target) as client:
        client.attach()
        link = client._core.link
        assert link is not None
        assert len(connections_to(SocketAddress.of(link.node_address).port)) == 1


@pytest.mark.parametrize("target", ["127.0.0.1:7070", "localhost:7070"])
def test_a_clients_address_is_that_of_its_route_to_the_node(fabric: Fabric, target: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        side = OwnSide(Reach((target.replace("7070", str(listener.getsockname()[1])),), provider="net"))
        endpoint, told = side.open_endpoint(fabric, TIMEOUT_S)
        at = SocketAddress.of(told)
        assert str(at.ip) == "127.0.0.1"
        assert at == SocketAddress.of(endpoint.address())


def test_a_configured_address_and_ports_are_used(fabric: Fabric) -> None:
    side = OwnSide(
        Reach(("127.0.0.1:7070",), provider="net", fabric_address="127.0.0.7", fabric_ports="17401-17401")
    )
    endpoint, told = side.open_endpoint(fabric, TIMEOUT_S)
    assert str(SocketAddress.of(told)) == "127.0.0.7:17401"
    with pytest.raises(Overloaded, match="17401-17401"):
        side.open_endpoint(fabric, TIMEOUT_S)
    endpoint.close()
    with pytest.raises(ConfigError, match="not an IP address"):
        OwnSide(Reach(("127.0.0.1:7070",), provider="net", fabric_address="nowhere")).open_endpoint(
            fabric, TIMEOUT_S
        )


def test_a_host_name_without_an_address_is_an_absent_node(fabric: Fabric) -> None:
    side = OwnSide(Reach(("no-such-host.invalid:7070",), provider="net"))
    with pytest.raises(NodeUnavailable, match=r"The name no-such-host\.invalid has no address"):
        side.open_endpoint(fabric, TIMEOUT_S)


GOOD = SocketAddress(ip_of("127.0.0.1"), 7071).encoded


@pytest.mark.parametrize("family", [0, 1, 40])
def test_a_nodes_fabric_address_has_a_family_that_libfabric_accepts(fabric: Fabric, family: int) -> None:
    with pytest.raises(ProtocolError, match="fabric address is not valid"):
        OwnSide.add_peer(fabric, struct.pack("=H", family) + GOOD[2:])


@pytest.mark.parametrize("told", [b"", GOOD[:-1], GOOD + b"\0"])
def test_a_nodes_fabric_address_has_the_length_of_its_family(fabric: Fabric, told: bytes) -> None:
    with pytest.raises(ProtocolError, match="fabric address is not valid"):
        OwnSide.add_peer(fabric, told)


@pytest.mark.parametrize("ip", ["0.0.0.0", "::", "224.0.0.1", "fe80::1"])
def test_the_fabric_address_of_a_node_is_reachable(fabric: Fabric, ip: str) -> None:
    with pytest.raises(ProtocolError, match="give it a --fabric-address"):
        OwnSide.add_peer(fabric, SocketAddress(ip_of(ip), 7071).encoded)


def test_a_client_that_used_another_of_its_addresses_attaches_from_the_one_the_node_saw(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnSide, "_source", lambda *_: ip_of("127.0.0.9"))  # as if gRPC had taken another way
    with small_client(node.target) as client:
        client.attach()
        link = client._core.link
        assert link is not None
        assert str(SocketAddress.of(link.endpoint.address()).ip) == "127.0.0.1"


def test_a_configured_address_is_not_replaced(node: NodeProcess) -> None:
    with small_client(node.target, fabric_address="127.0.0.9") as client:
        with pytest.raises(AddressRefused, match="not the source of its call") as caught:
            client.attach()
        assert caught.value.caller == "127.0.0.1"


def test_a_get_without_time_to_connect_opens_no_breaker(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say_late(core: Core, link: Link, timeout_s: float) -> None:
        time.sleep(timeout_s)
        say_first_word(core, link, 0.0)

    with small_client(node.target) as client:
        wanted = Block(bytes(32), client.register(bytearray(4096)), 0, 4096)
        with monkeypatch.context() as patched:
            patched.setattr("kvstore.client.core.say_first_word", say_late)
            for _ in range(3):
                (miss,) = client.get([wanted], timeout_s=0.3)
                assert isinstance(miss, Miss)
                assert miss.reason is MissReason.NODE_AWAY
                assert not client.is_attached
                assert not client._core.fabric_breaker.is_open
                assert not client._core.breaker.is_open
        (miss,) = client.get([wanted], timeout_s=TIMEOUT_S)
        assert isinstance(miss, Miss)
        assert miss.reason is MissReason.UNKNOWN, "the node was called"


def test_a_host_name_not_resolved_in_time_is_not_blamed_on_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(
        "kvstore.client.own_address.socket.getaddrinfo", lambda *_, **__: [][let_go.wait(TIMEOUT_S) :]
    )
    side = OwnSide(Reach(("node.invalid:7070",), provider="net"))
    with pytest.raises(DeadlineExceeded, match=r"not resolved within 0\.1 s"):
        side._source(0.1)
    let_go.set()
