"""Follows a cluster's map: a thread that receives it from one of the nodes at each change.

What always holds: until a node has answered, and if the nodes are in no cluster, the nodes are those that were given.
A map is never replaced by an older one. If a node doesn't answer within `FOLLOW_NEXT_MS`, the next one is asked too;
the first that answers is followed until it falls silent. An address without this service is one that can't answer.
The thread ends when it is closed, within a connection's timeout.
What it doesn't do: close clients of nodes that have left, which `Nodes` does.
"""

from __future__ import annotations

import logging
import threading
from enum import Enum, auto
from typing import TYPE_CHECKING

import grpc

from kvstore.client.channel import open_channel
from kvstore.clock import SystemClock
from kvstore.cluster.map import DRAINING, Map, Member
from kvstore.errors import ConfigError
from kvstore.limits import (
    FOLLOW_AT_ONCE,
    FOLLOW_NEXT_MS,
    FOLLOW_RETRY_MS,
    REPLICAS_MAX,
    WATCH_HEARTBEAT_MS,
)
from kvstore.placement import LOTS
from kvstore.wire import cluster_pb2 as pb
from kvstore.wire import cluster_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.reach import Reach

__all__ = ["Following", "is_in_cluster", "map_of"]

log = logging.getLogger(__name__)

_CLOCK = SystemClock()


def map_of(answer: pb.MapResponse) -> Map:
    """The map that a node sent; ConfigError if it is invalid."""
    members, absent = (
        [
            Member(one.name, one.node, one.weight, one.version, DRAINING if one.draining else "", one.zone)
            for one in some
        ]
        for some in (answer.members, answer.absent)
    )
    placed_as = answer.placed_as if answer.HasField("placed_as") else None
    return Map.of(answer.revision, members, answer.members_digest, placed_as, absent, answer.lots or LOTS)


def is_in_cluster(reach: Reach) -> bool:
    """Whether the first node that answers within a call's timeout is in a cluster; False if none does."""
    following = Following(reach, Map.of(0, (Member(one, one, 1) for one in reach.nodes)))
    try:
        return bool(following.map.revision) or following.is_clustered
    finally:
        following.close()


class _End(Enum):
    """Why a node is no longer asked for the map."""

    FAILED = auto()
    UNKNOWN = auto()  # there is no such service at this address: no node, or one of an earlier version
    NO_CLUSTER = auto()


class Following:
    """The map that one `Nodes` goes by. Safe to use from any thread; a thread of its own follows it."""

    def __init__(self, reach: Reach, given: Map) -> None:
        """Start following; `given` is the list of nodes until a node of a cluster has answered."""
        self.reach, self._map = reach, given
        self.changed = threading.Condition()
        self.is_clustered = False  # by a node's answer
        self.node = ""  # that answered last
        self.replicas = 0  # of the tenant's blocks, by that node's last message; 0: unknown
        self._has_answer = self._closed = False
        self._patient_until_s = 0.0  # once somebody has waited for an answer
        self._asked: list[_Asked] = []  # the nodes that are asked at the same time
        self._first: _Asked | None = None  # of these, the one that answered first: it is followed
        self._unknown: set[str] = set()  # addresses without this service, which were logged
        self._thread = threading.Thread(target=self._run, name="kvstore-map", daemon=True)
        self._thread.start()

    @property
    def map(self) -> Map:
        """The current map; the first calls wait for a node's answer, at most a call's timeout."""
        self.wait(self.reach.call_timeout_s)
        return self._map

    def wait(self, timeout_s: float) -> bool:
        """Wait for a node's answer; returns whether the map is settled: it is there, or no longer waited for."""
        if self._has_answer:
            return True
        with self.changed:
            now_s = _CLOCK.monotonic_ns() / 1e9
            self._patient_until_s = self._patient_until_s or now_s + self.reach.call_timeout_s
            left_s = self._patient_until_s - now_s
            self.changed.wait_for(lambda: self._has_answer or self._closed, max(0.0, min(timeout_s, left_s)))
            self._has_answer |= timeout_s >= left_s  # nobody waits any more
            return self._has_answer or self._closed

    def close(self) -> None:
        """Follow no more."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
            asked = list(self._asked)
        for one in asked:
            one.cancel()
        self._thread.join()

    def _run(self) -> None:
        followed: list[str] = []  # since the last pause
        while not self._closed:
            # The given nodes may all be gone one day; those of the map were up a moment ago.
            nodes = list(dict.fromkeys([*(one.node for one in self._map.members), *self.reach.nodes]))
            nodes.sort(key=lambda one: one in followed)
            first = self._follow_first(nodes)
            ends = {one.end for one in self._asked}
            if _End.NO_CLUSTER in ends or (ends == {_End.UNKNOWN} and not self._map.revision):
                self._settle()
                return
            if first is not None and first not in followed:
                followed.append(first)
                continue
            followed.clear()
            if (
                self._map.revision or not self.is_clustered
            ):  # else the cluster's map will be there in a moment
                self._settle()
            with self.changed:
                self.changed.wait_for(lambda: self._closed, FOLLOW_RETRY_MS / 1000)

    def _settle(self) -> None:
        with self.changed:
            self._has_answer = True
            self.changed.notify_all()

    def _follow_first(self, nodes: Sequence[str]) -> str | None:
        """Ask these nodes for the map, each a moment after the one before it; follow the first that answers.

        Returns it when it answers no more, or None when none has answered within a call's timeout.
        """
        next_s = min(FOLLOW_NEXT_MS / 1000, self.reach.call_timeout_s / (2 * len(nodes)))
        with self.changed:
            self._asked, self._first = [], None
            for node in nodes:
                self.changed.wait_for(
                    lambda: self._is_decided() or sum(not one.end for one in self._asked) < FOLLOW_AT_ONCE
                )
                if self._is_decided():
                    break
                asked = _Asked(self, node)
                self._asked.append(asked)
                self.changed.wait_for(lambda one=asked: one.end or self._is_decided(), next_s)  # type: ignore[misc]
            self.changed.wait_for(lambda: self._is_decided() or all(one.end for one in self._asked))
            first = self._first
        for one in self._asked:
            if one is not first or self._closed:
                one.cancel()
        for one in self._asked:
            one.thread.join()
        return None if first is None else first.node

    def _is_decided(self) -> bool:
        return self._closed or self._first is not None

    @property
    def has_map(self) -> bool:
        """Whether a node has sent a map."""
        return self._map.revision > 0

    def note_unknown(self, node: str) -> None:
        """Log, once, that there is no such service at an address."""
        if node not in self._unknown:
            self._unknown.add(node)
            log.warning("%s does not support clusters. The map is requested from other nodes.", node)

    def takes(self, asked: _Asked, reported: pb.MapResponse) -> bool:
        """Take a node's answer; False if another node is followed, or none any more."""
        with self.changed:
            if self._closed or self._first not in {None, asked}:
                return False
            self.is_clustered, self.node = self.is_clustered or reported.clustered, asked.node
            self.replicas = min(reported.replicas, REPLICAS_MAX)
            if reported.clustered and not reported.members and not self._first and not self._map.revision:
                return True  # it has no map yet, another node may have one
            self._first = asked
            self.changed.notify_all()
        self._take(reported)
        return True

    def _take(self, reported: pb.MapResponse) -> None:
        if reported.revision <= self._map.revision or not reported.members:
            return  # an empty map helps no client
        try:
            now = map_of(reported)
        except ConfigError as error:
            log.warning("A node sent an invalid map: %s", error)
            return
        with self.changed:
            self._map = now
        self._settle()


class _Asked:
    """A node that is asked for the map, in a thread of its own."""

    def __init__(self, following: Following, node: str) -> None:
        self.node = node
        self.end: _End | None = None
        self._following = following
        self._call: grpc.Call | None = None
        self._is_cancelled = False
        self.thread = threading.Thread(target=self._run, name="kvstore-map", daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        """End the call."""
        with self._following.changed:
            self._is_cancelled, call = True, self._call
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        end = _End.FAILED
        try:
            end = self._follow()
        finally:
            with self._following.changed:
                self.end, self._call = end, None
                self._following.changed.notify_all()

    def _follow(self) -> _End:
        """Follow the map of this node while it sends it."""
        reach = self._following.reach
        try:
            with open_channel(reach.at(self.node)) as channel:
                stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Map(pb.MapRequest(tenant=reach.tenant, places_by_lots=True))
                watchdog = _Watchdog(call, reach.call_timeout_s)
                with self._following.changed:
                    self._call = call
                if self._is_cancelled:
                    call.cancel()
                try:
                    for reported in call:
                        watchdog.fed(2 * WATCH_HEARTBEAT_MS / 1000)
                        if not self._following.takes(self, reported):
                            call.cancel()
                        elif not reported.clustered:
                            return _End.NO_CLUSTER
                finally:
                    self._call = None
                    watchdog.close()
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._following.note_unknown(self.node)
                return _End.UNKNOWN
        except ConfigError as error:  # a file with a token that can't be read now
            if self._following.has_map:  # else the caller's own call raises the same
                log.warning("The map of the cluster can't be followed: %s", error)
        return _End.FAILED


class _Watchdog:
    """Cancels a call that is silent for too long."""

    def __init__(self, call: grpc.Call, timeout_s: float) -> None:
        self._call = call
        self._timer: threading.Timer | None = None
        self.fed(timeout_s)

    def fed(self, timeout_s: float) -> None:
        """A message has arrived; the next is due within this time."""
        self.close()
        self._timer = threading.Timer(timeout_s, self._call.cancel)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
