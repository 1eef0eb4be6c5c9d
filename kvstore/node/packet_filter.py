"""Packet filters that the kernel runs on a socket (classic BPF): a refused peer can't even connect.

What always holds: a filter reads the packet's IP header, and so judges an IPv4 peer of an IPv6 socket by its IPv4
address. Open connections keep the filter that their listener had when they began.
What it doesn't do: look at ports or payloads.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nic_offload.sockaddr import Ip

__all__ = ["NOBODY", "admitting", "attach", "detach", "refusing"]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Instruction = tuple[int, int, int, int]

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_IPV4: Final = 4
_NETWORK_HEADER: Final = 0xFFF00000  # SKF_NET_OFF: where the packet's IP header begins, whatever lies before
_SOURCE_OF_IPV4, _SOURCE_OF_IPV6 = _NETWORK_HEADER + 12, _NETWORK_HEADER + 8
_LOAD_BYTE, _LOAD_WORD, _AND, _SHIFT_RIGHT = 0x30, 0x20, 0x54, 0x74
_IF_EQUAL, _JUMP, _RETURN = 0x15, 0x05, 0x06
_WORD_BITS: Final = 32
_ALL: Final = 0xFFFFFFFF
_PASS: Final = (_RETURN, 0, 0, _ALL)
_DROP: Final = (_RETURN, 0, 0, 0)


def refusing(sources: Iterable[str]) -> bytes:
    """Instructions that admit every packet except those of these sources: addresses, and IPv6 networks."""
    return _program([ipaddress.ip_network(one) for one in sources], _DROP, _PASS)


def admitting(client: Ip, networks: Sequence[Network]) -> bytes:
    """Instructions that admit only packets of this address and of these networks."""
    return _program([ipaddress.ip_network(client), *networks], _PASS, _DROP)


def _program(networks: Sequence[Network], of_these: _Instruction, of_others: _Instruction) -> bytes:
    v4 = [one for network in networks if network.version == _IPV4 for one in _if_within(network, of_these)]
    v6 = [one for network in networks if network.version != _IPV4 for one in _if_within(network, of_these)]
    # A conditional jump has an 8-bit offset, too short for many sources; an unconditional one has 32 bits.
    head = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 1, 0, _IPV4),
        (_JUMP, 0, 0, len(v4) + 1),
    ]
    return _packed(*head, *v4, of_others, *v6, of_others)


def _if_within(network: Network, then: _Instruction) -> list[_Instruction]:
    """Compare the words of the source with those of the network, up to the length of its prefix."""
    first = _SOURCE_OF_IPV4 if network.version == _IPV4 else _SOURCE_OF_IPV6
    steps: list[_Instruction] = [then]
    words = -(-network.prefixlen // _WORD_BITS)
    for at in reversed(range(words)):
        shift = network.max_prefixlen - (at + 1) * _WORD_BITS
        mask = int(network.netmask) >> shift & _ALL
        wanted = int(network.network_address) >> shift & _ALL
        masked = [] if mask == _ALL else [(_AND, 0, 0, mask)]
        steps = [(_LOAD_WORD, 0, 0, first + 4 * at), *masked, (_IF_EQUAL, 0, len(steps), wanted), *steps]
    return steps


def _packed(*program: _Instruction) -> bytes:
    return b"".join(struct.pack("=HBBI", *one) for one in program)


NOBODY: Final = _packed(_DROP)


def attach(ours: socket.socket, program: bytes) -> None:
    """Have the kernel run these instructions on each packet for a socket; OSError if it doesn't support them."""
    code = ctypes.create_string_buffer(program, len(program))
    program_head = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    ours.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program_head)


def detach(ours: socket.socket) -> None:
    """Admit all packets again."""
    ours.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
