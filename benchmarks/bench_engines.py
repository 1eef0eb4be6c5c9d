"""Time to first token of vLLM engines: the prompt is computed, or its KV found in each of the ways that vLLM offers.

These are the engine's own prefix cache, vLLM's pool of host memory, that pool with vLLM's file tier or with our node
behind it, our connector, and LMCache's server, with memory shared with the engine and files behind it. One engine
runs for each, all at the same time, with one thread, greedy decoding, and random weights in bf16. In each round each
engine gets a new prompt that ends in the middle of a block. It computes and stores the prompt, and finds it in its
own cache, then with that cache emptied and, where there is a pool, with the pool emptied as well: several times each,
of which the middle one counts, as the differences are small; only the first re-read is the first. Each of these hits
is taken in turns with one of the plain engine in its own cache. Two plain engines compute each prompt, and the slower
one counts: two processes that do the same differ by up to 5 %. At the end the node and the server are restarted, which
empties their memory, and every prompt is looked up once more: our node has read its newest blocks back, and the others'
files are in the page cache. Then they are restarted again, with newer blocks in the node and nothing in the page cache,
so every prompt comes from the drive. Each answer is compared with that of the plain engine.

How fast a tier behind the pool can be is measured as well. vLLM's own example of a tier only lists what it was given,
and moves no bytes: with it the pool takes as long as vLLM needs for any tier. One copy of the bytes comes on top, and
from the drive the time in which the drive alone reads as many. A first or hot re-read is one copy as well, and vLLM's
pool alone shows how long the engine takes for one: where that is more than the goal, on a slow machine, it is the
limit.

The results are medians of the rounds, and how much longer each way takes than the plain engine's hits beside it.
vLLM's worker for GPUs is replaced by copies on the CPU (`tests.engines.cpu_pool`). It needs `.venv-engines` (`make
bench-engines`); without it, it measures nothing and reports that.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.bench.bare import BareDrive
from kvstore.client import Block, Client
from kvstore.names import block_key
from kvstore.storage.disk import DiskOpKind
from nic_offload.memory import allocate
from tests.engines.engine import PATIENT, Engine, Said, tiered
from tests.engines.lmcache_server import LmcacheServer
from tests.engines.model import make_llama
from tests.engines.node import Node, until

if TYPE_CHECKING:
    from benchmarks.form import Form

_ROUNDS = 9
_TIMES = {"own": 7, "hot": 3, "pool emptied": 3}  # of which the middle one counts
_TOKENS = 4136
_POOL_BYTES = 256 << 20
_MANY_LAYERS = {
    "num_hidden_layers": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_FEW_LAYERS = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1024}
# Tokens of a block, the model, and the bytes of a prompt's KV: 256 and 1,032 pages, and 4,128.
_SHAPES: dict[str, tuple[int, dict[str, int], int]] = {
    "8 layers, block 128": (128, _FEW_LAYERS, 32 << 20),
    "8 layers, block 32": (32, _FEW_LAYERS, 32 << 20),
    "32 layers, block 32": (32, _MANY_LAYERS, 16 << 20),
}
_OWN, _TWIN, _POOL, _LIST, _FILES, _TIER, _CONNECTOR, _LMCACHE = (
    "own cache",
    "own cache, its twin",
    "pool",
    "pool and a list",
    "pool and files",
    "pool and node",
    "connector",
    "LMCache",
)
_TIERED = (_LIST, _FILES, _TIER)
_FROM_DRIVE = "from the drive"
_RESTARTED = ("after a restart", _FROM_DRIVE)
_OURS = {"kv_connector": "TriggerKvConnector", "kv_connector_module_path": None}
_LMCACHE_CHUNK_TOKENS = 128
# Milliseconds longer than the plain engine's own cache.
_GOALS = {
    (_TIER, "own"): 1,
    (_CONNECTOR, "own"): 1,
    (_TIER, "first re-read"): 8,
    (_TIER, "hot"): 8,
    (_CONNECTOR, "first re-read"): 8,
    (_CONNECTOR, "hot"): 8,
}
_STORED_GOALS = {"TTFT": 1.02, "CPU": 1.05}
_LIMIT_GOAL = 1 / 0.85
_LMCACHE_GOAL = 0.6
_RECORD_BYTES = 1 << 20  # of a read of the drive alone, and of a newer block
_NEWER_BYTES = 640 << 20  # more than the half of the hot memory that a started node fills
_PUT_S = 60.0


def run(form: Form) -> None:
    """Measure, and record the results."""
    if find_spec("vllm") is None:
        print("There is no vLLM in this environment; make bench-engines has one.")
        return
    for name, (block_tokens, config, kv_bytes) in _SHAPES.items():
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            place = Path(folder)
            node = stack.enter_context(Node(place / "node", capacity="2GiB", arguments=("--hot", "1GiB")))
            shape = _Shape(stack, place, node, block_tokens, make_llama(place / "model", **config), kv_bytes)
            shape.measure()
            shape.note(form, name)


class _Shape:
    """The engines of one shape, and their times by way and state, round by round."""

    def __init__(
        self, stack: ExitStack, place: Path, node: Node, block_tokens: int, model: Path, kv_bytes: int
    ) -> None:
        self._node, self._place, self._block_tokens = node, place, block_tokens
        self._kv, self._copy = np.ones((2, kv_bytes), np.uint8)
        self._copied_ms: list[float] = []
        self._read_ms: list[float] = []
        self._drive = stack.enter_context(BareDrive(place, kv_bytes))
        self._dice = random.Random(block_tokens)
        files = tiered(pool_bytes=_POOL_BYTES)
        extra = files["kv_connector_extra_config"]
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(place / "files")}]
        kept = {"type": "fs_native", "base_path": str(place / "of LMCache")}
        self._server = stack.enter_context(
            LmcacheServer(
                place, kept, l1_size_gb=1, chunk_size=_LMCACHE_CHUNK_TOKENS, shm_name=f"bench-{place.name}"
            )
        )
        pool, listed = tiered(pool_bytes=_POOL_BYTES), tiered(pool_bytes=_POOL_BYTES)
        listed["kv_connector_extra_config"]["secondary_tiers"] = [{"type": "example"}]
        behind = tiered(node.target, pool_bytes=_POOL_BYTES, tier="triggerkv", **PATIENT)
        given: dict[str, dict[str, Any]] = {
            _OWN: {},
            _TWIN: {},
            _POOL: {"kv_transfer_config": pool},
            _LIST: {"kv_transfer_config": listed},
            _FILES: {"kv_transfer_config": files},
            _TIER: {"kv_transfer_config": behind},
            _CONNECTOR: {"node": node.target, "transfer": _OURS, "extra": PATIENT},
            _LMCACHE: {"kv_transfer_config": self._server.transfer},
        }
        arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": 8192,
            "kv_cache_memory_bytes": 256 << 20,
        }
        self._engines = {
            way: stack.enter_context(Engine(place, way, model, **how, **arguments, block_size=block_tokens))
            for way, how in given.items()
        }
        self._said: dict[tuple[str, str], list[Said]] = defaultdict(list)
        self._beside: dict[tuple[str, str], list[Said]] = defaultdict(list)  # the plain engine's hits

    def measure(self) -> None:
        """Run all rounds, after one to warm up, and the restart."""
        prompts = [[[self._dice.randrange(3, 999) for _ in range(_TOKENS)]] for _ in range(1 + _ROUNDS)]
        answers = [self._round(number, prompt) for number, prompt in enumerate(prompts)]
        for state in _RESTARTED:
            if state == _FROM_DRIVE:
                self._put_newer()
            self._restart(prompts[0])
            if state == _FROM_DRIVE:
                self._drop_page_cache()
            for number, prompt in enumerate(prompts):
                for way in self._in_turns(number):
                    if way not in (_OWN, _TWIN, _POOL, _LIST):
                        self._say(number, way, state, prompt, answers[number])
                if not number or state != _FROM_DRIVE:
                    continue
                gbps = self._drive.gbps(DiskOpKind.READ, _RECORD_BYTES)
                self._read_ms.append(1e3 * self._kv.nbytes / (gbps * 1e9))

    def _in_turns(self, number: int) -> list[str]:
        """The ways, beginning with another one in each round, after the plain engine, which is always first."""
        ways = [way for way in self._engines if way != _OWN]
        first = number % len(ways)
        return [_OWN, *ways[first:], *ways[:first]]

    def _round(self, number: int, prompt: list[list[int]]) -> list[list[int]]:
        """Run one prompt in every way; return the plain engine's answer."""
        answer: list[list[int]] | None = None
        for way in self._in_turns(number):
            computed = self._engines[way].say(prompt)
            answer = answer or computed.answers
            assert (computed.answers, computed.cached) == (answer, 0), f"{way}: {computed}, not {answer}"
            if number:
                self._said[way, "computed"].append(computed)
            states = [] if way in (_OWN, _TWIN) else ["own", "first re-read", "hot"]
            for state in [*states, *(["pool emptied"] if way in _TIERED else [])]:
                self._say(number, way, state, prompt, answer)
        began = time.perf_counter()
        np.copyto(self._copy, self._kv)
        if number:
            self._copied_ms.append(1e3 * (time.perf_counter() - began))
        assert answer is not None
        return answer

    def _say(
        self, number: int, way: str, state: str, prompt: list[list[int]], answer: list[list[int]]
    ) -> None:
        said: dict[str, list[Said]] = {_OWN: [], way: []}
        for _ in range(times := _TIMES.get(state, 1)):
            said[_OWN].append(self._found(_OWN, "own", prompt, answer))
            said[way].append(self._found(way, state, prompt, answer))
        if number:
            self._said[way, state].append(sorted(said[way], key=_seconds)[times // 2])
            self._beside[way, state].append(sorted(said[_OWN], key=_seconds)[times // 2])

    def _found(self, way: str, state: str, prompt: list[list[int]], answer: list[list[int]]) -> Said:
        engine = self._engines[way]
        if state in ("pool emptied", *_RESTARTED) and way in _TIERED:
            engine.drop_pool()
        elif state != "own":
            engine.forget()
        said = engine.say(prompt)
        is_empty = (way, state) == (_LIST, "pool emptied")
        assert is_empty or said.answers == answer, f"{way}, {state}: {said.answers}, not {answer}"
        assert said.cached >= _TOKENS - 2 * _LMCACHE_CHUNK_TOKENS, f"{way}, {state}: {said.cached} tokens"
        return said

    def _restart(self, probe: list[list[int]]) -> None:
        """Restart nodes and server, so that their memory is empty, and wait until the engines have reconnected."""
        self._node.restart()
        self._server.kill()
        self._server.start()
        for way in (_TIER, _CONNECTOR, _LMCACHE):
            engine = self._engines[way]

            def is_found(way: str = way, engine: Engine = engine) -> bool:
                (engine.drop_pool if way == _TIER else engine.forget)()
                return engine.say(probe).cached > 0

            until(is_found, f"{way} works again")

    def _put_newer(self) -> None:
        """Put as many blocks as a node reads back into its hot memory."""
        memory = allocate(_NEWER_BYTES)
        with Client(self._node.target) as client:
            region = client.register(memory)
            newer = [
                Block(block_key(b"newer", i.to_bytes(8)), region, at, _RECORD_BYTES)
                for i, at in enumerate(range(0, _NEWER_BYTES, _RECORD_BYTES))
            ]
            assert not any(one.error for one in client.put(newer, timeout_s=_PUT_S))

    def _drop_page_cache(self) -> None:
        os.sync()
        for path in self._place.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def note(self, form: Form, name: str) -> None:
        """Record the medians beside those of the plain engine, and how much each way adds to a hit in its own cache."""
        for (way, state), said in self._said.items():
            is_ours = state == "computed" and way in (_TIER, _CONNECTOR)
            for what in ("TTFT", "CPU"):
                bare = self._bare_ms(way, state, what)
                form.pairs(
                    f"{name}: {way}, {state}, {what}",
                    "ms",
                    [_ms(one, what) for one in said],
                    bare,
                    goal=_STORED_GOALS[what] if is_ours else None,
                    lower_is_better=True,
                )
                if state != "computed":
                    form.note(
                        f"{name}: {way}, {state}, added {what}",
                        statistics.median(self._added(way, state, what)),
                        "ms",
                        goal=self._goal_ms(way, state) if what == "TTFT" else None,
                        lower_is_better=True,
                    )
        for way in (_TIER, _CONNECTOR):
            for state in ("hot", *_RESTARTED):
                self._against(form, name, way, state, _LMCACHE, _LMCACHE_GOAL)
            for state in _RESTARTED:
                self._against(form, name, way, state, _FILES, 1)
        tier, listed = self._added(_TIER, "own"), self._added(_LIST, "own")
        form.note(
            f"{name}: {_TIER}, own, added TTFT, beyond vLLM's own share",
            statistics.median(one - other for one, other in zip(tier, listed, strict=True)),
            "ms",
            goal=_GOALS[_TIER, "own"],
            lower_is_better=True,
        )
        copied, read = self._copied_ms, self._read_ms
        share = [own + ms for own, ms in zip(self._added(_LIST, "pool emptied"), copied, strict=True)]
        self._limited(form, name, "pool emptied", "vLLM's own share and one copy", share)
        share = [own + ms for own, ms in zip(share, read, strict=True)]
        self._limited(form, name, _FROM_DRIVE, "vLLM's own share, one copy, and the drive alone", share)

    def _goal_ms(self, way: str, state: str) -> float | None:
        """How much longer than the plain engine's own cache: our goal, or what vLLM's pool takes on a slow machine."""
        goal = _GOALS.get((way, state))
        if goal is None or state == "own":
            return goal
        return max(goal, _LIMIT_GOAL * statistics.median(self._added(_POOL, state)))

    def _bare_ms(self, way: str, state: str, what: str) -> list[float]:
        """A plain engine's times beside these, by round: the hits of one, or what the slower one computed."""
        if state != "computed":
            return [_ms(one, what) for one in self._beside[way, state]]
        both = [[_ms(one, what) for one in self._said[engine, state]] for engine in (_OWN, _TWIN)]
        return max(both, key=statistics.median)

    def _added(self, way: str, state: str, what: str = "TTFT") -> list[float]:
        """Milliseconds longer than a hit in the plain engine's own cache, by round."""
        bare = self._bare_ms(way, state, what)
        return [_ms(one, what) - own for one, own in zip(self._said[way, state], bare, strict=True)]

    def _against(self, form: Form, name: str, way: str, state: str, other: str, goal: float) -> None:
        metric = f"{name}: {way}, {state}, added TTFT, against {other}"
        _medians(form, metric, self._added(way, state), self._added(other, state), goal)

    def _limited(self, form: Form, name: str, state: str, what: str, limit: list[float]) -> None:
        metric = f"{name}: {_TIER}, {state}, added TTFT, against {what}"
        _medians(form, metric, self._added(_TIER, state), limit, _LIMIT_GOAL)


def _seconds(said: Said) -> float:
    return said.seconds


def _medians(form: Form, metric: str, values: list[float], limits: list[float], goal: float) -> None:
    """Record the ratio of medians: each value is a small difference of two times, and its own ratio mostly noise."""
    value, limit = statistics.median(values), statistics.median(limits)
    form.pairs(metric, "ms", [value], [limit], goal=goal, lower_is_better=True)


def _ms(said: Said, what: str) -> float:
    return 1e3 * (said.seconds if what == "TTFT" else said.cpu_seconds)
