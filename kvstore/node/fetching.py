"""Fetches: from the drive through staging memory into a client's region, with the acknowledgement behind.

A fetch's life: queued (bounded) -> reading (a piece of staging memory is taken, the drive fills it) ->
sending (the C core checks the payload's CRC and, only if it holds, puts the bytes and chains the
acknowledgement word to them) -> over, the piece free again.

What always holds: no byte leaves whose record failed a check; a client is told of a miss by the same word
that would have told of the bytes; staging memory is not used again while the drive or the fabric has it.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import FabricError, Overloaded
from kvstore.limits import BATCH_BLOCKS_MAX, FETCHES_QUEUED_MAX, HEADER_BYTES, PAGE_BYTES, STAGING_BYTES
from kvstore.miss import MissReason
from kvstore.node.landing import pages_of
from kvstore.storage.extents import Extents
from kvstore.storage.items import GetItem
from kvstore.wire.ack import AckCode, ack_word, code_of_miss
from nic_offload.fabric import EventKind
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredPut, arm, put_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.node.connection import Connection
    from kvstore.storage.items import GetDone
    from kvstore.storage.store import Store
    from nic_offload.fabric import Event, Fabric
    from nic_offload.trigger import WordPut

__all__ = ["FetchRequest", "Fetches", "Staging"]

log = logging.getLogger(__name__)


class Staging:
    """Registered memory, given out in runs of pages."""

    def __init__(self, fabric: Fabric) -> None:
        self._memory = allocate(STAGING_BYTES)
        self.region = fabric.register(self._memory, remote_write=False)
        self._pages = Extents(0, STAGING_BYTES // PAGE_BYTES)
        self.view = memoryview(self._memory)

    def take(self, length_bytes: int) -> int | None:
        """A piece for a record with such a payload, as an offset; None: there is no room just now."""
        start = self._pages.allocate(pages_of(length_bytes))
        return None if start is None else start * PAGE_BYTES

    def give_back(self, offset: int, length_bytes: int) -> None:
        """Free a piece that nobody reads or writes any more."""
        self._pages.release(offset // PAGE_BYTES, pages_of(length_bytes))

    def address(self, offset: int) -> int:
        """A piece's header page in this process."""
        return self.region.address + offset

    def payload(self, offset: int, length_bytes: int) -> memoryview:
        """The payload in a piece."""
        return self.view[offset + HEADER_BYTES : offset + HEADER_BYTES + length_bytes]

    def close(self) -> None:
        """Give the memory back; the fabric is closed already."""
        self.view.release()
        self._memory.close()


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A block that a client wants, and where it wants it."""

    key: bytes
    fingerprint: bytes
    length: int
    target: int
    target_key: int
    ack_word: int
    ack_generation: int


@dataclass(slots=True)
class _Fetch:
    connection: Connection
    request: FetchRequest
    piece: int = -1
    store_generation: int = 0
    sending: bool = False


class Fetches:
    """All fetches of a node."""

    def __init__(self, fabric: Fabric, store: Store, staging: Staging, tags: Iterator[int]) -> None:
        self._fabric = fabric
        self._store = store
        self._staging = staging
        self._tags = tags
        self._queued: deque[_Fetch] = deque()
        self._under_way: dict[int, _Fetch] = {}

    def enqueue(self, connection: Connection, requests: Sequence[FetchRequest]) -> None:
        """Queue the fetches, all or none, and start what can be started."""
        if len(self._queued) + len(requests) > FETCHES_QUEUED_MAX:
            raise Overloaded(f"The node has {len(self._queued)} fetches waiting; try again in a moment.")
        self._queued.extend(_Fetch(connection, request) for request in requests)
        self.pump()

    def pump(self) -> None:
        """Read ahead as far as staging memory goes."""
        items: list[GetItem] = []
        while self._queued and len(items) < BATCH_BLOCKS_MAX:
            fetch = self._queued[0]
            if fetch.connection.closed:
                self._queued.popleft()
                continue
            piece = self._staging.take(fetch.request.length)
            if piece is None:
                break
            self._queued.popleft()
            fetch.piece = piece
            tag = next(self._tags)
            self._under_way[tag] = fetch
            items.append(
                GetItem(
                    tenant=fetch.connection.tenant,
                    key=fetch.request.key,
                    fingerprint=fetch.request.fingerprint,
                    length=fetch.request.length,
                    slot_address=self._staging.address(piece),
                    slot_bytes=pages_of(fetch.request.length) * PAGE_BYTES,
                    tag=tag,
                )
            )
        if items:
            self._store.get(items, self._read)

    def _read(self, batch: Sequence[GetDone]) -> None:
        puts, misses = [], []
        for done in batch:
            fetch = self._under_way[done.tag]
            if fetch.connection.closed:
                self._end(done.tag)
            elif done.miss is not None:
                misses.append(self._miss(fetch, done.miss.reason))
                self._end(done.tag)
            else:
                fetch.store_generation = done.generation
                fetch.sending = True
                puts.append(self._put(done, fetch))
        if misses:
            put_words(self._fabric, misses)
        if puts:
            arm(self._fabric, puts)
        self.pump()

    def _put(self, done: GetDone, fetch: _Fetch) -> TriggeredPut:
        connection, request = fetch.connection, fetch.request
        return TriggeredPut(
            tag=done.tag,
            endpoint=connection.endpoint,
            peer=connection.peer,
            region=self._staging.region,
            source=self._staging.address(fetch.piece) + HEADER_BYTES,
            length=done.length,
            target=request.target,
            target_key=request.target_key,
            flag_target=connection.acks.target(request.ack_word),
            flag_key=connection.acks.key,
            flag_value=ack_word(request.ack_generation, AckCode.SERVED),
            crc32c=done.crc32c,
        )

    def _miss(self, fetch: _Fetch, reason: MissReason) -> WordPut:
        request = fetch.request
        return fetch.connection.word_put(request.ack_word, request.ack_generation, code_of_miss(reason))

    def _end(self, tag: int) -> None:
        fetch = self._under_way.pop(tag)
        self._staging.give_back(fetch.piece, fetch.request.length)

    def sent(self, event: Event) -> None:
        """The fabric is done with a put of ours."""
        fetch = self._under_way.get(event.tag)
        if fetch is None or event.kind not in (EventKind.DONE, EventKind.FAILED):
            return
        if event.kind == EventKind.FAILED:
            self._failed(fetch, event.status)
        self._end(event.tag)

    def _failed(self, fetch: _Fetch, status: int) -> None:
        if status == -errno.EBADMSG:
            self._store.quarantine(fetch.connection.tenant, fetch.request.key, fetch.store_generation)
            put_words(self._fabric, [self._miss(fetch, MissReason.CORRUPT)])
        else:
            log.warning(
                "%s", FabricError.from_code(f"Sending a block to client {fetch.connection.number}", status)
            )

    def forget(self, connection: Connection) -> None:
        """The connection's endpoint is closed: what was being sent over it is over."""
        for tag, fetch in list(self._under_way.items()):
            if fetch.connection is connection and fetch.sending:
                self._end(tag)
        self.pump()
