"""Fetch or compute again, and how many drives, nodes and links it takes.

What always holds: every count names the reason that asked for it, and no part is planned busier than
`utilisation_max`. The plan is means and closed form; `trial` sends users through the event model with just
these counts, and that is what says whether the time to the first token is kept.

What it doesn't do: failures, growth, or users that come in waves. Plan for the busiest hour.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from sim.models import MODELS
from sim.replay.simulate import Terms, prefill_tokens_per_s, simulate
from sim.replay.workload import BLOCK_TOKENS, Request
from sim.units import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.models import Model
    from sim.replay.cluster import Cluster, PathName
    from sim.replay.simulate import Result

__all__ = ["BreakEven", "Demand", "Need", "Plan", "all_break_even", "break_even", "make_plan", "trial"]

_TRIAL_REQUESTS = 20_000
_TRIAL_S = 600.0


class BreakEven(NamedTuple):
    """Where fetching a token's KV takes as long as computing it again."""

    model: str
    token_bytes: int
    tokens_per_s: float  # that one GPU prefills
    bytes_per_s: float  # for each GPU

    def of(self, gpus: int) -> float:
        """Bytes a second for an engine of so many GPUs."""
        return self.bytes_per_s * gpus


def break_even(model: Model, cluster: Cluster, element_bytes: int = 2) -> BreakEven:
    """Fetching is faster above this bandwidth, for every GPU."""
    token_bytes = model.layout.token_bytes(8 * element_bytes)
    tokens_per_s = prefill_tokens_per_s(model, replace(cluster, gpus_per_engine=1, gpus_per_root=1))
    return BreakEven(model.name, token_bytes, tokens_per_s, token_bytes * tokens_per_s)


def all_break_even(cluster: Cluster) -> list[BreakEven]:
    """For every model that is known."""
    return [break_even(entry, cluster) for entry in {id(e): e for e in MODELS.values()}.values()]


@dataclass(frozen=True, slots=True)
class Demand:
    """What users do, in means, and what they are promised."""

    users: int = 1000
    think_s: float = 60.0
    history_tokens: int = 8000
    new_tokens: int = 400
    answer_tokens: int = 300
    found_share: float = 0.95  # of the turns whose history is stored
    ttft_s: float = 1.0
    utilisation_max: float = 0.7

    def __post_init__(self) -> None:
        require("--users", self.users, "users", 1, 10**8)
        require("--think-s", self.think_s, "seconds", 0.1, 1e6)
        require("--history-tokens", self.history_tokens, "tokens", BLOCK_TOKENS, 10**7)
        require("--new-tokens", self.new_tokens, "tokens", 1, 10**7)
        require("--answer-tokens", self.answer_tokens, "tokens", 0, 10**7)
        require("--found-share", self.found_share, "a share of the turns", 0, 1)
        require("--ttft-s", self.ttft_s, "seconds", 1e-3, 1e4)
        require("--utilisation-max", self.utilisation_max, "a share of the time", 0.05, 0.95)


class Need(NamedTuple):
    """How many of something, and why so many."""

    what: str
    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is needed, and what follows from it."""

    demand: Demand
    cluster: Cluster  # with the counts of this plan
    turns_per_s: float
    get_bytes_per_s: float
    put_bytes_per_s: float
    stored_bytes: float
    needs: tuple[Need, ...]
    recompute_engines: int
    fetch_s: float  # of one history, when nothing else goes on
    prefill_s: float
    recompute_s: float


def _most(what: str, reasons: dict[str, float]) -> Need:
    """The largest of the counts, and its reason."""
    why = max(reasons, key=reasons.__getitem__)
    return Need(what, max(1, math.ceil(reasons[why] - 1e-9)), why)


def make_plan(model: Model, cluster: Cluster, demand: Demand, path: PathName = "triggered") -> Plan:
    """Counts of engines, drives and nodes; every other number is the cluster's."""
    token_bytes = model.layout.token_bytes()
    tokens_per_s = prefill_tokens_per_s(model, cluster)
    answer_s = demand.answer_tokens * cluster.decode_token_s
    turns_per_s = demand.users / (demand.think_s + answer_s)
    stored_tokens = demand.history_tokens // BLOCK_TOKENS * BLOCK_TOKENS  # whole blocks only are ever found
    history_bytes = stored_tokens * token_bytes
    all_tokens = demand.history_tokens + demand.new_tokens
    gets = turns_per_s * demand.found_share
    get_bytes_per_s = gets * history_bytes
    computed_tokens = all_tokens - demand.found_share * stored_tokens
    put_tokens = computed_tokens + demand.answer_tokens
    put_bytes_per_s = turns_per_s * put_tokens * token_bytes
    stored_bytes = demand.users * (all_tokens + demand.answer_tokens) * token_bytes
    busy = demand.utilisation_max

    computed = turns_per_s * computed_tokens / tokens_per_s
    nic_bytes_per_s = cluster.link_bits_per_s / 8
    engine_bytes_per_s = cluster.engine_bytes_per_s(path)
    engines = _most(
        "engines",
        {
            "prefill of what is new or was not found": computed / busy,
            "answers written at a time": turns_per_s * answer_s / cluster.decode_slots / busy,
            "KV into the GPUs": get_bytes_per_s / engine_bytes_per_s / busy,
            "KV out of the GPUs": put_bytes_per_s / engine_bytes_per_s / busy,
        },
    )
    prefill_s = (all_tokens - stored_tokens) / tokens_per_s
    # Half of what is left after the prefill goes to the fetch, the other half to waiting.
    for_fetch_s = max(1e-9, (demand.ttft_s - prefill_s) / 2)
    drive_s = (
        gets * (history_bytes / cluster.drive_read_bytes_per_s + model.layers * cluster.drive_message_s)
        + put_bytes_per_s / cluster.drive_write_bytes_per_s
        + turns_per_s * model.layers * cluster.drive_message_s
    )
    drives = _most(
        "drives",
        {
            "KV to be read and written": drive_s / busy,
            "KV to be kept": stored_bytes / cluster.drive_capacity_bytes,
            "one fetch within its time": history_bytes / for_fetch_s / cluster.drive_read_bytes_per_s,
        },
    )
    links = _most(
        "node links",
        {
            "KV out of the nodes": get_bytes_per_s / nic_bytes_per_s / busy,
            "KV into the nodes": put_bytes_per_s / nic_bytes_per_s / busy,
            "one fetch within its time": history_bytes / for_fetch_s / nic_bytes_per_s,
        },
    )
    nodes = _most(
        "nodes",
        {
            f"{cluster.drives_per_node} drives in each": drives.number / cluster.drives_per_node,
            f"{cluster.links_per_node} links to each": links.number / cluster.links_per_node,
            "their memory's bandwidth": (get_bytes_per_s + put_bytes_per_s)
            / cluster.node_memory_bytes_per_s
            / busy,
        },
    )
    recomputed = turns_per_s * all_tokens / tokens_per_s
    planned = replace(
        cluster,
        engines=engines.number,
        nodes=nodes.number,
        drives_per_node=-(-drives.number // nodes.number),
        links_per_node=max(cluster.links_per_node, -(-links.number // nodes.number)),
    )
    fetch_bytes_per_s = min(
        engine_bytes_per_s,
        planned.drives * planned.drive_read_bytes_per_s,
        planned.nodes * planned.links_per_node * nic_bytes_per_s,
    )
    return Plan(
        demand=demand,
        cluster=planned,
        turns_per_s=turns_per_s,
        get_bytes_per_s=get_bytes_per_s,
        put_bytes_per_s=put_bytes_per_s,
        stored_bytes=stored_bytes,
        needs=(engines, drives, links, nodes),
        recompute_engines=max(1, math.ceil(recomputed / busy - 1e-9)),
        fetch_s=history_bytes / fetch_bytes_per_s,
        prefill_s=prefill_s,
        recompute_s=all_tokens / tokens_per_s,
    )


def _turns(demand: Demand, turns_per_s: float, seed: int) -> tuple[list[Request], list[tuple[int, ...]]]:
    """Turns at random of users whose histories are stored, but for the share that is not; and those histories."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    shared = demand.history_tokens // BLOCK_TOKENS
    wanted = -(-(demand.history_tokens + demand.new_tokens) // BLOCK_TOKENS)
    requests: list[Request] = []
    stored: list[tuple[int, ...]] = []
    now_s, block = 0.0, 0
    while len(requests) < _TRIAL_REQUESTS and now_s < _TRIAL_S:
        now_s += rng.expovariate(turns_per_s)
        blocks = tuple(range(block, block + wanted))
        block += wanted
        if rng.random() < demand.found_share:
            stored.append(blocks[:shared])
        requests.append(
            Request(now_s, demand.history_tokens + demand.new_tokens, demand.answer_tokens, blocks)
        )
    return requests, stored


def trial(
    model: Model,
    plan: Plan,
    path: PathName,
    seed: int = 1,
    progress: Callable[[float], None] = lambda _: None,
) -> Result:
    """Send the planned users through the event model, with the plan's counts."""
    requests, stored = _turns(plan.demand, plan.turns_per_s, seed)
    return simulate(requests, model, plan.cluster, path, Terms(always_get=True), progress, stored=stored)
