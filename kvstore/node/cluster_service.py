"""The service Cluster: sends the map of the nodes to each authenticated caller, until its call ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.cluster.map import DRAINING, TOO_OLD, Map
from kvstore.limits import WATCH_HEARTBEAT_MS
from kvstore.node.calls import refusals
from kvstore.node.inline import deadline
from kvstore.node.upkeep import Found
from kvstore.placement import LOTS
from kvstore.wire import cluster_pb2 as pb
from kvstore.wire import cluster_pb2_grpc

if TYPE_CHECKING:
    from kvstore.cluster.membership import Membership
    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.node import Node
    from kvstore.node.upkeep import Upkeep

__all__ = ["ClusterService"]


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """The node's service for the map of its cluster."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node, self._gate = node, gate

    async def Map(self, request: pb.MapRequest, context: Context) -> None:  # noqa: N802 - named by the proto
        """Send the map, and each later one."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("map", context, request.tenant)
            placed_as = self._gate.tenants.placed_as(tenant.name)
            membership, known = self._node.membership, Map(0)
            if membership is None:
                async with deadline("A client of the map"):
                    await context.write(pb.MapResponse())
                return
            while True:
                now = membership.map
                if now.lots != LOTS and not request.places_by_lots:
                    now = Map.of(now.revision, TOO_OLD)  # it would compute other owners
                async with deadline("A client of the map"):
                    answer = _map_response(membership, self._node.upkeep, now, known, placed_as)
                    if answer.upkeep.replicas:
                        answer.replicas = self._gate.tenants.replicas(tenant.name) or answer.upkeep.replicas
                    await context.write(answer)
                if not now.revision:
                    return
                known = now
                await membership.later_than(known.revision, WATCH_HEARTBEAT_MS / 1000)


def _map_response(
    membership: Membership, upkeep: Upkeep | None, now: Map, known: Map, placed_as: str
) -> pb.MapResponse:
    answer = pb.MapResponse(clustered=True, etcd_away_ms=membership.away_ms, outside=membership.outside)
    if upkeep is not None:
        found = upkeep.known or Found()
        answer.upkeep.replicas, answer.upkeep.looking = upkeep.replicas, upkeep.is_looking
        answer.upkeep.unknown, answer.upkeep.age_ms = upkeep.known is None, upkeep.age_ms
        answer.upkeep.one_copy, answer.upkeep.unsure, answer.upkeep.full = (
            found.one_copy,
            found.unsure,
            found.full,
        )
        answer.upkeep.lots_alone = upkeep.moves.standbys.lots_alone
        answer.upkeep.session_blocks_left = upkeep.moves.hand_overs.copies_left
        answer.upkeep.copied_blocks, answer.upkeep.copied_bytes = upkeep.copied_blocks, upkeep.copied_bytes
    if now.revision > known.revision:
        answer.members_digest, answer.placed_as = membership.digest, placed_as
        answer.revision, answer.lots = now.revision, now.lots
        for rows, some in ((answer.members, now.members), (answer.absent, now.absent)):
            for one in some:
                rows.add(
                    name=one.name,
                    node=one.node,
                    weight=one.weight,
                    version=one.version,
                    draining=one.state == DRAINING,
                    zone=one.zone,
                )
    return answer
