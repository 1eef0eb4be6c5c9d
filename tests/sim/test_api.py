"""The API for notebooks: rows that a data frame takes, and the numbers of the commands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sim import api
from sim.cli import main
from tests.sim.replay_rig import ONE, TINY, requests

if TYPE_CHECKING:
    import pytest


def test_the_api_gives_the_rows_of_the_curve_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--preset", "paper", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    rows = api.curve_rows("paper")
    assert [row["speedup"] for row in rows] == [point["speedup"] for point in points]
    assert len({tuple(row) for row in rows}) == 1, "the same columns in each row"


def test_a_run_gives_one_row_and_each_request_one() -> None:
    work = requests((0, 1024, 0, [1, 2]), (10, 1100, 0, [1, 2, 3]))
    results = [api.simulate(work, TINY, ONE, path) for path in api.PATHS]
    rows = api.result_rows(results)
    assert [row["path"] for row in rows] == list(api.PATHS)
    assert len({tuple(row) for row in rows}) == 1
    assert rows[1]["ttft_p99_s"] == results[1].ttft_quantile_s(0.99)
    each = api.request_rows(results[1])
    assert [row["ttft_s"] for row in each] == results[1].ttft_s.tolist()
    json.dumps([rows, each])


def test_every_listed_file_exists() -> None:
    assert all(hasattr(api, name) for name in api.__all__)
