"""vLLM's own HTTP server as a child process: the server in one process, the engine in another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Self

from tests.engines.engine import ARGUMENTS, ENVIRONMENT, ROOT
from tests.engines.lmcache_server import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

START_TIMEOUT_S = 150.0


class HttpEngine:
    def __init__(self, place: Path, name: str, model: Path, transfer: dict[str, Any]) -> None:
        self._log = place / f"{name}.log"
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        words = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        for argument, value in ARGUMENTS.items():
            words += [f"--{argument.replace('_', '-')}"] + ([] if value is True else [str(value)])
        words += ["--kv-transfer-config", json.dumps(transfer)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
                cwd=ROOT,
                start_new_session=True,  # with its engine's process it is one group, and is ended as one
            )
        until = time.monotonic() + START_TIMEOUT_S
        try:
            while not self._answers():
                assert self._process.poll() is None, self.log()[-3000:]
                assert time.monotonic() < until, self.log()[-3000:]
                time.sleep(0.2)
        except BaseException:
            self.close()
            raise

    def log(self) -> str:
        return self._log.read_text()

    def _answers(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], headers: Mapping[str, str]) -> Any:
        (model,) = json.loads(self.get("/v1/models"))["data"]
        body = {"model": model["id"], "prompt": prompt, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            self._url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
