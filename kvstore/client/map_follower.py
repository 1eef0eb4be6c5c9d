"""Follows a cluster's map: a thread that receives it from one of the nodes at each change.

What always holds: until a node has answered, and if the nodes are in no cluster, the nodes are those that were given.
A map is never replaced by an older one. If a node doesn't answer in time, or falls silent, the next one is followed.
The thread ends when it is closed, within a connection's timeout.
What it doesn't do: close clients of nodes that have left, which `Nodes` does.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

from kvstore.client.channel import open_channel
from kvstore.cluster.map import DRAINING, Map, Member
from kvstore.errors import ConfigError
from kvstore.limits import FOLLOW_RETRY_MS, WATCH_HEARTBEAT_MS
from kvstore.placement import LOTS
from kvstore.wire import cluster_pb2 as pb
from kvstore.wire import cluster_pb2_grpc

if TYPE_CHECKING:
    from kvstore.reach import Reach

__all__ = ["Following", "is_in_cluster", "map_of"]

log = logging.getLogger(__name__)


def map_of(told: pb.MapResponse) -> Map:
    """The map that a node sent; ConfigError if it is invalid."""
    members, absent = (
        [
            Member(one.name, one.node, one.weight, one.version, DRAINING if one.draining else "", one.zone)
            for one in some
        ]
        for some in (told.members, told.absent)
    )
    placed_as = told.placed_as if told.HasField("placed_as") else None
    return Map.of(told.revision, members, told.members_digest, placed_as, absent, told.lots or LOTS)


def is_in_cluster(reach: Reach) -> bool:
    """Whether the first node that answers, each within a call's timeout, is in a cluster; False if none does."""
    for node in reach.nodes:
        with suppress(grpc.RpcError, ConfigError), open_channel(reach.at(node)) as channel:
            stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Map(
                pb.MapRequest(tenant=reach.tenant, places_by_lots=True), timeout=reach.call_timeout_s
            )
            told: pb.MapResponse = next(call)
            call.cancel()
            return told.clustered
    return False


class Following:
    """The map that one `Nodes` goes by. Safe to use from any thread; a thread of its own follows it."""

    def __init__(self, reach: Reach, given: Map) -> None:
        """Start following; `given` is the list of nodes until a node of a cluster has answered."""
        self._reach, self._map = reach, given
        self._changed = threading.Condition()
        self._has_answer = self._closed = False
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-map", daemon=True)
        self._thread.start()

    @property
    def map(self) -> Map:
        """The current map; the first call waits for a node's answer, at most a call's timeout."""
        if not self._has_answer:
            with self._changed:
                self._changed.wait_for(lambda: self._has_answer or self._closed, self._reach.call_timeout_s)
                self._has_answer = True  # no caller waits a second time
        return self._map

    def close(self) -> None:
        """Follow no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            call = self._call  # the thread forgets it without the lock
            if call is not None:
                call.cancel()
        self._thread.join()

    def _run(self) -> None:
        tried: set[str] = set()
        while not self._closed:
            # The given nodes may all be gone one day; those of the map were up a moment ago.
            known = [one.node for one in self._map.members]
            nodes = [*known, *(one for one in self._reach.nodes if one not in known)]
            left = [one for one in nodes if one not in tried]
            if not left:
                tried.clear()
                self._settle()
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, FOLLOW_RETRY_MS / 1000)
                continue
            tried.add(left[0])
            if self._follow(left[0], tried) is False:
                self._settle()
                return

    def _settle(self) -> None:
        with self._changed:
            self._has_answer = True
            self._changed.notify_all()

    def _follow(self, node: str, tried: set[str]) -> bool | None:
        """Follow the map of one node while it sends it; False if the node is in no cluster."""
        try:
            with open_channel(self._reach.at(node)) as channel:
                stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Map(pb.MapRequest(tenant=self._reach.tenant, places_by_lots=True))
                watchdog = _Watchdog(call, self._reach.call_timeout_s)
                with self._changed:
                    if self._closed:
                        call.cancel()
                    self._call = call
                try:
                    for told in call:
                        watchdog.fed(2 * WATCH_HEARTBEAT_MS / 1000)
                        if not told.clustered:
                            return False
                        tried.clear()
                        tried.add(node)
                        self._take(told)
                finally:
                    self._call = None
                    watchdog.close()
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False  # an older node
        except ConfigError as error:  # a file with a token that can't be read now
            if self._map.revision:  # else there is no map yet, and the caller's own call raises the same
                log.warning("The map of the cluster can't be followed: %s", error)
        return None

    def _take(self, told: pb.MapResponse) -> None:
        if told.revision <= self._map.revision or not told.members:
            return  # an empty map helps no client
        try:
            now = map_of(told)
        except ConfigError as error:
            log.warning("A node sent an invalid map: %s", error)
            return
        with self._changed:
            self._map = now
        self._settle()


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
