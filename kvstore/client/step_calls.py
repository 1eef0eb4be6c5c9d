"""A client's calls about the eight steps: prefetch, report steps, fetch a trace.

What always holds: a call ends within `call_timeout_ms`, a prefetch within twice that, with an answer or a typed error.
A prefetch of any length is split into calls of the maximum number of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.block_calls import batches
from kvstore.client.trace import Trace
from kvstore.client.transfer_watch import metadata_of
from kvstore.miss import Miss, MissReason
from kvstore.wire import steps_pb2 as pb
from kvstore.wire import steps_pb2_grpc
from kvstore.wire.step_messages import seen_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import grpc

    from kvstore.client.trace import Notes
    from kvstore.client.transfer_watch import Watch
    from kvstore.reach import Reach

__all__ = ["ReadAhead", "StepCalls"]


class ReadAhead(NamedTuple):
    """The result of a prefetch of blocks. Blocks in neither list are in the node's memory."""

    unread: Sequence[bytes]  # stored, but there was no share for them, or no time
    missing: dict[bytes, Miss]


class StepCalls:
    """The calls of one client. Any thread."""

    def __init__(
        self, channel: grpc.Channel, calling: Callable[[str], AbstractContextManager[None]], reach: Reach
    ) -> None:
        self._stub = steps_pb2_grpc.StepsStub(channel)  # type: ignore[no-untyped-call]
        self._calling = calling
        self._tenant, self._timeout_s = reach.tenant, reach.call_timeout_s

    def prefetch(self, keys: Sequence[bytes], watch: Watch | None = None) -> ReadAhead:
        """As `Client.prefetch`."""
        unread: list[bytes] = []
        missing: dict[bytes, Miss] = {}
        for some in batches(keys):
            with self._calling("Prefetching blocks"):
                answer = self._stub.PrefetchBlocks(
                    pb.PrefetchBlocksRequest(tenant=self._tenant, keys=some),
                    timeout=2 * self._timeout_s,  # the node answers within one of them
                    metadata=metadata_of(watch),
                )
            unread += answer.unread
            for one in answer.missing:
                missing[one.key] = Miss(MissReason(one.miss.reason), one.miss.detail)
        return ReadAhead(unread, missing)

    def report(self, notes: Notes) -> None:
        """Report a session's events to the node."""
        request = pb.ReportStepsRequest(tenant=self._tenant, seen=notes.message())
        with self._calling("Reporting steps"):
            self._stub.ReportSteps(request, timeout=self._timeout_s)

    def trace(self, request: pb.GetTraceRequest) -> Trace:
        """Fetch the recorded events of a session."""
        with self._calling("Reading a trace"):
            answer = self._stub.GetTrace(request, timeout=self._timeout_s)
        return Trace(tuple(seen_of(answer.seen)), answer.now_unix_ms)
