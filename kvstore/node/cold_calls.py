"""Fetches that the C core serves from the drives by itself (`nic_offload/desk_cold.c`), and what it needs for that.

The core has the place of each stored block that does not expire, and some free pieces of the hot memory, called rooms.
It sends what it reads at once, if it passes the checks; Python is notified afterwards, for many calls at a time, and
keeps the bytes in the hot memory if the index still has the block.

What always holds: a place is forgotten in the step in which its block leaves the index, before the drive may reuse
its pages. A block that the core could not send is fetched as if its call had arrived here (`fetching`), so nothing
here decides what a miss is. Rooms have one user until their call is reported, and at most `COLD_BYTES_MAX` of the
memory is used for them; an idle node has none.

What it doesn't do: serve tenants with a rate limit, large calls, or calls of traced sessions. Python serves these, and
calls that find no room.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.errors import Overloaded, ProtocolError
from kvstore.limits import (
    COLD_BYTES_MAX,
    COLD_SHARE,
    GENERATIONS_PER_DRIVE,
    PAGE_BYTES,
    ROOMS_IDLE_TICKS,
)
from kvstore.lookups import Kind, Outcome
from kvstore.miss import MissReason
from kvstore.node.call_headers import FabricHeaders
from kvstore.node.fetch import FetchRequest
from kvstore.node.hot_pages import Piece
from kvstore.storage.index_layout import NAME_BYTES, names_in
from kvstore.wire.ack import AckCode, code_of_miss
from kvstore.wire.fabric_call import metadata_of
from nic_offload.shelf import IN_MEMORY, place_of
from nic_offload.trigger import put_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.node.connection import Connection
    from kvstore.node.hot import Name
    from kvstore.node.lookup_progress import Looking
    from kvstore.node.node import Node
    from nic_offload.shelf import ColdCall, ColdRow, Served

__all__ = ["COLD_TAG", "ColdCalls"]

log = logging.getLogger(__name__)

_CANCELLED: Final = -errno.ECANCELED
_PLACED: Final = np.dtype([("name", "u1", NAME_BYTES), ("place", "<u8")])  # a `tk_place`
COLD_TAG: Final = 1 << 62  # of the shelf's events; connections have smaller ones


class ColdCalls:
    """The cold calls of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._memory = node.hot
        self._rooms: set[Piece] = set()  # held by the C core, or by calls not reported yet
        self._idle_ticks = ROOMS_IDLE_TICKS
        self._bytes_max = min(COLD_BYTES_MAX, node.hot.size_bytes // COLD_SHARE)
        node.hot.shelf.use_readers(node.fetches.readers.by_number, COLD_TAG, self._bytes_max)
        for names, lives in node.store.follow_places(self._placed):
            self._place(names, lives)

    def _placed(self, rows: NDArray[Any]) -> None:
        """List the places of these blocks, which are stored now, in place of earlier ones."""
        self._place(names_in(rows), rows)

    def _place(self, names: NDArray[np.uint8], lives: NDArray[Any]) -> None:
        generations, pages = lives["generation"], lives["offset"] // PAGE_BYTES
        places = place_of(generations // GENERATIONS_PER_DRIVE, pages, generations)
        places[lives["expires_ms"] != 0] = 0
        rows = np.empty(len(places), _PLACED)
        rows["name"], rows["place"] = names, places
        self._memory.shelf.place(rows.tobytes())

    def tick(self) -> None:
        """Withdraw the rooms if none was needed for a while."""
        self._idle_ticks += 1
        if self._idle_ticks == ROOMS_IDLE_TICKS:
            self.empty()

    def empty(self) -> None:
        """Withdraw the rooms that are not in use; they still contain bytes of evicted blocks."""
        pieces = [Piece(number) for number in self._memory.shelf.rooms()]
        self._rooms.difference_update(pieces)
        self._memory.pages.release_all(pieces)

    def feed(self) -> None:
        """Give the core rooms, up to what may be read at a time: a call without one goes to Python."""
        shelf, pages = self._memory.shelf, self._memory.pages
        wanted, rooms = shelf.wanted
        if not wanted:
            return
        self._idle_ticks = 0
        most = self._bytes_max // (wanted * PAGE_BYTES)
        if rooms > most // 2:
            return
        if any(pages.pages(piece) != wanted for piece in self._rooms):
            self.empty()
            rooms = 0
        given = pages.take_many(wanted, most - rooms)
        if len(given):
            self._rooms.update(given["number"].tolist())
            shelf.feed(given.data)

    def note(self, calls: Sequence[tuple[Connection | None, Served, ColdCall]]) -> list[int]:
        """Record calls that were answered; returns the generations of the blocks that were sent.

        Their connections may have ended since, or be about to.
        """
        if not calls:
            return []
        self._idle_ticks = 0
        pieces: list[Piece] = []
        read: list[tuple[Piece, int, Name]] = []
        used: list[int] = []
        found: list[int] = []
        for connection, served, call in calls:
            for generation, row in zip(served.ids, call.rows, strict=True):
                piece = None if row.room == IN_MEMORY else Piece(row.room)
                if piece is not None:
                    self._rooms.remove(piece)
                    pieces.append(piece)
                if connection is None or row.status:
                    continue
                used.append(generation)
                if piece is None:
                    found.append(generation)
                else:
                    read.append((piece, generation, (connection.tenant, row.key)))
        self._memory.pages.touch(found)
        self._keep(read)
        self._memory.pages.release_all(pieces)
        self.feed()
        for connection, served, call in calls:
            if connection is not None:
                self._account(connection, served, call)
        return used

    def _keep(self, read: Sequence[tuple[Piece, int, Name]]) -> None:
        """Keep the blocks that were read in the hot memory, if the index still has them.

        A piece that is cached already was not listed with the core: it may be damaged, and the one just read is not.
        """
        store, pages = self._node.store, self._memory.pages
        again: list[tuple[Piece, int, Name]] = []
        for one in read:
            if (before := pages.peek(one[1])) is not None:
                pages.forget(before)
                again.append(one)  # kept twice below: it was requested again
        read = [*read, *again]
        entries = store.lookup([name for _, _, name in read])
        self._memory.keep((*one, entry) for one, entry in zip(read, entries, strict=True))
        if store.has_doubts:
            store.believe([generation for _, generation, _ in read])

    def _account(self, connection: Connection, served: Served, call: ColdCall) -> None:
        node = self._node
        node.turns.note_call(connection.tenant)
        try:
            headers = FabricHeaders(metadata_of(served.metadata))
        except ProtocolError:
            headers = FabricHeaders(())  # the call was answered anyway; its metadata is ignored
        looking = node.lookups.begin(headers, connection.tenant, Kind.FETCH, len(call.rows))
        looking.outcomes = bytearray(
            Outcome.MEMORY if row.room == IN_MEMORY else Outcome.DRIVE for row in call.rows
        )
        looking.turn_ns = looking.sending_ns = served.began_ns
        if any(row.room != IN_MEMORY for row in call.rows):
            looking.drive_first_ns, looking.drive_last_ns = served.began_ns, served.ended_ns
        unsent = [(at, row) for at, row in enumerate(call.rows) if row.status not in {0, _CANCELLED}]
        lengths: dict[bool, list[int]] = {True: [], False: []}
        cancelled = [(at, row) for at, row in enumerate(call.rows) if row.status == _CANCELLED]
        for row in call.rows:
            if not row.status:
                lengths[row.room == IN_MEMORY].append(row.part or row.length)
        looking.size_bytes = sum(map(sum, lengths.values()))
        for at, _ in (*unsent, *cancelled):
            looking.outcomes[at] = Outcome.GIVEN_UP  # unless a fetch reports another outcome
        self._say(connection, [row for _, row in cancelled], AckCode.CANCELLED)
        for at in range(served.corrupt + served.failed):
            looking.outcomes[at] = Outcome.CORRUPT if at < served.corrupt else Outcome.GIVEN_UP
        if served.corrupt:
            node.counters.missed([MissReason.CORRUPT] * served.corrupt)
        for in_memory, some in lengths.items():
            node.counters.found(some, in_memory=in_memory)
            where = node.timings.got_from_memory if in_memory else node.timings.got_from_drive
            where.note(served.ended_ns - served.began_ns, len(some))
        node.timings.called("Fetch", served.began_ns, None, served.ended_ns)
        if unsent and not connection.closed:
            looking.since(served.began_ns)
            self._send(connection, call, looking, unsent)
        else:
            looking.was(served.began_ns, served.ended_ns)

    def _say(self, connection: Connection, rows: Sequence[ColdRow], code: int) -> None:
        words = [connection.word_put(row.ack_word, row.ack_generation, code) for row in rows]
        if words and not connection.closed:
            put_words(self._node.fabric, words)

    def _send(
        self,
        connection: Connection,
        call: ColdCall,
        looking: Looking,
        unsent: Sequence[tuple[int, ColdRow]],
    ) -> None:
        """Fetch blocks that the core could not send."""
        node = self._node
        looking.left = len(unsent)
        try:
            node.fetches.refuse_more(connection, len(unsent))
        except Overloaded:
            self._say(connection, [row for _, row in unsent], code_of_miss(MissReason.BUSY))
            for at, row in unsent:
                looking.missed(at, row.key, MissReason.BUSY)
            node.fetches.give_up(looking, len(unsent))
            return
        for at, row in unsent:
            request = FetchRequest(
                row.key,
                call.fingerprint,
                row.length,
                row.target,
                row.target_key,
                row.ack_word,
                row.ack_generation,
                row.skip,
                row.part,
                call.shares,
            )
            node.fetches.enqueue(connection, [request], looking, at, called=False)
