"""Configurations of vLLM: by name, in a MultiConnector, as producer or consumer, without a fabric."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from tests.engines.engine import Engine
from tests.engines.http_engine import HttpEngine
from tests.engines.node import Node, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engines.chats import Chats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TURN = range(3, 4)
BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def ours(
    node: str, *, name: str = "TriggerKvConnector", role: str = "kv_both", **extra: Any
) -> dict[str, Any]:
    """The settings as users write them: by name, without a module's path."""
    return BOTH | {
        "kv_connector": name,
        "kv_role": role,
        "kv_connector_extra_config": {"node": node, **extra},
    }


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return BOTH | {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def puts(node: Node) -> int:
    with Client(node.target) as client:
        return client.statistics().puts


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    place = tmp_path_factory.mktemp("doors")
    with Node(place / "one", capacity="256MiB") as one, Node(place / "two", capacity="256MiB") as two:
        yield [one, two]


def test_our_connector_twice_side_by_side(place: Path, model: Path, nodes: list[Node], chats: Chats) -> None:
    """One loads in the background, the other within steps; both store everything, and either is enough."""
    one, two = nodes
    transfer = several(ours(one.target, load="async"), ours(two.target, load="sync"))
    with Engine(place, "twice", model, kv_transfer_config=transfer) as engine:
        chats.check(engine, TURN)
        until(lambda: puts(one) == puts(two) > 0, "both have stored all")
        engine.forget()
        assert chats.check(engine, TURN) > 0
        one.kill()  # the second of them is asked now
        until_hit(engine, chats)
        one.start()
        assert engine.count("hit_tokens") > 0
        assert "Traceback" not in engine.log()


def test_our_connector_with_another_one(
    place: Path, model: Path, nodes: list[Node], chats: Chats, tmp_path: Path
) -> None:
    example = BOTH | {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    one, _ = nodes
    transfer = several(ours(one.target), example, ours(one.target, name="TriggerKvOffloadingConnector"))
    with Engine(
        place, "beside", model, kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True
    ) as engine:
        chats.check(engine, TURN)
        assert list(tmp_path.iterdir()), "the other has stored, too"
        engine.forget()
        assert chats.check(engine, TURN) > 0
        one.kill()
        engine.forget()
        chats.check(engine, TURN)  # from the other
        one.start()
        assert "Traceback" not in engine.log()


def test_a_producer_loads_nothing_and_a_consumer_saves_nothing(
    place: Path, model: Path, nodes: list[Node], chats: Chats
) -> None:
    _, node = nodes
    producer = ours(node.target, role="kv_producer", weights="of the roles")
    with Engine(place, "producer", model, kv_transfer_config=producer) as engine:
        chats.check(engine, range(1))
        until(lambda: engine.count("stored_blocks") > 0, "it has stored")
        engine.forget()
        assert chats.check(engine, range(1)) == 0
    before = puts(node)
    consumer = ours(node.target, role="kv_consumer", weights="of the roles")
    with Engine(place, "consumer", model, kv_transfer_config=consumer) as engine:
        assert chats.check(engine, TURN) > 0
        chats.check(engine, range(1, 3))
        assert engine.count("hit_tokens") > 0
        counts = engine.counts()
        assert (counts["vllm:triggerkv_saved_pages"], counts["vllm:triggerkv_unsaved_pages"]) == (0, 0)
    assert puts(node) == before


@pytest.fixture(scope="module")
def filled(place: Path, model: Path, nodes: list[Node], chats: Chats) -> Node:
    _, node = nodes
    with Engine(place, "filling", model, kv_transfer_config=ours(node.target)) as engine:
        chats.check(engine, range(1))
    return node


@pytest.mark.parametrize("load", ["async", "sync"])
def test_without_its_required_fabric_an_engine_computes(
    place: Path, model: Path, filled: Node, chats: Chats, load: str
) -> None:
    extra = {"transport": "fabric", "provider": "no such provider", "load": load}
    with Engine(place, f"no fabric {load}", model, kv_transfer_config=ours(filled.target, **extra)) as engine:
        chats.check(engine, range(1))
        assert engine.count("missing_blocks") > 0
        assert engine.log().count("KV is not stored: ") == 1
        assert "Traceback" not in engine.log()


def test_the_header_x_session_id_suffices_for_a_session(place: Path, model: Path, nodes: list[Node]) -> None:
    """With vLLM's own HTTP server, whose engine is another process; in a MultiConnector, which needs our name there."""
    _, node = nodes
    prompt = [number % 900 + 5 for number in range(100)]
    with (
        HttpEngine(place, "http", model, several(ours(node.target))) as engine,
        Client(node.target) as client,
    ):
        engine.complete(prompt, {"X-Session-ID": "chat 9"})
        until(
            lambda: [(one.session, one.tokens) for one in client.sessions("anonymous")] == [("chat 9", 96)],
            "the turn is appended",
        )
        assert "vllm:triggerkv_stored_blocks_total{" in engine.get("/metrics")
        assert "Traceback" not in engine.log()


def until_hit(engine: Engine, chats: Chats) -> None:
    """Generate until tokens come from our node and not from the engine's own cache."""
    end = time.monotonic() + 30
    before = engine.count("hit_tokens")
    while engine.count("hit_tokens") == before:
        assert time.monotonic() < end
        engine.forget()
        chats.check(engine, TURN)
