"""Every backend; those that this process's libfabric lacks are skipped, and say why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.backends import BACKENDS, Backend, Gate, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=BACKENDS, ids=lambda backend: str(backend.name))
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    missing = chosen.missing()
    if missing:
        pytest.skip(missing)
    return chosen


@pytest.fixture
def stage(backend: Backend) -> Iterator[Stage]:
    with Stage(backend) as both:
        yield both


@pytest.fixture
def gate(stage: Stage) -> Gate:
    return stage.gate()
