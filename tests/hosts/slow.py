"""A slow wire: frames between two links are handed on after a delay, by a process on a machine between two bridges.

What always holds: frames keep their order, none is lost here. Checksums and segments are left to no hardware (there is
none): `as_on_a_real_wire` has the sender make them itself.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import select
import socket
import struct
import sys
import time

_ALL = 0x0003  # ETH_P_ALL
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x19, 0x1F, 0x24)  # ETHTOOL_S: tx checksums, scatter/gather, TSO, GSO
_GRO = 0x2C
_FRAME_BYTES = 1 << 16


def as_on_a_real_wire(link: str) -> None:
    """Turn off offloading on this link, so that whole frames with checksums arrive; run on the link's host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (*_OFFLOADS, _GRO):
            value = bytearray(struct.pack("II", command, 0))
            address = (_address_of(value)).to_bytes(8, "little")
            fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16s8s16x", link.encode(), address))


def _address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def relay(first: str, second: str, delay_s: float) -> None:
    """Forward frames in both directions until the process is ended."""
    ends = []
    for link in (first, second):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        end.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
        end.bind((link, 0))
        end.setblocking(False)
        ends.append(end)
    under_way: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("here", flush=True)  # noqa: T201 - the test reads it
    while True:
        left_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select(ends, [], [], left_s)
        now = time.monotonic()
        for end in readable:
            other = ends[1] if end is ends[0] else ends[0]
            for _ in range(64):
                try:
                    frame, (_, _, kind, *_) = end.recvfrom(_FRAME_BYTES)
                except BlockingIOError:
                    break
                if kind != socket.PACKET_OUTGOING:
                    under_way.append((now + delay_s, other, frame))
        while under_way and under_way[0][0] <= now:
            _, end, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # the link is down, or full: a wire loses such a frame too
                end.send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "relay":
        relay(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        as_on_a_real_wire(sys.argv[2])
