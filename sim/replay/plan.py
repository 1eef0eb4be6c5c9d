"""The load of users on a cluster, and the fewest engines, drives, links and nodes that can serve it on average.

What always holds: each count has its reason, and with these counts no part is busier than `utilisation_max`. They are
means in closed form, so they are the start of the search for a plan (`sim.replay.least_cost`), not a plan: the event
model decides whether the deadline for the first token is met.

What it doesn't do: failures, growth, or users that come in waves. Plan for the busiest hour.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from sim.models import MODELS
from sim.replay.run import kv_room_bytes, prefill_s, prefill_tokens_per_s
from sim.replay.workload import BLOCK_TOKENS, Request
from sim.units import require

if TYPE_CHECKING:
    from sim.models import Model
    from sim.replay.cluster_hardware import Cluster, PathName

__all__ = [
    "Bounds",
    "BreakEven",
    "Demand",
    "Need",
    "Turns",
    "all_break_even",
    "bounds",
    "break_even",
    "turns",
]


class BreakEven(NamedTuple):
    """Where fetching a token's KV takes as long as computing it again, at the start of a context."""

    model: str
    token_bytes: int
    tokens_per_s: float  # that one GPU prefills
    bytes_per_s: float  # for each GPU

    def of(self, gpus: int) -> float:
        """Bytes per second for an engine with this number of GPUs."""
        return self.bytes_per_s * gpus


def break_even(model: Model, cluster: Cluster) -> BreakEven:
    """Fetching is faster above this bandwidth, for every GPU."""
    token_bytes = model.token_bytes
    tokens_per_s = prefill_tokens_per_s(model, replace(cluster, gpus_per_engine=1, gpus_per_root=1))
    return BreakEven(model.name, token_bytes, tokens_per_s, token_bytes * tokens_per_s)


def all_break_even(cluster: Cluster) -> list[BreakEven]:
    """For every known model."""
    return [break_even(entry, cluster) for entry in {id(e): e for e in MODELS.values()}.values()]


@dataclass(frozen=True, slots=True)
class Demand:
    """The means of the users' load, and the deadline promised to them."""

    users: int = 1000
    think_s: float = 60.0
    history_tokens: int = 8000
    new_tokens: int = 400
    answer_tokens: int = 300
    found_share: float = 0.95  # share of the turns whose history is stored
    ttft_s: float = 1.0
    utilisation_max: float = 0.7

    def __post_init__(self) -> None:
        require("--users", self.users, "a number of users", 1, 10**8)
        require("--think-s", self.think_s, "seconds", 0.1, 1e6)
        require("--history-tokens", self.history_tokens, "tokens", BLOCK_TOKENS, 10**7)
        require("--new-tokens", self.new_tokens, "tokens", 1, 10**7)
        require("--answer-tokens", self.answer_tokens, "tokens", 0, 10**7)
        require("--found-share", self.found_share, "a share of the turns", 0, 1)
        require("--ttft-s", self.ttft_s, "seconds", 1e-3, 1e4)
        require("--utilisation-max", self.utilisation_max, "a share of the time", 0.05, 0.95)

    @property
    def stored_tokens(self) -> int:
        """The stored tokens of a history: only whole blocks are ever found."""
        return self.history_tokens // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def prompt_tokens(self) -> int:
        """All tokens of a turn's prompt."""
        return self.history_tokens + self.new_tokens

    def turns_per_s(self, cluster: Cluster) -> float:
        """Requests per second of all users."""
        return self.users / (self.think_s + self.answer_tokens * cluster.decode_token_s)


class Need(NamedTuple):
    """A count of parts, and the reason for it."""

    what: str
    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least counts that are needed, and their consequences."""

    cluster: Cluster  # with the counts of these needs
    turns_per_s: float
    get_bytes_per_s: float
    put_bytes_per_s: float
    stored_bytes: float
    needs: tuple[Need, ...]
    fetch_s: float  # of one history, when nothing else is under way
    prefill_s: float  # of a turn whose history was found
    recompute_s: float  # of one whose history was not


def _most(what: str, reasons: dict[str, float]) -> Need:
    """The largest of the counts, and its reason."""
    why = max(reasons, key=reasons.__getitem__)
    return Need(what, max(1, math.ceil(reasons[why] - 1e-9)), why)


def bounds(model: Model, cluster: Cluster, demand: Demand, path: PathName = "triggered") -> Bounds:
    """Counts of engines, drives, links and nodes; every other number is the cluster's."""
    token_bytes, busy = model.token_bytes, demand.utilisation_max
    keeps = path != "recompute"
    found_share = demand.found_share if keeps else 0.0
    turns_per_s = demand.turns_per_s(cluster)
    stored_tokens, prompt_tokens = demand.stored_tokens, demand.prompt_tokens
    history_bytes = stored_tokens * token_bytes
    rest_s = prefill_s(model, cluster, prompt_tokens - stored_tokens, stored_tokens)
    all_s = prefill_s(model, cluster, prompt_tokens)
    mean_s = found_share * rest_s + (1 - found_share) * all_s
    answer_s = demand.answer_tokens * cluster.decode_token_s
    gets = turns_per_s * found_share
    get_bytes_per_s = gets * history_bytes
    put_tokens = prompt_tokens - found_share * stored_tokens + demand.answer_tokens
    put_bytes_per_s = turns_per_s * put_tokens * token_bytes * keeps
    turn_bytes = (prompt_tokens + demand.answer_tokens) * token_bytes
    stored_bytes = demand.users * turn_bytes * keeps
    nic_bytes_per_s = cluster.link_bits_per_s / 8
    engine_bytes_per_s = cluster.engine_bytes_per_s(path)
    engines = _most(
        "engines",
        {
            "prefill of what is new or was not found": turns_per_s * mean_s / busy,
            "answers written at a time": turns_per_s * answer_s / cluster.decode_slots / busy,
            "KV of answers being written, in the GPUs' memory": turns_per_s
            * (mean_s + answer_s)
            * turn_bytes
            / kv_room_bytes(model, cluster)
            / busy,
            "KV into the GPUs": get_bytes_per_s / engine_bytes_per_s / busy,
            "KV out of the GPUs": put_bytes_per_s / engine_bytes_per_s / busy,
        },
    )
    pages = turns_per_s * model.layers * cluster.gpus_per_engine * (found_share * stored_tokens + put_tokens)
    drive_s = (
        get_bytes_per_s / cluster.drive_read_bytes_per_s
        + put_bytes_per_s / cluster.drive_write_bytes_per_s
        + pages / BLOCK_TOKENS * cluster.drive_message_s * keeps
    )
    drives = _most(
        "drives",
        {
            "KV to be read and written": drive_s / busy,
            "KV to be kept": stored_bytes / cluster.drive_capacity_bytes,
        },
    )
    links = _most(
        "node links",
        {
            "KV out of the nodes": get_bytes_per_s / nic_bytes_per_s / busy,
            "KV into the nodes": put_bytes_per_s / nic_bytes_per_s / busy,
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
    counted = replace(
        cluster,
        engines=engines.number,
        nodes=nodes.number,
        drives_per_node=-(-drives.number // nodes.number),
        links_per_node=-(-links.number // nodes.number),
    )
    return Bounds(
        cluster=counted,
        turns_per_s=turns_per_s,
        get_bytes_per_s=get_bytes_per_s,
        put_bytes_per_s=put_bytes_per_s,
        stored_bytes=stored_bytes,
        needs=(engines, drives, links, nodes) if keeps else (engines,),
        fetch_s=history_bytes / min(engine_bytes_per_s, counted.node_get_bytes_per_s) if keeps else 0.0,
        prefill_s=rest_s,
        recompute_s=all_s,
    )


class Turns(NamedTuple):
    """Requests of a number of users, and the histories that are stored when they begin."""

    requests: list[Request]
    stored: list[tuple[int, tuple[int, ...]]]


def turns(demand: Demand, turns_per_s: float, count: int, seed: int) -> Turns:
    """Random turns of users whose histories are stored, except for the share that is not."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    shared = demand.stored_tokens // BLOCK_TOKENS
    wanted = -(-demand.prompt_tokens // BLOCK_TOKENS)
    fresh = demand.users * shared  # the first block that is in no user's history
    requests: list[Request] = []
    stored: dict[int, tuple[int, ...]] = {}
    now_s = 0.0
    for _ in range(count):
        now_s += rng.expovariate(turns_per_s)
        user = rng.randrange(demand.users)
        history: tuple[int, ...] = ()
        if rng.random() < demand.found_share:
            history = stored.setdefault(user, tuple(range(user * shared, (user + 1) * shared)))
        blocks = (*history, *range(fresh, fresh + wanted - len(history)))
        fresh += wanted
        requests.append(Request(now_s, demand.prompt_tokens, demand.answer_tokens, blocks, user))
    return Turns(requests, list(stored.items()))
