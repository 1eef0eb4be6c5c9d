"""Measured prefill times: read, interpolated, refused beyond the measured range, and used by a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.replay.prefill_times import read_timings
from sim.replay.run import Terms
from sim.replay.simulate import simulate
from sim.units import OutOfRange
from tests.sim.replay_rig import ONE, TINY, requests

if TYPE_CHECKING:
    from pathlib import Path

TABLE = """new_tokens,context_tokens,prefill_s
100,0,0.1
1000,0,0.5
100,2000,0.2
1000,2000,0.9
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("new", "context", "seconds"),
    [
        (100, 0, 0.1),
        (1000, 2000, 0.9),
        (550, 0, 0.3),
        (100, 1000, 0.15),
        (550, 1000, (0.15 + 0.7) / 2),
        (1, 0, 0.1),
        (1, 2000, 0.2),
    ],
)
def test_times_are_interpolated_between_measurements(
    table: Path, new: int, context: int, seconds: float
) -> None:
    assert read_timings(table).of(new, context) == pytest.approx(seconds)


def test_nothing_is_extrapolated_beyond_the_measurements(table: Path) -> None:
    timings = read_timings(table)
    with pytest.raises(
        OutOfRange, match="a prompt's new tokens is 1,001; it takes tokens that were measured, from 0 to"
    ):
        timings.of(1001, 0)
    with pytest.raises(OutOfRange, match="a prompt's context is 2,001"):
        timings.of(10, 2001)


def test_one_line_is_a_table_too(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("new_tokens,context_tokens,prefill_s\n512,0,0.25\n")
    timings = read_timings(path)
    assert timings.of(512, 0) == timings.of(3, 0) == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "with the columns new_tokens,context_tokens,prefill_s and 1 to 100,000 lines"),
        ("a,b\n1,2\n", "with the columns"),
        (
            TABLE[: TABLE.index("1000,2000")],
            "without new_tokens 1000 at context_tokens 2000; it takes a table",
        ),
        (TABLE + "5,x,1\n", "t.csv:6 context_tokens is 'x'; it takes a number"),
        (TABLE + "5,0,-1\n", "t.csv:6 prefill_s is -1; it takes seconds, from 0 to"),
        (TABLE + "5,0,1e999\n", "prefill_s is inf"),
    ],
)
def test_an_insufficient_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(OutOfRange) as caught:
        read_timings(path)
    assert message in str(caught.value)


def test_a_replay_uses_the_times_of_the_table(table: Path) -> None:
    work = requests((0, 1000, 0, [1, 2]), (10, 1000, 0, [3, 4]), (20, 1524, 0, [1, 2, 5]))
    terms = Terms(timings=read_timings(table), always_get=True)
    with pytest.raises(OutOfRange, match="new tokens is 1,524"):
        simulate(work, TINY, ONE, "recompute", terms)
    result = simulate(work[:2], TINY, ONE, "recompute", terms)
    assert result.ttft_s.tolist() == pytest.approx([0.5, 0.5])
