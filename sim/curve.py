"""The closed form: seconds of a CPU-initiated and of a triggered transfer, and their ratio S.

What always holds: a transfer of D bytes is `D // chunk` full messages and one with the rest, on both
paths, one after the other; every stage is charged in full to every message. So times add, nothing
overlaps, and 5 TB costs no more work here than 32 KB.

What it doesn't do: overlap, queueing, or anything shared between transfers. That needs the event model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sim.presets import STAGES
from sim.units import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.presets import Fit, Preset

__all__ = ["CHUNK_BYTES", "SIZES_BYTES", "Direction", "Point", "Setting", "curve", "point"]

Direction = Literal["put", "get"]

CHUNK_BYTES = 512_000_000
SIZES_BYTES = (32_000, 10**6, 128 * 10**6, 256 * 10**6, 512 * 10**6, 10**9, 5 * 10**12)

_SIZE_BYTES_MAX = 10**15
_CHUNK_BYTES_MIN = 4096
_TRIGGER_US_MAX = 1e6
_DRIVES_MAX = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run may change beside the preset."""

    direction: Direction = "put"
    chunk_bytes: int = CHUNK_BYTES
    trigger_us: float | None = None  # None: the preset's own
    drives: int = 1

    def __post_init__(self) -> None:
        require("--chunk", self.chunk_bytes, "bytes", _CHUNK_BYTES_MIN, _SIZE_BYTES_MAX)
        require("--drives", self.drives, "a number of drives", 1, _DRIVES_MAX)
        if self.trigger_us is not None:
            require("--trigger-us", self.trigger_us, "microseconds", 0, _TRIGGER_US_MAX)


@dataclass(frozen=True, slots=True)
class Point:
    """One row of the curve."""

    size_bytes: int
    cpu_s: float
    triggered_s: float

    @property
    def speedup(self) -> float:
        """S: how many times longer the CPU-initiated transfer takes."""
        return self.cpu_s / self.triggered_s


def _drive_s(fit: Fit, preset: Preset, setting: Setting, message_bytes: int) -> float:
    """One message to or from the drives, which share it evenly."""
    fitted = message_bytes if preset.fit_bytes_max is None else min(message_bytes, preset.fit_bytes_max)
    transfer_s = message_bytes / (fit.bandwidth_base + fit.bandwidth_slope * fitted) / setting.drives
    latency = fit.latency_base + fit.latency_slope * fitted
    return transfer_s + preset.nvme_latency_unit_s * latency


def _message_s(preset: Preset, setting: Setting, message_bytes: int) -> tuple[float, float]:
    """One message by the CPU, and by a trigger."""
    fit = STAGES.nvme_write if setting.direction == "put" else STAGES.nvme_read
    drive_s = _drive_s(fit, preset, setting, message_bytes)
    nic = preset.nic_serialisation
    if preset.nic_inner_stages:
        nic += STAGES.nic_memory + STAGES.nic_alu
    trigger_s = preset.trigger_message_s if setting.trigger_us is None else setting.trigger_us * 1e-6

    triggered_s = trigger_s + STAGES.latency_pcie_s + STAGES.latency_network_s
    triggered_s += message_bytes * (STAGES.vram + STAGES.pcie + nic)
    if preset.nvme_on_triggered_path:
        triggered_s += drive_s

    host = preset.dram_passes * STAGES.dram
    host += preset.cpu_copies * preset.cpu_copy_factor * STAGES.cpu + preset.cpu_software
    cpu_s = preset.cpu_message_s + 2 * STAGES.latency_pcie_s + STAGES.latency_network_s
    cpu_s += message_bytes * (STAGES.vram + 2 * STAGES.pcie + nic + host)
    if preset.nvme_on_cpu_path:
        cpu_s += drive_s
    return cpu_s, triggered_s


def point(preset: Preset, size_bytes: int, setting: Setting | None = None) -> Point:
    """One size, both paths."""
    setting = setting or Setting()
    require("--size", size_bytes, "bytes", 1, _SIZE_BYTES_MAX)
    full, rest = divmod(size_bytes, setting.chunk_bytes)
    cpu_s = triggered_s = 0.0
    for count, message_bytes in ((full, setting.chunk_bytes), (1, rest)):
        if count and message_bytes:
            one_cpu_s, one_triggered_s = _message_s(preset, setting, message_bytes)
            cpu_s += count * one_cpu_s
            triggered_s += count * one_triggered_s
    return Point(size_bytes, cpu_s, triggered_s)


def curve(
    preset: Preset, sizes_bytes: Sequence[int] = SIZES_BYTES, setting: Setting | None = None
) -> list[Point]:
    """Give the sizes' points, in their order."""
    return [point(preset, size_bytes, setting) for size_bytes in sizes_bytes]
