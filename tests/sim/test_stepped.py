"""Engines that work in steps: checked by hand, against each other, and against published measurements."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.models import model
from sim.replay.cluster_hardware import Cluster
from sim.replay.engine import Engine, Memory, Speeds, Work
from sim.replay.run import Terms
from sim.replay.simulate import Result, simulate
from sim.replay.workload import Chats, Request, chats
from sim.units import OutOfRange
from tests.sim.replay_rig import ONE, TINY, requests

if TYPE_CHECKING:
    from sim.replay.cluster_hardware import PathName

# 1,000 tokens a second, 1 ms a step, memory that costs nothing: a step's length can be added up by hand.
STEPS = replace(
    ONE,
    decode_slots=8,
    step_tokens=100,
    step_overhead_s=1e-3,
    gpu_memory_bytes_per_s=1e15,
)


def _run(
    work: list[Request], cluster: Cluster = STEPS, path: PathName = "recompute", **terms: object
) -> Result:
    return simulate(work, TINY, cluster, path, Terms(engine="steps", **terms))  # type: ignore[arg-type]


def test_a_single_prompt_is_computed_in_chunks() -> None:
    result = _run(requests((0, 250, 0, [1])))
    assert result.ttft_s.tolist() == [pytest.approx(0.25 + 3 * 1e-3, rel=1e-3)]


def test_an_answer_takes_one_step_a_token() -> None:
    result = _run(requests((0, 100, 11, [1])))
    assert result.ttft_s[0] == pytest.approx(0.101, rel=1e-3)
    assert result.token_s[0] == pytest.approx(2e-3, rel=1e-3), "1 ms for the token, 1 ms for the step"
    assert result.duration_s == pytest.approx(0.101 + 10 * 2e-3, rel=1e-3)


def test_answers_are_slower_while_a_prompt_is_computed() -> None:
    """Interference: with 990 tokens in chunks of 99 beside the answer's one, each of its tokens takes 101 ms."""
    work = requests((0, 100, 101, [1]), (0.15, 990, 0, [2, 3]))
    alone, beside = _run(work[:1]), _run(work)
    assert alone.token_s[0] == pytest.approx(2e-3, rel=1e-3)
    assert beside.token_s[0] == pytest.approx((90 * 2e-3 + 10 * 101e-3) / 100, rel=0.01)


def test_an_engine_does_not_compute_stored_blocks_again() -> None:
    work = requests((0, 1024, 0, [1, 2]), (10, 1124, 0, [1, 2, 3]))
    result = _run(work)
    assert result.cached_tokens == 1024
    assert result.ttft_s[1] == pytest.approx(0.101, rel=1e-3)
    small = replace(STEPS, gpu_memory_bytes=2e9 / 0.9 + 3.5 * 512 * 2000 / 0.9)  # room for three blocks
    forgotten = requests((0, 1024, 0, [1, 2]), (10, 1500, 0, [7, 8, 9]), (20, 1124, 0, [1, 2, 3]))
    assert _run(forgotten, small).cached_tokens == 0


def test_a_prompt_goes_to_the_engine_that_has_its_prefix_unless_that_one_is_busier() -> None:
    two = replace(STEPS, engines=2, decode_slots=8)
    quiet = requests((0, 1024, 0, [1, 2]), (10, 512, 0, [9]), (20, 1124, 0, [1, 2, 3]))
    assert _run(quiet, two).cached_tokens == 1024
    busy = requests((0, 1024, 0, [1, 2]), (10, 5120, 0, list(range(10, 20))), (10.001, 1124, 0, [1, 2, 3]))
    assert _run(busy, two).ttft_s[2] < 1.2, "it does not wait behind five seconds of another's prompt"


def test_the_number_of_requests_on_an_engine_is_bounded() -> None:
    one = replace(STEPS, decode_slots=1)
    result = _run(requests((0, 100, 51, [1]), (0, 100, 0, [2])), one)
    assert result.ttft_s[1] == pytest.approx(0.101 + 50 * 2e-3 + 0.101, rel=1e-2)


def test_room_is_free_again_when_an_answer_is_complete() -> None:
    small = replace(STEPS, gpu_memory_bytes=2e9 / 0.9 + 3.5 * 512 * 2000 / 0.9)  # three blocks
    result = _run(requests((0, 600, 200, [1, 2]), (0, 600, 200, [3, 4]), (0, 600, 200, [5, 6])), small)
    assert result.ttft_s[0] < result.ttft_s[1] < result.ttft_s[2] < 5
    assert result.ttft_s.min() > 0


def test_blocks_lost_from_gpus_are_fetched_from_the_store() -> None:
    small = replace(STEPS, gpu_memory_bytes=2e9 / 0.9 + 3.5 * 512 * 2000 / 0.9)
    work = requests((0, 1024, 0, [1, 2]), (10, 1500, 0, [7, 8, 9]), (20, 1124, 0, [1, 2, 3]))
    result = _run(work, small, "triggered")
    assert (result.cached_tokens, result.fetched_tokens) == (0, 1024)
    assert result.ttft_s[2] == pytest.approx(0.101 + result.fetch_s[2], rel=1e-2)
    assert result.put_bytes == (1024 + 1500 + 100) * 2000


def test_of_a_prefix_only_blocks_missing_on_the_gpus_are_fetched() -> None:
    two = replace(STEPS, engines=2)
    # The second turn is computed where the first was not: its engine is busy. The third finds part of it here.
    work = requests((0, 1024, 0, [1, 2]), (10, 1536, 0, [1, 2, 3]), (20, 2148, 0, [1, 2, 3, 4, 5]))
    result = _run(work, two, "triggered")
    assert result.cached_tokens + result.fetched_tokens == 1024 + 1536


def test_prefill_and_decode_pools_hand_over_the_kv() -> None:
    pools = replace(STEPS, engines=2, prefill_engines=1)
    result = _run(requests((0, 100, 11, [1])), pools)
    assert result.ttft_s[0] == pytest.approx(0.101, rel=1e-3)
    moved_s = 100 * 2000 * (8 / 100e9 + 2 / 55e9)
    assert result.duration_s == pytest.approx(0.101 + moved_s + 10 * 2e-3, rel=1e-2)
    assert result.duration_s > 0.121
    beside = requests((0, 100, 101, [1]), (0.15, 990, 0, [2, 3]))
    assert _run(beside, pools).token_s[0] == pytest.approx(2e-3, rel=0.02), "no prompt slows an answer down"
    with pytest.raises(OutOfRange, match="prefill_engines is 2; it takes engines, fewer than the 2 engines"):
        _run(beside, replace(pools, prefill_engines=2))


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 900), st.integers(0, 60), st.integers(0, 5)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(["recompute", "triggered", "cpu"]),
    st.integers(0, 1),
)
def test_nothing_is_lost_and_memory_is_never_exceeded(
    rows: list[tuple[float, int, int, int]], path: PathName, prefill_engines: int
) -> None:
    work = [
        Request(arrival_s, tokens, answer, tuple(100 * user + i for i in range(-(-tokens // 100))), user)
        for arrival_s, tokens, answer, user in sorted(rows)
    ]
    room = 40 * 100 * TINY.token_bytes
    tight = replace(
        STEPS, engines=2, prefill_engines=prefill_engines, gpu_memory_bytes=(2e9 + room) / 0.9 + 1
    )
    seen: list[Memory] = []
    original = Memory.admit

    def watched(self: Memory, *arguments: object) -> bool:
        admitted = original(self, *arguments)  # type: ignore[arg-type]
        seen.append(self)
        assert self.taken_blocks + self.idle_blocks <= self.capacity_blocks
        return admitted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "admit", watched)
        result = _run(work, tight, path, block_tokens=100)
    assert (result.ttft_s > 0).all(), "each has its first token"
    assert all(memory.taken_blocks == 0 for memory in seen), "and when all is over nobody holds anything"
    written = np.array([request.output_tokens > 1 for request in work])
    assert (~np.isnan(result.token_s) == written).all()


@given(st.lists(st.integers(2, 200), min_size=1, max_size=6), st.floats(0, 30))
def test_a_stretch_of_steps_equals_its_steps_one_by_one(answers: list[int], asked_s: float) -> None:
    speeds = Speeds(model("llama-3-8b"), Cluster())

    def engine() -> Engine:
        made = Engine(Memory(10**6), speeds, 8192, 256)
        for number, tokens in enumerate(answers):
            made.answer(Work(number, (), 1, 1000 * (number + 1), tokens))
        return made

    def ends(one: Engine, until_s: float) -> list[tuple[int, float]]:
        found, now_s = [], 0.0
        while one.begin(now_s):
            if until_s > now_s:
                one.interrupt(until_s)
            now_s = one.end_s
            found += [(work.number, now_s) for work in one.finish()[1]]
        return found

    whole, cut = ends(engine(), 0.0), ends(engine(), asked_s)
    assert [number for number, _ in whole] == [number for number, _ in cut]
    assert [end_s for _, end_s in whole] == pytest.approx([end_s for _, end_s in cut])


def test_the_same_input_gives_the_same_result_and_more_load_is_slower() -> None:
    def run(sessions_per_s: float) -> Result:
        work = chats(Chats(sessions=60, sessions_per_s=sessions_per_s))
        return simulate(work, model("llama-3-70b"), Cluster(), "triggered", Terms(engine="steps"))

    calm, again, busy = run(0.5), run(0.5), run(50)
    assert calm.ttft_s.tolist() == again.ttft_s.tolist()
    assert busy.ttft_quantile_s(0.99) > calm.ttft_quantile_s(0.99)
    assert np.nanquantile(busy.token_s, 0.9) > np.nanquantile(calm.token_s, 0.9)


# --- against a real engine

PUBLISHED = Path(__file__).parent / "published" / "vllm_llama_3_1_8b.csv"
# All numbers of the GPU are from the layers' times that were published beside it: 2,048 tokens in 76.7 ms, one in 10.1
# ms, and KV at 1.53 TB/s. What a step takes beside its layers is not among them; this is our default.
RTX_PRO_6000 = replace(
    ONE,
    gpu_flops_per_s=503e12,
    gpu_mfu=0.887,
    gpu_memory_bytes=96e9,
    gpu_memory_bytes_per_s=1.5e12,
    decode_slots=128,
    step_tokens=2048,
    step_overhead_s=Cluster().step_overhead_s,
)


def test_the_deviation_from_vllm_on_a_real_gpu() -> None:
    with PUBLISHED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    fresh, work = 0, []
    for user, row in enumerate(rows):
        tokens, answer = int(row["input_tokens"]), int(row["output_tokens"])
        blocks = tuple(range(fresh, fresh + -(-tokens // 16)))
        work.append(Request(float(row["arrival_s"]), tokens, answer, blocks, user))
        fresh += len(blocks)
    terms = Terms(engine="steps", block_tokens=16)
    result = simulate(work, model("llama-3-8b"), RTX_PRO_6000, "recompute", terms)
    ttft_s, latency_s = (np.array([float(row[name]) for row in rows]) for name in ("ttft_s", "latency_s"))
    answers = np.array([request.output_tokens for request in work])
    token_s = (latency_s - ttft_s) / (answers - 1)
    ours_s = result.ttft_s + result.token_s * (answers - 1)

    def off(ours: np.ndarray, theirs: np.ndarray) -> float:
        return float(ours.mean() / theirs.mean() - 1)

    found = off(result.token_s, token_s), off(ours_s, latency_s), off(result.ttft_s, ttft_s)
    assert found == pytest.approx((-0.10, -0.14, -0.26), abs=0.01), "docs/simulator.md says so"


# --- prefetch

THINKS = replace(ONE, node_memory_bytes=1e9, drive_read_bytes_per_s=1e7)


def _thinking(work: list[Request], **terms: object) -> Result:
    return simulate(work, TINY, THINKS, "triggered", Terms(always_get=True, **terms))  # type: ignore[arg-type]


def test_a_user_recognised_early_finds_the_history_in_memory() -> None:
    """The history is put at once, and leaves the node's memory before the user returns."""
    others = [(1.1 + i, 1024, 0, [100 + 2 * i, 101 + 2 * i]) for i in range(2)]
    small = replace(THINKS, node_memory_bytes=2.5 * 512 * 2000)
    rows = requests((0, 1024, 0, [1, 2]), *others, (20, 1100, 0, [1, 2, 3]))
    users = [0, 1, 2, 0]
    work = [request._replace(user=user) for request, user in zip(rows, users, strict=True)]

    def fetch_s(lead_s: float) -> Result:
        terms = Terms(always_get=True, prefetch_lead_s=lead_s)
        return simulate(work, TINY, small, "triggered", terms)

    never, early, late = fetch_s(0), fetch_s(5), fetch_s(0.05)
    assert never.fetch_s[3] == pytest.approx(1024 * 2000 / 1e7, rel=0.01)
    assert early.fetch_s[3] < 0.01
    assert (early.ahead_blocks, early.ahead_used) == (2, 2)
    assert late.fetch_s[3] > 0.15, "what is not there yet is read again: one does not wait for the other"


def test_a_prefetch_for_a_user_without_a_request_counts_as_wasted() -> None:
    rows = requests((0, 1024, 0, [1, 2]), (3, 1024, 0, [5, 6]), (20, 1100, 0, [1, 2, 3]))
    work = [request._replace(user=user) for request, user in zip(rows, (0, 1, 0), strict=True)]
    small = replace(THINKS, node_memory_bytes=512 * 2000)

    def ahead(false_share: float) -> tuple[int, int]:
        terms = Terms(always_get=True, prefetch_lead_s=5, prefetch_false_share=false_share)
        result = simulate(work, TINY, small, "triggered", terms)
        return result.ahead_blocks, result.ahead_used

    assert ahead(0) == (2, 1), "there is room for one block in the node's memory"
    assert ahead(1)[1] == 0, "and that is the other user's then"


def test_prefetch_needs_memory_in_the_nodes() -> None:
    with pytest.raises(OutOfRange, match="node_memory_bytes is 0; it takes bytes, above 0"):
        simulate(requests((0, 10, 0, [1]), (1, 10, 0, [1])), TINY, ONE, "triggered", Terms(prefetch_lead_s=1))
