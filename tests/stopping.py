"""Stops a process completely."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.nic_offload.rig import wait_until


def stop(pid: int) -> None:
    """Stop a process; none of its threads runs when this returns.

    The signal alone stops a thread when that has a core next, and meanwhile the others go on: a node may still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _stands_still(pid), "all of its threads stand still")


def _stands_still(pid: int) -> bool:
    return all(_state(thread) in "TtXZ" for thread in Path(f"/proc/{pid}/task").iterdir())


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return "X"
