"""A node in the test's own process: no child process, no libfabric, no drive.

It is the node's own code: its calls, its store and its C core, over a drive in memory (`memory_disk`), and with the
provider `memory` of the C core (`nic_offload/in_process.c`) in libfabric's place. Clients are the same `Client` as
everywhere, and make their calls over gRPC on loopback.

What always holds: keys written once, reasons of misses, sessions whole or up to a prefix, durabilities, armed puts and
their flags, eviction and look-ups are those of a real node, because the same code decides them. A test compares the two
call by call (`tests/testing/test_contract.py`).
What it doesn't do: survive its process, crash (`LocalNode.kill` does), lose what was not synced, or have a drive that
fails or is slow; its times say nothing about a real node's. It has no tokens, no TLS, no HTTP page and no cluster. A
client in another process can put and get over gRPC only.
"""

from __future__ import annotations

import asyncio
import atexit
import tempfile
import threading
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvstore.client import Client
from kvstore.clock import SystemClock
from kvstore.config import parse_size
from kvstore.demo.node_process import lasting_port
from kvstore.errors import NodeUnavailable
from kvstore.limits import STOP_GRACE_MS
from kvstore.node.audit import Audit
from kvstore.node.authorization import Gate
from kvstore.node.fabric_address import FabricAddress
from kvstore.node.node import Node
from kvstore.node.server import open_server
from kvstore.node.tenants import Tenants
from kvstore.storage.store import Store
from kvstore.testing.memory_disk import MemoryDisk, MemoryDrive
from nic_offload.fabric import MEMORY, Fabric
from nic_offload.handle import Handle

__all__ = ["MemoryNode"]

_STOP_GRACE_S: Final = STOP_GRACE_MS / 1000
_HOST: Final = "127.0.0.1"
_HOT_BYTES: Final = 32 << 20
_SLOTS, _BLOCK_BYTES = 4, 1 << 20  # of a client


class MemoryNode(Handle):
    """A storage node in this process, in memory. Each has a thread of its own.

    >>> from kvstore import Block, block_key
    >>> from kvstore.testing import MemoryNode
    >>> with MemoryNode() as node, node.client() as client:
    ...     kv = client.register(bytearray(b"KV! " * 1024))
    ...     (result,) = client.put([Block(block_key(b"page 1"), kv, offset=0, length=4096)])
    ...     result.durability.name
    ...     client.get_inline(block_key(b"page 2"), length=4096)
    'WRITTEN'
    Miss(reason=<MissReason.UNKNOWN: 1>, detail='')
    """

    def __init__(self, *, drive: str = "64MiB") -> None:
        """Start it, and wait until it serves. Its memory for blocks is 32 MiB, so no block may be larger."""
        self._port = lasting_port()
        with ExitStack() as undo:
            folder = tempfile.TemporaryDirectory(prefix="triggerkv-")  # of the index of its drive
            undo.callback(folder.cleanup)
            self._data = Path(folder.name) / "node"
            self._disk = MemoryDisk(parse_size(drive))
            undo.callback(self._disk.free)
            self._thread: threading.Thread | None = None
            undo.callback(self.stop)
            self.start()
            self._closing = undo.pop_all()

    @property
    def target(self) -> str:
        """Its address, HOST:PORT, on loopback; the same after a restart."""
        return f"{_HOST}:{self._port}"

    def client(self, **more: Any) -> Client:
        """A client of it; `more` are arguments of `Client`. Any other client of it needs `transport="memory"`, too.

        >>> with MemoryNode() as node, node.client(tenant="acme") as client:
        ...     client.tenant
        'acme'
        """
        settings: dict[str, Any] = {"transport": MEMORY, "slots": _SLOTS, "block_bytes_max": _BLOCK_BYTES}
        return Client(self.target, **(settings | more))

    def stop(self) -> None:
        """Stop it as SIGTERM stops a node: all that was put is kept. Until `start`, each get is a MISS(node away).

        >>> with MemoryNode() as node, node.client() as client:
        ...     node.stop()
        ...     kv = client.register(bytearray(4096))
        ...     (miss,) = client.get([Block(block_key(b"page 1"), kv, offset=0, length=4096)])
        ...     miss.reason.name
        'NODE_AWAY'
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.stop)
            self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join()

    def start(self) -> None:
        """Start it again after `stop`, with the same drive, at the same address.

        >>> with MemoryNode() as node, node.client() as client:
        ...     _ = client.put_inline(block_key(b"page 1"), b"KV")
        ...     node.stop()
        ...     node.start()
        ...     _ = client.status(wait_s=10)
        ...     client.get_inline(block_key(b"page 1"), length=2)
        b'KV'
        """
        if self._thread is not None:
            return
        began: Future[None] = Future()
        thread = threading.Thread(target=self._run, args=(began,), name="kvstore-node", daemon=True)
        thread.start()
        try:
            began.result()
        except BaseException:
            wait([began])  # after Ctrl-C it is still starting
            if began.exception() is None:
                self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join()
            raise
        self._thread = thread
        # Otherwise interpreter exit would close the fabric under it.
        atexit.register(self.stop)

    def close(self) -> None:
        """Stop it, and free its memory.

        >>> MemoryNode().close()
        """
        self._closing.close()

    def _run(self, began: Future[None]) -> None:
        try:
            asyncio.run(self._serve(began))
        except BaseException as error:
            if began.done():
                raise
            began.set_exception(error)

    async def _serve(self, began: Future[None]) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        clock = SystemClock()
        with (
            Store.open(
                self._data,
                capacity_bytes=self._disk.capacity_bytes,
                clock=clock,
                source=MemoryDrive(self._disk),
            ) as store,
            Audit(clock, None) as audit,
            ExitStack() as after,  # the fabric
            Fabric(MEMORY) as fabric,
        ):
            tenants = Tenants(store.salt, clock)
            node = Node(
                store, fabric, clock, _HOT_BYTES, address=FabricAddress(_HOST), tenants_known=tenants.known
            )
            after.callback(node.hot.close)
            server, health = open_server(node, Gate(tenants, audit))
            try:
                if not server.add_insecure_port(self.target):
                    raise NodeUnavailable(f"The port of {self.target} is taken.")
                await server.start()
                await health.begin(ready=True)
                began.set_result(None)
                await self._stopped.wait()
            finally:
                await health.enter_graceful_shutdown()
                await node.close()
                await server.stop(_STOP_GRACE_S)
