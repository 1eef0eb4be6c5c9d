"""The command `kvsim`. It computes, prints and exits; nothing here needs libfabric, a drive or a network.

What always holds: the caveats of a preset are printed with its numbers, in every form of output. Exit statuses are the
same as those of `kvstore` (`kvcli.running`). A command imports what it needs when it runs, so `--help` and `curve`
answer at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from kvcli.completion import add_completion, script
from kvcli.running import CommandParser, Status, add_commands, run_command
from kvcli.version import add_version

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["main"]


def _curve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="fair", help="reading of the paper's tables; '?' lists them")
    parser.add_argument("--profile", metavar="FILE", help="a measured profile, for --preset measured")
    parser.add_argument("--size", action="append", help="such as 32KB or 1GiB; may be repeated")
    parser.add_argument("--direction", choices=("put", "get"), default="put")
    parser.add_argument("--chunk", default="512MB", help="largest message (default: %(default)s)")
    parser.add_argument(
        "--trigger-us",
        type=float,
        help="cost of triggering a message, in microseconds (default: the preset's)",
    )
    parser.add_argument("--drives", type=int, default=1, help="drives over which each message is striped")
    parser.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="change a parameter of the preset"
    )
    parser.add_argument("--parameters", action="store_true", help="list all parameters, units and ranges")
    parser.add_argument(
        "--ranges",
        action="store_true",
        help="with fair: vary each speed within its range, and show the effect",
    )
    parser.add_argument("--stages", action="store_true", help="show what each stage costs")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw Figs. 5, 6 and 7")
    _forms(parser)


def _kv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", help="may be repeated (default: all)")
    parser.add_argument("--config", action="append", metavar="FILE", help="a Hugging Face config.json")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="number of sequences (default: %(default)s)")
    parser.add_argument(
        "--dtype", help="fp32, fp16, bf16, fp8, int8 or int4 (default: fp16, or the config's)"
    )
    parser.add_argument(
        "--layout", help="mha, mqa, gqa:N, mla:N or ragged:K/V,... instead of the model's own"
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="draw Fig. 1")
    parser.add_argument("--gpu-memory", default="80GB", help="memory of one GPU (default: %(default)s)")
    parser.add_argument("--gpu-usd", type=float, default=30_000, help="a GPU's price (default: %(default)s)")
    parser.add_argument(
        "--gpu-cost",
        metavar="TABLE.csv",
        help="check the totals of a table of GPU costs: gpu,count,price_usd,printed_total_usd",
    )
    _forms(parser)


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", help="one preset (default: all)")
    _forms(parser, csv=False)


def _paper(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-cost", metavar="TABLE.csv", help="Table I's cells: gpu,count,price_usd,printed_total_usd"
    )
    _forms(parser)


def _search(parser: argparse.ArgumentParser) -> None:
    _forms(parser, csv=False)


def _replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="*.jsonl (Mooncake's) or *.csv (BurstGPT's, Azure's)")
    parser.add_argument(
        "--path",
        action="append",
        choices=("cpu", "triggered", "recompute"),
        help="may be repeated (default: all three, side by side)",
    )
    parser.add_argument("--policy", default="lru", help="eviction: lru, s3fifo, or package.module:Class")
    parser.add_argument(
        "--decode-put-tokens",
        type=int,
        default=16,
        help="tokens of an answer after which its KV is put (default: %(default)s)",
    )
    parser.add_argument("--always-get", action="store_true", help="fetch even if recomputing is faster")
    parser.add_argument(
        "--overlap", action="store_true", help="compute a layer while later layers are being fetched"
    )
    parser.add_argument(
        "--prefetch-lead-s",
        type=float,
        default=0.0,
        help="seconds before the prompt at which the user's history is prefetched into the node's memory (0: never)",
    )
    parser.add_argument(
        "--prefetch-false-share",
        type=float,
        default=0.0,
        help="prefetches that no prompt follows, for each one that a prompt follows",
    )
    parser.add_argument(
        "--block-tokens", type=int, default=512, help="tokens per block of the trace (default: %(default)s)"
    )
    parser.add_argument(
        "--timings",
        metavar="TABLE.csv",
        help="measured prefill times: new_tokens,context_tokens,prefill_s",
    )
    parser.add_argument("--html", metavar="FILE.html", help="write a page with plots")
    _cluster(parser)
    _forms(parser)


def _cluster(parser: argparse.ArgumentParser) -> None:
    _plant(parser)
    parser.add_argument(
        "--engine",
        choices=("whole", "steps"),
        default="whole",
        help="whole: one prompt after the other; steps: chunked prefill and decoding, with a prefix cache",
    )
    parser.add_argument(
        "--sweep",
        metavar="NAME=a,b,c",
        help="run once for each value of an option or of a number of the cluster",
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="draw cost against the time to the first token")


def _plant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3-70b", help="the model, by name (default: %(default)s)")
    parser.add_argument("--config", metavar="FILE", help="a Hugging Face config.json instead of --model")
    parser.add_argument("--parameters", type=float, help="parameters of the model, with --config")
    parser.add_argument(
        "--active-parameters",
        type=float,
        help="active parameters of a mixture of experts, with --config (default: all)",
    )
    _nodes(parser)


def _nodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="FILE.toml", help="a file with a table [cluster]")
    parser.add_argument("--profile", metavar="FILE.toml", help="a profile written by `kvsim calibrate fit`")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="change a number of the cluster")


def _loss(parser: argparse.ArgumentParser) -> None:
    for name, kind, default, what in (
        ("requests", int, 1_000_000, "number of gets"),
        ("users", int, 200_000, "users with stored KV"),
        ("history-tokens", int, 8000, "stored tokens of each user"),
        ("busy", float, 0.5, "mean utilisation of the bottleneck of the nodes"),
        ("lose-nodes", int, 1, "nodes lost after a third of the run"),
        ("lose-drives", int, 0, "drives lost at that time, each on a different node"),
        ("slow-nodes", int, 0, "nodes that are slow throughout"),
        ("slow-factor", float, 4.0, "how many times slower these are"),
        ("noticed-s", float, 30.0, "seconds until lost nodes are removed from the map"),
        ("deadline-s", float, 1.0, "seconds until a get from a lost node gives up before that"),
        ("seed", int, 1, "the same seed gives the same run"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: %(default)s)")
    _plant(parser)
    _forms(parser)


def _change(parser: argparse.ArgumentParser) -> None:
    for name, kind, default, what in (
        ("lose-nodes", int, 1, "nodes lost at the same time"),
        ("join-nodes", int, 0, "nodes that join at the same time"),
        ("replicas", int, 2, "copies of each block"),
        ("noticed-s", float, 6.0, "seconds until the other nodes begin to copy"),
        ("busy", float, 0.5, "mean utilisation of a node's drives or links before the change"),
        ("popular-share", float, 0.1, "share of all bytes that belong to one prefix"),
        ("popular-blocks", int, 64, "blocks in that prefix"),
        ("trials", int, 20, "repetitions, each with different lost nodes"),
        ("seed", int, 1, "the same seed gives the same trials"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--stored", default="1TB", help="mean bytes on a node, copies included (default: %(default)s)"
    )
    parser.add_argument(
        "--copy-rate",
        default="32MiB",
        help="bytes per second that a node copies to others (default: %(default)s)",
    )
    _nodes(parser)
    _forms(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--break-even", action="store_true", help="compare fetching with recomputing, for every model"
    )
    parser.add_argument(
        "--way",
        action="append",
        choices=("recompute", "cpu", "triggered", "triggered+dram"),
        help="way of serving; may be repeated (default: all four)",
    )
    parser.add_argument(
        "--highest-rate", action="store_true", help="find the most users that the given cluster can serve"
    )
    for name, kind, default, what in (
        ("users", int, 1000, "users active at the same time"),
        ("think-s", float, 60.0, "mean seconds between an answer and the next question"),
        ("history-tokens", int, 8000, "tokens of the conversation before a turn"),
        ("new-tokens", int, 400, "tokens of a question"),
        ("answer-tokens", int, 300, "tokens of an answer"),
        ("found-share", float, 0.95, "share of the turns whose history is stored"),
        ("ttft-s", float, 1.0, "p99 of the time to the first token, in seconds"),
        ("utilisation-max", float, 0.7, "highest planned utilisation of any part"),
        ("seed", int, 1, "seed of the trial"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--trial", action="store_true", help="run each plan once more, with other random numbers"
    )
    _cluster(parser)
    _forms(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE.jsonl", help="(default: standard output)")
    for name, kind, default, what in (
        ("sessions", int, 1000, "number of sessions"),
        ("sessions-per-s", float, 1.0, "sessions that begin per second"),
        ("turns", float, 5.0, "mean turns of a session"),
        ("think-s", float, 40.0, "mean seconds between an answer and the next question"),
        ("system-tokens", int, 1024, "tokens of a system prompt"),
        ("systems", int, 8, "number of different system prompts"),
        ("turn-tokens", float, 600.0, "mean tokens of a question"),
        ("answer-tokens", float, 300.0, "mean tokens of an answer"),
        ("token-s", float, 0.03, "seconds per token of an answer"),
        ("seed", int, 1, "the same seed gives the same chats"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: %(default)s)")


def _forms(parser: argparse.ArgumentParser, *, csv: bool = True) -> None:
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", dest="as_json", help="print JSON, for programs")
    if csv:
        forms.add_argument("--csv", action="store_true", dest="as_csv", help="print CSV, for spreadsheets")


def _calibrate(parser: argparse.ArgumentParser) -> None:
    steps = add_commands(parser, "step")
    run = steps.add_parser("run", help="measure this machine, about three minutes")
    run.add_argument("--data", default=".", help="a folder on the drive to measure (default: %(default)s)")
    run.add_argument("--out", default="measured.json", help="(default: %(default)s)")
    run.add_argument(
        "--runtime-ms", type=int, default=400, help="how long fio measures each point (default: %(default)s)"
    )
    run.set_defaults(function="run_run")
    fit = steps.add_parser("fit", help="fit a profile to the measurements")
    fit.add_argument("measured", metavar="MEASURED.json")
    fit.add_argument("--out", default="profile.toml", help="(default: %(default)s)")
    fit.add_argument("--plot", metavar="FILE.svg", help="draw the drive's fits, as the paper's Fig. 4")
    fit.set_defaults(function="run_fit")
    check = steps.add_parser(
        "check", help="compare the profile's predictions with `kvstore bench path`, half a minute"
    )
    check.add_argument("profile", metavar="PROFILE.toml")
    check.add_argument("--data", default=".", help="a folder on the same drive (default: %(default)s)")
    check.add_argument(
        "--measured",
        metavar="FILE",
        help="output of an earlier `kvstore bench path --json`, instead of a new run",
    )
    check.add_argument("--plot", metavar="FILE.svg", help="draw predicted and measured")
    _forms(check, csv=False)
    check.set_defaults(function="run_check")


# name: its module, the function that runs it, its arguments, its line in the help
_COMMANDS = {
    "curve": ("sim.curve_command", "run", _curve, "compare CPU-initiated and triggered transfers, by size"),
    "paper": (
        "sim.paper_command",
        "run",
        _paper,
        "list every number of the paper with ours beside it, and a verdict",
    ),
    "explain": (
        "sim.claims_command",
        "run_explain",
        _explain,
        "show which of the paper's claims each preset meets",
    ),
    "search": (
        "sim.claims_command",
        "run_search",
        _search,
        "search all readings of the tables for one that meets the claims",
    ),
    "replay": (
        "sim.replay.replay_command",
        "run_replay",
        _replay,
        "run a trace through a cluster, and compare the paths",
    ),
    "plan": (
        "sim.replay.plan_command",
        "run_plan",
        _plan,
        "find the cheapest cluster that meets a deadline, with or without offloading",
    ),
    "loss": (
        "sim.replay.loss_command",
        "run_loss",
        _loss,
        "lose or slow down nodes or drives of a large cluster",
    ),
    "cluster": (
        "sim.replay.cluster_change_command",
        "run_cluster",
        _change,
        "lose or add nodes of a cluster with replicas: copies, time to safety, load",
    ),
    "generate": (
        "sim.replay.replay_command",
        "run_generate",
        _generate,
        "generate a trace of chats with many turns",
    ),
    "calibrate": (
        "sim.calibrate.calibrate_command",
        "",
        _calibrate,
        "measure this machine, fit a profile, check it",
    ),
    "kv": ("sim.kv_command", "run", _kv, "compute the KV bytes of a model, and what they cost in GPU memory"),
}


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvsim",
        description="Estimate what KV-cache offload costs on other hardware.",
        epilog="Exit status: 0 success, 1 failure, 2 usage error.",
    )
    add_version(parser)
    commands = add_commands(parser)
    for name, (_, _, add, line) in _COMMANDS.items():
        add(commands.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}."))
    add_completion(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""

    def work() -> int:
        arguments = _parser().parse_args(argv)
        if arguments.command == "completion":
            print(script(_parser(), arguments.shell), end="")
            return 0
        module, function, *_ = _COMMANDS[arguments.command]
        function = function or arguments.function  # of a step
        print(getattr(importlib.import_module(module), function)(arguments))
        return 0

    # A ValueError is an OutOfRange, and nothing else raises one here.
    return run_command(
        "kvsim",
        work,
        lambda error: Status.USAGE if isinstance(error, ValueError) else None,
        ends_process=argv is None,
    )


if __name__ == "__main__":
    sys.exit(main())
