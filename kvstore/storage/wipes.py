"""Removes records from the drive: the header page is overwritten with zeros, then the pages are free.

Always holds: pages are free only after the header that claimed them is gone from the drive; a record that is
being read is wiped after that; callbacks are called in the order of their calls, after all earlier wipes;
a failed wipe stops the store, so that its next opening makes a roll ("Freeing" in the record format's page has
the argument).

It doesn't touch the index: records have left it before they are wiped.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.limits import PAGE_BYTES, WIPES_AT_ONCE
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.writes import write_error
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.errors import StorageError
    from kvstore.storage.extents import Extents
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.writes import Writes

    Wiped = Callable[[StorageError | None], None]
    Freed = Callable[[int, int], object]

__all__ = ["Wipes"]


class Wipes:
    """All headers that are being overwritten, in order."""

    def __init__(self, writes: Writes, extents: Extents, traffic: Traffic) -> None:
        self._writes = writes
        self._extents = extents
        self._traffic = traffic
        self._zeros = mmap.mmap(-1, PAGE_BYTES)
        self.zeros_address = ctypes.addressof(ctypes.c_char.from_buffer(self._zeros))
        self._waiting: deque[_Wipe | Wiped] = deque()
        self._pinned: list[_Wipe] = []  # of the waiting ones, those that the drive doesn't have yet
        self._read: list[
            tuple[int, Callable[[], None]]
        ] = []  # first pages of records that are being read, and their callbacks
        self.pending = 0
        self.pending_pages = 0  # pages that will be free

    def free(
        self, records: Iterable[tuple[int, int]], then: Wiped | None = None, *, instead: Freed | None = None
    ) -> None:
        """Wipe and free records, by offset and length of payload; call back when all begun so far are wiped.

        `instead` is as in `free_extents`.
        """
        self.free_extents(
            [(offset // PAGE_BYTES, record_bytes(length) // PAGE_BYTES) for offset, length in records],
            instead,
        )
        if then is not None:
            self._waiting.append(then)

    def free_extents(self, extents: Sequence[tuple[int, int]], instead: Freed | None = None) -> None:
        """Wipe and free records, by first page and number of pages; `instead` gets these instead of freeing them."""
        if extents:
            first = min(extents)[0]
            assert first >= self._extents.first_page, "no record is where the superblocks are"
        if self._extents.pinned:
            are_read = [self._extents.is_pinned(page) for page, _ in extents]
            for extent in itertools.compress(extents, are_read):
                self._pinned.append(self._added([extent], instead))
            extents = [one for one, is_read in zip(extents, are_read, strict=True) if not is_read]
        for at in range(0, len(extents), WIPES_AT_ONCE):
            self._traffic.add(self._added(extents[at : at + WIPES_AT_ONCE], instead))

    def when_unread(self, page: int, then: Callable[[], None]) -> None:
        """Call back when the record that begins here is not being read; that may be at once."""
        if self._extents.is_pinned(page):
            self._read.append((page, then))
            self.pending += 1
        else:
            then()

    def _added(self, extents: Sequence[tuple[int, int]], instead: Freed | None) -> _Wipe:
        wipe = _Wipe(self, extents, instead)
        self._waiting.append(wipe)
        self.pending += len(extents)
        self.pending_pages += wipe.pages
        return wipe

    @property
    def is_due(self) -> bool:
        """Whether `settle_finished` would free something or call back at once."""
        return bool(self._waiting) and not _is_under_way(self._waiting[0])

    def settle_finished(self) -> None:
        """Free wiped extents, and call back; begin those that are no longer read."""
        if self._pinned or self._read:
            self._begin_unread()
        while self._waiting:
            first = self._waiting[0]
            if _is_under_way(first):
                return
            self._waiting.popleft()
            if not isinstance(first, _Wipe):
                # One that failed before this one matters as well: it may have been of the same name.
                first(self._writes.stopped)
                continue
            self.pending -= len(first.extents)
            self.pending_pages -= first.pages
            if first.result is not None and first.result >= 0:
                if first.instead is None:
                    self._extents.release_all(first.extents)
                else:
                    for page, pages in first.extents:
                        first.instead(page, pages)

    def _begin_unread(self) -> None:
        parked, self._pinned = self._pinned, []
        for wipe in parked:
            if self._extents.is_pinned(wipe.extents[0][0]):
                self._pinned.append(wipe)
            else:
                self._traffic.add(wipe)
        waited, self._read = self._read, []
        self.pending -= len(waited)
        for page, then in waited:
            self.when_unread(page, then)

    def wiped(self, result: int) -> None:
        """Take the result of a wipe."""
        if result < 0:
            self._writes.stop(write_error(result), 0)


def _is_under_way(one: _Wipe | Wiped) -> bool:
    return isinstance(one, _Wipe) and one.result is None


class _Wipe:
    """Some header pages, each at the start of an extent."""

    __slots__ = ("_wipes", "extents", "instead", "pages", "result", "size_bytes")
    reads: Final = False
    tenant: Final = b""

    def __init__(self, wipes: Wipes, extents: Sequence[tuple[int, int]], instead: Freed | None) -> None:
        self._wipes = wipes
        self.extents = extents  # first page, and length
        self.pages = sum(pages for _, pages in extents)
        self.size_bytes = len(extents) * PAGE_BYTES
        self.instead = instead
        self.result: int | None = None

    def begin(self, tag: int) -> list[DiskOp]:
        zeros = self._wipes.zeros_address
        return [
            DiskOp(DiskOpKind.WRITE, zeros, PAGE_BYTES, page * PAGE_BYTES, tag) for page, _ in self.extents
        ]

    def end(self, result: int) -> None:
        self.result = result
        self._wipes.wiped(result)
