"""The process's sockets, as the kernel lists them: gRPC and libfabric, which opened them, name none.

What always holds: nothing is done to a socket unless a duplicate of its descriptor has been seen to be that socket, so
a descriptor that was closed and used again meanwhile is left alone.
"""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Copy", "end", "listed", "name_of", "received_bytes"]

_FOLDER: Final = "/proc/self/fd"
_TCP_INFO_BYTES: Final = 136  # of struct tcp_info, up to the end of tcpi_bytes_received
# Longer than what any connection has received and not delivered. There is no memory here: the kernel, told to discard,
# copies nothing, and would fail with EFAULT if it did.
_NOWHERE: Final = (ctypes.c_char * (1 << 30)).from_address(4096)


def name_of(fd: int) -> str:
    """The name of a descriptor's socket, which no other socket of the machine has while this one is open."""
    return os.readlink(f"{_FOLDER}/{fd}")  # noqa: PTH115 - a few times a second, of thousands


def listed() -> Iterator[tuple[str, int]]:
    """Name and descriptor of each socket that this process has."""
    for entry in os.listdir(_FOLDER):  # noqa: PTH208 - likewise
        with suppress(OSError):
            name = name_of(int(entry))
            if name.startswith("socket:"):
                yield name, int(entry)


class Copy:
    """A descriptor of our own for a socket, if it is still the one of this name; closed at the end."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        self._ours: socket.socket | None = None

    def __enter__(self) -> socket.socket | None:
        with suppress(OSError):
            copy = os.dup(self._fd)
            if f"socket:[{os.fstat(copy).st_ino}]" != self._name:
                os.close(copy)
                return None
            try:
                self._ours = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
        return self._ours

    def __exit__(self, *_: object) -> None:
        if self._ours is not None:
            self._ours.close()


def received_bytes(fd: int, name: str) -> int:
    """Bytes received over a connection since it was opened."""
    with Copy(fd, name) as ours, suppress(OSError):
        if ours is not None:
            info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(info) == _TCP_INFO_BYTES:
                return int.from_bytes(info[_TCP_INFO_BYTES - 8 :], "little")
    return 0


def end(fd: int, name: str) -> None:
    """End a connection. What has arrived and was not read is discarded: a library would read all of it first.

    From the end on the kernel accepts no more bytes, and the discard is one call, within which nobody else reads. So a
    library never reads on behind a gap, where bytes of a payload might be taken for a call.
    """
    with Copy(fd, name) as ours, suppress(OSError):
        if ours is not None:
            ours.shutdown(socket.SHUT_RDWR)
            ours.recv_into(_NOWHERE, 0, socket.MSG_TRUNC | socket.MSG_DONTWAIT)
