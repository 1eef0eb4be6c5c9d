"""Authentication: the `Authenticator` checks the caller before each call begins, and for as long as it lasts.

It is an interceptor around all services of a server. A call with an unknown token is refused before its message is
received, so nothing is stored for it. Each message of a call has a deadline, and a tenant may have only its share of
messages pending. If a client does not read the answer of a unary call in time, its connection is closed. An open call
ends as soon as its credentials are removed from the tenants file. Every refusal is in the audit log. The module also
counts each call, its duration and its status.

What always holds: only health's `Check` needs no credentials. A stream that ends because of its credentials ends like
one that its client left: messages that had arrived whole are kept, and it counts as open until its status has been
sent. Only names of calls that the server has are counted, so they are bounded. A tenant has its share of the memory
for answers that have not been read.
What it doesn't do: check the tenant that a request names, which is in its message; `authorization` does that once the
message has been read. Calls that stay open for as long as the client likes (`Attach`, `Watch`, reflection) have no
duration, and are not counted.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import DeadlineExceeded, NotAuthenticated, Overloaded, ProtocolError
from kvstore.limits import (
    GUARD_ANSWER_BYTES_MIN,
    GUARD_ANSWERS_BYTES_MAX,
    GUARD_FIRST_MESSAGE_MS,
    INLINE_TIMEOUT_MS,
    MESSAGE_SMALL_BYTES_MAX,
    METADATA_MAX,
)
from kvstore.node.admission import Entrance
from kvstore.node.calls import refusals
from kvstore.node.fair_queue import Places
from kvstore.node.messages import Messages

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sized

    from kvstore.node.admission import Begun
    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.statistics import Counters
    from kvstore.node.timings import Timings

__all__ = ["Authenticator"]

_PUBLIC: Final = {"/grpc.health.v1.Health/Check"}
_NOBODY: Final = ""  # no tenant's name
# What these bring may be large. The last three are of nodes only, which are authenticated before it is read.
_LARGE: Final = {"Put", "PutBatch", "AppendSession", "Copy", "CopySessions", "TakeSession"}
_OPEN_ENDED: Final = {"Attach", "Watch", "ServerReflectionInfo"}
# The gate logs its own refusals; an error of the node is not a refusal.
_REFUSALS: Final = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}


class Authenticator(grpc.aio.ServerInterceptor):
    """The interceptor of a server that authenticates each call."""

    def __init__(self, gate: Gate, counters: Counters, timings: Timings) -> None:
        self._gate = gate
        self._counters = counters
        self._timings = timings
        self._wrapped: dict[str, Any] = {}
        self._refusing: Any = grpc.stream_unary_rpc_method_handler(self._refuse)
        self._entrance = Entrance(gate.tenants.known)
        self._messages = Messages(gate.tenants.known)
        self._answers = Places(GUARD_ANSWERS_BYTES_MAX, gate.tenants.known)

    def drops(self, peer: Callable[[], str]) -> bool:
        """Whether a call is dropped: its connection has been closed."""
        return self._gate.has_closed(peer)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap a method's handler so that it authenticates its caller first; each method is wrapped once."""
        metadata: Sized = handler_call_details.invocation_metadata or ()
        if len(metadata) > METADATA_MAX:
            return self._refusing
        method = str(handler_call_details.method)
        handler = self._wrapped.get(method)
        if handler is None:
            found = await continuation(handler_call_details)
            if found is None:
                return None
            handler = self._wrapped[method] = self._guarded(method, found)
        return handler

    async def _refuse(self, _: Any, context: Any) -> None:
        """End a call whose metadata is too large to be examined again."""
        self._gate.floods(context.peer())
        async with refusals(context, self._counters):
            raise ProtocolError(f"A call has at most {METADATA_MAX} entries of metadata.")

    def _guarded(self, method: str, handler: Any) -> Any:
        call, is_public = method.rpartition("/")[2], method in _PUBLIC
        encode = handler.response_serializer
        sides = handler.request_streaming, handler.response_streaming
        behaviour = getattr(handler, "_".join("stream" if many else "unary" for many in sides))
        takes = _as_it_is if handler.request_streaming else _only
        kind = _Kind(handler.request_deserializer, None if call in _LARGE else MESSAGE_SMALL_BYTES_MAX)
        if inspect.isasyncgenfunction(behaviour):
            behaviour = _writing(behaviour)

        async def answering(_: Any, context: Any) -> Any:
            async with self._noted(call, context):
                who: str | None = _NOBODY
                async with refusals(context, self._counters):
                    if not is_public:
                        who, begun = await self._enter(_said(call), context)
                        self._refuse_more_answers(who, 1)
                    request = await _only(self._in_time(who, kind, context))
                made = behaviour(request, context)
                answer = await (made if is_public else begun.of(made))
                answer = answer if encode is None else encode(answer)
                if is_public:  # its connection is short, and no caller may use up the others' share
                    return answer
                async with refusals(context, self._counters):
                    try:
                        self._lend(who, len(answer), context)
                    except Overloaded:
                        answer = b""  # gRPC keeps a failed call's answer until garbage collection
                        raise
                return answer

        async def staying(_: Any, context: Any) -> Any:
            async with self._noted(call, context):
                async with refusals(context, self._counters):
                    who, begun = await self._enter(_said(call), context)
                if handler.response_streaming:
                    # gRPC can't end a call whose first write was cancelled, unless the headers were sent before.
                    await context.send_initial_metadata(())
                async with self._staying(_said(call), context):
                    coming = self._in_time(who, kind, context)
                    return await begun.of(behaviour(await takes(coming), context))

        # A single request is handled as a stream of one: gRPC would otherwise receive it before calling us.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        if any(sides):
            return make(staying, None, encode)
        return make(answering, None, None)

    def _in_time(self, who: str | None, kind: _Kind, context: Context) -> _InTime:
        return _InTime(context, self._messages, who, kind, partial(self._gate.brought, context.peer()))

    async def _enter(self, what: str, context: Context) -> tuple[str | None, Begun]:
        """Authenticate the caller, and wait until its call may begin; returns the tenant's name too."""
        who = self._gate.begins(what, context)
        try:
            begun = await self._entrance.enter(who)
        except (Overloaded, asyncio.CancelledError):  # told to retry, or left before its turn
            self._gate.repeats(context.peer())
            raise
        _when_over(begun.over)
        return who, begun

    def _refuse_more_answers(self, who: str | None, size_bytes: int) -> None:
        if size_bytes > self._answers.left(who) and self._answers.held(who):
            raise Overloaded("The tenant's share of unread answers is used up; read them first.")

    def _lend(self, who: str | None, length: int, context: Context) -> None:
        """Keep an answer until its caller has read it; Overloaded if it is large and too many are kept."""
        if length > MESSAGE_SMALL_BYTES_MAX:  # a smaller one is kept: its call has been executed
            self._refuse_more_answers(who, length)
        size_bytes = max(length, GUARD_ANSWER_BYTES_MIN)
        self._answers.take(who, size_bytes)
        # gRPC can't end a call whose answer is not read, not even with an error: only its connection can be closed.
        late = asyncio.get_running_loop().call_later(
            INLINE_TIMEOUT_MS / 1000, self._gate.reads_nothing, context.peer()
        )

        _when_over(late.cancel)
        _when_over(partial(self._answers.give_back, who, size_bytes))

    @asynccontextmanager
    async def _noted(self, call: str, context: Context) -> AsyncIterator[None]:
        """Count a call, and log its refusal, if it is refused."""
        began_ns = self._timings.clock.monotonic_ns()
        failure: str | None = "CANCELLED"
        try:
            yield
            failure = None
        except grpc.aio.AbortError as error:
            _when_over(partial(_forget_frames, error))
            code = context.code()
            failure = code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
            if code in _REFUSALS:
                self._gate.refused(_said(call), context, str(context.details()))
            raise
        except Exception:
            failure = "UNKNOWN"
            raise
        finally:
            if call not in _OPEN_ENDED:
                self._timings.called(call, began_ns, failure)

    @asynccontextmanager
    async def _staying(self, what: str, context: Context) -> AsyncIterator[None]:
        """Authenticate the caller, and end the call when its credentials are no longer valid."""
        async with refusals(context, self._counters):
            with self._gate.staying(what, context) as scope:
                async with refusals(context, self._counters):
                    try:
                        async with scope:
                            yield
                    except TimeoutError:
                        if not scope.expired():
                            raise
                        raise NotAuthenticated(
                            "The caller's token or certificate is no longer in the node's tenants file."
                        ) from None


def _writing(behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Any:
    """Turn a behaviour that yields its answers into one that writes them, so that a call can end during a write."""

    async def written(request: Any, context: Any) -> None:
        async with aclosing(behaviour(request, context)) as answers:
            async for answer in answers:
                await context.write(answer)

    return written


class _Kind(NamedTuple):
    """How a call's messages are decoded, and how large they may be."""

    decode: Callable[[bytes], Any] | None
    bytes_max: int | None  # None: as many as gRPC accepts


class _InTime:
    """A call's messages, each of which has a deadline once it is awaited. gRPC's own iterator would refer to itself.

    A large message is not decoded if those of its call are small: a list of millions of empty names would take the
    thread a tenth of a second, and hundreds of MiB.
    """

    def __init__(
        self,
        context: Context,
        all_messages: Messages,
        who: str | None,
        kind: _Kind,
        brought: Callable[[int], object],
    ) -> None:
        """`brought` is called with the size of each message."""
        self._context = context
        self._kind = kind
        self._brought = brought
        self._all = all_messages
        self._who = who
        self._began = False

    def __aiter__(self) -> _InTime:
        return self

    async def __anext__(self) -> Any:
        timeout_ms = INLINE_TIMEOUT_MS if self._began else GUARD_FIRST_MESSAGE_MS
        which, self._began = "next" if self._began else "first", True
        async with self._all.coming(self._who):
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    message = await self._context.read()
                if message is grpc.aio.EOF:
                    raise StopAsyncIteration
                return self._read(message)
            except DecodeError:
                raise ProtocolError("A message of the call can't be read.") from None
            except TimeoutError:
                raise DeadlineExceeded(
                    f"A call's {which} message did not arrive within {timeout_ms} ms."
                ) from None

    def _read(self, message: bytes) -> Any:
        self._brought(len(message))
        bytes_max = self._kind.bytes_max
        if bytes_max is not None and len(message) > bytes_max:
            raise ProtocolError(f"A message of this call has at most {bytes_max} bytes, not {len(message)}.")
        return message if self._kind.decode is None else self._kind.decode(message)


def _when_over(then: Callable[[], object]) -> None:
    """Do this when the current call has ended. gRPC's `add_done_callback` makes the call refer to itself forever."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: then())


def _forget_frames(error: BaseException) -> None:
    """A call keeps the error that it was aborted with; its frames refer to the call, and to its messages."""
    error.__traceback__ = error.__context__ = None


async def _as_it_is(requests: _InTime) -> _InTime:
    return requests


async def _only(requests: _InTime) -> Any:
    """The message of a call that has exactly one."""
    async for request in requests:
        return request
    raise ProtocolError("The call's message did not arrive.")


def _said(call: str) -> str:
    """A call's name as the audit log has it: `PutBatch` is a put batch."""
    return " ".join(re.findall("[A-Z][a-z]*", call)).lower()
