"""Loops over sessions of the maximum length, beside a well-behaved neighbour."""

from __future__ import annotations

import pytest

from tests.hostile.beside import Beside, check_speed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("large_sessions"),
]


def test_lists_of_large_sessions(beside: Beside) -> None:
    alone, under, did = beside.endure("lists", token="evil")
    assert did["OK"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["forks", "stored", "appends"])
def test_changes_and_reads_of_a_large_session(beside: Beside, name: str) -> None:
    alone, under, did = beside.endure(name, token="evil")
    assert did["OK"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["protects", "ends", "prefetches", "cancels"])
def test_loops_over_a_large_session(beside: Beside, name: str) -> None:
    alone, under, did = beside.endure(name, token="evil")
    assert did.get("OK") or did.get("cancelled")
    check_speed(alone, under)
