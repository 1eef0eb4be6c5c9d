"""The match-action table with a vLLM engine: a request's rule decides what happens to its KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from kvstore.errors import NoSession
from kvstore.steps import Step
from tests.engines.engine import PATIENT, Engine
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client import Session
    from tests.engines.node import Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RULES = """
[[rule]]
name = "ada, from her network"
tenant = "default"
user = "ada"
bind = [{ source = "10.1.0.0/16", destination_port = "0x1bb&0xfff" }]
actions = ["prefetch"]

[[rule]]
name = "everybody"
priority = 0
actions = ["count"]
"""
PROMPT = [11 * number % 900 + 5 for number in range(400)]
FIVE: dict[str, Any] = {
    "source": "10.1.2.3",
    "destination": "10.9.9.9",
    "source_port": 40_000,
    "destination_port": 443,
    "protocol": "tcp",
}


@pytest.fixture(scope="module")
def engine(place: Path, model: Path, node: Node) -> Iterator[Engine]:
    rules = place / "rules.toml"
    rules.write_text(RULES)
    extra = {**PATIENT, "rules": str(rules), "five_tuple": "request"}
    with Engine(place, "rules", model, node.target, extra=extra) as engine:
        yield engine


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client(node.target) as client:
        yield client


def _blocks(chat: Session) -> int:
    try:
        return chat.info().blocks
    except NoSession:
        return 0


def test_a_turn_whose_rule_prefetches_is_prefetched_and_loaded_and_counted_by_the_rule(
    engine: Engine, client: Client
) -> None:
    chat, prompt = client.session("ada", "read ahead"), [9, *PROMPT]
    before = engine.counts()
    first = engine.say([prompt], tokens=8, session=chat.name, five_tuple=FIVE)
    assert first.cached == 0
    wait_until(lambda: _blocks(chat) > 0, "the turn is in its session")
    engine.forget()
    longer = [*prompt, *first.answers[0], *PROMPT[:40]]
    second = engine.say([longer], tokens=8, session=chat.name, five_tuple=FIVE)
    assert second.cached >= 384
    seen = chat.trace().seen
    arrived = [one for one in seen if one.step is Step.ARRIVED]
    assert [one.detail for one in arrived] == ["rule ada, from her network: prefetch"] * 2
    prefetched = [one for one in seen if one.step is Step.PREFETCHED]
    assert prefetched, "the requester had her KV read into the node's memory"
    assert prefetched[-1].blocks >= 12
    counts = engine.counts()
    hits = "vllm:triggerkv_rule_hits ada, from her network"
    assert counts[hits] - before.get(hits, 0) == 2
    assert counts["vllm:triggerkv_rule_bytes ada, from her network"] > 0


@pytest.mark.parametrize(
    ("number", "five"),
    [
        (1, {**FIVE, "source": "192.0.2.7"}),
        (2, {**FIVE, "destination_port": 444}),
        (3, {"source": "10.1.2.3"}),
        (4, {**FIVE, "source": "nonsense"}),
        (5, None),
    ],
    ids=["another address", "another port", "not whole", "nonsense", "unknown"],
)
def test_a_request_from_elsewhere_gets_nothing_and_leaves_nothing(
    engine: Engine, client: Client, number: int, five: dict[str, Any] | None
) -> None:
    chat = client.session("ada", f"spoofed {number}")
    said = engine.say([PROMPT], tokens=8, session=chat.name, five_tuple=FIVE)
    wait_until(lambda: _blocks(chat) > 0, "the turn is in its session")
    engine.forget()
    before, keys = engine.counts(), chat.keys()
    other = [number, *PROMPT]
    spoofed = engine.say([PROMPT, other], tokens=8, session=chat.name, five_tuple=five)
    assert spoofed.answers[0] == said.answers[0], "it is computed"
    assert spoofed.cached == 0
    after = engine.counts()
    for name in ("hit_tokens", "stored_blocks", "saved_pages"):
        assert after[f"vllm:triggerkv_{name}"] == before[f"vllm:triggerkv_{name}"], name
    guard = "vllm:triggerkv_rule_hits guard of default/ada"
    assert after[guard] - before.get(guard, 0) == 2
    assert chat.keys() == keys
    engine.forget()
    assert engine.say([other], tokens=8).cached == 0, "nothing of it was stored"


def test_requests_of_others_are_loaded_and_saved_as_without_rules(engine: Engine) -> None:
    mine = [7, *PROMPT]
    said = engine.say([mine], tokens=8)
    engine.forget()
    again = engine.say([mine], tokens=8)
    assert again.answers == said.answers
    assert again.cached >= 384
    assert engine.counts()["vllm:triggerkv_rule_hits everybody"] >= 2


def test_an_invalid_file_of_rules_ends_the_start_with_its_line(place: Path, model: Path, node: Node) -> None:
    rules = place / "wrong.toml"
    rules.write_text('[[rule]]\nsource = "10.0.0.7&10.0.0.0"\nactions = ["fetch"]\n')
    with (
        pytest.raises(AssertionError, match=r"wrong.toml: Rule 1 \(line 1\): source takes a VALUE"),
        Engine(place, "wrong", model, node.target, extra={"rules": str(rules)}) as engine,
    ):
        engine.counts()
