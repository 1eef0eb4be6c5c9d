"""The simulator's interface for notebooks and scripts.

    import pandas
    from sim import api

    pandas.DataFrame(api.curve_rows("paper"))
    work = api.read_trace(Path("chats.jsonl"))
    results = [api.simulate(work, api.model("llama-3-8b"), api.Cluster(), path) for path in api.PATHS]
    pandas.DataFrame(api.result_rows(results))
    plan = api.make_plan(api.model("llama-3-8b"), api.Cluster(), api.Demand(users=100), "triggered")

What always holds: rows are plain dictionaries with the same keys, unrounded numbers, and names that end with the unit;
the same arguments give the same rows. A value out of range raises `OutOfRange`, which is a `ValueError`. Only the base
installation is needed; pandas is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.curve import SIZES_BYTES, Setting, curve
from sim.hardware import HARDWARE, SPREADS, changed
from sim.hf_config import read_model
from sim.models import MODELS, Model, model
from sim.paper import findings
from sim.presets import PRESETS, preset
from sim.replay.change import Change, Changed, change
from sim.replay.cluster_hardware import PATHS, Cluster, read_cluster
from sim.replay.least_cost import WAYS, Plan, best, highest_users, make_plan, trial
from sim.replay.loss import Losses, LossReport, lose
from sim.replay.plan import Demand
from sim.replay.prefill_times import read_timings
from sim.replay.report import as_document
from sim.replay.run import Terms
from sim.replay.simulate import Result, simulate
from sim.replay.workload import Chats, Request, chats, read_trace
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "HARDWARE",
    "MODELS",
    "PATHS",
    "PRESETS",
    "SIZES_BYTES",
    "SPREADS",
    "WAYS",
    "Change",
    "Changed",
    "Chats",
    "Cluster",
    "Demand",
    "LossReport",
    "Losses",
    "Model",
    "OutOfRange",
    "Plan",
    "Request",
    "Result",
    "Setting",
    "Terms",
    "best",
    "change",
    "changed",
    "chats",
    "curve",
    "curve_rows",
    "findings",
    "highest_users",
    "lose",
    "make_plan",
    "model",
    "preset",
    "read_cluster",
    "read_model",
    "read_timings",
    "read_trace",
    "request_rows",
    "result_rows",
    "simulate",
    "trial",
]


def curve_rows(
    name: str = "fair", sizes_bytes: Sequence[int] = SIZES_BYTES, setting: Setting | None = None
) -> list[dict[str, Any]]:
    """The curve of a preset: one row a size."""
    return [
        {
            "preset": name,
            "size_bytes": row.size_bytes,
            "cpu_s": row.cpu_s,
            "triggered_s": row.triggered_s,
            "speedup": row.speedup,
        }
        for row in curve(preset(name), sizes_bytes, setting)
    ]


def result_rows(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The results of some runs: one row a run."""
    return [
        {"path": path, **{name: value for name, value in found.items() if not isinstance(value, dict)}}
        for result in results
        for path, found in as_document([result])["paths"].items()
    ]


def request_rows(result: Result) -> list[dict[str, Any]]:
    """One run, request by request."""
    columns = result.arrival_s, result.ttft_s, result.queued_s, result.fetch_s
    names = "arrival_s", "ttft_s", "queued_s", "fetch_s"
    return [
        {"path": result.path, **dict(zip(names, map(float, values), strict=True))}
        for values in zip(*columns, strict=True)
    ]
