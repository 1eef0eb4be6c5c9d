"""The goals, compared with the measurements; no figure here belongs to a particular machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.cells import SHAPES, label

if TYPE_CHECKING:
    from benchmarks.form import Form
    from benchmarks.peers.cells import Cells, Shape

__all__ = ["note"]

_SMALL, _MIB = 32 << 10, 1 << 20
_REDIS_SMALL, _REDIS_LARGE = 1.0, 1.3  # of Redis' bytes a second: at 32K, and from 256K on
_SHARE = 0.85  # of what fabric and drive give
_ABOVE_DRIVE_US = 60
_RATES = {"landed": 35_000, "written": 25_000, "hot": 45_000, "cold": 20_000}  # blocks of 32K a second
_CPU = {"landed": 0.5, "hot": 0.5, "written": 0.7, "cold": 0.9}  # s a GB of 1M, both ends


def note(form: Form, cells: Cells) -> None:
    """Record all goals that the cells decide."""
    for size, shapes in SHAPES.items():
        for shape in shapes:
            _against_redis(form, cells, shape)
        if size == _SMALL:
            _one_small(form, cells, shapes[0])
            _small_batches(form, cells, shapes[-1])
        else:
            _against_the_machine(form, cells, shapes[-1])
        if size == _MIB:
            _cpu(form, cells, shapes[-1])


def _against_redis(form: Form, cells: Cells, shape: Shape) -> None:
    goal = _REDIS_SMALL if shape.size == _SMALL else _REDIS_LARGE
    for kind in ("landed", "hot"):
        ours, redis = cells.at("us", shape, kind), cells.at("redis", shape, kind)
        form.pairs(f"against Redis: {shape.title}, {kind}", "GB/s", ours.gbps, redis.gbps, goal=goal)
    ours, redis = cells.at("us", shape, "written"), cells.at("redis, everysec", shape, "written")
    form.pairs(f"against Redis, everysec: {shape.title}, written", "GB/s", ours.gbps, redis.gbps)


def _one_small(form: Form, cells: Cells, shape: Shape) -> None:
    def us(who: str, kind: str, share: float = 0.5) -> float:
        return cells.at(who, shape, kind).quantile_us(share)

    for kind, goal in (("landed", 60.0), ("hot", 40.0)):
        value = us("us", kind)
        form.note(f"one 32K, {kind}, p50", value, "us", goal=goal, lower_is_better=True)
        form.note(f"one 32K, {kind}, p99", us("us", kind, 0.99), "us")
        form.pairs(
            f"one 32K, {kind}, p50, against Redis",
            "us",
            [value],
            [us("redis", kind)],
            goal=1.0 if kind == "landed" else None,
            lower_is_better=True,
        )
    for kind in ("written", "cold"):
        limit = us("drive", kind) + _ABOVE_DRIVE_US
        form.pairs(
            f"one 32K, {kind}, p50, against the drive + {_ABOVE_DRIVE_US} us",
            "us",
            [us("us", kind)],
            [limit],
            goal=1.0,
            lower_is_better=True,
        )


def _small_batches(form: Form, cells: Cells, shape: Shape) -> None:
    for kind, goal in _RATES.items():
        per_s = cells.at("us", shape, kind).summary()["gbps"] * 1e9 / shape.size
        form.note(f"32K, batches of {shape.batch}, {kind}", per_s, "1/s", goal=goal)


def _against_the_machine(form: Form, cells: Cells, shape: Shape) -> None:
    fabric = cells.at("fabric", shape, "landed").gbps
    for kind in ("landed", "hot"):
        ours = cells.at("us", shape, kind).gbps
        form.pairs(f"against the fabric: {shape.title}, {kind}", "GB/s", ours, fabric, goal=_SHARE)
    for kind in ("written", "cold"):
        ours, drive = cells.at("us", shape, kind).gbps, cells.at("drive", shape, kind).gbps
        smaller = [min(pair) for pair in zip(fabric, drive, strict=True)]
        form.pairs(f"against fabric and drive: {shape.title}, {kind}", "GB/s", ours, smaller, goal=_SHARE)


def _cpu(form: Form, cells: Cells, shape: Shape) -> None:
    for kind, goal in _CPU.items():
        found = cells.at("us", shape, kind).summary()
        both = found["client_cpu_s_per_gb"] + found["server_cpu_s_per_gb"]
        form.note(
            f"CPU, both ends, {label(shape.size)}, {kind}", both, "s/GB", goal=goal, lower_is_better=True
        )
