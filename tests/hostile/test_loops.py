"""Floods of frames, and loops of allowed calls, beside a well-behaved neighbour."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hostile.beside import Beside, check_speed
from tests.hostile.frames import FRAMES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("token", [{}, {"token": "evil"}], ids=["nobody", "tenant"])
@pytest.mark.parametrize("frame", FRAMES)
def test_frames_that_are_not_calls(beside: Beside, frame: str, token: dict[str, Any]) -> None:
    alone, under, did = beside.endure("frames", frame=frame, **token)
    assert did["frames"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("token", [{}, {"token": "evil"}], ids=["nobody", "tenant"])
@pytest.mark.parametrize("name", ["continuations", "table_bombs"])
def test_oversized_headers(beside: Beside, name: str, token: dict[str, Any]) -> None:
    alone, under, did = beside.endure(name, **token)
    assert did["connections"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["pins", "tiny_puts", "deletes", "watches", "histories"])
def test_loops_over_a_thousand_blocks(beside: Beside, name: str) -> None:
    alone, under, did = beside.endure(name, token="evil")
    assert did.get("OK")
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["erases", "block_prefetches", "questions"])
def test_loops_of_expensive_calls(beside: Beside, name: str) -> None:
    alone, under, did = beside.endure(name, token="evil")
    assert did.get("OK")
    check_speed(alone, under)
