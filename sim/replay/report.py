"""The results of a replay for people: a table, plots, and one page of HTML that needs no other file.

What always holds: paths that were run over the same requests are shown side by side, with the limits of the model
below.
"""

from __future__ import annotations

from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.svg import COLOURS, Bars, Chart, Series, bytes_label, figure, seconds_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.replay.simulate import Result

__all__ = ["NAMES", "as_document", "left_out", "page", "plots", "rows"]

_LEFT_OUT = (
    "Pages of a request that share their GPU and drive travel together: a fetch is up to a tenth too slow.",
    "KV of answers is put, and found again only if the trace names its blocks; Mooncake's names those of prompts only.",
    "No failures, no other tenants.",
)
_OF_ENGINES = {
    "whole": (
        "A fetch ends before its prefill begins, as in the product's connector; --overlap computes a layer meanwhile.",
        "One prompt after the other on an engine, and a token of an answer always takes as long (--engine whole).",
    ),
    "steps": (
        "A fetch ends before its prefill begins, as in the product's connector.",
        "A step is a roofline: what GPUs of an engine tell each other is part of gpu_mfu; nothing is preempted.",
    ),
}
_UNEVEN = 0.02
_QUANTILES = np.linspace(0.0, 1.0, 201)
_COLOUR = {"cpu": COLOURS[1], "triggered": COLOURS[0], "recompute": COLOURS[2]}
NAMES = {"cpu": "CPU-initiated", "triggered": "triggered", "recompute": "recompute"}


def left_out(results: Sequence[Result]) -> tuple[str, ...]:
    """The limits of the model."""
    return (*_OF_ENGINES[results[0].terms.engine], *_LEFT_OUT)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _lag(result: Result, share: float) -> str:
    return seconds_label(float(np.quantile(result.put_lag_s, share))) if len(result.put_lag_s) else "-"


def _utilisation(result: Result, group: str) -> float | None:
    if group not in result.usage:
        return None
    used = result.usage[group]
    return sum(one.busy_s for one in used) / (sum(one.servers for one in used) * result.duration_s)


def _each(result: Result, group: str) -> list[float]:
    """Utilisation of every resource of a group."""
    return [one.utilisation(result.duration_s) for one in result.usage[group]]


def _busy_cell(result: Result, group: str) -> str:
    """The mean of a group, and its busiest one if the work is spread unevenly."""
    share = _utilisation(result, group)
    if share is None:
        return "-"
    most = max(_each(result, group))
    return _share(share) + (f", most {_share(most)}" if most - share >= _UNEVEN else "")


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One line per quantity, one column per path."""
    lines: list[tuple[str, ...]] = [
        ("requests", *(f"{len(r.ttft_s):,}" for r in results)),
        ("time simulated", *(seconds_label(r.duration_s) for r in results)),
        ("TTFT p50", *(seconds_label(r.ttft_quantile_s(0.5)) for r in results)),
        ("TTFT p99", *(seconds_label(r.ttft_quantile_s(0.99)) for r in results)),
        ("  of it fetching, p50", *(seconds_label(float(np.median(r.fetch_s))) for r in results)),
        ("  of it queued, p50", *(seconds_label(float(np.median(r.queued_s))) for r in results)),
        ("an answer's token, p50", *(_token(r, 0.5) for r in results)),
        ("an answer's token, p99", *(_token(r, 0.99) for r in results)),
        ("hit rate, blocks", *(_share(r.hit_rate) for r in results)),
        ("prompt tokens fetched", *(_share(r.fetched_tokens / r.prompt_tokens) for r in results)),
        (
            "found, yet faster to compute again",
            *(_share((r.found_tokens - r.fetched_tokens) / r.prompt_tokens) for r in results),
        ),
        *_only(results),
        ("bytes put", *(bytes_label(r.put_bytes) for r in results)),
        ("bytes got", *(bytes_label(r.get_bytes) for r in results)),
        ("  of them from DRAM", *(bytes_label(r.hot_bytes) for r in results)),
        ("blocks evicted", *(f"{r.evicted:,}" for r in results)),
        ("put lag p50", *(_lag(r, 0.5) for r in results)),
        ("put lag p99", *(_lag(r, 0.99) for r in results)),
        ("put backlog, most", *(bytes_label(float(r.backlog_bytes.max(initial=0.0))) for r in results)),
    ]
    groups = dict.fromkeys(name for result in results for name in result.usage)
    lines += [(f"busy: {group}", *(_busy_cell(result, group) for result in results)) for group in groups]
    lines += [
        ("USD an hour", *(f"{r.usd_per_hour:,.2f}" for r in results)),
        ("USD per 1,000 requests", *(f"{1000 * r.usd / len(r.ttft_s):,.3f}" for r in results)),
        ("GPU seconds of prefill", *(f"{_gpu_seconds(r):,.0f}" for r in results)),
        (
            "GPU USD of prefill per 1,000 requests",
            *(f"{_gpu_seconds(r) * r.cluster.gpu_usd_per_hour / 3.6 / len(r.ttft_s):,.3f}" for r in results),
        ),
    ]
    return lines


def _token_quantile_s(result: Result, share: float) -> float | None:
    known = result.token_s[~np.isnan(result.token_s)]
    return float(np.quantile(known, share)) if len(known) else None


def _token(result: Result, share: float) -> str:
    seconds = _token_quantile_s(result, share)
    return "-" if seconds is None else seconds_label(seconds)


def _only(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Lines that only some runs have."""
    lines = []
    if any(r.terms.engine == "steps" for r in results):
        found = (_share(r.cached_tokens / r.prompt_tokens) for r in results)
        lines.append(("prompt tokens in the GPUs' memory", *found))
    if any(r.terms.prefetch_lead_s for r in results):
        read = (f"{r.ahead_blocks:,}" for r in results)
        lines.append(("blocks read ahead", *read))
        wasted = (_share(1 - r.ahead_used / r.ahead_blocks) if r.ahead_blocks else "-" for r in results)
        lines.append(("  of them never got from there", *wasted))
    return lines


def _gpu_seconds(result: Result) -> float:
    return sum(one.busy_s for one in result.usage["prefill"]) * result.cluster.gpus_per_engine


def as_document(results: Sequence[Result]) -> dict[str, Any]:
    """For programs: numbers in full, in the units in their names."""
    return {
        "paths": {
            result.path: {
                "requests": len(result.ttft_s),
                "duration_s": result.duration_s,
                "ttft_p50_s": result.ttft_quantile_s(0.5),
                "ttft_p99_s": result.ttft_quantile_s(0.99),
                "ttft_mean_s": float(result.ttft_s.mean()),
                "fetch_p50_s": float(np.median(result.fetch_s)),
                "queued_p50_s": float(np.median(result.queued_s)),
                "token_p50_s": _token_quantile_s(result, 0.5),
                "token_p99_s": _token_quantile_s(result, 0.99),
                "hit_rate": result.hit_rate,
                "cached_tokens": result.cached_tokens,
                "read_ahead_blocks": result.ahead_blocks,
                "read_ahead_used_blocks": result.ahead_used,
                "found_tokens": result.found_tokens,
                "fetched_tokens": result.fetched_tokens,
                "prompt_tokens": result.prompt_tokens,
                "put_bytes": result.put_bytes,
                "get_bytes": result.get_bytes,
                "hot_bytes": result.hot_bytes,
                "evicted_blocks": result.evicted,
                "put_lag_p50_s": float(np.median(result.put_lag_s)) if len(result.put_lag_s) else None,
                "put_backlog_max_bytes": float(result.backlog_bytes.max(initial=0.0)),
                "utilisation": {group: _utilisation(result, group) for group in result.usage},
                "utilisation_each": {group: _each(result, group) for group in result.usage},
                "gpu_prefill_s": _gpu_seconds(result),
                "usd": result.usd,
            }
            for result in results
        },
        "left_out": left_out(results),
    }


def _over_time(results: Sequence[Result], group: str) -> list[Series]:
    found = []
    for result in results:
        if group in result.busy:
            bins = result.busy[group]
            times = (np.arange(len(bins)) + 0.5) * result.bin_s
            dashed = result.path == "triggered"  # it often covers the CPU's line, which shows through
            values = (100 * bins).tolist()
            found.append(
                Series(NAMES[result.path], times.tolist(), values, dashed=dashed, colour=_COLOUR[result.path])
            )
    return found


def _busiest(results: Sequence[Result]) -> str:
    """The group, apart from the GPUs' own work, that is busiest on any path."""
    found = [
        (share, group)
        for result in results
        for group in result.usage
        if group not in {"prefill", "decode"} and (share := _utilisation(result, group)) is not None
    ]
    return max(found)[1]


def plots(results: Sequence[Result]) -> list[str]:
    """The times to the first token, their parts, what is busy, and the backlog: one plot each."""
    busiest = _busiest(results)
    groups = list(dict.fromkeys(name for result in results for name in result.usage))
    nothing = float("nan")
    storing = [result for result in results if result.path != "recompute"]
    panels: list[Chart | Bars] = [
        Chart(
            "Time to the first token",
            "seconds (logarithmic)",
            "% of requests within it",
            [
                Series(
                    NAMES[result.path],
                    np.quantile(result.ttft_s, _QUANTILES).tolist(),
                    (100 * _QUANTILES).tolist(),
                    colour=_COLOUR[result.path],
                    dashed=result.path == "recompute",
                )
                for result in results
            ],
            x_log=True,
            x_format=seconds_label,
            y_format=lambda v: f"{v:g} %",
            y_from_zero=True,
        ),
        Bars(
            "Where the mean time to the first token goes",
            "seconds",
            ["waiting for a fetch", "waiting for the engine", "prefill"],
            [
                (
                    NAMES[result.path],
                    [
                        float(result.fetch_s.mean()),
                        float(result.queued_s.mean()),
                        float((result.ttft_s - result.fetch_s - result.queued_s).mean()),
                    ],
                )
                for result in results
            ],
            x_format=seconds_label,
            colours=[_COLOUR[result.path] for result in results],
        ),
        Bars(
            "How busy each part is, mean over the run",
            "% of its time",
            groups,
            [
                (NAMES[result.path], [100 * (_utilisation(result, group) or nothing) for group in groups])
                for result in results
            ],
            x_format=lambda v: f"{v:.3g} %",
            colours=[_COLOUR[result.path] for result in results],
        ),
        Chart(
            f"Busy over time: {busiest}",
            "time since the first request",
            "% busy",
            _over_time(storing, busiest),
            x_format=seconds_label,
            y_format=lambda v: f"{v:g} %",
            y_from_zero=True,
        ),
        Chart(
            "Busy over time: prefill",
            "time since the first request",
            "% busy",
            _over_time(results, "prefill"),
            x_format=seconds_label,
            y_format=lambda v: f"{v:g} %",
            y_from_zero=True,
        ),
        Chart(
            "Put backlog: made, and not on a drive yet",
            "time since the first request",
            "most bytes in each stretch",
            [
                Series(
                    NAMES[result.path],
                    ((np.arange(len(result.backlog_bytes)) + 0.5) * result.bin_s).tolist(),
                    result.backlog_bytes.tolist(),
                    colour=_COLOUR[result.path],
                )
                for result in storing
            ],
            x_format=seconds_label,
            y_format=bytes_label,
            y_from_zero=True,
        ),
    ]
    return [figure([panel]) for panel in panels]


_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #222222; --faint: #666666; --rule: #e4e4e4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #dddddd; --faint: #a0a0a0; --rule: #363a41; }
}
body { font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: var(--ink);
       background: var(--paper); margin: 2em auto; max-width: 1240px; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin-top: 1.8em; }
p.about { color: var(--faint); margin-top: .3em; }
div.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: .5em 1em; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15em .9em; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; white-space: pre; }
svg { width: 100%; height: auto; fill: var(--ink); }
svg > rect { fill: var(--paper); }
svg [fill="#666666"] { fill: var(--faint); }
svg [stroke="#e4e4e4"] { stroke: var(--rule); }
svg [stroke="#222222"], svg [stroke="#000000"] { stroke: var(--ink); }
details td { font-family: ui-monospace, monospace; font-size: .9em; }
@media (max-width: 600px) {
  body { margin: 1em auto; } th, td { padding: .15em .45em; } th:first-child, td:first-child { white-space: normal; }
}
"""


def page(results: Sequence[Result], title: str, about: str) -> str:
    """One page of HTML with everything in it."""
    head = "".join(f"<th>{escape(NAMES[result.path])}</th>" for result in results)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(results)
    )
    cluster = results[0].cluster
    settings = "\n".join(
        f"<tr><td>{field.name}</td><td>{getattr(cluster, field.name):,}</td></tr>"
        for field in fields(cluster)
    )
    notes = "\n".join(f"<li>{escape(note)}</li>" for note in left_out(results))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="about">{escape(about)}</p>
<div class="plots">
{"".join(plots(results))}
</div>
<h2>In numbers</h2>
<div class="wide">
<table>
<tr><th></th>{head}</tr>
{body}
</table>
</div>
<h2>Read this with it</h2>
<ul>
{notes}
</ul>
<details>
<summary>The cluster</summary>
<div class="wide">
<table>
{settings}
</table>
</div>
</details>
</body>
</html>
"""
