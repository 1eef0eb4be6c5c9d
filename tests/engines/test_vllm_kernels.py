"""Engines find each other's blocks only if they run the same attention kernels, which only workers know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import tests.engines.pretend  # noqa: F401  # isort: skip - it is how vLLM is imported here

from kvstore.engines.vllm import handshake
from kvstore.engines.vllm.handshake import Kernels, unshared
from kvstore.engines.vllm.kernels import combined
from kvstore.engines.vllm.model_hints import Engine
from kvstore.engines.vllm.offloading_connector import TriggerKvOffloadingConnector
from kvstore.engines.vllm.tiering_connector import TriggerKvTieringConnector
from tests.engines.pretend import BLOCK, LAYERS, FakeNode, OtherConnector, Pretend, model_folder

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

PROMPT = [7 * number % 900 + 5 for number in range(6 * BLOCK + 3)]
ALL = 6 * LAYERS * BLOCK * 8  # bytes


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return model_folder(place / "kernels")


def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path, node: FakeNode, **engine: Any) -> int:
    """How much of the prompt a new engine loads; it stores the rest."""
    one = Pretend(monkeypatch, folder, node, **engine)
    one.add("a", PROMPT, 2)
    one.run()
    one.check_answers()
    return one.count("loaded_bytes")


def test_engines_with_other_kernels_find_none_of_each_others_blocks(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = FakeNode()
    assert loaded(monkeypatch, folder, node, backend="FLASH_ATTN") == 0
    stored = len(node.objects)
    assert stored == 6
    assert loaded(monkeypatch, folder, node, backend="TRITON_ATTN") == 0
    assert len(node.objects) == 2 * stored
    assert loaded(monkeypatch, folder, node, backend="FLASH_ATTN") == ALL
    assert len(node.objects) == 2 * stored


def test_a_multi_connector_passes_the_kernels_on(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    node = FakeNode()
    loaded(monkeypatch, folder, node)
    stored = set(node.objects)
    # The other connector promises the first blocks and doesn't deliver them; ours saves what is computed.
    loaded(monkeypatch, folder, node, beside=True)
    assert set(node.objects) == stored


def test_while_the_kernels_are_unknown_no_other_engine_finds_the_blocks(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = FakeNode()
    monkeypatch.setattr(handshake, "kernels_of", lambda *_: None)
    one = Pretend(monkeypatch, folder, node)
    assert "other engines don't find what is stored" in caplog.text
    for name in ("a", "b"):
        one.add(name, PROMPT, 2)
        one.run()
        one.forget()
    assert one.count("loaded_bytes") == ALL, "it finds its own"
    assert loaded(monkeypatch, folder, node) == 0


class Strict(OtherConnector):
    """A connector that refuses another's answer, as NIXL's does."""

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        raise ValueError(metadata)


def test_nothing_is_answered_beside_a_connector_that_would_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = TriggerKvOffloadingConnector.__new__(TriggerKvOffloadingConnector)
    others: list[Any] = [OtherConnector.__new__(OtherConnector)]
    group = SimpleNamespace(_connectors=[*others, ours])
    monkeypatch.setattr(handshake, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(handshake, "get_kv_transfer_group", lambda: group)
    assert handshake._may_answer(ours, 1)
    assert not handshake._may_answer(ours, 2), "the other refuses ranks of a second stage"
    group._connectors.append(Strict.__new__(Strict))
    assert not handshake._may_answer(ours, 1)
    group._connectors = [ours]
    assert handshake._may_answer(ours, 2)


def test_chunks_are_named_by_the_kernels_of_all_ranks() -> None:
    ranks = {(0, 0): Kernels(b"a" * 16), (1, 0): Kernels(b"b" * 16)}
    tier = TriggerKvTieringConnector.__new__(TriggerKvTieringConnector)
    tier._engines = [Engine(b"layout", epoch=unshared()), Engine(b"layout", epoch=unshared())]
    spec = TriggerKvOffloadingConnector.__new__(TriggerKvOffloadingConnector)
    spec._engine = Engine(b"layout", epoch=unshared())
    engines = [*tier._engines, spec._engine]
    assert len({engine.epoch for engine in engines}) == len(engines)
    for one in (tier, spec):
        one.set_xfer_handshake_metadata_pp_aware(ranks | {(1, 1): SimpleNamespace()})
    assert len({engine.epoch for engine in engines}) == len(engines), "one rank's are unknown"
    for one in (tier, spec):
        one.set_xfer_handshake_metadata_pp_aware(ranks)
    assert {engine.epoch for engine in engines} == {combined({at: one.digest for at, one in ranks.items()})}
