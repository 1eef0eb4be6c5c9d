"""The fabric address given to clients, and which of their addresses are accepted.

Each attachment has an endpoint of its own at the node, with a port of `--fabric-ports`. Its address is that of
`--fabric-address`, or else the one on which the node listens; if that is a wildcard, the local address of the route to
the client. A wildcard fabric serves clients of both IP families, each with an endpoint on the address given to it.

What always holds: before libfabric sees a client's address, it has the family and the length that libfabric expects,
and is the source of the call or lies in `--fabric-clients`: no client can make the node connect to a third party.
What it doesn't do: check addresses of fabrics without IP, except for their length.
"""

from __future__ import annotations

import ipaddress
import resource
import socket
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from kvstore.endpoints import (
    ENDPOINTS_ON_WILDCARDS,
    WITHOUT_IP,
    Ports,
    interface_addresses,
    is_ours,
    is_reachable,
    open_endpoint,
    source_towards,
    wildcard,
)
from kvstore.errors import AddressRefused, ConfigError, FabricError, ProtocolError
from kvstore.limits import (
    CLIENTS_MAX,
    DESCRIPTORS_KEPT,
    DESCRIPTORS_OF_CLIENT,
    FABRIC_PORT_FIRST,
    FABRIC_PORT_LAST,
)
from nic_offload.sockaddr import SocketAddress, ip_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.node.connection import Connection
    from nic_offload.fabric import Endpoint, Fabric
    from nic_offload.sockaddr import Ip

__all__ = [
    "FabricAddress",
    "Network",
    "Opened",
    "check_length",
    "fabric_domain",
    "ip_of_peer",
    "parse_networks",
]

_ANY_LENGTH = "shm"  # its addresses are names
_ROUTED = ("192.0.2.1", "2001:db8::1")  # addresses for documentation: only the default route leads there

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Opened(NamedTuple):
    """An endpoint for a client, and the address given to the client."""

    endpoint: Endpoint
    address: bytes


def parse_networks(text: str) -> tuple[Network, ...]:
    """`CIDR[,CIDR]`."""
    try:
        return tuple(ipaddress.ip_network(one.strip()) for one in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a list of networks: {error}; write CIDR[,CIDR], such as 10.0.0.0/8."
        ) from None


def ip_of_peer(peer: str) -> Ip | None:
    """The address in gRPC's name of a peer, `ipv4:10.0.0.7:50112` or `ipv6:%5Bfd00::7%5D:50112`; None without one."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host = unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    with suppress(ValueError):
        return ip_of(host)
    return None


def _resolved(name: str) -> tuple[Ip, ...]:
    """The addresses of a host, at most one of each family; for an address, itself."""
    with suppress(ValueError):
        return (ip_of(name),)
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid label in the name
        why = getattr(error, "strerror", error)
        raise FabricError(f"--fabric-address {name} has no address: {why}.") from None
    first: dict[int, Ip] = {}
    for *_, address in found:
        ip = ip_of(str(address[0]).partition("%")[0])
        if is_reachable(SocketAddress(ip, 1)):
            first.setdefault(ip.version, ip)
    if not first:
        raise FabricError(f"--fabric-address {name} has no address at which others could reach this node.")
    return tuple(first.values())


def fabric_domain(tenant: bytes, attached: Iterable[Connection], domains: int) -> int:
    """The fabric's domain for one more endpoint of a tenant: the one it uses, or the one that the fewest tenants use.

    A memory key is invalid at endpoints of other domains. So no two tenants share a domain, unless more tenants are
    attached than the fabric has domains.
    """
    tenants = {(one.endpoint.domain, one.tenant) for one in attached}
    of_each = Counter(domain for domain, _ in tenants)
    return min(range(domains), key=lambda one: ((one, tenant) not in tenants, of_each[one]))


class FabricAddress:
    """A node's fabric address. Used in the loop's thread only, except `addresses`."""

    def __init__(
        self,
        host: str,
        advertised: str | None = None,
        ports: Ports | None = None,
        clients: Sequence[Network] = (),
    ) -> None:
        """Without `ports`, endpoints use any free port on loopback, and one of the usual range elsewhere."""
        self._listens = ip_of(host)
        self._advertised = advertised
        self._addresses: tuple[Ip, ...] = ()  # that it resolves to, once known
        if advertised is not None:
            with suppress(ValueError):
                self._addresses = (ip_of(advertised),)
        if not all(is_reachable(SocketAddress(ip, 1)) for ip in self._addresses):
            raise ConfigError(
                f"No client can reach --fabric-address {advertised}; use an address of this machine, or none."
            )
        self._clients = clients
        if ports is None and not self._listens.is_loopback:
            ports = Ports(FABRIC_PORT_FIRST, FABRIC_PORT_LAST)
        self.ports = ports

    def clients_max(self) -> int:
        """How many clients can be attached: as many as this process has descriptors and ports for."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        ports = CLIENTS_MAX if self.ports is None else self.ports.last - self.ports.first + 1
        return max(1, min(CLIENTS_MAX, ports, (descriptors - DESCRIPTORS_KEPT) // DESCRIPTORS_OF_CLIENT))

    def fabric_opens_at(self, provider: str) -> str | None:
        """The arguments with which the node's fabric is opened."""
        if provider in WITHOUT_IP:
            return self._advertised
        if self._advertised is None and not self._listens.is_unspecified:
            return str(self._listens)
        return wildcard() if provider in ENDPOINTS_ON_WILDCARDS else self._advertised

    def addresses(self) -> tuple[Ip, ...]:
        """The address given to clients, as far as it is known in advance. This may resolve a name, and block."""
        if self._advertised is not None:
            self._addresses = _resolved(self._advertised)
            return self._addresses
        if not self._listens.is_unspecified:
            return (self._listens,)
        ways = (source_towards(ip_of(text)) for text in _ROUTED)
        routed = tuple(ip for ip in ways if ip is not None)
        # Without a default route, clients connect over the networks of our interfaces; without those, over loopback.
        return routed or interface_addresses() or (ip_of("127.0.0.1"),)

    def believed(self, claimed: bytes, peer: str, fabric: Fabric) -> SocketAddress | None:
        """The address that a client gave, if it is permitted, else ProtocolError; None where addresses have no IP."""
        if fabric.ip_version == 0:
            return None
        try:
            client = SocketAddress.of(claimed)
            client.packed(fabric.ip_version)
        except ValueError as error:
            raise ProtocolError(
                f"A client's fabric address is one of IPv{fabric.ip_version} here, and {error}."
            ) from None
        if not is_reachable(client):
            raise ProtocolError(f"The client's fabric address {client} is not an address of a machine.")
        caller = ip_of_peer(peer)
        own = caller == client.ip or (caller is None and client.ip.is_loopback)
        if not own and not any(client.ip in network for network in self._clients):
            raise AddressRefused(
                f"The client's fabric address {client.ip} is not the source of its call ({caller or peer});"
                " if the client has several, the node allows it by --fabric-clients.",
                str(caller or ""),
            )
        return client

    def open(self, fabric: Fabric, client: SocketAddress | None, domain: int = 0) -> Opened:
        """Open the endpoint for one attachment; Overloaded if the ports are used up."""
        if client is None:
            endpoint = fabric.open_endpoint(domain=domain)
            return Opened(endpoint, endpoint.address())
        at = self._address_for(client.ip)
        return self.open_at(fabric, at, domain)

    def open_at(self, fabric: Fabric, at: Ip, domain: int = 0) -> Opened:
        """Open an endpoint that clients reach at this address; it listens on it if it is this machine's."""
        on_wildcard = "::" if fabric.ip_version == 6 else "0.0.0.0"  # noqa: PLR2004, S104 - an address not ours
        endpoint = open_endpoint(fabric, at if is_ours(at) else ip_of(on_wildcard), self.ports, domain)
        port = SocketAddress.of(endpoint.address()).port
        return Opened(endpoint, SocketAddress(at, port).encoded)

    def _address_for(self, client: Ip) -> Ip:
        if self._advertised is None and self._listens.is_unspecified:
            found = source_towards(client)
            if found is None:
                raise FabricError(f"The node has no route to the client's fabric address {client}.")
            return found
        addresses = self._addresses if self._advertised is not None else (self._listens,)
        if not addresses:
            raise FabricError(f"The address of --fabric-address {self._advertised} is not known yet.")
        for ip in addresses:
            if ip.version == client.version:
                return ip
        raise ProtocolError(
            f"The node's fabric is at {', '.join(map(str, addresses))}, and the client's address {client} is of"
            f" another family; set a --fabric-address of that family at the node, or another fabric_address at"
            f" the client."
        )


def check_length(claimed: bytes, own: bytes, fabric: Fabric) -> None:
    """Refuse an address of a fabric without IP that has another length than this node's own."""
    if fabric.provider != _ANY_LENGTH and len(claimed) != len(own):
        raise ProtocolError(
            f"A fabric address of {fabric.provider} has {len(own)} bytes, not {len(claimed)}."
        )
