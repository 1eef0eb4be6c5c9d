"""A vLLM engine in its own process, which takes commands line by line, and ends with its parent.

It is forked from a process that has only imported vLLM, because the import takes three times as long as the rest.

It is given a node's address, several with commas, or None for an engine without our connector; on loopback, with one
thread.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.engines import child

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext
    from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent.parent
ANSWER_TIMEOUT_S = 150.0
CONNECTOR = {
    "kv_connector": "RecordingConnector",
    "kv_connector_module_path": "tests.engines.recording",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


# What any engine is started with here.
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "seed": 0,
}
# By default a page that a busy machine does not store within a second is left out.
PATIENT = {"lookup_timeout_ms": 30_000, "load_timeout_ms": 30_000, "save_timeout_ms": 30_000}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": str(ROOT),
}


def tiered(
    *nodes: str, pool_bytes: int = 32 << 20, tier: str = "RecordingTier", **more: Any
) -> dict[str, Any]:
    """Multi-tier offloading of vLLM's, as users have it, but the worker is for a CPU and the tiers keep a record.

    What is `more` is the tiers'. Nodes of a cluster are one text, with commas.
    """
    module = "tests.engines.recording" if tier != "triggerkv" else None
    return {
        "kv_connector": "TriggerKvTieringConnector" if nodes else "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": pool_bytes,
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.cpu_pool",
            "secondary_tiers": [
                {"type": tier, "module_path": module, "nodes": node.split(","), **more} for node in nodes
            ],
        },
    }


@cache
def _forks() -> ForkServerContext:
    """Where engines are forked from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.preloaded"])
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # some of it counts when Python or torch begins
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


@dataclass(frozen=True)
class Said:
    answers: list[list[int]]
    cached: int  # prompt tokens that were not computed, wherever they came from
    seconds: float  # in the engine
    cpu_seconds: float  # of its process, until everything was stored


class Engine:
    def __init__(
        self,
        place: Path,
        name: str,
        model: Path,
        node: str | None = None,
        *,
        transfer: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        given = {**ARGUMENTS, "model": str(model), "disable_log_stats": False, **arguments}
        if node is not None:
            transfer = CONNECTOR | (transfer or {})
            given["kv_transfer_config"] = transfer | {
                "kv_connector_extra_config": {"nodes": node.split(","), **(extra or {})}
            }
        self.digests = place / "digests"
        self.digests.mkdir(exist_ok=True)
        self._log = place / f"{name}.log"
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TEST_DIGESTS": str(self.digests / f"{name}.txt"),
        }
        self._end, its_end = socket.socketpair()
        with its_end:
            self._process = _forks().Process(
                target=child.forked, args=(json.dumps(given), its_end, str(self._log), environment)
            )
            self._process.start()
        self._answers = self._end.makefile("r")
        self._is_ready = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def log(self) -> str:
        return self._log.read_text()

    def say(self, prompts: list[list[int]], *, tokens: int = 1, **how: Any) -> Said:
        """Continue these prompts, all in one batch."""
        return Said(**self._ask({"do": "say", "prompts": prompts, "tokens": tokens, **how}))

    def steps(self, prompt: list[int], *, tokens: int) -> list[tuple[int, float, float]]:
        """Add this request to a decoding one: for each step its tokens, its seconds, and those in our calls."""
        answer = self._ask({"do": "steps", "prompt": prompt, "tokens": tokens})
        return [(count, seconds, ours) for count, seconds, ours in answer["steps"]]

    def forget(self, *, connector: bool = False) -> None:
        """Empty its own prefix cache, and the connector's state."""
        assert self._ask({"do": "forget", "all": connector})["forgotten"]

    def drop_pool(self) -> None:
        """Empty its own prefix cache and vLLM's pool of host memory, but not the tiers behind it."""
        assert self._ask({"do": "drop"})

    def counts(self) -> dict[str, float]:
        return dict(self._ask({"do": "counts"}))

    def count(self, name: str) -> float:
        return self.counts()[f"vllm:triggerkv_{name}"]

    def _ask(self, what: dict[str, Any]) -> Any:
        if not self._is_ready:
            self._answer()  # that it is there
            self._is_ready = True
        self._end.sendall(json.dumps(what).encode() + b"\n")
        return self._answer()

    def _answer(self) -> Any:
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            line = self._answers.readline() if selector.select(ANSWER_TIMEOUT_S) else ""
        if not line:
            self.close()
            raise AssertionError(f"The engine gave no answer; it last said:\n{self.log()[-3000:]}")
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        with suppress(OSError):  # it has ended, or was closed
            self._end.shutdown(socket.SHUT_WR)
        self._process.join(15)
        if self._process.is_alive():
            self.kill()
        self._answers.close()
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
