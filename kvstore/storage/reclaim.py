"""Reclaims space: evicts what the core plans, in bounded steps between other work, and manages puts that wait.

A put that finds no room waits for pages that are about to become free. If they are not enough, first as many pages as
it needs are evicted, in the policy's order; if these are not contiguous, the blocks in one place are evicted (see
`clearing`). Then it finds room, because nothing else may allocate meanwhile.

Always holds: each wait ends. A put is refused, with the reason in a sentence, when nothing more may be evicted: at once
if waiting would not help, and after `ROOM_WAIT_MS_MAX` if a guard is in the way. A refused put has caused at most the
eviction of twice its room. Expired blocks are removed even if no put waits.

It doesn't order the puts (`kvstore.storage.writes` does) and does not choose (`kvstore.storage.eviction` does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.config import show_size
from kvstore.errors import NoSpace
from kvstore.limits import EVICTION_URGENT_BLOCKS, PAGE_BYTES, ROOM_WAIT_MS_MAX, TIMER_TICK_MS
from kvstore.storage.eviction.clearing import clearings
from kvstore.storage.eviction.types import Stuck

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.clock import Clock
    from kvstore.storage.eviction.clearing import Clearing
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.extents import Extents
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.wipes import Wipes
    from kvstore.storage.writes import RecordWrite, Writes

__all__ = ["Reclaim"]

_WHY: Final = {
    Stuck.EMPTY: "no block is stored that could be evicted",
    Stuck.PINNED: "all blocks are being read",
    Stuck.WRITING: "all blocks wait for a sync",
    Stuck.LEASED: "all blocks are leased",
    Stuck.PROTECTED: "all blocks are protected",
}
_FOR_GOOD: Final = frozenset({Stuck.EMPTY, Stuck.PROTECTED})  # these don't end on their own


class _Search:
    """The progress of the search for the first waiting put."""

    def __init__(self, record: RecordWrite, since_ns: int, sought_pages: int) -> None:
        self.record = record
        self.since_ns = since_ns
        self.pages = record.size_bytes // PAGE_BYTES
        self.sought_pages = sought_pages  # still to be evicted in the policy's order
        self.clearings: Iterator[Clearing | None] | None = None
        self.look_again_ns = since_ns
        self.to_clear: list[int] = []


class Reclaim:
    """Reclaims space on one drive."""

    def __init__(
        self, extents: Extents, traffic: Traffic, writes: Writes, wipes: Wipes, keeping: Keeping, clock: Clock
    ) -> None:
        self._extents = extents
        self._traffic = traffic
        self._writes = writes
        self._wipes = wipes
        self._keeping = keeping
        self._clock = clock
        self._search: _Search | None = None
        self._since_ns: int | None = None  # when the first put of a row of refused ones began to wait
        self._more = False
        self._most_pages = extents.until_page - extents.first_page
        self._scattered_pages = self._most_pages + 1  # records of this size have recently found no place
        self._closing = False

    @property
    def is_due(self) -> bool:
        """Return whether there is work that no completion of a drive will trigger."""
        first = self._writes.first_waiting
        return self._more or (
            first is not None and (self._search is None or self._search.record is not first)
        )

    @property
    def is_being_made(self) -> bool:
        """Return whether pages are about to become free."""
        return self._more or self._wipes.pending > 0

    def look_again(self) -> None:
        """Run a step soon, because guards were released."""
        self._more = True
        if self._search is not None:
            self._search.look_again_ns = self._search.since_ns

    def close(self) -> None:
        """Refuse all puts that wait for guards: these will not be released."""
        self._closing = self._more = True

    def step(self) -> None:
        """Make room now, within bounds."""
        self._more = False
        if self._writes.stopped is not None:
            while self._writes.waiting:
                self._writes.refuse_first(self._writes.stopped_again())
            return
        self._writes.resume()
        search = self._searching()
        stuck = self._evict(search)
        if search is None or self._more:
            return
        if search.sought_pages > 0 and stuck is not None:
            self._wait_or_refuse(search, _WHY[stuck], for_good=stuck in _FOR_GOOD)
        elif not self._wipes.pending:
            self._clear(search)

    def _searching(self) -> _Search | None:
        """Return the search for the first waiting put, if there is one."""
        first = self._writes.first_waiting
        found_room = self._search is not None and self._search.record is not first
        if found_room or first is None:
            self._search = self._since_ns = None
        if first is not None and self._search is None:
            pages = first.size_bytes // PAGE_BYTES
            sought = 0 if pages >= self._scattered_pages else max(0, pages - self._wipes.pending_pages)
            since_ns = self._clock.monotonic_ns() if self._since_ns is None else self._since_ns
            self._search = _Search(first, since_ns, sought)
        if self._search is not None:
            self._writes.sync_if_awaited(at_once=True)  # it frees records that sessions have replaced
        return self._search

    def _evict(self, search: _Search | None) -> Stuck | None:
        if search is not None and search.pages > self._most_pages:
            return None  # nothing is evicted for a record that can't be kept
        free_pages = self._extents.free_pages + self._wipes.pending_pages
        plan = self._keeping.core.plan(
            free_pages=free_pages,
            demand_pages=min(
                self._writes.queued_pages + self._writes.lane_pages, self._keeping.marks.high_pages
            ),
            waiting_pages=max(0, search.sought_pages) if search is not None else 0,
            now_ms=self._clock.wall_ms(),
        )
        self._keeping.evict(plan.victims)
        if search is not None:
            search.sought_pages -= plan.pages
        self._more = plan.more
        return plan.stuck

    def _clear(self, search: _Search) -> None:
        """Evict the blocks of one contiguous run of pages."""
        if search.pages > self._most_pages:
            self._refuse(search, f"it has {show_size(self._most_pages * PAGE_BYTES)} in all")
        elif search.to_clear or self._find(search):
            now, later = search.to_clear[:EVICTION_URGENT_BLOCKS], search.to_clear[EVICTION_URGENT_BLOCKS:]
            search.to_clear = later
            self._keeping.clear(now)
            self._more = True

    def _find(self, search: _Search) -> bool:
        """Search for a run of pages to clear, one step at a time; return whether one was found."""
        now_ns = self._clock.monotonic_ns()
        if search.clearings is None and now_ns >= search.look_again_ns:
            search.clearings = clearings(self._extents, self._keeping.core, search.pages)
        if search.clearings is not None:
            try:
                found = next(search.clearings)
            except StopIteration:
                search.clearings = None
                search.look_again_ns = now_ns + TIMER_TICK_MS * 1_000_000
            else:
                self._more = True
                if found is not None:
                    search.clearings = None
                    search.to_clear = found.generations
                    self._scattered_pages = max(self._scattered_pages, search.pages + 1)
                return found is not None
        self._scattered_pages = min(self._scattered_pages, search.pages)
        self._wait_or_refuse(
            search,
            "guarded blocks, or records of sessions, leave no contiguous room",
            for_good=not self._keeping.has_passing_guards(),
        )
        return False

    def _wait_or_refuse(self, search: _Search, why: str, *, for_good: bool) -> None:
        idle = not (self._traffic.in_flight or self._traffic.queued)
        waited_ms = (self._clock.monotonic_ns() - search.since_ns) // 1_000_000
        if waited_ms >= ROOM_WAIT_MS_MAX or (idle and (for_good or self._closing)):
            self._refuse(search, why)

    def _refuse(self, search: _Search, why: str) -> None:
        self._search, self._since_ns = None, search.since_ns
        self._writes.refuse_first(
            NoSpace(f"The drive has no room for {show_size(search.record.size_bytes)}: {why}.")
        )
        self._more = self._writes.waiting > 0
