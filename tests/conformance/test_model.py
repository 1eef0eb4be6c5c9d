"""Random runs against the model: arming, moving, cancelling, closing, resetting, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.backends import Stage
from tests.conformance.model import Model

if TYPE_CHECKING:
    from tests.conformance.backends import Backend

SEEDS = 18  # divided among groups that share a fabric, as opening one takes rxm a second
GROUPS = 3
STEPS = 12
AS_NET = {"rxm-own", "shm", "sockets-own"}  # fired by the agent as well: one group each
A_FLUSH_EACH = {"cxi", "cxi-own"}


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_runs_keep_every_guarantee(backend: Backend, group: int) -> None:
    if backend.name in AS_NET and group:
        pytest.skip("the agent's other seeds run over net")
    steps = STEPS // 2 if backend.name in A_FLUSH_EACH else STEPS
    with Stage(backend) as stage:
        for seed in range(group, SEEDS, GROUPS):
            try:
                run = Model(stage, seed)
                for _ in range(steps):
                    run.step()
                run.finish()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
