"""Small models of several architectures answer the same with our connector as without.

The Llama of the other tests has grouped queries (GQA), the Gemma layers with a window and layers without. Hybrids of
attention and recurrent state have no name here (`test_vllm_names`).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.engine import Engine
from tests.engines.model import make_deepseek, make_mistral

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engines.node import Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OURS = {"kv_connector": "TriggerKvConnector", "kv_connector_module_path": "kvstore.engines.vllm.connector"}
ANSWER_TOKENS = 8
_DICE = random.Random(4)
PROMPTS = [[_DICE.randrange(3, 999) for _ in range(length)] for length in (130, 300, 420)]


@pytest.mark.parametrize(
    ("name", "make", "arguments", "is_stored"),
    [
        # vLLM has this kernel for every CPU, and turns its own prefix cache off for it.
        ("latent", make_deepseek, {"attention_config": {"backend": "CPU_MLA"}}, False),
        ("window", make_mistral, {}, True),
    ],
)
def test_an_architecture_gives_the_same_output(
    place: Path,
    node: Node,
    name: str,
    make: Callable[[Path], Path],
    arguments: dict[str, Any],
    *,
    is_stored: bool,
) -> None:
    model = make(place / name)
    with Engine(place, f"plain {name}", model, **arguments) as plain:
        said = plain.say(PROMPTS, tokens=ANSWER_TOKENS).answers
    sync = {"load": "sync"}
    with Engine(place, name, model, node.target, transfer=OURS, extra=sync, **arguments) as engine:
        for _ in range(2):
            assert engine.say(PROMPTS, tokens=ANSWER_TOKENS).answers == said
            engine.forget()
        counts = engine.counts()
        log = engine.log()
    assert (counts.get("vllm:triggerkv_hit_tokens", 0) > 0) == is_stored
    assert log.count("KV is not stored") == (0 if is_stored else 1)
    assert "Traceback" not in log
