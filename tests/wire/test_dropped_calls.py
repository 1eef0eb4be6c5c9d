"""A call dropped by its server's interceptor is never handled, and the server continues."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.wire import dropped_calls
from kvstore.wire.dropped_calls import drop_calls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Dropper(grpc.aio.ServerInterceptor):
    """Drops the calls of some peers."""

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.looked_at: list[str] = []

    def drops(self, peer: Callable[[], str]) -> bool:
        return bool(self.peers) and peer() in self.peers

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self.looked_at.append(handler_call_details.method)
        return await continuation(handler_call_details)


def test_a_dropped_call_is_not_processed_and_ends_with_its_connection() -> None:
    async def serve() -> None:
        drop_calls()
        drop_calls()  # once is enough

        async def answer(_: bytes, context: Any) -> bytes:
            return str(context.peer()).encode()

        dropper = Dropper()
        server = grpc.aio.server(interceptors=(dropper,))
        handler: Any = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Send": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            own = [("grpc.use_local_subchannel_pool", 1)]
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{port}", own) as bad,
                grpc.aio.insecure_channel(f"127.0.0.1:{port}", own) as good,
            ):
                send: Any = bad.unary_unary("/test/Send")
                of_others: Any = good.unary_unary("/test/Send")
                peer = (await send(b"", timeout=10)).decode()
                dropper.peers.add(peer)
                dropper.looked_at.clear()
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await send(b"", timeout=0.2)
                assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert not dropper.looked_at
                assert await of_others(b"", timeout=10)
                assert len(dropper.looked_at) == 1
        finally:
            await server.stop(None)

    asyncio.run(serve())


def test_the_traceback_of_an_error_keeps_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the bytes it was to send, which may be megabytes until the next garbage collection."""

    class Call:
        """A call; gRPC's own can't be constructed here."""

    async def fail() -> None:
        raise ValueError("it failed")

    def handle(interceptors: Any, rpc_state: Call, loop: Any) -> Awaitable[None]:  # noqa: ARG001 - gRPC's names
        return fail()

    monkeypatch.setattr(dropped_calls.cygrpc, "_ServicerContext", lambda *_: None)
    call = Call()
    kept = weakref.ref(call)
    handling: Any = dropped_calls._dropping(handle)((), call, None)
    del call
    with pytest.raises(ValueError, match="it failed") as failed:
        asyncio.run(handling)
    assert len(failed.traceback) > 1, "the error still has its frames"
    assert kept() is None
