"""Returns quarantined extents to use by overwriting them with zeros.

Always holds: an extent arrives here after all reads of it have ended, and after its header is wiped, except erased
blocks and the old places of blocks being encrypted (`kvstore.storage.stale_extents`). It is free once the drive
has written all of it without an error, which is also when a drive replaces a bad sector. After an error it stays out of
use, and is charged to its tenant (`kvstore.storage.eviction_events`), until the store is reopened: the error is not
remembered beyond the process, and the next put there tries the drive again. One piece of a drive is written at a time,
after other work.

A close does not wait for scrubs that have not begun: the next opening finds no record there.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.errors import ReadOnly
from kvstore.limits import PAGE_BYTES, SCRUB_PIECE_BYTES
from kvstore.storage.disk import DiskOp, DiskOpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.errors import StorageError
    from kvstore.storage.extents import Extents
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.writes import Writes

    Then = Callable[[StorageError | None], None]

__all__ = ["Scrubs"]


class Scrubs:
    """All extents of one drive that are to be overwritten, in order."""

    def __init__(self, writes: Writes, extents: Extents, traffic: Traffic, *, failed: bool) -> None:
        self._writes = writes
        self._extents = extents
        self._traffic = traffic
        self._zeros: mmap.mmap | None = None  # allocated with the first
        self.zeros_address = 0
        self._waiting: deque[_Scrub | Then] = deque()
        self._failed = failed  # some extent could not be overwritten
        self._closed = False

    @property
    def pending(self) -> int:
        """How many are not over."""
        return sum(isinstance(one, _Scrub) for one in self._waiting)

    @property
    def has_ended(self) -> bool:
        """Return whether no more will begin."""
        return self._closed or self._writes.stopped is not None

    def add(self, start: int, pages: int, over: Callable[[], object]) -> None:
        """Overwrite an extent and free it; `over` is called when it is free."""

        def written(is_zero: bool) -> None:  # noqa: FBT001
            if is_zero:
                self._extents.release(start, pages)
                over()

        self.overwrite(start, pages, written)

    def overwrite(self, start: int, pages: int, written: Callable[[bool], object]) -> None:
        """Overwrite pages, which stay in use; `written` gets whether they are, False if they never will be."""
        if self._zeros is None:
            self._zeros = mmap.mmap(-1, SCRUB_PIECE_BYTES)
            self.zeros_address = ctypes.addressof(ctypes.c_char.from_buffer(self._zeros))
        self._waiting.append(_Scrub(self, start, pages, written))
        if len(self._waiting) == 1:
            self._begin_next()

    def after_all(self, then: Callable[[StorageError | None], None]) -> None:
        """Call back when everything added so far is overwritten, or has failed."""
        self._waiting.append(then)
        if len(self._waiting) == 1:
            self._begin_next()

    def close(self) -> None:
        """Begin no more."""
        self._closed = True
        begun = [self._waiting.popleft()] if self._waiting else []
        left, self._waiting = self._waiting, deque(begun)
        self._fail(left)

    def _begin_next(self) -> None:
        if self.has_ended:
            left, self._waiting = self._waiting, deque()
            self._fail(left)
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, _Scrub):
                self._traffic.add(first)
                return
            self._waiting.popleft()
            error = ReadOnly("The drive could not overwrite all that was erased.") if self._failed else None
            first(error)

    def _fail(self, left: Iterable[_Scrub | Then]) -> None:
        for one in left:
            if isinstance(one, _Scrub):
                one.written(False)
            else:
                one(ReadOnly("The drive has stopped before all that was erased was overwritten."))

    def wrote(self, scrub: _Scrub, result: int) -> None:
        """Take the result of a piece."""
        scrub.at += max(0, result)
        if result > 0 and scrub.at < scrub.pages * PAGE_BYTES and not self._closed:
            self._traffic.add(scrub)
            return
        is_zero = result > 0 and scrub.at == scrub.pages * PAGE_BYTES
        self._failed = self._failed or not is_zero
        scrub.written(is_zero)  # while it is the first, so that what this call adds begins below
        self._waiting.popleft()
        self._begin_next()


class _Scrub:
    """One extent."""

    reads: Final = False
    tenant: Final = b""

    __slots__ = ("_scrubs", "at", "pages", "start", "written")

    def __init__(self, scrubs: Scrubs, start: int, pages: int, written: Callable[[bool], object]) -> None:
        self._scrubs = scrubs
        self.start = start
        self.pages = pages
        self.written = written
        self.at = 0

    @property
    def size_bytes(self) -> int:
        return min(SCRUB_PIECE_BYTES, self.pages * PAGE_BYTES - self.at)

    def begin(self, tag: int) -> DiskOp:
        offset = self.start * PAGE_BYTES + self.at
        return DiskOp(DiskOpKind.WRITE, self._scrubs.zeros_address, self.size_bytes, offset, tag)

    def end(self, result: int) -> None:
        self._scrubs.wrote(self, result)
