"""The service Observing: the node's state, and events of a tenant's own blocks and sessions.

What always holds: a watch ends with its call, when its caller's credentials are revoked, or when its reader stalls;
until then it sends something at least every `WATCH_HEARTBEAT_MS`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.errors import TenantDenied
from kvstore.limits import WATCH_HEARTBEAT_MS, WATCH_REST_MS
from kvstore.node.calls import refusals
from kvstore.node.inline import deadline
from kvstore.node.statistics import collected
from kvstore.wire import observing_pb2 as pb
from kvstore.wire import observing_pb2_grpc

if TYPE_CHECKING:
    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.node import Node

__all__ = ["ObservingService"]


class ObservingService(observing_pb2_grpc.ObservingServicer):
    """The node's service for monitors."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node = node
        self._gate = gate

    async def Statistics(  # noqa: N802 - named by the proto, like what follows
        self, request: pb.StatisticsRequest, context: Context
    ) -> pb.StatisticsResponse:
        """Return the node's state."""
        async with refusals(context, self._node.counters):
            return collected(self._node, self._gate.enter("statistics", context, request.tenant))
        raise AssertionError

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # noqa: N802
        """Stream events as they happen."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("watch", context, request.tenant)
            credentials = self._gate.credentials(context)
            with self._node.watchers.watching(tenant.id) as watcher:
                await context.write(
                    pb.WatchResponse()
                )  # so that the client knows from when on it gets all events
                while self._gate.tenants.admits(credentials, tenant.name):
                    response = await watcher.next(WATCH_HEARTBEAT_MS / 1000)
                    async with deadline("A watcher"):
                        await context.write(response)
                    await asyncio.sleep(WATCH_REST_MS / 1000)
            raise TenantDenied(f"{tenant.name} is no longer a tenant of this node.")
