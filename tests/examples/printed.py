r"""Runs an example as it is printed: the commands at its top, as one script, in a folder with a copy of `examples/`.

A command is a line that begins with `$ ` behind spaces or a comment's sign; its continuation ends what `\` begins, and
the lines behind it are what it prints, with `...` for what differs each time. What always holds: ports are changed into
free ones of this run's, in the commands and in the copy, and nothing else is; the script ends within its time, and
what it has started ends with it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.ports import next_port

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EXAMPLES", "ROOT", "Command", "Run", "check", "commands", "cpp_environment", "run"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
_BUILT = shutil.ignore_patterns("node_modules", "build", "__pycache__")
_PORTS = ("7070", "7071", "7072", "2379", "9100", "5555", "8080")  # that examples name
_PORT = re.compile(rf"\b(?:{'|'.join(_PORTS)})\b")
_COMMENT = re.compile(r"^(?:#|//)? ?(?: {4})?")


class Command(NamedTuple):
    """One command and the lines that it prints."""

    line: str
    printed: tuple[str, ...]


class Run(NamedTuple):
    """The result of a run."""

    status: int
    printed: str
    said: str
    ports: Mapping[str, str]


def commands(text: str) -> list[Command]:
    """The commands at the top of an example: of the first indented block that has any."""
    found: list[Command] = []
    begins = re.compile(r"^(?P<margin>(?:#|//)?\s+)\$ ", re.MULTILINE)
    first = begins.search(text)
    if first is None:
        return found
    margin = first["margin"].lstrip("\n")
    for line in text[first.start("margin") :].lstrip("\n").splitlines():
        if not line.startswith(margin):
            break
        words = line[len(margin) :]
        if words.startswith("$ "):
            found.append(Command(words[2:], ()))
        elif found[-1].line.endswith("\\"):
            found[-1] = Command(f"{found[-1].line}\n{words}", ())
        else:
            found[-1] = Command(found[-1].line, (*found[-1].printed, words))
    return found


def run(
    name: str, folder: Path, *, words: Mapping[str, str] | None = None, timeout_s: float = 60.0, **more: str
) -> Run:
    """Run an example; `words` replaces words of its commands, such as MODEL; `more` is added to the environment."""
    shutil.copytree(EXAMPLES, folder / "examples", ignore=_BUILT)
    for used in ("proto", "deploy"):
        (folder / used).symlink_to(ROOT / used)
    ports = _ports()
    for path in (folder / "examples").rglob("*"):
        if path.is_file():
            path.write_text(_moved(path.read_text(), ports))
    lines = [one.line for one in commands((folder / "examples" / name).read_text())]
    for word, stands_for in (words or {}).items():
        lines = [line.replace(word, stands_for) for line in lines]
    end = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"
    script = "\n".join([end, "set -e", *lines])
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=_environment(ports) | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return Run(process.returncode, printed, said, ports)


def check(name: str, done: Run) -> None:
    """It succeeded, and printed the lines at the top of the example, in that order."""
    assert done.status == 0, done.printed + done.said[-4000:]
    rest = done.printed
    for command in commands((EXAMPLES / name).read_text()):
        for line in command.printed:
            wanted = re.escape(_moved(line, done.ports)).replace(re.escape("..."), ".+")
            found = re.search(rf"^{wanted}$", rest, re.MULTILINE)
            assert found is not None, f"{line!r} is not in\n{rest}\n{done.said[-4000:]}"
            rest = rest[found.end() :]


def cpp_environment() -> dict[str, str]:
    """Variables that lead a compiler to the gRPC for C++ that `make grpc-cpp` has fetched."""
    fetched = ROOT / ".cache/grpc-cpp/usr"
    libraries = next(fetched.glob("lib/*/pkgconfig"), None)
    if libraries is None:
        return {}
    path = _environment(_ports())["PATH"]
    return {
        "PATH": f"{fetched}/bin{os.pathsep}{path}",
        "CPATH": f"{fetched}/include",
        "LIBRARY_PATH": str(libraries.parent),
        "LD_LIBRARY_PATH": str(libraries.parent),
        "PKG_CONFIG_PATH": str(libraries),
    }


def _ports() -> dict[str, str]:
    taken: set[int] = set()
    while len(taken) < len(_PORTS):
        taken.add(next_port())
    return dict(zip(_PORTS, map(str, sorted(taken)), strict=True))


def _moved(text: str, ports: Mapping[str, str]) -> str:
    return _PORT.sub(lambda found: ports[found[0]], text)


def _environment(ports: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process without our settings, with the smallest node and other ports for etcd."""
    unwanted = ("TRIGGERKV", "PYTEST", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    etcd = f"http://127.0.0.1:{ports['2379']}"
    peers = f"http://127.0.0.1:{next_port()}"
    places = [str(Path(sys.executable).parent), str(ROOT / ".venv/bin"), str(ROOT / ".cache/etcd")]
    return kept | {
        "PATH": os.pathsep.join([*places, kept.get("PATH", "")]),
        "TRIGGERKV_SERVE_LISTEN": f"127.0.0.1:{ports['7070']}",
        "TRIGGERKV_SERVE_CAPACITY": "64MiB",
        "TRIGGERKV_SERVE_HOT": "128MiB",
        "ETCD_LISTEN_CLIENT_URLS": etcd,
        "ETCD_ADVERTISE_CLIENT_URLS": etcd,
        "ETCD_LISTEN_PEER_URLS": peers,
        "ETCD_INITIAL_ADVERTISE_PEER_URLS": peers,
        "ETCD_INITIAL_CLUSTER": f"default={peers}",
        "npm_config_cache": str(ROOT / ".cache/npm"),
        "npm_config_prefer_offline": "true",
    }
