"""The cost of the connector per step of vLLM, while its node is alive, slow, stopped or dead.

The model is a Llama of 32 layers x 64 in bf16 with random weights, with one thread and blocks of 128 tokens: a prompt
of 8,192 tokens is 2,048 pages of 16 KiB. One request decodes all the time. Then the prompt arrives, in chunks of 512
tokens, and gets an answer of 64 tokens. Every step is timed, in alternation for four engines: without our connector,
with it, with vLLM's own pool of host memory, and with our node as a tier behind such a pool; also how much of it is
spent in the connector's calls. A slow node runs for 10 of every 100 ms; a stopped one got SIGSTOP, a dead one SIGKILL.
It needs `.venv-engines` (`make bench-engines`); without it, it measures nothing and reports that.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.engines.engine import Engine, tiered
from tests.engines.model import make_llama
from tests.engines.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.form import Form

_ROUNDS = 3
_TOKENS = 8192
_CHUNK_TOKENS = 512
_ANSWER_TOKENS = 64
_OURS = {"kv_connector": "TriggerKvConnector", "kv_connector_module_path": "kvstore.engines.vllm.connector"}
_COUNTS = ("saved_pages", "unsaved_pages", "skipped_pages")
_TIER_COUNTS = ("stored_chunks", "unsaved_chunks", "skipped_chunks")
_POOL_BYTES = 128 << 20


def run(form: Form) -> None:
    """Measure, and record the results."""
    if find_spec("vllm") is None:
        print("There is no vLLM in this environment; make bench-engines has one.")
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = make_llama(
            place / "model",
            num_hidden_layers=32,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16_384,
        )
        with Node(place / "node") as node:
            _measure(form, place, model, node)


def _measure(form: Form, place: Path, model: Path, node: Node) -> None:
    dice = random.Random(3)
    how = {
        "dtype": "bfloat16",
        "max_model_len": 16_384,
        "max_num_batched_tokens": _CHUNK_TOKENS,
        "kv_cache_memory_bytes": 128 << 20,
        "block_size": 128,
    }

    def prompt() -> list[int]:
        return [dice.randrange(3, 999) for _ in range(_TOKENS)]

    with (
        Engine(place, "without", model, **how) as without,  # type: ignore[arg-type]
        Engine(place, "with", model, node.target, transfer=_OURS, **how) as ours,  # type: ignore[arg-type]
        _tiered(place, "pool", model, **how) as pool,
        _tiered(place, "tier", model, node.target, **how) as tier,
    ):
        engines = {"without": without, "with": ours, "pool": pool, "tier": tier}
        for engine in engines.values():
            engine.steps(prompt(), tokens=2)
        for state in (_alive, _slow, _stopped, _dead):
            before = ours.counts() | tier.counts()
            steps: dict[str, list[tuple[int, float, float]]] = {name: [] for name in engines}
            with state(node):
                for _ in range(_ROUNDS):
                    for name, engine in engines.items():
                        steps[name] += engine.steps(prompt(), tokens=_ANSWER_TOKENS)
            of_state = state.__name__.removeprefix("_")
            for name, of_engine in steps.items():
                _note(form, f"{of_state}: {name}", of_engine)
            after = ours.counts() | tier.counts()
            for count in (*_COUNTS, *(f"tier_{one}" for one in _TIER_COUNTS)):
                one = f"vllm:triggerkv_{count}"
                form.note(f"{of_state}: {count}", after.get(one, 0) - before.get(one, 0), "")


def _tiered(place: Path, name: str, model: Path, *nodes: str, **how: object) -> Engine:
    transfer = tiered(*nodes, pool_bytes=_POOL_BYTES, tier="triggerkv")
    return Engine(place, name, model, kv_transfer_config=transfer, **how)  # type: ignore[arg-type]


def _note(form: Form, name: str, steps: list[tuple[int, float, float]]) -> None:
    for kind, of_kind in (
        ("prefill", [one for one in steps if one[0] > _CHUNK_TOKENS // 2]),
        ("decode", [one for one in steps if 0 < one[0] <= 2]),
    ):
        for what, seconds in (
            ("step", sorted(one for _, one, _ in of_kind)),
            ("in our calls", sorted(one for _, _, one in of_kind)),
        ):
            if not seconds[-1]:
                continue  # there is no connector
            for quantile in (50, 99):
                at = min(len(seconds) - 1, len(seconds) * quantile // 100)
                form.note(f"{name}, {kind}, {what}, p{quantile}", seconds[at] * 1e3, "ms")


@contextmanager
def _alive(_: Node) -> Iterator[None]:
    yield


@contextmanager
def _slow(node: Node) -> Iterator[None]:
    is_over = threading.Event()

    def slow() -> None:
        while not is_over.is_set():
            os.kill(node.pid, signal.SIGSTOP)
            is_over.wait(0.09)
            os.kill(node.pid, signal.SIGCONT)
            is_over.wait(0.01)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _stopped(node: Node) -> Iterator[None]:
    with node.paused():
        yield


@contextmanager
def _dead(node: Node) -> Iterator[None]:
    node.kill()
    try:
        yield
    finally:
        node.start()
