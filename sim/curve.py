"""The closed form: seconds of a CPU-initiated and of a triggered transfer, and their ratio S.

What always holds: a transfer of D bytes is `D // chunk` full messages and one with the rest, on both
paths, one after the other; every stage is charged in full to every message. So times add, nothing
overlaps, and 5 TB costs no more work here than 32 KB.

What it doesn't do: overlap, queueing, or anything shared between transfers. That needs the event model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from sim.units import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.presets import Fit, Preset

__all__ = [
    "CHUNK_BYTES",
    "SIZES_BYTES",
    "SIZE_BYTES_MAX",
    "Direction",
    "Point",
    "Setting",
    "StageCost",
    "curve",
    "point",
    "stages",
]

Direction = Literal["put", "get"]

CHUNK_BYTES = 512_000_000
SIZES_BYTES = (32_000, 10**6, 128 * 10**6, 256 * 10**6, 512 * 10**6, 10**9, 5 * 10**12)

SIZE_BYTES_MAX = 10**15
_CHUNK_BYTES_MIN = 4096
_TRIGGER_US_MAX = 1e6
_DRIVES_MAX = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a run, besides the preset."""

    direction: Direction = "put"
    chunk_bytes: int = CHUNK_BYTES
    trigger_us: float | None = None  # None: the preset's own
    drives: int = 1

    def __post_init__(self) -> None:
        require("--chunk", self.chunk_bytes, "bytes", _CHUNK_BYTES_MIN, SIZE_BYTES_MAX)
        require("--drives", self.drives, "a number of drives", 1, _DRIVES_MAX)
        if self.trigger_us is not None:
            require("--trigger-us", self.trigger_us, "microseconds", 0, _TRIGGER_US_MAX)


class StageCost(NamedTuple):
    """The cost of one stage on each path, in seconds."""

    stage: str
    cpu_s: float
    triggered_s: float


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


def _drive(fit: Fit, preset: Preset, setting: Setting, message_bytes: int) -> tuple[float, float]:
    """Latency and transfer of one message to or from the drives, which share it evenly."""
    fitted = message_bytes if preset.fit_bytes_max is None else min(message_bytes, preset.fit_bytes_max)
    bandwidth = fit.bandwidth_bytes_per_s + fit.bandwidth_slope_per_s * fitted
    latency = fit.latency + fit.latency_per_byte * fitted
    return preset.nvme_latency_unit_s * latency, message_bytes / bandwidth / setting.drives


def _message(preset: Preset, setting: Setting, message_bytes: int) -> list[StageCost]:
    """Every stage of one message, in the order in which a put passes them."""
    cost, m = preset.stages, message_bytes
    trigger_s = preset.trigger_message_s if setting.trigger_us is None else setting.trigger_us * 1e-6
    drive = cost.nvme_write if setting.direction == "put" else cost.nvme_read
    drive_latency_s, drive_transfer_s = _drive(drive, preset, setting, m)
    inner = 1 if preset.nic_inner_stages else 0
    copy_s_per_byte = preset.cpu_copies * preset.cpu_copy_factor * cost.cpu_s_per_byte
    by_cpu, by_trigger = int(preset.nvme_on_cpu_path), int(preset.nvme_on_triggered_path)
    return [
        StageCost("trigger", 0.0, trigger_s),
        StageCost("VRAM", m * cost.vram_s_per_byte, m * cost.vram_s_per_byte),
        StageCost("PCIe", 2 * m * cost.pcie_s_per_byte, m * cost.pcie_s_per_byte),
        StageCost("PCIe latency", 2 * cost.pcie_latency_s, cost.pcie_latency_s),
        StageCost("DRAM", m * preset.dram_passes * cost.dram_s_per_byte, 0.0),
        StageCost("CPU copies", m * copy_s_per_byte, 0.0),
        StageCost("CPU software", preset.cpu_message_s + m * preset.cpu_software_s_per_byte, 0.0),
        StageCost("NIC message", *[preset.nic_message_s] * 2),
        StageCost("NIC memory", *[inner * m * cost.nic_memory_s_per_byte] * 2),
        StageCost("NIC ALU", *[inner * m * cost.nic_alu_s_per_byte] * 2),
        StageCost("NIC serialisation", *[m * cost.nic_serialisation_s_per_byte] * 2),
        StageCost("network latency", cost.network_latency_s, cost.network_latency_s),
        StageCost("node memory", *[m * preset.node_memory_s_per_byte] * 2),
        StageCost("NVMe latency", by_cpu * drive_latency_s, by_trigger * drive_latency_s),
        StageCost("NVMe transfer", by_cpu * drive_transfer_s, by_trigger * drive_transfer_s),
    ]


def stages(preset: Preset, size_bytes: int, setting: Setting | None = None) -> list[StageCost]:
    """One size, both paths, stage by stage, in the order in which a put passes them."""
    setting = setting or Setting()
    require("--size", size_bytes, "bytes", 1, SIZE_BYTES_MAX)
    full, rest = divmod(size_bytes, setting.chunk_bytes)
    parts = [
        (count, _message(preset, setting, message_bytes))
        for count, message_bytes in ((full, setting.chunk_bytes), (1, rest))
        if count and message_bytes
    ]
    return [
        StageCost(
            parts[0][1][i].stage,
            sum(count * costs[i].cpu_s for count, costs in parts),
            sum(count * costs[i].triggered_s for count, costs in parts),
        )
        for i in range(len(parts[0][1]))
    ]


def point(preset: Preset, size_bytes: int, setting: Setting | None = None) -> Point:
    """One size, both paths."""
    costs = stages(preset, size_bytes, setting)
    return Point(size_bytes, sum(cost.cpu_s for cost in costs), sum(cost.triggered_s for cost in costs))


def curve(
    preset: Preset, sizes_bytes: Sequence[int] = SIZES_BYTES, setting: Setting | None = None
) -> list[Point]:
    """Yield the points of the sizes, in order."""
    return [point(preset, size_bytes, setting) for size_bytes in sizes_bytes]
