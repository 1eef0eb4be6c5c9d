"""`kvsim replay` and `kvsim generate`: run a trace through a cluster, by one or more paths; generate a trace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.progress import bar
from sim.hardware import changed
from sim.hf_config import read_model
from sim.models import model
from sim.output import as_csv, as_json, save, save_plot, table
from sim.replay import report
from sim.replay.cluster_hardware import PATHS, Cluster, read_cluster
from sim.replay.prefill_times import read_timings
from sim.replay.run import Terms
from sim.replay.simulate import simulate
from sim.replay.sweep import pareto, points
from sim.replay.workload import Chats, chats, read_trace, write_mooncake
from sim.svg import Chart, Series, figure, seconds_label
from sim.units import OutOfRange

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from sim.models import Model
    from sim.replay.cluster_hardware import PathName
    from sim.replay.simulate import Result

__all__ = ["cluster_of", "cost_plot", "model_of", "run_generate", "run_replay", "side_by_side"]


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The cluster of a command: from the file, then measurements, then options."""
    cluster = read_cluster(Path(arguments.cluster)) if arguments.cluster else Cluster()
    if arguments.profile:
        from sim.calibrate.profile import cluster_values, read_profile  # noqa: PLC0415 - only where one was measured

        cluster = changed(cluster, cluster_values(read_profile(Path(arguments.profile))).items(), "--profile")
    pairs = []
    for text in arguments.set or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise OutOfRange("--set", repr(text), "a name and its value", "written NAME=VALUE")
        pairs.append((name.strip(), value))
    return changed(cluster, pairs, "--set")


def model_of(arguments: argparse.Namespace) -> Model:
    """The model of a command: a known one, or a config's."""
    if arguments.config is None:
        return model(arguments.model)
    return read_model(Path(arguments.config), arguments.parameters, arguments.active_parameters)


def side_by_side(arguments: argparse.Namespace, paths: list[PathName]) -> list[Result]:
    """Each path over the same requests, each on its own thread: the core releases the GIL."""
    requests = read_trace(Path(arguments.trace), arguments.block_tokens)
    entry, cluster = model_of(arguments), cluster_of(arguments)
    terms = Terms(
        decode_put_tokens=arguments.decode_put_tokens,
        policy=arguments.policy,
        always_get=arguments.always_get,
        overlap=arguments.overlap,
        block_tokens=arguments.block_tokens,
        engine=arguments.engine,
        prefetch_lead_s=arguments.prefetch_lead_s,
        prefetch_false_share=arguments.prefetch_false_share,
        timings=read_timings(Path(arguments.timings)) if arguments.timings else None,
    )
    with ThreadPoolExecutor(len(paths)) as threads:
        running = [
            threads.submit(
                simulate,
                requests,
                entry,
                cluster,
                path,
                terms,
                bar(f"replay, {path}") if not i else lambda _: None,
            )
            for i, path in enumerate(paths)
        ]
        return [one.result() for one in running]


_OPTIONS = (
    *("model", "policy", "decode_put_tokens", "block_tokens", "engine"),
    *("prefetch_lead_s", "prefetch_false_share"),
)


def run_replay(arguments: argparse.Namespace) -> str:
    """The command's output."""
    paths: list[PathName] = list(dict.fromkeys(arguments.path or PATHS))
    swept = [(name, side_by_side(one, paths)) for name, one in points(arguments, _OPTIONS)]
    saved = _saved(arguments, swept)
    if arguments.as_json:
        if arguments.sweep is None:
            return as_json(report.as_document(swept[0][1]))
        return as_json([{"point": name, **report.as_document(results)} for name, results in swept])
    if arguments.as_csv:
        rows = [row for name, results in swept for row in _flat(name, results)]
        return as_csv(list(rows[0]), [list(row.values()) for row in rows])
    notes = "\n".join(f"  - {note}" for note in report.left_out(swept[0][1]))
    blocks = []
    for name, results in swept:
        head = (name, *(report.NAMES[path] for path in paths))
        blocks.append(table(head, report.rows(results), left=(0,)))
    return "\n\n".join([*blocks, f"Read this with it:\n{notes}"]) + saved


def _flat(point: str, results: Sequence[Result]) -> list[dict[str, object]]:
    """A line of CSV for each path: the document's scalar numbers."""
    rows = []
    for path, found in report.as_document(results)["paths"].items():
        numbers = {name: value for name, value in found.items() if not isinstance(value, dict)}
        rows.append({"point": point, "path": path, **numbers})
    return rows


def _saved(arguments: argparse.Namespace, swept: Sequence[tuple[str, list[Result]]]) -> str:
    saved = ""
    results = swept[0][1]
    if arguments.html:
        if arguments.sweep is not None:
            raise OutOfRange("--html", arguments.html, "a page of one run", "without --sweep")
        title = f"{model_of(arguments).name} over {Path(arguments.trace).name}"
        cluster = results[0].cluster
        about = (
            f"engines: {cluster.engines} of {cluster.gpus_per_engine} GPUs; storage nodes: {cluster.nodes};"
            f" drives in each: {cluster.drives_per_node}; eviction: {arguments.policy}"
        )
        saved += save("--html", Path(arguments.html), report.page(results, title, about))
    if arguments.plot:
        drawn = [
            (one.path, one.ttft_quantile_s(0.99), one.usd_per_hour) for _, found in swept for one in found
        ]
        saved += save_plot("--plot", Path(arguments.plot), cost_plot(drawn, "replay"))
    return saved


def cost_plot(found: Sequence[tuple[str, float, float]], what: str) -> str:
    """Cost per hour against the p99 of the time to the first token; the Pareto front is joined."""
    names = list(dict.fromkeys(name for name, *_ in found))
    series = []
    for name in names:
        pairs = sorted((p99_s, usd) for one, p99_s, usd in found if one == name)
        series.append(Series(name, [p for p, _ in pairs], [usd for _, usd in pairs], points=True))
    kept = pareto([(p99_s, usd) for _, p99_s, usd in found])
    front = sorted((p99_s, usd) for (_, p99_s, usd), keep in zip(found, kept, strict=True) if keep)
    if len(front) > 1:
        series.append(Series("Pareto front", [p for p, _ in front], [usd for _, usd in front], dashed=True))
    chart = Chart(
        f"{what}: cost against the time to the first token",
        "TTFT p99",
        "USD an hour",
        series,
        x_format=seconds_label,
        y_format=lambda v: f"{v:,.0f}",
        y_from_zero=True,
    )
    return figure([chart])


def run_generate(arguments: argparse.Namespace) -> str:
    """Chats in Mooncake's format, on stdout or in a file."""
    terms = Chats(
        sessions=arguments.sessions,
        sessions_per_s=arguments.sessions_per_s,
        turns=arguments.turns,
        think_s=arguments.think_s,
        system_tokens=arguments.system_tokens,
        systems=arguments.systems,
        turn_tokens=arguments.turn_tokens,
        answer_tokens=arguments.answer_tokens,
        token_s=arguments.token_s,
        seed=arguments.seed,
    )
    lines = "\n".join(write_mooncake(chats(terms)))
    if arguments.out is None:
        return lines
    return save("--out", Path(arguments.out), lines + "\n").strip()
