"""Which pages of the drive are free: best fit, always from the start of a free extent.

Always holds: free extents never adjoin (neighbours are merged); an allocation is the prefix of a free extent, on
which recovery by scan depends ("Why jumping is sound" in docs/record-format.md); of several that fit equally well the
one that has had its length for the longest time is taken; a pinned extent is not reused until its last pin is released.
A call that would break this is an AssertionError, and changes nothing; of a batch, the items before it are done.

It stores nothing about live extents: those are in the index. Units are pages, not bytes. The work is done in C
(`keep/extents.c`), in time that grows with the logarithm of the number of free extents, each of which takes 48 to 100
bytes.
"""

from __future__ import annotations

from array import array
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.errors import Corrupt
from kvstore.limits import (
    EXTENTS_AT_ONCE,
    LENT_LARGE_RECORDS,
    LENT_PAGES,
    LENT_SHARE,
    LENT_SHARE_OF_FREE,
    LENT_SHARE_OF_LARGE,
)
from kvstore.storage.keep._keep import ffi, lib
from kvstore.storage.keep.outcome import check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike

__all__ = ["Extents", "lent_pages"]


_LONGEST: Final = (1 << 64) - 1


class Extents:
    """The free extents of one drive."""

    __slots__ = ("_first", "_kept", "_until", "_word", "unwritten")

    def __init__(self, first_page: int, until_page: int) -> None:
        self._first = first_page
        self._until = until_page
        self._kept = _new(first_page, until_page)
        self._word = ffi.new("uint64_t *")
        self.unwritten: list[tuple[int, int]] | None = None  # given back unwritten, if that is to be noted
        if first_page < until_page:
            self.release(first_page, until_page - first_page)

    @classmethod
    def around(cls, live: ArrayLike, first_page: int, until_page: int) -> Extents:
        """Return the free extents between live ones, which are rows `(start, length)`; Corrupt if they overlap."""
        starts, lengths = np.asarray(live, np.int64).reshape(-1, 2).T
        begins = np.concatenate([[first_page], starts + lengths])
        gaps = np.append(starts, until_page) - begins
        wrong = np.flatnonzero((gaps[:-1] < 0) | (lengths <= 0))
        if wrong.size:
            raise Corrupt(f"Two records claim page {starts[wrong[0]]} of the drive.")
        if gaps[-1] < 0:
            raise Corrupt(f"A record claims page {begins[-1] - 1}, which lies beyond the drive.")
        extents = cls(first_page, first_page)
        extents._until = until_page
        extents._kept = _new(first_page, until_page)
        free = np.flatnonzero(gaps)
        begins, gaps = (column[free].astype("u8") for column in (begins, gaps))
        check(
            lib.keep_extents_fill(
                extents._kept,
                ffi.from_buffer("uint64_t[]", begins),
                ffi.from_buffer("uint64_t[]", gaps),
                len(free),
            )
        )
        return extents

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated, in pieces of any size."""
        return int(lib.keep_extents_pages(self._kept))

    @property
    def free_extents(self) -> int:
        """How many free extents there are."""
        return int(lib.keep_extents_count(self._kept))

    @property
    def first_page(self) -> int:
        """The first page for extents."""
        return self._first

    @property
    def until_page(self) -> int:
        """The page after the last one for extents."""
        return self._until

    @property
    def longest(self) -> int:
        """Pages of the longest free extent: what can be allocated at once."""
        return int(lib.keep_extents_longest(self._kept))

    @property
    def memory_bytes(self) -> int:
        """The memory that the free extents take."""
        return int(lib.keep_extents_bytes(self._kept))

    @property
    def pinned(self) -> int:
        """How many extents are being read."""
        return int(lib.keep_extents_pinned(self._kept))

    def longest_starts(self, count: int) -> list[int]:
        """Return where the longest free extents begin, longest first."""
        found: list[int] = []
        for starts in self._by_length(count):
            found += starts
            if len(found) >= count:
                break
        return found[:count]

    def some_starts(self, count: int) -> list[int]:
        """Return where some free extents begin: one of each length in turn, the longest first."""
        of_lengths = [starts for starts, _ in zip(self._by_length(count), range(count), strict=False)]
        in_turn = chain.from_iterable(zip_longest(*of_lengths))
        return [start for start in in_turn if start is not None][:count]

    def _by_length(self, count: int) -> Iterator[Sequence[int]]:
        """The starts of each length, up to `count` of each, longest first."""
        starts, length = array("Q", bytes(8 * count)), ffi.new("uint64_t *", _LONGEST)
        room = ffi.from_buffer("uint64_t[]", starts)
        while found := lib.keep_extents_of_length(self._kept, length[0], room, count, length):
            yield starts[:found]

    def free_from(self, page: int, until: int | None = None) -> tuple[int, int] | None:
        """Return the first free pages from `page` on, and their number; None if there are none before `until`."""
        until = self._until if until is None else until
        if page >= until:
            return None
        found = self._some_after(page, 1)
        if not found or found[0] >= until:
            return None
        begin = max(found[0], page)
        return begin, min(found[0] + found[1], until) - begin

    def after(self, page: int) -> list[tuple[int, int]]:
        """Return the free extents that end after a page, in order."""
        found: list[tuple[int, int]] = []
        while some := self._some_after(page, EXTENTS_AT_ONCE):
            found += zip(some[::2], some[1::2], strict=True)
            page = sum(found[-1])
        return found

    def _some_after(self, page: int, count: int) -> array[int]:
        pairs = array("Q", bytes(16 * count))
        found = lib.keep_extents_after(self._kept, page, ffi.from_buffer("uint64_t[]", pairs), count)
        return pairs[: 2 * found]

    def hold(self, start: int, length: int) -> None:
        """Keep free pages from being allocated, until `end_hold`; they stay free."""
        lib.keep_extents_hold(self._kept, start, start + length)

    def end_hold(self) -> None:
        """End `hold`."""
        lib.keep_extents_hold(self._kept, 0, 0)

    def free_at(self, start: int) -> int:
        """Return the pages of the free extent that begins here; 0 if there is none."""
        return int(lib.keep_extents_at(self._kept, start))

    def allocate(self, length: int) -> int | None:
        """Allocate the start of the smallest free extent that is long enough; None if there is none."""
        start = lib.keep_extents_allocate(self._kept, length)
        if start >= 0:
            return int(start)
        return None if start == lib.KEEP_NONE else check(start)

    def release(self, start: int, length: int, *, unwritten: bool = False) -> None:
        """Free an extent, `unwritten` if nothing was written to it; if it is being read, once its readers are done."""
        check(lib.keep_extents_release(self._kept, start, length))
        if unwritten and self.unwritten is not None:
            self.unwritten.append((start, length))

    def release_all(self, extents: Sequence[tuple[int, int]]) -> None:
        """Free extents, by start and length."""
        pairs = array("Q", chain.from_iterable(extents))
        check(lib.keep_extents_release_all(self._kept, ffi.from_buffer("uint64_t[]", pairs), len(extents)))

    def pin(self, start: int) -> None:
        """Keep a live extent from being reused."""
        self._word[0] = start
        check(lib.keep_extents_pin(self._kept, self._word, 1))

    def pin_all(self, starts: Iterable[int]) -> None:
        """Pin many extents."""
        column = array("Q", starts)
        check(lib.keep_extents_pin(self._kept, ffi.from_buffer("uint64_t[]", column), len(column)))

    def is_pinned(self, start: int) -> bool:
        """Return whether an extent is being read."""
        return bool(lib.keep_extents_is_pinned(self._kept, start))

    def unpin(self, start: int) -> None:
        """Remove one pin."""
        self._word[0] = start
        check(lib.keep_extents_unpin(self._kept, self._word, 1))

    def unpin_all(self, starts: Iterable[int]) -> None:
        """Remove one pin of each of many."""
        column = array("Q", starts)
        check(lib.keep_extents_unpin(self._kept, ffi.from_buffer("uint64_t[]", column), len(column)))


def _new(first_page: int, until_page: int) -> Any:
    kept = lib.keep_extents_new(first_page, until_page)
    if not kept:
        raise MemoryError("There is no memory for the free extents of a drive.")
    return ffi.gc(kept, lib.keep_extents_free)


def lent_pages(drive_pages: int, free_pages: int, record_pages: int) -> int:
    """Return the size of the ground for a lane.

    On a small drive it is larger if it would otherwise hold only few records of the usual size, but never more than a
    part of what is free: nothing is evicted for that.
    """
    most_pages = min(drive_pages // LENT_SHARE_OF_LARGE, free_pages // LENT_SHARE_OF_FREE)
    return min(LENT_PAGES, max(drive_pages // LENT_SHARE, min(LENT_LARGE_RECORDS * record_pages, most_pages)))
