"""Each operation fires at most once, whatever its counter does afterwards, and ends in exactly one event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nic_offload.fabric import EventKind
from tests.conformance.backends import each_once, lands

if TYPE_CHECKING:
    from tests.conformance.backends import Gate, Stage

MARK = b"\xee"


def test_a_landed_slot_is_never_written_again(stage: Stage, gate: Gate) -> None:
    """The target overwrites everything, and then the counter passes every threshold many times over."""
    near, far, there = stage.near, stage.far, stage.there
    count = 150
    near.fill(0, bytes(range(256)) * 64)
    for tag in range(count):
        fires = (gate.counter, 1 + tag % 10)
        there.arm(there.put(tag, 64, source=tag, target=64 * tag, flag=(tag, tag + 1000), fires=fires))
    for value in range(1, 11):
        gate.raise_to(value)
        for tag in range(value - 1, count, 10):
            lands(far.word(tag), tag + 1000)
    near.all_final(range(count))
    stage.settle()
    far.fill(0, MARK * far.length)
    for tag in range(count):
        far.word(tag).store(0)
    for value in range(11, 61):
        gate.raise_to(value)
        if value % 10 == 0:
            stage.settle(gate)
    stage.settle(gate)
    assert far.bytes_at(0, far.length) == MARK * far.length
    assert [far.word(tag).load() for tag in range(count)] == [0] * count
    each_once(near, range(count))


def test_a_completed_get_never_writes_again(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    far.fill(0, b"\x11" * 6400)
    there.arm(
        *(
            there.get(tag, 64, source=64 * tag, target=64 * tag, fires=(gate.counter, tag + 1))
            for tag in range(100)
        )
    )
    gate.raise_to(100)
    near.all_final(range(100))
    assert near.bytes_at(0, 6400) == b"\x11" * 6400
    near.fill(0, MARK * 6400)
    for value in range(101, 120):
        gate.raise_to(value)
    stage.settle(gate)
    assert near.bytes_at(0, 6400) == MARK * 6400
    each_once(near, range(100))


def test_a_counter_is_moved_once_by_each_operation(stage: Stage, gate: Gate) -> None:
    """An operation fired twice would count twice."""
    there, moved = stage.there, stage.counter()
    kinds = (
        lambda tag, fires: there.put(tag, 100, flag=(0, 7), fires=fires, completion=moved),
        lambda tag, fires: there.put(tag, 100, fires=fires, completion=moved),
        lambda tag, fires: there.notify(tag, 1, 7, fires=fires, completion=moved),
        lambda tag, fires: there.get(tag, 100, source=4096, fires=fires, completion=moved),
        lambda tag, fires: there.get(tag, 100, source=4096, flag=(2, 7), fires=fires, completion=moved),
    )
    for tag in range(200):
        there.arm(kinds[tag % 5](tag, (gate.counter, 1 + tag // 4)))
    for value in (3, 4, 20, 21, 60, 200):
        gate.raise_to(value)
        reached = range(min(200, 4 * value))
        stage.near.all_final(reached)
        stage.settle(gate)
        assert moved.value() == len(reached)
    each_once(stage.near, range(200))
    assert not moved.failed
    stage.holds_nothing()


def test_fired_is_reported_once_and_before_the_end(stage: Stage, gate: Gate) -> None:
    stage.there.arm(
        *(stage.there.notify(tag, 0, 7, fires=(gate.counter, tag), report_fired=True) for tag in range(1, 61))
    )
    gate.raise_to(60)
    stage.near.all_final(range(1, 61))
    told = {tuple(stage.near.kinds(tag)) for tag in range(1, 61)}
    both, end = (EventKind.FIRED, EventKind.DONE), (EventKind.DONE,)
    assert told <= ({both, end} if stage.backend.nic_counts else {both})
