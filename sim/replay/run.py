"""A run of requests through a cluster: what is found, fetched, computed and put, and when.

A request goes to the engine that is free first among those with room for its KV until its answer ends; if there is
none, it waits. The stored part of its prefix is fetched or recomputed; then the rest is prefilled, first come first
served. Each layer's KV is put as soon as that layer is computed; during the answer, the KV of every few tokens is put.
Other requests find a block only once all of its put is on a drive.

Here an engine computes one prompt at a time, and each token of an answer takes the same time; `sim.replay.stepped` has
engines that work in steps.

Prefetch: some time before a prompt the user is recognised, as by the product's match-action table, and the stored
blocks of the user's last prompt are read into the node's memory.

What always holds: the same requests, cluster and settings give the same results. The path `recompute` stores
nothing: it is the cost of keeping only the text.

How messages stand for pages: the product moves one page at a time. Here the pages of a request that go between the same
GPU and the same drive, for one part of the layers, are one message, which is charged the cost of each page.

What it doesn't do: failures. KV of answers is put, and costs time; only the trace decides whether a later prompt uses
it, and it names blocks of prompts only.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from sim.models import WEIGHT_BYTES
from sim.replay.catalogue import Catalogue, policy_maker
from sim.replay.cluster_hardware import Plant
from sim.replay.events import LOTS, MESSAGE, scatter
from sim.replay.kv_homes import drive_homes, home_of_user
from sim.replay.workload import BLOCK_TOKENS
from sim.units import OutOfRange, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from sim.models import Model
    from sim.replay.cluster_hardware import Cluster, PathName
    from sim.replay.events import Events
    from sim.replay.prefill_times import Timings
    from sim.replay.workload import Request

    Array = npt.NDArray[np.float64]

__all__ = [
    "ENGINES",
    "PUTS",
    "TIMERS",
    "Deadline",
    "EngineName",
    "Get",
    "Put",
    "Run",
    "Terms",
    "kv_room_bytes",
    "prefill_s",
    "prefill_tokens_per_s",
]

_MEMORY_SHARE = 0.9  # of a GPU's, for weights and KV; the rest is what a step works with
_MESSAGES = 128  # per request, about: its pages are combined into this many, at least one per GPU and drive
_PUT_PARTS_MIN, _OVERLAP_PARTS_MIN = 2, 4  # of the layers, though they make more messages
_NO_DRIVES = np.zeros(LOTS, dtype=np.int32)
PUTS = 0  # kinds of trains
_GETS = 1
TIMERS = 2
EngineName = Literal["whole", "steps"]
ENGINES: tuple[EngineName, ...] = ("whole", "steps")


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of a run, besides the cluster and the path."""

    decode_put_tokens: int = 16  # tokens of an answer after which its KV is put
    policy: str = "lru"
    always_get: bool = False  # otherwise whatever is faster on an idle cluster: fetching or computing
    overlap: bool = False  # a layer is computed while the KV of later ones is fetched
    block_tokens: int = BLOCK_TOKENS
    timings: Timings | None = None  # measured prefill times; otherwise the roofline
    engine: EngineName = "whole"  # one prompt after the other; or batches, in steps, with a prefix cache
    prefetch_lead_s: float = 0.0  # how long before a prompt its user is recognised; 0: never
    prefetch_false_share: float = 0.0  # users that are recognised and send nothing, for each one that does

    def __post_init__(self) -> None:
        require("--decode-put-tokens", self.decode_put_tokens, "tokens", 1, 10**6)
        require("--block-tokens", self.block_tokens, "tokens a block", 1, 10**6)
        require("--prefetch-lead-s", self.prefetch_lead_s, "seconds", 0, 1e6)
        require("--prefetch-false-share", self.prefetch_false_share, "for each that comes", 0, 100)
        if self.engine == "steps" and self.overlap:
            raise OutOfRange("--overlap", "given", "nothing", "with --engine whole: steps compute all layers")


def prefill_s(model: Model, cluster: Cluster, new_tokens: float, context_tokens: float = 0.0) -> float:
    """How long an engine takes to prefill tokens after a context whose KV it has."""
    flops_per_s = cluster.gpus_per_engine * cluster.gpu_flops_per_s * cluster.gpu_mfu
    return model.prefill_flops(new_tokens, context_tokens) / flops_per_s


def prefill_tokens_per_s(model: Model, cluster: Cluster) -> float:
    """How fast an engine prefills while attention costs nothing yet."""
    return cluster.gpus_per_engine * cluster.gpu_flops_per_s * cluster.gpu_mfu / model.token_flops


def kv_room_bytes(model: Model, cluster: Cluster) -> float:
    """The part of an engine's memory that the weights leave for KV."""
    memory = _MEMORY_SHARE * cluster.gpus_per_engine * cluster.gpu_memory_bytes
    room = memory - WEIGHT_BYTES * model.parameters
    if room <= 0:
        raise OutOfRange(
            "gpus_per_engine",
            cluster.gpus_per_engine,
            "GPUs that hold the weights",
            f"at least {math.ceil((memory - room) / memory * cluster.gpus_per_engine)} for {model.name}"
            f" of {(memory - room) / 1e9:.0f} GB",
        )
    return room


class Deadline(NamedTuple):
    """When a run fails: as soon as more than `late_max` first tokens are later than `ttft_s`. The run then ends."""

    ttft_s: float
    late_max: int


class Put(NamedTuple):
    """A train of puts under way."""

    node: int
    blocks: tuple[int, ...]  # blocks: stored before, and from `begin` on being put
    begin: int
    size_bytes: float
    last_made_s: float


class Get:
    """A request whose prefix is being fetched, part by part of the layers: the blocks from `begin` to `hits`."""

    __slots__ = ("begin", "engine", "hits", "number", "request", "service_s", "start_s", "tokens", "trains")

    def __init__(
        self,
        number: int,
        request: Request,
        engine: int,
        tokens: int,
        hits: int,
        service_s: float,
        begin: int = 0,
    ) -> None:
        self.number, self.request, self.engine = number, request, engine
        self.tokens, self.hits, self.service_s, self.begin = tokens, hits, service_s, begin
        self.trains = 0  # under way
        self.start_s = 0.0  # the earliest begin of the prefill at which no layer waits for its KV


class Run:
    """One run, from its first request to the last byte on a drive."""

    def __init__(
        self,
        events: Events,
        requests: Sequence[Request],
        model: Model,
        cluster: Cluster,
        path: PathName,
        terms: Terms,
    ) -> None:
        self.events, self.requests, self.model, self.cluster = events, requests, model, cluster
        self.path, self.terms = path, terms
        self.plant = Plant(events, cluster, path)
        self.token_bytes = model.token_bytes
        self.get_bytes_per_s = self._idle_get_bytes_per_s()
        block_bytes = terms.block_tokens * self.token_bytes
        make = policy_maker(terms.policy)

        def tier(size_bytes: float) -> list[Catalogue]:
            blocks = int(size_bytes // block_bytes)
            return [Catalogue(make(max(1, blocks)), blocks) for _ in range(cluster.nodes)]

        self.stored = tier(cluster.drives_per_node * cluster.drive_capacity_bytes)
        self.hot = tier(cluster.node_memory_bytes)
        self.writing: list[set[int]] = [set() for _ in range(cluster.nodes)]
        self.home_of_lot = drive_homes(cluster.drives_per_node)
        pairs = cluster.gpus_per_engine * cluster.drives_per_node
        self.put_parts = min(model.layers, max(_PUT_PARTS_MIN, _MESSAGES // pairs))
        fine = _OVERLAP_PARTS_MIN if terms.overlap else 1
        self.get_parts = min(model.layers, max(fine, _MESSAGES // pairs))
        self.puts: dict[int, Put] = {}
        self.gets: dict[int, tuple[Get, int]] = {}
        self.free_s = [0.0] * cluster.engines
        self.kv_room = kv_room_bytes(model, cluster)
        self.kv_free = [self.kv_room] * cluster.engines
        self.waiting: list[deque[tuple[int, Request]]] = [deque() for _ in range(cluster.engines)]
        self.admitted_s: dict[int, float] = {}
        self.leaving: dict[int, tuple[int, float]] = {}
        count = len(requests)
        self.ttft_s, self.queued_s, self.fetch_s = np.zeros(count), np.zeros(count), np.zeros(count)
        self.put_lag_s: list[float] = []
        self.put_bytes = self.got_bytes = self.hot_bytes = 0.0
        self.fetched_tokens = self.found_tokens = self.block_hits = 0
        self.now_s = self.end_s = 0.0
        self.late = 0
        self.deadline: Deadline | None = None
        self.cached_tokens = self.cache_evicted = 0
        self.token_s = np.full(count, np.nan)  # of an answer, mean
        self.seen = _sightings(requests, terms)
        self.reads: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.ahead: list[set[int]] = [set() for _ in range(cluster.nodes)]  # prefetched, and not fetched yet
        self.ahead_blocks = self.ahead_used = 0
        if cluster.prefill_engines and terms.engine == "whole":
            raise OutOfRange(
                "prefill_engines", cluster.prefill_engines, "engines", "0 unless --engine is steps"
            )
        if self.seen and not cluster.node_memory_bytes:
            raise OutOfRange("node_memory_bytes", 0, "bytes", "above 0: --prefetch-lead-s reads into it")

    def _idle_get_bytes_per_s(self) -> float:
        """The highest rate of one get on an idle cluster: that of the narrowest part it is spread over."""
        cluster = self.cluster
        return min(cluster.node_get_bytes_per_s, cluster.engine_bytes_per_s(self.path))

    def prefill_s(self, new_tokens: int, context_tokens: int = 0) -> float:
        """How long an engine takes to prefill tokens when it does nothing else."""
        if self.terms.timings is not None:
            return self.terms.timings.of(new_tokens, context_tokens)
        return prefill_s(self.model, self.cluster, new_tokens, context_tokens)

    def arrive(self, number: int, request: Request) -> None:
        """Choose, of the engines with room for the KV, the one that is free first; or wait in line for one."""
        self.now_s = request.arrival_s
        need = self.kv_bytes(request)
        if need > self.kv_room:
            what = f"of {request.input_tokens + request.output_tokens} tokens, {need / 1e9:.1f} GB of KV"
            accepted = (
                f"within the {self.kv_room / 1e9:.1f} GB that an engine's weights leave (gpu_memory_bytes)"
            )
            raise OutOfRange("a request", what, "a request", accepted)
        engines = range(self.cluster.engines)
        roomy = [one for one in engines if not self.waiting[one] and self.kv_free[one] >= need]
        if roomy:
            self.admit(number, request, min(roomy, key=self.free_s.__getitem__))
        else:
            self.waiting[min(engines, key=lambda one: len(self.waiting[one]))].append((number, request))

    def kv_bytes(self, request: Request) -> float:
        """The memory that a request takes in an engine until its answer is complete."""
        return (request.input_tokens + request.output_tokens) * self.token_bytes

    def leave(self, engine: int, need: float) -> None:
        """An answer is complete: waiting requests may be admitted."""
        self.kv_free[engine] += need
        line = self.waiting[engine]
        while line and self.kv_free[engine] >= self.kv_bytes(line[0][1]):
            self.admit(*line.popleft(), engine)

    def admit(self, number: int, request: Request, engine: int) -> None:
        """Allocate a request's KV, and fetch its stored part if that is faster than computing it."""
        self.kv_free[engine] -= self.kv_bytes(request)
        self.admitted_s[number] = self.now_s
        if self.path == "recompute":
            self.prefill(number, request, engine, self.now_s, 0, 0)
            return
        node = home_of_user(request.user, self.cluster.nodes)
        hits = self.stored[node].prefix(request.blocks)
        self.block_hits += hits
        # The last token must be computed, whatever is stored: it makes the first one of the answer.
        tokens = min(hits * self.terms.block_tokens, request.input_tokens - 1)
        self.found_tokens += tokens
        rest_s = self.prefill_s(request.input_tokens - tokens, tokens)
        saved_s = self.prefill_s(request.input_tokens) - rest_s
        worth_it = self.terms.always_get or tokens * self.token_bytes / self.get_bytes_per_s < saved_s
        if not tokens or not worth_it:
            self.prefill(number, request, engine, self.now_s, 0, hits)
            return
        # Later requests must see that more work is on its way to this engine.
        self.free_s[engine] = max(self.free_s[engine], self.now_s) + rest_s
        self.fetch(Get(number, request, engine, tokens, hits, rest_s), node)

    def fetch(self, get: Get, node: int) -> None:
        """Fetch the pages of all blocks that were found: from the DRAM tier if they are there, else from the drives."""
        hot_tier, found = self.hot[node], get.request.blocks[get.begin : get.hits]
        hot = [block for block in found if block in hot_tier]
        cold = [block for block in found if block not in hot_tier]
        page_bytes = (
            get.tokens * self.token_bytes / (len(found) * self.model.layers * self.cluster.gpus_per_engine)
        )
        if hot:
            hot_tier.touch(found)
            self.hot_bytes += get.tokens * len(hot) / len(found) * self.token_bytes
            used = self.ahead[node].intersection(hot)
            self.ahead_used += len(used)
            self.ahead[node] -= used
        for blocks, drives in ((hot, 0), (cold, self.cluster.drives_per_node)):
            if not blocks:
                continue
            for part, messages in enumerate(self._messages(blocks, node, get.engine, page_bytes, drives)):
                if len(messages):
                    messages["start_s"] = self.now_s
                    self.gets[self.events.add_list(messages, _GETS)] = get, part
                    get.trains += 1
        self.got_bytes += get.tokens * self.token_bytes
        self.fetched_tokens += get.tokens
        hot_tier.admit(found)

    def _messages(
        self, blocks: Sequence[int], node: int, engine: int, page_bytes: float, drives: int
    ) -> list[npt.NDArray[np.void]]:
        """The gets for each part of the layers: a message for each pair of drive and GPU that has pages in it.

        Without drives, they come from the DRAM tier.
        """
        cluster, plant = self.cluster, self.plant
        found = []
        for where, pages in self._scattered(blocks, self.get_parts, drives):
            messages = np.empty(len(where), dtype=MESSAGE)
            messages["units"], messages["pages"] = pages * page_bytes, pages
            if drives:
                messages["first"] = plant.get_first + node * drives + where % drives
            else:
                messages["first"] = plant.get_hot_first + node
            messages["then"] = plant.get_then + engine * cluster.gpus_per_engine + where // max(1, drives)
            found.append(messages)
        return found

    def _scattered(
        self, blocks: Sequence[int], parts: int, drives: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """For each part of the layers: which pairs (rank times drives, plus drive) have pages, and how many."""
        for row in self._pages(blocks, parts, drives):
            where = np.flatnonzero(row)
            yield where, row[where]

    def _pages(self, blocks: Sequence[int], parts: int, drives: int) -> npt.NDArray[np.int64]:
        """How many pages each part of the layers has for each pair."""
        ranks, places = self.cluster.gpus_per_engine, max(1, drives)
        home_of_lot = self.home_of_lot if drives else _NO_DRIVES
        counts = scatter(blocks, self.model.layers, parts, ranks, home_of_lot, places)
        return counts.reshape(parts, ranks * places)

    def prefill(
        self, number: int, request: Request, engine: int, ready_s: float, fetched_tokens: int, hits: int
    ) -> None:
        """Compute what was not fetched, and put it; then the answer."""
        service_s = self.prefill_s(request.input_tokens - fetched_tokens, fetched_tokens)
        start_s, end_s = self.events.reserve(self.plant.prefill[engine], ready_s, service_s)
        self.free_s[engine] = max(self.free_s[engine], end_s)
        self.ttft_s[number] = end_s - request.arrival_s
        admitted_s = self.admitted_s.pop(number)
        self.queued_s[number] = start_s - ready_s + admitted_s - request.arrival_s
        self.fetch_s[number] = ready_s - admitted_s
        if self.deadline is not None and self.ttft_s[number] > self.deadline.ttft_s:
            self.late += 1
        answer_s = request.output_tokens * self.cluster.decode_token_s
        begin_s, done_s = self.events.reserve(self.plant.decode[engine], end_s, answer_s)
        if request.output_tokens > 1:
            self.token_s[number] = (done_s - end_s) / request.output_tokens
        self.end_s = max(self.end_s, done_s)
        timer = self.events.add_train(done_s, 0.0, self.plant.timer, kind=TIMERS)
        self.leaving[timer] = engine, self.kv_bytes(request)
        if self.path == "recompute":
            return
        node = home_of_user(request.user, self.cluster.nodes)
        stored, writing = self.stored[node], self.writing[node]
        new = [block for block in request.blocks[hits:] if block not in stored and block not in writing]
        if new:
            share = len(new) / max(1, len(request.blocks) - hits)
            size_bytes = share * (request.input_tokens - hits * self.terms.block_tokens) * self.token_bytes
            writing.update(new)
            put = Put(node, (*request.blocks[:hits], *new), hits, max(0.0, size_bytes), end_s)
            self.put_layers(put, engine, start_s, end_s)
        if request.output_tokens:
            self.put_answer(number, request, node, engine, begin_s, self.cluster.decode_token_s)

    def put_layers(self, put: Put, engine: int, start_s: float, end_s: float) -> None:
        """Put each part of the layers when its last layer is done."""
        layers, drives = self.model.layers, self.cluster.drives_per_node
        new = put.blocks[put.begin :]
        page_bytes = put.size_bytes / (len(new) * layers * self.cluster.gpus_per_engine)
        counts = self._pages(new, self.put_parts, drives)
        parts, where = np.nonzero(counts)
        pages = counts[parts, where]
        done = -(-np.arange(1, self.put_parts + 1) * layers // self.put_parts) / layers
        messages = np.empty(len(where), dtype=MESSAGE)
        messages["start_s"] = np.maximum(self.now_s, start_s + done * (end_s - start_s))[parts]
        messages["units"], messages["pages"] = pages * page_bytes, pages
        messages["first"] = self.plant.put_first + engine * self.cluster.gpus_per_engine + where // drives
        messages["then"] = self.plant.put_then + put.node * drives + where % drives
        self._note_put(self.events.add_list(messages, PUTS), put)

    def put_answer(
        self, number: int, request: Request, node: int, engine: int, begin_s: float, token_s: float
    ) -> None:
        """Put the KV of all layers every few tokens: in one message, from one GPU after the other."""
        gpus, drives = self.cluster.gpus_per_engine, self.cluster.drives_per_node
        count = -(-request.output_tokens // self.terms.decode_put_tokens)
        size_bytes = request.output_tokens * self.token_bytes
        step_s = request.output_tokens / count * token_s
        steps = np.arange(count)
        messages = np.empty(count, dtype=MESSAGE)
        messages["start_s"] = begin_s + step_s * (steps + 1)
        messages["units"], messages["pages"] = size_bytes / count, self.model.layers
        messages["first"] = self.plant.put_first + engine * gpus + (number + steps) % gpus
        lots = ((number * 0x9E3779B1 + steps * 0x85EBCA6B) & 0xFFFFFFFF) * LOTS >> 32
        messages["then"] = self.plant.put_then + node * drives + self.home_of_lot[lots]
        put = Put(node, (), 0, size_bytes, begin_s + count * step_s)
        self._note_put(self.events.add_list(messages, PUTS), put)

    def _note_put(self, train: int, put: Put) -> None:
        self.puts[train] = put
        self.put_bytes += put.size_bytes

    def through(self, time_s: float, train: int) -> None:
        """A train has arrived."""
        self.now_s = time_s
        if train in self.leaving:
            self.leave(*self.leaving.pop(train))
            return
        if train in self.reads:
            node, blocks = self.reads.pop(train)
            self.hot[node].admit(blocks)
            return
        if train in self.gets:
            get, part = self.gets.pop(train)
            # Layers are computed in order: this part's when those before it are done.
            before = part / self.get_parts if self.terms.overlap else 0.0
            get.start_s = max(get.start_s, time_s - before * get.service_s)
            get.trains -= 1
            if not get.trains:
                self.prefill(get.number, get.request, get.engine, get.start_s, get.tokens, get.hits)
            return
        put = self.puts.pop(train)
        self.end_s = max(self.end_s, time_s)
        self.put_lag_s.append(time_s - put.last_made_s)
        if put.blocks:
            self.writing[put.node].difference_update(put.blocks[put.begin :])
            self.stored[put.node].admit(put.blocks, put.begin)
            self.hot[put.node].admit(put.blocks, put.begin)

    def see(self, user: int, blocks: tuple[int, ...]) -> None:
        """A user was recognised: the stored part of their last prompt is read into the node's memory."""
        node = home_of_user(user, self.cluster.nodes)
        stored, hot = self.stored[node], self.hot[node]
        found = tuple(takewhile(stored.__contains__, blocks))
        cold = [block for block in found if block not in hot]
        if not cold:
            return
        drives = self.cluster.drives_per_node
        page_bytes = (
            self.terms.block_tokens * self.token_bytes / (self.model.layers * self.cluster.gpus_per_engine)
        )
        for where, pages in self._scattered(cold, 1, drives):
            counts = np.bincount(where % drives, weights=pages, minlength=drives)
            (busy,) = np.nonzero(counts)
            messages = np.empty(len(busy), dtype=MESSAGE)
            messages["start_s"], messages["pages"] = self.now_s, counts[busy]
            messages["units"] = counts[busy] * page_bytes
            messages["first"], messages["then"] = self.plant.read_first + node * drives + busy, -1
            self.reads[self.events.add_list(messages, _GETS)] = node, found
        self.ahead[node].update(cold)
        self.ahead_blocks += len(cold)

    def _run_to(self, until_s: float) -> None:
        while (note := self.events.run(until_s)) is not None:
            self.through(*note)

    def go(self, progress: Callable[[float], None]) -> bool:
        """Send all requests; False if the deadline was missed too often, and the run ended there."""
        late_max = self.deadline.late_max if self.deadline is not None else 0
        for number, request in enumerate(self.requests):
            while self.seen and self.seen[0][0] <= request.arrival_s:
                seen_s, user, blocks = self.seen.popleft()
                self._run_to(seen_s)
                self.now_s = seen_s
                self.see(user, blocks)
            self._run_to(request.arrival_s)
            self.arrive(number, request)
            if self.late > late_max:
                return False
            if number % 256 == 0:
                progress(number / len(self.requests))
        self._run_to(float("inf"))
        progress(1.0)
        return self.late <= late_max


def _sightings(requests: Sequence[Request], terms: Terms) -> deque[tuple[float, int, tuple[int, ...]]]:
    """When each user is recognised, and the blocks of the last prompt; none for a user's first prompt.

    False sightings are of earlier users, in turn, at the times of true ones.
    """
    if not terms.prefetch_lead_s:
        return deque()
    last: dict[int, tuple[float, tuple[int, ...]]] = {}
    users: list[int] = []
    found: list[tuple[float, int, tuple[int, ...]]] = []
    owed = 0.0
    for request in requests:
        if request.user in last:
            before_s, blocks = last[request.user]
            seen_s = max(before_s, request.arrival_s - terms.prefetch_lead_s)
            found.append((seen_s, request.user, blocks))
            owed += terms.prefetch_false_share
            while owed >= 1:
                owed -= 1
                other = users[len(found) * 7919 % len(users)]
                found.append((seen_s, other, last[other][1]))
        else:
            users.append(request.user)
        last[request.user] = request.arrival_s, request.blocks
    found.sort(key=lambda one: one[0])
    return deque(found)
