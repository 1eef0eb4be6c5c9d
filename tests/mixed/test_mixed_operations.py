"""Many clients of different kinds put, get, keep and remove the same few keys of one node at the same time.

Each test runs histories of one world (`tests.mixed.worlds`). The operations are in `tests.mixed.operations`, and what
must always hold is in `tests.mixed.key_history` and in `tests.mixed.worlds`. Other suites put each key in one way only;
here a block that has landed by a grant meets a put over gRPC, a deletion, and a get from shared memory.

A history has a seed, which gives the operations and failures. Threads and processes run as the machine lets them, so a
seed that failed may pass when it is repeated: repeat it many times.

TRIGGERKV_MIXED_ROUNDS=n runs n histories of each world, with three phases instead of one; TRIGGERKV_SEED=n is the first
one's seed.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import KvError
from tests.mixed.callers import map_for_some
from tests.mixed.key_history import End, Kind
from tests.mixed.worlds import WORLDS, run_history

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS = int(os.environ.get("TRIGGERKV_MIXED_ROUNDS", "1"))
PHASES = 1 if ROUNDS == 1 else 3  # of a history
SEED = int(os.environ.get("TRIGGERKV_SEED", "1"))
COMMAND = "TRIGGERKV_SEED={seed} TRIGGERKV_MIXED_ROUNDS=20 .venv/bin/python -m pytest '{test}'"


@pytest.mark.timeout(120 + 120 * ROUNDS)
@pytest.mark.parametrize("name", WORLDS)
def test_the_history_of_mixed_operations_is_consistent(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    map_for_some(monkeypatch)
    events = hits = puts = 0
    for seed in range(SEED, SEED + ROUNDS):
        words = ""
        try:
            history = run_history(WORLDS[name], tmp_path / f"{seed}", seed, PHASES)
        except (AssertionError, KvError) as error:
            command = COMMAND.format(seed=seed, test=request.node.nodeid)
            words = f"{type(error).__name__}: {error}\n\nseed {seed}; to repeat it: {command}"
        if words:
            pytest.fail(words, pytrace=False)
        shutil.rmtree(tmp_path / f"{seed}")
        events += len(history.events)
        hits += sum(one.kind is Kind.HIT for one in history.events)
        puts += sum(one.kind is Kind.PUT and one.end is End.DONE for one in history.events)
    record_property("events", events)
    assert hits
    assert puts
