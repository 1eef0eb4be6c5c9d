"""Connections over the fabric, their leases and their calls, in loops: each is allowed, and no neighbour minds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.limits import LEASES_MAX
from tests.hostile.beside import Beside, TooSlow, check_speed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timed.with_args(TooSlow), pytest.mark.slow]


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    with Beside(tmp_path) as beside:
        beside.work = beside.put_and_get
        yield beside


def test_clients_that_come_and_go(beside: Beside) -> None:
    alone, under, did = beside.endure("churn", token="evil")
    assert min(did["attached"], did["put"]) > 0
    check_speed(alone, under)


def test_slots_that_are_reserved_and_never_put_into(beside: Beside) -> None:
    """Half of the leases are the neighbour's alone."""
    alone, under, did = beside.endure("hoard", token="evil")
    assert 0 < did["OK"] * 1024 <= LEASES_MAX // 2
    assert did["RESOURCE_EXHAUSTED"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["reserves", "armed", "fetch_cancels"])
def test_loops_over_a_thousand_slots(beside: Beside, name: str) -> None:
    """Each of these calls takes milliseconds; then its tenant rests."""
    alone, under, did = beside.endure(name, token="evil")
    assert did["OK"] > 0
    check_speed(alone, under)
