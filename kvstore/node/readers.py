"""Reads for fetches by readers of the C core (`nic_offload.reader`), one for each drive that can have one.

What always holds: no fetch is handed over before its tenant's turn at the drive, or if it is no longer wanted by then;
the extents and the memory of a group are kept until the drive is done with all of it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from kvstore.limits import DRIVE_QUEUE_DEPTH, SEND_BYTES_MAX
from kvstore.node.fetch import Group
from kvstore.storage.sends import Send
from kvstore.wire.ack import AckCode, ack_word
from nic_offload.errors import FabricError
from nic_offload.reader import SHARES, Reader, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.node.fetch import Fetch
    from kvstore.node.hot import HotMemory
    from kvstore.storage.drive import Drive
    from kvstore.storage.index import Entry
    from nic_offload.fabric import Event, Fabric

__all__ = ["Readers"]

log = logging.getLogger(__name__)


class Readers:
    """The readers of a node."""

    def __init__(
        self,
        fabric: Fabric,
        drives: Iterable[Drive],
        memory: HotMemory,
        tags: Iterator[int],
        *,
        dropped: Callable[[Fetch], object],
        unread: Callable[[Fetch], object],
        was_read: Callable[[Sequence[Fetch], Sequence[Fetch]], object],
        was_sent: Callable[[Sequence[Fetch], int], object],
    ) -> None:
        """Callbacks: for blocks no longer wanted at their turn, and for those that could not be handed over.

        Also for a group that was read, with those of its fetches that had ended before, whose memory is free now; and
        for fetches that were sent, with the time of the last.
        """
        self._memory = memory
        self._tags = tags
        self._dropped, self._unread = dropped, unread
        self._was_read, self._was_sent = was_read, was_sent
        self._groups: dict[int, Group] = {}  # handed over, and not yet read and sent, by tag
        self._of: dict[Drive, Reader] = {}
        for drive in drives:
            if drive.direct_fd is not None:
                self._open(fabric, drive, drive.direct_fd)

    def _open(self, fabric: Fabric, drive: Drive, fd: int) -> None:
        try:
            self._of[drive] = Reader(fabric, fd, DRIVE_QUEUE_DEPTH, drive.record_format, drive.cipher)
        except FabricError as error:
            log.warning("Blocks are read by Python: %s", error)

    @property
    def by_number(self) -> dict[int, Reader]:
        """The readers, by the numbers of their drives."""
        return {drive.number: reader for drive, reader in self._of.items()}

    def __contains__(self, drive: object) -> bool:
        return drive in self._of

    def hand_over(self, cold: Iterable[tuple[Fetch, Entry, Drive]]) -> None:
        """Queue reads at their drives, in groups of one connection."""
        groups: list[Group] = []
        last: Group | None = None
        for fetch, entry, drive in cold:
            fetch.entry = entry
            is_full = last is not None and last.payload_bytes + entry.length > SEND_BYTES_MAX
            if last is None or is_full or last.drive is not drive or last.connection is not fetch.connection:
                last = Group(drive, fetch.connection)
                groups.append(last)
            fetch.group = last
            self._memory.expect(fetch.name, entry.generation)
            last.fetches.append((fetch, entry))
            last.size_bytes += fetch.size_bytes
            last.payload_bytes += entry.length
        sends: defaultdict[Drive, list[Send]] = defaultdict(list)
        for group in groups:
            entries = [entry for _, entry in group.fetches]
            group.send = Send(group.connection.tenant, entries, group.size_bytes, partial(self._start, group))
            sends[group.drive].append(group.send)
        for drive, some in sends.items():
            drive.send(some)

    def _start(self, group: Group) -> bool:
        """Start the reads that are still wanted, now that it is their turn; return whether there are any."""
        readings: list[Reading] = []
        wanted: list[tuple[Fetch, Entry]] = []
        for fetch, entry in group.fetches:
            if fetch.connection.closed or fetch.cancelled:
                self._dropped(fetch)
            else:
                wanted.append((fetch, entry))
                readings.append(self._record(fetch, entry))
        if not wanted:
            return False
        tag = next(self._tags)
        try:
            self._of[group.drive].put(self._memory.region, tag, readings)
        except FabricError as error:  # its queue is full
            log.warning("%s Python reads them.", error)
            for fetch, _ in wanted:
                fetch.group = None
                self._unread(fetch)
            return False
        for fetch, entry in wanted:
            fetch.generation, fetch.sending = entry.generation, True
            fetch.looking.size_bytes += fetch.request.sent_bytes
        group.fetches = wanted
        self._groups[tag] = group
        return True

    def _record(self, fetch: Fetch, entry: Entry) -> Reading:
        connection, request = fetch.connection, fetch.request
        assert fetch.piece is not None
        return Reading(
            fetch.tag,
            connection.endpoint.pointer,
            connection.peer,
            self._memory.address(fetch.piece),
            request.target,
            request.target_key,
            connection.acks.target(request.ack_word),
            connection.acks.key,
            ack_word(request.ack_generation, AckCode.SERVED),
            entry.offset,
            entry.generation,
            entry.length,
            entry.crc32c,
            request.skip,
            request.part,
            SHARES if request.shares else 0,
            request.key,
            connection.tenant,
            entry.fingerprint,
        )

    def read(self, event: Event) -> None:
        """Handle the end of a group's reads: the drive is done with its memory."""
        group = self._groups[event.tag]
        assert group.send is not None
        assert group.late is not None
        late, group.late = group.late, None
        self._was_read([fetch for fetch, _ in group.fetches], late)
        group.drive.sent(group.send)
        if group.is_sent:
            del self._groups[event.tag]

    def sent(self, event: Event) -> bool:
        """Whether this event ends a group: then all of its blocks were sent, except failed ones."""
        group = self._groups.get(event.tag)
        if group is None:
            return False
        group.is_sent = True
        if group.late is None:
            del self._groups[event.tag]
        sent = [fetch for fetch, _ in group.fetches if fetch.group is group and not fetch.late]
        self._was_sent(sent, event.value)
        return True
