"""A client of a cluster for asyncio.

    async with AsyncClusterClient(["10.0.0.5:7070", "10.0.0.6:7070"], replicas=2) as client:
        kv = await client.register(buffer)
        blocks = [ClusterBlock(key, kv, offset, length), ...]
        results = await client.put(blocks)
        outcomes = await client.get(blocks, timeout_s=10)
        puts = await client.arm(blocks, flags[0])
        results = await puts.wait(timeout_s=10)

It is a `ClusterClient` whose calls are made by its own threads, so the loop never waits for the network or for the
cluster's map. Each method does what the method of the same name of `ClusterClient` does, deadlines included.

What always holds: when an awaited call returns, nothing reads or writes its memory any more. That includes a cancelled
call: the cancellation is delivered after the call has ended, at its deadline at the latest, and what it has made is
undone before: puts that it has armed are abandoned on all owners, memory is deregistered, a pin is released. `close`
waits for calls that are under way. `as_request` applies to the calls made inside it.
What it doesn't do: make calls faster, or undo a put or a deletion that was cancelled: it may have been done.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar

from kvstore.client.async_calls import CallThreads
from kvstore.client.cluster_client import ClusterClient
from kvstore.durability import Durability
from kvstore.limits import ERASE_TIMEOUT_S, LEASE_TIMEOUT_MS
from kvstore.names import UNSAID
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Buffer

    from kvstore.client.block_calls import Prefix, Stored
    from kvstore.client.blocks import Hit, PutResult
    from kvstore.client.cluster_blocks import ClusterBlock
    from kvstore.client.cluster_puts import ClusterPin, ClusterPuts
    from kvstore.client.erasing import Erasure
    from kvstore.client.grpc_blocks import Data
    from kvstore.client.nodes import RegisteredMemory
    from kvstore.miss import Miss
    from kvstore.reach import Reach
    from nic_offload.counter import Counter
    from nic_offload.flags import FlagWord

__all__ = ["AsyncClusterClient", "AsyncClusterPuts"]

P = ParamSpec("P")
R = TypeVar("R")


class AsyncClusterClient:
    """A client of a cluster, for one event loop.

    Its methods are those of `ClusterClient`, awaitable. `sync` is that client, and `await
    cluster.call(function, ...)` makes any call that has no method here.
    The examples continue those of `Client`, and run in `python -m asyncio`.

    >>> from kvstore.client import AsyncClusterClient, ClusterBlock
    >>> nodes = ["127.0.0.1:7070"]  # one of the cluster's nodes is enough
    >>> cluster = AsyncClusterClient(nodes, layout=b"my model, bf16")
    >>> everywhere = await cluster.register(memory)
    >>> block = ClusterBlock(key, everywhere, offset=0, length=4096)
    >>> [result.durability.name for result in await cluster.put([block])]
    ['WRITTEN']
    """

    def __init__(
        self,
        nodes: Sequence[str] | Reach | None = None,
        *,
        replicas: int | None = None,
        acks: Literal["all", "any"] = "all",
        **of_clients: Any,
    ) -> None:
        """The arguments are those of `ClusterClient`. It waits for no node."""
        self.sync = ClusterClient(nodes, replicas=replicas, acks=acks, **of_clients)
        self._threads = CallThreads()

    def __repr__(self) -> str:
        """The nodes it was given, replicas, transport and tenant, without the token."""
        return f"Async{self.sync!r}"

    async def call(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a function that may wait, such as a method of `sync`, in a thread, and await its result.

        >>> (await cluster.call(cluster.sync.nodes.home, "ada")) == client.target
        True
        """
        return await self._threads.call(partial(function, *arguments, **named))

    async def register(self, memory: Buffer) -> RegisteredMemory:
        """As `ClusterClient.register`.

        >>> with await cluster.register(bytearray(8192)) as everywhere:
        ...     block = ClusterBlock(key, everywhere, offset=0, length=8192)
        """
        return await self._threads.call(
            partial(self.sync.register, memory), lambda everywhere: everywhere.close()
        )

    async def attach(self) -> None:
        """As `ClusterClient.attach`.

        >>> await cluster.attach()
        """
        await self.call(self.sync.attach)

    async def owners(self, key: bytes) -> list[str]:
        """As `ClusterClient.owners`.

        >>> (await cluster.owners(key)) == [client.target]
        True
        """
        return await self.call(self.sync.owners, key)

    # --- over the fabric

    async def put(
        self,
        blocks: Sequence[ClusterBlock],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `ClusterClient.put`.

        >>> [result.durability.name for result in await cluster.put([block])]
        ['WRITTEN']
        """
        put = partial(
            self.sync.put, durability=durability, expires_unix_ms=expires_unix_ms, timeout_s=timeout_s
        )
        return await self.call(put, blocks)

    async def arm(
        self,
        blocks: Sequence[ClusterBlock],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncClusterPuts:
        """As `ClusterClient.arm`. It is awaited, because owners that are not attached yet are called.

        >>> puts = await cluster.arm([block])
        >>> [result.durability.name for result in await puts.wait(timeout_s=10)]
        ['WRITTEN']
        """
        arm = partial(self.sync.arm, durability=durability, lease_ms=lease_ms, timeout_s=timeout_s)
        armed = await self._threads.call(
            partial(arm, blocks, flag, expires_unix_ms=expires_unix_ms), lambda puts: puts.abandon()
        )
        return AsyncClusterPuts(self, armed)

    async def get(
        self, blocks: Sequence[ClusterBlock], *, timeout_s: float | None = None
    ) -> list[Hit | Miss]:
        """As `ClusterClient.get`.

        >>> [type(outcome).__name__ for outcome in await cluster.get([block])]
        ['Hit']
        """
        return await self.call(partial(self.sync.get, timeout_s=timeout_s), blocks)

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
        """As `ClusterClient.put_inline`.

        >>> (await cluster.put_inline(block_key(b"inline"), b"the KV of a page")).name
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
        """As `ClusterClient.get_inline`.

        >>> _ = await cluster.put_inline(block_key(b"inline"), b"the KV of a page")
        >>> await cluster.get_inline(block_key(b"inline"), length=16)
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
        """As `ClusterClient.put_many_inline`.

        >>> pages = [(block_key(b"inline"), b"the KV of a page")]
        >>> [result.durability.name for result in await cluster.put_many_inline(pages)]
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
        """As `ClusterClient.get_many_inline`, but returns a list of all outcomes.

        >>> [len(page) for page in await cluster.get_many_inline([(key, 4096)])]
        [4096]
        """
        return await self.call(lambda: list(self.sync.get_many_inline(wanted, timeout_s=timeout_s)))

    # --- what is stored

    async def exists(
        self, keys: Sequence[bytes], *, lengths: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Stored | Miss]:
        """As `ClusterClient.exists`.

        >>> [type(found).__name__ for found in await cluster.exists([key, block_key(b"never put")])]
        ['Stored', 'Miss']
        """
        return await self.call(partial(self.sync.exists, lengths=lengths, timeout_s=timeout_s), keys)

    async def prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Prefix:
        """As `ClusterClient.prefix`.

        >>> (await cluster.prefix([key, block_key(b"never put")])).blocks
        1
        """
        return await self.call(partial(self.sync.prefix, timeout_s=timeout_s), keys)

    async def delete(
        self, keys: Sequence[bytes], *, durability: Durability = Durability.WRITTEN
    ) -> list[bool]:
        """As `ClusterClient.delete`. If it is cancelled, some nodes may have deleted the blocks: delete them again.

        >>> await cluster.delete([block_key(b"never put")])
        [False]
        """
        return await self.call(partial(self.sync.delete, durability=durability), keys)

    async def erase_user(self, user: str, *, timeout_s: float = ERASE_TIMEOUT_S) -> list[Erasure]:
        """As `ClusterClient.erase_user`.

        >>> [erasure.sessions for erasure in await cluster.erase_user("nobody")]  # of each node
        [0]
        """
        return await self.call(partial(self.sync.erase_user, timeout_s=timeout_s), user)

    async def erase_tenant(self, *, timeout_s: float = ERASE_TIMEOUT_S) -> list[Erasure]:
        """As `ClusterClient.erase_tenant`.

        >>> async with AsyncClusterClient([client.target], tenant="initech") as other:
        ...     [erasure.sessions for erasure in await other.erase_tenant()]
        [0]
        """
        return await self.call(partial(self.sync.erase_tenant, timeout_s=timeout_s))

    async def pin(self, keys: Sequence[bytes], *, time_to_live_ms: int = 0) -> ClusterPin:
        """As `ClusterClient.pin`. Closing the pin calls the nodes, so it is done in a thread.

        >>> pin = await cluster.pin([key])
        >>> pin.pinned
        [True]
        >>> await cluster.call(pin.close)
        """
        return await self._threads.call(
            partial(self.sync.pin, keys, time_to_live_ms=time_to_live_ms), lambda pin: pin.close()
        )

    # --- closing

    async def close(self) -> None:
        """Close the clients. It waits for calls that are under way; puts that have not been acknowledged fail.

        >>> await AsyncClusterClient([client.target]).close()
        """
        await self._threads.close(self.sync.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@made_by("`AsyncClusterClient.arm`")
class AsyncClusterPuts:
    """Puts to several nodes fired by one flag: `ClusterPuts` with awaitable waits.

    >>> puts = await cluster.arm([block])
    >>> [result.durability.name for result in await puts.wait(timeout_s=10)]
    ['WRITTEN']
    """

    def __init__(self, client: AsyncClusterClient, armed: ClusterPuts) -> None:
        self._client, self.armed = client, armed

    @property
    def has_ended(self) -> bool:
        """Whether every put has ended."""
        return self.armed.has_ended

    async def wait(self, timeout_s: float) -> list[PutResult]:
        """As `ClusterPuts.wait`. If it is cancelled, the puts continue: `abandon` ends them.

        >>> [result.error for result in await puts.wait(timeout_s=10)]
        [None]
        """
        return await self._client.call(self.armed.wait, timeout_s)

    async def wait_landed(self, timeout_s: float) -> bool:
        """As `ClusterPuts.wait_landed`.

        >>> await puts.wait_landed(timeout_s=10)
        True
        """
        return await self._client.call(self.armed.wait_landed, timeout_s)

    async def cancel(self) -> int:
        """As `ClusterPuts.cancel`.

        >>> await puts.cancel()  # nothing is left to withdraw
        0
        """
        return await self._client.call(self.armed.cancel)

    async def abandon(self) -> None:
        """As `ClusterPuts.abandon`.

        >>> await puts.abandon()
        """
        await self._client.call(self.armed.abandon)
