"""The closed form compared with the paper and its readings, to every printed digit.

The expected numbers are only here; `sim` has the stages and computes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.curve import SIZES_BYTES, Setting, curve, point
from sim.hardware import HARDWARE, SPREADS
from sim.presets import PRESETS, Preset, preset
from sim.replay.cluster_hardware import Cluster, Plant
from sim.replay.events import MESSAGE, Events
from sim.units import OutOfRange, format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from sim.curve import Direction
    from sim.replay.cluster_hardware import PathName

# CPU s / triggered s / S, for 32 KB, 1 MB, 128 MB, 256 MB, 512 MB, 1 GB, 5 TB.
TABLE = {
    "paper": """4.51e-5 1.95e-6 23.1  1.41e-3 5.99e-5 23.5  .165 7.66e-3 21.6  .313 .0153 20.4
                .589 .0307 19.2  1.15 .0599 19.3  5750 299 19.2""",
    "two-param": """5.86e-5 2.57e-6 22.8  1.83e-3 7.94e-5 23.0  .219 .0102 21.6  .421 .0203 20.7
                    .805 .0407 19.8  1.57 .0794 19.8  7860 397 19.8""",
    "no-nvme": """5.94e-5 2.57e-6 23.1  1.61e-3 7.94e-5 20.3  .205 .0102 20.2  .410 .0203 20.2
                  .819 .0407 20.2  1.60 .0794 20.2  8000 397 20.2""",
    "literal-ms": """3.33e-3 3.33e-3 1.00  4.23e-3 4.22e-3 1.00  .107 .106 1.01  .194 .191 1.01
                     .347 .342 1.02  .681 .670 1.02  3390 3340 1.02""",
    "paper-nvme-both": """4.51e-5 1.56e-5 2.9  1.41e-3 4.86e-4 2.9  .165 .0475 3.5  .313 .0779 4.0
                          .589 .118 5.0  1.15 .234 4.9  5750 1160 5.0""",
}


def _close(value: float, printed: str, digits: int) -> bool:
    """Whether `value` rounds to the printed number, including exactly half a unit of its last digit."""
    expected = float(printed)
    unit = 10.0 ** (int(f"{expected:e}".split("e")[1]) - digits + 1)
    return abs(value - expected) <= unit * 0.5 + 1e-9 * abs(expected)


@pytest.mark.parametrize("name", TABLE)
def test_the_whole_table_is_reproduced_to_its_printed_digits(name: str) -> None:
    cells = TABLE[name].split()
    assert len(cells) == 3 * len(SIZES_BYTES)
    for index, row in enumerate(curve(preset(name))):
        cpu, triggered, speedup = cells[3 * index : 3 * index + 3]
        where = f"{name} {format_bytes(row.size_bytes)}: {row}"
        assert _close(row.cpu_s, cpu, 3), where
        assert _close(row.triggered_s, triggered, 3), where
        decimals = len(speedup.split(".")[1])
        assert abs(row.speedup - float(speedup)) <= 0.5 * 10**-decimals + 1e-9, where


def test_the_caveats_of_the_paper_preset_are_true() -> None:
    paper, both = preset("paper"), preset("paper-nvme-both")
    assert round(point(paper, 32_000, Setting(trigger_us=1)).speedup, 1) == 15.3
    gets = [row.speedup for row in curve(paper, setting=Setting(direction="get"))]
    assert round(gets[0], 1) == 19.3
    assert round(gets[4], 1) == 17.5
    assert round(512e6 / point(paper, 512_000_000).triggered_s / 1e9, 1) == 16.7
    ratios = [row.speedup for row in curve(both)]
    assert (round(min(ratios), 1), round(max(ratios), 1)) == (2.9, 5.0)
    eight = [row.speedup for row in curve(both, setting=Setting(drives=8))]
    assert (round(min(eight)), round(max(eight))) == (9, 12)


@pytest.mark.parametrize("entry", PRESETS.values(), ids=str)
def test_every_preset_names_its_caveats_and_gives_positive_times(entry: Preset) -> None:
    assert entry.caveats
    for row in curve(entry):
        assert row.cpu_s > 0
        assert row.triggered_s > 0


def test_fair_charges_both_paths_the_drive_and_never_beats_its_link() -> None:
    fair = preset("fair")
    assert fair.nvme_on_cpu_path
    assert fair.nvme_on_triggered_path
    for row in curve(fair):
        assert row.size_bytes / row.triggered_s < 12.5e9


@pytest.mark.parametrize("path", ["cpu", "triggered"])
@pytest.mark.parametrize(("direction", "kind"), [("put", "put"), ("get", "get")])
def test_fair_takes_as_long_as_one_message_of_the_event_model(
    path: PathName, direction: Direction, kind: str
) -> None:
    """One set of numbers: the default cluster's stops, added up, are the closed form."""
    one = Cluster(engines=1, gpus_per_engine=1, gpus_per_root=1, nodes=1, drives_per_node=1)
    for size_bytes in (32_000, 10**6, 512 * 10**6):
        with Events() as events:
            plant = Plant(events, one, path)
            first, then = (
                (plant.put_first, plant.put_then) if kind == "put" else (plant.get_first, plant.get_then)
            )
            events.add_list(np.array([(0.0, size_bytes, 1.0, first, then)], dtype=MESSAGE))
            note = events.run(1e9)
        assert note is not None
        found = point(preset("fair"), size_bytes, Setting(direction=direction))
        assert note[0] == pytest.approx(found.cpu_s if path == "cpu" else found.triggered_s, rel=1e-9)


def test_every_speed_has_a_range_around_it_and_a_source() -> None:
    assert set(SPREADS) == {field.name for field in fields(HARDWARE)}
    for name, spread in SPREADS.items():
        assert spread.low < getattr(HARDWARE, name) < spread.high
        assert len(spread.source) > 5
        assert getattr(Cluster(), name) == getattr(HARDWARE, name)


def test_messages_add_up_with_the_rest_as_one_of_its_own() -> None:
    entry = preset("literal-ms")
    whole, rest = point(entry, 512_000_000), point(entry, 7)
    both = point(entry, 2 * 512_000_000 + 7)
    assert both.cpu_s == pytest.approx(2 * whole.cpu_s + rest.cpu_s)
    assert both.triggered_s == pytest.approx(2 * whole.triggered_s + rest.triggered_s)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("32KB", 32_000), ("32 kib", 32_768), ("1.5GB", 1_500_000_000), ("7", 7), ("5TB", 5 * 10**12)],
)
def test_sizes_are_parsed(text: str, size_bytes: int) -> None:
    assert parse_bytes("--size", text) == size_bytes
    assert parse_bytes("--size", format_bytes(size_bytes)) == size_bytes


@pytest.mark.parametrize("text", ["", "KB", "-1KB", "1XB", "1e9", "0.5", "nan", "9" * 40])
def test_an_invalid_size_is_refused_by_name_with_the_allowed_forms(text: str) -> None:
    with pytest.raises(OutOfRange, match=r"--size is .*; it takes a size in bytes, "):
        parse_bytes("--size", text)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"drives": 0}, "--drives is 0; it takes a number of drives, from 1 to 64."),
        ({"trigger_us": float("nan")}, "--trigger-us is nan; it takes microseconds, from 0 to 1,000,000."),
        ({"chunk_bytes": 1}, "--chunk is 1; it takes bytes, from 4,096 to 1,000,000,000,000,000."),
    ],
)
def test_settings_out_of_range_name_parameter_unit_and_range(setting: dict[str, int], message: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        Setting(**setting)  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.95e-6, "1.95e-06"), (0.11, "0.110"), (1.6, "1.60"), (397.2, "397"), (5753.0, "5,753")],
)
def test_seconds_are_printed_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
