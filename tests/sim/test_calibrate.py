"""Fits, profiles and checks, over machines that are made up."""

from __future__ import annotations

import json
import random
import stat
import statistics
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.calibrate import fio
from sim.calibrate.check import ERROR_MEDIAN_MAX, compare, error_median, predict
from sim.calibrate.fit import fit
from sim.calibrate.profile import (
    Beside,
    base_s,
    cluster_values,
    dump_profile,
    fit_profile,
    measured_preset,
    read_profile,
)
from sim.calibrate.samples import Measured, Sample, dump, parse
from sim.cli import main
from sim.curve import Setting, stages
from sim.hardware import changed
from sim.replay.cluster_hardware import Cluster
from sim.units import OutOfRange

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [512 << shift for shift in range(0, 19, 2)]


def _sample(part: str, what: str, size_bytes: int, count: int, seconds: float) -> Sample:
    return Sample(part, what, size_bytes, count, seconds, seconds, seconds)


def _machine(noise: float = 0.0, seed: int = 1) -> Measured:
    """A machine that behaves exactly like the model, plus noise."""
    rng = random.Random(seed)

    def about(seconds: float) -> float:
        return seconds * (1 + noise * rng.uniform(-1, 1))

    samples = []
    for m in (4096 << shift for shift in range(0, 13, 2)):
        samples.append(_sample("memory", "copy", m, 1, about(1e-7 + m / 10e9)))
        samples.append(_sample("link", "put", m, 1, about(50e-6 + m / 3e9)))
        samples.append(_sample("link", "put", m, 101, about(50e-6 + m / 3e9 + 100 * (5e-6 + m / 2.5e9))))
    samples.append(_sample("link", "untriggered", 4096, 1, 47e-6 + 4096 / 3e9))
    for m in SIZES:
        for depth in (1, 8, 32):
            samples.append(_sample("drive", "randwrite", m, depth, about(depth * (30e-6 + m / 2e9))))
            samples.append(_sample("drive", "randread", m, depth, about(depth * (20e-6 + m / 4e9))))
    for part, sizes in (("node", (4096, 65536, 1 << 20)), ("path", (32768, 1 << 19, 1 << 22))):
        for m in sizes:
            link_1, link_n = 50e-6 + m / 3e9, 5e-6 + m / 2.5e9
            write, read = 30e-6 + m / 2e9, 20e-6 + m / 4e9
            samples.append(_sample(part, "bare link", m, 1, about(link_1)))
            samples.append(_sample(part, "bare link", m, 51, about(link_1 + 50 * link_n)))
            for depth in (1, 8):
                samples.append(_sample(part, "bare write", m, depth, about(depth * write)))
                samples.append(_sample(part, "bare read", m, depth, about(depth * read)))
            for what, first, each in (
                ("landed", link_1 + 100e-6, link_n + 20e-6 + m / 20e9),
                ("written", link_1 + write + 200e-6, max(link_n, write) + 30e-6),
                ("get", link_1 + read + 500e-6, max(link_n, read) + 40e-6 + m / 5e9),
            ):
                samples.append(_sample(part, what, m, 1, about(first)))
                samples.append(_sample(part, what, m, 51, about(first + 50 * each)))
    return Measured({"cores": 2, "kernel": "6.1"}, tuple(samples))


def test_a_line_is_recovered() -> None:
    line = fit([(m, 1e-4 + m / 2e9) for m in SIZES])
    assert line.latency_s == pytest.approx(1e-4)
    assert line.s_per_byte == pytest.approx(5e-10)
    assert (line.size_bytes_min, line.size_bytes_max, line.points) == (512, 128 << 20, 10)
    assert line.error_max < 1e-9


def test_relative_weights_beat_plain_least_squares_by_far() -> None:
    """A drive that is slower per byte at its largest sizes, which dominate plain least squares."""
    points = [(m, 8e-5 + m / 3e9 * (1 + (m > 1 << 23))) for m in SIZES]
    line = fit(points)
    slope, latency = np.polyfit([m for m, _ in points], [t for _, t in points], 1)
    plain = statistics.median(abs(latency + slope * m - t) / t for m, t in points)
    assert plain > 1.5
    assert line.error_median < 0.25
    assert line.error_median == statistics.median(abs(line.seconds(m) - t) / t for m, t in points)


@pytest.mark.parametrize(
    "points", [[(512, 1e-3), (1 << 20, 1e-6)], [(512, 1e-9), (1 << 20, 1.0)], [(4096, 2e-3)], [(1, 5.0)] * 3]
)
def test_neither_number_is_ever_negative(points: list[tuple[int, float]]) -> None:
    line = fit(points)
    assert line.latency_s >= 0
    assert line.s_per_byte >= 0


def test_nothing_is_extrapolated() -> None:
    line = fit([(m, 1e-3 + m / 1e9) for m in (4096, 1 << 20)])
    assert line.seconds(1) == line.seconds(4096)
    assert line.seconds(10 << 20) == pytest.approx(10 * line.seconds(1 << 20))


def test_a_profile_holds_what_the_machine_is() -> None:
    profile = fit_profile(_machine())
    assert profile.line("link.put.1").latency_s == pytest.approx(50e-6)
    assert profile.line("link.put.train").s_per_byte == pytest.approx(1 / 2.5e9)
    assert profile.line("node.landed.1").latency_s == pytest.approx(100e-6)
    assert profile.line("node.get.train").s_per_byte == pytest.approx(1 / 5e9)
    assert profile.trigger_s == pytest.approx(3e-6)
    assert base_s(profile, "written", "1", 4096) == pytest.approx(50e-6 + 4096 / 3e9 + 30e-6 + 4096 / 2e9)
    assert base_s(profile, "get", "train", 1 << 20) == pytest.approx(5e-6 + (1 << 20) / 2.5e9)


def test_a_profile_round_trips_through_its_file(tmp_path: Path) -> None:
    profile = fit_profile(_machine(noise=0.1))
    path = tmp_path / "p.toml"
    path.write_text(dump_profile(profile))
    assert read_profile(path) == profile


def test_a_correct_model_is_within_its_noise_and_a_wrong_one_is_reported() -> None:
    quiet = compare(fit_profile(_machine()), _machine())
    assert error_median(quiet) < 1e-6
    noisy = compare(fit_profile(_machine(noise=0.15, seed=1)), _machine(noise=0.15, seed=2))
    assert 0.01 < error_median(noisy) < ERROR_MEDIAN_MAX
    machine = _machine()
    product = [
        one if one.what.startswith("bare") else replace(one, seconds=2 * one.seconds)
        for one in machine.samples
    ]
    assert error_median(compare(fit_profile(machine), Measured({}, tuple(product)))) == pytest.approx(0.5)


def test_a_change_of_speed_between_measurements_is_not_a_model_error() -> None:
    """Link and drive have become three times as slow: the control measurement beside them shows it."""
    profile = fit_profile(_machine())
    bare = Beside(_machine(), "path")

    def slower(one: Sample) -> Sample:
        if one.what.startswith("bare"):
            return replace(one, seconds=3 * one.seconds)
        if one.part != "path":
            return one
        first_s, each_s = (bare.base_s(one.what, count, one.size_bytes) for count in ("1", "train"))
        return replace(one, seconds=one.seconds + 2 * first_s + 2 * (one.count - 1) * each_s)

    now = Measured({}, tuple(map(slower, _machine().samples)))
    since = Beside(now, "path").since(profile)
    assert since == {"link.1": pytest.approx(3), "link.train": pytest.approx(3), "drive": pytest.approx(3)}
    assert error_median(compare(profile, now)) < 1e-6
    assert error_median(compare(profile, now, alone=True)) > 0.3


def test_measurements_without_the_bare_link_are_refused() -> None:
    machine = _machine()
    without = tuple(one for one in machine.samples if one.what != "bare link")
    with pytest.raises(OutOfRange, match="without what the bare link or drive took beside"):
        fit_profile(replace(machine, samples=without))


def test_a_train_is_its_first_block_and_all_the_others() -> None:
    profile = fit_profile(_machine())
    one, two, three = (predict(profile, "landed", 1 << 20, blocks) for blocks in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert two - one == pytest.approx(5e-6 + (1 << 20) / 2.5e9 + 20e-6 + (1 << 20) / 20e9)


def test_the_measured_preset_uses_the_measured_costs() -> None:
    profile = fit_profile(_machine())
    m = 10**6
    for direction, drive_s in (("put", 30e-6 + m / 2e9), ("get", 20e-6 + m / 4e9)):
        costs = stages(measured_preset(profile, direction), m, Setting(direction=direction))  # type: ignore[arg-type]
        triggered_s, cpu_s = sum(cost.triggered_s for cost in costs), sum(cost.cpu_s for cost in costs)
        assert triggered_s == pytest.approx(50e-6 + m / 3e9 + drive_s)
        assert cpu_s - triggered_s == pytest.approx(1e-7 + m / 10e9)


def test_a_cluster_adopts_the_measurements() -> None:
    cluster = changed(Cluster(), cluster_values(fit_profile(_machine())).items(), "--profile")
    assert cluster.link_bits_per_s == pytest.approx(20e9)
    assert cluster.nic_message_s == pytest.approx(5e-6)
    assert cluster.trigger_message_s == pytest.approx(3e-6)
    assert cluster.link_latency_s == pytest.approx(42e-6)
    assert cluster.host_copy_bytes_per_s == pytest.approx(10e9)
    assert cluster.drive_write_bytes_per_s == pytest.approx(2e9)
    assert cluster.drive_read_bytes_per_s == pytest.approx(4e9)
    assert cluster.drive_read_latency_s == pytest.approx(20e-6)


def test_measurements_round_trip_through_their_file() -> None:
    machine = _machine(noise=0.1)
    assert parse(dump(machine), "x") == machine


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"samples": [{"part": "link"}]}',
        (
            '{"samples": [{"part": "a", "what": "b", "size_bytes": 0, "count": 1, "seconds": 1, "seconds_min": 1,'
            ' "seconds_max": 1}]}'
        ),
    ],
)
def test_insufficient_measurements_are_refused(text: str) -> None:
    with pytest.raises(OutOfRange, match=r"FILE is .*; it takes measurements, "):
        parse(text, "FILE")


@pytest.mark.parametrize("text", ["", "[line", "[trigger]\nseconds=1\n[line.x]\nlatency_s=-1"])
def test_an_invalid_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(OutOfRange):
        read_profile(path)


FAKE_FIO = """#!{python}
import json, sys
options = dict(a.partition("=")[::2] for a in sys.argv[1:])
size, depth = int(options["--bs"]), int(options["--iodepth"])
assert options.get("--runtime", "50ms") == "50ms"
if size == 512:
    sys.exit("fio: refuses 512")
ns = depth * (50_000 + size / 2)
job = {{"lat_ns": {{"mean": ns}}, "clat_ns": {{"percentile": {{"50.000000": ns / 2, "99.000000": 3 * ns}}}}}}
empty = {{"lat_ns": {{"mean": 0}}, "clat_ns": {{}}}}
way = "read" if options["--rw"].endswith("read") else "write"
print("fio: a line of chatter")
print(json.dumps({{"jobs": [{{"read": empty, "write": empty, way: job}}]}}))
"""


@pytest.fixture
def fake_fio(tmp_path: Path) -> str:
    path = tmp_path / "fio"
    path.write_text(FAKE_FIO.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_fio_is_swept_and_failures_are_noted(fake_fio: str, tmp_path: Path) -> None:
    shares: list[float] = []
    found = list(
        fio.sweep(fake_fio, tmp_path, 50, shares.append, sizes_bytes=(512, 1 << 20, 1 << 27), depths=(1, 32))
    )
    samples = [one for one in found if isinstance(one, Sample)]
    notes = [one for one in found if isinstance(one, str)]
    assert len(samples) == 4 * 3
    assert "fio write of 512 B at depth 1: fio: refuses 512" in notes
    assert "fio randread of 134217728 B at depth 32: would take more than 1 GiB of memory" in notes
    ns = 32 * (50_000 + (1 << 20) / 2)
    assert Sample("drive", "randread", 1 << 20, 32, ns / 1e9, ns / 2e9, 3 * ns / 1e9) in samples
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert sorted(shares) == shares
    assert list(tmp_path.glob("kvsim-fio-*")) == [], "its file is removed"


def test_an_invalid_fio_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutOfRange, match="fio is not usable"):
        list(fio.sweep(str(tmp_path / "none"), tmp_path, 50, lambda _: None))


def test_fit_and_check_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured, profile, plot = tmp_path / "m.json", tmp_path / "p.toml", tmp_path / "p.svg"
    measured.write_text(dump(_machine(noise=0.1)))
    assert main(["calibrate", "fit", str(measured), "--out", str(profile), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "link.put.train" in text
    assert "Drive: randread" in plot.read_text()
    check = ["calibrate", "check", str(profile), "--measured", str(measured)]
    assert main([*check, "--plot", str(plot)]) == 0
    assert "within 25 %" in capsys.readouterr().out
    assert "dots are measured" in plot.read_text()
    assert main([*check, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert document["since"]["drive"] == pytest.approx(1.0, rel=0.2)
    assert len(document["points"]) == 18
    assert main(["curve", "--preset", "measured", "--profile", str(profile)]) == 0
    assert "fitted from a machine of 2 cores" in capsys.readouterr().out
    assert main(["plan", "--users", "10", "--way", "triggered", "--profile", str(profile)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["curve", "--preset", "measured"],
            "--profile is not given; it takes a profile for --preset measured, ",
        ),
        (
            ["curve", "--profile", "p.toml"],
            "--profile is p.toml; it takes a profile, with --preset measured only.",
        ),
        (
            ["calibrate", "fit", "none.json"],
            "MEASURED: none.json can't be read: No such file or directory.\n",
        ),
        (["calibrate", "run", "--data", "/none"], "--data is /none; it takes a folder, on the drive that"),
        (
            ["calibrate", "run", "--runtime-ms", "1"],
            "--runtime-ms is 1; it takes milliseconds a point, from 50 ",
        ),
        (
            ["calibrate", "check", "none.toml"],
            "--profile: none.toml can't be read: No such file or directory.\n",
        ),
    ],
)
def test_a_bad_argument_is_one_sentence_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"kvsim: {message}")
