"""A relay between a client's fabric and its node's, which can lose bytes and break connections, one end or both.

Where the client's end alone breaks, the node's stays open and hears nothing: so it is behind a firewall that answers
the client with a reset.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from nic_offload.sockaddr import SocketAddress

_CHUNK_BYTES = 1 << 16
_CONNECT_S = 0.5
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends a reset


class _Pair:
    """One connection of the client's, and the relay's own to the node."""

    def __init__(self, client: socket.socket, node: socket.socket) -> None:
        self._client, self._node = client, node
        self._is_cut = False
        self.loses = False
        self._threads = [
            threading.Thread(target=self._carry, args=way, daemon=True)
            for way in ((client, node), (node, client))
        ]
        for thread in self._threads:
            thread.start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                if not self.loses:
                    target.sendall(chunk)
        if not self._is_cut:
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

    def cut(self, *, both: bool) -> None:
        """Reset the client's end, and close the node's or leave it as it is."""
        self._is_cut = True
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._client.shutdown(socket.SHUT_RD)  # ends the thread that reads it
        self._threads[0].join()
        self._client.close()
        if both:
            self._node.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_cut = True
        for end in (self._client, self._node):
            with suppress(OSError):  # the client's may be closed
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._client, self._node):
            end.close()


class Relay:
    """Listens in place of one endpoint of a node; `told` is that endpoint's address."""

    def __init__(self, told: bytes) -> None:
        node = SocketAddress.of(told)
        self._node = (str(node.ip), node.port)
        self._listener = socket.create_server((self._node[0], 0))
        self.told = SocketAddress(node.ip, self._listener.getsockname()[1]).encoded
        self._pairs: list[_Pair] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for pair in self._pairs:
            pair.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    self._pairs.append(_Pair(client, socket.create_connection(self._node, _CONNECT_S)))
                except OSError:  # the node lets nobody connect to an endpoint whose client is there
                    client.close()

    def lose(self) -> None:
        """Drop everything sent through the first connection from now on."""
        self._pairs[0].loses = True

    def cut(self, *, both: bool) -> None:
        """Break the first connection, for the client alone or for both; new connections work."""
        self._pairs[0].cut(both=both)
