"""The socket at which an endpoint's peers connect, on which the node filters them."""

from __future__ import annotations

import os
import socket

import pytest

from nic_offload.fabric import Endpoint, Fabric
from nic_offload.sockaddr import SocketAddress


def is_listener_of(endpoint: Endpoint) -> bool:
    found = endpoint.listener()
    assert found is not None
    with socket.socket(fileno=os.dup(found)) as ours:
        at = SocketAddress.of(endpoint.address())
        return ours.getsockname()[:2] == (str(at.ip), at.port) and bool(
            ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("provider", ["net", "tcp;ofi_rxm", "sockets"])
def test_an_endpoints_listener_is_found_wherever_its_descriptor_is(provider: str, address: str) -> None:
    with Fabric(provider, address=address) as fabric:
        near = fabric.open_endpoint()
        others = [os.dup(0) for _ in range(300)]
        try:
            os.close(others.pop(0))  # from here on are those of the next, and most of them far behind
            far = fabric.open_endpoint()
            assert is_listener_of(near)
            assert is_listener_of(far)
        finally:
            for one in others:
                os.close(one)


@pytest.mark.parametrize("provider", ["shm", "memory"])
def test_an_endpoint_without_tcp_has_no_listener(provider: str) -> None:
    with Fabric(provider) as fabric:
        assert fabric.open_endpoint().listener() is None
