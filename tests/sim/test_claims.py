"""Which claims each preset passes, and that no reading of the tables passes them all."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest

from sim import search
from sim.claims import CLAIMS, CURVE, judge, judge_kv
from sim.curve import Direction, point
from sim.presets import PRESETS, STAGES, preset

# preset: 23x, > 20x, > 19x, drive on both, within the link, nothing added
PASSES = {
    "fair": "---xx-",
    "paper": "xxx---",
    "paper-nvme-both": "---xx-",
    "two-param": "xxx---",
    "no-nvme": "xxx---",
    "literal-ms": "---xxx",
    "literal-s": "---xxx",
}


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_passes_and_fails_the_expected_claims(name: str) -> None:
    verdicts = judge(preset(name))
    assert "".join("x" if verdict.holds else "-" for verdict in verdicts) == PASSES[name]
    assert [verdict.claim for verdict in verdicts] == [claim.text for claim in CLAIMS]


def test_a_verdict_names_the_deciding_figure() -> None:
    found = [verdict.found for verdict in judge(preset("paper"))]
    assert found[0] == "S(32KB) = 23.14"
    assert found[1] == "S from 20.44 at 256MB to 23.46 at 1MB"
    assert found[3] == "charged to the CPU path only"


def test_kv_outgrows_the_model_only_for_mha_up_to_13b() -> None:
    assert {name for name, holds, _ in judge_kv() if holds} == {
        "gpt2-xl",
        "opt-6.7b",
        "opt-13b",
        "llama-2-7b",
        "llama-2-13b",
    }


@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize("unit", ["ms", "s"])
def test_none_of_2_to_the_30_combinations_gives_the_curve(direction: Direction, unit: str) -> None:
    assert search.COMBINATIONS == 2**30
    assert search.literal(direction, unit) == 0


def test_the_search_finds_planted_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slightly wider bands, combinations without any wire match; a one-by-one search finds the same."""
    monkeypatch.setattr(search, "_HIGH", np.where(search._LOW == 19.0, 20.5, search._HIGH))
    assert search.literal("put", "ms") == 16


def test_the_pairs_of_the_search_are_the_products_of_its_sums() -> None:
    terms = np.array([[1.0], [10.0], [100.0]])
    sums = sorted(search._all_sums(terms, 3)[:, 0])
    assert sums == sorted(a + 10 * b + 100 * c for a, b, c in itertools.product(range(4), repeat=3))


def test_no_coherent_reading_matches_and_with_one_more_number_only_one_sided_ones() -> None:
    candidates = search.readings()
    assert search.coherent(candidates) == []
    assert search.coherent(search.readings(nics=8, drives=8)) == []
    matching = {one.reading for one in search.with_one_extra(candidates)}
    assert len(candidates) == 6300
    assert len(matching) == 450
    assert {reading.nvme for reading in matching} == {"cpu"}


def test_the_papers_own_reading_is_among_those_with_one_more_number() -> None:
    """Kappa = 1000 with two copies and one DRAM pass is the paper preset."""
    found = [
        one
        for one in search.with_one_extra(search.readings())
        if one.extra.startswith("kappa")
        and (one.reading.cpu_copies, one.reading.dram_passes, one.reading.pcie_passes) == (2, 1, 2)
        and not one.reading.nic_inner_stages
        and one.reading.latencies == "one a pass"
        and one.reading.direction == "put"
    ]
    assert found
    assert all(one.low <= 1000 <= one.high for one in found)


def test_the_drive_on_both_paths_leaves_no_room_for_a_speedup() -> None:
    both = [reading for reading in search.readings() if reading.nvme == "both"]
    assert max(map(search.speedup_max, both)) < 2.0
    with_latency = [reading for reading in both if reading.nvme_latency != "none"]
    assert max(map(search.speedup_max, with_latency)) < 1.06


def test_a_reading_costs_the_same_as_the_closed_form() -> None:
    """The literal preset is one of the readings; the search must not have its own model."""
    reading = search.Coherent("put", "both", "ms", True, 2, 1, 2, "one a pass", 1, 1)
    cpu_s, triggered_s = search._times(reading)
    sizes = [size for band in CURVE for size in band.sizes_bytes]
    for i, size in enumerate(sizes):
        row = point(preset("literal-ms"), size)
        assert cpu_s[i] == pytest.approx(row.cpu_s, rel=1e-9)
        assert triggered_s[i] == pytest.approx(row.triggered_s, rel=1e-9)


def test_the_suspicious_entries_are_verbatim() -> None:
    assert STAGES.cpu_s_per_byte == STAGES.vram_s_per_byte
    assert STAGES.network_latency_s == STAGES.dram_s_per_byte
