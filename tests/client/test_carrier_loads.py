"""A large load of an engine is made by two threads; it ends with the later one, and by its deadline."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.client import Hit, Reach
from kvstore.engines import carrier as carrier_module
from kvstore.engines.carrier import Carrier, Place
from kvstore.engines.common_settings import EngineSettings
from kvstore.limits import ENGINE_HALVES
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.demo.node_process import NodeProcess

BYTES, COUNT = 3 * 4096, 5
KEYS = [block_key(b"of a large load", bytes([at])) for at in range(COUNT)]


class Loads:
    """A carrier with stored blocks, and their memory."""

    def __init__(self, node: NodeProcess) -> None:
        self.carrier = Carrier(EngineSettings(Reach.of({"node": node.target})), b"halves")
        self.memory = np.repeat(np.arange(1, COUNT + 1, dtype=np.uint8), BYTES)
        self.carrier.register(int(self.memory.ctypes.data), len(self.memory))
        assert all(self.carrier.put(self.places, timeout_s=20))
        self.memory[:] = 0

    @property
    def places(self) -> list[Place]:
        return [Place(key, int(self.memory.ctypes.data) + at * BYTES, BYTES) for at, key in enumerate(KEYS)]

    @property
    def is_whole(self) -> bool:
        return bool((self.memory.reshape(COUNT, BYTES) == np.arange(1, COUNT + 1)[:, None]).all())

    def instead_of_get(self, monkeypatch: pytest.MonkeyPatch, get: Any) -> None:
        monkeypatch.setattr(self.carrier._client, "get", get)


@pytest.fixture
def loads(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    """Loads that are large if they have two blocks in a half."""
    monkeypatch.setattr(carrier_module, "ENGINE_HALF_BYTES_MIN", 2 * BYTES)
    one = Loads(node)
    yield one
    one.carrier.close()


def test_both_halves_are_loaded_by_threads_of_their_own(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, seen = loads.carrier._client.get, {}

    def noted(blocks: list[Any], *, timeout_s: float) -> Any:
        seen[threading.current_thread()] = len(blocks)
        return get(blocks, timeout_s=timeout_s)

    loads.instead_of_get(monkeypatch, noted)
    assert loads.carrier.get(loads.places) == [True] * COUNT
    assert loads.is_whole
    assert sorted(seen.values()) == [2, 3]
    seen.clear()
    monkeypatch.setattr(carrier_module, "ENGINE_HALF_BYTES_MIN", 2 * BYTES + 1)
    assert all(loads.carrier.get(loads.places))
    assert list(seen.values()) == [COUNT]


def test_the_answers_of_each_half_are_those_of_its_blocks(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = dict(zip(KEYS, [False, True, False, False, True], strict=True))
    absent = Miss(MissReason.UNKNOWN, "")

    def answered(blocks: list[Any], **_: float) -> list[Hit | Miss]:
        return [Hit(block.key) if here[block.key] else absent for block in blocks]

    loads.instead_of_get(monkeypatch, answered)
    assert loads.carrier.get(loads.places) == list(here.values())


def test_a_load_whose_first_half_failed_ends_with_the_other_one(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    over: list[float] = []

    def half(blocks: list[Any], **_: float) -> Any:
        if len(blocks) == 2:
            raise ValueError("of the first half")
        time.sleep(0.3)
        over.append(time.monotonic())
        return [Hit(block.key) for block in blocks]

    loads.instead_of_get(monkeypatch, half)
    with pytest.raises(ValueError, match="of the first half"):
        loads.carrier.get(loads.places)
    assert over  # nothing writes to the memory any more


def test_a_half_that_waits_for_a_thread_has_only_the_time_that_is_left(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, left = threading.Event(), []
    for _ in range(ENGINE_HALVES):
        loads.carrier._halves.submit(busy.wait, 20)

    def timed(blocks: list[Any], *, timeout_s: float) -> Any:
        if len(blocks) == 2:  # this thread's own half
            time.sleep(0.3)
            busy.set()
        else:
            left.append(timeout_s)
        return [Hit(block.key) for block in blocks]

    loads.instead_of_get(monkeypatch, timed)
    assert all(loads.carrier.get(loads.places, timeout_s=0.2))
    assert left == [0.0]


def test_a_load_of_a_closed_carrier_finds_nothing(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    places, ways = loads.places, loads.carrier._ways(loads.places)
    loads.carrier.close()
    monkeypatch.setattr(loads.carrier, "_ways", lambda _: ways)  # it had got so far
    assert loads.carrier.get(places) == [False] * COUNT
