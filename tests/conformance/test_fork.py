"""A forked child has the memory but neither thread nor connections: its calls are refused, without effect."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nic_offload.fabric import EventKind
from nic_offload.trigger import CounterMove, arm
from tests.conformance.backends import lands
from tests.nic_offload.test_processes import run_forked

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.backends import Gate, Stage


def test_a_child_is_refused_everything_and_the_parent_continues(stage: Stage, gate: Gate) -> None:
    """With operations held, counters of both kinds open, and transfers in flight all the time."""
    near, far, there = stage.near, stage.far, stage.there
    spare, moved = stage.counter(), stage.counter()
    near.fill(0, b"parent's")
    there.arm(
        there.put(1, 8, flag=(0, 7), fires=(gate.counter, 3), completion=moved),
        there.notify(2, 1, 7, fires=(moved, 1)),
        there.get(3, 8, target=4096, fires=(moved, 1)),
    )
    put = there.put(10, 8, fires=(gate.counter, 1))
    actions: list[Callable[[], object]] = [
        lambda: arm(near.fabric, [put]),
        lambda: arm(near.fabric, [CounterMove(11, spare, 1)]),
        lambda: spare.add(1),
        lambda: spare.set(1),
        spare.reset,
        spare.value,
        spare.doorbell,
        spare.close,
        near.fabric.open_counter,
        near.fabric.flush,
        lambda: near.fabric.cancel([1]),
        near.fabric.reap,
        near.fabric.open_endpoint,
        lambda: near.fabric.register(bytearray(4096), endpoint=near.endpoint),
        near.endpoint.address,
        near.endpoint.close,
        near.region.close,
        near.fabric.close,
    ]
    assert [run_forked(action) for action in actions] == [0] * len(actions)
    assert not near.of(1)
    assert (spare.value(), spare.failed) == (0, False)
    gate.raise_to(3)
    lands(far.word(1), 7)
    assert far.bytes_at(0, 8) == b"parent's"
    near.all_final([1, 2, 3])
    assert near.bytes_at(4096, 8) == b"parent's"
    spare.add(2)
    assert spare.value() == 2
    stage.holds_nothing()


def test_a_child_that_merely_exits_destroys_nothing(stage: Stage, gate: Gate) -> None:
    near, there = stage.near, stage.there
    for turn in range(5):
        there.arm(
            *(there.notify(100 * turn + i, i, turn + 1, fires=(gate.counter, turn + 1)) for i in range(50))
        )
        child = os.fork()
        if child == 0:
            os._exit(0)
        gate.raise_to(turn + 1)
        os.waitpid(child, 0)
        finals = near.all_final(range(100 * turn, 100 * turn + 50))
        assert {event.kind for event in finals.values()} == {EventKind.DONE}
    stage.holds_nothing()
