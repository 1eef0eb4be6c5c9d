"""A client in its own process, which reads commands line by line, and answers each with a line.

What always holds: each answer has a deadline, and an answer other than `ok` is an error with the worker's own text.
Both workers, `redis_client.c` and `ours.py`, take the same commands, so both are measured in the same way.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Timed", "Worker", "WorkerFailed", "cpu_ns", "settled_cpu_ns"]

_WAIT_S = 120.0
_QUIET_S, _QUIET_SHARE, _QUIET_ROUNDS = 0.01, 0.1, 100


class WorkerFailed(Exception):
    """A client could not execute a command; the message is its answer."""


class Timed(NamedTuple):
    """The times of a series of calls, as their caller saw them."""

    begin_ns: int
    end_ns: int
    cpu_ns: int  # the client's own, all of its threads
    calls_ns: list[int]

    @classmethod
    def parse(cls, line: str) -> Self:
        begin_ns, end_ns, spent_ns, *calls_ns = map(int, line.split())
        return cls(begin_ns, end_ns, spent_ns, calls_ns)


class Worker:
    """One client."""

    def __init__(self, command: Sequence[str | Path], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )
        self.answer()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def tell(self, *words: object) -> None:
        """Send a command, and don't wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The answer to the last command, without the `ok`."""
        pipe = self._process.stdout
        assert pipe is not None
        line = pipe.readline() if select.select([pipe], [], [], _WAIT_S)[0] else "error it says nothing"
        word, _, rest = line.strip().partition(" ")
        if word != "ok":
            raise WorkerFailed(rest or "it ended")
        return rest

    def ask(self, *words: object) -> str:
        """Send a command, and wait for the answer."""
        self.tell(*words)
        return self.answer()

    def timed(self, *words: object) -> Timed:
        """Run puts or gets, and return their times."""
        self.tell(*words)
        return self.answered()

    def answered(self) -> Timed:
        """The times of the puts or gets that the last command started."""
        return Timed.parse(self.answer())

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cpu_ns(pid: int) -> int:
    """The CPU time of all running threads of a process, in nanoseconds."""
    spent_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent_ns += int((task / "schedstat").read_text().split()[0])
        except OSError:  # a thread that has just ended
            continue
    return spent_ns


def settled_cpu_ns(pid: int) -> int:
    """The same, once the process has finished its work after its last answer; waits a second at most."""
    before_ns = cpu_ns(pid)
    for _ in range(_QUIET_ROUNDS):
        time.sleep(_QUIET_S)
        now_ns = cpu_ns(pid)
        if now_ns - before_ns < _QUIET_SHARE * _QUIET_S * 1e9:
            break
        before_ns = now_ns
    return now_ns
