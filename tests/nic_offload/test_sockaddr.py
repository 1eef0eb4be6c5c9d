"""Socket addresses: what libfabric takes, and nothing else."""

from __future__ import annotations

import socket
import struct

import pytest

from nic_offload.errors import PortTaken
from nic_offload.fabric import Fabric
from nic_offload.sockaddr import SocketAddress, ip_of

PROVIDERS = ("net", "tcp;ofi_rxm", "sockets")


@pytest.mark.parametrize("text", ["10.0.0.7", "fd00::7", "::1", "255.255.255.255", "0.0.0.0"])
def test_an_address_is_formatted_in_its_own_family_and_parsed_again(text: str) -> None:
    address = SocketAddress(ip_of(text), 7071)
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    assert struct.unpack_from("=H", address.encoded)[0] == family
    assert len(address.encoded) == (28 if ":" in text else 16)
    assert SocketAddress.of(address.encoded) == address
    assert SocketAddress.of(address.packed(6)) == address  # one of IPv4 is mapped there, and the same


def test_an_ipv6_address_is_invalid_in_an_ipv4_fabric() -> None:
    with pytest.raises(ValueError, match="not an IPv4 address"):
        SocketAddress(ip_of("fd00::7"), 7071).packed(4)


@pytest.mark.parametrize("family", [0, 1, 10, 16, 40, 65535])
def test_bytes_of_another_family_are_not_an_address(family: int) -> None:
    data = struct.pack("=H", family) + SocketAddress(ip_of("127.0.0.1"), 7071).encoded[2:]
    with pytest.raises(ValueError, match="not an IPv4 or IPv6 address"):
        SocketAddress.of(data)


@pytest.mark.parametrize("length", [0, 1, 2, 8, 15, 17, 27, 28, 29, 256])
def test_bytes_of_another_length_are_not_an_address(length: int) -> None:
    data = SocketAddress(ip_of("127.0.0.1"), 7071).encoded.ljust(256, b"\0")[:length]
    with pytest.raises(ValueError, match="not an IPv4 or IPv6 address"):
        SocketAddress.of(data)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_endpoint_listens_on_the_given_address_which_no_other_can_use(provider: str) -> None:
    with Fabric(provider, address="127.0.0.1") as fabric:
        any_port = SocketAddress(ip_of("127.0.0.2"), 0).packed(fabric.ip_version)
        first = fabric.open_endpoint(any_port)
        at = SocketAddress.of(first.address())
        assert (str(at.ip), at.port > 0) == ("127.0.0.2", True)
        with pytest.raises(PortTaken):
            fabric.open_endpoint(at.packed(fabric.ip_version))
        first.close()
        again = fabric.open_endpoint(
            at.packed(fabric.ip_version)
        )  # closed is closed: the port is free at once
        assert SocketAddress.of(again.address()) == at
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((str(at.ip), at.port))
