"""Bounded queues, and any number of operations through them; a counter that is armed again and again."""

from __future__ import annotations

import errno
import random
from functools import partial
from typing import TYPE_CHECKING

import pytest

from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from tests.conformance.backends import Stage, each_once, lands
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nic_offload.fabric import Event
    from nic_offload.trigger import Operation, TriggeredPut
    from tests.conformance.backends import Backend, Gate

QUEUE = 4096
BATCH = 512


def armed(stage: Stage, operations: Sequence[Operation]) -> bool:
    """Arm operations; returns whether there was room."""
    try:
        stage.there.arm(*operations)
    except FabricError as error:
        if str(-errno.EAGAIN) not in str(error):
            raise
        return False
    return True


def more_than(events: list[Event], count: int) -> bool:
    return len(events) > count


def eight_bytes(stage: Stage, gate: Gate, tags: range) -> list[TriggeredPut]:
    """Puts of eight bytes each, each fired at its own count."""
    first = stage.there.put(tags[0], 8, fires=(gate.counter, 1))
    source, target = first.source, first.target
    return [
        first._replace(tag=tag, source=source + 8 * tag, target=target + 8 * tag, threshold=tag + 1)
        for tag in tags
    ]


def test_many_puts_wait_for_one_counter_in_a_bounded_queue(backend: Backend) -> None:
    """The counter is far ahead of some, and far behind others; every one is executed once, and has its bytes."""
    rng = random.Random(9)
    puts = 100_000 if backend.provider == "net" else 6 * QUEUE
    with Stage(backend, 1 << 20, work_max=QUEUE) as stage:
        gate, near = stage.gate(), stage.near
        near.fill(0, rng.randbytes(8 * puts))
        next_tag, refused = 0, 0
        while next_tag < puts:
            tags = range(next_tag, min(puts, next_tag + BATCH))
            if armed(stage, eight_bytes(stage, gate, tags)):
                next_tag = tags.stop
                if rng.random() < 0.3:
                    gate.raise_to(max(gate.at, rng.randrange(next_tag + 1)))
                continue
            refused += 1
            gate.raise_to(next_tag)
            near.wait(partial(more_than, near.events, len(near.events) + BATCH - 1), "room for a batch")
        gate.raise_to(puts)
        near.wait(lambda: len(near.events) >= puts, "all of them", 60)
        each_once(near, range(puts))
        stage.holds_nothing()
        stage.settle()
        assert stage.far.bytes_at(0, 8 * puts) == near.bytes_at(0, 8 * puts)
        now = near.fabric.statistics()
        assert now.done == now.armed == puts + 2  # and two fences
        assert now.put_bytes == 8 * puts
        assert refused
        assert (now.handed > 0) == backend.deferred_work


def test_a_full_queue_fires_at_one_store(backend: Backend) -> None:
    """More than any NIC holds, and more than its rings take; only the excess is refused."""
    with Stage(backend, work_max=QUEUE) as stage:
        gate, near = stage.gate(), stage.near
        near.fill(0, random.Random(10).randbytes(8 * QUEUE))
        for start in range(0, QUEUE, BATCH):
            assert armed(stage, eight_bytes(stage, gate, range(start, start + BATCH)))
        assert not armed(stage, eight_bytes(stage, gate, range(QUEUE, QUEUE + 1)))
        now = near.fabric.statistics()
        wait_until(lambda: near.fabric.statistics().armed == QUEUE, "the inbox to be taken")
        assert now.done == 0
        gate.raise_to(QUEUE)
        near.wait(lambda: len(near.events) >= QUEUE, "all of them")
        each_once(near, range(QUEUE))
        stage.holds_nothing()
        stage.settle()
        assert stage.far.bytes_at(0, 8 * QUEUE) == near.bytes_at(0, 8 * QUEUE)


def test_operations_beyond_a_full_nic_are_not_delayed(backend: Backend) -> None:
    """Thousands wait for a counter that never moves; another counter's are served."""
    with Stage(backend, work_max=QUEUE) as stage:
        never, gate = stage.gate(), stage.gate()
        stage.there.arm(*(stage.there.notify(tag, 0, 9, fires=(never.counter, 1)) for tag in range(3000)))
        for turn in range(50):
            tag = 10_000 + turn
            stage.there.arm(stage.there.put(tag, 64, flag=(1, turn + 1), fires=(gate.counter, turn + 1)))
            gate.raise_to(turn + 1)
            lands(stage.far.word(1), turn + 1)
        now = stage.near.fabric.statistics()
        assert now.waiting + now.held == 3000
        assert stage.near.fabric.flush() == 3000
        assert stage.far.word(0).load() == 0
        stage.near.all_final(range(10_000, 10_050))
        stage.holds_nothing()


def test_a_refused_batch_leaves_nothing_behind(backend: Backend) -> None:
    with Stage(backend, work_max=1024) as stage:
        gate, moved = stage.gate(), stage.counter()
        there = stage.there
        there.arm(*(there.notify(tag, 0, 7, fires=(gate.counter, 1)) for tag in range(1020)))
        more = [there.put(2000 + i, 8, fires=(gate.counter, 1), completion=moved) for i in range(5)]
        assert not armed(stage, more)
        moved.reset()  # nothing is to move it
        odd = there.notify(3000, 0, 7, fires=(gate.counter, 1), completion=moved)._replace(
            target=there.word_target(0) + 1
        )
        with pytest.raises(FabricError, match=str(-errno.EINVAL)):
            there.arm(more[0], odd)
        moved.reset()
        gate.raise_to(1)
        stage.near.all_final(range(1020))
        assert {event.tag for event in stage.near.events} == set(range(1020))
        stage.near.region.close()


def test_a_counter_is_rearmed_a_hundred_times(stage: Stage, gate: Gate) -> None:
    """With the next thresholds each time, sometimes from zero. Every other time the NIC has them before they fire."""
    near, far, there = stage.near, stage.far, stage.there
    rng = random.Random(11)
    moved = stage.counter()
    base = counted = 0
    for turn in range(100):
        if turn in (10, 25, 60):
            gate.counter.reset()
            moved.reset()
            gate.at = base = counted = 0
        count = rng.randrange(1, 12)
        tags = range(100 * turn, 100 * turn + count)
        block = rng.randbytes(64 * count)
        near.fill(0, block)
        there.arm(
            *(
                there.put(
                    tag,
                    64,
                    source=64 * i,
                    target=64 * i,
                    flag=(i, turn + 1),
                    fires=(gate.counter, base + rng.randrange(1, 4)),
                    completion=moved,
                )
                for i, tag in enumerate(tags)
            ),
            there.notify(100 * turn + 99, 99, turn + 1, fires=(moved, counted + count)),
        )
        if turn % 2:
            there.fence()
        base, counted = base + 3, counted + count
        for value in range(base - 2, base + 1):
            gate.raise_to(value)
        lands(far.word(99), turn + 1)
        assert far.bytes_at(0, 64 * count) == block
        assert [far.word(i).load() for i in range(count)] == [turn + 1] * count
        near.all_final([*tags, 100 * turn + 99])
    assert {event.kind for event in near.events} == {EventKind.DONE}
    assert len(near.events) == len(near.finals())
    stage.holds_nothing()
    now = near.fabric.statistics()
    assert (now.handed > 100) == stage.backend.deferred_work
    assert now.done == now.armed == now.fired
    assert (now.failed, now.cancelled, now.expired, now.late, now.slots_lost) == (0, 0, 0, 0, 0)
