"""Every backend; those that this process's libfabric lacks are skipped, and say why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.backends import BACKENDS, Backend, Gate, Stage
from tests.nic_offload.rig import needs_provider

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=BACKENDS, ids=lambda backend: str(backend.name))
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    needs_provider(chosen.provider)
    return chosen


@pytest.fixture
def stage(backend: Backend) -> Iterator[Stage]:
    with Stage(backend) as both:
        yield both


@pytest.fixture
def gate(stage: Stage) -> Gate:
    return stage.gate()
