"""Operations chained to a failed one never happen: its flag, its count, and everything waiting for that."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import CounterMove
from tests.conformance.backends import end_or_late, lands, refusal_deadline_ns, through
from tests.nic_offload.rig import needs_ends_of_their_own, wait_until

if TYPE_CHECKING:
    from nic_offload.counter import Counter
    from nic_offload.trigger import Operation
    from tests.conformance.backends import Gate, Stage
    from tests.nic_offload.rig import Way

CANARY = b"canary" * 500
OURS = {-errno.ECANCELED, -errno.ETIMEDOUT, -errno.EBADMSG, -errno.EPIPE}


def refused_operations(way: Way, tag: int, **more: Any) -> dict[str, Operation]:
    """Operations that the peer's side of the wire refuses."""
    bad = way.key ^ 0x5A5A5A
    more["deadline_ns"] = refusal_deadline_ns(way.near)
    far_off = way.length + (1 << 30)
    return {
        "key of a put": way.put(tag, 700, flag=(0, 7), target_key=bad, **more),
        "key of a long put": way.put(tag, 200_000, flag=(0, 7), target_key=bad, **more),
        "key of a flag": way.put(tag, 700, target=8192, flag=(0, 7), flag_key=bad, **more),
        "key of a get": way.get(tag, 700, target=8192, flag=(0, 7), source_key=bad, **more),
        "key of a notify": way.notify(tag, 0, 7, target_key=bad, **more),
        "range of a put": way.put(tag, 700, target=far_off, flag=(0, 7), **more),
        "range of a get": way.get(tag, 700, target=8192, source=far_off, flag=(0, 7), **more),
    }


REFUSED = (
    "key of a put",
    "key of a long put",
    "key of a flag",
    "key of a get",
    "key of a notify",
    "range of a put",
    "range of a get",
)


def fails(stage: Stage, way: Way, tag: int) -> None:
    """The operation has failed, if necessary because its endpoint was closed."""
    if end_or_late(stage.near, tag) == EventKind.LATE:
        way.endpoint.close()
    else:
        event = stage.near.final(tag)
        assert event.kind == EventKind.FAILED
        assert event.status not in OURS


def is_as_new_once_reset(stage: Stage, counter: Counter, index: int) -> None:
    counter.reset()
    assert not counter.failed
    assert counter.value() == 0
    stage.there.arm(stage.there.notify(900 + index, index, 1, fires=(counter, 2)))
    counter.add(1)
    stage.settle()
    assert stage.far.word(index).load() == 0
    counter.add(1)
    lands(stage.far.word(index), 1)
    stage.near.final(900 + index)


@pytest.mark.parametrize("what", REFUSED)
def test_operations_after_a_refused_one_never_happen(stage: Stage, gate: Gate, what: str) -> None:
    near, far, there = stage.near, stage.far, stage.there
    way = through(near, far)
    far.fill(0, CANARY)
    near.fill(0, b"x" * 300_000)
    first, second, third = stage.counter(), stage.counter(), stage.counter()
    bad = refused_operations(way, 1, fires=(gate.counter, 1), completion=first)[what]
    there.arm(
        there.notify(2, 1, 7, fires=(first, 1), completion=second),
        there.put(3, 100, flag=(2, 7), fires=(second, 1), completion=third),
        CounterMove(4, third, 9, trigger=first, threshold=1),
        there.notify(5, 3, 7, fires=(third, 1)),
        bad,
    )
    gate.raise_to(1)
    fails(stage, way, 1)
    finals = near.all_final([2, 3, 4, 5])
    assert {(finals[tag].kind, finals[tag].status) for tag in (2, 3, 4, 5)} == {
        (EventKind.FAILED, -errno.EPIPE)
    }
    assert len({finals[tag].value for tag in (2, 3, 4, 5)} - {0, errno.EPIPE}) == 1  # the cause, all along
    assert first.failed
    assert second.failed
    assert third.failed
    stage.settle(gate)
    assert far.bytes_at(0, len(CANARY)) == CANARY
    assert [far.word(index).load() for index in range(4)] == [0] * 4
    assert (first.value(), second.value(), third.value()) == (0, 0, 0)


def test_a_failed_counter_moves_no_more_until_it_is_reset(stage: Stage, gate: Gate) -> None:
    near, there = stage.near, stage.there
    way = through(near, stage.far)
    moved = stage.counter()
    bad = refused_operations(way, 1, fires=(gate.counter, 1), completion=moved)
    there.arm(
        bad["key of a put"],
        there.notify(2, 2, 7, fires=(moved, 1)),
        there.notify(3, 3, 7, fires=(gate.counter, 2), completion=moved),
    )
    with pytest.raises(FabricError, match=str(-errno.EBUSY)):
        moved.reset()
    gate.raise_to(1)
    fails(stage, way, 1)
    assert near.final(2).status == -errno.EPIPE
    assert moved.failed
    for move in (moved.add, moved.set):
        with pytest.raises(FabricError, match=str(-errno.EPIPE)):
            move(5)
    there.arm(there.notify(4, 4, 7, fires=(moved, 1)))  # what comes late to it fails as well
    assert near.final(4).status == -errno.EPIPE
    with pytest.raises(FabricError, match=str(-errno.EBUSY)):
        moved.reset()  # the third is to move it still
    gate.raise_to(2)
    assert near.final(3).kind == EventKind.DONE
    assert moved.failed
    assert [stage.far.word(index).load() for index in (2, 4)] == [0, 0]
    is_as_new_once_reset(stage, moved, 10)
    gate.raise_to(3)
    is_as_new_once_reset(stage, gate.counter, 11)


def test_of_ten_that_count_one_fails(stage: Stage, gate: Gate) -> None:
    """The other nine complete; an operation that waits for ten never fires."""
    near, far, there = stage.near, stage.far, stage.there
    way = through(near, far)
    moved = stage.counter()
    bad = refused_operations(way, 9, fires=(gate.counter, 1), completion=moved)
    there.arm(there.notify(50, 50, 7, fires=(moved, 10)), bad["key of a get"])
    there.arm(*(there.put(i, 99, flag=(i, 7), fires=(gate.counter, 1), completion=moved) for i in range(9)))
    gate.raise_to(1)
    fails(stage, way, 9)
    assert near.final(50).status == -errno.EPIPE
    near.all_final(range(9))
    assert {near.final(tag).kind for tag in range(9)} == {EventKind.DONE}
    for index in range(9):
        lands(far.word(index), 7)
    stage.settle(gate)
    assert far.word(50).load() == 0


def test_a_failure_does_not_affect_waits_for_other_counters(stage: Stage, gate: Gate) -> None:
    near, far, there = stage.near, stage.far, stage.there
    way = through(near, far)
    other, moved = stage.gate(), stage.counter()
    there.arm(*(there.notify(10 + i, 10 + i, 7, fires=(other.counter, 1 + i)) for i in range(20)))
    bad = refused_operations(way, 1, fires=(gate.counter, 1), completion=moved)
    there.arm(*(there.notify(40 + i, 40, 7, fires=(moved, 1 + i)) for i in range(20)), bad["key of a put"])
    gate.raise_to(1)
    fails(stage, way, 1)
    finals = near.all_final(range(40, 60))
    assert {finals[tag].status for tag in range(40, 60)} == {-errno.EPIPE}
    assert not other.counter.failed
    assert not gate.counter.failed
    other.raise_to(20)
    for i in range(20):
        lands(far.word(10 + i), 7)
    assert far.word(40).load() == 0


def test_the_key_of_a_closed_region_is_invalid(stage: Stage, gate: Gate) -> None:
    needs_ends_of_their_own(stage.backend.provider)
    near, far, there = stage.near, stage.far, stage.there
    way = through(near, far)
    way.fence()
    moved = stage.counter()
    fires, late_ns = (gate.counter, 1), refusal_deadline_ns(near)
    way.arm(way.put(1, 100, flag=(0, 7), fires=fires, completion=moved, deadline_ns=late_ns))
    there.arm(there.notify(2, 1, 7, fires=(moved, 1)))
    far.region.close()
    far.fill(0, CANARY)
    gate.raise_to(1)
    fails(stage, way, 1)
    wait_until(lambda: moved.failed, "the chain to fail")
    assert far.bytes_at(0, len(CANARY)) == CANARY
    assert (far.word(0).load(), far.word(1).load()) == (0, 0)
