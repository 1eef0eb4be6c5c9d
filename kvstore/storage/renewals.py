"""Extends the life of a stored block: its header is rewritten in place.

A header is within one sector, so it is the old one or the new one whatever happens, and both belong to this record:
place, generation, payload and the tag's key are the same, and only the expiry differs. So no page is allocated or
freed, and references to the block by generation stay valid.

Always holds:

- A header is read before it is rewritten, since only the drive has all of an encrypted record's. If it is no
  longer this block's, it is left alone.
- A put is reported when the longer life is in the header on the drive and in the index; a `synced` one when a sync
  that began after that has ended.
- While a header is being written its extent is pinned, so nothing else is written there before that write has ended,
  not even the zeros of a deletion.
- A block that was removed by the time its header is written was not renewed: this is reported, and the caller puts it.

It decides nothing about puts: `kvstore.storage.block_writes` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import StorageError
from kvstore.limits import PAGE_BYTES
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.eviction.types import Guard
from kvstore.storage.index_layout import is_header_of
from kvstore.storage.writes import write_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.extents import Extents
    from kvstore.storage.index import Entry, Index, Name
    from kvstore.storage.items import PutItem, PutsDone
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.writes import Writes
    from kvstore.wire.record import HeaderCodec

__all__ = ["Renewal", "Renewals", "lives_as_long"]


def lives_as_long(expires_ms: int, wanted_ms: int) -> bool:
    """Return whether one expiry is no earlier than another; 0 is never."""
    return not expires_ms or 0 < wanted_ms <= expires_ms


class Renewal:
    """A read and rewrite of one header, in the header page of the slot of the put that requested it."""

    reads: Final = False
    size_bytes: Final = PAGE_BYTES

    __slots__ = (
        "_renewals",
        "afterwards",
        "entry",
        "error",
        "followers",
        "is_foreign",
        "is_read",
        "name",
        "slot_address",
        "tenant",
    )

    def __init__(
        self,
        renewals: Renewals,
        name: Name,
        entry: Entry,
        item: PutItem,
        waiting: list[tuple[PutItem, PutsDone]],
    ) -> None:
        self._renewals = renewals
        self.name = name
        self.tenant = name[0]
        self.entry = entry._replace(expires_ms=item.expires_ms)  # the new entry
        self.slot_address = item.slot_address
        self.followers = waiting
        self.afterwards: list[Callable[[], None]] = []
        self.error: StorageError | None = None
        self.is_read = False
        self.is_foreign = False  # the drive has no header of this block there

    def items(self) -> list[tuple[PutItem, PutsDone]]:
        """The puts that wait for it."""
        return self.followers

    def begin(self, tag: int) -> DiskOp | None:
        """Return the write; None if nothing is to be written any more."""
        return self._renewals.begin(self, tag)

    def end(self, result: int) -> None:
        """Take the result."""
        self._renewals.ended(self, result)


class Renewals:
    """The renewals of a drive."""

    def __init__(
        self,
        writes: Writes,
        index: Index,
        extents: Extents,
        traffic: Traffic,
        keeping: Keeping,
        codec: HeaderCodec,
    ) -> None:
        self._writes = writes
        self._index = index
        self._extents = extents
        self._traffic = traffic
        self._keeping = keeping
        self._codec = codec
        self._ended: list[Renewal] = []
        self._unsynced: dict[int, Renewal] = {}  # by generation, the last one of each

    def add(self, renewal: Renewal) -> None:
        """Queue a renewal; its block is in the index."""
        self._extents.pin(renewal.entry.offset // PAGE_BYTES)
        self._keeping.guard([renewal.entry.generation], Guard.WRITE)
        self._traffic.add(renewal)

    def begin(self, renewal: Renewal, tag: int) -> DiskOp | None:
        """Make the header."""
        if self._writes.stopped is not None:
            renewal.error = self._writes.stopped_again()
            self._finished(renewal)
            return None
        kind = DiskOpKind.WRITE if renewal.is_read else DiskOpKind.READ
        return DiskOp(kind, renewal.slot_address, PAGE_BYTES, renewal.entry.offset, tag)

    def ended(self, renewal: Renewal, result: int) -> None:
        """Take the result of a read or a write."""
        if not renewal.is_read:
            self._read(renewal, result)
            return
        if result < 0:
            renewal.error = write_error(result)
            self._writes.stop(renewal.error, 0)
        self._finished(renewal)

    def _read(self, renewal: Renewal, result: int) -> None:
        page, entry = renewal.slot_address, renewal.entry
        found, decryption = self._codec.open(page, entry.offset) if result > 0 else (None, None)
        if decryption is not None:
            decryption.close()
        if not is_header_of(found, renewal.name, entry):
            renewal.is_foreign = True
            self._finished(renewal)
            return
        self._codec.put_off(page, entry.offset, entry.expires_ms)
        renewal.is_read = True
        self._traffic.add(renewal)

    def _finished(self, renewal: Renewal) -> None:
        self._extents.unpin(renewal.entry.offset // PAGE_BYTES)
        self._ended.append(renewal)

    def settle_finished(self) -> list[tuple[Renewal, bool]]:
        """Put written renewals into the index, in one transaction; returns whether each block is there."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        results = []
        try:
            there = self._index.lookup([one.name for one in ended])
            renewed = [
                one
                for one, entry in zip(ended, there, strict=True)
                if one.error is None and entry is not None and entry.generation == one.entry.generation
            ]
            foreign = [one for one in renewed if one.is_foreign]
            renewed = [one for one in renewed if not one.is_foreign]
            for one in foreign:
                self._keeping.quarantine(one.name, one.entry.generation, wipe=False)
            self._index.renew((one.name, one.entry) for one in renewed)
        except StorageError as error:  # it has stopped the drive
            renewed = []
            for one in ended:
                one.error = one.error or error
        for one in renewed:
            self._keeping.renewed(one.entry.generation, one.entry.expires_ms)
            self._note_unsynced(one)
        left = set(map(id, renewed))
        for one in ended:
            self._keeping.unguard([one.entry.generation], Guard.WRITE)
            results.append((one, id(one) in left))
        return results

    def is_unsynced(self, generation: int) -> bool:
        """Return whether power loss could bring back a block's previous header."""
        return generation in self._unsynced

    def _note_unsynced(self, renewal: Renewal) -> None:
        generation = renewal.entry.generation
        self._unsynced[generation] = renewal

        def synced(error: StorageError | None) -> None:
            if error is None and self._unsynced.get(generation) is renewal:
                del self._unsynced[generation]

        self._writes.after_sync(synced, unhurried=True)
