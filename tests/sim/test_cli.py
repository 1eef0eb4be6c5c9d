"""The command `kvsim` as a person meets it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sim.cli import main
from sim.curve import point
from sim.parameters import PARAMETERS
from sim.presets import PRESETS

if TYPE_CHECKING:
    from pathlib import Path


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


def test_fair_is_the_default_and_sizes_are_used_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--size", "1GiB", "--size", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("preset fair, put")
    assert [line.split()[0] for line in lines[3:5]] == ["1GiB", "4KiB"]


def test_presets_and_parameters_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--preset", "?"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*PRESETS, "measured"]
    assert main(["curve", "--parameters", "--set", "dram_passes=7"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:]] == list(PARAMETERS)
    assert ["dram_passes", "7", "passes", "over", "DRAM", "0", "to", "100"] in lines


def test_the_fair_figure_is_shown_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--preset", "paper"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["32KB", "4.51e-05", "1.95e-06", "23.14", "1.29"]


def test_ranges_show_which_number_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--ranges"]) == 0
    text = capsys.readouterr().out
    assert "S is 1.29 at 32KB, 1.22 at 1MB, 1.22 at 512MB" in text
    assert "Decides most: cpu_message_s at 32KB;" in text
    assert main(["curve", "--ranges", "--json", "--size", "1MB"]) == 0
    rows = json.loads(capsys.readouterr().out)["parameters"]
    copy = next(row for row in rows if row["parameter"] == "host_copy_bytes_per_s")
    for end in ("low", "high"):
        assert main(["curve", "--set", f"host_copy_bytes_per_s={copy[end]}", "--size", "1MB", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["points"][0]["speedup"] == pytest.approx(copy[f"speedups_{end}"][0])
        assert any("Changed by --set: host_copy_bytes_per_s" in caveat for caveat in document["caveats"])
    assert main(["curve", "--ranges", "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_stages_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--preset", "two-param", "--json", "--size", "5TB"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["points"]
    for path in ("cpu_s", "triggered_s"):
        assert sum(stage[path] for stage in row["stages"]) == pytest.approx(row[path])
    assert main(["curve", "--preset", "two-param", "--stages", "--size", "5TB"]) == 0
    assert "CPU software" in capsys.readouterr().out


def test_csv_has_its_caveats_as_comments_and_full_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--preset", "paper", "--csv", "--size", "1MB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    notes = [line for line in lines if line.startswith("# ")]
    assert notes[1:] == [f"# {caveat}" for caveat in PRESETS["paper"].caveats]
    (row,) = csv.DictReader(lines[len(notes) :])
    assert float(row["cpu_s"]) == point(PRESETS["paper"], 10**6).cpu_s
    assert float(row["fair_speedup"]) == point(PRESETS["fair"], 10**6).speedup
    assert main(["curve", "--csv", "--stages", "--size", "1MB"]) == 0
    assert "1MB,PCIe," in capsys.readouterr().out


def test_figures_5_to_7_are_drawn_with_their_caveats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.svg"
    assert main(["curve", "--preset", "paper", "--plot", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"written: {path}\n")
    svg = path.read_text()
    for words in ("Fig. 5, ", "Fig. 6, ", "Fig. 7, ", "S, fair", "NVMe is charged to the CPU path only"):
        assert words in svg
    missing = tmp_path / "none" / "figures.svg"
    assert main(["curve", "--plot", str(missing)]) == 2
    assert capsys.readouterr().err.startswith(f"kvsim: --plot: {missing} can't be written: ")


def test_an_unwritable_file_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--sessions", "2", "--out", "/dev/full"]) == 1
    assert capsys.readouterr().err == "kvsim: /dev/full: No space left on device.\n"


def test_an_unknown_option_is_reported_before_a_missing_step(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, word in ((["--nonsense"], "unrecognized arguments: --nonsense"), ([], "required: STEP")):
        with pytest.raises(SystemExit):
            main(["calibrate", *arguments])
        assert word in capsys.readouterr().err


def test_kv_lists_all_models_or_the_requested_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "--model", "llama-3-8b", "--tokens", "500", "--batch", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["kv_bytes"] == 131_072_000
    assert main(["kv", "--plot", str(tmp_path / "f.svg")]) == 0
    assert "131,072" in capsys.readouterr().out
    assert "deepseek-v3" in (tmp_path / "f.svg").read_text()
    config = tmp_path / "config.json"
    config.write_text('{"n_layer": 48, "n_head": 25, "n_embd": 1600}')
    assert main(["kv", "--config", str(config), "--csv"]) == 0
    assert ",MHA,307200,64,512,10066329600,,1,30000" in capsys.readouterr().out
    assert main(["kv", "--config", str(config), "--layout", "mqa"]) == 2


def test_gpus_are_counted_by_their_bytes_and_priced_in_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["kv", "--model", "opt-13b", "--json", "--gpu-memory", "20GB", "--gpu-usd", "7"]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)
    # 25.7 GB of weights and 26.8 GB of KV.
    assert (row["gpus"], row["gpus_usd"]) == (3, 21)


def test_a_reader_that_closes_the_output_is_no_error() -> None:
    command = [sys.executable, "-m", "sim.cli", "generate", "--sessions", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 0


def test_explain_and_search_print_their_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    for entry in PRESETS.values():
        for extra in entry.extras:
            assert f"  adds {extra}" in text
    assert main(["explain", "--preset", "paper", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [claim["holds"] for claim in document["presets"]["paper"]["claims"]] == [True] * 3 + [False] * 3
    assert main(["search", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["combinations_that_match"].values()) == {0}
    assert document["coherent_readings"] == 16 * 6300
    assert document["coherent_readings_that_match"] == 0
    assert document["of_which_charge_the_drive_to_both_paths"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["curve", "--size", "0"],
        ["curve", "--drives", "99"],
        ["kv", "--model", "x"],
        ["kv", "--gpu-usd", "-1"],
        ["curve", "--set", "x=1"],
        ["curve", "--preset", "x"],
    ],
)
def test_a_bad_argument_is_one_sentence_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"kvsim: {arguments[1]} is ")
    assert output.err.count("\n") == 1


def test_the_curve_imports_nothing_heavy() -> None:
    """The whole command must take less than a second, including start-up."""
    code = "import sys, sim.cli; sim.cli.main(['curve', '--stages']); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    modules = done.stdout.splitlines()[-1]
    for heavy in ("'numpy'", "'cffi'", "'kvstore'", "'nic_offload'", "'sim.search'"):
        assert heavy not in modules


def test_help_imports_nothing_heavy() -> None:
    """`kvsim --help` answers at once: slow imports are left to the command that needs them."""
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
