"""The simulator's own speed: its commands as a whole, and its event core by the number of requests.

There is no ceiling to compare with; the goals are the project's. The modelled route has five stages, the last of which
is eight drives. The cost is linear if a request takes as long among ten million as among a hundred thousand.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.models import model
from sim.replay.cluster_hardware import Cluster
from sim.replay.events import Events, Step
from sim.replay.simulate import simulate
from sim.replay.workload import Chats, chats

if TYPE_CHECKING:
    from benchmarks.form import Form

_DRIVES, _SHARED = 8, 4
_COUNTS = (100_000, 1_000_000, 10_000_000)
_LOAD = 0.5


def run(form: Form) -> None:
    """Measure all points."""
    _command(form, "kvsim curve, the command", ["curve"], 1.0)
    with tempfile.TemporaryDirectory() as folder:
        figures = str(Path(folder) / "f.svg")
        _command(form, "kvsim curve with its figures", ["curve", "--preset", "paper", "--plot", figures], 1.0)
    _command(form, "kvsim search, 4 x 2^30 readings", ["search"], None)
    for count in _COUNTS:
        seconds = min(form.seconds(lambda count=count: _events(count)) for _ in range(3))  # type: ignore[misc]
        form.note(
            f"{count:,} requests, 5 stages, 8 drives",
            seconds,
            "s",
            goal=0.5 if count == 1_000_000 else None,
            lower_is_better=True,
        )
        form.note(f"each of {count:,}", seconds / count * 1e9, "ns")
    _replay(form)


def _command(form: Form, metric: str, arguments: list[str], goal: float | None) -> None:
    command = [sys.executable, "-m", "sim.cli", *arguments]
    seconds = min(
        form.seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(3)
    )
    form.note(metric, seconds, "s", goal=goal, lower_is_better=True)


def _events(count: int) -> None:
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(1.0, count))
    units = rng.exponential(1.0, count)
    with Events() as events:
        shared = [events.add_resource() for _ in range(_SHARED)]
        for drive in [events.add_resource() for _ in range(_DRIVES)]:
            steps = [Step(stage, s_per_unit=_LOAD, latency_s=0.1) for stage in shared]
            events.add_route([*steps, Step(drive, s_per_unit=_LOAD * _DRIVES, latency_s=0.2)])
        events.stream(arrival_s, units, (np.arange(count) % _DRIVES).astype(np.int32))


def _replay(form: Form) -> None:
    """As many requests, with about as many tokens, as an hour of a published conversation trace."""
    work = chats(
        Chats(sessions=2400, sessions_per_s=0.7, system_tokens=9000, turn_tokens=800, answer_tokens=340)
    )
    entry = model("llama-3-70b")
    seconds = min(form.seconds(lambda: simulate(work, entry, Cluster(), "triggered")) for _ in range(3))
    tokens = sum(request.input_tokens for request in work) / len(work)
    metric = f"replay of {len(work):,} requests of {tokens:,.0f} tokens, one path"
    form.note(metric, seconds, "s", goal=3.0, lower_is_better=True)
