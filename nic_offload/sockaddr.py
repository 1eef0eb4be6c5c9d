"""Socket addresses in libfabric's form: the addresses of endpoints of `net`, `tcp` and `sockets`.

What always holds: bytes of another family, or of a wrong length for their family, are not an address and never reach
libfabric: after one of an unknown family, the address vector of net and tcp;ofi_rxm (1.17) accepts no further peer.
An IPv4 address mapped into IPv6 is the IPv4 address, so an IPv6 fabric reaches peers of both.

What it doesn't do: names, and scopes of link-local addresses.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import NamedTuple, TypeAlias

__all__ = ["Ip", "SocketAddress", "ip_of"]

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_IPV4 = struct.Struct("=H2s4s8x")  # struct sockaddr_in
_IPV6 = struct.Struct("=H2sI16sI")  # struct sockaddr_in6
_MAPPED = bytes(10) + b"\xff\xff"


def ip_of(text: str) -> Ip:
    """Parse an address; IPv4 mapped into IPv6 becomes IPv4. ValueError if it is not an address."""
    ip = ipaddress.ip_address(text)
    return ip if ip.version == 4 else ip.ipv4_mapped or ip  # noqa: PLR2004 - the protocol's own number


class SocketAddress(NamedTuple):
    """An IP address and a port."""

    ip: Ip
    port: int

    def __str__(self) -> str:
        return f"{self.ip}:{self.port}" if self.ip.version == 4 else f"[{self.ip}]:{self.port}"  # noqa: PLR2004

    def packed(self, version: int) -> bytes:
        """Its bytes in a fabric of this IP version; ValueError for an IPv6 address in an IPv4 fabric."""
        port = struct.pack(">H", self.port)
        if version == 4:  # noqa: PLR2004
            if self.ip.version != version:
                raise ValueError(f"{self.ip} is not an IPv4 address")
            return _IPV4.pack(socket.AF_INET, port, self.ip.packed)
        ip = self.ip.packed if self.ip.version == version else _MAPPED + self.ip.packed
        return _IPV6.pack(socket.AF_INET6, port, 0, ip, 0)

    @property
    def encoded(self) -> bytes:
        """The bytes given to peers, for any fabric."""
        return self.packed(4 if self.ip.version == 4 else 6)  # noqa: PLR2004

    @classmethod
    def of(cls, data: bytes) -> SocketAddress:
        """Decode an address; ValueError if the bytes are not exactly an IPv4 or IPv6 address."""
        for form, family in ((_IPV4, socket.AF_INET), (_IPV6, socket.AF_INET6)):
            if len(data) == form.size and int.from_bytes(data[:2], "little") == family:
                fields = form.unpack(data)
                packed: bytes = fields[2] if family == socket.AF_INET else fields[3]
                return cls(ip_of(str(ipaddress.ip_address(packed))), int.from_bytes(fields[1], "big"))
        raise ValueError(f"{len(data)} bytes beginning with {data[:2].hex()} are not an IPv4 or IPv6 address")
