"""The page on the paper: our numbers are computed, and a verdict changes with its input."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from sim import paper
from sim.cli import main
from sim.curve import point
from sim.paper import findings
from sim.presets import PRESETS, STAGES, Fit

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def _verdicts() -> dict[str, str]:
    return {one.theirs: one.verdict for one in findings()}


def test_each_line_has_the_verdict_that_its_numbers_give() -> None:
    found = _verdicts()
    for words, verdict in (
        ("KV is larger than the model (64 x 512 tokens)", "holds in part"),
        ("GPU cost", "not judged"),
        ("CPU: 4.55e-13 s/B", "misprint"),
        ("NIC serialisation: 5.13e-11 s/B, on a link of 100 Gb/s", "does not hold"),
        ("23x at small sizes", "only with additions"),
        ("> 20x for a few hundred MB", "only with additions"),
        ("> 19x from there to terabytes", "only with additions"),
        ("give the curves of Figs. 5 and 7", "does not hold"),
    ):
        assert found[words] == verdict
    assert [one.where for one in findings() if one.theirs.startswith("23x")] == ["Fig. 7"]


def test_our_figures_are_computed() -> None:
    speedup = f"{point(PRESETS['paper'], 32_000).speedup:.2f}"
    line = next(one for one in findings() if one.theirs.startswith("23x"))
    assert f"{speedup} (paper)" in line.ours
    assert f"fair {point(PRESETS['fair'], 32_000).speedup:.2f}" in line.ours


def test_other_tables_would_be_judged_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    right = replace(
        STAGES,
        cpu_s_per_byte=1e-10,
        network_latency_s=2e-6,
        nic_serialisation_s_per_byte=8e-11,
        nvme_write=Fit(2.34e9, 0.0, 0.0, 1e3 / 2.34e9),
    )
    monkeypatch.setattr(paper, "STAGES", right)
    found = {one.theirs: one.verdict for one in findings()}
    assert found["CPU: 1e-10 s/B"] == "holds"
    assert found["network latency: 2e-06 s"] == "holds"
    assert found["NIC serialisation: 8e-11 s/B, on a link of 100 Gb/s"] == "holds"
    assert found["NVMe write: latency and bandwidth of one benchmark"] == "holds"


def test_a_claim_that_no_preset_gives_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    only_fair = {name: PRESETS[name] for name in ("fair", "literal-ms")}
    monkeypatch.setattr(paper, "PRESETS", only_fair)
    assert _verdicts()["23x at small sizes"] == "does not hold"


def test_table_1_is_judged_once_its_cells_are_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("gpu,count,price_usd,printed_total_usd\nA,8,1000,8000\nB,4,250,1100\n")
    assert main(["paper", "--gpu-cost", str(table), "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["where"] == "Table I"]
    assert [row["verdict"] for row in rows] == ["holds", "misprint"]
    assert rows[1]["ours"] == "1,000.00 USD, +100.00"


def test_the_page_counts_its_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper"]) == 0
    text = capsys.readouterr().out
    counts = Counter(one.verdict for one in findings())
    last = next(line for line in text.splitlines() if re.match(r"\d+ lines: ", line))
    assert last.startswith(f"{sum(counts.values())} lines: ")
    for verdict, count in counts.items():
        assert f"{count} {verdict}" in last
    assert max(map(len, text.splitlines())) <= 118
    assert main(["paper", "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > sum(counts.values())
