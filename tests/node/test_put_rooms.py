"""How many rooms a client gets in advance: as many as keep the node's Python from being woken all the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.limits import GRANTED_TAKE_MS, ROOMS_MAX, ROOMS_MIN
from kvstore.node.put_rooms import PutRooms

PIECE = np.dtype([("number", np.uint32)])


class Clock:
    now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns


@dataclass
class Memory:
    """Has room for all."""

    size_bytes: int = 1 << 40
    taken: int = 0

    @property
    def pages(self) -> Memory:
        return self

    @property
    def shares(self) -> Memory:
        return self

    def may_hold_so_many(self, _holder: object, _size_bytes: int, most: int) -> int:
        return most

    def take_many(self, _pages: int, most: int) -> Any:
        self.taken += most
        return np.arange(most, dtype=np.uint32).view(PIECE)

    def hold(self, _holder: object, _size_bytes: int) -> None:
        pass


@dataclass(eq=False)
class Area:
    target: int = ROOMS_MIN
    fed_ns: int = 0
    idle_ticks: int = 0
    least_pages: int = 0
    holder: object = None
    rooms: set[int] = field(default_factory=set)
    receiver: Any = field(default_factory=lambda: SimpleNamespace(feed=lambda _: None))


def fed(rooms: PutRooms, memory: Memory, area: Area, left: int) -> int:
    """Feed an area whose receiver has so many rooms left; returns how many it got."""
    before = memory.taken
    rooms.feed(area, SimpleNamespace(starved=False, wanted_pages=9, rooms=left))  # type: ignore[arg-type]
    return memory.taken - before


def test_a_client_that_needs_rooms_again_at_once_gets_more_of_them() -> None:
    memory, clock, area = Memory(), Clock(), Area()
    rooms = PutRooms(memory, clock)  # type: ignore[arg-type]
    assert fed(rooms, memory, area, 0) == ROOMS_MIN
    assert fed(rooms, memory, area, ROOMS_MIN // 2 + 1) == 0, "it has enough"
    for _ in range(3):
        clock.now_ns += GRANTED_TAKE_MS * 1_000_000
        assert fed(rooms, memory, area, ROOMS_MIN // 2) == ROOMS_MIN // 2, "it doesn't need them often"
    target = area.target
    for _ in range(20):
        clock.now_ns += GRANTED_TAKE_MS * 1_000_000 - 1
        fed(rooms, memory, area, 0)
        target = min(ROOMS_MAX, 2 * target)
        assert area.target == target
    assert area.target == ROOMS_MAX
