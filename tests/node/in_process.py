"""A node in a thread of the test's own process, for tests that must reach into it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self

import grpc.aio

from kvstore.clock import SystemClock
from kvstore.limits import HOT_BYTES_MIN
from kvstore.node.audit import Audit
from kvstore.node.gate import Gate
from kvstore.node.node import Node
from kvstore.node.service import KvStoreService
from kvstore.node.tenants import Tenants
from kvstore.storage.store import Store
from kvstore.wire import kvstore_pb2_grpc
from nic_offload.fabric import Fabric

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAIT_S = 30.0


class NodeInProcess:
    """Its `target` is what a client connects to; `call` runs something on its thread."""

    def __init__(self, data: Path, capacity_bytes: int = 64 << 20) -> None:
        self._data, self._capacity_bytes = data, capacity_bytes
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="node")
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        clock = SystemClock()
        with (
            Store.open(self._data, capacity_bytes=self._capacity_bytes, clock=clock) as store,
            Fabric("net", address="127.0.0.1") as fabric,
        ):
            self.node = Node(store, fabric, clock, HOT_BYTES_MIN)
            server = grpc.aio.server()
            gate = Gate(Tenants(store.salt, clock), Audit(clock, None))
            self.service = KvStoreService(self.node, gate, store.name)
            kvstore_pb2_grpc.add_KvStoreServicer_to_server(self.service, server)  # type: ignore[no-untyped-call]
            self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            self._ready.set()
            await self._stop.wait()
            await self.node.close()
            await server.stop(1.0)

    def call(self, what: Callable[[Node], Any]) -> Any:
        """Run it where the node runs, and give what it gives."""

        async def run() -> Any:
            return what(self.node)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
