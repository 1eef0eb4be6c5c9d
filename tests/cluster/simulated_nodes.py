"""Nodes of a cluster in simulated time: the real membership, upkeep and service for it, over stores without drives.

What is simulated: etcd (`simulated.py`), the store's index, the memory for a block, and the calls between nodes, which
take time, arrive late, or never. A store survives its process. What always holds: the same seed gives the same run.
What it doesn't do: sessions, quotas, encryption, or a process that is stopped and goes on.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc.aio import AioRpcError, Metadata

from kvstore.cluster.etcd_history import EtcdMemory
from kvstore.cluster.membership import Membership
from kvstore.cluster.takeovers import Takeovers
from kvstore.miss import Miss, MissReason
from kvstore.node.blocks_service import BlocksService
from kvstore.node.calls import Ends
from kvstore.node.deletions import Deletions
from kvstore.node.time_slices import Turns
from kvstore.node.upkeep import Upkeep
from kvstore.node.upkeep_service import UpkeepService
from kvstore.storage.index import Entry
from kvstore.storage.items import DeleteDone, DeleteItem, GetDone
from tests.cluster.simulated import FakeClient, FakeEtcd, LoopClock

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from kvstore.cluster.map import Member
    from kvstore.durability import Durability
    from kvstore.storage.index import Name

TENANTS = {name.encode().ljust(16): (name, replicas) for name, replicas in (("both", 2), ("once", 1))}
CLIENT = "client"


def payload_of(name: Name, length: int) -> bytes:
    """The bytes that a block has on every node."""
    return (name[1] * (length // len(name[1]) + 1))[:length]


def rpc_error(code: grpc.StatusCode, details: str = "") -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)


class Network:
    """The connections between nodes, by address, and from clients to nodes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.is_cut: set[frozenset[str]] = set()
        self.processes: dict[str, Process] = {}  # by address
        self.sent: dict[str, list[tuple[float, int]]] = defaultdict(
            list
        )  # copies: by sender, when and how long
        self.sending: dict[str, int] = defaultdict(int)
        self.most_at_once = 0

    async def _pass(self, one: str, other: str) -> None:
        late = self.rng.random() < 0.03
        await asyncio.sleep(self.rng.random() * (12 if late else 0.05))
        if frozenset((one, other)) in self.is_cut:
            await asyncio.Future()  # nothing arrives, and nothing says so

    async def call(
        self, caller: str, node: str, does: Callable[[Process], Coroutine[Any, Any, Any]], timeout_s: float
    ) -> Any:
        """Run a call in a node's process. The call continues even if its caller gives up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._pass(caller, node)
                if (process := self.processes.get(node)) is None:
                    raise rpc_error(grpc.StatusCode.UNAVAILABLE)
                doing = process.begin(does(process))
                await asyncio.wait([doing])
                if doing.cancelled():
                    raise rpc_error(grpc.StatusCode.UNAVAILABLE, "it has died")
                answer = doing.result()
                await self._pass(node, caller)
                return answer
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED) from None


class Wires:
    """One node's calls to others; replaces `Peers`."""

    metadata = ()

    def __init__(self, network: Network, own: str) -> None:
        self._network, self._own = network, own

    def stub(self, node: str) -> Any:
        return SimpleNamespace(Offer=partial(self._offer, node), Copy=partial(self._copy, node))

    async def _offer(self, node: str, request: Any, *, timeout: float, metadata: Any) -> Any:  # noqa: ASYNC109
        del metadata
        return await self._network.call(
            self._own, node, lambda process: process.service.Offer(request, Context()), timeout
        )

    async def _copy(self, node: str, messages: Any, *, timeout: float, metadata: Any) -> Any:  # noqa: ASYNC109
        del metadata
        told = [message async for message in messages]
        network, now_s = self._network, asyncio.get_running_loop().time()
        network.sent[self._own].append((now_s, sum(len(one.chunk) for one in told)))
        network.sending[self._own] += 1
        network.most_at_once = max(network.most_at_once, network.sending[self._own])
        try:
            return await network.call(
                self._own, node, lambda process: process.service.Copy(_each(told), Context()), timeout
            )
        finally:
            network.sending[self._own] -= 1

    def keep(self, nodes: object) -> None:
        pass

    async def close(self) -> None:
        pass


async def _each(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


class Context:
    """The context of a call, on its node."""

    def peer(self) -> str:
        return "a node"

    async def abort(self, code: grpc.StatusCode, details: str, _: object) -> None:
        raise rpc_error(code, details)


def _place(name: Name) -> int:
    return 1 + int.from_bytes(blake2b(b"".join(name), digest_size=6).digest())


class Store:
    """The blocks of one folder: a store with one drive, which is its own index."""

    number, keys = 0, None

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.blocks: dict[Name, Entry] = {}
        self.tenures: dict[Name, object] = {}  # in which they arrived
        self.memory = EtcdMemory("test")
        self.is_full = False
        self._last = 0
        self.drives, self.keeping, self.manifests = [self], self, self
        self.pieces: dict[int, bytearray] = {}

    def seal(self) -> int:
        return self._last

    def after(self, at: int, count: int) -> tuple[list[tuple[Name, Entry]], int]:
        names = sorted((name for name in self.blocks if _place(name) >= at), key=_place)
        place = _place(names[count]) if count < len(names) else 0
        return [(name, self.blocks[name]) for name in names[:count]], place

    def references(self, names: Sequence[Name]) -> list[tuple[()]]:
        return [()] * len(names)

    def page(self, tenant: bytes, after: bytes, limit: int) -> tuple[list[Any], bool]:
        del tenant, after, limit
        return [], False  # it has no sessions

    def lookup(self, names: Sequence[Name]) -> list[Entry | None]:
        return [self.blocks.get(name) for name in names]

    def quota(self, _: bytes) -> Any:
        return SimpleNamespace(used_bytes=0, bytes_max=0)

    def drive_of(self, _: int) -> Store:
        return self

    def is_putting(self, _: Name) -> bool:
        return False

    def statistics(self) -> Any:
        return SimpleNamespace(
            takes_puts=True, free_bytes=0 if self.is_full else 1 << 40, capacity_bytes=1 << 40
        )

    def put(self, name: Name, length: int, tenure: object) -> None:
        self._last += 1
        self.blocks[name] = Entry(0, length, 0, self._last, 0, bytes(16))
        self.tenures[name] = tenure

    def get(self, items: Sequence[Any], ended: Callable[[list[GetDone]], None]) -> None:
        (item,) = items
        name = item.tenant, item.key
        done = GetDone(0, Miss(MissReason.UNKNOWN, "it is gone"))
        if name in self.blocks:
            data = payload_of(name, item.length)
            self.pieces[item.slot_address][:] = data
            done = GetDone(0, None, item.length, zlib.crc32(data))
        asyncio.get_running_loop().call_later(self._rng.random() * 0.3, ended, [done])

    def verify_payload(self, _: object, done: GetDone) -> GetDone:
        return done

    def delete(self, items: Sequence[DeleteItem], ended: Callable[[list[DeleteDone]], None]) -> None:
        ended(
            [
                DeleteDone(item.tag, None, self.blocks.pop((item.tenant, item.key), None) is not None)
                for item in items
            ]
        )


class Inline:
    """A node's memory for blocks inside calls."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.memory = self

    def take(self, _: object, length: int) -> int:
        pieces = self._process.store.pieces
        piece = max(pieces, default=0) + 1
        pieces[piece] = bytearray(length)
        return piece

    def give_back(self, _: object, piece: int) -> None:
        del self._process.store.pieces[piece]

    def address(self, piece: int) -> int:
        return piece

    def payload(self, piece: int, length: int) -> memoryview:
        return memoryview(self._process.store.pieces[piece])[:length]

    async def put(
        self,
        _: str,
        tenant: bytes,
        key: bytes,
        __: bytes,
        length: int,
        ___: Durability,
        ____: int,
        chunks: AsyncIterator[bytes],
        before_kept: Callable[[Any], object],
        domain: bytes,
    ) -> None:
        data = b"".join([chunk async for chunk in chunks])
        await asyncio.sleep(self._process.rng.random() * 0.2)
        assert data == payload_of((tenant, key), length), "wrong bytes"
        before_kept(SimpleNamespace(crc32c=zlib.crc32(data), domain=domain))
        self._process.put((tenant, key), length)
        await asyncio.sleep(self._process.rng.random() * 0.2)


class Process:
    """One life of a node, over a store that may be older."""

    def __init__(self, etcd: FakeEtcd, network: Network, member: Member, store: Store) -> None:
        self.rng, self.store, self.member, self.network = network.rng, store, member, network
        self.way, clock = FakeClient(etcd, self.rng), LoopClock()
        self.membership = Membership(self.way, clock, store.memory, Takeovers("test"))
        self.node: Any = SimpleNamespace(
            clock=clock,
            store=store,
            membership=self.membership,
            turns=Turns(clock),
            counters=None,
            inline=Inline(self),
            deletions=Deletions(clock),
            granted=SimpleNamespace(delete=lambda _: None),
            erasures=SimpleNamespace(refuse_copies=lambda *_: False),
        )
        tenants: Any = SimpleNamespace(names=lambda: TENANTS, placed_as=lambda name: name)
        wires: Any = Wires(network, member.node)
        self.upkeep = self.node.upkeep = Upkeep(cast("Any", self.node), tenants, self.membership, 2, wires)
        gate: Any = SimpleNamespace(
            enter_node=lambda _, __, tenant: SimpleNamespace(id=tenant.encode().ljust(16)),
            enter_operator=lambda *_: None,
        )
        self.service: Any = UpkeepService(cast("Any", self.node), gate)
        self._tasks: set[asyncio.Task[Any]] = set()
        network.processes[member.node] = self
        self.membership.start()
        self.membership._tasks.pop().cancel()  # it orders no sessions
        self.upkeep.start()
        self.membership.join(member)

    def begin(self, doing: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine until the process ends."""
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, *, kindly: bool = False, for_good: bool = False) -> None:
        """End the process, with or without leaving the map first."""
        self.network.processes.pop(self.member.node)
        for task in (*self._tasks, *(() if kindly else self.membership._tasks)):
            task.cancel()
        await self.upkeep.close()
        if kindly:
            await self.membership.close(for_good=for_good)

    def put(self, name: Name, length: int) -> None:
        is_noted = self.upkeep.eligibility._since_tenure == self.membership.tenure
        self.store.put(name, length, self._tenure if is_noted else None)

    async def delete(self, name: Name) -> tuple[int, str]:
        """Delete a block; returns the digest of the node's map, and its name."""
        ends: Ends[DeleteDone] = Ends(1)
        service: Any = SimpleNamespace(_node=self.node)
        BlocksService._delete(service, [DeleteItem(*name, 1, 0)], ends)  # type: ignore[arg-type]
        digest = self.membership.reported_digest
        await ends.all()
        return digest, self.member.name

    def is_sure(self, name: Name) -> bool:
        """Whether the block arrived in the current tenure, so that no deletion of it can have been missed."""
        return bool(self.membership.tenure) and self.store.tenures.get(name) == self._tenure

    @property
    def _tenure(self) -> object:
        """The process and its tenure; two processes may have tenures of the same number."""
        return self.membership, self.membership.tenure


async def all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of calls, or their errors."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException) and not isinstance(one, AioRpcError):
            raise one
    return done
