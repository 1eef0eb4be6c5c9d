"""The lease table, without I/O: a slot never has two owners."""

from __future__ import annotations

import tracemalloc
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.durability import Durability
from kvstore.errors import Overloaded
from kvstore.limits import LEASES_MAX, PAGE_BYTES
from kvstore.node.landing import LandingLayout, Lease, LeaseTable, Slots, SlotState

SLOTS = 4


def lease_of(slot: int, generation: int) -> Lease:
    return Lease(slot, generation, b"k" * 32, b"f" * 16, 100, Durability.WRITTEN, 0, 0)


def unwiped(*_: int) -> None:
    raise AssertionError("nothing was erased")


def leased(slots: Slots, generation: int) -> Lease:
    lease = lease_of(slots.take(1)[0], generation)
    slots.hold(lease)
    return lease


def test_a_slot_is_free_only_when_the_drive_is_done_with_it() -> None:
    slots = Slots(1, unwiped)
    leased(slots, 7)
    assert slots.landed(7) is not None
    with pytest.raises(Overloaded, match="0 of 1 landing slots free"):
        slots.take(1)
    slots.finished(7)
    assert slots.take(1) == [0]


class Owned(NamedTuple):
    """The part of a connection that a lease table reads."""

    tenant: bytes


def test_each_tenant_has_its_share_of_the_leases() -> None:
    table, evil, good = LeaseTable(lambda: 2), Owned(b"evil"), Owned(b"good")
    for count in range(LEASES_MAX // 2):
        table.refuse_more(evil, 1)  # type: ignore[arg-type]
        table.add(count, evil)  # type: ignore[arg-type]
    with pytest.raises(Overloaded):
        table.refuse_more(evil, 1)  # type: ignore[arg-type]
    table.refuse_more(good, LEASES_MAX // 4)  # type: ignore[arg-type]
    assert table.pop(0) is evil  # type: ignore[comparison-overlap]
    assert table.pop(0) is None
    table.refuse_more(evil, 1)  # type: ignore[arg-type]


def test_free_slots_take_a_few_bytes_each() -> None:
    """A list of their numbers takes an object each: 40 KiB per client, which fragmented the heap."""
    tracemalloc.start()
    try:
        slots = Slots(1024, unwiped)
        assert slots.in_state(SlotState.FREE) == 1024
        assert tracemalloc.get_traced_memory()[0] < 10 * 1024
    finally:
        tracemalloc.stop()


def test_all_slots_or_none_are_leased() -> None:
    slots = Slots(SLOTS, unwiped)
    with pytest.raises(Overloaded):
        slots.take(SLOTS + 1)
    assert slots.in_state(SlotState.FREE) == SLOTS


def test_an_expired_slot_is_quarantined_until_the_client_returns_it() -> None:
    slots = Slots(1, unwiped)
    lease = leased(slots, 7)
    assert slots.expired(7) is lease
    assert slots.is_quarantined(7)
    with pytest.raises(Overloaded):
        slots.take(1)
    assert slots.abort(lease.slot, 7)
    assert slots.take(1) == [lease.slot]


def test_a_block_that_lands_after_its_lease_is_refused() -> None:
    slots = Slots(1, unwiped)
    leased(slots, 7)
    slots.expired(7)
    assert slots.landed(7) is None


def test_a_flag_of_an_unknown_generation_is_ignored() -> None:
    slots = Slots(1, unwiped)
    leased(slots, 7)
    assert slots.landed(8) is None
    assert slots.landed(7) is not None
    assert slots.landed(7) is None  # and once only


def test_a_landed_block_cannot_be_aborted() -> None:
    slots = Slots(1, unwiped)
    lease = leased(slots, 7)
    slots.landed(7)
    assert not slots.abort(lease.slot, 7)
    assert slots.in_state(SlotState.WRITING) == 1


def test_returning_another_slot_than_the_leased_one_changes_nothing() -> None:
    slots = Slots(2, unwiped)
    lease = leased(slots, 7)
    assert not slots.abort(1 - lease.slot, 7)
    assert slots.in_state(SlotState.LEASED) == 1


def test_after_an_erasure_no_slot_has_its_old_bytes() -> None:
    wiped: list[tuple[int, int]] = []
    slots = Slots(3, lambda *one: wiped.append(one))
    leases = [leased(slots, generation) for generation in (7, 8, 9)]
    for lease in leases:
        slots.landed(lease.generation)
        slots.finished(lease.generation)
    again = leased(slots, 10)  # it has what it had before, until its own block comes
    slots.erase()
    while slots.wipe_free():
        pass
    assert sorted(wiped) == sorted((lease.slot, 100) for lease in leases if lease.slot != again.slot)
    assert slots.abort(again.slot, 10)
    assert wiped[2:] == [(again.slot, 100)]


@pytest.mark.parametrize(("slots", "block_bytes_max"), [(1, 1), (3, 4096), (513, 4097), (1024, 1 << 20)])
def test_slots_and_flags_never_overlap_and_headers_are_page_aligned(slots: int, block_bytes_max: int) -> None:
    layout = LandingLayout(slots, block_bytes_max)
    flags_end = layout.flag(slots - 1) + 8
    assert flags_end <= layout.header(0)
    for slot in range(slots):
        assert layout.header(slot) % PAGE_BYTES == 0
        assert layout.payload(slot) == layout.header(slot) + PAGE_BYTES
        end = layout.payload(slot) + block_bytes_max
        assert end <= (layout.header(slot + 1) if slot + 1 < slots else layout.total_bytes)


class LeaseMachine(RuleBasedStateMachine):
    """Random sequences of slot operations, compared with a plain record of the owners."""

    @initialize()
    def begin(self) -> None:
        self.slots = Slots(SLOTS, unwiped)
        self.held: dict[int, Lease] = {}
        self.states: dict[int, SlotState] = {}
        self.next = 1

    @rule()
    @precondition(lambda self: len(self.held) < SLOTS)
    def lease(self) -> None:
        lease = leased(self.slots, self.next)
        assert lease.slot not in {other.slot for other in self.held.values()}
        self.held[self.next] = lease
        self.states[self.next] = SlotState.LEASED
        self.next += 1

    @rule(data=st.data(), step=st.sampled_from(["landed", "finished", "expired", "abort"]))
    @precondition(lambda self: self.held)
    def move(self, data: st.DataObject, step: str) -> None:
        generation = data.draw(st.sampled_from(sorted(self.held)))
        state, lease = self.states[generation], self.held[generation]
        match step:
            case "landed":
                assert (self.slots.landed(generation) is lease) == (state is SlotState.LEASED)
                if state is SlotState.LEASED:
                    self.states[generation] = SlotState.WRITING
            case "expired":
                assert (self.slots.expired(generation) is lease) == (state is SlotState.LEASED)
                if state is SlotState.LEASED:
                    self.states[generation] = SlotState.QUARANTINED
            case "finished" if state is SlotState.WRITING:
                assert self.slots.finished(generation) is lease
                del self.held[generation], self.states[generation]
            case "abort":
                given_back = self.slots.abort(lease.slot, generation)
                assert (given_back is lease) == (state is not SlotState.WRITING)
                if state is not SlotState.WRITING:
                    del self.held[generation], self.states[generation]

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        assert self.slots.in_state(SlotState.FREE) == SLOTS - len(self.held)
        for state in (SlotState.LEASED, SlotState.WRITING, SlotState.QUARANTINED):
            assert self.slots.in_state(state) == sum(other is state for other in self.states.values())
        assert self.slots.busy == sum(one is not SlotState.QUARANTINED for one in self.states.values())


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
