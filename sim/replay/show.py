"""`kvsim replay` and `kvsim generate`: a trace through a cluster by one or more paths; chats made up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from sim.hardware import changed
from sim.models import model
from sim.replay import report
from sim.replay.cluster import PATHS, Cluster, read_cluster
from sim.replay.simulate import Terms, simulate
from sim.replay.workload import Chats, chats, read_trace, write_mooncake
from sim.show import as_json, bar, save, table
from sim.units import OutOfRange

if TYPE_CHECKING:
    import argparse

    from sim.replay.cluster import PathName
    from sim.replay.simulate import Result

__all__ = ["cluster_of", "run_generate", "run_replay", "side_by_side"]


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The cluster of a command: the file's, what was measured, and what was set, in this order."""
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


def side_by_side(arguments: argparse.Namespace, paths: list[PathName]) -> list[Result]:
    """Each path over the same requests; each on a thread of its own, the core lets others run."""
    requests = read_trace(Path(arguments.trace), arguments.block_tokens)
    entry, cluster = model(arguments.model), cluster_of(arguments)
    terms = Terms(
        decode_put_tokens=arguments.decode_put_tokens,
        policy=arguments.policy,
        always_get=arguments.always_get,
        overlap=arguments.overlap,
        block_tokens=arguments.block_tokens,
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


def run_replay(arguments: argparse.Namespace) -> str:
    """What the command prints."""
    paths: list[PathName] = list(dict.fromkeys(arguments.path or PATHS))
    results = side_by_side(arguments, paths)
    saved = ""
    if arguments.html:
        title = f"{arguments.model} over {Path(arguments.trace).name}"
        cluster = results[0].cluster
        about = (
            f"engines: {cluster.engines} of {cluster.gpus_per_engine} GPUs; storage nodes: {cluster.nodes};"
            f" drives in each: {cluster.drives_per_node}; eviction: {arguments.policy}"
        )
        saved = save("--html", Path(arguments.html), report.page(results, title, about))
    if arguments.as_json:
        return as_json(report.as_document(results))
    head = ("", *(report.NAMES[path] for path in paths))
    notes = "\n".join(f"  - {note}" for note in report.LEFT_OUT)
    return f"{table(head, report.rows(results), left=(0,))}\n\nRead this with it:\n{notes}{saved}"


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
