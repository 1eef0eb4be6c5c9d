"""The command `kvsim`. It computes, prints and exits; nothing here needs libfabric, a drive or a network.

What always holds: the caveats of a preset are printed with its numbers, in the table and in JSON. A bad
argument is one sentence on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvsim", description="What a KV offload would cost on hardware that isn't here."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    curve = commands.add_parser("curve", help="CPU-initiated against triggered transfer, by size")
    curve.add_argument("--preset", default="fair", help="which reading of the tables; '?' lists them")
    curve.add_argument("--size", action="append", help="such as 32KB or 1GiB; may be repeated")
    curve.add_argument("--direction", choices=("put", "get"), default="put")
    curve.add_argument("--chunk", default="512MB", help="largest message (default: %(default)s)")
    curve.add_argument("--trigger-us", type=float, help="cost of a trigger a message (default: the preset's)")
    curve.add_argument("--drives", type=int, default=1, help="drives that share each message")
    curve.add_argument("--json", action="store_true", dest="as_json")
    curve.set_defaults(run=_run_curve)

    kv = commands.add_parser("kv", help="KV bytes of a model")
    kv.add_argument("--model", action="append", help="may be repeated (default: all)")
    kv.add_argument("--tokens", type=int, default=64 * 512, help="(default: %(default)s, as in Fig. 1)")
    kv.add_argument("--element-bytes", type=int, default=2, help="of one number (default: %(default)s)")
    kv.add_argument("--json", action="store_true", dest="as_json")
    kv.set_defaults(run=_run_kv)
    return parser


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]
    return "\n".join(lines)


def _run_curve(arguments: argparse.Namespace) -> str:
    from sim import curve, presets, units

    if arguments.preset == "?":
        return "\n".join(f"{entry.name:16} {entry.summary}" for entry in presets.PRESETS.values())
    preset = presets.preset(arguments.preset)
    setting = curve.Setting(
        direction=arguments.direction,
        chunk_bytes=units.parse_bytes("--chunk", arguments.chunk),
        trigger_us=arguments.trigger_us,
        drives=arguments.drives,
    )
    sizes = [units.parse_bytes("--size", text) for text in arguments.size or ()] or curve.SIZES_BYTES
    points = curve.curve(preset, sizes, setting)
    if arguments.as_json:
        rows = [
            {"size_bytes": p.size_bytes, "cpu_s": p.cpu_s, "triggered_s": p.triggered_s, "speedup": p.speedup}
            for p in points
        ]
        document = {"preset": preset.name, "direction": setting.direction, "points": rows}
        return json.dumps({**document, "caveats": preset.caveats}, indent=2)
    cells = [
        (
            units.format_bytes(p.size_bytes),
            units.format_seconds(p.cpu_s),
            units.format_seconds(p.triggered_s),
            f"{p.speedup:.2f}",
        )
        for p in points
    ]
    head = f"preset {preset.name}, {setting.direction}: {preset.summary}\n\n"
    notes = "\n".join(f"  - {caveat}" for caveat in preset.caveats)
    return head + _table(("D", "CPU s", "triggered s", "S"), cells) + f"\n\nRead this with it:\n{notes}"


def _run_kv(arguments: argparse.Namespace) -> str:
    import dataclasses

    from sim import models

    names = arguments.model or sorted({entry.name for entry in models.MODELS.values()})
    rows = [models.footprint(models.model(name), arguments.tokens, arguments.element_bytes) for name in names]
    if arguments.as_json:
        return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
    cells = [
        (row.model, f"{row.token_bytes:,}", f"{row.kv_bytes / 1e9:,.2f}", f"{row.kv_per_model:.3f}")
        for row in rows
    ]
    title = f"{arguments.tokens:,} tokens, {arguments.element_bytes} B a number; weights at 16 bits\n\n"
    return title + _table(("model", "B/token", "KV GB", "KV/model"), cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        text: str = arguments.run(arguments)
    except ValueError as error:  # OutOfRange, and nothing else raises one here
        print(f"kvsim: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
