"""How long each call took, and how it ended: an interceptor around all services of a server.

What always holds: the names are those of calls that the server has, so they are bounded; what is asked for and is none
is not counted. What stays open as long as its client likes (`Attach`, `Watch`, reflection) is not a duration and is not
counted either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from kvstore.node.calls import KINDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.node.timings import Timings

__all__ = ["CallTimes"]

_OPEN_ENDED: Final = {"Attach", "Watch", "ServerReflectionInfo"}


class CallTimes(grpc.aio.ServerInterceptor):
    """Of one server."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Give the call's handler, with a watch around it; made once for each call that there is."""
        method = str(handler_call_details.method)
        wrapped = self._wrapped.get(method)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = method.rpartition("/")[2]
        wrapped = handler if call in _OPEN_ENDED else self._watched(call, handler)
        self._wrapped[method] = wrapped
        return wrapped

    def _watched(self, call: str, handler: Any) -> Any:
        kind, make = KINDS[handler.request_streaming, handler.response_streaming]
        behaviour, timings = getattr(handler, kind), self._timings

        # The node's calls that answer with a stream write to it, so that each is one coroutine to be awaited.
        async def watched(request: Any, context: Any) -> Any:
            began_ns = timings.clock.monotonic_ns()
            failure: str | None = "CANCELLED"
            try:
                answer = await behaviour(request, context)
                failure = None
            except grpc.aio.AbortError:
                code = context.code()
                failure = code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
                raise
            except Exception:
                failure = "UNKNOWN"
                raise
            else:
                return answer
            finally:
                timings.called(call, began_ns, failure)

        return make(watched, handler.request_deserializer, handler.response_serializer)
