"""A node's condition, and events of the tenant's own blocks, sessions and look-ups.

What always holds: a watch ends within its time, or when its iterator is closed, and raises DeadlineExceeded if the node
did not begin it; `Happened.dropped` counts the events
that the node could not send before the current one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvstore.client.checks import check_number
from kvstore.errors import InvalidArgument
from kvstore.limits import LOOKUPS_LISTED_MAX
from kvstore.wire import blocks_pb2, lookups_pb2, lookups_pb2_grpc, observing_pb2_grpc
from kvstore.wire import observing_pb2 as pb
from kvstore.wire.lookup_messages import lookup_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from kvstore.lookups import Lookup
    from kvstore.reach import Reach


__all__ = ["Happened", "LookedUp", "ObservingCalls"]


@dataclass(frozen=True, slots=True)
class Happened:
    """One event. `what` is STORED, CHANGED or REMOVED, or why a block was removed, as `explain` names it."""

    what: str
    at_unix_ms: int
    key: bytes = b""  # of a block
    user: str = ""
    session: str = ""
    blocks: int = 0  # of the session, now
    dropped: int = 0  # events before this one that were not sent, because they were read too slowly


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Look-ups from a node's history, the earliest first."""

    lookups: tuple[Lookup, ...]
    now_unix_ms: int  # by the node's clock
    kept: int  # number of the tenant's look-ups in the history
    earliest_unix_ms: int  # when the earliest of these began; 0: there is none
    not_logged: int  # of all tenants', not in the node's log


class ObservingCalls:
    """The calls of one client. Any thread."""

    def __init__(
        self, channel: grpc.Channel, calling: Callable[[str], AbstractContextManager[None]], reach: Reach
    ) -> None:
        self._stub = observing_pb2_grpc.ObservingStub(channel)  # type: ignore[no-untyped-call]
        self._lookups = lookups_pb2_grpc.LookupsStub(channel)  # type: ignore[no-untyped-call]
        self._calling = calling
        self._tenant, self._timeout_s = reach.tenant, reach.call_timeout_s

    def statistics(self) -> pb.StatisticsResponse:
        """As `Client.statistics`."""
        with self._calling("Reading statistics"):
            answer: pb.StatisticsResponse = self._stub.Statistics(
                pb.StatisticsRequest(tenant=self._tenant), timeout=self._timeout_s
            )
        return answer

    def looked_up(
        self, request_id: str = "", user: str = "", session: str = "", *, last: int = 0
    ) -> LookedUp:
        """As `Client.looked_up`."""
        if bool(user) != bool(session):
            raise InvalidArgument("Filter look-ups by both user and session, or by neither.")
        request = lookups_pb2.ListLookupsRequest(
            tenant=self._tenant,
            request_id=request_id,
            user=user,
            session=session,
            last=min(check_number("The number of look-ups", last, 64), LOOKUPS_LISTED_MAX),
        )
        with self._calling("Reading the history of look-ups"):
            answer = self._lookups.ListLookups(request, timeout=self._timeout_s)
        return LookedUp(
            tuple(map(lookup_of, answer.lookups)),
            answer.now_unix_ms,
            answer.remembered,
            answer.since_unix_ms,
            answer.unwritten,
        )

    def watch(self, *, timeout_s: float) -> Generator[Happened | None, None, None]:
        """As `Client.watch`."""
        begun = False
        with self._calling("Watching"):
            call = self._stub.Watch(pb.WatchRequest(tenant=self._tenant), timeout=timeout_s)
            try:
                for batch in call:
                    begun = True
                    dropped = batch.dropped
                    for event in batch.events:
                        yield _happened(event, dropped)
                        dropped = 0
                    if not batch.events:
                        yield None
            except grpc.RpcError as failure:
                is_over = getattr(failure, "code", lambda: None)() is grpc.StatusCode.DEADLINE_EXCEEDED
                if not (begun and is_over):  # a node that has not begun in this time does not answer
                    raise
            finally:
                call.cancel()


def _happened(event: pb.Event, dropped: int) -> Happened:
    if event.HasField("session"):
        one = event.session
        what = "REMOVED" if one.removed else "CHANGED"
        return Happened(what, event.at_unix_ms, b"", one.user, one.session, one.blocks, dropped)
    if event.HasField("gone"):
        what = blocks_pb2.GoneReason.Name(event.gone.reason).removeprefix("GONE_REASON_")
        return Happened(what, event.at_unix_ms, event.gone.key, dropped=dropped)
    return Happened("STORED", event.at_unix_ms, event.stored.key, dropped=dropped)
