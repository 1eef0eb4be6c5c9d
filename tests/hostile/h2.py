"""HTTP/2 frames of an attacker that breaks the rules that client libraries keep.

It is what the tests need and no more: it reads nothing but what they look at, and does no flow control.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

__all__ = [
    "PREFACE",
    "Answers",
    "answer_pings",
    "connected",
    "data",
    "frame",
    "goes_away",
    "half",
    "headers",
    "more",
    "no_windows",
    "reset",
    "window",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_END_STREAM, _END_HEADERS = 1, 4
_WINDOW_MAX = (1 << 31) - 1 - 65_535


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes((len(text),)) + text.encode()


def headers(stream: int, path: str, *more: tuple[str, str], ends: bool = False) -> bytes:
    """The headers of a call, without the dynamic table, so that only the stream's number differs."""
    block = b"\x83\x86\x04" + _text(path) + b"\x01" + _text("node")
    for name, value in (("content-type", "application/grpc"), ("te", "trailers"), *more):
        block += b"\x00" + _text(name) + _text(value)
    return frame(_HEADERS, _END_HEADERS | (_END_STREAM if ends else 0), stream, block)


def reset(stream: int) -> bytes:
    """RST_STREAM for a call."""
    return frame(_RESET, 0, stream, struct.pack(">I", 8))


def data(stream: int, message: bytes, *, ends: bool = False) -> bytes:
    body = b"\x00" + struct.pack(">I", len(message)) + message
    return frame(_DATA, _END_STREAM if ends else 0, stream, body)


def half(length: int) -> bytes:
    """The beginning of a gRPC message."""
    return b"\x00" + struct.pack(">I", length)


def more(stream: int, some: bytes) -> bytes:
    """More bytes of a call's message."""
    return frame(_DATA, 0, stream, some)


def window(stream: int, size: int) -> bytes:
    """WINDOW_UPDATE for a call, or with the number 0 for the connection."""
    return frame(_WINDOW, 0, stream, struct.pack(">I", size))


def no_windows() -> bytes:
    """SETTINGS with an initial window of 0."""
    return frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 0))


def answer_pings(link: socket.socket) -> None:
    """Answer pings, and nothing else, until the other side closes the connection."""
    said = b""
    link.settimeout(None)
    with suppress(OSError):
        while came := link.recv(1 << 16):
            said += came
            while len(said) >= 9 and len(said) >= 9 + int.from_bytes(said[:3]):
                one, said = said[: 9 + int.from_bytes(said[:3])], said[9 + int.from_bytes(said[:3]) :]
                if one[3] in (_SETTINGS, _PING) and not one[4]:
                    link.sendall(frame(one[3], 1, 0, one[9:] if one[3] == _PING else b""))


def connected(host: str, port: int, source: str = "127.0.0.1", timeout_s: float = 5.0) -> socket.socket:
    """An HTTP/2 connection from this address, with its preface sent."""
    link = socket.create_connection((host, port), timeout_s, (source, 0))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(PREFACE)
    return link


class Answers:
    """The received frames of one connection: ended calls, and how much more may be sent. It never blocks."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._said = b""
        self.window = 65_535
        self.windows: dict[
            int, int
        ] = {}  # how much more of each call has been asked for than its first window
        link.setblocking(False)
        link.sendall(window(0, _WINDOW_MAX))

    def ended(self) -> list[int]:
        """The calls that have ended since the last call; OSError once the other side has closed the connection."""
        with suppress(BlockingIOError):
            came = self._link.recv(1 << 16)
            if not came:
                raise ConnectionResetError
            self._said += came
        calls: list[int] = []
        while len(self._said) >= 9 and len(self._said) >= 9 + int.from_bytes(self._said[:3]):
            over = 9 + int.from_bytes(self._said[:3])
            kind, flags, stream = self._said[3], self._said[4], int.from_bytes(self._said[5:9])
            payload, self._said = self._said[9:over], self._said[over:]
            if kind in (_SETTINGS, _PING) and not flags & 1:
                self._link.sendall(frame(kind, 1, 0, payload if kind == _PING else b""))
            elif kind == _WINDOW and stream:
                self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(payload)
            elif kind == _WINDOW:
                self.window += int.from_bytes(payload)
            elif kind == _RESET or (kind == _HEADERS and flags & _END_STREAM != 0):
                calls.append(stream)
        return calls


def goes_away(link: socket.socket, within_s: float) -> bool:
    """Whether the other side closes the connection within this time; its frames are ignored."""
    link.settimeout(within_s)
    try:
        while link.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
