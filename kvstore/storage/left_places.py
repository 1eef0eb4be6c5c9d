"""Overwrites the places that blocks in the clear have left, on a drive that is being encrypted: the header comes last.

Always holds: a place is noted in the index (`kvstore.storage.overwriting`) in the transaction in which its block leaves
it, and struck out when it was overwritten, so the next opening overwrites what a killed process has left. Its header
stands until the zeros behind it survive power loss, so a scan for a new index finds the place as well, and notes it. It
is overwritten when nobody reads it any more, and free after that. `over` is called when its header is on its way
off the drive, which a deletion waits for, or when it can't be overwritten; then it is out of use and remains noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.limits import HEADER_BYTES, PAGE_BYTES
from kvstore.storage.overwriting import strike
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.errors import StorageError
    from kvstore.storage.index import Entry, Index
    from kvstore.storage.scrubs import Scrubs
    from kvstore.storage.wipes import Wipes
    from kvstore.storage.writes import Writes

__all__ = ["LeftPlaces"]

_HEADER_PAGES = HEADER_BYTES // PAGE_BYTES


class LeftPlaces:
    """The places that are being overwritten."""

    def __init__(self, index: Index, writes: Writes, wipes: Wipes, scrubs: Scrubs) -> None:
        self._index = index
        self._writes = writes
        self._wipes = wipes
        self._scrubs = scrubs

    def overwrite(self, old: Entry, over: Callable[[], object]) -> None:
        """Overwrite and free a place that is noted."""
        page, pages = old.offset // PAGE_BYTES, record_bytes(old.length) // PAGE_BYTES
        record = [(old.offset, old.length)]

        def unread() -> None:
            self._scrubs.overwrite(page + _HEADER_PAGES, pages - _HEADER_PAGES, overwritten)

        def overwritten(is_zero: bool) -> None:  # noqa: FBT001
            if is_zero:
                self._writes.after_sync(synced)
                return
            if self._writes.stopped is None:  # deletions of its block promise that no header of it is left
                self._wipes.free(record, instead=_out_of_use)
            over()

        def synced(error: StorageError | None) -> None:
            if error is None:
                self._wipes.free(record, wiped)
            over()

        def wiped(error: StorageError | None) -> None:
            if error is None:
                strike(self._index, [old])

        self._wipes.when_unread(page, unread)


def _out_of_use(_page: int, _pages: int) -> None:
    """Leave pages as they are until the next opening."""
