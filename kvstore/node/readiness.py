"""Checks that the node can be reached at the fabric address it gives to clients, by reading one of its own words.

What always holds: a node is ready only once that has worked, over an endpoint of the same kind and port range as a
client's; until then `why` gives the reason. Each attempt ends within `CONNECT_TIMEOUT_MS`. Fabrics without IP are ready
at once.
What it doesn't do: test the network between the node and its clients; a client reports that when it attaches.
"""

from __future__ import annotations

import mmap
import secrets
import select
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.endpoints import source_towards
from kvstore.errors import FabricError
from kvstore.limits import CONNECT_TIMEOUT_MS, PAGE_BYTES
from nic_offload.fabric import EventKind, Fabric
from nic_offload.sockaddr import SocketAddress
from nic_offload.trigger import TriggeredGet, arm

if TYPE_CHECKING:
    from kvstore.node.fabric_address import FabricAddress, Opened
    from nic_offload.sockaddr import Ip

__all__ = ["Readiness", "reach_itself"]

_WORD_BYTES = 8


class Readiness:
    """The readiness that `/readyz` and the health service report."""

    def __init__(self) -> None:
        self.why = "the node has not tried its fabric yet"  # empty once it is ready

    @property
    def ready(self) -> bool:
        """Whether clients can be sent here."""
        return not self.why


def reach_itself(fabric: Fabric, address: FabricAddress) -> None:
    """Try every address given to clients, from a second fabric; FabricError names a failed one. It blocks."""
    if fabric.ip_version == 0:
        return
    for ip in address.addresses():
        opened = address.open_at(fabric, ip)
        with opened.endpoint:
            _read_through(fabric, opened, ip)


def _read_through(fabric: Fabric, opened: Opened, ip: Ip) -> None:
    word = secrets.token_bytes(_WORD_BYTES)
    with mmap.mmap(-1, PAGE_BYTES) as memory, mmap.mmap(-1, PAGE_BYTES) as arrived:
        memory[:_WORD_BYTES] = word
        ours = fabric.register(memory, remote_write=False, remote_read=True, endpoint=opened.endpoint)
        try:
            with Fabric(fabric.provider, address=str(source_towards(ip) or ip)) as other:
                endpoint = other.open_endpoint()
                region = other.register(arrived, remote_write=False, endpoint=endpoint)
                get = TriggeredGet(
                    tag=1,
                    endpoint=endpoint,
                    peer=other.add_peer(SocketAddress.of(opened.address).packed(ip.version)),
                    region=region,
                    target=region.address,
                    length=_WORD_BYTES,
                    source=ours.base,
                    source_key=ours.key,
                )
                arm(other, [get])
                came = _ended(other)
        finally:
            ours.close()
        if not came or arrived[:_WORD_BYTES] != word:
            raise FabricError(
                f"The node can't reach itself at its fabric address {SocketAddress.of(opened.address)}: is that address"
                " this machine's, and are its ports open (--fabric-address, --fabric-ports)?"
            )


def _ended(other: Fabric) -> bool:
    """Whether the get returned its bytes in time."""
    clock = SystemClock()
    until_ns = clock.monotonic_ns() + CONNECT_TIMEOUT_MS * 1_000_000
    while (left_ns := until_ns - clock.monotonic_ns()) > 0:
        select.select([other.fileno()], [], [], left_ns / 1e9)
        for event in other.reap():
            return event.kind == EventKind.DONE
    return False
