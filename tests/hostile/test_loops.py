"""Floods of frames, and loops of calls that each are allowed, beside a well-behaved neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.hostile.beside import Beside, TooSlow, check_speed
from tests.hostile.frames import FRAMES
from tests.hostile.sessions import make_large_sessions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timed.with_args(TooSlow), pytest.mark.slow]


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    with Beside(tmp_path) as beside:
        yield beside


@pytest.mark.parametrize("token", [{}, {"token": "evil"}], ids=["nobody", "tenant"])
@pytest.mark.parametrize("frame", FRAMES)
def test_frames_that_are_no_calls(beside: Beside, frame: str, token: dict[str, Any]) -> None:
    alone, under, did = beside.endure("frames", frame=frame, **token)
    assert did["frames"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("token", [{}, {"token": "evil"}], ids=["nobody", "tenant"])
@pytest.mark.parametrize("name", ["continuations", "table_bombs"])
def test_headers_that_are_too_large(beside: Beside, name: str, token: dict[str, Any]) -> None:
    alone, under, did = beside.endure(name, **token)
    assert did["connections"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["protects", "ends", "prefetches", "cancels"])
def test_loops_over_a_large_session(beside: Beside, name: str) -> None:
    make_large_sessions({"port": beside.port, "token": "evil"})
    alone, under, did = beside.endure(name, token="evil")
    assert did.get("OK") or did.get("cancelled")
    check_speed(alone, under)


@pytest.mark.parametrize(
    ("name", "slower_max"),
    [("pins", 2.0), ("tiny_puts", 3.0), ("deletes", 2.0), ("watches", 3.0), ("histories", 2.0)],
)
def test_loops_over_a_thousand_blocks(beside: Beside, name: str, slower_max: float) -> None:
    """The ends of puts, and what watches are told of them, wait for no turn (docs/security.md)."""
    alone, under, did = beside.endure(name, token="evil")
    assert did.get("OK")
    check_speed(alone, under, slower_max)
