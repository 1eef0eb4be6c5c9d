"""The node's record of deletions, and which copies it refuses because of it."""

from __future__ import annotations

import itertools
import time

from kvstore.clock import SystemClock
from kvstore.limits import COPY_LATE_MS, DELETIONS_KEPT_MAX, REPAIR_CALL_MS
from kvstore.node.deletions import Deletions

NAME, OTHER = (b"tenant", b"key"), (b"tenant", b"other")
HOUR_MS = 3_600_000


class Clock(SystemClock):
    now_ms = HOUR_MS

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000


def test_a_copy_read_before_a_deletion_is_refused_and_one_read_long_after_is_not() -> None:
    clock = Clock()
    deletions = Deletions(clock)
    clock.now_ms += HOUR_MS
    deletions.note([NAME])
    assert deletions.may_be_since(NAME, 1)
    assert not deletions.may_be_since(OTHER, 1)
    clock.now_ms += COPY_LATE_MS - 1
    assert deletions.may_be_since(NAME, 1), "it may have been under way for so long"
    clock.now_ms += 1000
    assert not deletions.may_be_since(NAME, 1)
    assert deletions.may_be_since(NAME, 1000), "it was read earlier"


def test_a_copy_read_before_the_node_started_is_refused() -> None:
    clock = Clock()
    deletions = Deletions(clock)
    assert deletions.may_be_since(NAME, 1)
    clock.now_ms += REPAIR_CALL_MS + 2
    assert not deletions.may_be_since(NAME, 1)
    assert deletions.may_be_since(NAME, 3)


def test_remembered_sources_are_bounded_and_forgotten_ones_count_together() -> None:
    clock = Clock()
    deletions = Deletions(clock)
    clock.now_ms += HOUR_MS
    deletions.note([NAME])
    deletions.note((b"tenant", number.to_bytes(4)) for number in range(DELETIONS_KEPT_MAX))
    assert len(deletions) == DELETIONS_KEPT_MAX
    assert deletions.may_be_since(NAME, 1)
    assert deletions.may_be_since(OTHER, 1), "nobody knows any more"
    clock.now_ms += COPY_LATE_MS + 2
    assert not deletions.may_be_since(NAME, 1)
    deletions.note([NAME])
    deletions.note([OTHER])
    deletions.note([NAME])
    assert deletions.may_be_since(NAME, 1)


def test_a_deletion_costs_no_more_when_many_have_been_forgotten() -> None:
    deletions, numbers = Deletions(SystemClock()), itertools.count()

    def cost_s(count: int) -> float:
        names = [(b"t", next(numbers).to_bytes(32)) for _ in range(count)]
        began = time.thread_time()
        deletions.note(names)
        return time.thread_time() - began

    deletions.note((b"t", next(numbers).to_bytes(32)) for _ in range(DELETIONS_KEPT_MAX))
    early = min(cost_s(100) for _ in range(3))
    cost_s(DELETIONS_KEPT_MAX * 3 // 2)
    assert min(cost_s(100) for _ in range(3)) < 5 * early + 0.0007
