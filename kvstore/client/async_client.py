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
the method of the same name of `Client` or `Session` does, deadlines included. For the others, `await
client.call(client.sync.reserve, blocks)` calls any function in one of the threads.

What always holds: when an awaited call returns, nothing reads or writes its memory any more. That includes a cancelled
call: the cancellation is delivered after the call has ended, at its deadline at the latest, and a region or pin that it
has made is closed before. `as_request` applies to the calls made inside it. `close` waits for calls under way.
What it doesn't do: make calls faster. At most `ASYNC_CALLS_MAX` run at a time; further ones wait. It is a client of one
node; `AsyncClusterClient` is one of a cluster.
"""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast

from kvstore.client.async_calls import CallThreads
from kvstore.client.async_session import AsyncPuts, AsyncSession
from kvstore.client.client import Client
from kvstore.durability import Durability
from kvstore.limits import ERASE_TIMEOUT_S, LEASE_TIMEOUT_MS
from kvstore.names import UNSAID

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
    from types import TracebackType
    from typing import BinaryIO

    from typing_extensions import Buffer

    from kvstore.client.block_calls import Explained, Pin, Prefix, Stored
    from kvstore.client.blocks import Block, Hit, PutResult
    from kvstore.client.erasing import Erasure
    from kvstore.client.grpc_blocks import Data
    from kvstore.client.observing import Happened, LookedUp
    from kvstore.client.session_export import Progress
    from kvstore.client.session_info import ListedSession
    from kvstore.client.step_calls import ReadAhead
    from kvstore.layout import Layout
    from kvstore.miss import Miss
    from kvstore.wire.kvstore_pb2 import StatusResponse
    from kvstore.wire.observing_pb2 import StatisticsResponse
    from nic_offload.counter import Counter
    from nic_offload.fabric import Region
    from nic_offload.flags import FlagWord

__all__ = ["AsyncClient"]

P = ParamSpec("P")
R = TypeVar("R")
_OVER: Final = object()  # a watch has no more events


def _given_as(
    like: Callable[Concatenate[Any, P], None],
) -> Callable[[Any], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of another one, and check calls against it in its own name."""
    signature = inspect.signature(like)

    def given(own: Any) -> Callable[Concatenate[Any, P], None]:
        @wraps(own)
        def init(self: Any, *arguments: P.args, **named: P.kwargs) -> None:
            try:
                signature.bind(self, *arguments, **named)
            except TypeError as error:
                raise TypeError(f"{own.__qualname__}() {error}") from None
            own(self, *arguments, **named)

        init.__signature__ = signature  # type: ignore[attr-defined]
        return cast("Callable[Concatenate[Any, P], None]", init)

    return given


class AsyncClient:
    """A client of one node, for one event loop.

    Its methods are those of `Client`, awaitable. `sync` is that client: its properties, such as `sync.transport`, need
    no waiting, and `await client.call(client.sync.reserve, blocks)` makes any call that has no method here.
    The examples continue those of `Client`, and run in `python -m asyncio`.

    >>> from kvstore import AsyncClient
    >>> client = AsyncClient("127.0.0.1:7070", layout=b"my model, bf16")
    >>> kv = await client.register(memory)
    >>> block = Block(key, kv, offset=0, length=4096)
    >>> [result.durability.name for result in await client.put([block])]
    ['WRITTEN']
    """

    @_given_as(Client.__init__)
    def __init__(self, *arguments: Any, **named: Any) -> None:
        """The arguments are those of `Client`. The node is not called yet."""
        self.sync = Client(*arguments, **named)
        self._threads = CallThreads()

    def __repr__(self) -> str:
        """Its node, transport and tenant, without the token."""
        return f"Async{self.sync!r}"

    async def call(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a function that may wait, such as a method of `sync`, in a thread, and await its result.

        >>> reservation = await client.call(client.sync.reserve, [block])
        >>> await client.call(reservation.give_back)
        """
        return await self._threads.call(partial(function, *arguments, **named))

    async def attach(self) -> None:
        """As `Client.attach`.

        >>> await client.attach()
        """
        await self.call(self.sync.attach)

    async def register(self, memory: Buffer) -> Region:
        """As `Client.register`.

        >>> with await client.register(bytearray(8192)) as region:
        ...     region.length
        8192
        """
        return await self._threads.call(partial(self.sync.register, memory), lambda region: region.close())

    # --- over the fabric

    async def put(
        self,
        blocks: Sequence[Block],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `Client.put`.

        >>> [result.durability.name for result in await client.put([block])]
        ['WRITTEN']
        """
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
        timeout_s: float | None = None,
    ) -> AsyncPuts:
        """As `Client.arm`: the node is not called. Await `attach` first, otherwise the first `arm` blocks the loop.

        >>> puts = client.arm([block])
        >>> [result.durability.name for result in await puts.wait(timeout_s=10)]
        ['WRITTEN']
        """
        arm = partial(self.sync.arm, durability=durability, lease_ms=lease_ms, timeout_s=timeout_s)
        armed = arm(blocks, flag, expires_unix_ms=expires_unix_ms)
        return AsyncPuts(self, armed)

    async def get(
        self, blocks: Sequence[Block], *, layout: Layout | None = None, timeout_s: float | None = None
    ) -> list[Hit | Miss]:
        """As `Client.get`.

        >>> [type(outcome).__name__ for outcome in await client.get([block])]
        ['Hit']
        """
        return await self.call(partial(self.sync.get, layout=layout, timeout_s=timeout_s), blocks)

    # --- over gRPC

    async def put_inline(
        self,
        key: bytes,
        data: Data,
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = UNSAID,
        timeout_s: float | None = None,
    ) -> Durability:
        """As `Client.put_inline`.

        >>> (await client.put_inline(block_key(b"inline"), b"the KV of a page")).name
        'WRITTEN'
        """
        put = partial(
            self.sync.put_inline,
            durability=durability,
            expires_unix_ms=expires_unix_ms,
            domain=domain,
            timeout_s=timeout_s,
        )
        return await self.call(put, key, data)

    async def get_inline(self, key: bytes, length: int, *, timeout_s: float | None = None) -> bytes | Miss:
        """As `Client.get_inline`.

        >>> _ = await client.put_inline(block_key(b"inline"), b"the KV of a page")
        >>> await client.get_inline(block_key(b"inline"), length=16)
        b'the KV of a page'
        """
        return await self.call(partial(self.sync.get_inline, timeout_s=timeout_s), key, length)

    async def put_many_inline(
        self,
        blocks: Iterable[tuple[bytes, Data]],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = UNSAID,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `Client.put_many_inline`.

        >>> pages = [(block_key(b"inline"), b"the KV of a page")]
        >>> [result.durability.name for result in await client.put_many_inline(pages)]
        ['WRITTEN']
        """
        put = partial(
            self.sync.put_many_inline,
            durability=durability,
            expires_unix_ms=expires_unix_ms,
            domain=domain,
            timeout_s=timeout_s,
        )
        return await self.call(put, blocks)

    async def get_many_inline(
        self, wanted: Sequence[tuple[bytes, int]], *, timeout_s: float | None = None
    ) -> list[bytes | Miss]:
        """As `Client.get_many_inline`, but returns a list of all outcomes.

        >>> [len(page) for page in await client.get_many_inline([(key, 4096)])]
        [4096]
        """
        return await self.call(lambda: list(self.sync.get_many_inline(wanted, timeout_s=timeout_s)))

    # --- what is stored

    async def exists(
        self,
        keys: Sequence[bytes],
        *,
        lengths: Sequence[int] | None = None,
        any_layout: bool = False,
        timeout_s: float | None = None,
    ) -> list[Stored | Miss]:
        """As `Client.exists`.

        >>> [type(found).__name__ for found in await client.exists([key, block_key(b"never put")])]
        ['Stored', 'Miss']
        """
        exists = partial(self.sync.exists, lengths=lengths, any_layout=any_layout, timeout_s=timeout_s)
        return await self.call(exists, keys)

    async def prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Prefix:
        """As `Client.prefix`.

        >>> (await client.prefix([key, block_key(b"never put")])).blocks
        1
        """
        return await self.call(partial(self.sync.prefix, timeout_s=timeout_s), keys)

    async def explain(self, keys: Sequence[bytes]) -> list[Explained]:
        """As `Client.explain`.

        >>> [explained.stored for explained in await client.explain([key])]
        [True]
        """
        return await self.call(self.sync.explain, keys)

    async def pin(self, keys: Sequence[bytes], *, time_to_live_ms: int = 0) -> Pin:
        """As `Client.pin`.

        >>> with await client.pin([key]) as pin:
        ...     pin.pinned
        [True]
        """
        return await self._threads.call(
            partial(self.sync.pin, keys, time_to_live_ms=time_to_live_ms), lambda pin: pin.close()
        )

    async def prefetch(self, keys: Sequence[bytes]) -> ReadAhead:
        """As `Client.prefetch`.

        >>> (await client.prefetch([key])).missing
        {}
        """
        return await self.call(self.sync.prefetch, keys)

    async def delete(
        self, keys: Sequence[bytes], *, durability: Durability = Durability.WRITTEN
    ) -> list[bool]:
        """As `Client.delete`.

        >>> await client.delete([block_key(b"never put")])
        [False]
        """
        return await self.call(partial(self.sync.delete, durability=durability), keys)

    # --- sessions

    def session(self, user: str, name: str) -> AsyncSession:
        """As `Client.session`: the node is not called.

        >>> chat = client.session("ada", "asyncio 1")
        >>> await chat.append([key], tokens=16)
        1
        """
        return AsyncSession(self, self.sync.session(user, name))

    async def sessions(self, user: str) -> list[ListedSession]:
        """As `Client.sessions`, but returns a list.

        >>> _ = await client.session("eva", "chat 1").append([key], tokens=16)
        >>> [one.session for one in await client.sessions("eva")]
        ['chat 1']
        """
        return await self.call(lambda: list(self.sync.sessions(user)))

    async def import_session(
        self,
        file: BinaryIO,
        user: str,
        name: str,
        *,
        durability: Durability = Durability.WRITTEN,
        progress: Progress | None = None,
    ) -> AsyncSession:
        """As `Client.import_session`. The file is read, and `progress` called, in another thread.

        >>> from io import BytesIO
        >>> chat, file = client.session("rob", "chat 1"), BytesIO()
        >>> _ = await chat.append([key], tokens=16)
        >>> _ = await chat.export(file), file.seek(0)
        >>> copy = await client.import_session(file, "rob", "a copy")
        >>> (await copy.info()).tokens
        16
        """
        import_one = partial(self.sync.import_session, durability=durability, progress=progress)
        return AsyncSession(self, await self.call(import_one, file, user, name))

    # --- erasing

    async def erase_user(self, user: str, *, timeout_s: float = ERASE_TIMEOUT_S) -> Erasure:
        """As `Client.erase_user`.

        >>> (await client.erase_user("nobody")).sessions
        0
        """
        return await self.call(partial(self.sync.erase_user, timeout_s=timeout_s), user)

    async def erase_tenant(self, *, timeout_s: float = ERASE_TIMEOUT_S) -> Erasure:
        """As `Client.erase_tenant`.

        >>> async with AsyncClient(client.sync.target, tenant="initech") as other:
        ...     (await other.erase_tenant()).sessions
        0
        """
        return await self.call(partial(self.sync.erase_tenant, timeout_s=timeout_s))

    # --- what the node does

    async def status(self, *, wait_s: float = 0.0) -> StatusResponse:
        """As `Client.status`.

        >>> (await client.status(wait_s=5)).read_only
        False
        """
        return await self.call(partial(self.sync.status, wait_s=wait_s))

    async def statistics(self) -> StatisticsResponse:
        """As `Client.statistics`.

        >>> (await client.statistics()).puts > 0
        True
        """
        return await self.call(self.sync.statistics)

    async def looked_up(
        self, request_id: str = "", user: str = "", session: str = "", *, last: int = 0
    ) -> LookedUp:
        """As `Client.looked_up`.

        >>> _ = await client.get([block])
        >>> [look_up.blocks for look_up in (await client.looked_up(last=1)).lookups]
        [1]
        """
        return await self.call(partial(self.sync.looked_up, last=last), request_id, user, session)

    async def watch(self, *, timeout_s: float) -> AsyncGenerator[Happened | None, None]:
        """As `Client.watch`, for `async for`. It takes one of the threads while it waits.

        >>> async for event in client.watch(timeout_s=10):
        ...     if event is None:  # it has begun
        ...         break
        """
        events = self.sync.watch(timeout_s=timeout_s)
        try:
            while (event := await self.call(next, events, _OVER)) is not _OVER:
                yield cast("Happened | None", event)
        finally:
            await self.call(events.close)

    # --- closing

    async def close(self) -> None:
        """Close the client. It waits for calls that are under way; puts that have not been acknowledged fail.

        >>> await AsyncClient(client.sync.target).close()
        """
        await self._threads.close(self.sync.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
