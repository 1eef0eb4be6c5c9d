"""The standard gRPC services: health, for supervisors, and reflection, for tools.

What always holds: `Check` of health needs no token and reports only whether the node serves; long-lived calls and
those that list services (`Watch`, reflection) are authenticated like all others. A node whose drives have all failed
keeps serving, because they can still be read: `Status` reports more than health does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvstore.node.calls import refusals
from kvstore.wire import (
    batches_pb2,
    blocks_pb2,
    kvstore_pb2,
    lookups_pb2,
    observing_pb2,
    sessions_pb2,
    steps_pb2,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.time_slices import Turns

__all__ = ["Health", "add_standard_services"]

_OURS = tuple(
    service.full_name
    for file in (kvstore_pb2, blocks_pb2, batches_pb2, lookups_pb2, observing_pb2, sessions_pb2, steps_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)


class Health(health.aio.HealthServicer):
    """Whether the node serves: all services or none."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    async def begin(self, *, ready: bool) -> None:
        """Set the status of each service, and of the node as a whole."""
        status = health_pb2.HealthCheckResponse
        for name in ("", *_OURS):
            await self.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:  # noqa: N802 - the proto's name
        """Stream the status whenever it changes."""
        async with refusals(context):
            self._gate.enter("watch health", context)
            await super().Watch(request, context)


class _Reflection(reflection.aio.ReflectionServicer):
    """The reflection service: lists the node's calls for callers that may make them."""

    def __init__(self, gate: Gate, turns: Turns) -> None:
        super().__init__((*_OURS, health.SERVICE_NAME, reflection.SERVICE_NAME))
        self._gate = gate
        self._turns = turns

    # The stubs take an asynchronous generator for a coroutine.
    async def ServerReflectionInfo(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """Answer questions about services and messages."""
        async with refusals(context):
            tenant = self._gate.enter("reflection", context)
            answers: Any = super().ServerReflectionInfo
            async for question in request_iterator:  # a stream may have any number of questions
                async with self._turns.of(tenant.id, rest=3):
                    received = [answer async for answer in answers(_only(question), context)]
                for answer in received:
                    yield answer


async def _only(question: Any) -> AsyncIterator[Any]:
    yield question


def add_standard_services(server: grpc.aio.Server, gate: Gate, turns: Turns) -> Health:
    """Add health and reflection to a server."""
    said = Health(gate)
    health_pb2_grpc.add_HealthServicer_to_server(said, server)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Reflection(gate, turns), server)  # type: ignore[no-untyped-call]
    return said
