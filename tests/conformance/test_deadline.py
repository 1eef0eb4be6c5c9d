"""A deadline ends operations that were not sent; one that can't be recalled is late, and ends with its endpoint."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from nic_offload.fabric import EventKind
from tests.conformance.backends import end_or_late, lands, through
from tests.nic_offload.far import Far, way_to
from tests.nic_offload.rig import Side, after_ms, wait_until

if TYPE_CHECKING:
    from tests.conformance.backends import Backend, Gate, Stage

MS_NS = 1_000_000
EXPIRED = (EventKind.FAILED, -errno.ETIMEDOUT)


def test_an_operation_that_never_fired_ends_at_its_deadline(stage: Stage, gate: Gate) -> None:
    """Or late, where only a flush gets it back from the NIC: then its endpoint's close ends it. It never fires."""
    near, far = stage.near, stage.far
    way = through(near, far)
    near.fill(0, b"never")
    deadline_ns = after_ms(40)
    fires = (gate.counter, 5)
    way.arm(
        *(way.put(tag, 5, flag=(tag, 7), fires=fires, deadline_ns=deadline_ns) for tag in range(300)),
        *(way.get(tag, 5, target=9000, fires=fires, deadline_ns=deadline_ns) for tag in range(300, 310)),
    )
    ended = [end_or_late(near, tag) for tag in range(310)]
    if EventKind.LATE in ended:
        assert stage.provider == "cxi"
        way.endpoint.close()
    for tag, kind in enumerate(ended):
        (event,) = near.of(tag)
        assert event.time_ns >= deadline_ns
        assert kind == EventKind.LATE or (event.kind, event.status) == EXPIRED
    assert near.fabric.statistics().late == ended.count(EventKind.LATE)
    gate.raise_to(100)
    stage.settle(gate)
    assert far.bytes_at(0, 5) == bytes(5)
    assert not any(far.word(tag).load() for tag in range(300))
    assert len(near.events) == 310 + 2  # and two fences


def test_deadlines_end_only_their_own_operations(stage: Stage, gate: Gate) -> None:
    """Some have none, some have one far away, some are sent in time."""
    near, far, there = stage.near, stage.far, stage.there
    soon_ns, later_ns = after_ms(60), after_ms(60_000)
    fires = (gate.counter, 5)
    there.arm(
        *(
            there.notify(tag, tag, 7, fires=fires, deadline_ns=(soon_ns, later_ns, 0)[tag % 3])
            for tag in range(90)
        ),
        *(there.notify(tag, tag, 7, fires=(gate.counter, 1), deadline_ns=later_ns) for tag in range(90, 120)),
    )
    gate.raise_to(1)
    soon = range(0, 90, 3)
    ended = {tag: end_or_late(near, tag) for tag in soon}
    gate.raise_to(5)
    for tag in range(120):
        if tag not in ended:
            lands(far.word(tag), 7)
    near.all_final(range(120))
    stage.settle(gate)
    for tag, kind in ended.items():
        if kind == EventKind.FAILED:
            assert near.final(tag).status == -errno.ETIMEDOUT
            assert far.word(tag).load() == 0
    assert all(
        near.kinds(tag) in ([EventKind.DONE], [ended.get(tag)], [EventKind.LATE, EventKind.DONE])
        for tag in range(120)
    )
    stage.holds_nothing()


def test_a_deadline_breaks_the_chain(stage: Stage, gate: Gate) -> None:
    near, far = stage.near, stage.far
    way = through(near, far)
    moved = stage.counter()
    way.arm(way.put(1, 99, flag=(1, 7), fires=(gate.counter, 1), completion=moved, deadline_ns=after_ms(40)))
    stage.there.arm(stage.there.notify(2, 2, 7, fires=(moved, 1)))
    if end_or_late(near, 1) == EventKind.LATE:
        way.endpoint.close()
    event = near.final(2)
    assert (event.kind, event.status) == (EventKind.FAILED, -errno.EPIPE)
    assert event.value in (errno.ETIMEDOUT, errno.ECANCELED)
    gate.raise_to(1)
    stage.settle(gate)
    assert (far.word(1).load(), far.word(2).load()) == (0, 0)


def test_an_expired_deadline_before_arming_lets_nothing_be_sent(stage: Stage, gate: Gate) -> None:
    gate.raise_to(9)
    stage.settle(gate)
    over_ns = after_ms(-1)
    there = stage.there
    there.arm(*(there.notify(tag, tag, 7, fires=(gate.counter, 1), deadline_ns=over_ns) for tag in range(50)))
    finals = stage.near.all_final(range(50))
    stage.settle(gate)
    assert {(finals[tag].kind, finals[tag].status) for tag in range(50)} == {EXPIRED}
    assert not any(stage.far.word(tag).load() for tag in range(50))
    stage.holds_nothing()


def test_operations_to_a_stopped_peer_are_late_and_end_when_it_continues(
    backend: Backend, stage: Stage, gate: Gate
) -> None:
    """What the provider had no room for meanwhile was not sent, and has ended."""
    near = stage.near
    moved = [stage.counter() for _ in range(11)]
    with Far(backend.provider, 1 << 20) as far:
        way = way_to(Side.more(near), far.said)
        way.arm(way.notify(0, 0, 1, fires=(gate.counter, 1), completion=moved[0]))  # makes the connection
        gate.raise_to(1)
        near.final(0)
        far.stop()
        deadline_ns = after_ms(300)
        way.arm(
            *(
                way.notify(tag, 1, 7, fires=(gate.counter, 2), completion=moved[tag], deadline_ns=deadline_ns)
                for tag in range(1, 11)
            )
        )
        gate.raise_to(2)
        ended = {tag: end_or_late(near, tag) for tag in range(1, 11)}
        assert all(near.of(tag)[0].time_ns >= deadline_ns for tag in ended)
        far.go_on()
        near.all_final(ended)
        late = [tag for tag, kind in ended.items() if kind == EventKind.LATE]
        assert late
        for tag in ended:
            if tag in late:
                assert near.kinds(tag) == [EventKind.LATE, EventKind.DONE]
                wait_until(lambda tag=tag: moved[tag].value() == 1, "it to be counted")  # type: ignore[misc]
            else:
                assert [(event.kind, event.status) for event in near.of(tag)] == [EXPIRED]
                assert moved[tag].failed
        way.endpoint.close()
    assert near.fabric.statistics().late == len(late)


def test_late_operations_end_with_their_endpoint(backend: Backend, stage: Stage, gate: Gate) -> None:
    """A peer that is stopped for good: the others are served, and closing the endpoint ends the chain as well."""
    near, there = stage.near, stage.there
    moved = stage.counter()
    with Far(backend.provider, 1 << 20) as far:
        way = way_to(Side.more(near), far.said)
        way.fence()
        far.stop()
        fires, deadline_ns = (gate.counter, 1), after_ms(200)
        way.arm(
            *(
                way.put(tag, 3000, fires=fires, completion=moved, deadline_ns=deadline_ns + tag * MS_NS)
                for tag in range(20)  # one after the other, and each is told of once
            )
        )
        there.arm(there.notify(50, 50, 7, fires=(moved, 1)))
        gate.raise_to(1)
        assert EventKind.LATE in {end_or_late(near, tag) for tag in range(20)}
        there.arm(there.notify(60, 60, 7, fires=(gate.counter, 1)))
        lands(stage.far.word(60), 7)
        way.endpoint.close()
        event = near.final(50)
        assert (event.kind, event.status) == (EventKind.FAILED, -errno.EPIPE)
        assert event.value not in (0, errno.EPIPE)
        assert stage.far.word(50).load() == 0
        wait_until(lambda: near.fabric.statistics().in_flight == 0, "an empty wire")
        for tag in range(20):  # the provider may have given some back before the endpoint went
            assert near.kinds(tag) in (
                [EventKind.LATE],
                [EventKind.LATE, EventKind.FAILED],
                [EventKind.FAILED],
            )
        near.region.close()
