"""CPU cost per block, by thread, at the node and at its client, under one load of `make bench-peers`.

    python -m tools.profile_node put|written|get|armed [--size BYTES] [--batch N] [--seconds S]

It starts both, keeps up the load, and prints CPU microseconds per block for every thread. If `perf` is installed it
also prints the most expensive functions; with `py-spy` the node's Python stacks are written to
`build/profile/node.txt`.

What it doesn't do: measure latency. Profiling slows both processes down, so use the benchmark for that.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.client_process import Worker, settled_cpu_ns
from kvstore.demo.node_process import NodeProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_FOLDER = Path("build/profile")
_WAIT_S = 60.0
_LINES, _LEAST_US = 40, 0.05
_SET_BYTES, _CALLS_MAX = 64 << 20, 64


def _threads(pid: int) -> dict[tuple[int, str], int]:
    """CPU time of each thread, by its id and its name, in nanoseconds."""
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            spent[int(task.name), name] = int((task / "schedstat").read_text().split()[0])
        except OSError:  # a thread that has just ended
            continue
    return spent


def _load(client: Worker, what: str, batch: int, calls: int, until_s: float) -> int:
    """Keep it up until then; how many blocks that were."""
    blocks = 0
    if what == "get":
        client.ask("put", "kept", "written", batch, 1, calls)
    while time.monotonic() < until_s:
        if what == "get":
            client.ask("get", "kept", batch, 1)
        elif what == "armed":
            client.ask("armed", batch, 0)
            client.ask("forget", "armed")
        else:
            client.ask("put", "fresh", "written" if what == "written" else "landed", batch, 1, calls)
            client.ask("forget", "fresh")
        blocks += batch * (1 if what == "armed" else calls)
    return blocks


def _recorders(stack: ExitStack, pids: Sequence[int], seconds: float) -> list[subprocess.Popen[bytes]]:
    """Perf over both, py-spy over the node, as far as they are here."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    commands: list[list[str]] = []
    if perf := shutil.which("perf"):
        both = ",".join(map(str, pids))
        commands.append([perf, "record", "-q", "-g", "-o", str(_FOLDER / "perf.data"), "-p", both])
        commands[-1] += ["--", "sleep", str(seconds)]
    if spy := shutil.which("py-spy"):
        commands.append([spy, "record", "-t", "-f", "raw", "-o", str(_FOLDER / "node.txt")])
        commands[-1] += ["-d", str(int(seconds)), "-p", str(pids[0])]
    quiet = subprocess.DEVNULL
    return [stack.enter_context(subprocess.Popen(one, stdout=quiet, stderr=quiet)) for one in commands]


def _print_functions() -> None:
    command = ["perf", "report", "-i", str(_FOLDER / "perf.data"), "--stdio", "-g", "none"]
    command += ["--no-children", "-F", "overhead,comm,dso,symbol", "--percent-limit", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip() and not line.startswith("#")]
    print("\n".join(["", *lines[:_LINES]]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load and print its cost."""
    parser = argparse.ArgumentParser(prog="tools.profile_node", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("put", "written", "get", "armed"))
    parser.add_argument("--size", type=int, default=32 << 10, help="bytes of a block (32768)")
    parser.add_argument("--batch", type=int, default=64, help="blocks a call (64)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long (5)")
    given = parser.parse_args(arguments)
    calls = max(1, min(_CALLS_MAX, _SET_BYTES // (given.size * given.batch)))
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="."))).resolve()
        node = stack.enter_context(NodeProcess(home / "node"))
        client = stack.enter_context(Worker([sys.executable, "-m", "benchmarks.peers.ours", node.target]))
        client.ask("open", given.size, given.batch)
        _load(client, given.what, given.batch, calls, time.monotonic() + 1.0)
        settled_cpu_ns(node.pid)
        pids = {"node": node.pid, "client": client.pid}
        recorders = _recorders(stack, list(pids.values()), given.seconds)
        before = {name: _threads(pid) for name, pid in pids.items()}
        blocks = _load(client, given.what, given.batch, calls, time.monotonic() + given.seconds)
        settled_cpu_ns(node.pid)
        print(f"{blocks} blocks; CPU us a block:")
        for name, pid in pids.items():
            for (tid, comm), spent_ns in sorted(_threads(pid).items(), key=lambda one: -one[1]):
                each_us = (spent_ns - before[name].get((tid, comm), 0)) / 1e3 / blocks
                if each_us >= _LEAST_US:
                    print(f"  {name:8}{comm:18}{each_us:10.2f}")
        for one in recorders:
            one.wait(_WAIT_S)
    if recorders and (_FOLDER / "perf.data").exists():
        _print_functions()
    return 0


if __name__ == "__main__":
    sys.exit(main())
