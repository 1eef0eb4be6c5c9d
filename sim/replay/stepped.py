"""A run whose engines work in steps (`sim.replay.engine`): batches, chunks of prompts, a prefix cache in the GPUs.

A request goes to the engine with the fewest tokens to compute before its first one: those waiting there, plus those of
its own prompt that are not in that engine's memory. The rest is looked up in the store. With `prefill_engines`, these
only compute prompts, and the KV goes over the NICs to one of the others, which generate answers.

What always holds: the same as in `sim.replay.run`; a request is admitted to an engine with room for its prompt and
answer and a place among `decode_slots`, first come first served.

What it doesn't do: preempt; let prompts reuse KV of answers in the GPUs, since a trace names blocks of prompts only.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.replay.engine import Engine, Memory, Speeds, Work
from sim.replay.events import MESSAGE
from sim.replay.kv_homes import home_of_user
from sim.replay.run import TIMERS, Get, Put, Run
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.models import Model
    from sim.replay.cluster_hardware import Cluster, PathName
    from sim.replay.events import Events
    from sim.replay.run import Terms
    from sim.replay.workload import Request

__all__ = ["SteppedRun"]

_MOVES = 3  # kind of trains: from a prefill engine to one that generates answers


class _Entry(NamedTuple):
    """A request that an engine has admitted."""

    request: Request
    work: Work
    engine: int
    stored: int  # how many of its first blocks were stored when it was admitted


class SteppedRun(Run):
    """One run."""

    def __init__(
        self,
        events: Events,
        requests: Sequence[Request],
        model: Model,
        cluster: Cluster,
        path: PathName,
        terms: Terms,
    ) -> None:
        super().__init__(events, requests, model, cluster, path, terms)
        if cluster.decode_slots > cluster.step_tokens:
            raise OutOfRange("step_tokens", cluster.step_tokens, "tokens", "at least as many as decode_slots")
        if cluster.prefill_engines >= cluster.engines:
            accepted = f"fewer than the {cluster.engines} engines: the others write answers"
            raise OutOfRange("prefill_engines", cluster.prefill_engines, "engines", accepted)
        capacity = int(self.kv_room // (terms.block_tokens * self.token_bytes))
        speeds = Speeds(model, cluster, terms.timings)
        self.engines = [
            Engine(Memory(capacity), speeds, cluster.step_tokens, cluster.decode_slots)
            for _ in range(cluster.engines)
        ]
        self.split = cluster.prefill_engines  # 0: every engine does both
        self.entries: dict[int, _Entry] = {}
        self.coming = [
            0
        ] * cluster.engines  # tokens to compute of prompts that are admitted and being fetched
        self.timers: dict[int, tuple[int, float]] = {}
        self.moves: dict[int, tuple[int, int]] = {}
        self.to_move: deque[int] = deque()
        self.put_done: dict[int, int] = {}  # blocks of a prompt that were put, or are stored

    def arrive(self, number: int, request: Request) -> None:
        """Choose the engine, and admit the request or let it wait there."""
        self.now_s = request.arrival_s
        need = self._blocks_of(request.input_tokens + request.output_tokens)
        if need > self.engines[0].memory.capacity_blocks:
            what = f"of {request.input_tokens + request.output_tokens} tokens, {need} blocks"
            accepted = f"within the {self.engines[0].memory.capacity_blocks} that an engine has room for"
            raise OutOfRange("a request", what, "a request", f"{accepted} (gpu_memory_bytes)")
        whole = request.blocks[: request.input_tokens // self.terms.block_tokens]

        def ahead(one: int) -> float:
            engine = self.engines[one]
            waits = sum(request.input_tokens for _, request in self.waiting[one])
            cached = engine.memory.cached(whole) * self.terms.block_tokens
            return waits + self.coming[one] + engine.queued_tokens - cached

        engine = min(range(self.split or self.cluster.engines), key=ahead)
        if self.waiting[engine] or not self._admitted(number, request, engine):
            self.waiting[engine].append((number, request))

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.terms.block_tokens)

    def _admitted(self, number: int, request: Request, one: int) -> bool:
        """Admit a request, if there is room, and fetch or compute what is not in the engine's memory."""
        engine, block_tokens = self.engines[one], self.terms.block_tokens
        whole = request.blocks[: request.input_tokens // block_tokens]
        here = engine.memory.cached(whole)
        tokens = request.input_tokens + (0 if self.split else request.output_tokens)
        need = self._blocks_of(tokens)
        if engine.running >= engine.slots or not engine.memory.admit(whole, here, need):
            return False
        engine.running += 1
        self.admitted_s[number] = self.now_s
        # The last token must be computed, whatever is there: it makes the first one of the answer.
        here_tokens = min(here * block_tokens, request.input_tokens - 1)
        self.cached_tokens += here_tokens
        work = Work(number, whole, need, request.input_tokens, request.output_tokens, here_tokens)
        work.held = whole[:here]
        hits = 0
        if self.path != "recompute":
            node = home_of_user(request.user, self.cluster.nodes)
            hits = self.stored[node].prefix(request.blocks)
            self.block_hits += hits
        self.entries[number] = _Entry(request, work, one, hits)
        self.put_done[number] = hits
        more = min(hits * block_tokens, request.input_tokens - 1) - here_tokens
        if more <= 0 or not self._is_worth_it(request, here_tokens, more):
            self.prefill(number, request, one, self.now_s, 0, here)
            return True
        self.coming[one] += request.input_tokens - here_tokens - more
        self.fetch(Get(number, request, one, more, hits, 0.0, here), node)
        return True

    def _is_worth_it(self, request: Request, here_tokens: int, more: int) -> bool:
        self.found_tokens += more
        left = request.input_tokens - here_tokens
        rest_s = self.prefill_s(left - more, here_tokens + more)
        saved_s = self.prefill_s(left, here_tokens) - rest_s
        return self.terms.always_get or more * self.token_bytes / self.get_bytes_per_s < saved_s

    def prefill(
        self, number: int, request: Request, engine: int, ready_s: float, fetched_tokens: int, hits: int
    ) -> None:
        """All that had to be fetched has arrived: wait for the next step."""
        del hits
        work = self.entries[number].work
        if fetched_tokens:
            work.done_tokens += fetched_tokens
            self.coming[engine] -= request.input_tokens - work.done_tokens
        self.fetch_s[number] = ready_s - self.admitted_s[number]
        self.engines[engine].add(work)
        self._wake(engine)

    def _wake(self, one: int) -> None:
        """Handle new work: an idle engine begins, one that only generates answers ends its stretch early."""
        engine = self.engines[one]
        if not engine.is_working:
            self._begin(one)
        elif engine.interrupt(self.now_s):
            self._time(one)

    def _begin(self, one: int) -> None:
        engine = self.engines[one]
        if not engine.begin(self.now_s):
            return
        self._time(one)
        if engine.chunks:
            self.events.reserve(self.plant.prefill[one], self.now_s, engine.end_s - self.now_s)
            if self.path != "recompute":
                for work, tokens in engine.chunks:
                    self._put_chunk(work, tokens, one)

    def _time(self, one: int) -> None:
        end_s = max(self.now_s, self.engines[one].end_s)
        self.timers[self.events.add_train(end_s, 0.0, self.plant.timer, kind=TIMERS)] = one, end_s

    def _put_chunk(self, work: Work, tokens: int, one: int) -> None:
        """Put blocks that this step completes, layer by layer; the prompt's last one even if it isn't full."""
        request, block_tokens = self.entries[work.number].request, self.terms.block_tokens
        done = work.done_tokens + tokens
        first = self.put_done[work.number]
        last = len(request.blocks) if done == request.input_tokens else done // block_tokens
        if last <= first:
            return
        self.put_done[work.number] = last
        node = home_of_user(request.user, self.cluster.nodes)
        stored, writing = self.stored[node], self.writing[node]
        new = [block for block in request.blocks[first:last] if block not in stored and block not in writing]
        if new:
            share = len(new) / (last - first)
            size_bytes = share * (min(done, last * block_tokens) - first * block_tokens) * self.token_bytes
            writing.update(new)
            engine = self.engines[one]
            put = Put(node, (*request.blocks[:first], *new), first, max(0.0, size_bytes), engine.end_s)
            self.put_layers(put, one, engine.start_s, engine.end_s)

    def through(self, time_s: float, train: int) -> None:
        """A train has arrived: a stretch's end, KV at another engine, or one that every run has."""
        if train in self.timers:
            self.now_s = time_s
            one, end_s = self.timers.pop(train)
            engine = self.engines[one]
            if engine.is_working and max(end_s, engine.end_s) == end_s:
                self._finish(one)
        elif train in self.moves:
            self.now_s = time_s
            self._moved(*self.moves.pop(train))
        else:
            super().through(time_s, train)

    def _finish(self, one: int) -> None:
        """A stretch has ended: first tokens, written answers, room for waiting requests, and the next stretch."""
        engine = self.engines[one]
        prompted, written = engine.finish()
        for work in prompted:
            self._first_token(work, one)
        for work in written:
            self._leave(work, one)
        if not engine.is_working:
            self._begin(one)

    def _first_token(self, work: Work, one: int) -> None:
        number, engine = work.number, self.engines[one]
        request = self.entries[number].request
        fresh = engine.memory.computed(work.blocks[len(work.held) :])
        work.held = (*work.held, *fresh)
        self.ttft_s[number] = self.now_s - request.arrival_s
        admitted_s = self.admitted_s.pop(number)
        fetched_s = admitted_s + self.fetch_s[number]
        self.queued_s[number] = work.begun_s - fetched_s + admitted_s - request.arrival_s
        if self.deadline is not None and self.ttft_s[number] > self.deadline.ttft_s:
            self.late += 1
        self.end_s = max(self.end_s, self.now_s)
        if work.output_tokens <= 1:
            self._leave(work, one)
        elif self.split:
            self.to_move.append(number)
            self._move()
        else:
            self._answer(work, one)

    def _answer(self, work: Work, one: int) -> None:
        engine, request = self.engines[one], self.entries[work.number].request
        engine.answer(work)
        if self.path != "recompute":
            node = home_of_user(request.user, self.cluster.nodes)
            self.put_answer(work.number, request, node, one, self.now_s, engine.token_s)

    def _leave(self, work: Work, one: int) -> None:
        """An answer is complete."""
        number, engine = work.number, self.engines[one]
        if work.output_tokens > 1:
            spent_s = self.now_s - work.first_s
            self.token_s[number] = spent_s / (work.output_tokens - 1)
            self.events.reserve(self.plant.decode[one], work.first_s, spent_s)
        self.end_s = max(self.end_s, self.now_s)
        del self.entries[number], self.put_done[number]
        self._free(work, one)
        engine.running -= 1
        self._admit_waiting(one)

    def _free(self, work: Work, one: int) -> None:
        self.engines[one].memory.leave(work.held, work.need - len(work.held))

    def _admit_waiting(self, one: int) -> None:
        line = self.waiting[one]
        while line and self._admitted(*line[0], one):
            line.popleft()
        if self.to_move:
            self._move()

    def _move(self) -> None:
        """Move computed prompts to engines that generate answers, in turn, as soon as one has room."""
        while self.to_move:
            number = self.to_move[0]
            request, _, source, _ = self.entries[number]
            need = self._blocks_of(request.input_tokens + request.output_tokens)
            roomy = range(self.split, self.cluster.engines)
            target = min(roomy, key=lambda one: self.engines[one].running)
            engine = self.engines[target]
            if engine.running >= engine.slots or not engine.memory.admit((), 0, need):
                return
            self.to_move.popleft()
            engine.running += 1
            gpus = self.cluster.gpus_per_engine
            messages = np.empty(gpus, dtype=MESSAGE)
            messages["start_s"], messages["pages"] = self.now_s, self.model.layers * len(request.blocks)
            messages["units"] = request.input_tokens * self.token_bytes / gpus
            messages["first"] = self.plant.put_first + source * gpus + np.arange(gpus)
            messages["then"] = self.plant.get_then + target * gpus + np.arange(gpus)
            self.moves[self.events.add_list(messages, _MOVES)] = number, target

    def _moved(self, number: int, target: int) -> None:
        request, work, source, stored = self.entries[number]
        self._free(work, source)
        self.engines[source].running -= 1
        work.need, work.held = self._blocks_of(request.input_tokens + request.output_tokens), ()
        self.entries[number] = _Entry(request, work, target, stored)
        self._answer(work, target)
        self._wake(target)
        self._admit_waiting(source)
