"""vLLM's multi-tier offloading with our node as a tier answers like vLLM alone, and loads stored blocks."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from tests.engines.digests import read_digests
from tests.engines.engine import PATIENT, Engine, tiered
from tests.engines.model import make_adapter
from tests.engines.node import Node
from tests.engines.pages import check_pages, layout_of, read_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engines.chats import Chats
    from tests.engines.node import GuardedNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL_BLOCKS = 40  # as in test_vllm
CHUNK_BYTES = 128 << 10
SMALL_POOL_BYTES = 32 * CHUNK_BYTES


def start(place: Path, name: str, model: Path, node: str, **more: Any) -> Engine:
    """An engine with a tier; `more` are settings of the tier."""
    own = (
        *("num_gpu_blocks_override", "max_num_batched_tokens", "max_num_seqs", "kv_events_config"),
        *("enable_lora", "max_lora_rank", "max_loras"),
    )
    arguments = {key: more.pop(key) for key in own if key in more}
    folder = place / "tiers"  # other engines have other names for their objects
    folder.mkdir(exist_ok=True)
    return Engine(
        folder, f"tier {name}", model, kv_transfer_config=tiered(node, **PATIENT | more), **arguments
    )


def check_digests(engine: Engine) -> int:
    """Each loaded chunk was stored under its name; returns the number of loaded chunks."""
    saved, loaded = read_digests(engine.digests)
    assert not [key for key, digest in loaded if digest not in saved.get(key, ())]
    return len(loaded)


def count(engine: Engine, name: str) -> float:
    """One of the tier's counters; vLLM doesn't list one that was never increased."""
    return engine.counts().get(f"vllm:triggerkv_tier_{name}", 0)


@pytest.fixture(scope="module")
def engine(place: Path, model: Path, node: Node, chats: Chats) -> Iterator[Engine]:  # noqa: ARG001  # held first
    with start(place, "first", model, node.target) as engine:
        yield engine


def test_every_turn_is_the_same_and_comes_from_the_node_when_the_pool_is_empty(
    engine: Engine, chats: Chats
) -> None:
    chats.check(engine)
    assert count(engine, "stored_chunks") > 50
    assert count(engine, "loaded_chunks") == 0  # the pool had it all
    engine.drop_pool()
    assert chats.check(engine, range(3, 4)) >= sum(len(prompt) - 64 for prompt in chats.last)
    assert count(engine, "loaded_chunks") > 50
    assert count(engine, "missing_chunks") == count(engine, "unsaved_chunks") == 0
    assert check_digests(engine) > 50


def test_when_loads_fail_at_random_every_stored_chunk_equals_a_clean_engines(
    model: Path, node: Node, engine: Engine, chats: Chats, tmp_path: Path
) -> None:
    chats.check(engine)
    clean_keys = set(read_digests(engine.digests)[0])
    small = {"num_gpu_blocks_override": SMALL_BLOCKS, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    with Node(tmp_path / "lossy node") as lossy_node:
        with start(
            tmp_path,
            "lossy",
            model,
            lossy_node.target,
            tier="LossyTier",
            pool_bytes=SMALL_POOL_BYTES,
            **small,
        ) as lossy:
            chats.check(lossy)
            lossy.drop_pool()
            chats.check(lossy, range(2, 4))
            assert count(lossy, "missing_chunks") > 0
            assert "Traceback" not in lossy.log()
        layout = layout_of(engine.digests / "tier first.txt")
        assert layout == layout_of(lossy.digests / "tier lossy.txt")
        stored = read_pages(lossy_node.target, layout, set(read_digests(lossy.digests)[0]))
        check_pages(stored, read_pages(node.target, layout, clean_keys))
    assert len(stored) > 60


def test_a_salt_separates(engine: Engine, chats: Chats) -> None:
    engine.drop_pool()
    said = engine.say(chats.last, tokens=24, salt="of one")
    assert (said.answers, said.cached) == (chats.answers[-1], 0)
    engine.drop_pool()
    assert engine.say(chats.last, tokens=24, salt="of another").cached == 0
    engine.drop_pool()
    assert engine.say(chats.last, tokens=24, salt="of one").cached > 0


def test_a_small_engine_under_pressure_shares_a_node_with_another(
    place: Path, model: Path, node: Node, engine: Engine, chats: Chats
) -> None:
    small = {"pool_bytes": SMALL_POOL_BYTES, "num_gpu_blocks_override": SMALL_BLOCKS}
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with start(
        place, "small", model, node.target, enable_kv_events=True, kv_events_config=events, **small
    ) as other:
        engine.drop_pool()
        chats.check(other)
        chats.check(engine)
        chats.check(other, range(3, 4))
        chats.check_long(other)
        counts = other.counts()
        assert counts["vllm:num_preemptions"] > 0
        assert count(other, "loaded_chunks") > 30
        assert check_digests(other) > 0
        other.forget(connector=True)
        assert chats.check(other, range(3, 4)) == 0  # after a reset nothing is found by those who were reset
        assert "Traceback" not in other.log()
        lines = (other.digests / "tier small.txt").read_text().splitlines()
    assert {line.split()[2] for line in lines if line.startswith("event ")} == {"STORAGE"}


def test_a_prompt_longer_than_the_pool_is_answered(
    place: Path, model: Path, node: Node, engine: Engine, chats: Chats
) -> None:
    chats.check(engine, range(3, 4))  # the node has all of it
    with start(place, "tiny", model, node.target, pool_bytes=8 * CHUNK_BYTES) as tiny:
        for prompt, answer in zip(chats.last[:2], chats.answers[-1], strict=False):
            assert len(prompt) > 10 * 32
            said = tiny.say([prompt], tokens=24)
            assert said.answers == [answer]
            assert said.cached == 6 * 32  # a quarter is left for what waits to be stored


def test_the_node_is_killed_in_the_middle_and_returns(node: Node, engine: Engine, chats: Chats) -> None:
    def kill_and_restart() -> None:
        for _ in range(2):
            started.wait(10)
            started.clear()
            node.kill()
            node.start()

    started = threading.Event()
    killer = threading.Thread(target=kill_and_restart)
    killer.start()
    while killer.is_alive():
        engine.drop_pool()
        started.set()
        chats.check(engine, range(2, 4))
    killer.join()
    until = time.monotonic() + 30
    before = count(engine, "loaded_chunks")
    while count(engine, "loaded_chunks") == before:  # the client looks for the node again by and by
        engine.drop_pool()
        chats.check(engine, range(3, 4))
        assert time.monotonic() < until
    check_digests(engine)
    assert "Traceback" not in engine.log()


def test_one_in_ten_chunks_is_damaged_on_the_drive(node: Node, engine: Engine, chats: Chats) -> None:
    node.stop()
    assert node.damage(0.1) > 10
    node.start()
    with Client(node.target) as client:
        client.status(wait_s=10)
    until = time.monotonic() + 30
    missing = count(engine, "missing_chunks")
    while count(engine, "missing_chunks") == missing:
        engine.drop_pool()
        chats.check(engine)
        assert time.monotonic() < until
    engine.drop_pool()
    chats.check(engine)
    check_digests(engine)
    assert "Traceback" not in engine.log()


def test_a_new_process_and_a_restarted_node(
    place: Path, model: Path, node: Node, engine: Engine, chats: Chats
) -> None:
    all_but_the_last = sum(len(prompt) - 64 for prompt in chats.last)
    deadline = time.monotonic() + 120
    cached = 0
    while cached < all_but_the_last:  # what is damaged is stored again, once it was read from the drive
        assert time.monotonic() < deadline
        node.restart()  # what was put again before anybody had read it is good in memory, and damaged still
        engine.say([list(range(5, 105))])  # the engine finds that the node was away
        engine.drop_pool()
        cached = chats.check(engine, range(3, 4))
    node.restart()
    with start(place, "new", model, node.target, transport="grpc") as new:
        assert chats.check(new, range(3, 4)) >= all_but_the_last
        assert check_digests(new) > 50
        assert "over gRPC" in new.log()


def test_a_stopped_or_absent_node_changes_nothing(
    place: Path, model: Path, chats: Chats, tmp_path: Path
) -> None:
    times = {"lookup_timeout_ms": 200, "load_timeout_ms": 2_000, "save_timeout_ms": 2_000}
    with Node(tmp_path / "node") as node, start(place, "stopped", model, node.target, **times) as engine:
        chats.check(engine, range(2))
        with node.paused():
            engine.drop_pool()
            chats.check(engine, range(1, 4))
            assert count(engine, "unsaved_chunks") > 0
        node.kill()
        engine.drop_pool()
        chats.check(engine)
        assert "Traceback" not in engine.log()


def test_one_of_three_nodes_is_killed_in_the_middle_and_nothing_is_computed_again(
    place: Path, model: Path, chats: Chats, tmp_path: Path
) -> None:
    """Each chunk is on two of them."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(tmp_path / f"node{number}")) for number in range(3)]
        targets = ",".join(node.target for node in nodes)
        more = {"replicas": 2, "transport": "fabric", "call_timeout_ms": 1_000}
        engine = stack.enter_context(start(place, "cluster", model, targets, **more))
        chats.check(engine, range(2))
        nodes[1].kill()
        engine.drop_pool()
        chats.check(engine, range(1, 4))  # what is new is stored on one node, or on two
        assert count(engine, "loaded_chunks") > 20
        engine.drop_pool()
        all_but_the_last = sum(len(prompt) - 64 for prompt in chats.last)
        assert chats.check(engine, range(3, 4)) >= all_but_the_last
        assert count(engine, "missing_chunks") == 0
        nodes[1].start()
        nodes[2].kill()
        engine.drop_pool()
        chats.check(engine, range(3, 4))
        check_digests(engine)
        assert "Traceback" not in engine.log()


def test_blocks_stored_over_tls_with_a_token_file_are_found(
    place: Path, model: Path, guarded: GuardedNode, chats: Chats
) -> None:
    with start(place, "tls", model, guarded.target, transport="fabric", **guarded.trust) as engine:
        assert chats.check(engine, range(3, 4)) == 0
        engine.drop_pool()
        assert chats.check(engine, range(3, 4)) > 0
        assert "Traceback" not in engine.log()


def test_an_adapter_is_identified_by_its_bytes_in_a_new_process_too(
    place: Path, model: Path, node: Node, chats: Chats, tmp_path: Path
) -> None:
    """VLLM's own hash identifies it by name and path, which stay the same when it is trained again."""
    one, other = (make_adapter(tmp_path / name, seed) for seed, name in enumerate(("one", "other")))

    def say(engine: Engine, adapter: Path | None) -> tuple[list[list[int]], int]:
        engine.drop_pool()
        said = engine.say(chats.last, tokens=24, **({} if adapter is None else {"adapter": str(adapter)}))
        return said.answers, said.cached

    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with start(place, "adapters", model, node.target, weights="of the adapters", **lora) as engine:
        answers = {adapter: say(engine, adapter) for adapter in (None, one, other)}
        assert [cached for _, cached in answers.values()] == [0, 0, 0]
        assert len({str(answer) for answer, _ in answers.values()}) == 3
        for adapter, (answer, _) in answers.items():
            again, cached = say(engine, adapter)
            assert again == answer
            assert cached > 0
    make_adapter(one, 1)  # it has the other's weights now, at its own path
    with start(place, "adapters anew", model, node.target, weights="of the adapters", **lora) as engine:
        assert say(engine, one) == (answers[other][0], 0)
        again, cached = say(engine, other)
        assert again == answers[other][0]
        assert cached > 0


def test_layers_with_and_without_a_window(place: Path, gemma: tuple[Path, Chats], node: Node) -> None:
    model, chats = gemma
    with start(place, "gemma", model, node.target) as engine:
        chats.check(engine)
        engine.drop_pool()
        assert chats.check(engine, range(3, 4)) > 0
        assert count(engine, "loaded_chunks") > 0
        check_digests(engine)
        assert "Traceback" not in engine.log()
