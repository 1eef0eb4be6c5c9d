"""Random runs against the model: arming, moving, cancelling, closing, resetting, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.backends import Stage
from tests.conformance.model import Model

if TYPE_CHECKING:
    from tests.conformance.backends import Backend

SEEDS = 30
GROUPS = 3  # those of one group share a fabric, as opening one takes rxm a second
STEPS = 12


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_runs_keep_every_promise(backend: Backend, group: int) -> None:
    with Stage(backend) as stage:
        for seed in range(group, SEEDS, GROUPS):
            try:
                run = Model(stage, seed)
                for _ in range(STEPS):
                    run.step()
                run.finish()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
