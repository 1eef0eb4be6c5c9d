"""Forks test nodes from a process that has imported everything and probed libfabric, which is most of a node's start.

What always holds: a node runs `kvstore serve` as from a shell, in its own process, with its arguments, environment,
folder and standard streams, and ends like any process. It differs only in that its modules and libfabric are loaded
already, that it allocates memory when it is first used, and that the pages of a new drive are allocated when they are
first written, as on drives of more than 2 GiB. With another interpreter, another command, or different variables that a
process reads before its own code (`_SETTLED_EARLY`), it is started as usual.

A test may run another command of `kvstore` in the same way (`Warm.run`), if its start is not what the test is about.

What it doesn't do: speed up processes that tests start by themselves; those show what imports cost or break.
"""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, Final

import nic_offload.memory
from kvstore.storage import superblock
from nic_offload.errors import FabricUnavailable
from nic_offload.library import expect_no_messages, load

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMAND: Final = ("-m", "kvstore")
_NODE: Final = (*_COMMAND, "serve")
_PRELOADED: Final = ("kvstore.cli", "kvstore.node.server")
_OTHER_LIBFABRIC: Final = "TRIGGERKV_LIBFABRIC"
_SETTLED_EARLY: Final = (
    _OTHER_LIBFABRIC,
    "LD_",
    "PYTHON",
    "FI_",
    "ASAN_",
    "TSAN_",
    "UBSAN_",
    "LSAN_",
    "GRPC_",
    "GLIBC_",
    "MALLOC_",
)
_SET_BY_COMMANDS: Final = ("GRPC_VERBOSITY", "NONE")  # also by one that a test runs in its own process
_REQUEST_BYTES_MAX: Final = 1 << 18
_INT_BYTES: Final = 4
_THREADS_END_S: Final = 5.0
_LATER_BYTES_MAX: Final = 1 << 30  # more may not be there, which is found out at once


def allocate_later() -> None:
    """Make modules imported from now on allocate memory when it is first used.

    Clearing all pages of a node's memory takes half of its start, and few tests use many of them.
    """
    at_once, collapse_at_once = nic_offload.memory.populate, nic_offload.memory.collapse

    def populate(memory: mmap.mmap, start: int, length: int) -> None:
        if length > _LATER_BYTES_MAX:
            at_once(memory, start, length)
            return
        memory.madvise(mmap.MADV_HUGEPAGE, start, length)
        memory.madvise(mmap.MADV_DONTDUMP, start, length)

    def collapse(fd: int, length: int) -> int:
        return collapse_at_once(fd, length) if length > _LATER_BYTES_MAX else 0

    nic_offload.memory.populate = populate
    nic_offload.memory.collapse = collapse


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTLED_EARLY) and (name, value) != _SET_BY_COMMANDS
    }


class Warm:
    """The process that nodes are forked from."""

    def __init__(self) -> None:
        """Prepare it; the process starts with the first node."""
        self._early = _early(dict(os.environ))
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        with self._theirs as theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no thread may be there when it forks
            )

    def _can_fork(self, command: Sequence[str], what: tuple[str, ...]) -> bool:
        """Whether this is the known command, in the environment of the process that forks."""
        is_it = command[0] == sys.executable and tuple(command[1 : 1 + len(what)]) == what
        if not is_it or "LD_PRELOAD" in self._early or self._early != _early(dict(os.environ)):
            return False
        if self._process is None:
            self._start()
        return True

    def popen(self, command: Sequence[str], **more: Any) -> subprocess.Popen[str] | Started:
        if not self._can_fork(command, _NODE):
            return subprocess.Popen(command, **more)
        return Started(self._socket, command, more["stderr"])

    def run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run` for any command of `kvstore`, without standard input, its output captured as text."""
        if not self._can_fork(command, _COMMAND):
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        with Path(os.devnull).open() as none, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            one = Forked(self._socket, command, none.fileno(), out.fileno(), err.fileno())
            try:
                status = one.wait(timeout_s)
            finally:
                one.kill()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(command, status, out.read(), err.read())

    def close(self) -> None:
        """End it. Remaining nodes end when their streams are closed."""
        self._socket.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait()


class Forked:
    """A forked process, with these standard streams."""

    def __init__(self, warm: socket.socket, command: Sequence[str], *streams: int) -> None:
        self.args = command
        self.returncode: int | None = None
        self._ended, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        request = json.dumps((list(command[3:]), dict(os.environ), str(Path.cwd()))).encode()
        with told:
            socket.send_fds(warm, [request], [*streams, told.fileno()])
        self.pid = self._number()

    def _number(self) -> int:
        data = self._ended.recv(_INT_BYTES, socket.MSG_WAITALL)
        if len(data) < _INT_BYTES:
            raise RuntimeError("The process that starts nodes has died.")
        return int.from_bytes(data, "little", signed=True)

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poller = select.poll()  # not select(): a test may have thousands of descriptors
            poller.register(self._ended, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number()
            self._ended.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Started(Forked):
    """A node, with the part of `subprocess.Popen` that `kvstore.demo.node_process` uses."""

    def __init__(self, warm: socket.socket, command: Sequence[str], stderr: IO[str]) -> None:
        to_read, stdin = os.pipe()
        stdout, to_write = os.pipe()
        super().__init__(warm, command, to_read, to_write, stderr.fileno())
        os.close(to_read)
        os.close(to_write)
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)


def warm_subprocess(warm: Warm) -> SimpleNamespace:
    """A replacement for `subprocess` in `kvstore.demo.node_process`."""
    return SimpleNamespace(Popen=warm.popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)


# --- in the process that forks


class _Forking:
    """Forks a node for each request, and reports how each ends."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._told: dict[int, socket.socket] = {}  # by the node's process id
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> list[str] | None:
        """Return in a forked node, with its command; and in this process when there are no more requests."""
        while True:
            ready, _, _ = select.select([self._requests, self._woken], [], [])
            if self._woken in ready:
                self._woken.recv(1 << 12)
                self._reap()
            if self._requests in ready:
                request, fds, _, _ = socket.recv_fds(self._requests, _REQUEST_BYTES_MAX, 4)
                if not request:
                    return None
                whose = socket.socket(fileno=fds[3])
                pid = os.fork()
                if not pid:
                    whose.close()
                    return self._become(request, fds[:3])
                self._told[pid] = whose
                whose.sendall(pid.to_bytes(_INT_BYTES, "little", signed=True))
                for fd in fds[:3]:
                    os.close(fd)

    def _reap(self) -> None:
        while self._told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            with self._told.pop(pid) as whose, suppress(OSError):  # the test has ended
                whose.sendall(code.to_bytes(_INT_BYTES, "little", signed=True))

    def _become(self, request: bytes, streams: list[int]) -> list[str]:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._requests, self._woken, self._waker, *self._told.values()):
            end.close()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        command: list[str]
        command, environment, folder = json.loads(request)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        random.seed()
        return command


def _run(requests: socket.socket) -> None:
    allocate_later()
    for name in _PRELOADED:
        importlib.import_module(name)
    superblock.ZERO_FILL_BYTES_MAX = 0  # type: ignore[attr-defined]
    if _OTHER_LIBFABRIC not in os.environ:  # one that tests bring along may count processes, or begin threads
        with suppress(FabricUnavailable):  # as each node will say
            expect_no_messages()  # as each node does
            load().providers()
    gc.collect()
    gc.freeze()
    deadline = time.monotonic() + _THREADS_END_S
    while len(list(Path("/proc/self/task").iterdir())) > 1:  # one that has ended is still seen for a moment
        if time.monotonic() > deadline:
            raise RuntimeError("Something that was imported has begun a thread.")
        time.sleep(0.01)
    command = _Forking(requests).serve()
    if command is not None:
        sys.argv = ["kvstore", *command]
        runpy.run_module("kvstore", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    _run(socket.socket(fileno=int(sys.argv[1])))
