"""Searches all readings of Tables II and III for one that gives the paper's curves.

Three searches. `literal` takes each of the eleven table entries any number of times: on the CPU path each
of the eight inverse bandwidths 0 to 3 times, on the triggered path 0 or 1 times, each of the three latencies
0 or 1 times on either: 2^30 combinations, coherent or not. `coherent` takes only what hardware could do (both
paths through the same NIC stages, at least one pass over PCIe, the drive on both paths, one or none), over
one to eight NICs and one to eight drives. `with_one_extra` gives each coherent reading one free
parameter and solves for its interval.

What always holds: a reading matches if S lies in the bands of `sim.claims` at every size there, so each match can be
entered into `kvsim curve` and examined.

How 2^30 readings are tried in a second: S(32 KB) must be within 2 % of 23, so each triggered reading is compared only
with a thin slice of the CPU readings, which are sorted by their time at 32 KB.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.claims import CURVE
from sim.curve import CHUNK_BYTES
from sim.presets import STAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from sim.curve import Direction

    Array = npt.NDArray[np.float64]
    Progress = Callable[[float], None]

__all__ = [
    "COMBINATIONS",
    "EXTRAS",
    "Coherent",
    "Solved",
    "coherent",
    "literal",
    "readings",
    "speedup_max",
    "with_one_extra",
]

_LATENCY_UNITS_S = {"ms": 1e-3, "s": 1.0}
_BANDWIDTHS, _LATENCIES = 8, 3
COMBINATIONS = 4**_BANDWIDTHS * 2**_BANDWIDTHS * 4**_LATENCIES
_SLACK = 1e-9  # in comparisons, so that a figure on a band's edge is inside it on every machine

_SIZES = tuple(size for band in CURVE for size in band.sizes_bytes)
_LOW: Array = np.array([band.low for band in CURVE for _ in band.sizes_bytes])
_HIGH: Array = np.array([band.high for band in CURVE for _ in band.sizes_bytes])


def _messages(size_bytes: int) -> Iterator[tuple[int, int]]:
    full, rest = divmod(size_bytes, CHUNK_BYTES)
    yield from ((count, m) for count, m in ((full, CHUNK_BYTES), (1, rest)) if count and m)


def _over_messages(cost_s: Callable[[int], float]) -> Array:
    """The cost at each size, summed over the messages."""
    return np.array([sum(count * cost_s(m) for count, m in _messages(size)) for size in _SIZES])


_BYTES = _over_messages(float)
_MESSAGES = _over_messages(lambda _: 1.0)


@functools.cache
def _drive(direction: Direction, unit_s: float, drives: int = 1) -> tuple[Array, Array]:
    """The drive's transfer and its latency, at each size."""
    fit = STAGES.nvme_write if direction == "put" else STAGES.nvme_read

    def transfer_s(m: int) -> float:
        return m / (fit.bandwidth_bytes_per_s + fit.bandwidth_slope_per_s * m) / drives

    def latency_s(m: int) -> float:
        return unit_s * (fit.latency + fit.latency_per_byte * m)

    return _over_messages(transfer_s), _over_messages(latency_s)


def _in_bands(cpu_s: Array, triggered_s: Array) -> npt.NDArray[np.bool_]:
    """Whether each row of CPU times fits the triggered times, at every size."""
    fits: npt.NDArray[np.bool_] = np.all(
        (cpu_s >= _LOW * triggered_s * (1 - _SLACK)) & (cpu_s <= _HIGH * triggered_s * (1 + _SLACK)), axis=-1
    )
    return fits


def _all_sums(terms: Array, times: int) -> Array:
    """Every sum of the terms, each taken 0 to `times` times; one row each."""
    sums = np.zeros((1, terms.shape[1]))
    for term in terms:
        sums = (sums[None, :, :] + np.arange(times + 1)[:, None, None] * term).reshape(-1, terms.shape[1])
    return sums


def literal(direction: Direction, unit: str, progress: Progress = lambda _: None) -> int:
    """How many of the 2^30 combinations match; the NVMe latencies read in `unit`."""
    transfer_s, latency_s = _drive(direction, _LATENCY_UNITS_S[unit])
    m, count = _BYTES, _MESSAGES
    bandwidths = np.array(
        [
            m * STAGES.pcie_s_per_byte,
            m * STAGES.vram_s_per_byte,
            m * STAGES.cpu_s_per_byte,
            m * STAGES.dram_s_per_byte,
            m * STAGES.nic_serialisation_s_per_byte,
            m * STAGES.nic_memory_s_per_byte,
            m * STAGES.nic_alu_s_per_byte,
            transfer_s,
        ]
    )
    latencies = np.array([count * STAGES.pcie_latency_s, count * STAGES.network_latency_s, latency_s])
    once = _all_sums(latencies, 1)
    cpu = (_all_sums(bandwidths, 3)[:, None, :] + once).reshape(-1, len(_SIZES))
    triggered = (_all_sums(bandwidths, 1)[:, None, :] + once).reshape(-1, len(_SIZES))
    assert len(cpu) * len(triggered) == COMBINATIONS
    cpu = cpu[np.argsort(cpu[:, 0], kind="stable")]
    begins = np.searchsorted(cpu[:, 0], _LOW[0] * triggered[:, 0] * (1 - _SLACK), side="left")
    ends = np.searchsorted(cpu[:, 0], _HIGH[0] * triggered[:, 0] * (1 + _SLACK), side="right")
    last = np.ascontiguousarray(cpu[:, -1])  # the size at which a thin slice fails most often
    matches = 0
    for i in range(1, len(triggered)):  # the first is the empty sum, a transfer that costs nothing
        near = last[begins[i] : ends[i]]
        fits = (near >= _LOW[-1] * triggered[i, -1]) & (near <= _HIGH[-1] * triggered[i, -1] * (1 + _SLACK))
        rows = np.flatnonzero(fits) + begins[i]
        matches += int(np.count_nonzero(_in_bands(cpu[rows], triggered[i])))
        if i % 64 == 0:
            progress(i / len(triggered))
    progress(1.0)
    return matches


@dataclass(frozen=True, slots=True)
class Coherent:
    """A reading that hardware could have: what each path is charged for."""

    direction: Direction
    nvme: str  # "both", "cpu", "neither"
    nvme_latency: str  # "none", "ms", "s"; charged wherever the drive is
    nic_inner_stages: bool
    dram_passes: int
    cpu_copies: int
    pcie_passes: int  # of the CPU path; the triggered one has one
    latencies: str  # "none", "one each", "one a pass"
    nics: int  # that the triggered path spreads over; the CPU path has one
    drives: int


def readings(nics: int = 1, drives: int = 1) -> list[Coherent]:
    """All coherent readings with these numbers of NICs and drives."""
    directions: tuple[Direction, ...] = ("put", "get")
    return [
        Coherent(direction, *nvme, inner, dram, copies, pcie, latencies, nics, drives)
        for direction, nvme, inner, dram, copies, pcie, latencies in itertools.product(
            directions,
            [(a, b) for a in ("both", "cpu") for b in ("none", "ms", "s")] + [("neither", "none")],
            (True, False),
            range(5),
            range(5),
            (1, 2, 3),
            ("none", "one each", "one a pass"),
        )
    ]


def _times(reading: Coherent) -> tuple[Array, Array]:
    """CPU and triggered seconds at each size."""
    m, count = _BYTES, _MESSAGES
    nic = STAGES.nic_serialisation_s_per_byte
    if reading.nic_inner_stages:
        nic += STAGES.nic_memory_s_per_byte + STAGES.nic_alu_s_per_byte
    cpu = m * (STAGES.vram_s_per_byte + reading.pcie_passes * STAGES.pcie_s_per_byte + nic)
    cpu = cpu + m * (
        reading.dram_passes * STAGES.dram_s_per_byte + reading.cpu_copies * STAGES.cpu_s_per_byte
    )
    triggered = m * (STAGES.vram_s_per_byte + STAGES.pcie_s_per_byte + nic) / reading.nics
    if reading.latencies != "none":
        passes = reading.pcie_passes if reading.latencies == "one a pass" else 1
        cpu = cpu + count * (passes * STAGES.pcie_latency_s + STAGES.network_latency_s)
        triggered = triggered + count * (STAGES.pcie_latency_s + STAGES.network_latency_s)
    if reading.nvme != "neither":
        unit_s = _LATENCY_UNITS_S.get(reading.nvme_latency, 0.0)
        transfer_s, latency_s = _drive(reading.direction, unit_s, reading.drives)
        cpu = cpu + transfer_s + latency_s
        if reading.nvme == "both":
            triggered = triggered + transfer_s + latency_s
    return cpu, triggered


def coherent(candidates: list[Coherent]) -> list[Coherent]:
    """Those that match as they are."""
    return [reading for reading in candidates if bool(_in_bands(*_times(reading)))]


# Candidates for one more number: how its weight grows with the messages and their bytes.
EXTRAS: dict[str, Callable[[Coherent], Array]] = {
    "kappa, a factor on the CPU's copies": lambda reading: (
        reading.cpu_copies * STAGES.cpu_s_per_byte * _BYTES
    ),
    "gamma, CPU software in s/B": lambda _: _BYTES,
    "c, CPU software in s a message": lambda _: _MESSAGES,
}


class Solved(NamedTuple):
    """A reading that matches with one more number, and the interval in which it does."""

    reading: Coherent
    extra: str
    low: float
    high: float


def with_one_extra(candidates: list[Coherent], progress: Progress = lambda _: None) -> list[Solved]:
    """Those that match with one free number on the CPU path, and for which of its values."""
    found = []
    for i, reading in enumerate(candidates):
        if i % 64 == 0:
            progress(i / len(candidates))
        cpu_s, triggered_s = _times(reading)
        for extra, weigh in EXTRAS.items():
            weight = weigh(reading)
            base_s = cpu_s
            if extra.startswith("kappa"):
                if not reading.cpu_copies:
                    continue
                base_s = cpu_s - weight  # the factor replaces the copies that are already charged
            low = float(np.max((_LOW * triggered_s - base_s) / weight))
            high = float(np.min((_HIGH * triggered_s - base_s) / weight))
            if high > 0 and low <= high:
                found.append(Solved(reading, extra, max(low, 0.0), high))
    progress(1.0)
    return found


def speedup_max(reading: Coherent) -> float:
    """The largest S of a reading, at any size."""
    cpu_s, triggered_s = _times(reading)
    return float(np.max(cpu_s / triggered_s))
