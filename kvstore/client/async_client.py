"""A client for asyncio.

    async with AsyncClient("127.0.0.1:7070") as client:
        kv = await client.register(buffer)
        results = await client.put([Block(key, kv, offset, length)])
        outcomes = await client.get([Block(key, kv, offset, length)])
        puts = client.arm([Block(key, kv, offset, length)], flags[0])  # no call, so nothing to await
        results = await puts.wait(timeout_s=10)
        chat = client.session("grace", "chat 8")
        await chat.append([key], tokens=16)

It is a `Client` whose calls are made by its own threads, so the loop never waits for the network. Each method does what
the method of the same name of `Client` or `Session` does, deadlines included. For all others, `await
client.call(client.sync.prefetch, keys)` calls any function in one of the threads.

What always holds: when an awaited call returns, nothing reads or writes its memory any more. That includes a cancelled
call: the cancellation is delivered after the call has ended, at its deadline at the latest. `as_request` applies to the
calls made inside it. `close` waits for calls that are under way.
What it doesn't do: make calls faster. At most `ASYNC_CALLS_MAX` run at a time; further ones wait.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from kvstore.client.client import Client
from kvstore.durability import Durability
from kvstore.limits import ASYNC_CALLS_MAX, LEASE_TIMEOUT_MS
from kvstore.names import SHARED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Buffer

    from kvstore.client.block_calls import Explained, Pin, Prefix, Stored
    from kvstore.client.blocks import Block, Hit, PutResult
    from kvstore.client.inline import Data
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.resuming import Resumed
    from kvstore.client.sessions import Session, SessionInfo
    from kvstore.miss import Miss
    from kvstore.reach import Reach
    from kvstore.wire.kvstore_pb2 import StatusResponse
    from nic_offload.counter import Counter
    from nic_offload.fabric import Region
    from nic_offload.flags import FlagWord

__all__ = ["AsyncClient", "AsyncPuts", "AsyncSession"]

P = ParamSpec("P")
R = TypeVar("R")


class AsyncClient:
    """A client of one node, for one event loop."""

    def __init__(self, node: str | Reach | None = None, **of_client: Any) -> None:
        """`of_client` are the arguments of `Client`. The node is not called yet."""
        self.sync = Client(node, **of_client)
        self._threads = ThreadPoolExecutor(ASYNC_CALLS_MAX, "kvstore-async")

    async def call(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a function that may wait, such as a method of `sync`, in a thread, and await its result."""
        work = partial(copy_context().run, partial(function, *arguments, **named))
        under_way = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(under_way)
        except asyncio.CancelledError:
            while not under_way.done():  # its memory is in use until then
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([under_way])
            with suppress(Exception):
                under_way.result()
            raise

    async def attach(self) -> None:
        """As `Client.attach`."""
        await self.call(self.sync.attach)

    async def register(self, memory: Buffer) -> Region:
        """As `Client.register`."""
        return await self.call(self.sync.register, memory)

    # --- over the fabric

    async def put(
        self,
        blocks: Sequence[Block],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `Client.put`."""
        put = partial(
            self.sync.put, durability=durability, expires_unix_ms=expires_unix_ms, timeout_s=timeout_s
        )
        return await self.call(put, blocks)

    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
    ) -> AsyncPuts:
        """As `Client.arm`: the node is not called. Await `attach` first, otherwise the first `arm` blocks the loop."""
        armed = self.sync.arm(
            blocks, flag, durability=durability, lease_ms=lease_ms, expires_unix_ms=expires_unix_ms
        )
        return AsyncPuts(self, armed)

    async def get(self, blocks: Sequence[Block], *, timeout_s: float | None = None) -> list[Hit | Miss]:
        """As `Client.get`."""
        return await self.call(partial(self.sync.get, timeout_s=timeout_s), blocks)

    # --- over gRPC

    async def put_inline(
        self,
        key: bytes,
        data: Data,
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = SHARED,
        timeout_s: float | None = None,
    ) -> Durability:
        """As `Client.put_inline`."""
        put = partial(
            self.sync.put_inline,
            durability=durability,
            expires_unix_ms=expires_unix_ms,
            domain=domain,
            timeout_s=timeout_s,
        )
        return await self.call(put, key, data)

    async def get_inline(self, key: bytes, length: int, *, timeout_s: float | None = None) -> bytes | Miss:
        """As `Client.get_inline`."""
        return await self.call(partial(self.sync.get_inline, timeout_s=timeout_s), key, length)

    async def put_many_inline(
        self,
        blocks: Iterable[tuple[bytes, Data]],
        *,
        domain: bytes = SHARED,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `Client.put_many_inline`."""
        put = partial(self.sync.put_many_inline, domain=domain, timeout_s=timeout_s)
        return await self.call(put, blocks)

    async def get_many_inline(
        self, wanted: Sequence[tuple[bytes, int]], *, timeout_s: float | None = None
    ) -> list[bytes | Miss]:
        """As `Client.get_many_inline`, but all of them at the end."""
        return await self.call(lambda: list(self.sync.get_many_inline(wanted, timeout_s=timeout_s)))

    # --- what is stored

    async def exists(
        self, keys: Sequence[bytes], *, lengths: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Stored | Miss]:
        """As `Client.exists`."""
        return await self.call(partial(self.sync.exists, lengths=lengths, timeout_s=timeout_s), keys)

    async def prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Prefix:
        """As `Client.prefix`."""
        return await self.call(partial(self.sync.prefix, timeout_s=timeout_s), keys)

    async def explain(self, keys: Sequence[bytes]) -> list[Explained]:
        """As `Client.explain`."""
        return await self.call(self.sync.explain, keys)

    async def pin(self, keys: Sequence[bytes], *, time_to_live_ms: int = 0) -> Pin:
        """As `Client.pin`."""
        return await self.call(partial(self.sync.pin, time_to_live_ms=time_to_live_ms), keys)

    async def delete(
        self, keys: Sequence[bytes], *, durability: Durability = Durability.WRITTEN
    ) -> list[bool]:
        """As `Client.delete`."""
        return await self.call(partial(self.sync.delete, durability=durability), keys)

    # --- sessions, and the node

    def session(self, user: str, name: str) -> AsyncSession:
        """As `Client.session`: the node is not called."""
        return AsyncSession(self, self.sync.session(user, name))

    async def status(self, *, wait_s: float = 0.0) -> StatusResponse:
        """As `Client.status`."""
        return await self.call(partial(self.sync.status, wait_s=wait_s))

    # --- closing

    async def close(self) -> None:
        """Close the client. It waits for calls that are under way; puts that have not been acknowledged fail."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self.sync.close()
        self._threads.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncPuts:
    """Armed puts: `ArmedPuts` with awaitable waits."""

    def __init__(self, client: AsyncClient, armed: ArmedPuts) -> None:
        self._client, self.armed = client, armed

    async def wait(self, timeout_s: float) -> list[PutResult]:
        """As `ArmedPuts.wait`."""
        return await self._client.call(self.armed.wait, timeout_s)

    async def wait_landed(self, timeout_s: float) -> bool:
        """As `ArmedPuts.wait_landed`."""
        return await self._client.call(self.armed.wait_landed, timeout_s)


class AsyncSession:
    """A session: `Session` with awaitable calls. `await client.call(chat.sync.fork, "chat 9")` makes any other call."""

    def __init__(self, client: AsyncClient, sync: Session) -> None:
        self._client, self.sync = client, sync

    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
    ) -> AsyncPuts:
        """As `Session.arm`: the node is not called. Await `AsyncClient.attach` first."""
        armed = self.sync.arm(
            blocks, flag, durability=durability, lease_ms=lease_ms, expires_unix_ms=expires_unix_ms
        )
        return AsyncPuts(self._client, armed)

    async def append(
        self,
        keys: Sequence[bytes],
        tokens: int,
        *,
        time_to_live_ms: int | None = None,
        durability: Durability = Durability.WRITTEN,
    ) -> int:
        """As `Session.append`."""
        append = partial(self.sync.append, time_to_live_ms=time_to_live_ms, durability=durability)
        return await self._client.call(append, keys, tokens)

    async def info(self) -> SessionInfo:
        """As `Session.info`."""
        return await self._client.call(self.sync.info)

    async def resume(
        self, place: Callable[[int, bytes], Block], *, timeout_s: float | None = None
    ) -> Resumed:
        """As `Session.resume`. `place` is called in another thread."""
        return await self._client.call(partial(self.sync.resume, timeout_s=timeout_s), place)

    async def remove(
        self, *, delete_blocks: bool = False, durability: Durability = Durability.WRITTEN
    ) -> int:
        """As `Session.remove`."""
        remove = partial(self.sync.remove, delete_blocks=delete_blocks, durability=durability)
        return await self._client.call(remove)
