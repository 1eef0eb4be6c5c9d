"""Loops of connections, leases and calls over the fabric: each is allowed, and no neighbour is affected."""

from __future__ import annotations

import pytest

from kvstore.limits import LEASES_MAX
from tests.hostile.beside import Beside, check_speed

pytestmark = pytest.mark.slow


def test_clients_that_attach_and_leave(putting: Beside) -> None:
    alone, under, did = putting.endure("churn", token="evil")
    assert min(did["attached"], did["put"]) > 0
    check_speed(alone, under)


def test_slots_reserved_and_never_used(putting: Beside) -> None:
    """Half of the leases are reserved for the neighbour."""
    alone, under, did = putting.endure("hoard", token="evil")
    assert 0 < did["OK"] * 1024 <= LEASES_MAX // 2
    assert did["RESOURCE_EXHAUSTED"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["reserves", "armed", "fetch_cancels"])
def test_loops_over_a_thousand_slots(putting: Beside, name: str) -> None:
    """Each of these calls takes milliseconds; then its tenant rests."""
    alone, under, did = putting.endure(name, token="evil")
    assert did["OK"] > 0
    check_speed(alone, under)
