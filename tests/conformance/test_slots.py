"""A NIC's slots are shared: while other processes take and release them, nothing is lost and everything arrives."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from nic_offload.fabric import EventKind
from tests.conformance.backends import Gate, Stage, each_once, lands, through
from tests.nic_offload.rig import Side, Way, wait_until

if TYPE_CHECKING:
    from tests.conformance.backends import Backend

PUTS = 252  # with a flag each, as many as there are slots for
TAKEN = 401  # an odd number is left: some put finds a slot for its first step alone
LENGTH = 512
HELD = 4
LONG_FLUSH_MS = 1000  # during which all puts leave
FLUSH_S = 0.2  # a close that takes so long has waited for a flush


def other_process(stage: Stage) -> tuple[Side, Gate, Way]:
    """Another fabric, whose operations take from the same slots."""
    side = Side(stage.provider, deferred_work=stage.backend.deferred_work, remote_read=True)
    return side, stage.gate(side), Way.between(side, stage.far)


def test_no_slot_is_lost_while_others_take_and_return_them(backend: Backend) -> None:
    with Stage(backend) as stage:
        other, other_gate, way = other_process(stage)
        try:
            gate, near, far = stage.gate(), stage.near, stage.far
            for turn in range(3):
                fires = (other_gate.counter, turn + 1)
                way.arm(*(way.notify(i, 511, 1, fires=fires) for i in range(TAKEN)))
                wait_until(
                    lambda: other.fabric.statistics().waiting + other.fabric.statistics().held >= TAKEN,
                    "held",
                )
                block = bytes([turn + 1]) * (PUTS * LENGTH)
                near.fill(0, block)
                tags = range(turn * PUTS, (turn + 1) * PUTS)
                stage.there.arm(
                    *(
                        stage.there.put(
                            tag, LENGTH, source=i * LENGTH, target=i * LENGTH, flag=(i, turn + 1),
                            fires=(gate.counter, turn + 1),
                        )
                        for i, tag in enumerate(tags)
                    )
                )  # fmt: skip
                stage.settle()
                other_gate.raise_to(turn + 1)
                assert near.fabric.statistics().slots_lost == 0
                gate.raise_to(turn + 1)
                for i in range(PUTS):
                    lands(far.word(i), turn + 1)
                assert far.bytes_at(0, len(block)) == block
                near.all_final(tags)
                each_once(near, tags, EventKind.DONE)
                other.wait(lambda t=turn: len(other.events) >= (t + 1) * TAKEN, "the others' end")  # type: ignore[misc]
            assert near.fabric.statistics().slots_lost == 0
            stage.holds_nothing()
        finally:
            near.fabric.close()
            other.close()


def test_closing_one_endpoint_does_not_stop_the_others(backend: Backend) -> None:
    """While the NIC returns a closed endpoint's operations, others' puts continue as before."""
    with Stage(backend) as stage:
        gate, near, far = stage.gate(), stage.near, stage.far
        way = through(near, far)
        way.arm(*(way.put(i, LENGTH, flag=(i, 1), fires=(gate.counter, 1)) for i in range(20)))
        stage.settle()
        took: list[float] = []

        def close() -> None:
            began = time.monotonic()
            way.endpoint.close()
            took.append(time.monotonic() - began)

        closing = threading.Thread(target=close)
        closing.start()
        longest, value = 0.0, 0
        while not took or not value:
            value += 1
            began = time.monotonic()
            stage.there.arm(stage.there.put(100 + value, LENGTH, source=4096, target=4096, flag=(100, value)))
            lands(far.word(100), value)
            longest = max(longest, time.monotonic() - began)
        closing.join()
        gate.raise_to(1)
        stage.settle(gate)
        assert [far.word(i).load() for i in range(20)] == [0] * 20
        assert took[0] < FLUSH_S or longest < took[0] / 2, (longest, took)


def test_closing_one_endpoint_delays_no_put_that_waits_for_a_word(backend: Backend) -> None:
    """Others' puts that the NIC holds leave as their word is stored to, also while it returns a closed one's."""
    if backend.nic_counts:
        pytest.skip("puts that wait for a counter of the NIC stand still during a flush")
    with Stage(backend) as stage:
        closed, held, near, far = stage.gate(), stage.gate(), stage.near, stage.far
        way = through(near, far)
        way.arm(*(way.put(i, LENGTH, flag=(i, 1), fires=(closed.counter, 1)) for i in range(20)))
        tags = range(100, 100 + HELD)
        there = stage.there
        there.arm(
            *(
                there.put(tag, LENGTH, flag=(tag, 1), fires=(held.counter, i + 1))
                for i, tag in enumerate(tags)
            )
        )
        stage.settle()
        if backend.provider == "cxi":
            assert near.fabric.statistics().held == 20 + HELD
        closing = threading.Thread(target=way.endpoint.close)
        closing.start()
        if backend.provider == "cxi":
            wait_until(lambda: near.fabric.statistics().held < 20 + HELD, "the flush to begin")
        for i, tag in enumerate(tags):
            held.raise_to(i + 1)
            lands(far.word(tag), 1)
        is_closing = closing.is_alive()
        closing.join()
        closed.raise_to(1)
        stage.settle(closed)
        each_once(near, tags, EventKind.DONE)
        assert [far.word(i).load() for i in range(20)] == [0] * 20
        assert near.fabric.statistics().slots_lost == 0
        if backend.provider == "cxi" and int(os.environ["SOFT_CASSINI_FLUSH_MS"]) >= LONG_FLUSH_MS:
            assert is_closing, "all of them left during the flush"


def flushes_for_a_second() -> bool:
    return int(os.environ.get("SOFT_CASSINI_FLUSH_MS", "0")) >= LONG_FLUSH_MS


def test_endpoints_that_close_one_after_another_cost_one_flush(backend: Backend) -> None:
    """After it, others' operations stay with the agent, which fires them, so that no further flush takes them back."""
    if not (backend.nic_counts and flushes_for_a_second()):
        pytest.skip("about a NIC's counters, and a flush of a second: see tests/cassini/test_whole_flush.py")
    with Stage(backend) as stage:
        closed, held, near, far = stage.gate(), stage.gate(), stage.near, stage.far
        ways = [through(near, far) for _ in range(3)]
        for i, way in enumerate(ways):
            way.arm(way.put(i, LENGTH, flag=(i, 1), fires=(closed.counter, 1)))
        tags = range(100, 100 + HELD)
        there = stage.there
        there.arm(
            *(
                there.put(tag, LENGTH, flag=(tag, 1), fires=(held.counter, i + 1))
                for i, tag in enumerate(tags)
            )
        )
        stage.settle()
        assert near.fabric.statistics().held == len(ways) + HELD
        taken_back = []
        for i, way in enumerate(ways):
            way.endpoint.close()
            stage.settle()
            taken_back.append(near.fabric.statistics().taken_back)
            held.raise_to(i + 1)
            lands(far.word(tags[i]), 1)
        assert taken_back == [taken_back[0]] * len(ways)
        held.raise_to(HELD)
        closed.raise_to(1)
        lands(far.word(tags[-1]), 1)
        stage.settle(closed)
        each_once(near, tags, EventKind.DONE)
        assert [far.word(i).load() for i in range(len(ways))] == [0] * len(ways)


def test_a_flush_delays_no_operation_of_another_fabric(backend: Backend) -> None:
    """An application that can't wait for this, even for a counter of the NIC's, opens another fabric."""
    if backend.provider == "cxi" and not flushes_for_a_second():
        pytest.skip("about a flush of a second: see tests/cassini/test_whole_flush.py")
    with Stage(backend) as stage:
        other, gate, way = other_process(stage)
        try:
            near, far = stage.near, stage.far
            closed, closing_way = stage.gate(), through(near, far)
            closing_way.arm(closing_way.put(1, LENGTH, flag=(1, 1), fires=(closed.counter, 1)))
            tags = range(100, 100 + HELD)
            way.arm(
                *(
                    way.put(tag, LENGTH, flag=(tag, 1), fires=(gate.counter, i + 1))
                    for i, tag in enumerate(tags)
                )
            )
            stage.settle()
            wait_until(
                lambda: other.fabric.statistics().waiting + other.fabric.statistics().held == HELD, "armed"
            )
            closing = threading.Thread(target=closing_way.endpoint.close)
            closing.start()
            for i, tag in enumerate(tags):
                gate.raise_to(i + 1)
                lands(far.word(tag), 1)
            is_closing = closing.is_alive()
            closing.join()
            other.all_final(tags)
            each_once(other, tags, EventKind.DONE)
            assert is_closing or backend.provider != "cxi", "all of them left during the flush"
            assert far.word(1).load() == 0
        finally:
            near.fabric.close()
            other.close()
