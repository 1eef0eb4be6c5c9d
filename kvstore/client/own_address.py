"""A client's own end of the fabric: its address towards the node, and the first word that it sends.

Each attachment has an endpoint at this machine's address on the current route to the node, unless one was given; so
a node may move, and a host may have several addresses. The client connects first, with a word that is not read: the
node's bytes come back over the same connection (with net, tcp and tcp;ofi_rxm), so a client needs no open port.

What always holds: an address sent by a node has the family and the length that libfabric expects before libfabric
sees it; every wait has a deadline; a caller's timeout that was too short is a DeadlineExceeded, and does not blame
the node. What it doesn't do: pass a NAT.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.endpoints import (
    ENDPOINTS_ON_WILDCARDS,
    WITHOUT_IP,
    Ports,
    is_ours,
    is_reachable,
    open_endpoint,
    source_towards,
    wildcard,
)
from kvstore.errors import ConfigError, DeadlineExceeded, FabricError, NodeUnavailable, ProtocolError
from kvstore.limits import FABRIC_GRACE_MS, OWN_ADDRESS_PROBE_MS
from kvstore.reach import split_target
from nic_offload.fabric import MEMORY, EventKind, Fabric
from nic_offload.library import load
from nic_offload.sockaddr import SocketAddress, ip_of
from nic_offload.trigger import arm

if TYPE_CHECKING:
    from kvstore.client.link import Host, Link
    from kvstore.errors import KvError
    from kvstore.reach import Reach
    from nic_offload.fabric import Endpoint, Event
    from nic_offload.sockaddr import Ip

__all__ = ["OwnSide", "say_first_word"]

_PROBE_TIMEOUT_S = OWN_ADDRESS_PROBE_MS / 1000
_GRACE_S = FABRIC_GRACE_MS / 1000


class OwnSide:
    """The address of a client's side. Safe to use from any thread, one at a time."""

    def __init__(self, reach: Reach) -> None:
        self._target = reach.node
        self._provider = MEMORY if reach.transport == MEMORY else reach.provider
        self._address = reach.fabric_address or None
        self._ports = Ports.of(reach.fabric_ports) if reach.fabric_ports else None
        self._seen_at: Ip | None = None  # where the node has just seen a call of ours come from

    def is_at(self, caller: str) -> bool:
        """Use the address at which the node saw our call for the next endpoint; False if it is not ours, or was given.

        gRPC chooses among a node's addresses by itself, and may have chosen another family than we would.
        """
        if self._address is None:
            with suppress(ValueError):
                seen = ip_of(caller)
                self._seen_at = seen if is_ours(seen) else None
        return self._seen_at is not None

    def open_fabric(self, *, device_memory: bool = False) -> Fabric:
        """The fabric of all the client's links. The node need not be there."""
        provider = self._provider or load().best_provider()
        address = self._address
        if address is None and provider in ENDPOINTS_ON_WILDCARDS:
            address = self._wildcard()
        elif address is None and provider not in WITHOUT_IP:
            address = str(self._source(_PROBE_TIMEOUT_S))
        return Fabric(provider, address=address, device_memory=device_memory)

    def _wildcard(self) -> str:
        """Return the wildcard of IPv4 if the node has such an address, else of both: a name may lead to either."""
        with suppress(ValueError):
            if ip_of(split_target(self._target)[0]).version == 4:  # noqa: PLR2004 - the protocol's own number
                return "0.0.0.0"  # noqa: S104
        return wildcard()

    def open_endpoint(self, fabric: Fabric, timeout_s: float) -> tuple[Endpoint, bytes]:
        """Open an endpoint for the node; returns it with the address to report to the node."""
        if fabric.ip_version == 0:
            endpoint = fabric.open_endpoint()
            return endpoint, endpoint.address()
        ip, self._seen_at = self._seen_at, None
        if ip is None:
            ip = self._source(timeout_s) if self._address is None else self._given(self._address)
        endpoint = open_endpoint(fabric, ip, self._ports)
        return endpoint, SocketAddress(ip, SocketAddress.of(endpoint.address()).port).encoded

    @staticmethod
    def add_peer(fabric: Fabric, address: bytes) -> int:
        """Insert the node's address into the address vector; ProtocolError if it is invalid."""
        if fabric.ip_version == 0:
            return fabric.add_peer(address)
        try:
            node = SocketAddress.of(address)
            known_as = node.packed(fabric.ip_version)
        except ValueError as error:
            raise ProtocolError(f"The node's fabric address is not valid here: {error}.") from None
        if not is_reachable(node):
            raise ProtocolError(
                f"The node's fabric address {node} is not an address of a machine; give it a --fabric-address."
            )
        return fabric.add_peer(known_as)

    @staticmethod
    def _given(address: str) -> Ip:
        try:
            return ip_of(address)
        except ValueError:
            raise ConfigError(f"{address!r} is not an IP address of this machine.") from None

    def _source(self, timeout_s: float) -> Ip:
        """Our address on the current route to the node."""
        host, port = split_target(self._target)
        clock = SystemClock()
        until_ns = clock.monotonic_ns() + int(timeout_s * 1e9)
        ips = _addresses(host, timeout_s)
        if len(ips) == 1:
            found = source_towards(ips[0])
            if found is not None:
                return found
        for ip in ips if len(ips) > 1 else ():
            left_s = min(_PROBE_TIMEOUT_S, (until_ns - clock.monotonic_ns()) / 1e9)
            if left_s <= 0:
                raise DeadlineExceeded(f"No route to {self._target} was found within {timeout_s:.1f} s.")
            with suppress(OSError, ValueError), socket.create_connection((str(ip), port), left_s) as way:
                return ip_of(way.getsockname()[0])
        raise NodeUnavailable(f"There is no route from this machine to {self._target}.")


def _addresses(host: str, timeout_s: float) -> list[Ip]:
    """The addresses of a host. The resolver has no deadline of its own, so it is asked in a thread."""
    with suppress(ValueError):
        return [ip_of(host)]
    answers: queue.SimpleQueue[list[Ip] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the second is a name with an invalid label
            answers.put(error)
        else:
            ips = (ip_of(str(address[0]).partition("%")[0]) for *_, address in found)
            answers.put(list(dict.fromkeys(ips)))

    threading.Thread(target=ask, name="kvstore-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise DeadlineExceeded(f"The name {host} was not resolved within {timeout_s:.1f} s.") from None
    if isinstance(answer, list):
        return answer
    raise NodeUnavailable(f"The name {host} has no address: {getattr(answer, 'strerror', answer)}.")


class _FirstWord:
    """A pending put, and how it ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.came = False
        self.is_late = True  # unless it ends for another reason than its deadline

    def event(self, event: Event) -> None:
        """Record its end."""
        self.came = event.kind == EventKind.DONE
        self.is_late = event.status == -errno.ETIMEDOUT
        self.ended.set()

    def lost(self, _: KvError) -> None:
        """The link is lost."""
        self.is_late = False
        self.ended.set()


def say_first_word(client: Host, link: Link, timeout_s: float) -> None:
    """Connect to the node before it has to connect to us; on failure the link is lost, and the error has the address.

    DeadlineExceeded if only the time was short: a connection might have been made in `connect_timeout_ms`.
    """
    calls = link.calls
    if calls is None or client.fabric.ip_version == 0:
        return
    is_short = timeout_s < client.reach.connect_timeout_s
    timeout_s = min(timeout_s, client.reach.connect_timeout_s)
    word = _FirstWord()
    with client.lock:
        if link.error is not None:
            raise link.error
        tag = client.next_tags()
        link.operations[tag] = word
        deadline_ns = SystemClock().monotonic_ns() + int(timeout_s * 1e9)
        try:
            arm(client.fabric, [calls.first_word(tag, deadline_ns)])
        except FabricError as error:
            client.lose(link, error)
            raise
    word.ended.wait(timeout_s + _GRACE_S)
    if not word.came:
        was_short = is_short and word.is_late
        failure = link.error or NodeUnavailable(
            f"The node's fabric address is {SocketAddress.of(link.node_address)}, and nothing answered there"
            f" within {timeout_s:.1f} s: are the node's fabric ports (--fabric-ports) open to this machine?"
        )
        client.lose(link, failure)
        if was_short:
            raise DeadlineExceeded(
                f"The call's {timeout_s:.3f} s passed before it was connected to the node."
            )
        raise failure
    with client.lock:
        link.operations.pop(tag, None)
