"""The service Cluster: the map of the nodes, told to each caller that is let in, until its call ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.cluster.map import Map
from kvstore.limits import WATCH_HEARTBEAT_MS
from kvstore.node.calls import refusals
from kvstore.node.inline import deadline
from kvstore.wire import cluster_pb2 as pb
from kvstore.wire import cluster_pb2_grpc

if TYPE_CHECKING:
    from kvstore.cluster.membership import Membership
    from kvstore.node.calls import Context
    from kvstore.node.gate import Gate
    from kvstore.node.node import Node

__all__ = ["ClusterService"]


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """One node's."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node, self._gate = node, gate

    async def Map(self, request: pb.MapRequest, context: Context) -> None:  # noqa: N802 - named by the proto
        """Tell the map and what becomes of it."""
        async with refusals(context, self._node.counters):
            self._gate.enter("map", context, request.tenant)
            membership, known = self._node.membership, Map(0)
            if membership is None:
                async with deadline("A client of the map"):
                    await context.write(pb.MapResponse())
                return
            while True:
                now = membership.map
                async with deadline("A client of the map"):
                    await context.write(_told(membership, now, known))
                if not now.revision:
                    return
                known = now
                await membership.later_than(known.revision, WATCH_HEARTBEAT_MS / 1000)


def _told(membership: Membership, now: Map, known: Map) -> pb.MapResponse:
    told = pb.MapResponse(clustered=True, etcd_away_ms=membership.away_ms, outside=membership.outside)
    if now.revision > known.revision:
        told.revision = now.revision
        for one in now.members:
            told.members.add(name=one.name, node=one.node, weight=one.weight, version=one.version)
    return told
