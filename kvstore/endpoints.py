"""The addresses of this machine's endpoints: their ports, and the address at which a peer reaches them.

What always holds: nothing is sent to find an address (connecting a UDP socket only looks up the kernel's routes); if a
range of ports is used up, no endpoint is opened and the error is `Overloaded`.
What it doesn't do: decide which peers are accepted; the node does (`kvstore.node.fabric_address`).
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, Overloaded, PortTaken
from kvstore.limits import PORT_MAX
from nic_offload.sockaddr import SocketAddress, ip_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.fabric import Endpoint, Fabric
    from nic_offload.sockaddr import Ip

__all__ = [
    "ENDPOINTS_ON_WILDCARDS",
    "ONE_CONNECTION",
    "WITHOUT_IP",
    "Ports",
    "interface_addresses",
    "is_ours",
    "is_reachable",
    "is_wildcard",
    "open_endpoint",
    "source_towards",
    "wildcard",
]

# With these providers an endpoint listens on the given address, whatever its fabric was opened with (libfabric 1.17).
ENDPOINTS_ON_WILDCARDS = frozenset({"net", "tcp", "tcp;ofi_rxm", "sockets"})
# With these an endpoint has one connection in its life: a client whose connection broke attaches again.
ONE_CONNECTION = frozenset({"net", "tcp"})
WITHOUT_IP = frozenset({"cxi", "efa", "shm", "memory"})

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_IPV4 = 4
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_IFREQ = struct.Struct("16s24x")


class Ports:
    """A range of ports, tried in turn, so that a freed port is not reused at once. One thread."""

    def __init__(self, first: int, last: int) -> None:
        if not 1 <= first <= last <= PORT_MAX:
            raise ConfigError(
                f"A range of ports is FIRST-LAST, within 1 to {PORT_MAX} and in this order, not {first}-{last}."
            )
        self.first, self.last = first, last
        self._next = first

    @classmethod
    def of(cls, text: str) -> Ports:
        """Read `FIRST-LAST`, or one port."""
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"{text!r} is not a range of ports; write FIRST-LAST, such as 7071-7199.")
        return cls(int(match[1]), int(match[2] or match[1]))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ports) and (self.first, self.last) == (other.first, other.last)

    def __hash__(self) -> int:
        return hash((self.first, self.last))

    def in_turn(self) -> Iterator[int]:
        """Each port once, beginning after the last one used."""
        for _ in range(self.last - self.first + 1):
            port = self._next
            self._next = self.first if port == self.last else port + 1
            yield port


def open_endpoint(fabric: Fabric, ip: Ip, ports: Ports | None, domain: int = 0) -> Endpoint:
    """Open an endpoint that listens on this address and one of these ports, or on any free port if none are given."""
    if ports is None:
        return fabric.open_endpoint(SocketAddress(ip, 0).packed(fabric.ip_version), domain)
    for port in ports.in_turn():
        with suppress(PortTaken):
            return fabric.open_endpoint(SocketAddress(ip, port).packed(fabric.ip_version), domain)
    raise Overloaded(
        f"Each attachment needs a port, and all of {ports} are in use on {ip};"
        " detach clients, or open a larger range (--fabric-ports)."
    )


def wildcard() -> str:
    """The wildcard address: of both families if the kernel has IPv6."""
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as trial:
        trial.bind(("::", 0))
        return "::"
    return "0.0.0.0"  # noqa: S104 - the wildcard is intended


def is_wildcard(host: str) -> bool:
    """Whether to listen there means every address, however it is spelled: `::`, `0.0.0.0`, `0`, `::ffff:0.0.0.0`."""
    with suppress(ValueError):
        ip = ipaddress.ip_address(host)
        return ip.is_unspecified or ip == ipaddress.ip_address("::ffff:0.0.0.0")
    with suppress(OSError, ValueError):
        return not any(socket.inet_aton(host))  # the spellings that only the C library reads
    return False


def source_towards(ip: Ip) -> Ip | None:
    """The machine's address on the route to a peer; None if there is no route."""
    family = socket.AF_INET if ip.version == _IPV4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((str(ip), 9))  # connecting a datagram socket sends nothing
        return ip_of(way.getsockname()[0])
    return None


def interface_addresses() -> tuple[Ip, ...]:
    """Return the first usable address of each family among this machine's interfaces that are up, without loopback."""
    names = []
    found: list[Ip] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = _IFREQ.pack(name.encode())
            with suppress(OSError):  # one without an IPv4 address, or being removed
                (flags,) = struct.unpack_from("H", ioctl(asking, _SIOCGIFFLAGS, request), 16)
                if flags & _IFF_UP and not flags & _IFF_LOOPBACK:
                    names.append(name)
                    found.append(ipaddress.IPv4Address(ioctl(asking, _SIOCGIFADDR, request)[20:24]))
    with suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            address, *_, name = line.split()
            if name in names:
                found.append(ipaddress.IPv6Address(bytes.fromhex(address)))
    first: dict[int, Ip] = {}
    for ip in found:
        if not ip.is_loopback and is_reachable(SocketAddress(ip, 1)) and is_ours(ip):
            first.setdefault(ip.version, ip)
    return tuple(first.values())


def is_ours(ip: Ip) -> bool:
    """Whether an endpoint of this machine can listen on it."""
    family = socket.AF_INET if ip.version == _IPV4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
        trial.bind((str(ip), 0))
        return True
    return False


def is_reachable(address: SocketAddress) -> bool:
    """Whether it is a unicast address that needs no scope."""
    ip = address.ip
    useless = ip.is_unspecified or ip.is_multicast or (ip.version != _IPV4 and ip.is_link_local)
    return address.port > 0 and not useless and ip != ipaddress.IPv4Address("255.255.255.255")
