"""Floods of HTTP/2 frames that belong to no call, as programs of `tests.hostile.attacks`."""

from __future__ import annotations

import select
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.hostile import h2
from tests.hostile.calling import Told, bearer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["FRAMES", "FRAME_ATTACKS"]

_STATUS = "/kvstore.v1.KvStore/Status"
_ATTACH = "/kvstore.v1.KvStore/Attach"
_BYTES = 64 << 10  # of frames between two calls
_CONNECTIONS = 4
_HEADERS, _PRIORITY, _SETTINGS, _PING, _WINDOW, _CONTINUATION, _NO_SUCH = 1, 2, 4, 6, 8, 9, 77

FRAMES: dict[str, Callable[[], bytes]] = {
    "ping": lambda: h2.frame(_PING, 0, 0, bytes(8)),
    "settings": lambda: h2.frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)),
    "window": lambda: h2.window(0, 1),
    "priority": lambda: h2.frame(_PRIORITY, 0, 1, bytes(5)),
    "unknown": lambda: h2.frame(_NO_SUCH, 0, 0, b""),
    "table": lambda: h2.frame(_SETTINGS, 0, 0, struct.pack(">HI", 1, 0) + struct.pack(">HI", 1, 1 << 20)),
}


def frames(told: Told, until: float, source: str) -> Told:
    """Frames without content, and an occasional call that keeps the connection open; answers are read."""
    some = FRAMES[told["frame"]]()
    chunk = some * (_BYTES // len(some))
    links: dict[socket.socket, int] = {}
    begun = sent = 0
    while time.monotonic() < until:
        while len(links) < _CONNECTIONS:
            try:
                links[h2.connected("127.0.0.1", told["port"], source, 1.0)] = 1
            except OSError:
                time.sleep(0.05)
                break
            begun += 1
        for link, stream in list(links.items()):
            call = h2.headers(stream, _STATUS, *bearer(told)) + h2.data(stream, b"", ends=True)
            links[link] = stream + 2
            try:
                link.settimeout(0.5)
                link.sendall(call + chunk)
                sent += len(chunk) // len(some)
                while select.select([link], [], [], 0)[0]:
                    if not link.recv(1 << 16):
                        raise ConnectionResetError
            except OSError:
                del links[link]
                link.close()
    return {"frames": sent, "connections": begun}


def continuations(told: Told, until: float, source: str) -> Told:
    """Headers of a call that never end: one CONTINUATION frame after the other, on new connections all the time."""
    begun = sent = 0
    part = h2.frame(_CONTINUATION, 0, 1, (b"\x00\x06x-more\x7f\x80\x7f" + b"y" * 255) * 60)
    while time.monotonic() < until:
        with suppress(OSError), h2.connected("127.0.0.1", told["port"], source, 1.0) as link:
            begun += 1
            whole = h2.headers(1, _ATTACH, *bearer(told))
            link.sendall(h2.frame(_HEADERS, 0, 1, whole[9:]))
            while time.monotonic() < until:
                link.sendall(part)
                sent += len(part)
    return {"sent": sent, "connections": begun}


def table_bombs(told: Told, until: float, source: str) -> Told:
    """Small headers that refer thousands of times to a large entry of the connection's table."""
    begun = calls = 0
    large = b"\x40\x05x-big\x7f\xa1\x1e" + b"z" * 4000
    while time.monotonic() < until:
        with suppress(OSError), h2.connected("127.0.0.1", told["port"], source, 1.0) as link:
            begun += 1
            link.sendall(h2.frame(_HEADERS, 4, 1, h2.headers(1, _ATTACH, *bearer(told))[9:] + large))
            for stream in range(3, 2001, 2):
                block = h2.headers(stream, _ATTACH, *bearer(told))[9:] + b"\xbe" * 8000
                link.sendall(h2.frame(_HEADERS, 4, stream, block) + h2.reset(stream))
                calls += 1
    return {"calls": calls, "connections": begun}


FRAME_ATTACKS: dict[str, Callable[[Told, float, str], Told]] = {
    one.__name__: one for one in (frames, continuations, table_bombs)
}
