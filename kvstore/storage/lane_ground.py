"""Ground of a drive that is lent to its lane: contiguous pages, and generations for the records on them.

A lane (`nic_offload.lane`) writes records itself. It has the ground in use and the next one, to which it goes on when a
record doesn't fit; then it should get another. What it leaves unused comes back.

Always holds:

- Ground is noted, with all its generations, before the lane has it, until every record on it is published: a crash
  leaves the rest to recovery, which scans the ground.
- Each page is the lane's or free, or a record stands on it: pages come back once, in the step in which it is known that
  the lane has left them.
- The lane's records are published in the order of their generations among all records (`kvstore.storage.writes`): it
  reports none before it is told that all earlier ones, which are not its own, are complete.

It doesn't decide when to lend (`kvstore.storage.lending` does).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import StorageError
from kvstore.limits import LENT_MAX, LENT_RECORDS_MAX
from nic_offload.lane import Ground

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.storage.extents import Extents
    from kvstore.storage.volume import Volume
    from kvstore.storage.writes import RecordWrite
    from nic_offload.lane import LaneState

__all__ = ["Lane", "LaneGround", "Lent"]


class Lane(Protocol):
    """The C core's writer, on ground lent to it."""

    def state(self) -> LaneState:
        """Return what it has."""
        ...

    def lend(self, ground: Ground) -> LaneState | None:
        """Set its next ground; return its state just before, or None if it has failed.

        A next ground that it has already is given back.
        """
        ...

    def seal(self) -> LaneState | None:
        """Take all its ground back; return its state just before, or None if that can't be known any more."""
        ...

    def fail(self) -> None:
        """Begin no more writes, and report none."""
        ...

    def expect(self, *, ground: bool) -> None:
        """Say whether more ground will come: then blocks wait for it."""
        ...

    def clear(self, generation: int) -> None:
        """Report its records below this generation, each once it and all earlier ones have completed."""
        ...


class Lent:
    """Ground that a lane has, or had, until everything on it is published."""

    __slots__ = ("ended", "ground", "is_clear", "left", "place", "reported", "until")

    def __init__(self, ground: Ground, place: int) -> None:
        self.ground = ground
        self.until = ground.generation + ground.records
        self.place = place  # of its note
        self.ended: list[RecordWrite] = []  # and not retired
        self.reported = 0  # how many have ended
        self.left: int | None = None  # how many have not, once we know that no more begin
        self.is_clear = False  # all earlier ones have ended or are the lane's own, and the lane knows

    @property
    def is_over(self) -> bool:
        """Whether all its records have completed and were reported."""
        return self.left == 0 and not self.ended


class LaneGround:
    """What the lane of one drive has."""

    def __init__(
        self,
        volume: Volume,
        extents: Extents,
        note_begun: Callable[[int], object],
        note_lent: Callable[[int, Ground | None], object],
    ) -> None:
        self._volume = volume
        self._extents = extents
        self._note_begun = note_begun
        self._note_lent = note_lent
        self.lane: Lane | None = None
        self.lent: deque[Lent] = deque()  # all that is not over

    @property
    def is_all_lent(self) -> bool:
        """Whether no more can be lent until records on earlier ground are published."""
        return len(self.lent) >= LENT_MAX

    def lend(self, pages: int, least_pages: int, before: RecordWrite | Lent | None) -> Lent | None:
        """Lend the lane this many pages, or as many as are contiguous; None if that is less than the least.

        `before` is the last of all records and grounds under way. If the lane has failed, nothing of it is used.
        """
        assert self.lane is not None
        pages = min(pages, self._extents.longest)
        records = min(pages // 2, LENT_RECORDS_MAX)
        if not records or pages < least_pages or self.is_all_lent:
            return None
        page = self._extents.allocate(pages)
        if page is None:
            return None
        try:
            generation = self._volume.take_generations(records)
        except StorageError:
            self._extents.release(page, pages, unwritten=True)
            raise
        taken = {lent.place for lent in self.lent}
        place = next(place for place in range(LENT_MAX) if place not in taken)
        lent = Lent(Ground(page, generation, pages, records), place)
        self._note_begun(lent.until - 1)
        self._note_lent(place, lent.ground)
        state = self.lane.lend(lent.ground)
        if state is None:
            self._give_back(lent)
        else:
            self._refresh(state)
            if state.next.pages:
                self._give_back(self.lent[-1])
            # If nothing else lies between two grounds of a lane, it keeps the order on both itself.
            if isinstance(before, Lent) and before.is_clear:
                self._clear(lent)
        self.lent.append(lent)
        return lent

    def refresh(self) -> LaneState:
        """Return what the lane has. Pages that it has left are free again."""
        assert self.lane is not None
        state = self.lane.state()
        self._refresh(state)
        return state

    def seal(self) -> None:
        """Take back what the lane has not used."""
        if self.lane is None or all(lent.left is not None for lent in self.lent):
            return
        state = self.lane.seal()
        if state is None:  # its pages stay as they are, and unused, until the next opening
            self.end()
            return
        in_use = self._refresh(state)
        if in_use is not None and in_use.left is None:
            self._take_back(in_use, state.used, state.left)
        for lent in self.lent:
            if lent.left is None:
                self._give_back(lent)

    def note_ended(self, ended: Iterable[tuple[RecordWrite, int, int, int]]) -> None:
        """Note the lane's records in the order of their generations, with generation, offset and result of each."""
        self.refresh()
        for record, generation, offset, result in ended:
            lent = next(lent for lent in self.lent if generation < lent.until)
            record.generation, record.offset, record.result = generation, offset, record.size_bytes
            lent.reported += 1
            if lent.left is not None:
                lent.left -= 1
            lent.ended.append(record)
            if result:
                record.end(result)

    def note_published(self, generations: Sequence[int]) -> None:
        """Note that records of the lane, given in ascending order, have ended, and that they are being published.

        They are the next in the order of all records: the lane reports none before it is told that all earlier ones are
        complete, and those of its own that ended earlier are published already.
        """
        self.refresh()
        assert not any(lent.ended for lent in self.lent), "earlier records are published first"
        first = 0
        for lent in self.lent:
            until = bisect_left(generations, lent.until)
            assert lent.is_clear or until == first, "the lane waits until earlier records are complete"
            lent.reported += until - first
            if lent.left is not None:
                lent.left -= until - first
            first = until
        assert first == len(generations), "each has a generation of ground that was lent"

    def take_from(self, lent: Lent) -> Sequence[RecordWrite]:
        """Take the records that have ended on ground that is the first of everything under way."""
        if not lent.is_clear:
            self._clear(lent)
        ended, lent.ended = lent.ended, []
        return ended

    def forget_over(self) -> None:
        """Remove the notes of ground on which everything is published."""
        while self.lent and self.lent[0].is_over:
            self._note_lent(self.lent.popleft().place, None)

    def end(self) -> None:
        """Stop waiting for the ends of records."""
        for lent in self.lent:
            lent.left = 0

    def _refresh(self, state: LaneState) -> Lent | None:
        """Note that the lane has left the ground before the one in use; return the latter, if any."""
        in_use = before = None
        for lent in self.lent:
            if lent.ground.generation < state.left.generation:
                before = before if in_use is None or in_use.left is not None else in_use
                in_use = lent
        if before is not None:
            self._take_back(before, state.used_before, state.before)
        return in_use

    def _give_back(self, lent: Lent) -> None:
        """Take back ground on which nothing was begun."""
        self._take_back(lent, 0, lent.ground)

    def _take_back(self, lent: Lent, used: int, rest: Ground) -> None:
        lent.left = used - lent.reported
        if rest.pages:
            self._extents.release(rest.page, rest.pages, unwritten=True)

    def _clear(self, lent: Lent) -> None:
        lent.is_clear = True
        if self.lane is not None:
            self.lane.clear(lent.until)
