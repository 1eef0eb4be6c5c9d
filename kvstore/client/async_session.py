"""Armed puts and sessions for asyncio: `ArmedPuts` and `Session` whose calls are made by threads of an `AsyncClient`.

What always holds: what `kvstore.client.async_client` says, which makes them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvstore.durability import Durability
from kvstore.limits import LEASE_TIMEOUT_MS
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

    from kvstore.client.async_client import AsyncClient
    from kvstore.client.blocks import Block, PutResult
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.resuming import Resumed
    from kvstore.client.session_export import Progress
    from kvstore.client.session_info import SessionInfo
    from kvstore.client.sessions import Session
    from kvstore.client.trace import Trace
    from kvstore.layout import Layout
    from kvstore.steps import Step
    from nic_offload.counter import Counter
    from nic_offload.flags import FlagWord

__all__ = ["AsyncPuts", "AsyncSession"]


@made_by("`AsyncClient.arm`")
class AsyncPuts:
    """Armed puts: `ArmedPuts` with awaitable waits.

    >>> puts = client.arm([block])
    >>> [result.durability.name for result in await puts.wait(timeout_s=10)]
    ['WRITTEN']
    """

    def __init__(self, client: AsyncClient, armed: ArmedPuts) -> None:
        self._client, self.armed = client, armed

    async def wait(self, timeout_s: float) -> list[PutResult]:
        """As `ArmedPuts.wait`.

        >>> [result.error for result in await puts.wait(timeout_s=10)]
        [None]
        """
        return await self._client.call(self.armed.wait, timeout_s)

    async def wait_landed(self, timeout_s: float) -> bool:
        """As `ArmedPuts.wait_landed`.

        >>> await puts.wait_landed(timeout_s=10)
        True
        """
        return await self._client.call(self.armed.wait_landed, timeout_s)

    async def cancel(self) -> int:
        """As `ArmedPuts.cancel`.

        >>> await puts.cancel()  # nothing is left to withdraw
        0
        """
        return await self._client.call(self.armed.cancel)

    async def abandon(self) -> None:
        """As `ArmedPuts.abandon`.

        >>> await puts.abandon()
        """
        await self._client.call(self.armed.abandon)

    def name(self, number: int, key: bytes) -> None:
        """As `ArmedPuts.name`: it doesn't wait.

        >>> from kvstore import FlagWords
        >>> with FlagWords.create(1) as flags:
        ...     unnamed = client.arm([Block(b"", kv, offset=0, length=4096)], flags[0])
        ...     unnamed.name(0, block_key(b"known later"))
        ...     await unnamed.cancel()
        1
        """
        self.armed.name(number, key)

    def progress(self) -> tuple[int, int, int]:
        """As `ArmedPuts.progress`: it doesn't wait.

        >>> puts.progress()
        (1, 1, 1)
        """
        return self.armed.progress()

    def ended(self) -> list[PutResult] | None:
        """As `ArmedPuts.ended`: it doesn't wait.

        >>> [result.error for result in puts.ended()]
        [None]
        """
        return self.armed.ended()

    @property
    def has_ended(self) -> bool:
        """Whether every put has ended."""
        return self.armed.has_ended


@made_by("`AsyncClient.session`")
class AsyncSession:
    """A session: `Session` with awaitable calls. `await client.call(chat.sync.getting, place)` makes any other call.

    >>> chat = client.session("hedy", "chat 9")
    >>> await chat.append([key], tokens=16)  # blocks now
    1
    >>> (await chat.resume(lambda number, key: Block(key, kv, offset=0, length=4096))).is_whole
    True
    """

    def __init__(self, client: AsyncClient, sync: Session) -> None:
        self._client, self.sync = client, sync

    def __repr__(self) -> str:
        """Its user and name."""
        return f"Async{self.sync!r}"

    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
    ) -> AsyncPuts:
        """As `Session.arm`: the node is not called. Await `AsyncClient.attach` first.

        >>> puts = chat.arm([block])
        >>> [result.durability.name for result in await puts.wait(timeout_s=10)]
        ['WRITTEN']
        """
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
        """As `Session.append`.

        >>> await client.session("hedy", "chat 10").append([key], tokens=16)
        1
        """
        append = partial(self.sync.append, time_to_live_ms=time_to_live_ms, durability=durability)
        return await self._client.call(append, keys, tokens)

    async def keys(self) -> list[bytes]:
        """As `Session.keys`.

        >>> await chat.keys() == [key]
        True
        """
        return await self._client.call(self.sync.keys)

    async def info(self) -> SessionInfo:
        """As `Session.info`.

        >>> (await chat.info()).tokens
        16
        """
        return await self._client.call(self.sync.info)

    async def fork(
        self,
        name: str,
        *,
        user: str | None = None,
        blocks: int | None = None,
        durability: Durability = Durability.WRITTEN,
    ) -> AsyncSession:
        """As `Session.fork`.

        >>> fork = await chat.fork("another answer")
        >>> await fork.keys() == [key]
        True
        """
        fork = partial(self.sync.fork, user=user, blocks=blocks, durability=durability)
        return AsyncSession(self._client, await self._client.call(fork, name))

    async def truncate(self, blocks: int, *, durability: Durability = Durability.WRITTEN) -> None:
        """As `Session.truncate`.

        >>> fork = await chat.fork("from the start")
        >>> await fork.truncate(0)
        >>> await fork.keys()
        []
        """
        await self._client.call(partial(self.sync.truncate, durability=durability), blocks)

    async def limit(self, time_to_live_ms: int, *, durability: Durability = Durability.WRITTEN) -> int:
        """As `Session.limit`.

        >>> fork = await chat.fork("for a minute")
        >>> await fork.limit(time_to_live_ms=60_000) > 0
        True
        """
        return await self._client.call(partial(self.sync.limit, durability=durability), time_to_live_ms)

    async def export(self, file: BinaryIO, *, progress: Progress | None = None) -> int:
        """As `Session.export`. The file is written, and `progress` called, in another thread.

        >>> from io import BytesIO
        >>> await chat.export(BytesIO())
        1
        """
        return await self._client.call(partial(self.sync.export, progress=progress), file)

    async def protect(self, blocks: int = 0) -> None:
        """As `Session.protect`.

        >>> await chat.protect()
        """
        await self._client.call(self.sync.protect, blocks)

    async def unprotect(self) -> bool:
        """As `Session.unprotect`.

        >>> await chat.protect()
        >>> await chat.unprotect()
        True
        """
        return await self._client.call(self.sync.unprotect)

    async def prefetch(self) -> int:
        """As `Session.prefetch`.

        >>> await chat.prefetch() <= 1
        True
        """
        return await self._client.call(self.sync.prefetch)

    async def resume(
        self,
        place: Callable[[int, bytes], Block],
        *,
        layout: Layout | None = None,
        timeout_s: float | None = None,
    ) -> Resumed:
        """As `Session.resume`. `place` is called in another thread.

        >>> (await chat.resume(lambda number, key: Block(key, kv, offset=0, length=4096))).usable_tokens
        16
        """
        return await self._client.call(partial(self.sync.resume, layout=layout, timeout_s=timeout_s), place)

    async def remove(
        self, *, delete_blocks: bool = False, durability: Durability = Durability.WRITTEN
    ) -> int:
        """As `Session.remove`.

        >>> fork = await chat.fork("not needed")
        >>> await fork.remove()
        0
        """
        remove = partial(self.sync.remove, delete_blocks=delete_blocks, durability=durability)
        return await self._client.call(remove)

    def mark(self, step: Step, *, tokens: int = 0, detail: str = "") -> None:
        """As `Session.mark`: the node is not called.

        >>> from kvstore.steps import Step
        >>> chat.mark(Step.ANSWERED, tokens=16)
        """
        self.sync.mark(step, tokens=tokens, detail=detail)

    async def report(self) -> None:
        """As `Session.report`.

        >>> await chat.report()
        """
        await self._client.call(self.sync.report)

    async def trace(self) -> Trace:
        """As `Session.trace`.

        >>> await chat.report()
        >>> len((await chat.trace()).seen) > 0
        True
        """
        return await self._client.call(self.sync.trace)
