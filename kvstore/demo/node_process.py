"""A storage node as a child process: started, waited for, stopped or killed by its process id.

The child reads a pipe of its parent, so it stops when the parent dies, for whatever reason.
"""

from __future__ import annotations

import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvstore.errors import NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["NodeProcess", "lasting_port"]

_READY = "ready "
_PORTS_BEGIN = 15_000
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0


def lasting_port() -> int:
    """Find a free port that a node can use again after a kill.

    It is below the kernel's ephemeral ports: a client that tries to reach a dead node could be given the node's own
    port, would then be connected to itself, and the node could not come back.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(_PORTS_BEGIN, max(end, _PORTS_BEGIN + 1))  # noqa: S311 - no secret
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


class NodeProcess:
    """`kvstore serve` over a data folder, on loopback, with other flags if any."""

    def __init__(
        self,
        data: Path,
        *,
        capacity: str = "1GiB",
        port: int = 0,
        provider: str | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Start it; `arguments` are further arguments of the command, and may differ at the next start."""
        self._command = [
            sys.executable,
            "-m",
            "kvstore",
            "serve",
            "--tied",
            "--data",
            str(data),
            "--capacity",
            capacity,
        ]
        if provider is not None:
            self._command += ["--provider", provider]
        self.arguments = arguments
        self.data = data
        self._log = data.parent / f"{data.name}.log"
        self._port = port or lasting_port()
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def target(self) -> str:
        """Its address; the same after a restart."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        """The node's output on standard error, of all its runs."""
        return self._log.read_text()

    def start(self) -> None:
        """Start it, and wait until it takes calls."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*self._command, *self.arguments, "--listen", self.target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            line = self._first_line(self._process)
        except BaseException:  # on Ctrl-C as well: it would create its folder after ours has been removed
            self.kill()
            raise
        if not line.startswith(_READY):
            self.kill()
            last = self.log().strip().splitlines()[-1:] or ["it said nothing"]
            raise NodeUnavailable(f"The node did not start: {last[0].removeprefix('kvstore: ')}")
        self._port = int(line.rpartition(":")[2])

    @staticmethod
    def _first_line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        until = time.monotonic() + _START_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, until - time.monotonic())):
                return ""
        return process.stdout.readline()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Send SIGTERM; returns the exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            status = process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
