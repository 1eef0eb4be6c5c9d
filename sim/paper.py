"""The paper, line by line: each table, figure and sentence with a number that we know, and our number beside it.

What always holds: everything under `theirs` is quoted from the paper; all under `ours` is computed here, from its
printed tables or, where stated, with the additions of a preset. A verdict says whether the printed numbers give the
paper's result; "only with additions" is not a pass.

What it doesn't do: judge data that we don't have. The cells of Table I are read from a file (`--gpu-cost`), and of
Fig. 4 only the fits of Table III are known; both are listed as not judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from sim.claims import BANDS, judge, judge_kv
from sim.curve import curve, point
from sim.presets import PRESETS, STAGES, preset
from sim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sim.gpu_cost import CostRow
    from sim.presets import Fit

__all__ = ["Finding", "findings"]

Verdict = Literal["holds", "holds in part", "only with additions", "does not hold", "misprint", "not judged"]

_LINK_BYTES_PER_S = 12.5e9  # the 100 Gb/s that the paper states
_MEASURED_BYTES_MAX = 128 * 10**6  # of Fig. 4's sweep
_CHUNK_BYTES = 512 * 10**6
_LIGHT_M_PER_S = 299_792_458.0
_ALIKE = 0.1  # two fits of one drive agree within this


class Finding(NamedTuple):
    """One line of the page."""

    where: str
    theirs: str
    ours: str
    verdict: Verdict


def _figure_1() -> Finding:
    rows = judge_kv()
    larger = [f"{name} {ratio:.2f}" for name, holds, ratio in rows if holds]
    smaller = [ratio for _, holds, ratio in rows if not holds]
    verdict: Verdict = "holds" if not smaller else "holds in part" if larger else "does not hold"
    return Finding(
        "Fig. 1",
        "KV is larger than the model (64 x 512 tokens)",
        f"KV/model: {', '.join(larger)}; the other {len(smaller)} models {min(smaller):.3f} to {max(smaller):.2f}",
        verdict,
    )


def _table_1(rows: Sequence[CostRow] | None) -> Iterator[Finding]:
    if rows is None:
        yield Finding(
            "Table I",
            "GPU cost",
            "its cells are not kept here: --gpu-cost TABLE.csv adds them up",
            "not judged",
        )
        return
    for row in rows:
        yield Finding(
            "Table I",
            f"{row.count:,} {row.gpu} at {row.price_usd:,} USD: {row.printed_total_usd:,}",
            f"{row.right_total_usd:,} USD, {row.printed_total_usd - row.right_total_usd:+,}",
            "holds" if row.holds else "misprint",
        )


def _table_2() -> Iterator[Finding]:
    yield Finding(
        "Table II",
        f"CPU: {STAGES.cpu_s_per_byte:g} s/B",
        f"a CPU that copies at {1 / STAGES.cpu_s_per_byte / 1e12:.1f} TB/s; the digits are those of VRAM",
        "misprint" if STAGES.cpu_s_per_byte == STAGES.vram_s_per_byte else "holds",
    )
    yield Finding(
        "Table II",
        f"NIC serialisation: {STAGES.nic_serialisation_s_per_byte:g} s/B, on a link of 100 Gb/s",
        f"{8e-9 / STAGES.nic_serialisation_s_per_byte:.0f} Gb/s",
        "holds" if 1 / STAGES.nic_serialisation_s_per_byte <= _LINK_BYTES_PER_S else "does not hold",
    )
    yield Finding(
        "Table III",
        f"network latency: {STAGES.network_latency_s:g} s",
        f"light comes {1000 * _LIGHT_M_PER_S * STAGES.network_latency_s:.2f} mm far; the digits are those of DRAM",
        "misprint" if STAGES.network_latency_s == STAGES.dram_s_per_byte else "holds",
    )


def _drive(name: str, fit: Fit) -> Iterator[Finding]:
    in_ms = 1 / (1e-3 * fit.latency_per_byte)
    off = abs(in_ms / fit.bandwidth_bytes_per_s - 1)
    yield Finding(
        "Table III",
        f"NVMe {name} latency: {fit.latency:g} + {fit.latency_per_byte:g} m, in s",
        f"its slope is {in_ms / 1e9:.2f} GB/s read as ms, {in_ms / 1e12:.4f} GB/s read as s;"
        f" the bandwidth's intercept is {fit.bandwidth_bytes_per_s / 1e9:.2f} GB/s ({100 * off:.0f} % off)",
        "misprint",
    )
    at_chunk = fit.bandwidth_bytes_per_s + fit.bandwidth_slope_per_s * _CHUNK_BYTES
    yield Finding(
        "Tables II, III",
        f"NVMe {name} bandwidth: {fit.bandwidth_bytes_per_s:g} + {fit.bandwidth_slope_per_s:g} m",
        f"{at_chunk / 1e9:.1f} GB/s at the CPU path's {format_bytes(_CHUNK_BYTES)},"
        f" {_CHUNK_BYTES / _MEASURED_BYTES_MAX:.0f} times beyond what was measured, and without a bound",
        "does not hold",
    )
    m = 10**6
    by_latency = 1e-3 * (fit.latency + fit.latency_per_byte * m)
    by_bandwidth = m / (fit.bandwidth_bytes_per_s + fit.bandwidth_slope_per_s * m)
    yield Finding(
        "Fig. 4",
        f"NVMe {name}: latency and bandwidth of one benchmark",
        f"1MB takes {1000 * by_latency:.2f} ms by the one fit, {1000 * by_bandwidth:.2f} ms by the other: adding them"
        " counts the drive twice",
        "holds" if abs(by_latency / by_bandwidth - 1) < _ALIKE else "does not hold",
    )


def _speedups(name: str, sizes: Sequence[int]) -> str:
    found = sorted(f"{point(preset(name), size).speedup:.2f}" for size in sizes)
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _curves() -> Iterator[Finding]:
    """The sentences about S: from the tables alone, with the same stops on both paths, and what reproduces theirs."""
    literal = judge(preset("literal-ms"))
    with_additions = [
        name for name, entry in PRESETS.items() if all(v.holds for v in judge(entry)[: len(BANDS)])
    ]
    for (where, theirs), band, verdict in zip(
        (
            ("Fig. 7", "23x at small sizes"),
            ("Fig. 5", "> 20x for a few hundred MB"),
            ("Figs. 5, 7", "> 19x from there to terabytes"),
        ),
        BANDS,
        literal,
        strict=False,
    ):
        yield Finding(
            where,
            theirs,
            f"as printed {_speedups('literal-ms', band.sizes_bytes)}, fair {_speedups('fair', band.sizes_bytes)};"
            f" with the additions of {', '.join(with_additions)}: {_speedups('paper', band.sizes_bytes)} (paper)",
            "holds" if verdict.holds else "only with additions" if with_additions else "does not hold",
        )
    size = 5 * 10**12
    times = "; ".join(
        f"{name} {format_seconds(row.cpu_s)} and {format_seconds(row.triggered_s)} s"
        for name, row in ((name, point(preset(name), size)) for name in ("paper", "literal-ms", "fair"))
    )
    yield Finding("Fig. 6", "time at terabytes (a curve, no printed number)", f"5TB: {times}", "not judged")


def _whole(progress: Callable[[float], None]) -> Iterator[Finding]:
    """The numbers behind the claims."""
    from sim import search  # noqa: PLC0415 - it needs numpy

    candidates = search.readings()
    found = search.coherent(candidates)
    progress(0.5)
    most = max(search.speedup_max(one) for one in candidates if one.nvme == "both")
    yield Finding(
        "Tables II, III",
        "give the curves of Figs. 5 and 7",
        f"{len(found)} of {len(candidates):,} readings that hardware could be do; with the drive on both paths S is"
        f" {most:.2f} at most",
        "holds" if found else "does not hold",
    )
    paper = preset("paper")
    rate = _CHUNK_BYTES / point(paper, _CHUNK_BYTES).triggered_s
    yield Finding(
        "Figs. 5 to 7",
        "over a link of 100 Gb/s (12.5 GB/s)",
        f"the reading that gives the curves triggers at {rate / 1e9:.1f} GB/s",
        "holds" if rate <= _LINK_BYTES_PER_S else "does not hold",
    )
    both = [row.speedup for row in curve(preset("paper-nvme-both"))]
    yield Finding(
        "Figs. 5 to 7",
        "KV is offloaded to NVMe on both paths",
        f"the reading that gives the curves charges the drive to the CPU path only; charged to both, S is"
        f" {min(both):.1f} to {max(both):.1f}",
        "holds" if paper.nvme_on_triggered_path else "does not hold",
    )


def findings(
    cost_rows: Sequence[CostRow] | None = None, progress: Callable[[float], None] = lambda _: None
) -> list[Finding]:
    """The page, in the paper's order."""
    found = [
        _figure_1(),
        *_table_1(cost_rows),
        *_table_2(),
        *_drive("write", STAGES.nvme_write),
        *_drive("read", STAGES.nvme_read),
        *_curves(),
        *_whole(progress),
    ]
    progress(1.0)
    return found
