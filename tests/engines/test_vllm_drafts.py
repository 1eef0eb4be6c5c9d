"""vLLM with a draft model, whose layers each step computes several times, and its KV for a device's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.engine import PATIENT, Engine
from tests.engines.model import make_llama

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.timeout(300)

PROMPT = [number % 900 + 5 for number in range(200)]
TOKENS = 60
ON_DEVICE = {"kv_connector": "OnDeviceConnector"}


def test_kv_of_a_draft_model_is_stored_by_a_device_and_found_by_another_engine(
    place: Path, node: NodeProcess
) -> None:
    model = make_llama(place / "drafted for")
    drafts: dict[str, Any] = {
        "method": "draft_model",
        "model": str(make_llama(place / "drafting", num_hidden_layers=2)),
        "num_speculative_tokens": 3,
    }

    def engine(name: str) -> Engine:
        how: dict[str, Any] = {"speculative_config": drafts}
        return Engine(place, name, model, node.target, transfer=ON_DEVICE, extra=PATIENT, **how)

    with engine("drafts first") as first:
        said = first.say([PROMPT], tokens=TOKENS)
        assert said.cached == 0
        steps = [line.split() for line in (first.digests / "drafts first.txt").read_text().splitlines()]
        assert max(int(times) for _, times, _ in steps) == 3, "a layer was computed three times in a step"
        assert first.count("saved_pages") >= (200 + TOKENS) // 32 * 6 - 6, (
            "of four layers and the draft model's two"
        )
        assert [first.count(f"{name}_pages") for name in ("unsaved", "skipped")] == [0, 0]
    with engine("drafts then") as then:
        again = then.say([PROMPT], tokens=TOKENS)
        assert again.cached == 192
        assert again.answers == said.answers
