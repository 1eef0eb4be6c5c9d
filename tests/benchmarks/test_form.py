"""The benchmarks' form: what it computes from known values. No speed is asserted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import discover, main
from benchmarks.form import Form, Point, machine, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _from(values: list[float], log: list[str], name: str) -> Callable[[], float]:
    """A measurement that returns these values; the first goes to the discarded pair."""
    rest = iter([-1.0, *values])

    def measure() -> float:
        log.append(name)
        return next(rest)

    return measure


def test_the_ratio_is_the_median_of_pairs_not_the_ratio_of_medians(tmp_path: Path) -> None:
    """The machine's speed halves midway: pairs agree on 0.5, medians of one side alone would not."""
    log: list[str] = []
    candidate = _from([10.0, 9.0, 2.5, 2.0, 2.0], log, "a")
    ceiling = _from([20.0, 18.0, 5.0, 4.0, 8.0], log, "b")
    point = Form("x", tmp_path).compare("copy", "GB/s", candidate, ceiling, goal=0.5)
    assert point == Point("copy", 2.5, "GB/s", 8.0, 0.5, 0.5, True)


def test_candidate_and_ceiling_alternate_and_so_does_their_order(tmp_path: Path) -> None:
    log: list[str] = []
    Form("x", tmp_path).compare("m", "s", _from([1.0] * 5, log, "a"), _from([1.0] * 5, log, "b"))
    assert "".join(log) == "ab" + "ab" + "ba" + "ab" + "ba" + "ab"


def test_pairs_measured_elsewhere_are_judged_alike() -> None:
    point = Form("x").pairs("copy", "GB/s", [1.0, 8.0, 3.0], [2.0, 4.0, 6.0], goal=0.6)
    assert point == Point("copy", 3.0, "GB/s", 4.0, 0.5, 0.6, ok=False)


def test_fewer_than_five_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 pairs are too few"):
        Form("x", tmp_path).compare("m", "s", lambda: 1.0, lambda: 1.0, pairs=4)


def test_a_ceiling_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Form("x", tmp_path).compare("m", "s", lambda: 1.0, lambda: 0.0)


@pytest.mark.parametrize(
    ("goal", "lower_is_better", "ok"),
    [(None, False, None), (1.9, False, True), (2.1, False, False), (2.1, True, True), (1.9, True, False)],
)
def test_a_goal_is_met_missed_or_absent(goal: float, ok: object, *, lower_is_better: bool) -> None:
    form = Form("x")
    assert form.note("m", 2.0, "us", goal=goal, lower_is_better=lower_is_better).ok is ok
    assert (
        form.compare("r", "us", lambda: 4.0, lambda: 2.0, goal=goal, lower_is_better=lower_is_better).ok is ok
    )


def test_two_points_of_one_name_are_refused() -> None:
    form = Form("x")
    form.note("m", 1, "s")
    with pytest.raises(ValueError, match="two points named m"):
        form.note("m", 2, "s")


def test_seconds_come_from_the_clock_and_are_never_zero(tmp_path: Path) -> None:
    ticks = iter([1_000, 2_501_000, 7, 7])
    form = Form("x", tmp_path, clock_ns=lambda: next(ticks))
    assert form.seconds(lambda: None) == pytest.approx(0.0025)
    assert form.seconds(lambda: None) == pytest.approx(1e-9)


def test_the_file_is_a_plain_list_with_the_machine(tmp_path: Path) -> None:
    form = Form("copy", tmp_path / "build")
    form.note("m", 1.5, "GB/s", goal=1)
    path = form.write({"cpu": "abacus"})
    entry = {
        "metric": "m",
        "value": 1.5,
        "unit": "GB/s",
        "ceiling": None,
        "ratio": None,
        "goal": 1,
        "ok": True,
    }
    assert json.loads(path.read_text()) == [entry]
    assert json.loads((tmp_path / "build" / "copy.machine.json").read_text()) == {"cpu": "abacus"}
    assert sorted(found.name for found in path.parent.iterdir()) == ["copy.json", "copy.machine.json"]


def test_the_machine_describes_itself() -> None:
    assert {"cpu", "cores", "kernel", "memory_gib"} <= machine().keys()


def test_the_table_is_aligned() -> None:
    text = table([Point("a", 12345.6, "us"), Point("longer", 0.5, "GB/s", 1.0, 0.5, 0.6, ok=False)])
    assert text.splitlines() == [
        "metric   value  unit  ceiling  ratio  goal  ok",
        "a       12,346  us          -      -     -  -",
        "longer     0.5  GB/s        1    0.5   0.6  NO",
    ]


def test_benchmarks_are_found_by_their_file_names(tmp_path: Path) -> None:
    for name in ("bench_path.py", "bench_drive.py", "form.py"):
        (tmp_path / name).touch()
    assert discover(tmp_path) == ["drive", "path"]


def test_an_unknown_name_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nosuch"], names=["path"]) == 2
    assert "one of: all, path" in capsys.readouterr().err


def test_one_broken_benchmark_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "bench_a.py").write_text("def run(form): raise OSError('no drive')\n")
    (package / "bench_b.py").write_text("def run(form): form.note('m', 1, 's')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["all"], names=["a", "b"], package="planted") == 1
    output = capsys.readouterr()
    assert "no drive" in output.err
    assert "build/bench/b.json" in output.out
    assert not (tmp_path / "build/bench/a.json").exists()
