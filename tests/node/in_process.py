"""A node in a thread of the test's own process, for tests that must reach into it.

As with nodes of `tests.warm_start`, its hot memory is allocated when it is first used, and the pages of a new drive
when they are first written.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc.aio
import pytest

import nic_offload.memory
from kvstore.clock import SystemClock
from kvstore.config import DriveSpec
from kvstore.node.audit import Audit
from kvstore.node.authorization import Gate
from kvstore.node.call_spans import NodeSpans
from kvstore.node.fabric_address import FabricAddress
from kvstore.node.node import Node
from kvstore.node.same_machine import Sharing
from kvstore.node.server import add_services
from kvstore.node.tenants import Tenants
from kvstore.storage import superblock
from kvstore.storage.store import Store
from kvstore.wire.keepalive import server_keepalive_options
from nic_offload.fabric import Fabric
from tests.warm_start import allocate_later

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
    from pathlib import Path

    from opentelemetry.trace import TracerProvider

    from kvstore.node.hot_pages import Piece
    from kvstore.storage.items import GetItem, GetsDone
    from kvstore.storage.sealing import OpenKeys

T = TypeVar("T")
WAIT_S = 30.0
HOT_BYTES = 48 << 20  # fewer than `kvstore serve` takes: enough for the blocks of most tests


@contextmanager
def _used_later() -> Iterator[None]:
    """Allocate memory and drives only when they are used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(superblock, "ZERO_FILL_BYTES_MAX", 0)
        patch.setattr(nic_offload.memory, "populate", nic_offload.memory.populate)  # as it will be again
        allocate_later()
        yield


class NodeInProcess:
    """A node in a thread: clients connect to `target`; `call` runs a function on its thread."""

    def __init__(
        self,
        data: Path,
        capacity_bytes: int = 64 << 20,
        tracer_provider: TracerProvider | None = None,
        *,
        hot_bytes: int = HOT_BYTES,
        options: Sequence[tuple[str, int]] = server_keepalive_options(),
        host: str = "127.0.0.1",
        drives: int = 1,
        shares_memory: bool = False,
        open_keys: OpenKeys | None = None,
    ) -> None:
        self._options, self._host, self._shares = tuple(options), host, shares_memory
        self._data, self._capacity_bytes, self._hot_bytes = data, capacity_bytes, hot_bytes
        self._specs = (
            [DriveSpec(data.parent / f"{data.name}-{number}.kv", capacity_bytes) for number in range(drives)]
            if drives > 1
            else []
        )
        self._provider, self._open_keys = tracer_provider, open_keys
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="node")
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        clock = SystemClock()
        spans = None if self._provider is None else NodeSpans(self._provider, clock)
        with ExitStack() as stack:
            with _used_later():
                store = stack.enter_context(
                    Store.open(
                        self._data,
                        capacity_bytes=None if self._specs else self._capacity_bytes,
                        clock=clock,
                        drives=self._specs,
                        open_keys=self._open_keys,
                    )
                )
                fabric = stack.enter_context(Fabric("net", address=self._host))
                self.node = Node(
                    store, fabric, clock, self._hot_bytes, spans=spans, address=FabricAddress(self._host)
                )
            if self._shares:
                self.node.sharing = Sharing(self.node.hot, lambda: 1)
            server = grpc.aio.server(options=self._options)
            gate = Gate(Tenants(store.salt, clock), Audit(clock, None))
            add_services(server, self.node, gate)
            self.target = f"{self._host}:{server.add_insecure_port(f'{self._host}:0')}"
            await server.start()
            self._ready.set()
            await self._stop.wait()
            await self.node.close()
            if self.node.sharing is not None:
                self.node.sharing.close()
            await server.stop(1.0)

    def call(self, what: Callable[[Node], Any]) -> Any:
        """Run a function on the node's thread; returns its result."""

        async def run() -> Any:
            return what(self.node)

        return self.run(run())

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the node's thread; returns its result."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(WAIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HeldDrive:
    """A slow drive: reads of some keys, for fetches and inline gets, begin only at `release`."""

    def __init__(self, node: NodeInProcess, of: Callable[[bytes], bool] = lambda _: True) -> None:
        self._node = node
        self._held: list[Callable[[], None]] = []
        self._waiting = 0
        self._read: Any = None
        self._hand_over: Any = None
        node.call(lambda one: self._hold(one, of))

    def _hold(self, node: Node, of: Callable[[bytes], bool]) -> None:
        self._read, self._hand_over = node.store.get, node.fetches.readers.hand_over

        def get(items: Sequence[GetItem], done: GetsDone) -> None:
            self._begin(items, lambda item: of(item.key), lambda some: self._read(some, done))

        def hand_over(cold: Iterable[Any]) -> None:
            self._begin(list(cold), lambda one: of(one[0].request.key), self._hand_over)

        vars(node.store)["get"] = get
        vars(node.fetches.readers)["hand_over"] = hand_over
        vars(node.fabric_calls.cold)["feed"] = lambda: None
        node.fabric_calls.cold.empty()  # so that the C core reads nothing by itself

    def _begin(
        self, all_of_them: Sequence[Any], held: Callable[[Any], bool], go_on: Callable[[Any], None]
    ) -> None:
        later = [one for one in all_of_them if held(one)]
        now = [one for one in all_of_them if not held(one)]
        if later:
            self._waiting += len(later)
            self._held.append(lambda: go_on(later))
        if now:
            go_on(now)

    def waiting(self) -> int:
        """The number of waiting reads."""
        return int(self._node.call(lambda _: self._waiting))

    def release(self) -> int:
        """Let reads continue; returns how many had waited."""

        def go_on(node: Node) -> int:
            del vars(node.store)["get"], vars(node.fetches.readers)["hand_over"]
            del vars(node.fabric_calls.cold)["feed"]
            held, self._held, waiting, self._waiting = self._held, [], self._waiting, 0
            for one in held:
                one()
            return waiting

        return int(self._node.call(go_on))


def kept_in(inside: Node) -> list[Piece]:
    """Return the pieces that a node's hot memory keeps."""
    inside.catch_up()  # a client may know of a block before the index does
    every = [one for drive in inside.store.drives for one in drive._index.generations().tolist()]
    return [piece for one in every if (piece := inside.hot.pages.peek(one)) is not None]
