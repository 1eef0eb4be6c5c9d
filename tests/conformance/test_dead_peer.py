"""A peer that dies before or during operations to it: they end or are late, and others are unaffected."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from nic_offload.fabric import EventKind
from tests.conformance.backends import busy_with, end_or_late, lands, through
from tests.nic_offload.far import Far, way_to
from tests.nic_offload.rig import Side, Way, after_ms, needs_ends_of_their_own, wait_until

if TYPE_CHECKING:
    from tests.conformance.backends import Backend, Gate, Stage

NOTHING_WENT_OUT = {-errno.ECANCELED, -errno.ETIMEDOUT, -errno.EBADMSG}


def serves_others(stage: Stage, gate: Gate, tag: int) -> None:
    """The same counter still fires operations to other peers, and so do new ones."""
    stage.there.arm(stage.there.notify(tag, 400, tag, fires=(gate.counter, gate.at + 1)))
    gate.raise_to(gate.at + 1)
    lands(stage.far.word(400), tag)
    fresh = stage.gate()
    stage.there.arm(stage.there.put(tag + 1, 64, flag=(401, tag), fires=(fresh.counter, 1)))
    fresh.raise_to(1)
    lands(stage.far.word(401), tag)
    stage.near.all_final([tag, tag + 1])


def all_over(stage: Stage, way: Way, tags: range) -> None:
    """Each operation has ended, or ends with the endpoint; a late one is never reported as done."""
    near = stage.near
    for tag in tags:
        end_or_late(near, tag)
    way.endpoint.close()
    wait_until(lambda: near.fabric.statistics().in_flight == 0, "an empty wire")
    near.reap()
    for tag in tags:
        finals = [kind for kind in near.kinds(tag) if kind != EventKind.LATE]
        assert len(finals) <= 1
    wait_until(lambda: busy_with(near) == 0, "all that waited for those to have failed")


@pytest.mark.parametrize("connected", [False, True])
def test_killed_before_firing(backend: Backend, stage: Stage, gate: Gate, *, connected: bool) -> None:
    near = stage.near
    moved = stage.counter()
    with Far(backend.provider, 1 << 20) as far:
        way = way_to(Side.more(near), far.said)
        if connected:
            way.fence()
        deadline_ns = after_ms(250)
        fires = (gate.counter, 1)
        way.arm(
            *(way.put(tag, 5000, flag=(0, 7), fires=fires, deadline_ns=deadline_ns) for tag in range(10)),
            *(way.get(tag, 5000, fires=fires, deadline_ns=deadline_ns) for tag in range(10, 14)),
            way.notify(14, 1, 7, fires=fires, deadline_ns=deadline_ns, completion=moved),
        )
        stage.there.arm(stage.there.notify(20, 20, 7, fires=(moved, 1)))
        far.kill()
        gate.raise_to(1)
        serves_others(stage, gate, 100)
        all_over(stage, way, range(15))
    event = near.final(20)
    assert (event.kind, event.status) == (EventKind.FAILED, -errno.EPIPE)
    assert not [tag for tag in range(10, 15) if EventKind.DONE in near.kinds(tag)]
    assert stage.far.word(20).load() == 0
    moved.reset()
    serves_others(stage, gate, 200)
    near.region.close()


def test_killed_in_a_stream(backend: Backend, stage: Stage, gate: Gate) -> None:
    """Whether a put in flight arrived is unknown, but never reported as not sent."""
    near = stage.near
    near.fill(0, os.urandom(60_000))
    with Far(backend.provider, 8 << 20) as far:
        way = way_to(Side.more(near), far.said)
        deadline_ns = after_ms(800)
        count = 200
        way.arm(
            *(
                way.put(
                    tag,
                    60_000,
                    target=tag % 100 * 60_000,
                    flag=(0, tag + 1),
                    fires=(gate.counter, tag + 1),
                    deadline_ns=deadline_ns,
                )
                for tag in range(count)
            )
        )
        gate.raise_to(count // 2)
        near.wait(lambda: len(near.finals()) >= 20, "the first puts")
        far.kill()
        gate.raise_to(count)
        serves_others(stage, gate, 1000)
        all_over(stage, way, range(count))
    for tag in range(count // 2):
        assert near.kinds(tag)[0] in (EventKind.DONE, EventKind.FAILED, EventKind.LATE)
    serves_others(stage, gate, 1100)
    near.region.close()


def test_the_peers_endpoint_is_closed_before_firing(stage: Stage, gate: Gate) -> None:
    needs_ends_of_their_own(stage.backend.provider)
    near, far = stage.near, stage.far
    gone = Side.more(far)
    way = Way.between(Side.more(near), gone)
    way.fence()
    moved = stage.counter()
    fires, deadline_ns = (gate.counter, 1), after_ms(300)
    way.arm(
        *(
            way.put(tag, 3000, flag=(0, 7), fires=fires, completion=moved, deadline_ns=deadline_ns)
            for tag in range(10)
        )
    )
    stage.there.arm(stage.there.notify(20, 20, 7, fires=(moved, 10)))
    gone.endpoint.close()
    far.fill(0, bytes(3000))
    gate.raise_to(1)
    serves_others(stage, gate, 100)
    all_over(stage, way, range(10))
    assert near.final(20).status == -errno.EPIPE
    assert far.bytes_at(0, 3000) == bytes(3000)
    assert (far.word(0).load(), far.word(20).load()) == (0, 0)
    moved.reset()


def test_one_dead_peer_after_the_other_exhausts_nothing(backend: Backend, stage: Stage, gate: Gate) -> None:
    """Whatever each leaves behind at a NIC, later operations are served, and no slower than by the agent."""
    near = stage.near
    for turn in range(2):
        with Far(backend.provider, 1 << 20) as far:
            way = way_to(through(near, stage.far).near, far.said)
            way.fence()
            far.kill()
        deadline_ns = after_ms(250)
        tags = range(1000 * turn, 1000 * turn + 300)
        way.arm(
            *(
                way.put(tag, 64, flag=(0, 7), fires=(gate.counter, gate.at + 1), deadline_ns=deadline_ns)
                for tag in tags
            )
        )
        gate.raise_to(gate.at + 1)
        all_over(stage, way, tags)
        serves_others(stage, gate, 10_000 + 10 * turn)
    count = 600
    stage.there.arm(
        *(stage.there.notify(20_000 + i, i % 300, 5, fires=(gate.counter, gate.at + 1)) for i in range(count))
    )
    gate.raise_to(gate.at + 1)
    near.all_final(range(20_000, 20_000 + count))
