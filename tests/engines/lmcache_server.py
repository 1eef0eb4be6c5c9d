"""LMCache's own server as a child process, with a node or files behind it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent.parent
START_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


class LmcacheServer:
    """A server that keeps its address when it is restarted. Its own memory (L1) is lost then."""

    def __init__(self, place: Path, behind: dict[str, Any], **options: Any) -> None:
        """`behind` is its L2, as in LMCache's own configuration; `options` are options of the command."""
        self._behind, self._options = behind, options
        self._log = place / "lmcache server.log"
        self._port, self._http_port = free_port(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def transfer(self) -> dict[str, Any]:
        """The `kv_transfer_config` of an engine that uses this server."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
                "lmcache.mp.heartbeat_interval": 0.5,
            },
        }

    def log(self) -> str:
        return self._log.read_text()

    def start(self) -> None:
        self._http_port = free_port()  # somebody else may have the last one's by now
        options = {
            "host": "127.0.0.1",
            "port": self._port,
            "http-host": "127.0.0.1",
            "http-port": self._http_port,
            "chunk-size": 64,
            "l1-size-gb": 0.25,
            "eviction-policy": "LRU",
            "supported-transfer-mode": "auto",  # it moves KV by CUDA's handles otherwise
            "max-workers": 2,
            "l2-adapter": json.dumps(self._behind),
            **{name.replace("_", "-"): value for name, value in self._options.items()},
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).parent / "lmcache"), "server", "--disable-observability", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": str(ROOT)},
            )
        until = time.monotonic() + START_TIMEOUT_S
        try:
            while not self._answers():
                assert self._process.poll() is None, self.log()[-3000:]
                assert time.monotonic() < until, self.log()[-3000:]
                time.sleep(0.1)
        except BaseException:
            self.kill()
            raise

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._http_port}/healthcheck", timeout=5
            ) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
