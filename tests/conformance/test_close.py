"""Handles are closed with operations in flight: nothing crashes, and no memory is touched afterwards."""

from __future__ import annotations

import errno

import pytest

from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import CounterMove
from tests.conformance.backends import Backend, Gate, Stage, busy_with, lands
from tests.nic_offload.rig import PAGE, Side, Way, needs_ends_of_their_own, wait_until

CYCLES = 30
SCRIBBLE = b"\xff"
BUSY = str(-errno.EBUSY)


def arm_some(stage: Stage, way: Way, gate: Gate, cycle: int) -> Gate:
    """Arm puts, gets and moves; the counter has reached the thresholds of two thirds of them."""
    length = (8, 5000, 40_000)[cycle % 3]
    span = length * (stage.near.length // 2 // length)
    moved = stage.gate()
    base = gate.at
    way.arm(
        *(
            way.put(
                tag,
                length,
                target=tag * length % span,
                flag=(tag, 5),
                fires=(gate.counter, base + 1 + tag % 3),
                completion=moved.counter if tag % 2 else None,
            )
            for tag in range(100)
        ),
        *(
            way.get(tag, length, target=600_000 + tag % 8 * 40_000, fires=(gate.counter, base + 1 + tag % 3))
            for tag in range(100, 120)
        ),
    )
    return moved


def test_closing_an_endpoint_frees_what_its_operations_used(backend: Backend) -> None:
    """The source is overwritten and the target of the gets cleared: neither is read or written any more."""
    needs_ends_of_their_own(backend.provider)
    with Stage(backend) as stage:
        near, far = stage.near, stage.far
        gate = stage.gate()
        for cycle in range(CYCLES if backend.provider != "cxi" else 10):  # each a flush
            way = Way.between(Side.more(near), far)
            near.fill(0, bytes([cycle + 1]) * near.length)
            arm_some(stage, way, gate, cycle)
            gate.raise_to(gate.at + 2)
            if cycle % 2:
                near.wait(lambda: bool(near.events), "the first event")
            way.endpoint.close()
            near.fill(0, SCRIBBLE * near.length)
            gate.raise_to(gate.at + 1)
            stage.settle(gate)
            assert SCRIBBLE not in far.bytes_at(0, far.length)
            assert near.bytes_at(0, near.length) == SCRIBBLE * near.length
            near.events.clear()
        wait_until(lambda: busy_with(near) == 0, "nothing under way")
        near.region.close()
        gate.counter.close()
        stage.there.fence()


def test_an_endpoint_closes_while_everything_waits(backend: Backend) -> None:
    """Those of another endpoint, on the same counter, are fired as if nothing had happened."""
    with Stage(backend) as stage:
        near, far, there = stage.near, stage.far, stage.there
        gate = stage.gate()
        for cycle in range(6 if backend.provider != "cxi" else 3):
            way = Way.between(Side.more(near), far)
            fires = (gate.counter, gate.at + 1)
            way.arm(*(way.put(tag, 100, flag=(tag, 9), fires=fires) for tag in range(0, 300, 2)))
            there.arm(*(there.put(tag, 100, flag=(tag, 7), fires=fires) for tag in range(1, 300, 2)))
            if cycle % 2:
                stage.settle()
            way.endpoint.close()
            gate.raise_to(gate.at + 1)
            for tag in range(1, 300, 2):
                lands(far.word(tag), 7)
            stage.settle()
            assert [far.word(tag).load() for tag in range(300)] == [0, 7] * 150
            near.all_final(range(1, 300, 2))
            assert {tag % 2 for tag in near.finals() if tag < 300} == {1}
            for tag in range(300):
                far.word(tag).store(0)
            near.events.clear()
        stage.holds_no_work()


def test_a_fabric_closes_with_everything_in_flight(backend: Backend) -> None:
    for cycle in range(8 if backend.provider in ("tcp;ofi_rxm", "cxi") else CYCLES):
        with Stage(backend, work_max=4096) as stage:
            gate = stage.gate()
            moved = arm_some(stage, stage.there, gate, cycle)
            stage.there.arm(
                stage.there.notify(500, 0, 7, fires=(moved.counter, 1)),
                CounterMove(501, moved.counter, 1, trigger=gate.counter, threshold=2),
            )
            gate.raise_to(cycle % 4)
            if cycle % 2 and cycle % 4:
                stage.near.wait(lambda stage=stage: bool(stage.near.events), "the first event")  # type: ignore[misc]


def test_a_region_in_use_is_not_closed(stage: Stage, gate: Gate) -> None:
    near, there = stage.near, stage.there
    there.arm(there.put(1, 9, fires=(gate.counter, 1)), there.get(2, 9, fires=(gate.counter, 2)))
    for held_by in (1, 2):
        with pytest.raises(FabricError, match=BUSY):
            near.region.close()
        gate.raise_to(held_by)
        near.final(held_by)
    near.region.close()


def test_a_counter_in_use_is_closed_and_lives_as_long_as_it_is_used(stage: Stage) -> None:
    """Its operations still wait; they fire through its word or its doorbell."""
    near, far, there = stage.near, stage.far, stage.there
    for turn in range(CYCLES):
        gate, moved = stage.gate(), stage.counter()
        there.arm(
            there.put(2 * turn, 64, flag=(0, turn + 1), fires=(gate.counter, 3), completion=moved),
            there.notify(2 * turn + 1, 1, turn + 1, fires=(moved, 1)),
        )
        gate.raise_to(2)
        for counter in (gate.counter, moved):
            with pytest.raises(FabricError, match=BUSY):
                counter.reset()
            counter.close()
            counter.close()
        gate.raise_to(3)
        lands(far.word(1), turn + 1)
        assert far.word(0).load() == turn + 1
    near.all_final(range(2 * CYCLES))
    assert {event.kind for event in near.events} == {EventKind.DONE}
    stage.holds_nothing()


def test_a_closed_counter_is_gone_with_its_waiting_operations(stage: Stage) -> None:
    near, there = stage.near, stage.there
    for turn in range(5 if stage.provider == "cxi" else CYCLES):
        gate, moved = stage.gate(), stage.counter()
        tags = range(100 * turn, 100 * turn + 20)
        there.arm(*(there.notify(tag, 0, 7, fires=(gate.counter, 1), completion=moved) for tag in tags))
        gate.counter.close()
        moved.close()
        assert near.fabric.cancel(tags) == 20
    there.fence()
    assert stage.far.word(0).load() == 0
    stage.holds_nothing()


def test_a_region_for_peers_closes_while_they_write(stage: Stage, gate: Gate) -> None:
    """From then on nothing of theirs is accepted under its key."""
    needs_ends_of_their_own(stage.backend.provider)
    near, far = stage.near, stage.far
    way = Way.between(Side.more(near), far)
    near.fill(0, b"\xaa" * 40_000)
    way.arm(
        *(way.put(tag, 40_000, target=tag % 20 * 40_000, fires=(gate.counter, 1 + tag)) for tag in range(200))
    )
    gate.raise_to(50)
    near.wait(lambda: bool(near.events), "the first event")
    far.region.close()
    far.endpoint.close()  # a message whose key was checked before may be coming in still
    far.fill(0, bytes(far.length + PAGE))
    gate.raise_to(200)
    way.endpoint.close()
    another = Side.more(near)
    assert not any(far.bytes_at(0, far.length + PAGE))
    another.endpoint.close()
