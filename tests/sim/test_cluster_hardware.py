"""Every number of a cluster, through its unit; and files and options that set them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import pytest

from sim.hardware import changed
from sim.replay.cluster_hardware import Cluster, read_cluster
from sim.replay.run import Terms
from sim.replay.simulate import Result, simulate
from sim.units import OutOfRange
from tests.sim.replay_rig import ONE, TINY, requests

if TYPE_CHECKING:
    from pathlib import Path

PUT = 1024 * 2000 / 4  # bytes of one layer of the first request
PAGES = 2  # of it
WORK = requests((0, 1024, 100, [1, 2]), (10, 1100, 100, [1, 2, 3]))


def _run(cluster: Cluster, path: str = "cpu") -> Result:
    return simulate(WORK, TINY, cluster, path, Terms(always_get=True, decode_put_tokens=100))  # type: ignore[arg-type]


def _first_lag_s(cluster: Cluster) -> float:
    return float(_run(cluster).put_lag_s[0])


# What one layer's PUT bytes take longer when the number is set to the value.
BY_HAND: dict[str, tuple[float, float]] = {
    "pcie_bytes_per_s": (1e9, 2 * (PUT / 1e9 - PUT / 55e9)),
    "pcie_latency_s": (1e-3, 2 * (1e-3 - 1e-6)),
    "nic_message_s": (1e-3, PAGES * (1e-3 - 5e-7)),
    "link_bits_per_s": (1e9, 8 * (PUT / 1e9 - PUT / 100e9)),
    "link_latency_s": (1e-3, 1e-3 - 2e-6),
    "cpu_message_s": (1e-3, PAGES * (1e-3 - 1e-5)),
    "host_copy_bytes_per_s": (1e9, PUT / 1e9 - PUT / 10e9),
    "node_memory_bytes_per_s": (1e9, PUT / 1e9 - PUT / 50e9),
    "drive_write_bytes_per_s": (1e9, PUT / 1e9 - PUT / 2.34e9),
    "drive_message_s": (1e-3, PAGES * (1e-3 - 5e-6)),
    "drive_write_latency_s": (1e-3, 1e-3 - 2e-5),
}
ELSEWHERE = {
    # what these do is shown by a test of their own, here or in test_replay
    *("engines", "gpus_per_engine", "gpus_per_root", "nodes", "links_per_node", "drives_per_node"),
    *("decode_slots", "gpu_flops_per_s", "gpu_mfu", "decode_token_s", "trigger_message_s"),
    *("host_copy_threads", "node_memory_bytes", "drive_read_bytes_per_s", "drive_read_latency_s"),
    *("drive_capacity_bytes", "gpu_usd_per_hour", "node_usd_per_hour", "drive_usd_per_hour"),
    *("gpu_memory_bytes", "link_usd_per_hour", "memory_gb_usd_per_hour"),
    # and these in test_stepped
    *("prefill_engines", "step_tokens", "step_overhead_s", "gpu_memory_bytes_per_s"),
}


def test_every_number_is_checked_by_hand_somewhere() -> None:
    assert set(BY_HAND) | ELSEWHERE == {field.name for field in fields(Cluster)}
    assert not set(BY_HAND) & ELSEWHERE


@pytest.mark.parametrize("name", BY_HAND)
def test_each_number_has_the_effect_of_its_unit(name: str) -> None:
    value, longer_s = BY_HAND[name]
    slower = changed(ONE, [(name, value)], "--set")
    assert _first_lag_s(slower) - _first_lag_s(ONE) == pytest.approx(longer_s, rel=1e-6)


def test_gpus_are_counted_in_operations_a_second_and_a_share_of_them() -> None:
    base = _run(ONE).ttft_s[0]
    assert _run(replace(ONE, gpu_flops_per_s=8e12)).ttft_s[0] == pytest.approx(base / 2)
    assert _run(replace(ONE, gpu_mfu=0.25)).ttft_s[0] == pytest.approx(base * 2)


def test_the_tokens_of_an_answer_take_their_time() -> None:
    longer = _run(replace(ONE, decode_token_s=0.02)).duration_s - _run(ONE).duration_s
    assert longer == pytest.approx(100 * 0.01, abs=1e-3)


def test_a_trigger_takes_its_time_only_on_the_triggered_path() -> None:
    slow = replace(ONE, trigger_message_s=1e-3)
    longer = [_run(slow, path).put_lag_s[0] - _run(ONE, path).put_lag_s[0] for path in ("triggered", "cpu")]
    assert longer == pytest.approx([PAGES * (1e-3 - 1e-6), 0.0])


def test_reading_takes_its_time() -> None:
    base = _run(ONE).fetch_s[1]
    assert _run(replace(ONE, drive_read_latency_s=1e-3)).fetch_s[1] - base == pytest.approx(1e-3 - 8e-5)
    slow = _run(replace(ONE, drive_read_bytes_per_s=1e8)).fetch_s[1]
    assert slow - base == pytest.approx(4 * PUT / 1e8 - 4 * PUT / 5.22e9, rel=0.01)


def test_links_and_copying_threads_work_side_by_side() -> None:
    burst = requests(*((0.0, 512, 0, [i]) for i in range(6)))
    wide = replace(ONE, gpu_flops_per_s=1e15, drive_write_bytes_per_s=1e14, drive_message_s=0)
    for name, slow in (("host_copy_threads", {"host_copy_bytes_per_s": 1e6}),):
        one = simulate(burst, TINY, replace(wide, **slow, **{name: 1}), "cpu")  # type: ignore[arg-type]
        two = simulate(burst, TINY, replace(wide, **slow, **{name: 2}), "cpu")  # type: ignore[arg-type]
        assert two.duration_s == pytest.approx(one.duration_s / 2, rel=0.02)
    links = replace(wide, engines=2, link_bits_per_s=1e7)
    one = simulate(burst, TINY, links, "triggered")
    two = simulate(burst, TINY, replace(links, links_per_node=2), "triggered")
    assert two.duration_s == pytest.approx(one.duration_s / 2, rel=0.05)


def test_money_is_counted_by_the_hour() -> None:
    cluster = replace(ONE, nodes=2, drives_per_node=3, gpu_usd_per_hour=36, node_usd_per_hour=7.2)
    cluster = replace(cluster, drive_usd_per_hour=0.6, links_per_node=3, link_usd_per_hour=0.2)
    assert cluster.gpus_usd_per_hour == 36
    assert cluster.storage_usd_per_hour == pytest.approx(2 * (7.2 + 3 * 0.2 + 3 * 0.6))
    memory = replace(cluster, node_memory_bytes=5e9, memory_gb_usd_per_hour=0.1)
    assert memory.storage_usd_per_hour == pytest.approx(cluster.storage_usd_per_hour + 2 * 5 * 0.1)
    result = _run(cluster)
    assert result.usd == pytest.approx((36 + 19.2) / 3600 * result.duration_s)
    assert _run(cluster, "recompute").usd_per_hour == 36


def test_a_file_changes_the_settings_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[cluster]\nengines = 3\nlink_bits_per_s = 4e11\n")
    assert read_cluster(path) == replace(Cluster(), engines=3, link_bits_per_s=4e11)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "with a table [cluster]."),
        ("[cluster", "can't be read: it is not TOML ("),
        ("[cluster]\nengine = 1", "--cluster is 'engine'; it takes a name of the cluster, one of engines, "),
        ("[cluster]\nengines = 0", "--cluster engines is 0; it takes a number of engines, from 1 to 4,096."),
        (
            "[cluster]\nengines = 1.5",
            "--cluster engines is 1.5; it takes a number of engines, a whole number.",
        ),
        (
            "[cluster]\nlink_bits_per_s = 'x'",
            "is 'x'; it takes bits a second, from 1,000,000 to 1,000,000,000,000,000.",
        ),
        ("[cluster]\ngpu_mfu = 2", "--cluster gpu_mfu is 2; it takes a share, from 0.001 to 1."),
        ("[cluster]\ngpus_per_root = 3", "gpus_per_root is 3; it takes GPUs, a divisor of all 16 GPUs."),
        (
            "[cluster]\ndecode_slots = 0",
            "--cluster decode_slots is 0; it takes a number of slots, from 1 to 4,096.",
        ),
    ],
)
def test_an_error_names_parameter_unit_and_range(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(OutOfRange) as caught:
        read_cluster(path)
    assert message in str(caught.value)
