"""KV events over ZeroMQ, as vLLM publishes them: blocks that are now stored, and blocks that were removed.

A message is `[topic, sequence, batch]`: `kv@` and the tenant in hex; eight bytes, big-endian; and MessagePack of `[time
in seconds, events, null]`. An event is a map with a `type` or, if configured, an array that begins with it. Recent
messages can be replayed: a request with a sequence number returns all from there on, then number -1.

What always holds: the node's loop never waits. Events that find no room in the queue are counted and leave a gap in the
sequence, so listeners know that they missed some. ZeroMQ authenticates nobody, so nothing leaves this machine: the
publisher listens only on loopback and `ipc://` (`client.watch`, over gRPC, is for others).

What it doesn't do: report blocks from before the node's start, know tokens, or wait for slow readers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import zmq

from kvstore.errors import CannotListen
from kvstore.limits import EVENTS_QUEUED_MAX, EVENTS_REPLAYED_MAX, EVENTS_UNREAD_MAX
from kvstore.storage.eviction.types import Reason
from kvstore.storage.index_layout import names_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.config import EventsConfig

__all__ = ["KvEvents"]

log = logging.getLogger(__name__)

MEDIUM: Final = "STORAGE"
_SEQUENCE_BYTES: Final = 8
_END: Final = (-1).to_bytes(_SEQUENCE_BYTES, signed=True)


class _Noted(NamedTuple):
    """Events of one moment, for blocks of any tenants."""

    wall_s: float
    names: Sequence[tuple[bytes, bytes]]
    gone: bool


class KvEvents:
    """A publisher with its own thread."""

    def __init__(self, config: EventsConfig, clock: Clock) -> None:
        self._clock = clock
        self._as_arrays = config.as_arrays
        self._pack = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._published = self._listening(zmq.PUB, config.endpoint)
        self._published.set_hwm(EVENTS_UNREAD_MAX)
        self._replay = None if config.replay is None else self._listening(zmq.ROUTER, config.replay)
        self._queue: deque[_Noted] = deque()
        self._lock = threading.Lock()
        self._queued = 0
        self._gap = False
        self.dropped = 0  # events that found no room
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=EVENTS_REPLAYED_MAX)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The address at which it listens; a port given as `*` is a number here."""
        sockets = [one for one in (self._published, self._replay) if one is not None]
        return tuple(one.getsockopt_string(zmq.LAST_ENDPOINT) for one in sockets)

    def _listening(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise CannotListen(f"Events can't be published on {endpoint}: {error}.") from error
        return socket

    def blocks(self, rows: NDArray[Any], reason: Reason | None) -> None:
        """Note blocks, given as rows of the index, that are now stored or, with a reason, removed.

        Called on the node's loop.
        """
        if reason is Reason.SUPERSEDED:
            return  # a newer record has the name: the block is still stored
        noted = _Noted(self._clock.wall_ms() / 1000, tuple(names_of(rows)), gone=reason is not None)
        with self._lock:
            if self._queued + len(noted.names) > EVENTS_QUEUED_MAX:
                self.dropped += len(noted.names)
                self._gap = True
                return
            self._queue.append(noted)
            self._queued += len(noted.names)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Publish queued events, and stop."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        os.close(self._bell)
        self._context.destroy(linger=0)

    # --- its own thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closing or self._queue:
            ready = dict(poller.poll(None if not self._queue else 0))
            if self._bell in ready:
                os.eventfd_read(self._bell)
            self._publish()
            if self._replay in ready:
                self._answer()

    def _publish(self) -> None:
        while True:
            with self._lock:
                if self._gap:
                    self._gap = False
                    self._sequence += 1
                if not self._queue:
                    return
                noted = self._queue.popleft()
                self._queued -= len(noted.names)
            of_tenant: dict[bytes, list[bytes]] = {}
            for tenant, key in noted.names:
                of_tenant.setdefault(tenant, []).append(key)
            for tenant, keys in of_tenant.items():
                self._send(b"kv@" + tenant.hex().encode(), noted, keys)

    def _send(self, topic: bytes, noted: _Noted, keys: list[bytes]) -> None:
        event = _removed(keys) if noted.gone else _stored(keys)
        form = list(event.values()) if self._as_arrays else event
        payload = self._pack([noted.wall_s, [form], None])
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._kept.append((sequence, payload))
        self._published.send_multipart([topic, sequence.to_bytes(_SEQUENCE_BYTES), payload])

    def _answer(self) -> None:
        """Resend requested events, as far as they are still kept."""
        assert self._replay is not None
        who, *envelope, begin = self._replay.recv_multipart()
        if len(begin) != _SEQUENCE_BYTES:
            log.warning("A request for events is %d bytes long, not 8.", len(begin))
            return
        first = int.from_bytes(begin)
        try:
            for sequence, payload in self._kept:
                if sequence >= first:
                    number = sequence.to_bytes(_SEQUENCE_BYTES)
                    self._replay.send_multipart([who, *envelope, number, payload], zmq.NOBLOCK)
            self._replay.send_multipart([who, *envelope, _END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("Events could not be replayed: %s", error)


def _stored(keys: list[bytes]) -> dict[str, object]:
    """The fields of vLLM's `BlockStored` up to its last one without a default; a store knows keys and no tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }


def _removed(keys: list[bytes]) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": MEDIUM}
