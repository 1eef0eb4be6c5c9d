"""Shares a node's memory with clients on the same machine: they map it, copy blocks out of it, and put blocks into it.

An attach is answered with the name of a socket (in the abstract namespace) and a pass. A caller that presents the pass
there gets descriptors: of the hot memory, read-only, and of the slots granted to its connection, writable
(`shared_slots`). A client on another machine, or in another network namespace, finds no such socket, and uses the
fabric. `nic_offload/desk.c` decides which blocks such a client can read, and for how long they stay in place.

What always holds: a pass is valid once, for `SHARE_PASS_MS`, and until its connection is closed; nobody can write to
the hot memory, or resize either memory, through a descriptor; a silent caller is disconnected after `SHARE_CALL_MS`,
and at most `SHARE_CALLERS_MAX` are served at a time.
What it doesn't do: isolate tenants in the hot memory. A client that maps it can read all of it, so a node that has
tenants shares only slots.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import TYPE_CHECKING

from kvstore.errors import FabricError
from kvstore.limits import (
    SHARE_CALL_MS,
    SHARE_CALLERS_MAX,
    SHARE_PASS_BYTES,
    SHARE_PASS_MS,
    SHARE_REST_MS,
    SHARE_SLOTS_MAX,
)
from kvstore.node.fair_queue import Places
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.sharing import HAS_DIRECTORY, HAS_HOT, HAS_SLOTS, MAPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.node.connection import Connection
    from kvstore.node.hot import HotMemory
    from kvstore.node.shared_slots import SharedSlots
    from nic_offload.shelf import Desk

__all__ = ["Sharing"]

log = logging.getLogger(__name__)


class _Offer:
    """The rights of a pass."""

    def __init__(
        self,
        connection: Connection,
        slots: SharedSlots | None,
        desk: Desk | None,
        expires: asyncio.TimerHandle,
        *,
        looks: bool,
    ) -> None:
        self.connection = connection
        self.slots = slots
        self.desk = desk  # whose client reads blocks by itself; None: it does not
        self.expires = expires
        self.looks = looks  # for words in its slots' rows


class Sharing:
    """Shares a node's memory. Used in the loop's thread only."""

    def __init__(
        self, hot: HotMemory | None, tenants: Callable[[], int], *, has_directory: bool = True
    ) -> None:
        """Without the hot memory it shares only slots. `tenants` returns how many tenants the node knows.

        `has_directory`: clients may read blocks without a call, for as long as the node's process lives.
        """
        self._hot = hot
        self._directory = hot.open_directory() if hot is not None and has_directory else None
        self._desks: dict[Connection, Desk] = {}  # whose clients read directly
        self._loop = asyncio.get_running_loop()
        self._offers: dict[bytes, _Offer] = {}
        self._mapped: set[Connection] = set()
        self._slots: set[Connection] = set()  # whose slots are or may be mapped
        self._places = Places(SHARE_SLOTS_MAX, tenants)  # for these
        self._callers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._name = f"triggerkv-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(SHARE_CALLERS_MAX)
        self._listens_again: asyncio.TimerHandle | None = None
        self._listen()

    def __len__(self) -> int:
        """How many connections have memory of the node mapped."""
        return len(self._mapped)

    @property
    def shares_hot(self) -> bool:
        """Whether blocks can be read out of the hot memory."""
        return self._hot is not None

    def shares_slots(self, tenant: bytes) -> bool:
        """Whether one more connection of a tenant may have its slots mapped."""
        return self._places.left(tenant) > 0

    def offer(
        self, connection: Connection, slots: SharedSlots | None, desk: Desk | None, *, looks: bool = False
    ) -> pb.SharedMemory | None:
        """The offer to a client that may map memory; None if there is nothing to map.

        With its `desk`, it may also read blocks of its tenant without a call. `looks`: for words in its slots' rows.
        """
        if self._hot is None and slots is None:
            return None
        one = secrets.token_bytes(SHARE_PASS_BYTES)
        expires = self._loop.call_later(SHARE_PASS_MS / 1000, self._expire, one)
        if slots is None or self._directory is None:
            desk = None
        self._offers[one] = _Offer(connection, slots, desk, expires, looks=looks)
        message = pb.SharedMemory(socket=self._name, pass_once=one)
        if self._hot is not None:
            message.size_bytes = self._hot.size_bytes
        if slots is not None:
            self._slots.add(connection)
            self._places.take(connection.tenant)
            message.slots_bytes, message.words_offset = slots.size_bytes, slots.words_offset
            message.rows_offset = slots.rows_offset
            if desk is not None and self._directory is not None:
                _, message.directory_bytes = self._directory
                message.owner, message.log_offset = connection.tenant, slots.log_offset
        return message

    def _expire(self, one: bytes) -> None:
        offer = self._offers.pop(one)
        if offer.slots is not None:
            offer.slots.withhold()
            self._give_back(offer.connection)

    def withdraw(self, connection: Connection) -> None:
        """Withdraw the pass and the slots of a closed connection."""
        for one in [one for one, offer in self._offers.items() if offer.connection is connection]:
            self._offers.pop(one).expires.cancel()
        self._mapped.discard(connection)
        desk = self._desks.pop(connection, None)
        if desk is not None:
            desk.log(0)
        self._give_back(connection)

    def _give_back(self, connection: Connection) -> None:
        if connection in self._slots:
            self._slots.remove(connection)
            self._places.give_back(connection.tenant)

    def _listen(self) -> None:
        self._listens_again = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except OSError:  # it has left, or no descriptor is left for it, and we would be notified endlessly
            self._loop.remove_reader(self._listener)
            self._listens_again = self._loop.call_later(SHARE_REST_MS / 1000, self._listen)
            return
        if len(self._callers) >= SHARE_CALLERS_MAX:
            caller.close()
            return
        caller.setblocking(False)
        self._callers[caller] = self._loop.call_later(SHARE_CALL_MS / 1000, self._end, caller)
        self._loop.add_reader(caller, self._on_pass, caller)

    def _on_pass(self, caller: socket.socket) -> None:
        """Handle a caller that presents its pass."""
        try:
            offer = self._offers.pop(caller.recv(SHARE_PASS_BYTES), None)
            if offer is not None:
                offer.expires.cancel()
                self._hand_over(caller, offer)
                return
        except OSError:
            pass  # it has left, or no descriptor is left for it: it uses the fabric
        self._end(caller)

    def _hand_over(self, caller: socket.socket, offer: _Offer) -> None:
        has = HAS_HOT * self.shares_hot | HAS_SLOTS * (offer.slots is not None)
        hot = [] if self._hot is None else [self._hot.fd]
        if offer.desk is not None and self._directory is not None:
            has |= HAS_DIRECTORY
            hot.append(self._directory[0])

        def give(fds: Sequence[int]) -> None:
            socket.send_fds(caller, [bytes([has])], [*hot, *fds])

        if offer.slots is None:
            give(())
        else:
            offer.slots.hand_over(give)
        self._mapped.add(offer.connection)
        log.info("maps the node's memory", extra=offer.connection.about())
        if offer.slots is None:
            self._end(caller)
        else:
            self._loop.add_reader(caller, self._on_mapped, caller, offer, offer.slots)

    def _on_mapped(self, caller: socket.socket, offer: _Offer, slots: SharedSlots) -> None:
        """Handle a caller that has mapped its slots; it puts nothing before it gets the answer."""
        try:
            connection = offer.connection
            if caller.recv(1) == MAPPED and not connection.closed:
                slots.mapped(connection, None if self._hot is None else self._hot.region, looks=offer.looks)
                if offer.desk is not None:
                    self._desks[connection] = offer.desk
                    offer.desk.log(slots.log)
                caller.send(MAPPED)
            else:
                slots.withhold()
        except (OSError, FabricError):
            pass  # it has left, or is about to
        self._end(caller)

    def _end(self, caller: socket.socket) -> None:
        self._callers.pop(caller).cancel()
        self._loop.remove_reader(caller)
        caller.close()

    def close(self) -> None:
        """Stop sharing; clients keep their mappings until they close them."""
        if self._listens_again is not None:
            self._listens_again.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for caller in list(self._callers):
            self._end(caller)
        for offer in self._offers.values():
            offer.expires.cancel()
        self._offers.clear()
