"""`kvsim explain` and `kvsim search`: what each preset adds, which claims it passes, whether any reading passes all."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvcli.progress import bar
from sim.claims import KV_CLAIM, judge, judge_kv
from sim.curve import curve
from sim.output import as_json, table
from sim.presets import PRESETS, preset

if TYPE_CHECKING:
    import argparse

    from sim.curve import Direction

__all__ = ["run_explain", "run_search"]


def run_explain(arguments: argparse.Namespace) -> str:
    """Every preset's extra parameters, and each claim passed or failed."""
    chosen = [preset(arguments.preset)] if arguments.preset else list(PRESETS.values())
    kv = judge_kv()
    if arguments.as_json:
        return as_json(
            {
                "presets": {
                    entry.name: {
                        "extras": entry.extras,
                        "caveats": entry.caveats,
                        "claims": [verdict._asdict() for verdict in judge(entry)],
                    }
                    for entry in chosen
                },
                "kv_larger_than_model": {
                    name: {"holds": holds, "kv_per_model": ratio} for name, holds, ratio in kv
                },
            }
        )
    blocks = []
    for entry in chosen:
        extras = "\n".join(f"  adds {extra}" for extra in entry.extras) or "  adds nothing to the tables"
        rows = [("  ", "pass" if v.holds else "FAIL", v.claim, v.found) for v in judge(entry)[:-1]]
        claims = table(("  ", "", "claim", "found"), rows, left=(0, 1, 2, 3))
        blocks.append(f"{entry.name}: {entry.summary}\n{extras}\n{claims}")
    larger = [name for name, holds, _ in kv if holds]
    smaller = [name for name, holds, _ in kv if not holds]
    blocks.append(
        f"{KV_CLAIM}\n  holds for {', '.join(larger)}\n  FAILS for {', '.join(smaller)}\n"
        "  The bytes of each: kvsim kv"
    )
    both = [entry for entry in PRESETS.values() if entry.nvme_on_cpu_path and entry.nvme_on_triggered_path]
    speedups = [point.speedup for entry in both for point in curve(entry)]
    blocks.append(
        "No preset passes everything: those that give 19x to 23x add parameters and leave the drive out of the\n"
        f"triggered path; those that charge the drive to both give {min(speedups):.2f} to {max(speedups):.2f}."
        " kvsim search tries every reading."
    )
    return "\n\n".join(blocks)


def run_search(arguments: argparse.Namespace) -> str:
    """Count the readings of the tables that give the paper's curves."""
    from sim import search  # noqa: PLC0415 - it needs numpy, explain does not

    literal = {}
    directions: tuple[Direction, ...] = ("put", "get")
    for direction, unit in itertools.product(directions, ("ms", "s")):
        found = search.literal(direction, unit, bar(f"2^30 combinations, {direction}, {unit}"))
        literal[f"{direction}, NVMe latency in {unit}"] = found
    spread = []
    sets = list(itertools.product((1, 2, 4, 8), repeat=2))
    progress = bar("coherent readings, 1 to 8 NICs and drives")
    for i, (nics, drives) in enumerate(sets):
        progress(i / len(sets))
        candidates = search.readings(nics, drives)
        spread.append((nics, drives, len(candidates), len(search.coherent(candidates))))
    progress(1.0)
    candidates = search.readings()
    solved = search.with_one_extra(candidates, bar("coherent readings with one more number"))
    matching = {one.reading for one in solved}
    both = max(search.speedup_max(reading) for reading in candidates if reading.nvme == "both")
    by_extra = {extra: [one for one in solved if one.extra == extra] for extra in search.EXTRAS}
    by_extra = {extra: fitting for extra, fitting in by_extra.items() if fitting}
    document = {
        "combinations_each": search.COMBINATIONS,
        "combinations_that_match": literal,
        "coherent_readings": sum(tried for *_, tried, _ in spread),
        "coherent_readings_that_match": sum(found for *_, found in spread),
        "coherent_readings_with_one_extra": len(candidates),
        "with_one_extra_that_match": len(matching),
        "of_which_charge_the_drive_to_both_paths": sum(one.nvme == "both" for one in matching),
        "of_which_charge_the_drive_to_the_cpu_path_only": sum(one.nvme == "cpu" for one in matching),
        "speedup_max_with_the_drive_on_both_paths": both,
        "extras": {
            extra: {
                "readings": len(fitting),
                "low": min(one.low for one in fitting),
                "high": max(one.high for one in fitting),
            }
            for extra, fitting in by_extra.items()
        },
    }
    if arguments.as_json:
        return as_json(document)
    rows = [(f"2^30 combinations of the entries, {name}", f"{found:,}") for name, found in literal.items()]
    rows.append(
        (
            f"{document['coherent_readings']:,} coherent readings, 1 to 8 NICs, 1 to 8 drives",
            f"{document['coherent_readings_that_match']:,}",
        )
    )
    rows.append(
        (f"{len(candidates):,} coherent readings (1 NIC, 1 drive) and one more number", f"{len(matching):,}")
    )
    rows += [
        (f"  of these, the drive is charged to {where}", f"{sum(one.nvme == key for one in matching):,}")
        for key, where in (("both", "both paths"), ("cpu", "the CPU path only"), ("neither", "neither path"))
    ]
    lines = [
        f"  - {extra}: {len(fitting)} readings, {min(one.low for one in fitting):.3g}"
        f" to {max(one.high for one in fitting):.3g}"
        for extra, fitting in by_extra.items()
    ]
    return "\n".join(
        [
            "A reading matches if S is 22.5 to 23.5 at 32 KB, 20 to 22.5 at 128 and 256 MB, 19 to 20 from 512 MB on.",
            "",
            table(("tried", "match"), rows, left=(0,)),
            "",
            f"The largest S at any size with the drive on both paths and nothing added: {both:.2f}.",
            "The numbers that make a reading match:",
            *lines,
        ]
    )
