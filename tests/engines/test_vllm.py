"""vLLM answers the same with our connector as without, and every loaded byte was saved."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from kvstore.sealing.masters import new_master_file
from tests.engines.digests import read_digests
from tests.engines.engine import PATIENT, Engine
from tests.engines.node import Node, until
from tests.engines.pages import check_pages, layout_of, read_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engines.chats import Chats
    from tests.engines.node import GuardedNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL_BLOCKS = 40  # of 32 tokens: six users want about eighty, and fifty for long answers to short prompts


SPEC = {"kv_connector": "TriggerKvOffloadingConnector", "kv_connector_module_path": None}
SPEC_EXTRA = {"spec_name": "RecordingSpec", "spec_module_path": "tests.engines.recording"}


def check_digests(engine: Engine) -> int:
    """Each loaded page was saved under its key; returns the number of loaded pages."""
    saved, loaded = read_digests(engine.digests)
    strange = [key for key, digest in loaded if digest not in saved.get(key, ())]
    assert not strange
    return len(loaded)


@pytest.fixture(scope="module")
def engine(place: Path, model: Path, node: Node, chats: Chats) -> Iterator[Engine]:  # noqa: ARG001  # held first
    with Engine(place, "async", model, node.target) as engine:
        yield engine


def test_every_turn_is_the_same_cold_and_warm(engine: Engine, chats: Chats) -> None:
    chats.check(engine)
    assert engine.count("stored_blocks") > 50
    engine.forget()
    hit = engine.count("hit_tokens")
    # All blocks of all prompts come from the node: at least what is left when the last, unfull ones are not counted.
    assert chats.check(engine, range(3, 4)) >= sum(len(prompt) - 64 for prompt in chats.last)
    assert engine.count("hit_tokens") > hit
    assert engine.count("missing_blocks") == 0
    assert check_digests(engine) > 0


def test_the_engines_own_cache_and_ours_work_together(engine: Engine, chats: Chats) -> None:
    engine.forget()
    chats.check(engine, range(1))  # the first turn is in the engine's cache now, the rest on the node only
    hit = engine.count("hit_tokens")
    cached = chats.check(engine, range(3, 4))
    came = engine.count("hit_tokens") - hit
    assert 0 < came < cached


def test_a_salt_separates(engine: Engine, chats: Chats) -> None:
    engine.forget()
    hit = engine.count("hit_tokens")
    said = engine.say(chats.last, tokens=24, salt="of one")
    assert said.answers == chats.answers[-1]
    assert (said.cached, engine.count("hit_tokens")) == (0, hit)
    engine.forget()
    assert engine.say(chats.last, tokens=24, salt="of another").cached == 0
    engine.forget()
    assert engine.say(chats.last, tokens=24, salt="of one").cached > 0


def test_a_users_data_is_erased_with_their_domain(place: Path, model: Path, chats: Chats) -> None:
    master = place / "master.key"
    new_master_file(master)
    with Node(place / "encrypted", arguments=("--master-key", f"file:{master}")) as node:
        client, more = Client(node.target), {**PATIENT, "shared": True}
        with client, Engine(place, "domains", model, node.target, extra=more) as engine:
            for domain in ("ada", "grace", ""):
                engine.forget()
                assert engine.say(chats.last, tokens=24, domain=domain).cached == 0, "it is nobody else's"
            every: list[list[list[int]]] = []
            for domain, is_there in (
                ("ada", True),
                ("grace", True),
                ("", True),
                ("ada", False),
                ("grace", True),
            ):
                engine.forget()
                if not is_there:
                    erased = client.erase_user("ada")
                    assert erased.blocks
                    assert erased.keys == 1
                said = engine.say(chats.last, tokens=24, domain=domain)
                assert (said.cached > 0) is is_there
                every.append(said.answers)
            assert every == [chats.answers[-1]] * 5
            with Client(node.target) as other:
                assert other.erase_user("grace").blocks == erased.blocks
    assert "erase domain" not in engine.log()


def test_on_a_node_without_encryption_requests_with_a_domain_are_not_saved(
    engine: Engine, chats: Chats
) -> None:
    assert engine.say(chats.last, tokens=24, domain="ada").answers == chats.answers[-1]
    engine.forget()
    assert engine.say(chats.last, tokens=24, domain="ada").cached == 0
    assert "--master-key" in engine.log()


def test_a_small_engine_under_pressure_shares_a_node_with_another(
    place: Path, model: Path, node: Node, engine: Engine, chats: Chats
) -> None:
    extra = {"load": "sync"}
    with Engine(
        place, "sync", model, node.target, extra=extra, num_gpu_blocks_override=SMALL_BLOCKS
    ) as small:
        chats.check(small)
        chats.check(engine)
        chats.check(small, range(3, 4))
        chats.check_long(small)
        counts = small.counts()
        assert counts["vllm:num_preemptions"] > 0
        assert counts["vllm:triggerkv_hit_tokens"] > 1000
        assert check_digests(small) > 0


def test_after_a_reset_the_reset_requests_find_nothing(
    place: Path, model: Path, node: Node, chats: Chats
) -> None:
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with Engine(place, "reset", model, node.target, kv_events_config=events) as engine:
        assert chats.check(engine, range(3, 4)) > 0
        engine.forget(connector=True)
        assert chats.check(engine, range(3, 4)) == 0
        assert chats.check(engine, range(3, 4)) > 0
        lines = (engine.digests / "reset.txt").read_text().splitlines()
    told = [line.split()[1:] for line in lines if line.startswith("event ")]
    assert len(told) > 20
    assert {tokens for _, tokens in told} == {"32"}


def test_a_new_process_and_a_restarted_node(
    place: Path, model: Path, node: Node, engine: Engine, chats: Chats
) -> None:
    chats.check(engine)
    node.restart()
    with Engine(place, "new", model, node.target) as new:
        assert chats.check(new, range(3, 4)) >= sum(len(prompt) - 64 for prompt in chats.last)
        check_digests(new)


def test_the_node_is_killed_in_the_middle_and_returns(node: Node, engine: Engine, chats: Chats) -> None:
    def kill_and_restart() -> None:
        for _ in range(3):
            started.wait(10)
            started.clear()
            node.kill()
            node.start()

    started = threading.Event()
    killer = threading.Thread(target=kill_and_restart)
    killer.start()
    while killer.is_alive():
        engine.forget()
        started.set()
        chats.check(engine)
    killer.join()
    until = time.monotonic() + 30
    while True:  # the client looks for the node again by and by
        engine.forget()
        before = engine.count("hit_tokens")
        chats.check(engine, range(3, 4))
        if engine.count("hit_tokens") > before:
            break
        assert time.monotonic() < until
    check_digests(engine)
    assert "Traceback" not in engine.log()


def test_one_in_ten_blocks_is_damaged_on_the_drive(node: Node, engine: Engine, chats: Chats) -> None:
    chats.check(engine)
    node.stop()
    damaged = node.damage(0.1)
    node.start()
    assert damaged > 10
    with Client(node.target) as client:
        client.status(wait_s=10)
    until = time.monotonic() + 30
    missing = engine.count("missing_blocks")
    while engine.count("missing_blocks") == missing:
        engine.forget()
        chats.check(engine)
        assert time.monotonic() < until
    engine.forget()
    chats.check(engine)
    check_digests(engine)
    assert "Traceback" not in engine.log()


def test_a_turn_becomes_one_of_its_session(node: Node, engine: Engine, chats: Chats) -> None:
    for turn in range(2):
        engine.say([chats.prompts[turn][0]], tokens=24, session="chat 7")
        full = (len(chats.prompts[turn][0]) + 23) // 32
        with Client(node.target) as client:
            until = time.monotonic() + 10
            while True:
                listed = {one.session: one for one in client.sessions("ada")}
                if "chat 7" in listed and listed["chat 7"].tokens == full * 32:
                    break
                assert time.monotonic() < until, listed
    assert listed["chat 7"].turns == 2


@pytest.mark.parametrize("load", ["async", "sync"])
def test_blocks_that_are_found_and_never_arrive_are_computed(
    place: Path, model: Path, node: Node, chats: Chats, load: str
) -> None:
    broken = {"kv_connector": "BrokenConnector"}
    with Engine(place, f"broken {load}", model, node.target, transfer=broken, extra={"load": load}) as engine:
        chats.check(engine, range(2))
        engine.forget()
        chats.check(engine, range(2))
        assert engine.count("missing_blocks") > 0


def test_when_loads_fail_at_random_every_stored_page_equals_a_clean_engines(
    place: Path, model: Path, chats: Chats
) -> None:
    folder = place / "lossy"
    folder.mkdir()
    lossy = {"kv_connector": "LossyConnector"}
    small = {"num_gpu_blocks_override": SMALL_BLOCKS, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    with Node(folder / "clean node") as clean_node, Node(folder / "lossy node") as lossy_node:
        with Engine(folder, "clean", model, clean_node.target) as clean:
            chats.check(clean)
        clean_keys = set(read_digests(clean.digests)[0])
        for load in ("sync", "async"):
            with Engine(
                folder, load, model, lossy_node.target, transfer=lossy, extra={"load": load}, **small
            ) as engine:
                chats.check(engine)
                engine.forget()
                chats.check(engine, range(2, 4))
                assert engine.count("missing_blocks") > 0
                assert "Traceback" not in engine.log()
        lossy_keys = set(read_digests(engine.digests)[0])
        layout = layout_of(clean.digests / "clean.txt")
        stored = read_pages(lossy_node.target, layout, lossy_keys)
        check_pages(stored, read_pages(clean_node.target, layout, clean_keys))
    assert len(stored) > 60  # of one a block


def test_without_a_fabric_blocks_are_sent_over_grpc(
    place: Path, model: Path, node: Node, chats: Chats
) -> None:
    with Engine(place, "inline", model, node.target, extra={"transport": "grpc"}) as inline:
        chats.check(inline)
        inline.forget()
        assert chats.check(inline, range(3, 4)) > 0
        assert inline.count("hit_tokens") > 0
        check_digests(inline)
        assert "over gRPC" in inline.log()


def test_an_absent_node_changes_nothing(place: Path, model: Path, chats: Chats) -> None:
    with Engine(place, "alone", model, "127.0.0.1:9") as alone:
        chats.check(alone)
        assert alone.count("stored_blocks") == 0
        assert "Traceback" not in alone.log()


def _memory_files() -> set[Path]:
    return set(Path("/dev/shm").glob("triggerkv-*"))


def test_the_offloading_spec_gives_the_same_output_and_hits_in_a_new_process(
    place: Path, model: Path, node: Node, chats: Chats
) -> None:
    before = _memory_files()
    for life in range(2):
        with Engine(place, f"spec {life}", model, node.target, transfer=SPEC, extra=SPEC_EXTRA) as engine:
            if life:
                assert chats.check(engine, range(3, 4)) >= sum(len(prompt) - 64 for prompt in chats.last)
            chats.check(engine)
            engine.forget()
            assert chats.check(engine, range(3, 4)) > 0
            assert check_digests(engine) > 0
            engine.forget(connector=True)
            assert chats.check(engine, range(3, 4)) == 0
            assert "Traceback" not in engine.log()
            assert engine.log().count("TriggerKvOffloadingConnector is deprecated") == 1
        node.restart()
    assert _memory_files() <= before  # others may run beside this


@pytest.mark.parametrize(("transfer", "extra"), [(None, {}), (SPEC, SPEC_EXTRA)], ids=["connector", "spec"])
def test_a_new_process_hits_over_tls_with_a_token_file(
    place: Path,
    model: Path,
    guarded: GuardedNode,
    chats: Chats,
    transfer: dict[str, Any] | None,
    extra: dict[str, str],
) -> None:
    told = {"transport": "fabric", **PATIENT, **extra, **guarded.trust}
    name = f"over TLS {len(extra)}"

    def puts() -> int:
        with Client(guarded.target, **guarded.trust) as client:
            return client.statistics().puts

    before = puts()
    with Engine(place, name, model, guarded.target, transfer=transfer, extra=told) as engine:
        chats.check(engine, range(3, 4))
        until(lambda: puts() > before, "a thread stores what the spec was given")
    with Engine(place, f"{name} again", model, guarded.target, transfer=transfer, extra=told) as engine:
        assert chats.check(engine, range(3, 4)) > 0
        assert check_digests(engine) > 0
        assert "Traceback" not in engine.log()


def test_the_offloading_spec_continues_without_its_node(
    place: Path, model: Path, node: Node, chats: Chats
) -> None:
    with Engine(place, "spec killed", model, node.target, transfer=SPEC, extra=SPEC_EXTRA) as engine:
        chats.check(engine, range(2))
        node.kill()
        engine.forget(connector=True)
        chats.check(engine)
        node.start()
        chats.check(engine)
        check_digests(engine)
        assert "Traceback" not in engine.log()


def test_layers_with_and_without_a_window(place: Path, gemma: tuple[Path, Chats], node: Node) -> None:
    model, chats = gemma
    with Engine(place, "gemma", model, node.target) as engine:
        chats.check(engine)
        engine.forget()
        assert chats.check(engine, range(3, 4)) > 0
        assert engine.count("hit_tokens") > 0
        assert "KV of 2 groups" in engine.log()
        node.stop()
        node.damage(0.3)
        node.start()
        until = time.monotonic() + 30
        while not engine.count("missing_blocks"):
            engine.forget()
            chats.check(engine)
            assert time.monotonic() < until
        check_digests(engine)
        assert "Traceback" not in engine.log()
