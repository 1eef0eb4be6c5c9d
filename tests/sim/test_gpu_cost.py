"""Tables of GPU costs: printed totals against what they add up to. The figures are made up."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from sim.cli import main
from sim.gpu_cost import gpus_for, read_cost_table
from sim.units import OutOfRange

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "gpu,count,price_usd,printed_total_usd\n"


def _table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


def test_printed_totals_are_shown_beside_the_correct_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _table(tmp_path, HEAD + 'A,4,"$10,000","40,000"\nB,3,0.10,0.31\nC,3,333.3,999.9\n')
    rows = read_cost_table(path)
    assert [row.right_total_usd for row in rows] == [Decimal(40000), Decimal("0.30"), Decimal("999.90")]
    assert [row.holds for row in rows] == [True, False, True]
    assert main(["kv", "--gpu-cost", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["B", "3", "0.10", "0.31", "0.30", "WRONG", "by", "+0.01"]
    assert lines[4].split() == ["all", "41,000.21", "41,000.20"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "with the columns gpu,count,price_usd,printed_total_usd and 1 to 10,000 lines."),
        ("gpu,count\nA,1\n", "with the columns gpu,count"),
        (HEAD + "A,x,1,1\n", "--gpu-cost table.csv:2 count is 'x'; it takes a number of GPUs, from 1 to"),
        (HEAD + "A,1,1,1\nA,0,1,1\n", "--gpu-cost table.csv:3 count is 0; it takes a number of GPUs, from 1"),
        (
            HEAD + "A,1,-1,1\n",
            "table.csv:2 price_usd is '-1'; it takes US dollars, a number from 0 to 1e+15.",
        ),
        (HEAD + "A,1,1,nan\n", "table.csv:2 printed_total_usd is 'nan'; it takes US dollars"),
    ],
)
def test_an_invalid_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OutOfRange) as caught:
        read_cost_table(_table(tmp_path, text))
    assert message in str(caught.value)


def test_gpus_hold_weights_and_kv() -> None:
    assert gpus_for(0, 80e9, 80 * 10**9) == 1
    assert gpus_for(1, 80e9, 80 * 10**9) == 2
    with pytest.raises(
        OutOfRange, match=r"--gpu-memory is 5; it takes bytes, from 1,000,000,000 to 10,000,000,000,000\."
    ):
        gpus_for(1, 1, 5)
