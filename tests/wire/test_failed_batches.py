"""gRPC's copies for sending are freed, even if their call was reset or their sender was cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.node.heap import used_bytes
from kvstore.wire.dropped_calls import drop_calls
from kvstore.wire.failed_batches import free_failed_batches

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, SIZE_BYTES = 64, 256 << 10


async def refuse(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "x" * SIZE_BYTES)


async def refuse_a_call_that_was_reset(context: Any) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    with pytest.raises(grpc.aio.InternalError):
        await refuse(context)


async def be_cancelled_while_refusing(context: Any) -> None:
    refusing = asyncio.ensure_future(refuse(context))
    try:
        await asyncio.sleep(0)  # it has begun
    finally:  # the call may be reset just now
        refusing.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.InternalError):
            await refusing


@pytest.mark.parametrize("refuses", [refuse_a_call_that_was_reset, be_cancelled_while_refusing])
def test_undelivered_refusals_leak_no_memory(refuses: Callable[[Any], Any]) -> None:
    """In a server like a node's. Without `free_failed_batches` each would stay forever."""

    async def serve() -> int:
        free_failed_batches()
        drop_calls()
        over: asyncio.Queue[None] = asyncio.Queue()

        async def answer(_: bytes, context: Any) -> None:
            try:  # the caller has the metadata, and may have reset the call, before we go on
                await context.send_initial_metadata(())
                await refuses(context)
            finally:
                over.put_nowait(None)

        async def call(times: int) -> None:
            for _ in range(times):
                under_way = send(b"")
                await asyncio.to_thread(under_way.initial_metadata)
                under_way.cancel()
                async with asyncio.timeout(10):
                    await over.get()

        server = grpc.aio.server()
        handler: Any = grpc.unary_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Send": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                send: Any = channel.unary_stream("/test/Send")
                await call(4)
                before_bytes = used_bytes()
                await call(CALLS)
                return used_bytes() - before_bytes
        finally:
            await server.stop(None)

    assert asyncio.run(serve()) < CALLS * SIZE_BYTES // 8
