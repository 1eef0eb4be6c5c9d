"""A peer that is stopped and continues: each operation happens once."""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING

import pytest

from nic_offload.fabric import EventKind
from tests.conformance.backends import end_or_late, lands, through
from tests.nic_offload.far import Far, way_to
from tests.nic_offload.rig import Side, after_ms, wait_until

if TYPE_CHECKING:
    from nic_offload.counter import Counter
    from tests.conformance.backends import Backend, Gate, Stage

LENGTH = 3000


def counts(counter: Counter, value: int) -> bool:
    return counter.value() == value


def test_a_cancel_withdraws_nothing_that_has_fired(backend: Backend, stage: Stage, gate: Gate) -> None:
    """Transfers are in flight to a stopped peer during an unrelated cancel. A second copy would carry other bytes."""
    near, there = stage.near, stage.there
    others = stage.gate()
    moved = [stage.counter() for _ in range(12)]
    near.fill(0, b"\x55" * 12 * LENGTH)
    with Far(backend.provider, 1 << 20) as far:
        way = way_to(Side.more(near), far.said)
        way.arm(way.notify(100, 0, 1, fires=(gate.counter, 1)))
        gate.raise_to(1)
        near.final(100)
        far.stop()
        for i in range(12):
            flag = (i, 7) if i % 2 else None
            fires = (gate.counter, 2)
            way.arm(
                way.put(
                    i,
                    LENGTH,
                    source=i * LENGTH,
                    target=i * LENGTH,
                    flag=flag,
                    fires=fires,
                    completion=moved[i],
                )
            )
        there.arm(*(there.notify(50 + i, i, 7, fires=(others.counter, 1)) for i in range(30)))
        gate.raise_to(2)
        stage.settle(gate)
        assert near.fabric.cancel([50]) == 1
        others.raise_to(1)
        for i in range(1, 30):
            lands(stage.far.word(i), 7)
        assert near.fabric.cancel(range(12)) == 0 or backend.provider == "shm"
        far.go_on()
        finals = near.all_final(range(12))
        done = [i for i in range(12) if finals[i].kind == EventKind.DONE]
        assert done
        near.fill(0, b"\xaa" * 12 * LENGTH)
        for i in done:
            wait_until(partial(counts, moved[i], 1), "it to be counted")
        way.fence()
        way.arm(
            way.get(200, 12 * LENGTH, target=500_000), way.get(201, 4096, source=way.length, target=600_000)
        )
        near.all_final([200, 201])
        for i in range(12):
            there_now = near.bytes_at(500_000 + i * LENGTH, LENGTH)
            assert there_now == (b"\x55" if i in done else b"\x00") * LENGTH
            assert moved[i].value() == (i in done)
            assert len(near.of(i)) == 1
            if i % 2:
                word = int.from_bytes(near.bytes_at(600_000 + 8 * i, 8), "little")
                assert word == (7 if i in done else 0)


def test_an_operation_that_failed_with_its_counter_never_fires(stage: Stage, gate: Gate) -> None:
    """Ten are awaited, one fails; an eleventh takes its place too late."""
    near, far, there = stage.near, stage.far, stage.there
    way = through(near, far)
    moved = stage.gate()
    bad = way.put(9, 700, target_key=way.key ^ 0x5A5A5A, deadline_ns=after_ms(300))
    there.arm(
        there.put(50, 100, flag=(50, 7), fires=(moved.counter, 10)),
        *(there.notify(i, i, 7, fires=(gate.counter, 1), completion=moved.counter) for i in range(9)),
        bad._replace(trigger=gate.counter, threshold=1, completion=moved.counter),
    )
    gate.raise_to(1)
    near.all_final(range(9))
    if end_or_late(near, 9) == EventKind.LATE:
        way.endpoint.close()
    assert near.final(50).status == -errno.EPIPE
    there.arm(*(there.notify(60 + i, 60, 7, completion=moved.counter) for i in range(3)))
    near.all_final(range(60, 63))
    moved.at = 9
    moved.raise_to(30)  # whoever can reach the word or the doorbell does so, failed or not
    stage.settle()
    stage.settle()
    assert far.word(50).load() == 0
    assert near.kinds(50) == [EventKind.FAILED]


@pytest.mark.parametrize("with_flag", [False, True])
def test_no_count_is_lost_while_others_are_cancelled(stage: Stage, gate: Gate, *, with_flag: bool) -> None:
    """Operations fire all the time, and others are cancelled in between."""
    near, there = stage.near, stage.there
    never = stage.gate()
    moved = stage.counter()
    total = 0
    for turn in range(8):
        tags = range(1000 * turn, 1000 * turn + 60)
        flag = (0, 7) if with_flag else None
        there.arm(
            *(
                there.put(
                    tag,
                    20_000,
                    target=i * 16,
                    flag=flag,
                    fires=(gate.counter, total + i + 1),
                    completion=moved,
                )
                for i, tag in enumerate(tags)
            ),
            there.notify(1000 * turn + 900, 1, 7, fires=(never.counter, 1)),
        )
        gate.raise_to(total + 20 + 5 * turn)
        assert near.fabric.cancel([1000 * turn + 900]) == 1
        total += 60
        gate.raise_to(total)
        near.all_final(tags)
        wait_until(partial(counts, moved, total), f"{total} to be counted, not {moved.value()}")
    stage.settle(gate)
    assert moved.value() == total
    assert {near.finals()[tag].kind for turn in range(8) for tag in range(1000 * turn, 1000 * turn + 60)} == {
        EventKind.DONE
    }
