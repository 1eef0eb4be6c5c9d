"""The service Steps: prefetches for a request that has arrived, and the recorded events of a session.

What always holds: a call sees only sessions and blocks of its caller's tenant; a prefetch is answered within
`RPC_TIMEOUT_MS`, with the blocks that are in memory by then.
What it doesn't do: use the drive while a fetch waits for it (`prefetch`), or keep a trace beyond the process
(`session_traces`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.limits import RPC_TIMEOUT_MS, TURN_STEP_BLOCKS
from kvstore.node.calls import check_keys, miss_message, refusals
from kvstore.node.session_names import home_elsewhere, name_of, no_session
from kvstore.steps import Step
from kvstore.wire import steps_pb2 as pb
from kvstore.wire import steps_pb2_grpc
from kvstore.wire.step_messages import seen_message

if TYPE_CHECKING:
    from kvstore.node.authorization import Gate
    from kvstore.node.calls import Context
    from kvstore.node.node import Node
    from kvstore.node.prefetch import Prefetched

__all__ = ["StepsService"]


class StepsService(steps_pb2_grpc.StepsServicer):
    """The node's service for prefetches and for traces of sessions."""

    def __init__(self, node: Node, gate: Gate) -> None:
        self._node = node
        self._gate = gate

    async def PrefetchBlocks(  # noqa: N802 - named by the proto, like all that follow
        self, request: pb.PrefetchBlocksRequest, context: Context
    ) -> pb.PrefetchBlocksResponse:
        """Read blocks into memory; returns when that is done."""
        async with refusals(context):
            tenant = self._gate.enter("prefetch blocks", context, request.tenant, len(request.keys))
            check_keys(request.keys)
            await self._node.granted.just_landed.stored(tenant.id, request.keys)
            trace = self._node.traces.of_call(context, tenant.id)
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def ended(_: Prefetched) -> None:
                if not over.done():  # done: the call was cancelled
                    over.set_result(None)

            wish = self._node.prefetches.wish(tenant.id, ("blocks", *request.keys[:1]), ended)
            stored: list[bytes] = []
            misses: list[pb.BlockMiss] = []
            takes_more = True
            async with self._node.turns.of(tenant.id) as turn:
                for first in range(0, len(request.keys), TURN_STEP_BLOCKS):
                    if first:
                        await turn.next()
                    some = request.keys[first : first + TURN_STEP_BLOCKS]
                    entries = self._node.store.lookup([(tenant.id, key) for key in some])
                    here = [key for key, entry in zip(some, entries, strict=True) if entry is not None]
                    stored += here
                    away = [key for key, entry in zip(some, entries, strict=True) if entry is None]
                    explained = zip(away, self._node.store.explain_all(tenant.id, away), strict=True)
                    misses += [pb.BlockMiss(key=key, miss=miss_message(one.miss)) for key, one in explained]
                    takes_more = takes_more and wish.add(here)
                if trace is not None:
                    trace.saw(
                        Step.PREFETCHING, len(stored), detail=f"{len(misses)} missing" if misses else ""
                    )
                asked = self._node.prefetches.queue(wish)
            await asyncio.wait([over], timeout=RPC_TIMEOUT_MS / 1000)
            done = asked.so_far()
            if trace is not None:
                trace.saw(Step.PREFETCHED, len(done.came), done.size_bytes)
            came = set(done.came)
            return pb.PrefetchBlocksResponse(
                in_memory=len(came),
                unread=[key for key in stored if key not in came],
                missing=misses,
            )
        raise AssertionError

    async def ReportSteps(  # noqa: N802
        self, request: pb.ReportStepsRequest, context: Context
    ) -> pb.ReportStepsResponse:
        """Record the steps that a caller reports."""
        async with refusals(context):
            tenant = self._gate.enter("report steps", context, request.tenant)
            self._node.traces.add_reported(tenant.id, request.seen)
            return pb.ReportStepsResponse()
        raise AssertionError

    async def GetTrace(self, request: pb.GetTraceRequest, context: Context) -> pb.GetTraceResponse:  # noqa: N802
        """Return the recorded steps of a session."""
        async with refusals(context):
            tenant = self._gate.enter("get trace", context, request.name.tenant)
            name = name_of(tenant.id, request.name.user, request.name.session)
            trace = self._node.traces.find(name)
            if trace is None and self._node.store.manifests.get(name) is None:
                elsewhere = home_elsewhere(self._node, self._gate.tenants, request.name)
                raise no_session(request.name, elsewhere)
            answer = pb.GetTraceResponse(now_unix_ms=self._node.clock.wall_ms())
            now_ns = self._node.clock.monotonic_ns()
            for seen in () if trace is None else trace.in_order():
                message = seen_message(seen)
                message.at_ns = now_ns - seen.at_ns
                answer.seen.append(message)
            return answer
        raise AssertionError
