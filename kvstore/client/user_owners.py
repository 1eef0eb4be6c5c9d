"""The nodes that must have a user's blocks: their home and, with two replicas, its standby, as the home names it.

`Nodes.put` and `Nodes.arm` put to both behind one flag, and ask the home again when both have the blocks.

What always holds: while the home does not answer, the nodes stay those of its last answer, or are the home of the map.
A node that has replaced another one at its address counts as another, by its name. A call ends within its time.
What it doesn't do: name a standby by the map: after a join it is another node than the next in order.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

import grpc

from kvstore.client.arming import Arming, Owners, PutTerms
from kvstore.client.blocks import PutResult
from kvstore.client.client import session_calls_of
from kvstore.client.cluster_blocks import keys_of
from kvstore.client.cluster_puts import now_s, seconds_until
from kvstore.client.cluster_removals import Removals
from kvstore.client.owner_calls import OwnerCalls
from kvstore.clock import SystemClock
from kvstore.errors import KvError, NodeUnavailable
from kvstore.limits import (
    CLUSTER_AHEAD_AGAIN_MS,
    LEASE_TIMEOUT_MS_MAX,
    SESSIONS_STANDBY_USERS_MAX,
)
from kvstore.names import domain_of
from kvstore.wire import sessions_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Sequence

    from kvstore.client.client import Client
    from kvstore.client.cluster_blocks import ClusterBlock
    from kvstore.client.cluster_puts import ClusterPuts
    from kvstore.client.nodes import Nodes
    from kvstore.cluster.map import Map
    from kvstore.durability import Durability
    from nic_offload.flags import FlagWord

__all__ = ["UserOwners", "UserPuts"]

_CLOCK = SystemClock()


class UserOwners:
    """The nodes that must have one user's blocks. Safe to use from any thread."""

    def __init__(self, nodes: Nodes, calls: OwnerCalls, user: str) -> None:
        self._nodes, self._calls, self._user = nodes, calls, user
        self._lock = threading.Lock()
        self._names = self._home_alone()
        self._map = 0  # revision of the map with which the home was asked and has answered
        self._tried_ns = 0

    @property
    def names(self) -> dict[str, str]:
        """As `Roles.names`, the home first."""
        return self._names

    @property
    def is_known(self) -> bool:
        """Whether the home has answered since the map has changed."""
        return self._map == self._nodes.map.revision

    def ask(self, timeout_s: float, away: str = "") -> dict[str, str] | None:
        """As `Roles.ask`; the home checks whether the `away` standby still answers."""
        now = self._nodes.map
        (home,) = alone = self._home_alone()

        def standby(client: Client, _: list[int]) -> pb.GetStandbyResponse:
            calls = session_calls_of(client)
            request = pb.GetStandbyRequest(
                tenant=client.tenant, user=self._user, map_revision=calls.home.revision(), away_node=away
            )
            found: pb.GetStandbyResponse
            with calls.calling("Finding the standby of a user's home"):
                try:
                    found = calls.stub.GetStandby(request, timeout=timeout_s)
                except grpc.RpcError as failure:
                    if failure.code() is not grpc.StatusCode.UNIMPLEMENTED:
                        raise
                    found = pb.GetStandbyResponse(name=alone[home])  # an earlier version: puts go to it alone
            return found

        answer = self._calls.each({home: []}, standby)[home]
        with self._lock:
            self._tried_ns = _CLOCK.monotonic_ns()
            if isinstance(answer, KvError):
                if home not in self._names:
                    self._names = alone
                return None
            names = {home: answer.name}
            if answer.standby_node:
                names[answer.standby_node] = answer.standby_name
            self._names, self._map = names, now.revision
            return names

    def look(self, away: Collection[str]) -> None:
        """As `Roles.look`, at most once every `CLUSTER_AHEAD_AGAIN_MS`."""
        is_due = _CLOCK.monotonic_ns() >= self._tried_ns + CLUSTER_AHEAD_AGAIN_MS * 1_000_000
        if is_due and (away or not self.is_known):
            home = self._nodes.home(self._user)
            self.ask(self._nodes.reach.call_timeout_s, next((node for node in away if node != home), ""))

    def _home_alone(self) -> dict[str, str]:
        now, home = self._nodes.map, self._nodes.home(self._user)
        return {home: next((one.name for one in now.members if one.node == home), "")}


class UserPuts:
    """The puts of users' blocks, for `Nodes`. Safe to use from any thread."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._calls = nodes, OwnerCalls(nodes)
        self._arming = Arming(self._calls, lambda: nodes.map)
        self._lock = threading.Lock()
        self._known = OrderedDict[str, UserOwners]()  # the last used last
        self._removals = Removals(nodes, self._calls.each, self._calls.closing, _CLOCK)

    def arm(
        self,
        user: str,
        blocks: Sequence[ClusterBlock],
        flag: FlagWord | None,
        durability: Durability,
        lease_ms: int,
        expires_unix_ms: int,
        call_s: float,
    ) -> ClusterPuts:
        """As `Nodes.arm`."""
        call_s = self._nodes._await_map(call_s)  # noqa: SLF001 - of this package
        given = list(blocks)
        keys, roles = keys_of(given), None
        if self._nodes._has_standbys:  # noqa: SLF001 - of this package
            roles = self._roles(user)
            if not roles.is_known:
                roles.ask(call_s)
        owners = Owners(
            lambda now, _: [self._home(now, user)],
            partial(self._owned, user, roles),
            1,
            roles,
            domain_of(user),
            partial(self._nodes.home, user),
        )
        terms = PutTerms(durability, lease_ms, expires_unix_ms, call_s)
        return self._arming.arm(given, keys, flag, owners, terms)

    def _roles(self, user: str) -> UserOwners:
        with self._lock:
            if (roles := self._known.pop(user, None)) is None:
                roles = UserOwners(self._nodes, self._calls, user)
            self._known[user] = roles
            if len(self._known) > SESSIONS_STANDBY_USERS_MAX:
                self._known.popitem(last=False)
            return roles

    def put(
        self,
        user: str,
        blocks: Sequence[ClusterBlock],
        durability: Durability,
        expires_unix_ms: int,
        timeout_s: float,
    ) -> list[PutResult]:
        """As `Nodes.put`."""
        until_s = now_s() + timeout_s
        lease_ms = min(LEASE_TIMEOUT_MS_MAX, max(1, int(timeout_s * 1000)))
        call_s = min(timeout_s, self._nodes.reach.call_timeout_s)
        try:
            self._nodes._await_map(call_s)  # noqa: SLF001 - of this package
        except NodeUnavailable as error:
            return [PutResult(key, None, error) for key in keys_of(blocks)]
        puts = self.arm(user, blocks, None, durability, lease_ms, expires_unix_ms, call_s)
        try:
            return puts.wait(seconds_until(until_s))
        finally:
            puts.abandon()

    def delete(
        self, keys: Sequence[bytes], durability: Durability, session: tuple[str, str] = ("", "")
    ) -> list[bool]:
        """As `Nodes.delete`; of a session that was removed: only blocks that no other one lists there."""
        return self._removals.delete(keys, durability, self._nodes.reach.call_timeout_s, session)

    def stop(self) -> None:
        """Stop following the map and probing: before the clients are closed."""
        self._calls.closing.set()
        self._arming.close()
        self._calls.silent.close()

    def close(self) -> None:
        """End the calls' threads: after the clients were closed."""
        self._calls.threads.shutdown()

    def _home(self, now: Map, user: str) -> str:
        home = now.home(self._nodes.placed_as(now), user)
        assert home is not None, "a map that is followed has members"
        return home.node

    def _owned(
        self, user: str, roles: UserOwners | None, some: Iterable[int], called: Container[tuple[str, int]]
    ) -> dict[str, list[int]]:
        nodes = [self._home(self._nodes.map, user)] if roles is None else list(roles.names)
        wanted = list(some)
        parts = {node: [at for at in wanted if (node, at) not in called] for node in nodes}
        return {node: own for node, own in parts.items() if own}
