"""Blocks that have left the index and are being overwritten: quarantined ones and erased ones.

Always holds: their pages count against their tenant until they are in use again. The header of an erased block is
overwritten last, so that a scan after power loss finds what is left of it (`kvstore.storage.stale_extents`); until then
a deletion of its name waits, because its header would bring it back. The same holds for a quarantined block in the
clear, whose owner may be erased; the header of an encrypted one is wiped first.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.limits import PAGE_BYTES
from kvstore.storage.overwriting import strike
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvstore.errors import StorageError
    from kvstore.storage.index import Entry, Index, Name
    from kvstore.storage.scrubs import Scrubs
    from kvstore.storage.stale_extents import StaleExtents
    from kvstore.storage.wipes import Wipes

__all__ = ["PendingOverwrites"]


class PendingOverwrites:
    """The pending overwrites of one drive."""

    def __init__(self, index: Index, left: StaleExtents, wipes: Wipes, scrubs: Scrubs) -> None:
        self._index = index
        self._left = left
        self._wipes = wipes
        self._scrubs = scrubs
        self.pages: Counter[bytes] = Counter()  # pages that are not in use again, by tenant
        self._erasing: Counter[Name] = Counter()  # blocks whose headers stay until they are overwritten

    def quarantine(self, name: Name, entry: Entry) -> Callable[[int, int], None]:
        """Return a function that overwrites and frees the pages of a block once its header is wiped."""
        tenant = name[0]
        self.pages[tenant] += _pages(entry)

        def overwrite(start: int, pages: int) -> None:
            self._scrubs.add(start, pages, lambda: self._in_use_again(tenant, pages))

        return overwrite

    def erase(self, blocks: Sequence[tuple[Name, Entry]]) -> None:
        """Overwrite and free blocks whose places are noted, headers last."""
        for name, entry in blocks:
            self.pages[name[0]] += _pages(entry)
            self._erasing[name] += 1

        def over(free: Collection[int]) -> None:
            self._erasing -= Counter(name for name, _ in blocks)
            strike(self._index, [entry for _, entry in blocks if entry.offset in free])
            for name, entry in blocks:
                if entry.offset in free:
                    self._in_use_again(name[0], _pages(entry))

        self._left.erase([(entry.offset, entry.length) for _, entry in blocks], over)

    def when_gone(self, names: Sequence[Name], then: Callable[[StorageError | None], None]) -> None:
        """Call back when no header of blocks dropped under these names is left, erased blocks included."""

        def wiped(error: StorageError | None) -> None:
            if error is None and any(name in self._erasing for name in names):
                self._left.after_all(then)
            else:
                then(error)

        self._wipes.free((), wiped)

    def _in_use_again(self, tenant: bytes, pages: int) -> None:
        self.pages[tenant] -= pages
        if not self.pages[tenant]:
            del self.pages[tenant]


def _pages(entry: Entry) -> int:
    return record_bytes(entry.length) // PAGE_BYTES
