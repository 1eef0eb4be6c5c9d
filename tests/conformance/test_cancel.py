"""Cancelling is exact: a counted operation is never sent and has its final event; all others continue."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from nic_offload.fabric import EventKind
from nic_offload.trigger import CounterMove
from tests.conformance.backends import each_once, lands

if TYPE_CHECKING:
    from tests.conformance.backends import Gate, Stage

CANCELLED = (EventKind.FAILED, -errno.ECANCELED)


def ends(stage: Stage, tag: int) -> list[tuple[int, int]]:
    return [(event.kind, event.status) for event in stage.near.of(tag)]


@pytest.mark.parametrize("count", [20, 700])
def test_a_cancelled_operation_never_fires(stage: Stage, gate: Gate, count: int) -> None:
    """Every third one, of as many as any NIC holds, and of more."""
    near, far, there = stage.near, stage.far, stage.there
    threshold = {tag: random.Random(tag).randrange(5, 10) for tag in range(count)}
    near.fill(0, b"\x01" * 8 * count)
    there.arm(
        *(
            there.put(tag, 8, source=8 * tag, target=8 * tag, fires=(gate.counter, threshold[tag]))
            for tag in range(count)
        )
    )
    gate.raise_to(4)
    stage.settle(gate)
    gone = set(range(0, count, 3))
    assert near.fabric.cancel(list(gone)) == len(gone)
    near.reap()
    assert {tag for tag in range(count) if ends(stage, tag) == [CANCELLED]} == gone
    gate.raise_to(10)
    near.all_final(range(count))
    stage.settle(gate)
    for tag in range(count):
        assert far.bytes_at(8 * tag, 8) == (bytes(8) if tag in gone else b"\x01" * 8)
        assert len(near.of(tag)) == 1
    assert near.fabric.statistics().cancelled == len(gone)
    assert near.fabric.cancel(range(count)) == 0
    stage.holds_nothing()


def test_flush_ends_everything_that_waits(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    others = stage.gate()
    there.arm(*(there.notify(tag, tag, 7, fires=(gate.counter, 1 + tag)) for tag in range(400)))
    there.arm(*(there.notify(400 + tag, 0, 9, fires=(others.counter, 1)) for tag in range(300)))
    there.arm(CounterMove(700, others.counter, 1, trigger=gate.counter, threshold=999))
    stage.settle()
    count = near.fabric.flush()
    near.reap()
    assert all(ends(stage, tag) == [CANCELLED] for tag in (*range(400), 700))
    # What was to move a counter failed it, and what waited for that is cancelled, or failed for its sake.
    assert all(
        ends(stage, tag) in ([CANCELLED], [(EventKind.FAILED, -errno.EPIPE)]) for tag in range(400, 700)
    )
    assert count == near.fabric.statistics().cancelled == sum(event[3:] == CANCELLED for event in near.events)
    gate.raise_to(2000)
    stage.settle(gate)
    assert not any(far.word(index).load() for index in range(400))
    stage.holds_nothing()
    assert near.fabric.flush() == 0
    there.arm(there.notify(1000, 1, 7, fires=(gate.counter, 2001)))
    gate.raise_to(2001)
    lands(far.word(1), 7)


def test_cancelling_a_link_fails_the_rest_of_the_chain(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    moved, further = stage.counter(), stage.counter()
    there.arm(
        there.notify(3, 3, 7, fires=(further, 1)),
        there.put(2, 50, flag=(2, 7), fires=(moved, 1), completion=further),
        there.put(1, 50, flag=(1, 7), fires=(gate.counter, 1), completion=moved),
        there.notify(4, 4, 7, fires=(gate.counter, 1)),
    )
    stage.settle()
    assert near.fabric.cancel([1]) == 1
    finals = near.all_final([1, 2, 3])
    assert [finals[tag].status for tag in (1, 2, 3)] == [-errno.ECANCELED, -errno.EPIPE, -errno.EPIPE]
    assert [finals[tag].value for tag in (2, 3)] == [errno.ECANCELED] * 2
    gate.raise_to(1)
    lands(far.word(4), 7)
    stage.settle(gate)
    assert [far.word(index).load() for index in (1, 2, 3)] == [0, 0, 0]
    moved.reset()
    further.reset()


def test_a_cancel_that_races_the_counter_is_exact(stage: Stage) -> None:
    """An operation counted as cancelled never lands, any other ends as done; none ends twice."""
    near, far, there = stage.near, stage.far, stage.there
    rng = random.Random(8)
    for turn in range(12):
        gate = stage.gate()
        tags = range(1000 * turn, 1000 * turn + 250)
        for index in range(250):
            far.word(index).store(0)
        there.arm(
            *(there.notify(tag, i, turn + 1, fires=(gate.counter, 1 + i % 5)) for i, tag in enumerate(tags))
        )
        if turn % 2:
            stage.settle()
        value = rng.randrange(1, 6)
        gate.raise_to(value)
        cancelled = near.fabric.cancel(tags)
        finals = near.all_final(tags)
        gone = {tag for tag in tags if finals[tag].status == -errno.ECANCELED}
        assert len(gone) == cancelled
        for i, tag in enumerate(tags):
            if tag not in gone:
                assert finals[tag].kind == EventKind.DONE
                assert 1 + i % 5 <= value
                lands(far.word(i), turn + 1)
        gate.raise_to(100)
        stage.settle(gate)
        for i, tag in enumerate(tags):
            assert far.word(i).load() == (0 if tag in gone else turn + 1)
            assert len(near.of(tag)) == 1
    stage.holds_nothing()


def test_a_depended_on_operation_survives_a_cancel(stage: Stage, gate: Gate) -> None:
    """A NIC may have to return all operations to cancel one: the others are handed over again, and fire once."""
    near, far, there = stage.near, stage.far, stage.there
    moved = stage.counter()
    near.fill(0, b"y" * 4096)
    there.arm(
        *(
            there.put(tag, 40, source=tag, target=40 * tag, flag=(tag, 7), fires=(gate.counter, tag + 1))
            for tag in range(100)
        ),
        *(there.notify(tag, tag, 7, fires=(gate.counter, 50), completion=moved) for tag in range(100, 150)),
        there.notify(200, 200, 7, fires=(moved, 50)),
    )
    cancels = 5 if stage.provider == "cxi" else 30  # each of which is a flush of the NIC
    there.arm(*(there.notify(tag, 300, 7, fires=(gate.counter, 60)) for tag in range(300, 300 + cancels)))
    for tag in range(300, 300 + cancels):
        assert near.fabric.cancel([tag]) == 1
        gate.raise_to(tag - 299)
    for value in (49, 50, 100):
        gate.raise_to(value)
        stage.settle(gate)
    lands(far.word(200), 7)
    near.all_final([*range(150), 200])
    each_once(near, range(150))
    assert moved.value() == 50
    assert far.bytes_at(0, 4000) == b"y" * 4000
    assert [far.word(tag).load() for tag in range(150)] == [7] * 150
    assert far.word(300).load() == 0
    stage.holds_nothing()
