"""Jobs of the tier without an engine: what they report to vLLM's manager; they end whatever the node does."""

from __future__ import annotations

import importlib
import time
import warnings
from types import SimpleNamespace as Fake
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm", reason="vLLM is in .venv-engines only: make test-engines")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports warn of much, and here warnings are errors
    importlib.import_module("vllm.v1.core.sched.scheduler")

import numpy as np
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvstore.client import Client
from kvstore.client.link import Link
from kvstore.engines.vllm import tier, tiering_connector
from kvstore.engines.vllm.model_hints import Engine, record_adapter
from kvstore.engines.vllm.settings import ENGINE
from kvstore.engines.vllm.tier import TriggerKvTier
from kvstore.engines.vllm.tiering_connector import TriggerKvTieringConnector
from kvstore.errors import Closed, ConfigError
from tests.engines.node import Node, until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CHUNKS = 16
CHUNK_BYTES = 3 * 4096
NEVER = "127.0.0.1:9"
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class Tier:
    """A tier with a pool, and a scheduler that calls it."""

    def __init__(
        self, node: str, *, told: Engine | None = None, chunk_bytes: int = CHUNK_BYTES, **more: Any
    ) -> None:
        self.pool = np.zeros((CHUNKS, chunk_bytes), np.int8)
        self.told = told or Engine(b"a model")
        spec = Fake(
            kv_events_config=Fake(enable_kv_cache_events=True),
            blocks_per_chunk=1,
            tokens_per_hash=32,
            tokens_per_block=(32,),
            replicated_layout=False,
            config=Fake(canonical_layout=False),
        )
        given = {"node": node, ENGINE: self.told, "lookup_timeout_ms": 10_000, **more}
        self.tier = TriggerKvTier(spec, memoryview(cast("Any", self.pool)), "triggerkv", **given)
        self._jobs = 0

    def request(self, name: str = "r", lora: Any = None) -> ReqContext:
        context = ReqContext(name)
        record_adapter([self.told], Fake(request_id=name, lora_request=lora))
        self.tier.on_new_request(context)
        return context

    def submit(self, keys: list[bytes], *, load: bool = False, context: ReqContext | None = None) -> int:
        self._jobs += 1
        chunks = np.array([key[0] for key in keys], np.int32)
        job = TransferJob(self._jobs, keys, chunks, load, context or self.request())
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._jobs

    def ended(self, number: int, seconds: float = 30.0) -> JobResult:
        (result,) = self.all_ended(1, seconds)
        assert result.job_id == number
        return result

    def all_ended(self, count: int, seconds: float = 30.0) -> list[JobResult]:
        """The results of this many jobs, in their order."""
        found: list[JobResult] = []

        def are_all_there() -> bool:
            found.extend(self.tier.get_finished_jobs())
            return len(found) >= count

        until(are_all_there, "the jobs have ended", seconds)
        return sorted(found, key=lambda result: result.job_id)

    def look(self, key: bytes, context: ReqContext | None = None, seconds: float = 30.0) -> LookupResult:
        context = context or self.request()
        found: list[LookupResult] = []

        def is_known() -> bool:
            found.append(self.tier.lookup(key, context))
            self.tier.on_schedule_end(STEP)
            return found[-1] is not LookupResult.RETRY

        until(is_known, "the node has been asked", seconds)
        self.tier.on_request_finished(context)
        return found[-1]

    def counts(self) -> dict[str, int]:
        stats = self.tier.get_stats()
        data = {} if stats is None else stats.data["data"]
        return {name.removeprefix("vllm:triggerkv_tier_"): int(*of.values()) for name, of in data.items()}


def keys(what: str, count: int, first: int = 0) -> list[bytes]:
    """Keys whose chunks consist of the key's first byte."""
    return [bytes([number]) + what.encode() for number in range(first, first + count)]


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 9 << 20])
def test_stored_blocks_are_loaded_and_missing_ones_are_distinguished(
    node: Node, transport: str, chunk_bytes: int
) -> None:
    what = f"{transport} {chunk_bytes}"
    one = Tier(node.target, transport=transport, chunk_bytes=chunk_bytes, enable_kv_events=True)
    assert one.look(keys(what, 1)[0]) is LookupResult.MISS
    one.pool[:3] = np.arange(3, dtype=np.int8)[:, None] + 5
    stored = one.ended(one.submit(keys(what, 3)))
    assert (stored.success, stored.transfer_bytes) == (True, 3 * chunk_bytes)
    (event,) = one.tier.take_events()
    assert (event.keys, event.medium.value, event.removed) == (keys(what, 3), "STORAGE", False)
    assert one.look(keys(what, 1)[0]) is LookupResult.HIT
    one.pool[:] = 0
    loaded = one.ended(one.submit(keys(what, 4), load=True))
    assert (loaded.success, loaded.successful_keys) == (False, keys(what, 3))
    assert (one.pool[:3, ::4096] == np.arange(3)[:, None] + 5).all()
    assert one.counts() == {"stored_chunks": 3, "loaded_chunks": 3, "missing_chunks": 1}
    one.tier.shutdown()


def test_a_block_that_did_not_arrive_is_not_promised_again(node: Node) -> None:
    one = Tier(node.target)
    key = keys("gone", 1)
    assert one.ended(one.submit(key)).success
    context = one.request()
    while one.tier.lookup(key[0], context) is LookupResult.RETRY:
        one.tier.on_schedule_end(STEP)
    with Client(node.target, layout=one.tier._layout) as client:
        assert client.delete(one.tier._names(key)) == [True]
    assert one.tier.lookup(key[0], context) is LookupResult.HIT
    assert not one.ended(one.submit(key, load=True, context=context)).success
    assert one.tier.lookup(key[0], context) is LookupResult.MISS
    one.tier.shutdown()


def test_a_chunk_is_loaded_once_for_a_request(node: Node) -> None:
    """A chunk requested again was evicted from the pool, to make room for the rest of the same prompt."""
    one = Tier(node.target)
    key = keys("once", 1)
    assert one.ended(one.submit(key)).success
    context = one.request("first")
    while one.tier.lookup(key[0], context) is LookupResult.RETRY:
        one.tier.on_schedule_end(STEP)
    assert one.ended(one.submit(key, load=True, context=context)).success
    assert one.tier.lookup(key[0], context) is LookupResult.MISS
    one.tier.on_schedule_end(ScheduleEndContext((), preempted_req_ids=("first",)))
    assert one.tier.lookup(key[0], context) is LookupResult.HIT  # it was preempted, and has nothing any more
    assert one.look(key[0], one.request("second")) is LookupResult.HIT
    one.tier.on_request_finished(context)
    assert not one.tier._seen
    assert one.counts()["evicted_chunks"] == 1
    one.tier.shutdown()


def test_the_beginning_of_a_prompt_longer_than_the_pool_is_found(node: Node) -> None:
    one = Tier(node.target)
    some = keys("long", 2)
    assert one.ended(one.submit(some)).success
    context = one.request()
    for key, chunks in zip(some, (CHUNKS * 3 // 4, CHUNKS * 3 // 4 + 1), strict=True):
        context.set_offload_key_position(key, chunks * 32)
    assert [one.look(key, context) for key in some] == [LookupResult.HIT, LookupResult.MISS]
    one.tier.shutdown()


def test_adapters_resets_and_engines_find_only_their_own(node: Node, tmp_path: Path) -> None:
    for number, content in enumerate((b"1", b"2", b"1")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "adapter_model.safetensors").write_bytes(content)
    one = Tier(node.target)
    key = keys("adapters", 1)
    adapters = [one.request(str(number), Fake(lora_path=str(tmp_path / str(number)))) for number in range(3)]
    assert one.ended(one.submit(key, context=adapters[0])).success
    found = [one.look(key[0], context) is LookupResult.HIT for context in (*adapters, one.request())]
    assert found == [True, False, True, False]
    assert one.ended(one.submit(key)).success
    other = Tier(node.target, told=Engine(b"another model"))
    assert other.look(key[0]) is LookupResult.MISS
    other.tier.shutdown()
    assert one.look(key[0]) is LookupResult.HIT
    one.told.reset()
    assert one.look(key[0]) is LookupResult.MISS
    one.tier.shutdown()


def test_an_idle_engine_waits_for_pending_loads(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would poll without a pause, and keep Python's lock from the threads that load its chunks."""
    monkeypatch.setattr(tier, "VLLM_LOADING_WAIT_S", 10)
    one = Tier(node.target)
    key = keys("idle", 1)
    assert one.ended(one.submit(key)).success

    def slow(call: Callable[..., list[bool]]) -> Any:
        def later(*some: Any, **more: Any) -> list[bool]:
            time.sleep(0.2)
            return call(*some, **more)

        return later

    carrier: Any = one.tier._carrier
    carrier.get, carrier.present = slow(carrier.get), slow(carrier.present)
    began = time.monotonic()
    numbers = [one.submit(key, load=True)]
    assert one.tier.get_finished_jobs() == []  # it computes something: nothing waits
    assert time.monotonic() - began < 0.2
    one.told.is_idle = True
    for _ in range(2):
        assert [result.job_id for result in one.tier.get_finished_jobs()] == numbers
        numbers = [one.submit(key, load=True)]
    assert [result.job_id for result in one.tier.get_finished_jobs()] == numbers
    context = one.request()
    assert one.tier.lookup(key[0], context) is LookupResult.RETRY
    one.tier.on_schedule_end(STEP)
    asked = time.monotonic()
    assert one.tier.get_finished_jobs() == []
    assert time.monotonic() - asked > 0.1
    until(lambda: one.tier.lookup(key[0], context) is LookupResult.HIT, "the node has answered", 1)
    one.tier.get_finished_jobs()  # nothing is under way
    assert time.monotonic() - began < 5
    one.tier.shutdown()


class _Asked(TriggerKvTier):
    """A tier that only answers whether a request waits for it."""

    awaited = True

    def __init__(self) -> None:
        pass

    @property
    def is_awaited(self) -> bool:
        return self.awaited


class _Connector:
    """A connector without an engine, whose scheduler returns these answers, repeating the last one."""

    def __init__(self, *answers: int | None) -> None:
        self.tiers: list[Any] = [_Asked()]
        self.ends = self.asked = 0
        self.one = TriggerKvTieringConnector.__new__(TriggerKvTieringConnector)
        self.one._engines = [Engine(b"a tier's", is_idle=True)]
        self.one._has_work, self.one._until_ns, self.one._bounding_group_ids = False, 0, ()
        each_takes_1_ms: Any = Fake(monotonic_ns=lambda: self.asked * 1_000_000)
        self.one._clock = each_takes_1_ms

        def look(*_: Any, **__: Any) -> tuple[int | None, bool]:
            self.asked += 1
            self.tells_all = self.one._engines[0].expected is not None
            tokens = answers[min(self.asked, len(answers)) - 1]
            return tokens, tokens is not None

        def end(_: Any) -> None:
            self.ends += 1

        self.one.connector_scheduler = Fake(
            get_num_new_matched_tokens=look,
            update_state_after_alloc=lambda *_: None,
            build_connector_meta=lambda step: f"for {step.name}",
            manager=Fake(on_schedule_end=end, secondary_tiers=self.tiers),
        )

    def matched(self) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = self.one.get_num_new_matched_tokens(Fake(), 0)
        return found


def test_look_up_and_load_of_an_idle_engine_end_within_one_step() -> None:
    it = _Connector(None, None, 64)
    assert it.matched() == (64, True)
    assert (it.asked, it.ends) == (3, 2)
    assert it.one._engines[0].expected is None


def test_a_step_waits_for_no_tier_that_has_something_to_do_or_nothing_under_way_or_for_long() -> None:
    busy = _Connector(None, 64)
    busy.one.update_state_after_alloc(Fake(), None, 0)  # of another request of this step
    assert (busy.matched(), busy.ends) == ((None, False), 0)
    quiet = _Connector(None, 64)
    quiet.tiers[0].awaited = False
    assert (quiet.matched(), quiet.ends) == ((None, False), 1)
    beside = _Connector(None, 64)
    beside.tiers.append(Fake(is_awaited=True))
    assert (beside.matched(), beside.ends) == ((None, False), 0)
    slow = _Connector(None)
    assert (slow.matched(), slow.ends) == ((None, False), 19)
    assert (slow.matched(), slow.ends) == ((None, False), 19)  # of another request of this step
    assert not slow.tells_all
    slow.one.build_connector_meta(Fake(name="a step", num_scheduled_tokens={}))
    assert (slow.matched(), slow.ends) == ((None, False), 38)


def test_the_connector_knows_which_chunks_vllm_will_look_up() -> None:
    one = _Connector(0).one
    groups = [Fake(group_idx=0, tokens_per_chunk=64, hashes_per_chunk=2, sliding_window_size_in_chunks=None)]
    one.scheduler.config = Fake(kv_group_configs=groups)
    hashes = [bytes([number]) * 32 for number in range(9)]
    told = one._keys(Fake(block_hashes=hashes), 100)
    assert told == [make_offload_key(one, 0) for one in (hashes[3], hashes[5], hashes[7])]
    assert one._keys(Fake(block_hashes=hashes), 9 * 32) == []
    groups[0].sliding_window_size_in_chunks = 2
    assert one._keys(Fake(block_hashes=hashes), 0) == []
    groups[0].sliding_window_size_in_chunks = None
    groups.append(groups[0])
    assert one._keys(Fake(block_hashes=hashes), 0) == []


def test_the_connector_tells_the_tier_which_steps_compute_and_copy_nothing() -> None:
    connector = _Connector(0).one
    connector._engines.append(Engine(b"another's"))
    for counts, has_load, is_idle in (({}, False, True), ({"r": 1}, False, False), ({}, True, False)):
        if has_load:
            connector.update_state_after_alloc(Fake(), None, 64)
        step: Any = Fake(name="a step", num_scheduled_tokens=counts)
        assert connector.build_connector_meta(step) == "for a step"
        assert [engine.is_idle for engine in connector._engines] == [is_idle] * 2


def test_the_connector_tells_the_tier_about_adapters_and_a_reset(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    connector = TriggerKvTieringConnector.__new__(TriggerKvTieringConnector)
    connector._engines = [Engine(b"one tier's"), Engine(b"another's")]
    order: list[bytes] = []
    connector.connector_scheduler = Fake(
        on_new_request=lambda request: None,  # noqa: ARG005
        reset_cache=lambda: order.append(connector._engines[0].epoch),
    )
    connector.on_new_request(Fake(request_id="r", lora_request=Fake(lora_path=str(tmp_path))))
    assert [len(engine.adapters["r"]) for engine in connector._engines] == [16, 16]
    connector.reset_cache()
    assert order == [b""]  # what is under way ends under its old name
    assert all(engine.epoch for engine in connector._engines)


def test_other_tiers_are_configured_beside_ours_and_one_is_ours() -> None:
    def extra_of(*tiers: dict[str, Any]) -> Any:
        extra = {"cpu_bytes_to_use": 1, "secondary_tiers": list(tiers)}
        transfer = KVTransferConfig(kv_connector="ours", kv_role="kv_both", kv_connector_extra_config=extra)
        told = tiering_connector._with(Fake(kv_transfer_config=transfer), lambda tier: tier | {"told": "all"})
        return told.kv_transfer_config.kv_connector_extra_config

    files = {"type": "fs", "root_dir": "somewhere"}
    extra = extra_of(files, {"type": "triggerkv"})
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["secondary_tiers"] == [files, {"type": "triggerkv", "told": "all"}]
    with pytest.raises(ConfigError, match="no tier of type"):
        extra_of(files)


def test_a_chunk_of_another_format_is_not_found(node: Node) -> None:
    one, other = Tier(node.target), Tier(node.target)
    assert one.tier._layout == other.tier._layout
    larger = Tier(node.target, chunk_bytes=2 * CHUNK_BYTES)
    assert larger.tier._layout != one.tier._layout
    for each in (one, other, larger):
        each.tier.shutdown()


def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(node: Node) -> None:
    key = keys("roles", 1)
    producer = Tier(node.target, told=Engine(b"roles", loads=False))
    consumer = Tier(node.target, told=Engine(b"roles", saves=False))
    result = consumer.ended(consumer.submit(key))
    assert (result.success, result.transfer_bytes) == (True, 0)
    assert consumer.look(key[0]) is LookupResult.MISS
    assert producer.ended(producer.submit(key)).success
    assert producer.tier.lookup(key[0], producer.request()) is LookupResult.MISS
    assert consumer.look(key[0]) is LookupResult.HIT
    producer.tier.shutdown()
    consumer.tier.shutdown()


def test_an_absent_node_ends_every_job_and_look_up_in_time() -> None:
    one = Tier(NEVER, load_timeout_ms=500, save_timeout_ms=500, lookup_timeout_ms=500)
    began = time.monotonic()
    assert one.look(keys("never", 1)[0], seconds=5) is LookupResult.MISS
    assert not one.ended(one.submit(keys("never", 2), load=True), 5).success
    assert not one.ended(one.submit(keys("never", 2)), 5).success
    assert time.monotonic() - began < 10
    one.tier.shutdown()


def test_a_stopped_node_holds_only_a_part_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Link, "_open_direct", lambda *_: None
    )  # which reads the memory of a node that hangs, too
    with Node(tmp_path / "node") as node:
        one = Tier(node.target, save_timeout_ms=4_000, load_timeout_ms=3_000, lookup_timeout_ms=300)
        assert one.ended(one.submit(keys("before", 2))).success
        with node.paused():
            began = time.monotonic()
            numbers = [one.submit(keys(str(number), 2, first=2 * number)) for number in range(6)]
            loading = one.submit(keys("before", 2), load=True)
            context = one.request()
            assert one.tier.lookup(keys("before", 1)[0], context) is LookupResult.RETRY
            one.tier.on_schedule_end(STEP)
            assert time.monotonic() - began < 2  # the scheduler has waited for nothing
            skipped = [result.job_id for result in one.tier.get_finished_jobs()]
            assert skipped == numbers[2:]  # four chunks of sixteen wait, and that is all
            assert one.look(keys("others", 1)[0], context, 10) is LookupResult.MISS
            ended = one.all_ended(3, 25)
            assert [result.job_id for result in ended] == [*numbers[:2], loading]
            assert not any(result.success for result in ended)
            counts = one.counts()
            assert (counts["skipped_chunks"], counts["unsaved_chunks"], counts["missing_chunks"]) == (8, 4, 2)
        until(lambda: one.ended(one.submit(keys("after", 2))).success, "the node is found again", 30)
        one.tier.shutdown()


def test_a_jobs_time_counts_from_its_submission(tmp_path: Path) -> None:
    """Otherwise a queued job would keep its request, or its chunks, for the sum of all their times."""
    with Node(tmp_path / "node") as node:
        one = Tier(node.target, load_timeout_ms=2_000)
        assert one.ended(one.submit(keys("some", 1))).success

        def slow(places: Sequence[Any], *, timeout_s: float) -> list[bool]:
            assert timeout_s < 2
            time.sleep(1.4)
            return [True] * len(places)

        one.tier._carrier.get = slow  # type: ignore[assignment,method-assign]
        for _ in range(6):
            one.submit(keys("some", 1), load=True)
        assert [result.success for result in one.all_ended(6, 10)] == [True] * 4 + [False] * 2
        one.tier.shutdown()


def test_a_drained_tier_has_a_result_for_every_job(node: Node) -> None:
    one = Tier(node.target)
    numbers = [one.submit(keys(f"drained {number}", 1)) for number in range(4)]
    one.tier.drain_jobs()
    assert sorted(result.job_id for result in one.tier.get_finished_jobs()) == numbers
    assert one.ended(one.submit(keys("drained", 3, first=1))).success  # nothing waits any more
    one.tier.shutdown()


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_shutdown_ends_jobs_that_wait_for_a_stopped_node(tmp_path: Path, transport: str) -> None:
    with Node(tmp_path / "node") as node:
        one = Tier(node.target, transport=transport, save_timeout_ms=60_000, load_timeout_ms=60_000)
        assert one.ended(one.submit(keys("stored", 2))).success
        with node.paused():
            one.submit(keys("stored", 2), load=True)
            one.submit(keys("more", 2))
            time.sleep(0.3)
            began = time.monotonic()
            one.tier.shutdown()
            assert time.monotonic() - began < 10
            under_way = [future for _, _, future in one.tier._under_way.values()]
            assert all(future.done() for future in under_way)
            one.pool[:] = 77
        time.sleep(0.5)
        assert (one.pool == 77).all()  # nothing is written to what is not ours any more
        client = one.tier._carrier._client
        assert isinstance(client, Client)
        with pytest.raises(Closed):
            client.attach()


def test_a_tier_without_its_model_does_not_start(node: Node) -> None:
    with pytest.raises(ConfigError, match="TriggerKvTieringConnector"):
        Tier(node.target, told=cast("Any", "a model"))
    with pytest.raises(ConfigError, match="no_such_thing"):
        Tier(node.target, no_such_thing=1)
