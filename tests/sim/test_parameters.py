"""Every parameter of a preset, fed through its unit: what it adds to one message of a megabyte, by hand."""

from __future__ import annotations

import pytest

from sim.curve import Setting, point
from sim.parameters import PARAMETERS, override, value_of
from sim.presets import preset
from sim.units import OutOfRange

M = 10**6
# literal-ms charges every stage: 2 PCIe passes, 2 DRAM passes and 1 copy on the CPU path, latencies in ms.
WRITE_S = 3.3e-3 + 4.10e-7 * M * 1e-3 + M / (2.34e9 + 6.83 * M)
TRANSFER_S = M / (2.34e9 + 6.83 * M)

# name: (the value it is set to, what the CPU path then takes longer in s, what the triggered path)
BY_HAND: dict[str, tuple[float, float, float]] = {
    "pcie_s_per_byte": (8.12e-12 + 1e-9, 2e-3, 1e-3),
    "vram_s_per_byte": (4.55e-13 + 1e-9, 1e-3, 1e-3),
    "cpu_s_per_byte": (4.55e-13 + 1e-9, 1e-3, 0),
    "dram_s_per_byte": (1.21e-12 + 1e-9, 2e-3, 0),
    "nic_serialisation_s_per_byte": (5.13e-11 + 1e-9, 1e-3, 1e-3),
    "nic_memory_s_per_byte": (1.43e-11 + 1e-9, 1e-3, 1e-3),
    "nic_alu_s_per_byte": (5.22e-12 + 1e-9, 1e-3, 1e-3),
    "pcie_latency_s": (3.2e-8 + 1, 2, 1),
    "network_latency_s": (1.21e-12 + 1, 1, 1),
    "nvme_write_bandwidth_bytes_per_s": (
        1e6,
        M / (1e6 + 6.83 * M) - TRANSFER_S,
        M / (1e6 + 6.83 * M) - TRANSFER_S,
    ),
    "nvme_write_bandwidth_slope_per_s": (0, M / 2.34e9 - TRANSFER_S, M / 2.34e9 - TRANSFER_S),
    "nvme_write_latency": (4.3, 1e-3, 1e-3),
    "nvme_write_latency_per_byte": (4.10e-7 + 1e-6, 1e-3, 1e-3),
    "nic_inner_stages": (0, -(1.43e-11 + 5.22e-12) * M, -(1.43e-11 + 5.22e-12) * M),
    "dram_passes": (3, 1.21e-12 * M, 0),
    "cpu_copies": (2, 4.55e-13 * M, 0),
    "cpu_copy_factor": (1001, 1000 * 4.55e-13 * M, 0),
    "cpu_software_s_per_byte": (1e-9, 1e-3, 0),
    "cpu_message_s": (2, 2, 0),
    "trigger_message_s": (2, 0, 2),
    "nic_message_s": (2, 2, 2),
    "node_memory_s_per_byte": (1e-9, 1e-3, 1e-3),
    "nvme_on_cpu_path": (0, -WRITE_S, 0),
    "nvme_on_triggered_path": (0, 0, -WRITE_S),
    "nvme_latency_unit_s": (1, 0.999 * (3.3 + 4.10e-7 * M), 0.999 * (3.3 + 4.10e-7 * M)),
    "fit_bytes_max": (
        1000,
        M / (2.34e9 + 6.83e3) - TRANSFER_S - 4.10e-7 * 1e-3 * (M - 1000),
        M / (2.34e9 + 6.83e3) - TRANSFER_S - 4.10e-7 * 1e-3 * (M - 1000),
    ),
}
for _name in ("bandwidth_bytes_per_s", "bandwidth_slope_per_s", "latency", "latency_per_byte"):
    BY_HAND[f"nvme_read_{_name}"] = (1.0, 0, 0)  # a put doesn't read; its own test is below


def test_every_parameter_is_checked_by_hand() -> None:
    assert set(BY_HAND) == set(PARAMETERS)


@pytest.mark.parametrize("name", BY_HAND)
def test_each_parameter_has_the_effect_of_its_unit(name: str) -> None:
    value, cpu_s, triggered_s = BY_HAND[name]
    before = point(preset("literal-ms"), M)
    after = point(override(preset("literal-ms"), [f"{name}={value!r}"]), M)
    assert after.cpu_s - before.cpu_s == pytest.approx(cpu_s, rel=1e-6, abs=1e-15)
    assert after.triggered_s - before.triggered_s == pytest.approx(triggered_s, rel=1e-6, abs=1e-15)


def test_the_reading_drive_is_changed_likewise_and_only_for_gets() -> None:
    changed = override(
        preset("literal-ms"),
        [
            "nvme_read_bandwidth_bytes_per_s=1e6",
            "nvme_read_bandwidth_slope_per_s=1",
            "nvme_read_latency=7",
            "nvme_read_latency_per_byte=1e-6",
        ],
    )
    get = Setting(direction="get")
    other = point(preset("literal-ms"), M, get).cpu_s - 2.03e-3 - 2.63e-7 * M * 1e-3 - M / (5.22e9 + 19.4 * M)
    assert point(changed, M, get).cpu_s == pytest.approx(other + 8e-3 + M / (1e6 + M))


def test_settings_are_converted_by_their_units() -> None:
    fair = preset("fair")
    base = point(fair, M)
    assert point(fair, M, Setting(trigger_us=3)).triggered_s - base.triggered_s == pytest.approx(2e-6)
    assert point(fair, M, Setting(drives=2)).cpu_s == pytest.approx(base.cpu_s - M / 2.34e9 / 2)
    chunked = point(fair, M, Setting(chunk_bytes=250_000))
    assert chunked.triggered_s == pytest.approx(4 * point(fair, 250_000).triggered_s)


def test_a_changed_preset_says_so_with_the_original_value() -> None:
    changed = override(preset("fair"), ["pcie_latency_s=2e-6", "fit_bytes_max=5"])
    assert changed.caveats[-2] == "Changed by --set: pcie_latency_s = 2e-06 (the preset has 1e-06)."
    assert changed.caveats[-1] == "Changed by --set: fit_bytes_max = 5 (the preset has no bound)."
    assert value_of(changed, "fit_bytes_max") == 5
    assert value_of(preset("paper"), "fit_bytes_max") is None
    assert preset("fair").caveats[-1] not in changed.caveats[-2:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pcie=1", "--set is 'pcie=1'; it takes NAME=VALUE, NAME one of pcie_s_per_byte, "),
        ("pcie_s_per_byte=-1", "--set pcie_s_per_byte is -1; it takes seconds a byte, from 0 to 1."),
        ("pcie_s_per_byte=fast", "'fast'; it takes seconds a byte, a number from 0 to 1."),
        ("pcie_s_per_byte=nan", "is nan; it takes seconds a byte, from 0 to 1."),
        ("dram_passes=1.5", "--set dram_passes is 1.5; it takes passes over DRAM, a whole number."),
        ("nvme_on_cpu_path=2", "it takes 0 for no or 1 for yes, from 0 to 1."),
    ],
)
def test_an_error_names_parameter_unit_and_range(text: str, message: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        override(preset("fair"), [text])
    assert message in str(caught.value)
