"""The service Lookups: why the blocks of a request hit or missed, for the tenant that made the request.

What always holds: a call sees the look-ups of its caller's tenant and no others; its answer is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import ProtocolError
from kvstore.node.calls import refusals
from kvstore.node.session_names import name_of
from kvstore.wire import lookups_pb2_grpc

if TYPE_CHECKING:
    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.node import Node
    from kvstore.wire import lookups_pb2 as pb

__all__ = ["LookupsService"]


class LookupsService(lookups_pb2_grpc.LookupsServicer):
    """The node's service for the history of look-ups."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node = node
        self._gate = gate

    async def ListLookups(  # noqa: N802 - named by the proto
        self, request: pb.ListLookupsRequest, context: Context
    ) -> pb.ListLookupsResponse:
        """Return the outcomes of look-ups."""
        async with refusals(context, self._node.counters):
            tenant = self._gate.enter("list lookups", context, request.tenant)
            if bool(request.user) != bool(request.session):
                raise ProtocolError("Filter look-ups by both user and session, or by neither.")
            session = name_of(tenant.id, request.user, request.session) if request.user else None
            return self._node.lookups.listed(tenant.id, request.request_id, session, request.last)
        raise AssertionError
