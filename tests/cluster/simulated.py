"""An etcd without processes, and an event loop in which time passes only when nothing else is to be done.

What always holds: the same seed gives the same run. The etcd has leases, revisions and a list that can be followed, as
a real one has (`test_etcd.py` asks a real one the same); it can be out of reach for each of its clients by itself, and
loses what a call said, or only its answer, then.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvstore.clock import SystemClock
from kvstore.cluster.etcd import EtcdAway, Found, Listed
from kvstore.cluster.etcd_options import EtcdReach

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence

CALL_S = 2.0
HISTORY = b"/triggerkv/test/history/"


class _Selector(selectors.SelectSelector):
    """Never blocks: it advances the clock instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(0)  # nothing is left to do, until another thread says so
        self.now_s += max(0.0, timeout)
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now_s


class LoopClock(SystemClock):
    """The time of the running event loop."""

    def monotonic_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e9)


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def pass_s(seconds: float) -> None:
    """Advance the running loop's time, as work on its thread does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.selector.now_s += seconds


def run(doing: Coroutine[Any, Any, None]) -> None:
    loop = _Loop()
    try:
        loop.run_until_complete(doing)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(_ended(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class FakeEtcd:
    """An etcd in memory, for any number of clients."""

    def __init__(self) -> None:
        self.revision = 1
        self.values: dict[bytes, tuple[bytes, int]] = {}
        self.written: dict[bytes, int] = {}  # the revisions of the values
        self.lots: dict[bytes, Found] = {}
        self.gone: dict[bytes, bytes] = {}
        self.past: list[Listed] = []  # all lists that there ever were, one change each
        self.leases: dict[int, tuple[float, int]] = {}  # until when, and for how long it is kept
        self.joined: dict[bytes, int] = {}  # by whose lease, last
        self.lives = 0  # how often it has lost data
        self._ids = itertools.count(1)
        self.changed = asyncio.Condition()

    def grant(self, ttl_s: int) -> int:
        lease = next(self._ids)
        self.leases[lease] = (asyncio.get_running_loop().time() + ttl_s, ttl_s)
        return lease

    def keep(self, lease: int) -> bool:
        if lease not in self.leases:
            return False
        ttl_s = self.leases[lease][1]
        self.leases[lease] = (asyncio.get_running_loop().time() + ttl_s, ttl_s)
        return True

    async def put(
        self,
        key: bytes,
        value: bytes,
        lease: int,
        *,
        only_new: bool,
        lasting: bytes,
        unless: bytes = b"",
        was: int = 0,
        lasting_was: int = 0,
    ) -> int:
        if lease and lease not in self.leases:
            raise EtcdAway("etcd: requested lease not found")
        if (only_new and key in self.values) or unless in self.gone or (was and self.written.get(key) != was):
            return 0
        if lasting_was and self.written.get(lasting) != lasting_was:
            return 0
        if not only_new:
            self.joined[key] = lease
        self.revision += 1
        self._write(key, value, lease)
        if b".gone/" in lasting:
            self.gone[lasting] = value
        elif lasting:
            self._write(lasting, value, 0)
        await self.tell()
        return self.revision

    def _write(self, key: bytes, value: bytes, lease: int) -> None:
        self.values[key], self.written[key] = (value, lease), self.revision

    def latest(self) -> tuple[int, int]:
        return max(self.written.values(), default=0), len(self.values)

    async def claim(self, key: bytes, value: bytes, was: int, top: int, there: Sequence[bytes]) -> bool:
        if (
            self.lots.get(key, Found(b"", 0)).revision != was
            or self.latest()[0] > top
            or not self.values.keys() >= set(there)
        ):
            return False
        self.revision += 1
        if key.startswith(HISTORY):
            self._write(key, value, 0)
            await self.tell()
        else:
            self.lots[key] = Found(value, self.revision)
        return True

    def state(self) -> tuple[Any, ...]:
        """All of its data, as in a backup."""
        return self.revision, dict(self.values), dict(self.written), dict(self.lots), dict(self.gone)

    async def restore(self, state: tuple[Any, ...] = (1, {}, {}, {}, {})) -> None:
        """Replace all data by a backup, or by nothing. Leases begin again, and followers are notified."""
        self.revision, self.values, self.written, self.lots, self.gone = (
            state[0],
            *(dict(part) for part in state[1:]),
        )
        now_s = asyncio.get_running_loop().time()
        kept = {lease for _, lease in self.values.values()}
        self.leases = {one: (now_s + ttl_s, ttl_s) for one, (_, ttl_s) in self.leases.items() if one in kept}
        for lease in kept - {0, *self.leases}:
            self.leases[lease] = (now_s + 5, 5)
        self.lives += 1
        async with self.changed:
            self.changed.notify_all()

    async def drop(self, leases: list[int]) -> None:
        for lease in leases:
            self.leases.pop(lease, None)
            for key in [key for key, (_, of) in self.values.items() if of == lease]:
                del self.values[key], self.written[key]
                self.revision += 1
                await self.tell()

    async def tell(self) -> None:
        self.past.append(self.listed()._replace(is_told=True))
        async with self.changed:
            self.changed.notify_all()

    async def run(self) -> None:
        while True:
            now_s = asyncio.get_running_loop().time()
            await self.drop([lease for lease, (until_s, _) in self.leases.items() if until_s <= now_s])
            await asyncio.sleep(0.1)

    def left(self) -> set[str]:
        """Names of nodes that have left for good."""
        return {key.rpartition(b"/")[2].decode() for key in self.gone}

    def known(self) -> set[str]:
        """Names of nodes that have a record, as members or as absent nodes."""
        return {key.rpartition(b"/")[2].decode() for key in self.values if b"/history/" not in key} - {"lots"}

    def listed(self) -> Listed:
        return Listed(self.revision, dict(self.values), dict(self.written))


class FakeClient:
    """One client's connection to the fake etcd."""

    reach = EtcdReach(("127.0.0.1:1",), "test")

    def __init__(self, etcd: FakeEtcd, rng: random.Random) -> None:
        self._etcd, self._rng = etcd, rng
        self.is_away = False
        self.tells_no_latest = self.loses_claims = False
        self.looks_again_s = 0  # after how long it looks at the whole list again; 0: it differs

    async def _reach(self) -> None:
        await asyncio.sleep(self._rng.random() * 0.05)
        if self.is_away:
            await asyncio.sleep(CALL_S)
            raise EtcdAway("etcd: no answer")

    async def grant(self, ttl_s: int) -> int:
        await self._reach()
        lease = self._etcd.grant(ttl_s)
        await self._reach()
        return lease

    async def keep(self, lease: int) -> bool:
        await self._reach()
        kept = self._etcd.keep(lease)
        await self._reach()
        return kept

    async def revoke(self, lease: int) -> None:
        await self._reach()
        await self._etcd.drop([lease])

    async def put(
        self,
        key: bytes,
        value: bytes,
        lease: int,
        *,
        only_new: bool = False,
        lasting: bytes = b"",
        unless: bytes = b"",
        was: int = 0,
        lasting_was: int = 0,
    ) -> int:
        await self._reach()
        revision = await self._etcd.put(
            key,
            value,
            lease,
            only_new=only_new,
            lasting=lasting,
            unless=unless,
            was=was,
            lasting_was=lasting_was,
        )
        await self._reach()
        return revision

    async def replace(self, key: bytes, by: bytes, value: bytes, *, unless: bytes) -> bool:
        await self._reach()
        if unless in self._etcd.values:
            return False
        if self._etcd.values.pop(key, None) is not None:
            del self._etcd.written[key]
            self._etcd.gone[by] = value
            self._etcd.revision += 1
            await self._etcd.tell()
        await self._reach()
        return True

    async def follow(
        self, _prefix: bytes, again_s: Callable[[], float] = lambda: 0.0
    ) -> AsyncGenerator[Listed, None]:
        loop = asyncio.get_running_loop()
        while True:
            await self._reach()
            told, now, lives = len(self._etcd.past), self._etcd.listed(), self._etcd.lives
            yield now
            for _ in range(
                self.looks_again_s or self._rng.randrange(1, 6)
            ):  # then it looks at the whole again
                soon_s = again_s() - loop.time()
                is_soon = 0 < soon_s < 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(soon_s if is_soon else 1), self._etcd.changed:
                        await self._etcd.changed.wait_for(
                            lambda: len(self._etcd.past) > told or self._etcd.lives > lives  # noqa: B023
                        )
                await self._reach()
                if self._etcd.lives > lives:
                    raise EtcdAway("etcd: its process has ended")
                for told in range(told + 1, len(self._etcd.past) + 1):  # noqa: B020
                    yield self._etcd.past[told - 1]
                if is_soon and loop.time() >= again_s():
                    break

    async def latest(self, _prefix: bytes, there: bytes) -> tuple[int, int] | None:
        assert there, "etcd refuses an empty key"
        if self.tells_no_latest:
            raise EtcdAway("etcd: no answer to this question")
        await self._reach()
        found = self._etcd.latest() if there in self._etcd.values else None
        await self._reach()
        return found

    async def value(self, key: bytes) -> Found:
        await self._reach()
        value = self._etcd.gone.get(key, b"") or self._etcd.values.get(key, (b"", 0))[0]
        found = self._etcd.lots.get(key, Found(value, 0))
        await self._reach()
        return found

    async def claim(
        self, key: bytes, value: bytes, was: int, *, within: bytes, top: int, there: Sequence[bytes]
    ) -> bool:
        del within
        await self._reach()
        claimed = await self._etcd.claim(key, value, was, top, there)
        await self._reach()
        if self.loses_claims:
            raise EtcdAway("no answer")
        return claimed

    async def close(self) -> None:
        pass
