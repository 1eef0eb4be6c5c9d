"""Reads of a cluster: which owner of a block is asked first, and which ones after it.

A block's copies are on its first `replicas` owners. They are asked in the order of the map; but if the client has
stated its zone and only the second owner is in it, the second is asked before the first. The other owners follow, for
blocks that are still missing. An owner that did not send a block in its share of the time, and may only be slow, is
asked for it once more, with the rest of the time.

What always holds: a zone changes the order of the owners that have copies, never which nodes may be asked. So a wrong
zone, the client's or one on the map, costs time and no block. A draining node comes last, whatever its zone. A read has
one deadline. If no node has a block, its miss is that of its first owner.
What it doesn't do: compare copies. docs/cluster.md (Reads from the nearest copy) says why both have the same bytes.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvstore.errors import KvError, NodeUnavailable
from kvstore.limits import CLUSTER_FIRST_TRY_MS, FETCH_CANCEL_MS, OWNERS_MAX, REPLICAS_MAX
from kvstore.miss import Miss, MissReason
from kvstore.names import is_in_domain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvstore.client.client import Client
    from kvstore.client.nodes import Nodes
    from kvstore.client.repairs import Repairs
    from kvstore.client.silent_nodes import SilentNodes
    from kvstore.clock import Clock
    from kvstore.cluster.map import Map

__all__ = ["Reads", "by_owner"]

_PUT_BACK = {MissReason.UNKNOWN, MissReason.CORRUPT, MissReason.UNREADABLE}
_NOWHERE: frozenset[int] = frozenset()
R = TypeVar("R")


class _Each(Protocol):
    """Calls all nodes at the same time, each for its keys."""

    def __call__(
        self, parts: Mapping[str, list[int]], call: Callable[[Client, list[int]], R]
    ) -> Mapping[str, R | KvError]: ...


def by_owner(
    now: Map,
    tenant: bytes,
    keys: Sequence[bytes],
    some: Iterable[int],
    rank: int,
    near: frozenset[int] = _NOWHERE,
) -> dict[str, list[int]]:
    """Which of these keys each node owns at this rank; a small map may have no such owner.

    If a key's second owner is one of the members `near`, and its first is not, they change places.
    """
    parts: dict[int, list[int]] = defaultdict(list)
    staying = min(OWNERS_MAX, len(now.members) - len(now.draining))
    if rank >= staying + len(now.draining):
        return {}
    some = list(some)
    turns = bool(near) and rank < REPLICAS_MAX <= staying
    for at, owners in zip(some, now.owners_of_each(tenant, (keys[at] for at in some)), strict=True):
        is_turned = turns and owners[1] in near and owners[0] not in near
        parts[owners[1 - rank if is_turned else rank]].append(at)
    return {now.members[place].node: ats for place, ats in parts.items()}


def _first_try_s(left_s: float) -> float:
    """How long a node may take: half of what is left, besides the time in which a get of a hung node is given up.

    A call that has little more than that can't outlast a hung node: half of all that is left.
    """
    spare_s = left_s - FETCH_CANCEL_MS / 1000
    return min(CLUSTER_FIRST_TRY_MS / 1000, (left_s if spare_s < left_s / 16 else spare_s) / 2)


class Reads:
    """A client's reads. Safe to use from any thread."""

    def __init__(
        self,
        nodes: Nodes,
        replicas: Callable[[], int],
        each: _Each,
        silent: SilentNodes,
        repairs: Repairs,
        clock: Clock,
    ) -> None:
        self._nodes, self._replicas, self._each = nodes, replicas, each
        self._silent, self._repairs, self._clock = silent, repairs, clock

    def found(
        self,
        keys: Sequence[bytes],
        ask: Callable[[Client, list[int], float], Sequence[R | Miss]],
        timeout_s: float,
        copied: Callable[[int, R], bytes | None] | None = None,
    ) -> list[R | Miss]:
        """Ask each key's first owner, or the nearest, then the next ones for missing blocks, which are then put back.

        One node more than there are replicas is asked: it is an owner while another is off the map, and was one before
        the last node joined.
        """
        began_ns = self._clock.monotonic_ns()
        until_s = began_ns / 1e9 + timeout_s
        try:
            self._nodes._await_map(timeout_s)  # noqa: SLF001 - of this package
        except NodeUnavailable as error:
            return [Miss(MissReason.NODE_AWAY, str(error))] * len(keys)
        now = self._nodes.map
        tenant, replicas = self._nodes.placed_as(now).encode(), self._replicas()
        near = self._near(now, replicas)
        staying = min(OWNERS_MAX, len(now.members) - len(now.draining))
        ranks = [*range(min(replicas + 1, staying))]
        ranks += range(staying, staying + len(now.draining))  # draining members come last
        outcomes: list[R | Miss] = [Miss(MissReason.NODE_AWAY, "the map has no members")] * len(keys)
        lost: dict[int, list[str]] = defaultdict(list)  # the owners that should have a block and don't
        late: dict[int, set[int]] = defaultdict(set)  # the ranks whose owners did not send a block in time
        left = [*range(len(keys))]
        for rank, some, left_s in self._tries(ranks, left, late, until_s):
            for node, at, outcome in self._asked(by_owner(now, tenant, keys, some, rank, near), ask, left_s):
                if not isinstance(outcome, Miss):
                    outcomes[at] = outcome
                    if copied is not None:
                        self._put_back(lost[at], node, keys[at], began_ns, partial(copied, at, outcome))
                    continue
                if node == now.members[now.owners(tenant, keys[at])[0]].node:
                    outcomes[at] = outcome  # the first owner's miss is the most informative
                if outcome.reason is MissReason.NODE_AWAY:
                    late[at].add(rank)
                elif rank < replicas and outcome.reason in _PUT_BACK:
                    lost[at].append(node)
            left[:] = [at for at in left if isinstance(outcomes[at], Miss)]
        return outcomes

    def _tries(
        self, ranks: Sequence[int], left: Sequence[int], late: Mapping[int, set[int]], until_s: float
    ) -> Iterator[tuple[int, Sequence[int], float]]:
        """The ranks to ask, for which blocks, and for how long: each once, then again those that were late."""
        first = ranks if len(ranks) > 1 else ()
        for rank in first:
            if left:
                yield rank, left, _first_try_s(self._seconds_until(until_s))
        for number, rank in enumerate(ranks):
            some = [at for at in left if rank in late[at]] if first else left
            left_s = self._seconds_until(until_s)
            if any(late[at].intersection(ranks[number + 1 :]) for at in some):
                left_s /= 2
            if some and (left_s or not first):
                yield rank, some, left_s

    def _seconds_until(self, until_s: float) -> float:
        return max(0.0, until_s - self._clock.monotonic_ns() / 1e9)

    def _near(self, now: Map, replicas: int) -> frozenset[int]:
        """The members in this client's zone, if any is to be preferred."""
        zone = self._nodes.reach.zone
        return now.in_zone.get(zone, _NOWHERE) if zone and replicas > 1 else _NOWHERE

    def _asked(
        self,
        parts: Mapping[str, list[int]],
        ask: Callable[[Client, list[int], float], Sequence[R | Miss]],
        left_s: float,
    ) -> Iterator[tuple[str, int, R | Miss]]:
        """Each node's outcomes for its keys."""
        for node, answer in self._each(parts, lambda client, some: ask(client, some, left_s)).items():
            answered: Sequence[R | Miss]
            if isinstance(answer, KvError):
                answered = [Miss(MissReason.NODE_AWAY, str(answer))] * len(parts[node])
            else:
                answered = answer
                if any(isinstance(one, Miss) and one.reason is MissReason.NODE_AWAY for one in answered):
                    self._silent.suspect(node)
            for at, outcome in zip(parts[node], answered, strict=True):
                yield node, at, outcome

    def _put_back(
        self, nodes: Iterable[str], source: str, key: bytes, read_ns: int, copied: Callable[[], bytes | None]
    ) -> None:
        if is_in_domain(key):
            return  # the domain is unknown here, and may have been erased since: the nodes copy these blocks themselves
        for node in nodes:
            if self._repairs.has_room and (data := copied()) is not None:
                self._repairs.add(node, source, key, data, read_ns)
