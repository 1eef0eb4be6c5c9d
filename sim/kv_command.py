"""`kvsim kv`: Fig. 1 as table, CSV, JSON and plot; what the KV costs in GPUs; Table I's totals checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from sim import gpu_cost, hf_config, kv_layout, models, units
from sim.output import as_csv, as_json, save_plot, table
from sim.svg import Bars, figure, si

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from sim.models import Footprint

__all__ = ["figure_1", "run"]


def _rows(arguments: argparse.Namespace) -> list[tuple[Footprint, float]]:
    """Each model's footprint and the bytes of its weights (0: not known)."""
    found = []
    names = arguments.model or (
        [] if arguments.config else list(dict.fromkeys(e.name for e in models.MODELS.values()))
    )
    for name in names:
        entry = models.model(name)
        kept = models.relaid(entry, arguments.layout) if arguments.layout else None
        row = models.footprint(entry, arguments.tokens, arguments.batch, arguments.dtype or "fp16", kept)
        found.append((row, entry.parameters * models.WEIGHT_BYTES))
    for path in arguments.config or ():
        name, kept, dtype = hf_config.read_config(Path(path), arguments.dtype)
        if arguments.layout:
            if not arguments.layout.lower().startswith("ragged:"):
                raise units.OutOfRange(
                    "--layout",
                    repr(arguments.layout),
                    "with --config, ragged:K/V,...",
                    "or none: the file's own",
                )
            kept = kv_layout.parse_ragged(arguments.layout[len("ragged:") :])
        entry = models.Model(name, len(kept.layers), 1, 1, 1, 0.0)
        row = models.footprint(entry, arguments.tokens, arguments.batch, dtype, kept)
        found.append((row, 0.0))
    return found


def figure_1(rows: Sequence[Footprint]) -> str:
    """Fig. 1: KV bytes of each model, and how they compare with its weights."""
    names = [row.model for row in rows]
    about = f"{rows[0].batch:,} sequences of {rows[0].tokens:,} tokens"
    return figure(
        [
            Bars(
                f"Fig. 1: KV of {about}",
                "KV bytes (logarithmic)",
                names,
                [("", [float(row.kv_bytes) for row in rows])],
                x_format=lambda v: si(v, "B"),
                x_log=True,
            ),
            Bars(
                "KV bytes over the model's own (16 bit)",
                "KV / model (logarithmic)",
                names,
                [("", [row.kv_per_model or float("nan") for row in rows])],
                x_format=lambda v: f"{v:.3g}",
                x_log=True,
                rule=(1.0, "larger than the model"),
            ),
        ],
        caption=(
            "'KV is larger than the model' holds for multi-head models up to 13B; for no GQA, MQA or MLA model.",
        ),
    )


def _cost_table(arguments: argparse.Namespace) -> str:
    rows = gpu_cost.read_cost_table(Path(arguments.gpu_cost))
    printed, right = sum(row.printed_total_usd for row in rows), sum(row.right_total_usd for row in rows)
    if arguments.as_json:
        return as_json(
            [
                {
                    "gpu": row.gpu,
                    "count": row.count,
                    "price_usd": str(row.price_usd),
                    "printed_total_usd": str(row.printed_total_usd),
                    "right_total_usd": str(row.right_total_usd),
                    "holds": row.holds,
                }
                for row in rows
            ]
        )
    cells = [
        (
            row.gpu,
            f"{row.count:,}",
            f"{row.price_usd:,}",
            f"{row.printed_total_usd:,}",
            f"{row.right_total_usd:,}",
            "right" if row.holds else f"WRONG by {row.printed_total_usd - row.right_total_usd:+,}",
        )
        for row in rows
    ]
    cells.append(("all", "", "", f"{printed:,}", f"{right:,}", ""))
    return table(("GPU", "count", "USD each", "printed USD", "right USD", ""), cells, left=(0, 5))


def run(arguments: argparse.Namespace) -> str:
    """The command's output."""
    if arguments.gpu_cost is not None:
        return _cost_table(arguments)
    found = _rows(arguments)
    memory_bytes = units.parse_bytes("--gpu-memory", arguments.gpu_memory)
    units.require("--gpu-usd", arguments.gpu_usd, "US dollars a GPU", 0, 1e9)
    gpus = [gpu_cost.gpus_for(row.kv_bytes, weight_bytes, memory_bytes) for row, weight_bytes in found]
    saved = ""
    if arguments.plot is not None:
        saved = save_plot("--plot", Path(arguments.plot), figure_1([row for row, _ in found]))
    rows = [
        {**dataclasses.asdict(row), "gpus": count, "gpus_usd": count * arguments.gpu_usd}
        for (row, _), count in zip(found, gpus, strict=True)
    ]
    if arguments.as_json:
        return as_json(rows)
    if arguments.as_csv:
        return as_csv(list(rows[0]), [list(row.values()) for row in rows])
    cells = [
        (
            row.model,
            row.layout,
            f"{row.token_bytes:,}",
            f"{row.kv_bytes / 1e9:,.2f}",
            "-" if row.kv_per_model is None else f"{row.kv_per_model:.3f}",
            f"{count:,}",
            f"{count * arguments.gpu_usd:,.0f}",
        )
        for (row, _), count in zip(found, gpus, strict=True)
    ]
    dtype = arguments.dtype or ("as in the file" if arguments.config else "fp16")
    title = f"{arguments.batch:,} sequences of {arguments.tokens:,} tokens, {dtype}; weights at 16 bits\n\n"
    head = ("model", "layout", "B/token", "KV GB", "KV/model", "GPUs", "USD")
    note = (
        f"\n\nGPUs of {arguments.gpu_memory} that hold weights and KV, at {arguments.gpu_usd:,.0f} USD each: an"
        " assumption, not a price list (--gpu-memory, --gpu-usd)."
    )
    return title + table(head, cells, left=(0, 1)) + note + saved
