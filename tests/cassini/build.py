"""Compiles the software Cassini, a stand-in for libfabric, and the driver that proves its rules.

What always holds: a file appears whole under its name or not at all, and is compiled again only when a source, a
header or this module is newer. Processes that build at the same time wait for each other.

What it doesn't do: find a compiler or headers other than those that the C core is built with.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

__all__ = ["build", "build_driver"]

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "cassini"
COMPILER_TIMEOUT_S = 120
FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror")
LIBRARIES = ("-ldl", "-lpthread")


def build(folder: Path = FOLDER) -> Path:
    """Build the stand-in; returns the path for TRIGGERKV_LIBFABRIC."""
    sources = [path for path in sorted(HERE.glob("*.c")) if not path.name.startswith("driver")]
    return _compiled(folder / "libcassini.so", sources, "-fPIC", "-shared", "-fvisibility=hidden")


def build_driver(folder: Path = FOLDER) -> Path:
    """Build the driver: given a rule's name, it checks that rule; without one, it lists them."""
    return _compiled(folder / "driver", sorted(HERE.glob("driver*.c")))


def _compiled(target: Path, sources: list[Path], *flags: str) -> Path:
    inputs = [*sources, *HERE.glob("*.h"), Path(__file__)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{target}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists() and target.stat().st_mtime >= max(path.stat().st_mtime for path in inputs):
            return target
        fresh = Path(f"{target}.new")
        command = [
            os.environ.get("CC", "cc"),
            *FLAGS,
            *flags,
            "-o",
            str(fresh),
            *map(str, sources),
            *LIBRARIES,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILER_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{target.name} does not compile: {done.stderr}")
        fresh.replace(target)
    return target
