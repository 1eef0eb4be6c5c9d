"""Rooms: pieces of hot memory that receivers get in advance, for blocks that land by grants.

A receiver asks for rooms of the size of its client's blocks. A client that puts much gets more of them: enough for the
blocks of `GRANTED_TAKE_MS`, so that the node's Python is not woken more often than that.

What always holds: a room is its area's, and counts against its tenant's share of hot memory, until its block was
processed or it is withdrawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.limits import GRANTED_TAKE_MS, PAGE_BYTES, ROOMS_MAX, SHARES
from kvstore.node.hot_pages import Piece

if TYPE_CHECKING:
    from kvstore.clock import Clock
    from kvstore.node.hot import HotMemory
    from kvstore.node.put_area import PutArea
    from nic_offload.receiver import State

__all__ = ["PutRooms"]


class PutRooms:
    """The rooms of all areas of a node."""

    def __init__(self, memory: HotMemory, clock: Clock) -> None:
        self._memory, self._clock = memory, clock
        self.hungry: set[PutArea] = set()  # areas that wait for memory

    def empty(self, area: PutArea) -> None:
        """Withdraw rooms that a receiver doesn't need now."""
        area.least_pages = 0
        pieces = [Piece(number) for number in area.receiver.rooms()]
        if pieces:
            area.rooms.difference_update(pieces)
            size_bytes = self._memory.pages.size(pieces)
            self._memory.pages.release_all(pieces)
            self._memory.shares.release(area.holder, size_bytes)

    def feed(self, area: PutArea, state: State) -> None:
        """Grant a receiver more slots of the size it asks for, up to what its client may hold."""
        if state.starved:
            area.idle_ticks = 0
            if area not in self.hungry:
                area.target = min(ROOMS_MAX, area.target * 2)
            if area.least_pages < state.wanted_pages:
                self.empty(area)  # its rooms are too small for the arrived block
        is_idle = area.idle_ticks and not state.starved and area not in self.hungry
        if is_idle or not state.wanted_pages:
            return
        pages, shares = self._memory.pages, self._memory.shares
        size_bytes = state.wanted_pages * PAGE_BYTES
        most_of_all = max(2, self._memory.size_bytes // SHARES // size_bytes)
        if state.rooms > min(area.target, most_of_all) // 2:
            return
        now_ns = self._clock.monotonic_ns()
        if now_ns - area.fed_ns < GRANTED_TAKE_MS * 1_000_000:  # each feeding costs more than many blocks
            area.target = min(ROOMS_MAX, area.target * 2)
        area.fed_ns = now_ns
        target = min(area.target, most_of_all)
        most = shares.may_hold_so_many(area.holder, size_bytes, target - state.rooms)
        given = pages.take_many(state.wanted_pages, most)
        if len(given):
            area.least_pages = min(area.least_pages or state.wanted_pages, state.wanted_pages)
            area.rooms.update(given["number"].tolist())
            shares.hold(area.holder, size_bytes * len(given))
            area.receiver.feed(given.data)
        if len(given) or state.rooms:
            self.hungry.discard(area)
        else:
            self.hungry.add(area)
