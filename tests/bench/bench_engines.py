"""Time to first token of a vLLM engine: computed, from its own cache, and from our node, by each way.

A prompt of 4,096 tokens, a Llama of 8 layers x 512 in bf16 with random weights, greedy, one thread. In each round, one
after the other: a new prompt without our connector and another one with it, the second again (the engine's own cache),
and once more with that cache emptied (the node). Ratios are medians of the rounds' own ratios.
Then vLLM's multi-tier offloading: from its pool of host memory, from our node behind it, in the same process, in a new
one, and when the node has it on its drive only.
Then models of other shapes, with prompts that end in the middle of a block: what a hit on the node, the first and the
next one, takes longer than one in the engine's own cache.
It needs `.venv-engines` (`make bench-engines`); elsewhere it measures nothing, and says so.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.engines.engine import PATIENT, Engine, tiered
from tests.engines.model import make_llama
from tests.engines.node import Node

if TYPE_CHECKING:
    from tests.bench.form import Form

_ROUNDS = 7
_TOKENS = 4096
# Layers, tokens of a block, and the rest of the model: 32 layers in blocks of 32 are 4,128 pages of 4 KiB.
_SHAPES = {
    "8 layers, block 128": (128, {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1024}),
    "8 layers, block 32": (32, {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1024}),
    "32 layers, block 32": (
        32,
        {
            "num_hidden_layers": 32,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
    ),
}
_SHAPE_TOKENS = 4136
_SHAPE_ROUNDS = 5
_OURS = {"kv_connector": "TriggerKvConnector", "kv_connector_module_path": None}
_SPEC = {"kv_connector": "TriggerKvOffloadingConnector", "kv_connector_module_path": None}
_SPEC_EXTRA = {
    "spec_name": "TriggerKvOffloadingSpec",
    "spec_module_path": "kvstore.engines.vllm.offloading",
}


class _Rounds:
    """Seconds by name, round by round."""

    def __init__(self) -> None:
        self._of: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self._of.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self._of[name])

    def added(self, name: str, to: str) -> float:
        return statistics.median(a - b for a, b in zip(self._of[name], self._of[to], strict=True))

    def ratio(self, name: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(self._of[name], self._of[to], strict=True))


def run(form: Form) -> None:
    """Measure, and write down."""
    if find_spec("vllm") is None:
        print("There is no vLLM in this environment; make bench-engines has one.")
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = make_llama(place / "model", num_hidden_layers=8, hidden_size=512, intermediate_size=1024)
        with Node(place / "node") as node:
            rounds = _measure(place, model, node)
        with Node(place / "tier node") as node:
            _measure_tier(place, model, node, rounds)
        for name in _SHAPES:
            _measure_shape(place, name, form)
    of_tier = ("tier miss", "tier local", "tier pool", "tier", "tier anew", "tier cold")
    for name in (
        "without",
        "miss",
        "local",
        "fabric",
        "fabric sync",
        "fabric cold",
        "grpc",
        "host copy",
        *of_tier,
    ):
        form.note(f"TTFT {name}", rounds.median(name) * 1e3, "ms")
    for name, to, goal in (
        ("fabric", "local", 2.5),
        ("fabric", "miss", 0.15),
        ("fabric sync", "local", None),
        ("miss", "without", 1.03),
        ("fabric cold", "miss", None),
        ("grpc", "miss", None),
        ("host copy", "miss", None),
        ("tier", "tier pool", None),
        ("tier", "tier miss", None),
    ):
        form.note(f"{name} / {to}", rounds.ratio(name, to), "x", goal=goal, lower_is_better=True)


def _measure_shape(place: Path, name: str, form: Form) -> None:
    block_tokens, config = _SHAPES[name]
    folder = place / name.replace(" ", "-").replace(",", "")
    model = make_llama(folder / "model", **config)
    rounds, dice = _Rounds(), random.Random(4)
    with (
        Node(folder / "node") as node,
        _engine(folder, "shape", model, node, block_size=block_tokens) as engine,
    ):
        for number in range(_SHAPE_ROUNDS + 1):  # the first one warms up
            prompt = [[dice.randrange(3, 999) for _ in range(_SHAPE_TOKENS)]]
            computed, own = engine.say(prompt).seconds, engine.say(prompt).seconds
            seconds = {"computed": computed, "own cache": own}
            for how in ("first re-read", "hot"):
                engine.forget()
                seconds[how] = _hit(engine, prompt)
            for how, one in seconds.items():
                if number:
                    rounds.add(how, one)
    for how in ("computed", "own cache", "first re-read", "hot"):
        form.note(f"TTFT of {name}: {how}", rounds.median(how) * 1e3, "ms")
    for how in ("first re-read", "hot"):
        form.note(f"added to {name}: {how}", rounds.added(how, "own cache") * 1e3, "ms")


def _engine(place: Path, name: str, model: Path, node: Node | None, **how: object) -> Engine:
    arguments = {"dtype": "bfloat16", "max_model_len": 8192, "kv_cache_memory_bytes": 256 << 20}
    target = None if node is None else node.target
    transfer = how.pop("transfer", _OURS)
    assert isinstance(transfer, dict)
    extra = how.pop("extra", None)
    assert extra is None or isinstance(extra, dict)
    how.setdefault("block_size", 128)
    return Engine(place, name, model, target, transfer=transfer, extra=extra, **arguments, **how)


def _measure(place: Path, model: Path, node: Node) -> _Rounds:
    rounds = _Rounds()
    dice = random.Random(3)

    def prompt() -> list[list[int]]:
        return [[dice.randrange(3, 999) for _ in range(_TOKENS)]]

    stored = []
    with _engine(place, "without", model, None) as without, _engine(place, "with", model, node) as ours:
        without.say(prompt())
        probe = prompt()
        ours.say(probe)
        for _ in range(_ROUNDS):
            rounds.add("without", without.say(prompt()).seconds)
            stored.append(prompt())
            rounds.add("miss", ours.say(stored[-1]).seconds)
            rounds.add("local", ours.say(stored[-1]).seconds)
            ours.forget()
            rounds.add("fabric", _hit(ours, stored[-1]))
    for name, how in (
        ("fabric sync", {"extra": {"load": "sync"}}),
        ("grpc", {"extra": {"transport": "grpc"}}),
    ):
        with _engine(place, name, model, node, **how) as engine:
            engine.say(prompt())
            for one in stored:
                _hit(engine, one)
                engine.forget()
                rounds.add(name, _hit(engine, one))
    with _engine(place, "cold", model, node) as engine:
        engine.say(prompt())
        node.restart()  # nothing is in its memory now
        while not engine.say(probe).cached:  # it looks for the node again by and by
            engine.forget()
        for one in stored:
            rounds.add("fabric cold", _hit(engine, one))
    with _engine(place, "host", model, node, transfer=_SPEC, extra=_SPEC_EXTRA) as engine:
        for one in stored:
            engine.say(one)
            engine.say(prompt())  # time for what was copied to reach the node
            engine.forget(connector=True)
            rounds.add("host copy", _hit(engine, one))
    return rounds


def _measure_tier(place: Path, model: Path, node: Node, rounds: _Rounds) -> None:
    """Through vLLM's own pool of host memory, as `tests.engines.cpu_pool` makes one for a CPU."""
    dice = random.Random(5)
    stored: list[list[list[int]]] = []
    transfer = tiered(node.target, pool_bytes=512 << 20, tier="triggerkv", **PATIENT)

    def prompt() -> list[list[int]]:
        return [[dice.randrange(3, 999) for _ in range(_TOKENS)]]

    with _engine(place, "tier", model, None, kv_transfer_config=transfer) as engine:
        engine.say(prompt())
        for _ in range(_ROUNDS):
            stored.append(prompt())
            rounds.add("tier miss", engine.say(stored[-1]).seconds)
            rounds.add("tier local", engine.say(stored[-1]).seconds)
            engine.forget()
            rounds.add("tier pool", _hit(engine, stored[-1]))
            engine.drop_pool()
            rounds.add("tier", _hit(engine, stored[-1]))
    for name in ("tier anew", "tier cold"):
        with _engine(place, name, model, None, kv_transfer_config=transfer) as engine:
            engine.say(prompt())
            for one in stored:
                rounds.add(name, _hit(engine, one))
        node.restart()  # nothing is in its memory now


def _hit(engine: Engine, one: list[list[int]]) -> float:
    said = engine.say(one)
    assert said.cached >= _TOKENS - 2 * 128, f"only {said.cached} tokens were there"
    return said.seconds
