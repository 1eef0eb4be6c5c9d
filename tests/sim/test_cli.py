"""The command `kvsim` as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sim.cli import main
from sim.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_curve_is_never_printed_without_its_caveats(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--preset", name]) == 0
    text = capsys.readouterr().out
    for caveat in PRESETS[name].caveats:
        assert caveat in text
    assert main(["curve", "--preset", name, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["caveats"] == list(PRESETS[name].caveats)
    assert document["points"][0]["size_bytes"] == 32_000


def test_fair_is_the_default_and_sizes_are_taken_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--size", "1GiB", "--size", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("preset fair, put")
    assert [line.split()[0] for line in lines[3:5]] == ["1GiB", "4KiB"]


def test_presets_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--preset", "?"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PRESETS)


def test_kv_lists_models_or_the_one_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "--model", "llama-3-8b", "--tokens", "1000", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["kv_bytes"] == 131_072_000
    assert main(["kv"]) == 0
    assert "131,072" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["curve", "--size", "0"], ["curve", "--drives", "99"], ["kv", "--model", "x"]]
)
def test_a_bad_argument_is_one_sentence_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"kvsim: {arguments[1]} is ")
    assert output.err.count("\n") == 1


def test_help_loads_nothing_heavy() -> None:
    """`kvsim --help` answers at once: what takes long is imported by the command that needs it."""
    code = (
        "import sys, sim.cli\n"
        "try: sim.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    modules = done.stdout.splitlines()[-1]
    for heavy in ("'numpy'", "'sim.curve'", "'kvstore'", "'nic_offload'"):
        assert heavy not in modules
