"""Nothing fires before its counter reaches its threshold; everything fires once it has."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from nic_offload.fabric import EventKind
from tests.conformance.backends import REACHED_MAX, lands
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from nic_offload.trigger import Operation
    from tests.conformance.backends import Gate, Stage

BYTES = 24  # of each put; its flag is a word of its own


def operation(stage: Stage, gate: Gate, index: int, threshold: int) -> Operation:
    """One of three kinds of operation, each visible in word `index`."""
    fires = (gate.counter, threshold)
    if index % 3 == 0:
        return stage.there.notify(index, index, index + 1, fires=fires)
    at = BYTES * index
    source = stage.near.length - 8 - 8 * index
    if index % 3 == 1:
        return stage.there.put(index, BYTES, source=at, target=at, flag=(index, index + 1), fires=fires)
    stage.near.fill(source, (index + 1).to_bytes(8, "little"))
    return stage.there.put(index, 8, source=source, target=stage.far.word_offset(index), fires=fires)


def landed(stage: Stage, count: int) -> set[int]:
    return {index for index in range(count) if stage.far.word(index).load() == index + 1}


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_operations_that_were_reached_have_landed(stage: Stage, gate: Gate, seed: int) -> None:
    """Armed in any order, before and between the movements of the counter, some when it is too late to wait."""
    rng = random.Random(seed)
    near, far = stage.near, stage.far
    near.fill(0, rng.randbytes(100 * BYTES))
    thresholds = [rng.randrange(1, 200) for _ in range(100)]
    armed: list[int] = []
    left = list(range(100))
    value = 0
    while left or value < 200:
        some = [left.pop() for _ in range(min(len(left), rng.randrange(30)))]
        stage.there.arm(*(operation(stage, gate, index, thresholds[index]) for index in some))
        armed += some
        value += rng.choice([0, 1, 1, 7, 30])
        gate.raise_to(value)
        reached = {index for index in armed if thresholds[index] <= value}
        for index in reached:
            lands(far.word(index), index + 1)
        stage.settle(gate)
        assert landed(stage, 100) == reached
        for index in reached:
            if index % 3 == 1:
                assert far.bytes_at(BYTES * index, BYTES) == near.bytes_at(BYTES * index, BYTES)
    near.all_final(range(100))
    assert near.fabric.statistics().done == near.fabric.statistics().armed


def test_a_lower_threshold_armed_after_many_higher_ones_fires_first(stage: Stage, gate: Gate) -> None:
    """The higher ones are more than any NIC holds."""
    there = stage.there
    there.arm(*(there.notify(tag, 0, 1, fires=(gate.counter, 1000 + tag)) for tag in range(700)))
    there.arm(there.notify(700, 1, 1, fires=(gate.counter, 5)))
    gate.raise_to(5)
    lands(stage.far.word(1), 1)
    stage.settle(gate)
    assert stage.far.word(0).load() == 0
    gate.raise_to(1700)
    stage.near.all_final(range(701))


def test_a_threshold_already_reached_fires_at_once(stage: Stage, gate: Gate) -> None:
    gate.raise_to(100)
    stage.settle(gate)
    stage.there.arm(*(stage.there.notify(tag, tag, 7, fires=(gate.counter, tag)) for tag in range(101)))
    for index in range(101):
        lands(stage.far.word(index), 7)
    assert {event.kind for event in stage.near.all_final(range(101)).values()} == {EventKind.DONE}


@pytest.mark.parametrize("base", [1 << 31, 1 << 32, REACHED_MAX])
def test_values_beyond_31_bits_are_compared_correctly(stage: Stage, gate: Gate, base: int) -> None:
    steps = (-2, -1, 0, 1, 5)
    there, far = stage.there, stage.far
    there.arm(*(there.notify(i, i, 1, fires=(gate.counter, base + step)) for i, step in enumerate(steps)))
    there.arm(there.notify(9, 9, 1, fires=(gate.counter, 1)))
    for i, step in enumerate((-3, *steps)):
        gate.raise_to(base + step)
        for index in range(i):
            lands(far.word(index), 1)
        stage.settle(gate)
        assert [far.word(index).load() for index in range(5)] == [1] * i + [0] * (5 - i)
    lands(far.word(9), 1)


def test_words_have_all_64_bits(stage: Stage, gate: Gate) -> None:
    if stage.backend.nic_counts:
        pytest.skip("a counter of the NIC has 48 bits")
    stage.there.arm(stage.there.notify(1, 1, 7, fires=(gate.counter, 1 << 63)))
    stage.there.arm(stage.there.notify(2, 2, 7, fires=(gate.counter, 5)))
    stage.settle(gate)
    gate.raise_to((1 << 63) - 1)
    lands(stage.far.word(2), 7)  # also if a NIC held it, whose counter has fewer bits
    stage.settle(gate)
    assert stage.far.word(1).load() == 0
    gate.raise_to(1 << 63)
    lands(stage.far.word(1), 7)


def test_a_decreased_word_fires_nothing_early(stage: Stage, gate: Gate) -> None:
    """Storing a lower value is wrong, and yet operations armed then wait for their threshold, and fire at it."""
    if stage.backend.nic_counts:
        pytest.skip("a doorbell only adds")
    gate.raise_to(100)
    stage.there.arm(stage.there.notify(0, 0, 1, fires=(gate.counter, 100)))
    lands(stage.far.word(0), 1)
    gate.raise_to(10)
    stage.there.arm(*(stage.there.notify(tag, tag, 1, fires=(gate.counter, 50 * tag)) for tag in (1, 3)))
    stage.settle()
    assert [stage.far.word(i).load() for i in (1, 3)] == [0, 0]
    gate.raise_to(50)
    lands(stage.far.word(1), 1)
    stage.settle()
    assert stage.far.word(3).load() == 0
    gate.raise_to(150)
    lands(stage.far.word(3), 1)
    stage.near.all_final([1, 3])
    stage.holds_nothing()


def test_many_counters_fire_only_their_own_operations(stage: Stage) -> None:
    gates = [stage.gate() for _ in range(40)]
    there, far = stage.there, stage.far
    there.arm(*(there.notify(i, i, 1, fires=(gates[i % 40].counter, 1 + i // 40)) for i in range(120)))
    expected: set[int] = set()
    for i in random.Random(4).sample(range(40), 40):
        gates[i].raise_to(2)
        expected |= {i, i + 40}
        for index in (i, i + 40):
            lands(far.word(index), 1)
        if i % 4 == 0:
            stage.settle()
            assert {j for j in range(120) if far.word(j).load()} == expected
    assert stage.near.fabric.statistics().waiting + stage.near.fabric.statistics().held == 40
    for gate in gates:
        gate.raise_to(3)
    stage.near.all_final(range(120))


def test_a_store_while_the_fabric_sleeps_fires(stage: Stage, gate: Gate) -> None:
    """Over and over, so that the store falls into every part of a nap."""
    for tag in range(60):
        stage.there.arm(stage.there.notify(tag, 0, tag + 1, fires=(gate.counter, tag + 1)))
        asleep = stage.near.fabric.statistics().sleeps
        if tag % 3 == 0:
            wait_until(lambda asleep=asleep: stage.near.fabric.statistics().sleeps > asleep + 2, "naps")  # type: ignore[misc]
        gate.raise_to(tag + 1)
        lands(stage.far.word(0), tag + 1)
