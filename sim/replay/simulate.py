"""One run: requests through a cluster, by one of the paths, and what came of each.

A request arrives at the engine that is free first. What of its prefix is stored is fetched, or computed again;
then the rest is prefilled, first come first served. While it is, each layer's KV is put as soon as that
layer is done; while the answer is written, the KV of every few tokens. A block may be found by others once all
of its put is on the drive, and no earlier.

What always holds: the same requests, cluster and settings give the same results. The path `recompute` stores
nothing: it is what keeping only the text would cost.

What it doesn't do: attention's quadratic part (a prefill costs the same for each token), prefill of a layer
while later ones are still being fetched, batching effects on decode, failures. KV of answers is put, and costs
what it costs; whether a later prompt finds it is for its trace to say, which names blocks of prompts only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.replay.catalogue import Catalogue, policy_maker
from sim.replay.cluster import Plant
from sim.replay.events import Events
from sim.replay.workload import BLOCK_TOKENS
from sim.units import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from sim.models import Model
    from sim.replay.cluster import Cluster, PathName, Routes
    from sim.replay.events import Usage
    from sim.replay.workload import Request

    Array = npt.NDArray[np.float64]

__all__ = ["Result", "Terms", "prefill_tokens_per_s", "simulate"]

_BINS = 100
_PUTS, _GETS = 0, 1  # kinds of trains


@dataclass(frozen=True, slots=True)
class Terms:
    """What a run may change beside the cluster and the path."""

    element_bytes: int = 2
    decode_put_tokens: int = 16  # KV of an answer goes out every so many of its tokens
    policy: str = "lru"
    always_get: bool = False  # else what is faster on an idle cluster: fetching or computing

    def __post_init__(self) -> None:
        require("--element-bytes", self.element_bytes, "bytes a number", 1, 4)
        require("--decode-put-tokens", self.decode_put_tokens, "tokens", 1, 10**6)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run; arrays have one entry a request."""

    path: PathName
    cluster: Cluster
    duration_s: float
    arrival_s: Array
    ttft_s: Array
    queued_s: Array  # of the time to the first token: waiting for the engine
    fetch_s: Array  # and for what is stored
    prompt_tokens: int
    fetched_tokens: int
    found_tokens: int  # found, whether fetched or not
    block_hits: int
    blocks: int
    put_lag_s: Array  # from the last layer's, or answer's, end to the last byte on a drive
    put_bytes: float
    get_bytes: float
    hot_bytes: float  # of these, out of the DRAM tier
    evicted: int
    backlog_bytes: Array  # made and not on a drive yet; the most in each bin of time
    usage: dict[str, list[Usage]]
    busy: dict[str, Array]  # share of each bin of time, mean of the group
    bin_s: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' blocks that were stored."""
        return self.block_hits / self.blocks if self.blocks else 0.0

    def ttft_quantile_s(self, share: float) -> float:
        """Time to the first token that so large a share of the requests stayed within."""
        return float(np.quantile(self.ttft_s, share))

    @property
    def usd_per_hour(self) -> float:
        """What is paid for: who stores nothing needs no storage."""
        return self.cluster.gpus_usd_per_hour + (self.path != "recompute") * self.cluster.storage_usd_per_hour

    @property
    def usd(self) -> float:
        """What was paid for as long as the run took."""
        return self.usd_per_hour * self.duration_s / 3600


def prefill_tokens_per_s(model: Model, cluster: Cluster) -> float:
    """How fast an engine prefills."""
    return cluster.gpus_per_engine * cluster.gpu_flops_per_s * cluster.gpu_mfu / model.token_flops


class _Put(NamedTuple):
    """A train of puts under way."""

    blocks: tuple[int, ...]  # what was stored before, and from `begin` on what is put
    begin: int
    size_bytes: float
    last_made_s: float


class _Get:
    """A request whose prefix is being fetched."""

    __slots__ = ("engine", "hits", "number", "parts", "request", "tokens")

    def __init__(self, number: int, request: Request, engine: int, tokens: int, hits: int) -> None:
        self.number, self.request, self.engine = number, request, engine
        self.tokens, self.hits = tokens, hits
        self.parts = 0


class _Run:
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
        self.token_bytes = model.layout.token_bytes(8 * terms.element_bytes)
        self.tokens_per_s = prefill_tokens_per_s(model, cluster)
        self.get_bytes_per_s = self._idle_get_bytes_per_s()
        block_bytes = BLOCK_TOKENS * self.token_bytes
        make = policy_maker(terms.policy)
        capacity = [
            int(size // block_bytes)
            for size in (
                cluster.drives * cluster.drive_capacity_bytes,
                cluster.nodes * cluster.node_memory_bytes,
            )
        ]
        self.stored, self.hot = (Catalogue(make(max(1, blocks)), blocks) for blocks in capacity)
        self.writing: set[int] = set()
        self.puts: dict[int, _Put] = {}
        self.gets: dict[int, _Get] = {}
        self.free_s = [0.0] * cluster.engines
        count = len(requests)
        self.ttft_s, self.queued_s, self.fetch_s = np.zeros(count), np.zeros(count), np.zeros(count)
        self.put_lag_s: list[float] = []
        self.put_bytes = self.got_bytes = self.hot_bytes = 0.0
        self.fetched_tokens = self.found_tokens = self.block_hits = 0
        self.end_s = 0.0

    def _idle_get_bytes_per_s(self) -> float:
        """What one get can reach at most when nothing else goes on: the narrowest of all that it is spread over."""
        cluster = self.cluster
        return min(
            cluster.drives * cluster.drive_read_bytes_per_s,
            cluster.nodes * cluster.links_per_node * cluster.link_bits_per_s / 8,
            cluster.engine_bytes_per_s(self.path),
        )

    def arrive(self, number: int, request: Request) -> None:
        engine = min(range(self.cluster.engines), key=self.free_s.__getitem__)
        if self.path == "recompute":
            self.prefill(number, request, engine, request.arrival_s, 0, 0)
            return
        hits = self.stored.prefix(request.blocks)
        self.block_hits += hits
        # The last token has to be computed, whatever is stored: it makes the first one of the answer.
        tokens = min(hits * BLOCK_TOKENS, request.input_tokens - 1)
        self.found_tokens += tokens
        worth_it = self.terms.always_get or self.token_bytes / self.get_bytes_per_s < 1 / self.tokens_per_s
        if not tokens or not worth_it:
            self.prefill(number, request, engine, request.arrival_s, 0, hits)
            return
        # What comes later has to know of this engine that more work is on its way.
        self.free_s[engine] = max(self.free_s[engine], request.arrival_s)
        self.free_s[engine] += (request.input_tokens - tokens) / self.tokens_per_s
        get = _Get(number, request, engine, tokens, hits)
        found = request.blocks[:hits]
        hot = sum(block in self.hot for block in found)
        if hot:
            self.hot.touch(found)
            self.hot_bytes += tokens * hot / hits * self.token_bytes
        for share, routes in ((hot, self.plant.get_hot[engine]), (hits - hot, self.plant.get[engine])):
            if share:
                train = self._train(
                    _GETS, request.arrival_s, tokens * share / hits * self.token_bytes, routes, number
                )
                self.gets[train] = get
                get.parts += 1
        self.got_bytes += tokens * self.token_bytes
        self.fetched_tokens += tokens
        self.hot.admit(found)

    def _train(
        self, kind: int, start_s: float, size_bytes: float, routes: Routes, number: int, over_s: float = 0.0
    ) -> int:
        """One message a layer, spread over a time."""
        layers = self.model.layers
        return self.events.add_train(
            start_s,
            size_bytes / layers,
            routes.first,
            count=layers,
            interval_s=over_s / layers,
            routes=routes.count,
            offset=number % routes.count,
            kind=kind,
        )

    def prefill(
        self, number: int, request: Request, engine: int, now_s: float, fetched_tokens: int, hits: int
    ) -> None:
        """Compute what was not fetched, and put it; then the answer."""
        service_s = (request.input_tokens - fetched_tokens) / self.tokens_per_s
        start_s, end_s = self.events.reserve(self.plant.prefill[engine], now_s, service_s)
        self.free_s[engine] = max(self.free_s[engine], end_s)
        self.ttft_s[number] = end_s - request.arrival_s
        self.queued_s[number] = start_s - now_s
        self.fetch_s[number] = now_s - request.arrival_s
        answer_s = request.output_tokens * self.cluster.decode_token_s
        begin_s, done_s = self.events.reserve(self.plant.decode[engine], end_s, answer_s)
        self.end_s = max(self.end_s, done_s)
        if self.path == "recompute":
            return
        new = [
            block for block in request.blocks[hits:] if block not in self.stored and block not in self.writing
        ]
        if new:
            layer_s = (end_s - start_s) / self.model.layers
            share = len(new) / max(1, len(request.blocks) - hits)
            size_bytes = share * (request.input_tokens - hits * BLOCK_TOKENS) * self.token_bytes
            routes = self.plant.put[engine]
            train = self._train(
                _PUTS, start_s + layer_s, max(0.0, size_bytes), routes, number, end_s - start_s
            )
            self.writing.update(new)
            self._note_put(train, _Put((*request.blocks[:hits], *new), hits, size_bytes, end_s))
        if request.output_tokens:
            self._put_answer(number, request, engine, begin_s)

    def _put_answer(self, number: int, request: Request, engine: int, begin_s: float) -> None:
        """Every few tokens, the KV of all layers in one message."""
        every = self.terms.decode_put_tokens
        count = -(-request.output_tokens // every)
        size_bytes = request.output_tokens * self.token_bytes
        step_s = request.output_tokens / count * self.cluster.decode_token_s
        routes = self.plant.put[engine]
        train = self.events.add_train(
            begin_s + step_s,
            size_bytes / count,
            routes.first,
            count=count,
            interval_s=step_s,
            routes=routes.count,
            offset=number % routes.count,
            kind=_PUTS,
        )
        self._note_put(train, _Put((), 0, size_bytes, begin_s + count * step_s))

    def _note_put(self, train: int, put: _Put) -> None:
        self.puts[train] = put
        self.put_bytes += put.size_bytes

    def through(self, time_s: float, train: int) -> None:
        """A train has arrived."""
        get = self.gets.pop(train, None)
        if get is not None:
            get.parts -= 1
            if not get.parts:
                self.prefill(get.number, get.request, get.engine, time_s, get.tokens, get.hits)
            return
        put = self.puts.pop(train)
        self.end_s = max(self.end_s, time_s)
        self.put_lag_s.append(time_s - put.last_made_s)
        if put.blocks:
            self.writing.difference_update(put.blocks[put.begin :])
            self.stored.admit(put.blocks, put.begin)
            self.hot.admit(put.blocks, put.begin)

    def go(self, progress: Callable[[float], None]) -> None:
        for number, request in enumerate(self.requests):
            while (note := self.events.run(request.arrival_s)) is not None:
                self.through(*note)
            self.arrive(number, request)
            if number % 256 == 0:
                progress(number / len(self.requests))
        while (note := self.events.run(float("inf"))) is not None:
            self.through(*note)
        progress(1.0)


def simulate(
    requests: Sequence[Request],
    model: Model,
    cluster: Cluster,
    path: PathName,
    terms: Terms | None = None,
    progress: Callable[[float], None] = lambda _: None,
    stored: Iterable[tuple[int, ...]] = (),
) -> Result:
    """Send all requests through the cluster; sequences in `stored` are there from the beginning."""
    bin_s = max(1e-6, requests[-1].arrival_s * 1.1 / _BINS)
    with Events(bin_s) as events:
        run = _Run(events, requests, model, cluster, path, terms or Terms())
        for blocks in stored:
            run.stored.admit(blocks)
        run.go(progress)
        groups = {name: numbers for name, numbers in run.plant.groups.items() if numbers}
        usage = {name: [events.usage(number) for number in numbers] for name, numbers in groups.items()}
        backlog = events.backlog(_PUTS)
        busy = {name: _busy(events, numbers, bin_s) for name, numbers in groups.items()}
    return Result(
        path=path,
        cluster=cluster,
        duration_s=run.end_s,
        arrival_s=np.array([request.arrival_s for request in requests]),
        ttft_s=run.ttft_s,
        queued_s=run.queued_s,
        fetch_s=run.fetch_s,
        prompt_tokens=sum(request.input_tokens for request in requests),
        fetched_tokens=run.fetched_tokens,
        found_tokens=run.found_tokens,
        block_hits=run.block_hits,
        blocks=sum(len(request.blocks) for request in requests),
        put_lag_s=np.array(run.put_lag_s),
        put_bytes=run.put_bytes,
        get_bytes=run.got_bytes,
        hot_bytes=run.hot_bytes,
        evicted=run.stored.evicted,
        backlog_bytes=backlog,
        usage=usage,
        busy=busy,
        bin_s=bin_s,
    )


def _busy(events: Events, numbers: Sequence[int], bin_s: float) -> Array:
    """Share of the servers that were busy, in each bin."""
    servers = sum(events.usage(number).servers for number in numbers)
    total = np.zeros(0)
    for number in numbers:
        bins = events.busy_bins(number)
        if len(bins) > len(total):
            bins, total = total, bins.copy()
        total[: len(bins)] += bins
    return total / (servers * bin_s)
