"""Debian's Redis, over TCP on loopback, and its client in C.

It is the installed one, or that in `.cache/peers` (`tools/peers.sh`). The server has default settings except for
durability: `set and get` uses a server without persistence (`save ""`), which is the fastest.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.peers.client_process import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FORMS", "NoRedis", "Redis", "is_here"]

# What each form of durability is configured with. `default` is Debian's redis.conf in this respect.
FORMS: Mapping[str, tuple[str, ...]] = {
    "nothing kept": ("--save", "", "--appendonly", "no"),
    "default": ("--save", "3600 1 300 100 60 10000", "--appendonly", "no"),
    "everysec": ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
    "always": ("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
}
_WAIT_S = 60.0
_FETCHED = Path(".cache/peers/usr")


class NoRedis(Exception):
    """Redis is not available."""


def _program() -> Path | None:
    fetched = _FETCHED.resolve() / "bin/redis-server"
    if fetched.exists():
        return fetched
    installed = shutil.which("redis-server")
    return None if installed is None else Path(installed)


def is_here() -> bool:
    """Whether the server is available, and what its client is built with."""
    headers = (_FETCHED / "include/hiredis/hiredis.h", Path("/usr/include/hiredis/hiredis.h"))
    return _program() is not None and any(header.exists() for header in headers)


def _environment() -> dict[str, str]:
    libraries = [str(path) for path in sorted(_FETCHED.resolve().glob("lib/*-linux-gnu*"))]
    return {"LD_LIBRARY_PATH": ":".join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def _client() -> Path:
    """The client, built once for this machine."""
    source, program = Path(__file__).with_name("redis_client.c"), Path("build/redis_client")
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(exist_ok=True)
        places = [f"-I{_FETCHED}/include", *(f"-L{path}" for path in _FETCHED.glob("lib/*-linux-gnu*"))]
        subprocess.run(["cc", "-O2", "-Wall", *places, "-o", program, source, "-lhiredis"], check=True)
    return program.resolve()


class Redis:
    """A server with its own folder."""

    def __init__(self, folder: Path, form: str) -> None:
        if not is_here():
            raise NoRedis(
                "There is no Redis with hiredis here: tools/peers.sh fetches both,"
                " or apt-get install redis-server libhiredis-dev."
            )
        folder.mkdir()
        self._folder, self._form = folder, form
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            self._port = trial.getsockname()[1]
        self._salts = 0
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def keeps(self) -> bool:
        """Whether acknowledged writes survive the server."""
        return "yes" in FORMS[self._form]

    def start(self) -> None:
        """Start it, and wait until it has loaded its file and accepts calls."""
        program = _program()
        assert program is not None
        self._process = subprocess.Popen(
            [
                program,
                *("--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
                *("--auto-aof-rewrite-percentage", "0", "--logfile", "redis.log", *FORMS[self._form]),
            ],
            env=os.environ | _environment(),
        )
        until = time.monotonic() + _WAIT_S
        while self._ping() != b"+PONG":
            if self._process.poll() is not None or time.monotonic() > until:
                raise NoRedis(f"Redis did not start: {(self._folder / 'redis.log').read_text()[-300:]}")
            time.sleep(0.02)

    def _ping(self) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", self._port), _WAIT_S) as one:
                one.sendall(b"PING\r\n")
                return one.recv(64).strip()
        except OSError:
            return b""

    def client(self) -> Worker:
        """Start a client with its own keys."""
        self._salts += 1
        return Worker([_client(), str(self._port), str(self._salts)], _environment())

    def flush(self) -> None:
        """Write its data to the drive now, and not while another contender is measured."""
        for path in self._folder.glob("appendonlydir/*.aof"):
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.close(fd)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        try:
            self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Stop it; its data is no longer needed."""
        if self._process.poll() is None:
            self._end(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
