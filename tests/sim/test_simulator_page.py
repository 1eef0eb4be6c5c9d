"""The commands of docs/simulator.md are run as printed, and its table of presets is their output."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sim.cli import _COMMANDS, main
from sim.curve import curve
from sim.presets import PRESETS
from tests.readme import commands

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_the_commands_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        line for line in commands(PAGE) if not line.startswith("kvsim calibrate") and "profile" not in line
    ]
    assert len(lines) >= 10
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "kvsim"
        assert main(arguments) == 0, line
        assert capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        "figures.svg",
        "fig1.svg",
        "chats.jsonl",
        "cost.svg",
        "report.html",
    }


def test_every_command_is_on_the_page() -> None:
    for name in _COMMANDS:
        assert f"kvsim {name}" in PAGE


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_of_presets_matches_the_output(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \|.*\| ([\d.]+)(?: to ([\d.]+))? \|$", PAGE, re.MULTILINE)
    speedups = [point.speedup for point in curve(PRESETS[name])]
    for printed, found in zip((row[0], row[1] or row[0]), (min(speedups), max(speedups)), strict=True):
        decimals = len(printed.partition(".")[2])
        assert abs(found - float(printed)) <= 0.5 * 10**-decimals + 1e-9
