"""Overwrites extents that their records have left: of erased records, and of blocks that were encrypted elsewhere.

The payload is overwritten first, then synced, and the header is wiped last.

What always holds: the transaction in which a record leaves its extent notes the extent in the index
(`kvstore.storage.overwriting`); the note is removed once the extent is overwritten. So the next opening overwrites the
extents that a killed process has left. The header stays until the zeros over the payload survive power loss, so a scan
that builds a new index finds the extent too, and notes it. An extent is overwritten when no read of it is in flight,
and is free after that. `over` is called when the wipe of its header has begun, which a deletion waits for, or when the
extent can't be overwritten: then it is out of use, and its note stays.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from kvstore.errors import ReadOnly
from kvstore.limits import HEADER_BYTES, PAGE_BYTES
from kvstore.storage.overwriting import strike
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvstore.errors import StorageError
    from kvstore.storage.index import Entry, Index
    from kvstore.storage.scrubs import Scrubs
    from kvstore.storage.wipes import Wipes
    from kvstore.storage.writes import Writes

__all__ = ["StaleExtents"]

_HEADER_PAGES = HEADER_BYTES // PAGE_BYTES


def _nobody(_: Collection[int]) -> None:
    """Ignore the end of an erasure; its caller uses `after_all`."""


class StaleExtents:
    """The places that are being overwritten."""

    def __init__(self, index: Index, writes: Writes, wipes: Wipes, scrubs: Scrubs) -> None:
        self._index = index
        self._writes = writes
        self._wipes = wipes
        self._scrubs = scrubs
        # In order: a callback is called when all entries before it are over.
        self._waiting: deque[_Erasure | Callable[[StorageError | None], None]] = deque()
        self._error: StorageError | None = None  # of an erasure that was given up

    def overwrite(self, old: Entry, over: Callable[[], object]) -> None:
        """Overwrite and free a place that is noted."""
        record = [(old.offset, old.length)]

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

        self._overwrite_payload(old.offset, old.length, overwritten)

    @property
    def is_erasing(self) -> bool:
        """Return whether an erasure is under way."""
        return any(isinstance(one, _Erasure) for one in self._waiting)

    def erase(
        self, records: Sequence[tuple[int, int]], over: Callable[[Collection[int]], object] = _nobody
    ) -> None:
        """Overwrite and free places of erased records, by offset and length of payload; `after_all` reports the end.

        `over` is called when their headers are gone, with the offsets of those that are free. If the drive stops
        or is closed before that, the headers stay.
        """
        erasure = _Erasure(records, over)
        self._waiting.append(erasure)
        for offset, length in records:
            self._overwrite_payload(offset, length, partial(self._overwritten, erasure, (offset, length)))
        if not records:
            self._end(erasure, None)

    def after_all(self, then: Callable[[StorageError | None], None]) -> None:
        """Call back when no record that is being erased now has a header any more."""
        self._waiting.append(then)
        self._call_back()

    def _overwritten(self, erasure: _Erasure, record: tuple[int, int], is_zero: bool) -> None:  # noqa: FBT001
        erasure.left -= 1
        if not is_zero:
            erasure.unwritable.add(record)
        if erasure.left == 0:
            self._writes.after_sync(partial(self._wipe, erasure))

    def _wipe(self, erasure: _Erasure, error: StorageError | None) -> None:
        if error is None and erasure.unwritable and self._scrubs.has_ended:
            error = ReadOnly("The drive has stopped before all that was erased was overwritten.")
        if error is not None:
            self._end(erasure, error)
            return
        self._wipes.free([one for one in erasure.records if one not in erasure.unwritable])
        self._wipes.free(erasure.unwritable, instead=_out_of_use)
        self._wipes.free((), partial(self._end, erasure))

    def _end(self, erasure: _Erasure, error: StorageError | None) -> None:
        erasure.is_over = True
        self._error = self._error or error
        if error is None:
            erasure.over({offset for offset, _ in set(erasure.records) - erasure.unwritable})
        self._call_back()

    def _call_back(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, _Erasure):
                if not first.is_over:
                    return
                self._waiting.popleft()
            else:
                self._waiting.popleft()
                first(self._error)

    def _overwrite_payload(self, offset: int, length: int, then: Callable[[bool], object]) -> None:
        page, pages = offset // PAGE_BYTES, record_bytes(length) // PAGE_BYTES

        def unread() -> None:
            self._scrubs.overwrite(page + _HEADER_PAGES, pages - _HEADER_PAGES, then)

        self._wipes.when_unread(page, unread)


class _Erasure:
    """Records that are erased together."""

    __slots__ = ("is_over", "left", "over", "records", "unwritable")

    def __init__(self, records: Sequence[tuple[int, int]], over: Callable[[Collection[int]], object]) -> None:
        self.records = records
        self.over = over
        self.left = len(records)  # payloads still to be overwritten
        self.unwritable: set[tuple[int, int]] = set()
        self.is_over = False


def _out_of_use(_page: int, _pages: int) -> None:
    """Leave pages as they are until the next opening."""
