"""vLLM with a drafter, whose layers each step computes several times, and its KV for a device's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.engines.engine import PATIENT, Engine
from tests.engines.model import make_eagle, make_llama, make_mtp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.timeout(300)

PROMPT = [number % 900 + 5 for number in range(200)]
TOKENS = 60
ON_DEVICE = {"kv_connector": "OnDeviceConnector"}


class Drafter(NamedTuple):
    method: str
    layers: int
    make: Callable[[Path], Path] | None  # None: the layers are the model's own


DRAFTERS = (
    Drafter("draft_model", 2, lambda folder: make_llama(folder, num_hidden_layers=2)),
    Drafter("eagle", 1, make_eagle),
    Drafter("mtp", 1, None),
)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=[one.method for one in DRAFTERS])
def test_kv_of_a_drafter_is_stored_by_a_device_and_found_by_another_engine(
    place: Path, node: NodeProcess, drafter: Drafter
) -> None:
    drafts: dict[str, Any] = {"method": drafter.method, "num_speculative_tokens": 3}
    how: dict[str, Any] = {"speculative_config": drafts}
    if drafter.make is None:
        model, how["load_format"] = make_mtp(place / drafter.method), "dummy"
    else:
        model, drafts["model"] = make_llama(place / "drafted for"), str(drafter.make(place / drafter.method))

    def engine(name: str) -> Engine:
        return Engine(place, name, model, node.target, transfer=ON_DEVICE, extra=PATIENT, **how)

    with engine(f"{drafter.method} first") as first:
        said = first.say([PROMPT], tokens=TOKENS)
        assert said.cached == 0
        lines = (first.digests / f"{drafter.method} first.txt").read_text().splitlines()
        steps = [(int(times), int(layers)) for _, times, layers in map(str.split, lines)]
        assert max(steps) == (3, 4 + drafter.layers), "a layer was computed three times in a step"
        stored = (200 + TOKENS) // 32 - 1
        assert first.count("saved_pages") >= stored * (4 + drafter.layers), (
            "of the model's layers and the drafter's"
        )
        assert [first.count(f"{name}_pages") for name in ("unsaved", "skipped")] == [0, 0]
    with engine(f"{drafter.method} then") as then:
        again = then.say([PROMPT], tokens=TOKENS)
        assert again.cached == 192
        assert again.answers == said.answers
