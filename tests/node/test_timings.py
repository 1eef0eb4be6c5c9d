"""The rows of the last puts: which flag belongs to which, and failed blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.durability import Durability
from kvstore.errors import KeyTaken, LeaseExpired, NoSpace
from kvstore.limits import RPC_TIMEOUT_MS, TRACE_STEPS_MAX
from kvstore.node.session_names import name_of
from kvstore.node.session_traces import SessionTrace
from kvstore.node.timings import BUCKETS_S, Histogram, PutSeen, Timings
from kvstore.steps import Seen, Step
from tests.node.test_tenants import HeldClock

MS = 1_000_000
ONE = b"1" * 16


class House:
    """Timings, and the trace of one session."""

    def __init__(self) -> None:
        self.clock = HeldClock()
        self.timings = Timings(self.clock)
        self.trace = SessionTrace(self.clock, name_of(ONE, "ada", "chat"))

    def lease(self, landed_ns: int, **more: Any) -> Any:
        return SimpleNamespace(
            **{"leased_ns": landed_ns, "landed_ns": landed_ns, "length": 10, "trace": self.trace, **more},
            durability=Durability.WRITTEN,
        )

    def kept(self, landed_ns: int, blocks: int = 1) -> None:
        leases = [self.lease(landed_ns) for _ in range(blocks)]
        self.timings.leases_kept(ONE, Durability.WRITTEN, leases, landed_ns + MS)

    def fired(self, at_ns: int, blocks: int = 1) -> None:
        self.trace.reported(Seen(Step.FIRED, at_ns, blocks))

    @property
    def rows(self) -> list[PutSeen]:
        return list(self.timings.puts.values())


def test_a_flag_reported_after_its_put_stays_in_its_row_even_if_the_trace_is_trimmed() -> None:
    house = House()
    house.kept(1_000 * MS)
    house.fired(998 * MS)
    for _ in range(2 * TRACE_STEPS_MAX):
        house.trace.saw(Step.PREFETCHING)
    assert house.rows[0].flag_ns == 998 * MS
    assert house.timings.fired.count == 1


def test_a_flag_reported_before_its_put_landed_waits_for_the_row() -> None:
    house = House()
    house.fired(998 * MS)
    house.kept(1_000 * MS)
    assert house.rows[0].flag_ns == 998 * MS


def test_each_put_takes_as_many_flags_as_it_has_blocks() -> None:
    house = House()
    house.kept(1_000 * MS, blocks=3)
    house.kept(1_500 * MS, blocks=2)
    for at_ns in (996, 998, 999):
        house.fired(at_ns * MS)
    house.fired(1_499 * MS, blocks=2)
    assert [row.flag_ns for row in house.rows] == [996 * MS, 1_499 * MS]


def test_the_flag_of_another_put_is_ignored() -> None:
    house = House()
    house.fired(1_000 * MS)  # its put failed
    house.kept((1_000 + RPC_TIMEOUT_MS) * MS)
    house.fired((2_000 + RPC_TIMEOUT_MS) * MS)  # not landed yet
    assert house.rows[0].flag_ns == 0


def test_failed_blocks_have_a_row_with_the_reason() -> None:
    house = House()
    house.timings.lease_failed(ONE, house.lease(1_000 * MS), NoSpace("full"))
    house.timings.lease_failed(ONE, house.lease(0, leased_ns=2_000 * MS), LeaseExpired("over"))
    assert [(row.blocks, row.failed, row.failure) for row in house.rows] == [
        (0, 1, "NoSpace"),
        (0, 1, "LeaseExpired"),
    ]
    house.timings.grant_refused(ONE, KeyTaken("taken"))
    house.timings.inline_kept(ONE, Durability.WRITTEN, 0, 0, (), [KeyTaken("taken"), None])
    assert house.timings.counters.failed == {"NoSpace": 1, "LeaseExpired": 1, "KeyTaken": 2}
    assert sum(row.failed for row in house.rows) == house.timings.counters.puts_failed == 4


def test_blocks_of_one_put_with_failures_are_one_row() -> None:
    house = House()
    house.kept(1_000 * MS, blocks=2)
    house.timings.lease_failed(ONE, house.lease(1_000 * MS), NoSpace("full"))
    assert [(row.blocks, row.failed) for row in house.rows] == [(2, 1)]


def test_a_put_without_a_session_begins_at_the_flags_that_arrived_with_its_blocks() -> None:
    house = House()
    leases = [house.lease(1_000 * MS, trace=None, flag_ns=at_ns * MS) for at_ns in (998, 996)]
    house.timings.leases_kept(ONE, Durability.WRITTEN, leases, 1_001 * MS)
    assert [row.flag_ns for row in house.rows] == [996 * MS]
    assert house.timings.fired.count == 2


def test_a_flag_time_long_before_its_block_landed_is_ignored() -> None:
    house = House()
    leases = [house.lease((RPC_TIMEOUT_MS + 1) * MS, trace=None, flag_ns=MS)]
    house.timings.leases_kept(ONE, Durability.WRITTEN, leases, (RPC_TIMEOUT_MS + 2) * MS)
    assert house.rows[0].flag_ns == 0


def test_blocks_written_together_are_timed_one_by_one() -> None:
    house = House()
    landed = np.array([1_000, 1_010, 1_020, (RPC_TIMEOUT_MS + 2_000)]) * MS
    ended = landed + np.array([1, 20, -3, 4]) * MS
    flags = np.array([998, 0, 990, 1_000]) * MS
    house.timings.written_together(ONE, landed, ended, flags, 4 * 512)
    (row,) = house.rows
    assert (row.blocks, row.size_bytes, row.flagged, row.flag_ns) == (4, 4 * 512, 2, 990 * MS)
    assert (row.landed_first_ns, row.landed_ns, row.kept_ns) == (1_000 * MS, landed[3], ended[3])
    assert house.timings.fired.sum_ns == (2 + 30) * MS  # the last flag is another put's
    kept = house.timings.kept[Durability.WRITTEN]
    assert kept.sum_ns == (1 + 20 + 4) * MS
    assert (kept.count, house.timings.fired.count) == (4, 2)


def test_durations_are_counted_together_as_one_by_one() -> None:
    one_by_one, together = Histogram(), Histogram()
    bounds_ns = [round(bound_s * 1e9) for bound_s in BUCKETS_S]
    durations_ns = [0, *bounds_ns, *[bound_ns + 1 for bound_ns in bounds_ns]]
    for duration_ns in durations_ns:
        one_by_one.note(duration_ns)
    together.note_all(np.array(durations_ns))
    assert (together.counts, together.sum_ns) == (one_by_one.counts, one_by_one.sum_ns)
