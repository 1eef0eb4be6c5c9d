"""Endpoints whose peer accepts nothing, and connections that break: the fabric's reports."""

from __future__ import annotations

import socket

from nic_offload.memory import allocate
from nic_offload.sockaddr import SocketAddress, ip_of
from nic_offload.trigger import TriggeredPut, arm
from tests.nic_offload.rig import PAGE, open_fabric, wait_until


def test_an_endpoint_whose_puts_were_withdrawn_is_not_stalled() -> None:
    with open_fabric("net") as fabric, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and listens to nobody
        peer = fabric.add_peer(SocketAddress(ip_of("127.0.0.1"), nobody.getsockname()[1]).packed(4))
        with fabric.open_endpoint() as endpoint, fabric.register(allocate(PAGE)) as memory:
            arm(
                fabric,
                [TriggeredPut(1, endpoint, peer, memory, memory.address, 8, memory.base, memory.key)],
            )
            wait_until(lambda: endpoint.stalled_ns > 0, "a stall")
            assert fabric.cancel([1]) == 1
            wait_until(lambda: endpoint.stalled_ns == 0, "its end: nothing waits any more")
            assert not endpoint.has_broken, "nothing had gone through it"
