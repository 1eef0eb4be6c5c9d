"""Every provider that this machine has (the others are skipped, and say why)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.nic_offload.rig import PROVIDERS, Pair, needs_provider

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.flags import FlagWord


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    needs_provider(name)
    return name


@pytest.fixture
def pair(provider: str) -> Iterator[Pair]:
    with Pair(provider) as both:
        yield both


@pytest.fixture
def flag(pair: Pair) -> FlagWord:
    return pair.flags[0]
