"""What all gRPC services share: errors as statuses, conversions of the proto's messages, pending completions.

What always holds: an error of the tree ends a call with its own status; any other error is a bug, and gRPC reports
it. Cancelling a call doesn't stop the work that it has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast

from kvstore.durability import Durability
from kvstore.errors import KvError, Overloaded, ProtocolError
from kvstore.limits import BATCH_BLOCKS_MAX, KEY_BYTES
from kvstore.node.connection import check_count, check_key
from kvstore.wire import kvstore_pb2
from kvstore.wire.status import status_of, trailers_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from grpc.aio import ServicerContext

    from kvstore.miss import Miss
    from kvstore.node.statistics import Counters

__all__ = [
    "Context",
    "Ends",
    "HasMetadata",
    "check_keys",
    "durability_of",
    "kept_durability_of",
    "miss_message",
    "refusals",
]

Context: TypeAlias = "ServicerContext[Any, Any]"
T = TypeVar("T")


class HasMetadata(Protocol):
    """A call's headers."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """The headers that the caller sent."""
        ...


@contextlib.asynccontextmanager
async def refusals(context: Context, counters: Counters | None = None) -> AsyncIterator[None]:
    """End the call with the status of an error of the tree; any other error is a bug, which gRPC reports."""
    try:
        yield
    except KvError as error:
        if counters is not None and isinstance(error, Overloaded):
            counters.refused += 1
        await context.abort(status_of(error), str(error), trailers_of(error))


def durability_of(value: int) -> Durability:
    """The durability that a message requests; `written` if it names none."""
    try:
        return Durability(value or Durability.WRITTEN)
    except ValueError:
        raise ProtocolError(f"There is no durability {value}.") from None


def kept_durability_of(value: int) -> Durability:
    """The same, at least `written`."""
    return max(durability_of(value), Durability.WRITTEN)


def miss_message(miss: Miss) -> kvstore_pb2.GetMiss:
    """A miss as a message; the proto's reasons have our numbers."""
    reason = cast("kvstore_pb2.MissReason", int(miss.reason))
    return kvstore_pb2.GetMiss(reason=reason, detail=miss.detail)


def check_keys(keys: Sequence[bytes], blocks_max: int = BATCH_BLOCKS_MAX) -> None:
    """Refuse a batch that is empty or too large, and invalid keys."""
    check_count(len(keys), blocks_max)
    if set(map(len, keys)) != {KEY_BYTES}:
        for key in keys:
            check_key(key)


class Ends(Generic[T]):
    """Collects the results of a batch, which the store reports in parts; awaited once, for all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ended: list[T] = []
        self._all: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()

    def collect(self, ended: Sequence[T]) -> None:
        """Collect results that the store reports."""
        self._ended += ended
        if len(self._ended) == self._count and not self._all.done():  # done: its call was given up
            self._all.set_result(self._ended)

    async def all(self) -> list[T]:
        """All results, in order of completion."""
        return await self._all
