"""An engine that works in steps: each makes one token of every answer under way, and computes a part of some prompts.

A step takes at most `step_tokens`: one for each answer under way; the rest are tokens of prompts, first come first
served. So a long prompt is computed in chunks, and answers are slower meanwhile: continuous batching with chunked
prefill, as in vLLM. The time of a step is a roofline (`Speeds`). The engine's memory holds the KV of running requests;
the remainder keeps blocks of earlier prompts, evicted least recently used first, tails before heads.

What always holds: a block in use is not evicted; running and kept blocks never exceed the memory. Steps with answers
only, which differ only by the growing contexts, are computed together, with the same result as one by one.

What it doesn't do: know the time except as an argument, or the network; drop a request that was admitted.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sim.models import WEIGHT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.models import Model
    from sim.replay.cluster_hardware import Cluster
    from sim.replay.prefill_times import Timings

__all__ = ["Chunk", "Engine", "Memory", "Speeds", "Work"]


class Memory:
    """Blocks of KV in an engine's GPUs. Unused ones are kept, and found by later prompts."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._users: dict[int, int] = {}  # refcounts of the blocks that can be found
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.taken_blocks = 0  # in use, including those that can't be found
        self.evicted = 0

    @property
    def idle_blocks(self) -> int:
        """Kept, and unused."""
        return len(self._idle)

    def cached(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are present, without a gap."""
        for count, block in enumerate(blocks):
            if block not in self._users:
                return count
        return len(blocks)

    def admit(self, blocks: Sequence[int], hits: int, need: int) -> bool:
        """Hold the first `hits` blocks, which are present, and room for the rest of `need`; or do nothing."""
        idle = sum(block in self._idle for block in blocks[:hits])
        more = need - hits + idle
        if self.taken_blocks + more > self.capacity_blocks:
            return False
        for block in blocks[:hits]:
            self._idle.pop(block, None)
            self._users[block] += 1
        self.taken_blocks += more
        self._shrink()
        return True

    def computed(self, blocks: Sequence[int]) -> list[int]:
        """Turn room into blocks that can be found; returns the new ones, without those that already existed."""
        fresh = [block for block in blocks if block not in self._users]
        for block in fresh:
            self._users[block] = 1
        return fresh

    def leave(self, blocks: Sequence[int], rest: int) -> None:
        """Release these blocks, and this much room."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._idle[block] = None
                self.taken_blocks -= 1
        self.taken_blocks -= rest
        self._shrink()

    def _shrink(self) -> None:
        while self._idle and self.taken_blocks + len(self._idle) > self.capacity_blocks:
            block, _ = self._idle.popitem(last=False)
            del self._users[block]
            self.evicted += 1


@dataclass(slots=True)
class Work:
    """A request on an engine."""

    number: int
    blocks: tuple[int, ...]  # the whole blocks of its prompt
    need: int  # blocks of memory until the answer is complete
    input_tokens: int
    output_tokens: int
    done_tokens: int = 0  # of the prompt, present or computed
    held: tuple[int, ...] = ()  # blocks that it uses and others can find
    begun_s: float = -1.0  # its first step
    first_s: float = 0.0  # its first token


class Chunk(NamedTuple):
    """The tokens of a prompt that one step computes, after those already computed."""

    work: Work
    tokens: int


class Speeds:
    """How long a step takes."""

    def __init__(self, model: Model, cluster: Cluster, timings: Timings | None = None) -> None:
        self._model, self._timings = model, timings
        self._flops_per_s = cluster.gpus_per_engine * cluster.gpu_flops_per_s * cluster.gpu_mfu
        self._bytes_per_s = cluster.gpus_per_engine * cluster.gpu_memory_bytes_per_s
        self._overhead_s = cluster.step_overhead_s
        self._kv_s = model.token_bytes / self._bytes_per_s

    def _linear_s(self, tokens: int) -> float:
        """Everything but attention: the operations, and reading the weights that they need, which overlap in part.

        Measurements show that neither hides the other near the knee: of Llama-3.1-8B on an RTX PRO 6000, times from
        1 to 2,048 tokens (published by LLMServingSim) are within 5 % of this, and 27 % above the larger of the two.
        """
        entry = self._model
        touched = min(entry.parameters, tokens * (entry.active_parameters or entry.parameters))
        return math.hypot(
            tokens * entry.token_flops / self._flops_per_s, WEIGHT_BYTES * touched / self._bytes_per_s
        )

    def step_s(self, chunks: Sequence[Chunk], answers: int, context_tokens: float) -> float:
        """One step of chunks of prompts and a token of each answer; the contexts of all answers together."""
        tokens = sum(chunk.tokens for chunk in chunks)
        kv_s = context_tokens * self._kv_s
        if self._timings is not None and chunks:
            measured = sum(self._timings.of(chunk.tokens, chunk.work.done_tokens) for chunk in chunks)
            return measured + answers * self._model.token_flops / self._flops_per_s + kv_s
        attention = sum(self._model.attention_flops(one.tokens, one.work.done_tokens) for one in chunks)
        return self._overhead_s + self._linear_s(tokens + answers) + attention / self._flops_per_s + kv_s

    def stretch_s(self, steps: int, answers: int, context_tokens: float) -> float:
        """Consecutive steps of decoding only, each sequence a token longer than in the one before."""
        one_s = self._overhead_s + self._linear_s(answers)
        return steps * one_s + self._kv_s * (steps * context_tokens + answers * steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, answers: int, context_tokens: float) -> int:
        """The least number of such steps that take this long; at least one."""
        first_s = self.stretch_s(1, answers, context_tokens)
        half = answers * self._kv_s / 2  # half of the increase of each step over the one before
        linear = first_s - half
        if half > 0:
            steps = (math.sqrt(linear * linear + 4 * half * max(0.0, seconds)) - linear) / (2 * half)
        else:
            steps = seconds / first_s
        return max(1, math.ceil(steps - 1e-9))


class Engine:
    """The steps of one engine. Its driver begins a stretch, and ends it when its time is over."""

    def __init__(self, memory: Memory, speeds: Speeds, step_tokens: int, slots: int) -> None:
        self.memory, self.speeds = memory, speeds
        self._step_tokens, self.slots = step_tokens, slots
        self.prompts: deque[Work] = deque()
        self.queued_tokens = 0  # tokens of admitted prompts that are not computed yet
        self._answers: list[tuple[int, int, Work]] = []  # by the step in which each ends
        self._context_tokens = 0  # of all answers
        self._steps = 0  # so far
        self.running = 0  # requests that were admitted and are not answered
        self.start_s = self.end_s = 0.0
        self.chunks: list[Chunk] = []
        self._stretch = 0  # steps of the stretch under way; 0: none

    @property
    def is_working(self) -> bool:
        """Whether a stretch is under way."""
        return self._stretch > 0

    @property
    def token_s(self) -> float:
        """How long a token of an answer would take if nothing changed."""
        answers = len(self._answers)
        return self.speeds.stretch_s(1, max(1, answers), self._context_tokens)

    def add(self, work: Work) -> None:
        """Admit a prompt whose stored KV has arrived: the rest is computed here."""
        self.prompts.append(work)
        self.queued_tokens += work.input_tokens - work.done_tokens

    def answer(self, work: Work) -> None:
        """Add an answer whose first token is made, here or elsewhere."""
        if work.output_tokens > 1:
            heapq.heappush(self._answers, (self._steps + work.output_tokens - 1, work.number, work))
            self._context_tokens += work.input_tokens + 1

    def begin(self, now_s: float) -> bool:
        """Begin the next stretch; returns whether there is anything to do."""
        assert not self._stretch
        answers = len(self._answers)
        room = self._step_tokens - answers
        self.chunks = []
        for work in self.prompts:
            if room <= 0:
                break
            tokens = min(room, work.input_tokens - work.done_tokens)
            self.chunks.append(Chunk(work, tokens))
            room -= tokens
            if work.begun_s < 0:
                work.begun_s = now_s
        self.start_s = now_s
        if self.chunks:
            self._stretch = 1
            self.end_s = now_s + self.speeds.step_s(self.chunks, answers, self._context_tokens)
        elif answers:
            self._stretch = self._answers[0][0] - self._steps
            self.end_s = now_s + self.speeds.stretch_s(self._stretch, answers, self._context_tokens)
        return self._stretch > 0

    def interrupt(self, now_s: float) -> bool:
        """End a stretch of answers only with the current step; returns whether its end has changed."""
        if self.chunks or self._stretch < 2:  # noqa: PLR2004 - a single step can't be shorter
            return False
        answers, context_tokens = len(self._answers), self._context_tokens
        steps = self.speeds.steps_within(now_s - self.start_s, answers, context_tokens)
        if steps >= self._stretch:
            return False
        self._stretch = steps
        self.end_s = self.start_s + self.speeds.stretch_s(steps, answers, context_tokens)
        return True

    def finish(self) -> tuple[list[Work], list[Work]]:
        """End the stretch; returns the requests whose prompts are computed, and those whose answers are complete."""
        self._steps += self._stretch
        self._context_tokens += self._stretch * len(self._answers)
        self._stretch = 0
        written = []
        while self._answers and self._answers[0][0] <= self._steps:
            work = heapq.heappop(self._answers)[2]
            self._context_tokens -= work.input_tokens + work.output_tokens
            written.append(work)
        prompted = []
        for work, tokens in self.chunks:
            work.done_tokens += tokens
            self.queued_tokens -= tokens
            if work.done_tokens == work.input_tokens:
                work.first_s = self.end_s
                assert self.prompts[0] is work
                self.prompts.popleft()
                prompted.append(work)
        self.chunks = []
        return prompted, written
