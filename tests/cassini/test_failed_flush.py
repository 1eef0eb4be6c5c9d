"""A flush that the NIC refuses: it still has all operations, and may fire those whose counter it moves itself."""

from __future__ import annotations

import os

import pytest

from nic_offload import fabric as fabric_module
from nic_offload.errors import FabricError, RegionBusy
from nic_offload.fabric import EventKind
from nic_offload.memory import allocate
from tests.cassini.suite import passes_on_cassini
from tests.conformance.backends import BACKENDS, Backend, Stage, each_once, lands, through
from tests.nic_offload.rig import PAGE, needs_provider

LENGTH, PUTS = 512, 10
WORDS, OWN = (backend for backend in BACKENDS if backend.provider == "cxi")

inside = pytest.mark.skipif(
    "SOFT_CASSINI_FLUSHES_FAIL" not in os.environ, reason="it runs in the other test's process"
)


@pytest.fixture(autouse=True)
def on_cassini(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("skipif"):
        needs_provider("cxi")


@inside
def test_what_was_taken_back_never_fires() -> None:
    with Stage(WORDS) as stage:
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


@inside
@pytest.mark.parametrize("backend", [WORDS, OWN], ids=lambda backend: backend.name)
def test_an_endpoint_stays_open_while_the_nic_has_its_operations(backend: Backend) -> None:
    with Stage(backend) as stage:
        gate, near, far, way = stage.gate(), stage.near, stage.far, through(stage.near, stage.far)
        way.arm(way.put(1, LENGTH, flag=(1, 1), fires=(gate.counter, 1)))
        stage.settle()
        assert near.fabric.statistics().held == 1
        with pytest.raises(FabricError, match="keeps operations"):
            way.endpoint.close()
        assert way.endpoint in near.fabric.endpoints
        assert near.fabric.statistics().held == int(backend.own_counters)
        way.arm(way.put(2, LENGTH, flag=(2, 1)))
        lands(far.word(2), 1)
        way.endpoint.close()
        gate.raise_to(1)
        stage.settle(gate)
        assert far.word(1).load() == 0
        assert near.fabric.statistics().held == 0


@inside
def test_an_operation_that_a_failed_close_left_fires_from_memory_that_is_kept() -> None:
    with Stage(OWN) as stage:
        gate, near, far, way = stage.gate(), stage.near, stage.far, through(stage.near, stage.far)
        block = os.urandom(LENGTH)
        near.fill(0, block)
        way.arm(way.put(1, LENGTH, flag=(1, 1), fires=(gate.counter, 1)))
        stage.settle()
        with pytest.raises(FabricError, match="keeps operations"):
            way.endpoint.close()
        with pytest.raises(RegionBusy):
            way.near.region.close()
        gate.raise_to(1)
        lands(far.word(1), 1)
        assert far.bytes_at(0, LENGTH) == block
        assert near.final(1).kind == EventKind.DONE
        way.endpoint.close()
        way.near.region.close()


@inside
def test_a_fabric_that_closes_while_the_nic_has_operations_keeps_their_memory() -> None:
    with Stage(OWN) as stage:
        gate, near, far, way = stage.gate(), stage.near, stage.far, stage.there
        block = os.urandom(LENGTH)
        near.fill(0, block)
        way.arm(way.put(1, LENGTH, flag=(1, 1), fires=(gate.counter, 1)))
        stage.settle()
        with pytest.raises(FabricError, match="keeps operations"):
            near.fabric.close()
        assert near.fabric.closed
        assert near.fabric in fabric_module._given_up
        with pytest.raises(BufferError):
            near.memory.close()
        gate.raise_to(1)
        lands(far.word(1), 1)
        assert far.bytes_at(0, LENGTH) == block
        near.memory = allocate(PAGE)  # closed with the stage


def test_a_flush_that_fails_leaves_no_operation_without_its_memory() -> None:
    passes_on_cassini("tests/cassini/test_failed_flush.py", timeout_s=60, FLUSHES_FAIL="1")
