"""When a drive lends its lane ground, how much, and whether blocks should wait for more.

A lane that has a next ground needs nothing. Otherwise it gets one, and if the drive has none to give, room is made: on
a full drive blocks are evicted for the lane before it needs the ground. Blocks that find none wait for it in the C
core: they are not left to Python only because they came before the eviction ended.

Always holds: blocks wait only while ground will come. Not if records of our own wait for room, which come first, if a
block is larger than any ground, or if what is free is in small pieces and no more will be: then Python writes the
blocks, each where it fits. They wait no longer than a second (`nic_offload/receiver_puts.c`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.limits import LENT_RECORDS_LEAST
from kvstore.storage.extents import lent_pages

if TYPE_CHECKING:
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.extents import Extents
    from kvstore.storage.lane_ground import Lane
    from kvstore.storage.reclaim import Reclaim
    from kvstore.storage.writes import Writes

__all__ = ["Lending"]


class Lending:
    """What one drive lends."""

    def __init__(
        self, capacity_pages: int, extents: Extents, writes: Writes, keeping: Keeping, room: Reclaim
    ) -> None:
        self._capacity_pages = capacity_pages
        self._extents = extents
        self._writes = writes
        self._keeping = keeping
        self._room = room
        self._record_pages = 1  # of the blocks that arrive
        self._will_come = True  # more ground, if the lane needs some
        self._is_awaited = False  # it does

    def use(self, lane: Lane) -> None:
        """Attach the lane. The first block asks for ground."""
        self._writes.ground.lane = lane
        lane.expect(ground=True)

    def lend(self, record_pages: int) -> None:
        """Lend the lane ground for blocks of this size if it needs some, and make room if there is none."""
        self._record_pages = record_pages
        if not self._lend():
            self._room.step()
            self._lend()
        self._update_lane()

    def go_on(self) -> None:
        """Lend what the lane waits for, if there is any now."""
        if self._is_awaited:
            self._lend()
            self._update_lane()

    def seal(self) -> None:
        """Take back what the lane has not used."""
        self._is_awaited, self._writes.lane_pages = False, 0
        self._writes.ground.seal()

    def _update_lane(self) -> None:
        """Tell the lane whether blocks should wait: only now, because making room may have changed that."""
        if self._writes.ground.lane is not None:
            self._writes.ground.lane.expect(ground=self._will_come)

    def _lend(self) -> bool:
        """Lend ground if it is needed; False if there is none."""
        writes = self._writes
        if writes.ground.lane is None:
            return True
        writes.lane_pages = 0
        is_lent, will_come = True, writes.may_lend
        state = writes.ground.refresh()
        if will_come and (not state.next.pages or state.next.pages < state.wanted_pages):
            record_pages = state.wanted_pages or self._record_pages
            pages = lent_pages(self._capacity_pages, self._extents.free_pages, record_pages)
            least = max(record_pages, min(pages // 2, LENT_RECORDS_LEAST * record_pages))
            is_lent = will_come = pages >= record_pages and self._keeping.refusal(pages) is None
            if will_come and not writes.lend(pages, least):
                writes.lane_pages = pages
                is_lent, will_come = False, writes.ground.is_all_lent or self._room.is_being_made
        self._will_come, self._is_awaited = will_come, will_come and not is_lent
        return is_lent
