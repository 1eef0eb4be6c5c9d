"""Drops calls that nobody can be answered, before gRPC decodes their headers.

gRPC's asyncio server turns all metadata of a call into Python strings before it asks an interceptor. A header of one
byte may name an entry of kilobytes, so 8 KB of a connection become 16 MB of strings, and milliseconds of the event
loop. When the connection is closed for that, gRPC has already accepted hundreds more of its calls, and goes through
them one by one.

What always holds: a call is dropped only if an interceptor of its server says that its connection has been closed; its
handler is never entered, and its headers are not read. gRPC ends it with its connection.
What it doesn't do: make gRPC parse less of what had arrived.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Dropping", "drop_calls"]

cygrpc: Any = import_module("grpc._cython.cygrpc")  # compiled, and without types


@runtime_checkable
class Dropping(Protocol):
    """An interceptor that knows which connections have been closed."""

    def drops(self, peer: Callable[[], str]) -> bool:
        """Whether a call of this peer is dropped; `peer` finds its name."""


def drop_calls() -> None:
    """Let all asyncio servers of this process ask their `Dropping` interceptors, from now on."""
    handle = cygrpc._handle_rpc  # noqa: SLF001 - gRPC offers no place before it decodes the headers
    if not getattr(handle, "drops_calls", False):
        cygrpc._handle_rpc = _dropping(handle)  # noqa: SLF001 - the same


def _dropping(handle: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    takes = handle.__code__.co_varnames  # the order differs between gRPC's versions
    interceptors, call, loop = (takes.index(one) for one in ("interceptors", "rpc_state", "loop"))

    def is_dropped(given: tuple[Any, ...]) -> bool:
        context = cygrpc._ServicerContext(given[call], None, None, given[loop])  # noqa: SLF001
        return any(isinstance(one, Dropping) and one.drops(context.peer) for one in given[interceptors])

    async def handle_rpc(*given: Any) -> None:
        if not is_dropped(given):
            handling = handle(*given)
            del given  # or the traceback of an error would keep the call, and what it was to send
            await handling

    handle_rpc.drops_calls = True  # type: ignore[attr-defined] # of a function
    return handle_rpc
