"""Loads that fail at each step of vLLM's scheduler: the stored blocks equal those of an engine without failures."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.engines.vllm.lookup import Usable
from tests.engines.pretend import (
    BLOCK,
    LAYERS,
    FakeNode,
    Pretend,
    RequestStatus,
    answer_of,
    model_folder,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.engines.vllm.saving import Copied, Sent

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

PREFIX = [7 * number % 900 + 5 for number in range(6 * BLOCK)]


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return model_folder(place / "pretended")


LOADS = ["sync", "async", "shared"]


def prompt(number: int, tokens: int = 3 * BLOCK) -> list[int]:
    return PREFIX + [(number * 31 + at * 11) % 900 + 5 for at in range(tokens)]


def held(engine: Pretend) -> list[list[int]]:
    return [one + answer_of(one, tokens) for one, tokens in engine.said.values()]


def stored(monkeypatch: pytest.MonkeyPatch, folder: Path, *prompts: list[int]) -> FakeNode:
    """A node to which an engine has saved some prompts."""
    node = FakeNode()
    engine = Pretend(monkeypatch, folder, node)
    for number, one in enumerate(prompts):
        engine.add(str(number), one, 1)
    engine.run()
    assert node.objects
    return node


def of(node: FakeNode, load: str) -> str:
    """The setting `load`. "shared" is "async" with a node that shares its memory: an idle engine waits for the copy."""
    node.shares = load == "shared"
    return "async" if node.shares else load


@pytest.mark.parametrize("load", LOADS)
def test_loaded_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch, folder: Path, load: str) -> None:
    node = stored(monkeypatch, folder, prompt(1))
    engine = Pretend(monkeypatch, folder, node, load=of(node, load))
    engine.add("a", prompt(1), 4)
    engine.run()
    engine.check_answers()
    assert engine.count("loaded_bytes") == 8 * LAYERS * BLOCK * 8


@pytest.mark.parametrize("load", LOADS)
def test_a_block_evicted_between_lookup_and_load_poisons_nothing(
    monkeypatch: pytest.MonkeyPatch, folder: Path, load: str
) -> None:
    node = stored(monkeypatch, folder, prompt(1))
    node.losing = 0.3
    engine = Pretend(monkeypatch, folder, node, load=of(node, load))
    engine.add("a", prompt(1, 5 * BLOCK), 40)
    engine.run()
    assert node.lost
    engine.check_answers()
    assert engine.check_pages(node, held(engine)) > 0


def test_a_step_whose_load_failed_saves_nothing_and_the_next_ones_do(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = stored(monkeypatch, folder, PREFIX)
    engine = Pretend(monkeypatch, folder, node)
    engine.add("a", prompt(1), 1)
    engine.add("b", [9] * BLOCK, 1)
    node.losing = 1.0
    engine.step()
    assert not node.objects
    node.losing = 0.0
    engine.run()
    assert engine.count("withheld_pages") > 0
    engine.check_answers()
    assert engine.check_pages(node, held(engine)) >= 9 * LAYERS


@pytest.mark.parametrize("load", LOADS)
def test_a_request_that_fails_for_its_load_leaves_nothing_wrong_behind(
    monkeypatch: pytest.MonkeyPatch, folder: Path, load: str
) -> None:
    node = stored(monkeypatch, folder, PREFIX)
    engine = Pretend(monkeypatch, folder, node, load=of(node, load), policy="fail")
    node.losing = 1.0
    engine.add("a", prompt(1), 4)
    engine.run()
    assert not engine.answers["a"]
    node.losing = 0.0
    engine.add("b", prompt(1), 4)
    engine.run()
    engine.check_answers(["b"])
    assert engine.check_pages(node, held(engine)) >= 9 * LAYERS


def test_a_request_that_shares_blocks_still_being_loaded_waits_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = stored(monkeypatch, folder, PREFIX)
    # A block a step: what did not come is computed again over several of them, with others beside it.
    engine = Pretend(monkeypatch, folder, node, prompt_tokens=BLOCK)
    node.losing = 1.0
    engine.add("a", PREFIX + [3] * 5, 4)
    engine.add("b", PREFIX + [4] * 5, 4)
    engine.run()
    engine.check_answers()
    assert engine.check_pages(node, held(engine)) > 0


def test_a_block_that_did_not_arrive_is_not_in_the_engines_own_cache(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = stored(monkeypatch, folder, PREFIX)
    engine = Pretend(monkeypatch, folder, node, step_tokens=2 * BLOCK)
    node.losing = 1.0
    engine.add("a", PREFIX + [3] * 5, 4)
    engine.step()
    engine.add("b", PREFIX + [4] * 5, 4)
    engine.run()
    engine.check_answers()
    engine.check_pages(node, held(engine))


def test_nor_if_its_request_is_aborted_while_it_is_computed(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = stored(monkeypatch, folder, PREFIX)
    engine = Pretend(monkeypatch, folder, node)
    node.losing = 1.0
    engine.add("a", prompt(1), 4)
    engine.step(abort="a")
    engine.add("b", [*PREFIX, 8], 1)
    engine.run()
    # Behind the blocks that were computed anew stand those that the aborted request had computed from nothing.
    engine.add("c", prompt(1), 4)
    engine.run()
    engine.check_answers()
    engine.check_pages(node, held(engine))


@pytest.mark.parametrize("load", ["sync", "shared"])
def test_an_engine_that_plans_ahead_waits_for_no_load(
    monkeypatch: pytest.MonkeyPatch, folder: Path, load: str
) -> None:
    node = stored(monkeypatch, folder, prompt(1))
    engine = Pretend(monkeypatch, folder, node, load=of(node, load), plans_ahead=True)
    engine.add("a", prompt(1), 1)
    engine.step()
    assert engine.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_forward_pass_interrupted_in_the_middle_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = FakeNode()
    engine = Pretend(monkeypatch, folder, node)
    engine.add("a", prompt(1), 1)
    engine.layers_run = LAYERS - 1
    engine.run()
    assert not node.objects
    assert engine.count("withheld_pages") > 0


def test_blocks_without_room_for_a_copy_are_skipped_and_counted(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = FakeNode()
    engine = Pretend(monkeypatch, folder, node)
    ring = engine.saves._ring
    while ring.take(1 << 10):
        pass  # a node that is stopped has all of it
    engine.add("a", prompt(1), 1)
    engine.run()
    engine.check_answers()
    assert not node.objects
    assert engine.count("skipped_pages") >= 9 * LAYERS


def test_blocks_that_another_connector_promised_and_did_not_deliver_poison_nothing(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = FakeNode()
    engine = Pretend(monkeypatch, folder, node, beside=True, step_tokens=3 * BLOCK)
    for number in range(3):
        engine.add(str(number), prompt(number), 20)
    engine.run()
    assert engine.check_pages(node, held(engine)) > 0


def test_a_request_built_on_blocks_that_another_connector_lost_is_not_saved(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    node = FakeNode()
    engine = Pretend(monkeypatch, folder, node, beside=True, prompt_tokens=BLOCK, step_tokens=128)
    engine.add("a", prompt(1), 4)
    engine.add("b", prompt(2), 40)
    engine.run()
    assert engine.check_pages(node, held(engine)) > 0


class _Slow(Future[Usable]):
    """An answer that does not arrive, and how long the caller waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def result(self, timeout: float | None = None) -> Usable:
        assert timeout is not None
        self.waits.append(timeout)
        raise TimeoutError


def test_a_busy_engine_never_waits_for_an_answer(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    engine = Pretend(monkeypatch, folder, FakeNode())
    engine.add("a", prompt(1), 40)
    for _ in range(4):
        engine.step()
    slow = _Slow()
    engine.scheduling._lookups.begin = lambda *_: slow
    engine.add("b", prompt(2), 1)
    for _ in range(20):
        engine.step()
    assert slow.waits == [0.0] * 20


@pytest.mark.parametrize("stored_blocks", [0, 8])
def test_blocks_of_the_engines_own_cache_wait_for_no_answer_and_are_saved_only_if_not_stored(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stored_blocks: int
) -> None:
    node = FakeNode()
    engine = Pretend(monkeypatch, folder, node)
    engine.add("first", prompt(1), 1)
    engine.run()
    node.objects.clear()
    answer: Future[Usable] = Future()
    engine.scheduling._lookups.begin = lambda *_: answer
    monkeypatch.setattr(answer, "result", lambda *_: 1 / 0)
    engine.scheduling._lookup_ns = 60_000_000_000
    engine.add("again", prompt(1), 40)
    for _ in range(4):  # the engine was idle, and would have waited
        engine.step()
    assert len(engine.answers["again"]) == 4
    assert not node.objects  # it is not known yet whether they are missing
    monkeypatch.undo()
    answer.set_result(Usable(stored_blocks * BLOCK, is_shared=False))
    engine.run()
    engine.check_answers()
    assert engine.check_pages(node, held(engine)) == (11 - stored_blocks) * LAYERS


def test_blocks_of_an_idle_engines_own_cache_are_looked_up_beside_the_second_step(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Digests and look-up cost a millisecond of the scheduler's processor, and its first token needs neither."""
    engine = Pretend(monkeypatch, folder, FakeNode())
    engine.add("first", prompt(1), 1)
    engine.run()
    begin = engine.scheduling._lookups.begin
    tokens_at: list[int] = []

    def begin_counted(*asked: Any) -> Any:
        tokens_at.append(len(engine.answers["again"]))
        return begin(*asked)

    engine.scheduling._lookups.begin = begin_counted
    engine.add("again", prompt(1), 3)
    engine.step()
    assert len(engine.answers["again"]) == 1
    assert not any(chain.digests for chain in engine.scheduling._requests["again"].chains.values())
    engine.run()
    assert tokens_at == [1]
    engine.check_answers()


def test_a_turn_that_ends_before_the_answer_has_the_engines_blocks(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """With fewer blocks it would truncate the session."""
    engine = Pretend(monkeypatch, folder, FakeNode())
    blocks: list[int] = []
    engine.scheduling._turns = SimpleNamespace(
        arrived=lambda _: None, finished=lambda _, digests_of: blocks.append(len(digests_of()[0]))
    )
    engine.add("first", prompt(1), 1)
    engine.run()
    engine.scheduling._lookups.begin = lambda *_: Future()
    engine.add("again", prompt(1), 1)
    engine.run()
    assert blocks == [9, 8]


def test_a_node_that_accepts_nothing_delays_no_step(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    node = FakeNode()
    engine = Pretend(monkeypatch, folder, node, blocks=24)
    goes_on, is_waited_for = threading.Event(), []
    send = engine.saves._sender.send

    def stopped(objects: Sequence[Copied]) -> Sent:
        is_waited_for.append(not goes_on.wait(5))
        sent: Sent = send(objects)
        return sent

    with ThreadPoolExecutor(1) as thread:
        engine.saves._thread = thread
        engine.saves._sender = SimpleNamespace(send=stopped)
        for number in range(6):
            engine.add(str(number), prompt(number), 4)
        engine.run()
        goes_on.set()
    # What was copied is what the steps had computed, though the engine has used their blocks again and again.
    engine.check_answers()
    assert not any(is_waited_for)
    assert engine.check_pages(node, held(engine)) > 20 * LAYERS


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("load", LOADS)
def test_under_random_failures_every_stored_page_equals_a_clean_engines(
    monkeypatch: pytest.MonkeyPatch, folder: Path, load: str, *, beside: bool
) -> None:
    """With shared prefixes, chunked prompts, preemption, aborts, and engines that follow one another."""
    lost = pages = preempted = 0
    for seed in range(12):
        dice = random.Random(seed)
        node = FakeNode(losing=0.35, dice=dice)
        conversations: list[list[int]] = []
        number = 0
        for _ in range(2):
            engine = Pretend(
                monkeypatch,
                folder,
                node,
                load=of(node, load),
                beside=beside,
                blocks=dice.choice([24, 64]),
                step_tokens=dice.choice([32, 48, 128]),
                prompt_tokens=dice.choice([0, BLOCK]),
            )
            for _ in range(100):
                if dice.random() < 0.3 and len(engine.scheduler.requests) < 6:
                    number += 1
                    begin = PREFIX[: dice.randrange(len(PREFIX))]
                    rest = [dice.randrange(5, 8) for _ in range(dice.randrange(1, 90))]
                    engine.add(str(number), begin + rest, dice.randrange(1, 40))
                    conversations += held(engine)[-1:]
                aborted = [*engine.said] if dice.random() < 0.05 else []
                running = [name for name in aborted if name in engine.scheduler.requests]
                engine.step(abort=dice.choice(running) if running else None)
                if dice.random() < 0.02 and not engine.is_busy:
                    engine.forget()
                preempted += sum(one.num_preemptions > 0 for one in engine.scheduler.requests.values())
            engine.run()
            if not beside:  # of another's lost blocks vLLM itself lets requests go on that share them
                engine.check_answers()
            pages += engine.check_pages(node, conversations)
        lost += node.lost
    assert lost > 30
    assert pages > 1000
    assert preempted > 0
