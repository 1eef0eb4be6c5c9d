"""All numbers of a preset by name, so that a user can replace them: `--set NAME=VALUE`.

What always holds: a name ends with its unit; a value outside its range is refused with both; a changed preset lists
the change among its caveats, with the original value.

What it doesn't do: the settings of a run (size, chunk, drives, direction); those have options of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from sim.presets import Fit, Preset, Stages
from sim.units import OutOfRange, plain, require

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PARAMETERS", "Parameter", "override", "value_of"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number of a preset: its place, unit and range."""

    name: str
    unit: str
    low: float
    high: float
    whole: bool = False


_S_PER_BYTE = ("seconds a byte", 0.0, 1.0)
_SECONDS = ("seconds", 0.0, 1e4)
_YES_NO = ("0 for no or 1 for yes", 0.0, 1.0)
_FIT = {
    "bandwidth_bytes_per_s": ("bytes a second", 1.0, 1e15),
    "bandwidth_slope_per_s": ("bytes a second for each byte of the message", 0.0, 1e6),
    "latency": ("the unit named by nvme_latency_unit_s", 0.0, 1e9),
    "latency_per_byte": ("the unit named by nvme_latency_unit_s, a byte", 0.0, 1e3),
}
_PRESET = (
    Parameter("nic_inner_stages", *_YES_NO, whole=True),
    Parameter("dram_passes", "passes over DRAM", 0, 100, whole=True),
    Parameter("cpu_copies", "copies by the CPU", 0, 100, whole=True),
    Parameter("cpu_copy_factor", "a factor on cpu_s_per_byte", 0, 1e9),
    Parameter("cpu_software_s_per_byte", *_S_PER_BYTE),
    Parameter("cpu_message_s", *_SECONDS),
    Parameter("trigger_message_s", *_SECONDS),
    Parameter("nvme_on_cpu_path", *_YES_NO, whole=True),
    Parameter("nvme_on_triggered_path", *_YES_NO, whole=True),
    Parameter("nvme_latency_unit_s", *_SECONDS),
    Parameter("nic_message_s", *_SECONDS),
    Parameter("node_memory_s_per_byte", *_S_PER_BYTE),
    Parameter("fit_bytes_max", "bytes; the NVMe fit is held beyond them", 1, 1e15, whole=True),
)
_FITS = ("nvme_write", "nvme_read")


def _all() -> Iterable[Parameter]:
    for field in fields(Stages):
        if field.name in _FITS:
            for part, (unit, low, high) in _FIT.items():
                yield Parameter(f"{field.name}_{part}", unit, low, high)
        else:
            unit, low, high = _S_PER_BYTE if field.name.endswith("_s_per_byte") else _SECONDS
            yield Parameter(field.name, unit, low, high)
    yield from _PRESET


PARAMETERS: dict[str, Parameter] = {entry.name: entry for entry in _all()}


def _fit_of(name: str) -> tuple[str, str] | None:
    for fit in _FITS:
        if name.startswith(fit + "_"):
            return fit, name.removeprefix(fit + "_")
    return None


def value_of(preset: Preset, name: str) -> float | None:
    """The number; None: no bound."""
    fit = _fit_of(name)
    holder: Fit | Stages | Preset = preset
    if fit is not None:
        holder, name = getattr(preset.stages, fit[0]), fit[1]
    elif name in Stages.__dataclass_fields__:
        holder = preset.stages
    value = getattr(holder, name)
    return None if value is None else float(value)


def _with(preset: Preset, parameter: Parameter, value: float) -> Preset:
    fit = _fit_of(parameter.name)
    part: dict[str, Any]
    if fit is not None:
        part = {fit[0]: replace(getattr(preset.stages, fit[0]), **{fit[1]: value})}
        return replace(preset, stages=replace(preset.stages, **part))
    part = {parameter.name: value}
    if parameter.name in Stages.__dataclass_fields__:
        return replace(preset, stages=replace(preset.stages, **part))
    now = getattr(preset, parameter.name)
    part = {
        parameter.name: bool(value) if isinstance(now, bool) else int(value) if parameter.whole else value
    }
    return replace(preset, **part)


def override(preset: Preset, assignments: Iterable[str]) -> Preset:
    """Set NAME=VALUE in a preset, and add a caveat."""
    for text in assignments:
        name, _, written = text.partition("=")
        parameter = PARAMETERS.get(name.strip())
        if parameter is None:
            raise OutOfRange("--set", repr(text), "NAME=VALUE", "NAME one of " + ", ".join(PARAMETERS))
        try:
            value = float(written)
        except ValueError:
            raise OutOfRange(
                f"--set {parameter.name}",
                repr(written),
                parameter.unit,
                f"a number from {plain(parameter.low)} to {plain(parameter.high)}",
            ) from None
        require(f"--set {parameter.name}", value, parameter.unit, parameter.low, parameter.high)
        if parameter.whole and value != int(value):
            raise OutOfRange(f"--set {parameter.name}", written, parameter.unit, "a whole number")
        before = value_of(preset, parameter.name)
        was = "no bound" if before is None else f"{before:g}"
        note = f"Changed by --set: {parameter.name} = {value:g} (the preset has {was})."
        preset = _with(preset, parameter, value)
        preset = replace(preset, caveats=(*preset.caveats, note))
    return preset
