"""The door: who calls is found out before anything is read or made for the call, and again while it goes on.

It stands around all services of a server, as an interceptor. A call whose token is nobody's is refused before its
message is awaited, so that nothing is kept for it; a stream's first message comes within its time; whatever stays open
ends as soon as what let it in is no longer in the file of tenants; every refusal is in the audit log.

What always holds: health's `Check` alone passes without credentials; a stream that is ended by its credentials ends
like one that its client left, with what it had sent whole kept. What it doesn't do: judge the tenant that a request
names, which stands in its message; the gate does, once that is read.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvstore.errors import DeadlineExceeded, NotAuthenticated
from kvstore.limits import DOOR_FIRST_MESSAGE_MS
from kvstore.node.calls import KINDS, refusals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvstore.node.calls import Context
    from kvstore.node.gate import Gate
    from kvstore.node.statistics import Counters

__all__ = ["Door"]

_PUBLIC: Final = {"/grpc.health.v1.Health/Check"}
# What the gate refuses it has written down itself; an error of the node's own is no refusal.
_REFUSALS: Final = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}


class Door(grpc.aio.ServerInterceptor):
    """Of one server."""

    def __init__(self, gate: Gate, counters: Counters, *, wants_certificates: bool = False) -> None:
        """With `wants_certificates` the handshake has turned away whoever has none, and a token is not needed."""
        self._gate = gate
        self._counters = counters
        self._wants_certificates = wants_certificates
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Give the call's handler as it is to be for this caller."""
        method = str(handler_call_details.method)
        handler = self._wrapped.get(method)
        if handler is None:
            found = await continuation(handler_call_details)
            if found is None or method in _PUBLIC:
                return found
            handler = self._wrapped[method] = self._guarded(_said(method), found)
        if not self._wants_certificates and not self._gate.knows(
            handler_call_details.invocation_metadata or ()
        ):
            return grpc.stream_stream_rpc_method_handler(self._refusing(_said(method)))
        return handler

    def _refusing(self, what: str) -> Any:
        async def refuse(_: object, context: Context) -> None:
            async with refusals(context, self._counters):
                self._gate.enter(what, context)

        return refuse

    def _guarded(self, what: str, handler: Any) -> Any:
        kind, make = KINDS[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, kind)
        stays = handler.request_streaming or handler.response_streaming
        in_time = _InTime if handler.request_streaming else _as_it_is

        async def answering(request: Any, context: Any) -> Any:
            async with self._noted(what, context):
                return await behaviour(request, context)

        async def staying(request: Any, context: Any) -> Any:
            async with self._noted(what, context), self._staying(what, context):
                return await behaviour(in_time(request), context)

        async def telling(request: Any, context: Any) -> Any:
            async with self._noted(what, context), self._staying(what, context):
                async for answer in behaviour(in_time(request), context):
                    yield answer

        if inspect.isasyncgenfunction(behaviour):
            wrapped: Any = telling
        else:
            wrapped = staying if stays else answering
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _noted(self, what: str, context: Context) -> AsyncIterator[None]:
        """Write down that a call was refused, if it is."""
        try:
            yield
        except grpc.aio.AbortError:
            if context.code() in _REFUSALS:
                self._gate.refused(what, context, str(context.details()))
            raise

    @asynccontextmanager
    async def _staying(self, what: str, context: Context) -> AsyncIterator[None]:
        """Find out who calls, and end the call when he is no longer to be here."""
        async with refusals(context, self._counters):
            with self._gate.staying(what, context) as scope:
                try:
                    async with scope:
                        yield
                except TimeoutError:
                    if not scope.expired():
                        raise
                    raise NotAuthenticated(
                        "What let the caller in is no longer in the node's file."
                    ) from None


class _InTime:
    """A stream's messages, of which the first must come within its time."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        self._began = False

    def __aiter__(self) -> _InTime:
        return self

    async def __anext__(self) -> Any:
        if self._began:
            return await anext(self._messages)
        self._began = True
        try:
            async with asyncio.timeout(DOOR_FIRST_MESSAGE_MS / 1000):
                return await anext(self._messages)
        except TimeoutError:
            raise DeadlineExceeded(
                f"A stream's first message did not come within {DOOR_FIRST_MESSAGE_MS} ms."
            ) from None


def _as_it_is(request: Any) -> Any:
    return request


def _said(method: str) -> str:
    """A call's name as the audit log has it: `PutBatch` is a put batch."""
    return " ".join(re.findall("[A-Z][a-z]*", method.rpartition("/")[2])).lower()
