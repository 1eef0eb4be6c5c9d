"""One run of the event model, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sim.replay.events import Events
from sim.replay.kv_homes import home_of_user
from sim.replay.run import PUTS, Run, Terms
from sim.replay.stepped import SteppedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from sim.models import Model
    from sim.replay.cluster_hardware import Cluster, PathName
    from sim.replay.events import Usage
    from sim.replay.run import Deadline
    from sim.replay.workload import Request

    Array = npt.NDArray[np.float64]

__all__ = ["Result", "keeps", "simulate"]

_BINS = 100


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run; arrays have one entry per request."""

    path: PathName
    cluster: Cluster
    terms: Terms
    duration_s: float
    arrival_s: Array
    ttft_s: Array
    queued_s: Array  # of the time to the first token: waiting for the engine,
    fetch_s: Array  # and for stored KV
    prompt_tokens: int
    fetched_tokens: int
    found_tokens: int  # found, whether fetched or not
    block_hits: int
    blocks: int
    put_lag_s: Array  # from the last layer's, or answer's, end to the last byte on a drive
    put_bytes: float
    get_bytes: float
    hot_bytes: float  # of these, from the DRAM tier
    evicted: int
    backlog_bytes: Array  # made and not on a drive yet; the most in each bin of time
    usage: dict[str, list[Usage]]
    busy: dict[str, Array]  # share of each bin of time, mean of the group
    bin_s: float
    cached_tokens: int  # found in the GPUs' own memory, by engines that work in steps
    token_s: Array  # of an answer, mean; NaN if there is no second token
    ahead_blocks: int  # prefetched into the nodes' memory
    ahead_used: int  # of these, fetched from there

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' blocks that were stored."""
        return self.block_hits / self.blocks if self.blocks else 0.0

    def ttft_quantile_s(self, share: float) -> float:
        """The quantile of the time to the first token for this share of the requests."""
        return float(np.quantile(self.ttft_s, share))

    @property
    def usd_per_hour(self) -> float:
        """The cost: a plan without storing needs no storage."""
        return self.cluster.gpus_usd_per_hour + (self.path != "recompute") * self.cluster.storage_usd_per_hour

    @property
    def usd(self) -> float:
        """The cost of the run's duration."""
        return self.usd_per_hour * self.duration_s / 3600


def _kind_of(terms: Terms) -> type[Run]:
    return SteppedRun if terms.engine == "steps" else Run


def _start(run: Run, stored: Iterable[tuple[int, tuple[int, ...]]]) -> None:
    for user, blocks in stored:
        node = home_of_user(user, run.cluster.nodes)
        run.stored[node].admit(blocks)
        run.hot[node].admit(blocks)


def keeps(
    requests: Sequence[Request],
    model: Model,
    cluster: Cluster,
    path: PathName,
    terms: Terms,
    deadline: Deadline,
    stored: Iterable[tuple[int, tuple[int, ...]]] = (),
) -> bool:
    """Whether a cluster meets a deadline; the run ends as soon as that is decided."""
    with Events() as events:
        run = _kind_of(terms)(events, requests, model, cluster, path, terms)
        run.deadline = deadline
        _start(run, stored)
        return run.go(lambda _: None)


def simulate(
    requests: Sequence[Request],
    model: Model,
    cluster: Cluster,
    path: PathName,
    terms: Terms | None = None,
    progress: Callable[[float], None] = lambda _: None,
    stored: Iterable[tuple[int, tuple[int, ...]]] = (),
) -> Result:
    """Send all requests through the cluster; users' sequences in `stored` are stored from the beginning."""
    terms = terms or Terms()
    bin_s = max(1e-6, requests[-1].arrival_s * 1.1 / _BINS)
    with Events(bin_s) as events:
        run = _kind_of(terms)(events, requests, model, cluster, path, terms)
        _start(run, stored)
        run.go(progress)
        groups = {name: numbers for name, numbers in run.plant.groups.items() if numbers}
        usage = {name: [events.usage(number) for number in numbers] for name, numbers in groups.items()}
        backlog = events.backlog(PUTS)
        busy = {name: _busy(events, numbers, bin_s) for name, numbers in groups.items()}
    return Result(
        path=path,
        cluster=cluster,
        terms=run.terms,
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
        evicted=sum(tier.evicted for tier in run.stored),
        backlog_bytes=backlog,
        usage=usage,
        busy=busy,
        bin_s=bin_s,
        cached_tokens=run.cached_tokens,
        token_s=run.token_s,
        ahead_blocks=run.ahead_blocks,
        ahead_used=run.ahead_used,
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
