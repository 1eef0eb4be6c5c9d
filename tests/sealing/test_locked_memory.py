"""A process that may lock little memory: swappable keys are reported, and a failed start has a reason."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from kvstore.sealing.masters import new_master_file

if TYPE_CHECKING:
    from pathlib import Path

SWAPPED = "doesn't let this process lock its keys in memory"
# It may lock so much, and is no exception to that (PR_CAPBSET_DROP, CAP_IPC_LOCK), though it be root's.
LIMITED = """
import ctypes, os, resource, sys
ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[1]),) * 2)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def limited(size_bytes: int, *arguments: str) -> list[str]:
    """Python with these arguments and a limit on locked memory."""
    return [sys.executable, "-c", LIMITED, str(size_bytes), *arguments]


def serving(folder: Path, size_bytes: int) -> subprocess.Popen[str]:
    if not (folder / "master.key").exists():
        new_master_file(folder / "master.key")
    serve = ["-m", "kvstore", "serve", "--data", str(folder / f"data-{size_bytes}"), "--capacity", "64MiB"]
    serve += ["--listen", "127.0.0.1:0", "--master-key", f"file:{folder / 'master.key'}"]
    return subprocess.Popen(
        limited(size_bytes, *serve), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def log_of(folder: Path, size_bytes: int) -> str:
    """The log of a node that has started."""
    with serving(folder, size_bytes) as node:
        try:
            assert node.stdout is not None
            assert "ready" in node.stdout.readline()
        finally:
            node.send_signal(signal.SIGTERM)
            _, log = node.communicate(timeout=60)
    return log


def test_keys_that_cannot_be_locked_are_reported_once(tmp_path: Path) -> None:
    assert log_of(tmp_path, 512 << 10).count(SWAPPED) == 1
    assert SWAPPED not in log_of(tmp_path, 8 << 20)


def test_a_node_that_may_lock_nothing_says_so_in_one_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, 0) as node:
        out, log = node.communicate(timeout=60)
    assert node.returncode == 1
    assert out == ""
    (line,) = log.splitlines()
    assert "may lock (0 KiB); raise ulimit -l" in line


def test_the_doctor_tries_to_lock_memory() -> None:
    ask = "from kvstore.commands.probes import can_lock_keys; print(can_lock_keys())"
    for size_bytes, said in ((512 << 10, "False"), (8 << 20, "True")):
        done = subprocess.run(
            limited(size_bytes, "-c", ask),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == said
