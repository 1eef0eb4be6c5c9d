"""Deletions and erasures of a cluster: every member is asked, and every node that is absent from the map.

What always holds: a call returns once all of them have answered, by the same map and under the names that it has;
otherwise it raises the error of one that has not, since the data would reappear with that node. Repeating a call is not
an error.

A copy may be in flight from a node that has not been asked yet to one that has. Deletions are therefore requested
twice. An erasure is not: a node that has begun it refuses copies from its erase domain for `ERASED_COPIES_REFUSED_MS`,
and by then all others have begun as well, or all are asked again.

What it doesn't do: reach a node that was forgotten (`kvstore cluster forget`), or files exported from the cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from kvstore.errors import KvError, NodeUnavailable
from kvstore.limits import CLUSTER_MAP_AGAIN_MS, ERASE_ROUND_MS

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from kvstore.client.block_calls import Deleted
    from kvstore.client.client import Client
    from kvstore.client.erasing import Erased, Erasure
    from kvstore.client.nodes import Nodes
    from kvstore.clock import Clock
    from kvstore.cluster.map import Map
    from kvstore.durability import Durability

__all__ = ["Removals"]

_MAP_S = CLUSTER_MAP_AGAIN_MS / 1000


class _Answer(Protocol):
    """What a node reports about itself besides its answer."""

    @property
    def digests(self) -> set[int]:
        """Return the digests of the maps that it has used; 0 stands for no cluster, 1 for no map yet."""
        ...

    @property
    def nodes(self) -> set[str]:
        """Its name, "" of an earlier version."""
        ...


A = TypeVar("A", bound=_Answer)


class Removals:
    """A client's removals. Safe to use from any thread."""

    def __init__(
        self, nodes: Nodes, each: Callable[..., Mapping[str, Any]], closing: threading.Event, clock: Clock
    ) -> None:
        """`each` makes a call of several nodes at the same time; waiting ends once `closing` is set."""
        self._nodes, self._each, self._closing, self._clock = nodes, each, closing, clock

    def delete(
        self,
        keys: Sequence[bytes],
        durability: Durability,
        timeout_s: float,
        session: tuple[str, str] = ("", ""),
    ) -> list[bool]:
        """As `ClusterClient.delete`; of a session that was removed: only blocks that no other one lists there."""
        until_s = self._now_s() + timeout_s
        found = [False] * len(keys)
        asked = 0  # which members were all asked, the last time

        def ask(client: Client) -> Deleted:
            return client._blocks.delete_detailed(keys, durability=durability, session=session)  # noqa: SLF001 - of this package

        while True:
            now = self._nodes.map
            answers, digests, failure = self._asked(now, ask)
            for answer in answers:
                found = [had or has for had, has in zip(found, answer.found, strict=True)]
            if failure is not None:
                self._go_on_without(now, failure, until_s)
                asked = 0
                continue
            if digests <= {0} or (asked == now.digest and digests == {now.digest}):
                return found
            self._go_on(until_s, "blocks were deleted", wait=asked == now.digest)
            asked = now.digest

    def erase(self, ask: Callable[[Client, float], Erased], timeout_s: float) -> list[Erasure]:
        """As `ClusterClient.erase_user` and `erase_tenant`; `ask` asks one node, for so many seconds at most."""
        until_s = self._now_s() + timeout_s
        erasures: list[Erasure] = []
        while True:
            now, began_s = self._nodes.map, self._now_s()
            answers, digests, failure = self._asked(
                now, lambda client: ask(client, max(0.001, until_s - self._now_s()))
            )
            erasures += [answer.erasure for answer in answers]
            if failure is not None:
                self._go_on_without(now, failure, until_s)
                continue
            in_time = self._now_s() - began_s <= ERASE_ROUND_MS / 1000
            if digests <= {0} or (digests == {now.digest} and in_time):
                return erasures
            self._go_on(until_s, "it was erased", wait=in_time)

    def _go_on(self, until_s: float, doing: str, *, wait: bool) -> None:
        if self._now_s() >= until_s:
            raise NodeUnavailable(
                f"The cluster's map was changing while {doing}: a copy may be left. Repeat the call."
            )
        if wait:
            self._closing.wait(_MAP_S)

    def _go_on_without(self, now: Map, failure: KvError, until_s: float) -> None:
        """Raise the error of a node, unless the map has changed since: perhaps the node has left it."""
        if not isinstance(failure, NodeUnavailable) or self._now_s() >= until_s:
            raise failure
        if self._nodes.map.revision == now.revision:
            self._closing.wait(_MAP_S)  # the map may be a moment later than the end of the node
        if self._nodes.map.revision == now.revision or self._closing.is_set():
            raise failure

    def _asked(self, now: Map, ask: Callable[[Client], A]) -> tuple[list[A], set[int], KvError | None]:
        """Ask all nodes of a map; their answers, the maps that its members used, and an error of a node."""
        everywhere = {one.node: [0] for one in (*now.members, *now.absent)}
        answers: Mapping[str, A | KvError] = self._each(everywhere, lambda client, _: ask(client))
        digests, failure, alone = set[int](), None, list[str]()
        for one in now.members:
            answer = answers[one.node]
            if isinstance(answer, KvError):
                failure = failure or answer
                continue
            digests |= answer.digests
            alone += [one.node] * (0 in answer.digests)
            if one.name != one.node and answer.nodes - {one.name, ""}:  # else it was given by its address
                failure = failure or NodeUnavailable(
                    f"{one.node} is no longer the cluster's member {one.name} but another node, and what that member"
                    " has may come back with it. Repeat the call."
                )
        if alone and digests != {0}:
            failure = failure or NodeUnavailable(
                f"{alone[0]} can't say by which map it was asked: it is of an earlier version, or in no cluster. All"
                " nodes have done it, but a copy that was on its way may be left. Repeat the call when it was upgraded,"
                " or is off the map."
            )
        for one in now.absent:
            answer = answers[one.node]
            if isinstance(answer, KvError) or answer.nodes - {one.name}:
                failure = failure or NodeUnavailable(
                    f"{one.node} ({one.name}) is absent from the cluster and has not answered: what it has would come"
                    " back with it. Repeat the call when it is there, or, if it never will be, after `kvstore cluster"
                    f" forget {one.name}`."
                )
        return [one for one in answers.values() if not isinstance(one, KvError)], digests, failure

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9
