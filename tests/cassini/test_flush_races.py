"""Operations that fire between the moment at which a flush begins and the moment at which the NIC drops what it has.

The software Cassini holds the flush up in between, and holds back writes that have fired. So each race happens each
time.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from tests.cassini.suite import INSIDE, passes_on_cassini
from tests.conformance.backends import BACKENDS, Stage, each_once, lands, through
from tests.nic_offload.rig import needs_provider, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

(OWN,) = (backend for backend in BACKENDS if backend.provider == "cxi" and backend.own_counters)
LENGTH, WORD = 512, 8
REST_S = 90.0  # after a flush that a busy machine made long, the NIC gets nothing for nine times as long

inside = pytest.mark.skipif(INSIDE not in os.environ, reason="it runs in the other test's process")


class Race:
    """Two sides, of which one has operations at its NIC."""

    def __init__(self, stage: Stage) -> None:
        self.near, self.far, self.there = stage.near, stage.far, stage.there
        self.gate, self._never = stage.gate(), stage.gate()
        self._stage, self._closed = stage, through(stage.near, stage.far)
        self._nic: Any = ctypes.CDLL(os.environ["TRIGGERKV_LIBFABRIC"])

    def arm(self, *tags: int) -> None:
        """Hand over puts with these tags, which are also their flags' words and their thresholds."""
        held = self.held
        self.there.arm(
            *(
                self.there.put(
                    tag, LENGTH, target=tag * LENGTH, flag=(tag, 1), fires=(self.gate.counter, tag)
                )
                for tag in tags
            )
        )
        wait_until(lambda: self.held == held + len(tags), "the NIC to have them", REST_S)

    @property
    def held(self) -> int:
        return self.near.fabric.statistics().held

    def fire(self, value: int, *, holding: int) -> None:
        """Let the NIC fire, and hold back a write of up to this length."""
        before = self._nic.soft_cassini_writes_held()
        self._nic.soft_cassini_hold_writes(ctypes.c_size_t(holding))
        self.gate.raise_to(value)
        wait_until(lambda: self._nic.soft_cassini_writes_held() == before + 1, "a write to be held back")
        self._nic.soft_cassini_hold_writes(ctypes.c_size_t(0))

    def release(self) -> None:
        """Let go the writes that are held back, and wait for what follows from them."""
        self._nic.soft_cassini_release_writes()
        self._stage.settle()

    def ends(self, last: int) -> None:
        """All puts up to this one end, each once."""
        self.gate.raise_to(last)
        for tag in range(1, last + 1):
            lands(self.far.word(tag), 1)
        self.near.all_final(range(1, last + 1))
        each_once(self.near, range(1, last + 1))

    @contextmanager
    def flush(self) -> Iterator[None]:
        """Between the begin of a flush, for an endpoint that closes, and what the NIC drops."""
        held = self.held
        self._closed.arm(self._closed.put(500, LENGTH, flag=(500, 1), fires=(self._never.counter, 1)))
        wait_until(lambda: self.held == held + 1, "the NIC to have it")
        self._nic.soft_cassini_hold_flushes(1)
        closing = threading.Thread(target=self._close)
        closing.start()
        try:
            wait_until(lambda: self._nic.soft_cassini_flushes_held() == 1, "the flush to begin")
            yield
        finally:
            self._nic.soft_cassini_hold_flushes(0)
            closing.join()
        if not self.near.fabric.closed:
            self._stage.settle()

    def _close(self) -> None:
        with suppress(FabricError):  # the fabric may be closed meanwhile
            self._closed.endpoint.close()


@pytest.fixture
def race() -> Iterator[Race]:
    needs_provider("cxi")
    with Stage(OWN) as stage:
        yield Race(stage)


@inside
def test_a_flag_that_arrives_late_ends_no_other_operation(race: Race) -> None:
    """The bytes arrive during the flush, and the NIC puts their flag; as far as known, it has dropped it."""
    if os.environ["SOFT_CASSINI_ERRORS_COUNT"] == "1":
        pytest.skip("the NIC gets no flags")
    race.arm(1)
    with race.flush():
        race.fire(1, holding=WORD)
    lands(race.far.word(1), 1)
    assert race.near.final(1).kind == EventKind.DONE
    race.arm(2, 3)  # in the slots that are free
    race.release()
    assert (race.near.kinds(2), race.near.kinds(3), race.held) == ([], [], 2)
    race.ends(3)


@inside
def test_bytes_that_arrive_late_let_no_other_flag_go(race: Race) -> None:
    """It fires during the flush; as far as known, it was dropped, and our thread sends it."""
    race.arm(1)
    with race.flush():
        race.fire(1, holding=LENGTH)
    lands(race.far.word(1), 1)
    assert race.near.final(1).kind == EventKind.DONE
    race.arm(2, 3)  # in the slots that are free
    race.release()
    assert [race.far.word(tag).load() for tag in (2, 3)] == [0, 0]
    assert (race.near.kinds(2), race.near.kinds(3), race.held) == ([], [], 2)
    race.ends(3)


@inside
def test_what_waits_behind_a_stuck_operation_is_not_sent_twice(race: Race) -> None:
    """One to the same peer that fired before the flush is under way; one that fires during it may be, too."""
    race.arm(1, 2)
    race.fire(1, holding=LENGTH)
    with race.flush():
        race.fire(2, holding=LENGTH)
    assert [race.far.word(tag).load() for tag in (1, 2)] == [0, 0]
    assert race.near.finals().keys().isdisjoint((1, 2))
    race.release()
    race.ends(2)
    assert race.near.fabric.statistics().slots_lost == 0


@inside
def test_a_fabric_that_closes_during_a_flush_closes_the_endpoint_that_waits_for_it(race: Race) -> None:
    """Its domain closes too then, and the thread of its NIC ends."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    with race.flush():
        closing = threading.Thread(target=race.near.fabric.close)
        closing.start()
        wait_until(lambda: race.near.fabric.closed, "the fabric to begin to close")
        time.sleep(0.1)  # else the endpoint may close first, as it would without the fabric
    closing.join()
    wait_until(lambda: threads() == before - 2, "the threads of the fabric and of the NIC to end")


@pytest.mark.timeout(270)
@pytest.mark.parametrize("errors_count", ["0", "1"])
def test_what_fires_while_a_flush_begins_fires_once(errors_count: str) -> None:
    passes_on_cassini("tests/cassini/test_flush_races.py", timeout_s=240, ERRORS_COUNT=errors_count)
