"""Connections that are ended without their library: what has arrived is discarded, whole, and nothing comes behind."""

from __future__ import annotations

import fcntl
import socket
import termios
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvstore.node import own_sockets
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    import pytest


def test_what_a_disconnected_peer_has_sent_is_discarded_by_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that read between two calls would take the middle of a payload for calls, with the peer's headers."""
    seen: list[tuple[str, int]] = []

    class Watched(own_sockets.Copy):
        def __enter__(self) -> Any:
            ours = super().__enter__()
            assert ours is not None

            def shutdown(how: int) -> None:
                seen.append(("shutdown", how))
                ours.shutdown(how)

            def recv_into(buffer: Any, count: int, flags: int) -> int:
                seen.append(("recv", ours.recv_into(buffer, count, flags)))
                return seen[-1][1]

            return SimpleNamespace(shutdown=shutdown, recv_into=recv_into)

    monkeypatch.setattr(own_sockets, "Copy", Watched)
    sent = 3 << 20
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * sent)
        with socket.create_connection(listener.getsockname(), 0.5) as flooding, listener.accept()[0] as ours:
            with suppress(TimeoutError):
                flooding.sendall(bytes(sent))
            arrived = int.from_bytes(fcntl.ioctl(ours, termios.FIONREAD, bytes(4)), "little")
            assert arrived > 200 << 10
            own_sockets.end(ours.fileno(), own_sockets.name_of(ours.fileno()))
            assert seen == [("shutdown", socket.SHUT_RDWR), ("recv", arrived)]
            assert flooding.recv(1) == b""

            def is_refused() -> bool:
                try:
                    flooding.send(b"more")
                except (ConnectionResetError, BrokenPipeError):
                    return True
                return False

            wait_until(is_refused, "the kernel accepts no more")
