"""A plan: the cheapest cluster found that meets the deadline for the first token, for each way of serving.

The ways are: recompute everything; store KV by the CPU's path; by the triggered path; and by the triggered path with
a DRAM tier in the nodes. For each way the search begins with the fewest parts that suffice on average
(`sim.replay.plan`), and continues in the event model: engines first, since they cost most, then nodes, links, drives,
each as few as suffice while the others are ample. So no single part can be removed from the result; another mix may
still be cheaper.

What always holds: a plan met the deadline for all but `_SHARE_MAX` of the turns in each of several trials that the
search had not used. So it has some margin to the promised p99. If no cluster within the bounds meets it, the result is
the reason, and no plan.

What it doesn't do: mix ways, or parts of different speeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from sim.replay.plan import bounds, turns
from sim.replay.run import Deadline, Terms
from sim.replay.simulate import keeps, simulate
from sim.units import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sim.models import Model
    from sim.replay.cluster_hardware import Cluster, PathName
    from sim.replay.plan import Bounds, Demand
    from sim.replay.simulate import Result

__all__ = [
    "WAYS",
    "Plan",
    "Way",
    "best",
    "highest_users",
    "make_plan",
    "trial",
]

Way = Literal["recompute", "cpu", "triggered", "triggered+dram"]
WAYS: tuple[Way, ...] = ("recompute", "cpu", "triggered", "triggered+dram")

LATE_SHARE = 0.01  # of the turns may be late: the deadline is for the p99
_SHARE_MAX = 0.005  # of the turns, in the trials of the search and after it
_SEARCH_TURNS, _CHECK_TURNS = 1200, 2500
_SHORT_CHECKS, _CHECKS = 2, 4  # late turns come in bursts, so the later checks are as long as a trial
_TRIAL_TURNS = 20_000
_TRIAL_S = 600.0
_ALONE_SHARE_MAX = 0.9  # of the deadline may go to one turn's prefill
_GPUS_MAX, _ENGINES_MAX, _NODES_MAX, _DRIVES_MAX, _LINKS_MAX = 64, 4096, 1024, 32, 8
_NODE_MEMORY_BYTES_MAX = 4e12
_USERS_MAX = 10**7
_NUMBERS = 5  # searched for, one trial each at least: ample parts; then engines, nodes, links, drives
_GROWTHS = 5  # doublings in the search for a number that is enough


@dataclass(frozen=True, slots=True)
class Plan:
    """One way of serving: the cluster, or the reason why there is none."""

    way: Way
    demand: Demand
    cluster: Cluster | None
    least: Bounds | None  # what is needed on average
    terms: Terms  # how its engines work
    why_not: str = ""
    ttft_p50_s: float = 0.0  # of the last of the trials it was checked with
    ttft_p99_s: float = 0.0

    @property
    def path(self) -> PathName:
        """How KV moves."""
        return _path_of(self.way)

    @property
    def usd_per_hour(self) -> float:
        """The cost: a plan without storing needs no storage."""
        assert self.cluster is not None
        storage = 0.0 if self.way == "recompute" else self.cluster.storage_usd_per_hour
        return self.cluster.gpus_usd_per_hour + storage


def _path_of(way: Way) -> PathName:
    """How KV moves on a way."""
    return "triggered" if way == "triggered+dram" else way


class _NoPlan(Exception):
    """The result without a plan, with the reason."""


def _trial_turns(demand: Demand, cluster: Cluster) -> int:
    """Ten minutes of turns, within the numbers that are significant and take an acceptable time."""
    return min(_TRIAL_TURNS, max(_CHECK_TURNS, int(_TRIAL_S * demand.turns_per_s(cluster))))


def _turns_of(number: int, demand: Demand, cluster: Cluster) -> int:
    """The turns of the trial with this number: 0 is the search's, others check its result."""
    if not number:
        return _SEARCH_TURNS
    return _CHECK_TURNS if number <= _SHORT_CHECKS else _trial_turns(demand, cluster)


class _Progress:
    """The share of a plan's turns that have been simulated, if the rest of it takes the fewest trials it can."""

    def __init__(self, demand: Demand, way: Way, show: Callable[[float], None]) -> None:
        self._demand, self._show = demand, show
        self._searches = 1 if way == "recompute" else _NUMBERS
        self._turns = 0

    def begin(self, cluster: Cluster, number: int) -> None:
        """Report it, as the trial with this number begins."""
        searches = 0 if number else max(1, self._searches)
        numbers = [0] * searches + list(range(max(1, number), _CHECKS + 1))
        rest = sum(_turns_of(one, self._demand, cluster) for one in numbers)
        self._show(self._turns / (self._turns + rest))
        self._turns += _turns_of(number, self._demand, cluster)
        self._searches -= 1


class _Search(NamedTuple):
    model: Model
    demand: Demand
    way: Way
    seed: int
    begin: Callable[[Cluster, int], None]  # called as each trial begins, with its number
    terms: Terms

    def holds(self, cluster: Cluster, number: int = 0) -> bool:
        """Whether the deadline is met in the trial with this number."""
        self.begin(cluster, number)
        count = _turns_of(number, self.demand, cluster)
        work = turns(self.demand, self.demand.turns_per_s(cluster), count, self.seed * 1000 + number)
        deadline = Deadline(self.demand.ttft_s, int(_SHARE_MAX * count))
        path = _path_of(self.way)
        return keeps(work.requests, self.model, cluster, path, self.terms, deadline, work.stored)


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` to `high` that holds; `high` is known to. `low` is tried first: it often does."""
    if low >= high or holds(low):
        return min(low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _engine_sizes(model: Model, cluster: Cluster, demand: Demand, path: PathName) -> Iterator[Cluster]:
    """Engines of more and more GPUs, as long as one turn alone takes too long in the smaller ones."""
    gpus = cluster.gpus_per_engine
    why = ""
    found = False
    while gpus <= _GPUS_MAX:
        sized = replace(cluster, gpus_per_engine=gpus)
        gpus *= 2
        try:
            least = bounds(model, sized, demand, path)
        except OutOfRange as error:
            why = str(error)
            continue
        slow = 1 - demand.found_share if path != "recompute" else 1.0
        alone_s = least.recompute_s if slow > LATE_SHARE else least.prefill_s
        if alone_s <= _ALONE_SHARE_MAX * demand.ttft_s:
            found = True
            yield sized
        else:
            what = (
                "whose history was not found" if path != "recompute" and slow > LATE_SHARE else "of any user"
            )
            why = (
                f"a turn {what} takes {alone_s:.2f} s to prefill on {sized.gpus_per_engine} GPUs"
                f" with nobody else there; the deadline is {demand.ttft_s:g} s, and a tenth is left for waiting"
            )
    if not found:
        raise _NoPlan(why)


def _searched(search: _Search, sized: Cluster) -> tuple[Cluster, Bounds]:
    """The cheapest cluster of engines of one size that holds in the search's own trial."""
    way, demand = search.way, search.demand
    keeps_kv = way != "recompute"
    wide = replace(sized, drives_per_node=_DRIVES_MAX, links_per_node=_LINKS_MAX)
    least = bounds(search.model, wide, demand, _path_of(way))
    engines, nodes = least.cluster.engines, least.cluster.nodes

    def full(engines: int, nodes: int) -> Cluster:
        if not keeps_kv:
            return replace(sized, engines=engines, nodes=1, drives_per_node=1, links_per_node=1)
        memory = _tier_bytes(least, nodes) if way == "triggered+dram" else sized.node_memory_bytes
        return replace(wide, engines=engines, nodes=nodes, node_memory_bytes=memory)

    for _ in range(_GROWTHS):
        if search.holds(full(engines, nodes)):
            break
        engines, nodes = min(_ENGINES_MAX, 2 * engines), min(_NODES_MAX, 2 * nodes)
    else:
        raise _NoPlan(f"not even {engines // 2} engines and {nodes // 2} nodes keep the deadline")
    engines = _least(least.cluster.engines, engines, lambda one: search.holds(full(one, nodes)))
    if not keeps_kv:
        return full(engines, 1), least
    nodes = _least(least.cluster.nodes, nodes, lambda one: search.holds(full(engines, one)))
    needs = {need.what: need.number for need in least.needs}
    links = _least(
        min(_LINKS_MAX, -(-needs["node links"] // nodes)),
        _LINKS_MAX,
        lambda one: search.holds(replace(full(engines, nodes), links_per_node=one)),
    )
    found = replace(full(engines, nodes), links_per_node=links)
    drives = _least(
        min(_DRIVES_MAX, -(-needs["drives"] // nodes)),
        _DRIVES_MAX,
        lambda one: search.holds(replace(found, drives_per_node=one)),
    )
    return replace(found, drives_per_node=drives), least


def _tier_bytes(least: Bounds, nodes: int) -> float:
    """DRAM of a node, so that all users' histories fit, with room for nodes that have more users than others."""
    return min(_NODE_MEMORY_BYTES_MAX, 1.25 * least.stored_bytes / nodes)


def _more(cluster: Cluster, turn: int, *, keeps_kv: bool) -> Cluster:
    """Add a little, cheapest parts first: drives and links, then a node, then an engine."""
    engine = replace(cluster, engines=cluster.engines + 1 + cluster.engines // 20)
    if not keeps_kv or turn % 3 == 2:  # noqa: PLR2004 - the third of three
        return engine
    if turn % 3 == 0:
        return replace(
            cluster,
            drives_per_node=min(_DRIVES_MAX, cluster.drives_per_node + 1 + cluster.drives_per_node // 8),
            links_per_node=min(_LINKS_MAX, cluster.links_per_node + 1),
        )
    return replace(cluster, nodes=cluster.nodes + 1 + cluster.nodes // 20)


def make_plan(
    model: Model,
    cluster: Cluster,
    demand: Demand,
    way: Way = "triggered",
    seed: int = 1,
    progress: Callable[[float], None] = lambda _: None,
    terms: Terms = Terms(),  # noqa: B008 - it is frozen
) -> Plan:
    """The cheapest cluster that was found for one way; its speeds and prices are those of `cluster`.

    `progress` is called with the share that is done, which falls when more trials are needed than the fewest possible.
    """
    search = _Search(model, demand, way, seed, _Progress(demand, way, progress).begin, terms)
    keeps_kv = way != "recompute"
    why: Exception
    try:
        for sized in _engine_sizes(model, cluster, demand, _path_of(way)):
            try:
                found, least = _searched(search, sized)
            except (_NoPlan, OutOfRange) as error:  # the latter for counts that no cluster may have
                why = error
                continue
            for turn in range(4 * _GROWTHS):
                if all(search.holds(found, number) for number in range(1, _CHECKS)):
                    plan = _tried(search, found, least)
                    if plan is not None:
                        return plan
                found = _more(found, turn, keeps_kv=keeps_kv)
            why = _NoPlan("no cluster that was tried kept the deadline in all of the trials that checked it")
    except _NoPlan as error:
        why = error
    return Plan(way, demand, None, None, terms, str(why))


def _tried(search: _Search, found: Cluster, least: Bounds) -> Plan | None:
    """The last check, whose times are reported with the plan."""
    search.begin(found, _CHECKS)
    seed = search.seed * 1000 + _CHECKS
    count = _trial_turns(search.demand, found)
    result = _run(search.model, found, search.demand, search.way, count, seed, search.terms)
    if result.ttft_quantile_s(1 - _SHARE_MAX) > search.demand.ttft_s:
        return None
    p50_s, p99_s = result.ttft_quantile_s(0.5), result.ttft_quantile_s(1 - LATE_SHARE)
    return Plan(search.way, search.demand, found, least, search.terms, ttft_p50_s=p50_s, ttft_p99_s=p99_s)


def _run(
    model: Model,
    cluster: Cluster,
    demand: Demand,
    way: Way,
    count: int,
    seed: int,
    terms: Terms,
    progress: Callable[[float], None] = lambda _: None,
) -> Result:
    work = turns(demand, demand.turns_per_s(cluster), count, seed)
    return simulate(work.requests, model, cluster, _path_of(way), terms, progress, work.stored)


def trial(
    model: Model, plan: Plan, seed: int = 1, progress: Callable[[float], None] = lambda _: None
) -> Result:
    """Send the planned users through the event model once more, with random numbers that the search didn't use."""
    assert plan.cluster is not None
    count = _trial_turns(plan.demand, plan.cluster)
    return _run(model, plan.cluster, plan.demand, plan.way, count, seed * 1000 + 999, plan.terms, progress)


def best(plans: Sequence[Plan]) -> Plan | None:
    """The cheapest plan that holds; recomputing, if it costs no more."""
    return min((plan for plan in plans if plan.cluster), key=lambda plan: plan.usd_per_hour, default=None)


def highest_users(
    model: Model,
    cluster: Cluster,
    demand: Demand,
    way: Way,
    seed: int = 1,
    progress: Callable[[float], None] = lambda _: None,
    terms: Terms = Terms(),  # noqa: B008 - it is frozen
) -> int:
    """The most users whose deadline a given cluster meets, within about 3 %; 0 if not even one's.

    `progress` is as in `make_plan`.
    """
    trials = 0

    def suffices(users: int) -> bool:
        """Whether the cluster has enough of each part on average."""
        try:
            least = bounds(model, cluster, replace(demand, users=users), _path_of(way))
        except OutOfRange:
            return False
        has = (cluster.engines, cluster.drives, cluster.nodes * cluster.links_per_node, cluster.nodes)
        return all(need.number <= number for need, number in zip(least.needs, has, strict=False))

    def holds(users: int, rest: int) -> bool:
        """Whether the deadline is met; at least `rest` trials follow this one."""
        nonlocal trials
        progress(trials / (trials + 1 + rest))
        trials += 1
        search = _Search(
            model, replace(demand, users=users), way, seed, lambda _cluster, _number: None, terms
        )
        return all(search.holds(cluster, number) for number in range(1, _SHORT_CHECKS + 1))

    high = 1
    while high <= _USERS_MAX and suffices(high):
        high *= 2
    low = high // 2
    while low and not holds(low, _halvings(low, high)):
        low, high = low // 2, low
    while halvings := _halvings(low, high):
        middle = (low + high) // 2
        is_met = suffices(middle) and holds(middle, halvings - 1)
        low, high = (middle, high) if is_met else (low, middle)
    return low


def _halvings(low: int, high: int) -> int:
    """How often the range is halved until it is narrow enough."""
    return max(0, math.ceil(math.log2((high - low) / max(1, low // 32))))
