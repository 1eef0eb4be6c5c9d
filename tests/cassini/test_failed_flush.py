"""A flush that the NIC refuses: operations that were taken back for it never fire at the NIC, which still has them."""

from __future__ import annotations

import os

import pytest

from nic_offload.fabric import EventKind
from tests.cassini.suite import passes_on_cassini
from tests.conformance.backends import Backend, Stage, each_once, lands
from tests.nic_offload.rig import needs_provider

LENGTH, PUTS = 512, 10
BACKEND = Backend("cxi", "cxi", deferred_work=True, own_counters=False)


@pytest.mark.skipif(
    "SOFT_CASSINI_FLUSHES_FAIL" not in os.environ, reason="it runs in the other test's process"
)
def test_inside() -> None:
    needs_provider("cxi")
    with Stage(BACKEND) as stage:
        gate, near, far, there = stage.gate(), stage.near, stage.far, stage.there
        there.arm(*(there.put(i, LENGTH, flag=(i, 1), fires=(gate.counter, 1)) for i in range(PUTS)))
        stage.settle()
        assert near.fabric.statistics().held == PUTS
        assert near.fabric.flush() == PUTS, "all are cancelled, though the NIC still has them"
        gate.raise_to(1)
        there.arm(there.put(100, LENGTH, flag=(100, 1), fires=(gate.counter, 2)))
        gate.raise_to(2)
        lands(far.word(100), 1)
        stage.settle()
        assert [far.word(i).load() for i in range(PUTS)] == [0] * PUTS
        assert near.fabric.statistics().slots_lost == PUTS
        near.fabric.flush()
        there.arm(there.put(101, LENGTH, flag=(101, 1), fires=(gate.counter, 3)))
        stage.settle()
        assert near.fabric.statistics().held == 1, "the next flush succeeds, and the NIC is used again"
        gate.raise_to(3)
        lands(far.word(101), 1)
        stage.settle()
        each_once(near, range(100, 102), EventKind.DONE)
        assert [far.word(i).load() for i in range(PUTS)] == [0] * PUTS
        assert near.fabric.statistics().slots_lost == 0


def test_operations_that_a_failed_flush_has_not_dropped_never_fire() -> None:
    passes_on_cassini("tests/cassini/test_failed_flush.py::test_inside", timeout_s=60, FLUSHES_FAIL="1")
