"""The node's hot memory for clients on its own machine: they map it, to be read, and copy blocks out of it themselves.

An attach is answered with the name of a socket (of the abstract namespace) and a pass. Who shows the pass there is
given the memory's descriptor. A client on another machine, or in another network namespace, finds no such socket, and
goes on over the fabric. What such a client is told of blocks, and how long these stay where they are, is the desk's
affair (`nic_offload/desk.c`).

Always holds: a pass is good once, and until its connection is closed; nobody can write to the memory or change its size
through the descriptor; a caller that says nothing is hung up on after `SHARE_CALL_MS`, and no more than
`SHARE_CALLERS_MAX` are listened to at a time.
What it doesn't do: keep tenants apart. All that the hot memory has can be read in it, so a node that has tenants shares
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.limits import SHARE_CALL_MS, SHARE_CALLERS_MAX, SHARE_PASS_BYTES
from kvstore.wire import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.node.connection import Connection
    from kvstore.node.hot import HotMemory

__all__ = ["Sharing"]

log = logging.getLogger(__name__)


class Sharing:
    """Of one node, in its loop's thread."""

    def __init__(self, memory: HotMemory) -> None:
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._passes: dict[bytes, Connection] = {}
        self._mapped: set[Connection] = set()
        self._callers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._name = f"triggerkv-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(SHARE_CALLERS_MAX)
        self._loop.add_reader(self._listener, self._accept)

    def __len__(self) -> int:
        """How many connections have the memory mapped."""
        return len(self._mapped)

    def offer(self, connection: Connection) -> pb.SharedMemory:
        """What a client is told that may map the memory."""
        one = secrets.token_bytes(SHARE_PASS_BYTES)
        self._passes[one] = connection
        return pb.SharedMemory(socket=self._name, pass_once=one, size_bytes=self._memory.size_bytes)

    def withdraw(self, connection: Connection) -> None:
        """The connection is closed."""
        for one in [one for one, whose in self._passes.items() if whose is connection]:
            del self._passes[one]
        self._mapped.discard(connection)

    def _accept(self) -> None:
        with suppress(OSError):  # it has left, or we have no descriptor for it
            caller, _ = self._listener.accept()
            if len(self._callers) >= SHARE_CALLERS_MAX:
                caller.close()
                return
            caller.setblocking(False)
            self._callers[caller] = self._loop.call_later(SHARE_CALL_MS / 1000, self._end, caller)
            self._loop.add_reader(caller, self._hear, caller)

    def _hear(self, caller: socket.socket) -> None:
        try:
            shown = caller.recv(SHARE_PASS_BYTES)
            connection = self._passes.pop(shown, None)
            if connection is not None:
                socket.send_fds(caller, [b"\0"], [self._memory.fd])
                self._mapped.add(connection)
                log.info("maps the hot memory", extra=connection.about())
        except OSError:
            pass  # it has left, and reads over the fabric, or not at all
        self._end(caller)

    def _end(self, caller: socket.socket) -> None:
        self._callers.pop(caller).cancel()
        self._loop.remove_reader(caller)
        caller.close()

    def close(self) -> None:
        """Nobody maps it any more; those that do keep it until they close it."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for caller in list(self._callers):
            self._end(caller)
