"""Look-ups of the tier without an engine: what is promised to requests, and how long an idle engine waits for it."""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in .venv-engines only: make test-engines")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports warn of much, and here warnings are errors
    importlib.import_module("vllm.v1.core.sched.scheduler")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from kvstore.client import Client
from kvstore.engines.vllm import tier
from tests.engines.node import until
from tests.engines.test_vllm_tier_jobs import CHUNKS, STEP, Tier, keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.engines.node import Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine waits until the node has answered."""
    monkeypatch.setattr(tier, "VLLM_LOADING_WAIT_S", 10)


def asked_while_idle(one: Tier, key: list[bytes], name: str) -> ReqContext:
    """A request whose chunks, one of its own and this one, an idle engine has looked up at once."""
    context, own = one.request(name), keys(name, 1)
    one.told.is_idle, one.told.expected = True, lambda: own + key
    while one.tier.lookup(own[0], context) is LookupResult.RETRY:
        one.tier.on_schedule_end(STEP)
    assert one.tier.lookup(key[0], context) is LookupResult.HIT
    return context


@pytest.mark.usefixtures("_patient")
def test_a_block_that_did_not_arrive_is_not_promised_to_other_requests(node: Node) -> None:
    one = Tier(node.target)
    key = keys("gone for two", 1)
    assert one.ended(one.submit(key)).success
    first, second = (asked_while_idle(one, key, name) for name in ("first", "second"))
    with Client(node.target, layout=one.tier._layout) as client:
        assert client.delete(one.tier._names(key)) == [True]
    assert not one.ended(one.submit(key, load=True, context=first)).success
    assert [one.tier.lookup(key[0], each) for each in (first, second)] == [LookupResult.MISS] * 2
    one.tier.shutdown()


@pytest.mark.usefixtures("_patient")
def test_a_chunk_is_loaded_once_for_a_request_of_an_idle_engine(node: Node) -> None:
    one = Tier(node.target)
    key = keys("once while idle", 1)
    assert one.ended(one.submit(key)).success
    context = asked_while_idle(one, key, "first")
    assert one.ended(one.submit(key, load=True, context=context)).success
    assert one.tier.lookup(key[0], context) is LookupResult.MISS
    one.tier.shutdown()


def test_a_busy_engine_learns_what_it_asked_for_while_it_was_idle(node: Node) -> None:
    one = Tier(node.target)
    some = keys("asked while idle", 3)
    assert one.ended(one.submit(some[:2])).success
    present, may_answer, asked = one.tier._lookups._present, threading.Event(), []

    def late(names: list[bytes]) -> list[bool]:
        asked.append(len(names))
        assert may_answer.wait(20)
        return present(names)

    one.tier._lookups._present = late
    one.told.is_idle, one.told.expected = True, lambda: some
    context = one.request()
    assert one.tier.lookup(some[0], context) is LookupResult.RETRY
    one.told.is_idle = False
    assert one.tier.lookup(some[0], context) is LookupResult.RETRY
    one.tier.on_schedule_end(STEP)
    may_answer.set()
    until(lambda: one.tier.lookup(some[0], context) is not LookupResult.RETRY, "the node has answered")
    hits = [LookupResult.HIT] * 2 + [LookupResult.MISS]
    assert [one.tier.lookup(key, context) for key in some] == hits
    assert asked == [3]
    one.tier.shutdown()


def test_an_error_of_a_look_up_is_a_miss(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "VLLM_LOADING_WAIT_S", 10)
    one = Tier(node.target)

    def broken(names: list[bytes]) -> list[bool]:
        raise ValueError(names)

    one.tier._lookups._present = broken
    some = keys("no answer", 2)
    one.told.is_idle, one.told.expected = True, lambda: some
    assert [one.tier.lookup(key, one.request()) for key in some] == [LookupResult.MISS] * 2
    one.tier.shutdown()


def test_an_idle_engine_asks_for_all_chunks_of_a_request_at_once_and_waits_a_moment(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "VLLM_LOADING_WAIT_S", 10)
    one = Tier(node.target)
    some = keys("at once", 4)
    assert one.ended(one.submit(some[:3])).success
    asked: list[int] = []
    present = one.tier._lookups._present

    def counted(names: list[bytes]) -> list[bool]:
        asked.append(len(names))
        return present(names)

    one.tier._lookups._present = counted
    one.told.expected = lambda: some
    assert one.tier.lookup(some[0], one.request("busy")) is LookupResult.RETRY  # it computes something
    one.tier.on_schedule_end(STEP)
    until(lambda: asked == [1], "another thread has asked")
    one.told.is_idle = True
    idle = one.request("idle")
    idle.set_offload_key_position(some[3], CHUNKS * 32)  # more than most of the pool
    assert [one.tier.lookup(key, idle) for key in some] == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    assert asked == [1, 3]
    assert one.told.expected is None
    unknown, others = one.request("of a window"), keys("others", 3)
    assert [one.tier.lookup(key, unknown) for key in others] == [LookupResult.RETRY] * 3
    assert one.look(others[0], unknown) is LookupResult.MISS
    assert asked == [1, 3, 3]
    assert "late_lookups" not in one.counts()
    one.tier.shutdown()


def test_a_queued_look_up_ends_in_time_too(node: Node) -> None:
    one = Tier(node.target, lookup_timeout_ms=300)

    def slow(blocks: Sequence[Any]) -> list[bool]:
        time.sleep(0.4)
        return [True] * len(blocks)

    one.tier._carrier.present = slow  # type: ignore[method-assign]
    contexts = [one.request(str(number)) for number in range(12)]
    for number, context in enumerate(contexts):
        assert one.tier.lookup(keys(f"late {number}", 1)[0], context) is LookupResult.RETRY
    began = time.monotonic()
    one.tier.on_schedule_end(STEP)
    assert one.look(keys("late 11", 1)[0], contexts[11], 10) is LookupResult.MISS
    assert time.monotonic() - began < 3
    assert one.counts() == {"late_lookups": 1}
    late = one.request("late")
    assert one.tier.lookup(keys("of one that is preempted", 1)[0], late) is LookupResult.RETRY
    time.sleep(0.4)
    one.tier.on_schedule_end(ScheduleEndContext((), preempted_req_ids=("late",)))
    assert one.tier.lookup(keys("and looks anew", 1)[0], late) is LookupResult.RETRY
    one.tier.shutdown()
