"""vLLM on a GPU with our connector: what another engine loads from the node is what the first one computed.

Answers are compared with those from an engine's own cache, not with computed ones: the same tokens are computed then,
in batches of the same shape, so that every bit of a number is the same.
"""

from __future__ import annotations

import random
import statistics
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.engine import PATIENT, Engine, Said
from tests.engines.model import VOCABULARY, make_llama
from tests.engines.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPTS, TOKENS, ANSWER_TOKENS = 6, 500, 24
OURS = {"kv_connector": "TriggerKvConnector", "kv_connector_module_path": None}


def answers(engine: Engine, prompts: list[list[int]]) -> list[Said]:
    return [engine.say([prompt], tokens=ANSWER_TOKENS) for prompt in prompts]


def said_by_two_engines(folder: Path, **arguments: Any) -> tuple[dict[str, list[Said]], str]:
    """What one engine says, computed and from its own cache, and another one from the node; and the other's log."""
    dice = random.Random(5)
    prompts = [[dice.randrange(3, VOCABULARY) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    model = make_llama(folder / "llama")
    said: dict[str, list[Said]] = {}
    with Node(folder / "node") as node:
        named: dict[str, Any] = {"transfer": OURS, "extra": PATIENT, **arguments}
        with Engine(folder, "first", model, node.target, **named) as first:
            said["computed"] = answers(first, prompts)
            said["own cache"] = answers(first, prompts)
            assert first.count("stored_blocks") > 0
            assert first.count("skipped_pages") == 0
        with Engine(folder, "second", model, node.target, **named) as second:
            said["node"] = answers(second, prompts)
            assert second.count("missing_blocks") == 0
            return said, second.log()


@pytest.mark.timeout(900)
def test_another_engine_says_the_same_from_the_node_as_from_its_own_cache(
    torch: Any, figure: Callable[[str, float], None], tmp_path: Path
) -> None:
    assert torch.cuda.is_available()
    if find_spec("vllm") is None:
        pytest.skip("vLLM was not installed: see what `make test-gpu` said of it")
    said, log = said_by_two_engines(tmp_path, dtype="bfloat16")
    assert "through page-locked memory" in log or "into the device's memory" in log
    for one, other in zip(said["own cache"], said["node"], strict=True):
        assert one.cached == other.cached > 0
        assert one.answers == other.answers
    for name, some in said.items():
        figure(
            f"vLLM, {TOKENS} tokens and {ANSWER_TOKENS} more, {name}, ms",
            1000 * statistics.median(one.seconds for one in some),
        )
