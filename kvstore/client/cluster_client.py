"""A client of a whole cluster: each block is stored on one node or on two.

    with ClusterClient(["10.0.0.5:7070", "10.0.0.6:7070"], replicas=2) as client:
        kv = client.register(buffer)
        blocks = [ClusterBlock(key, kv, offset, length, threshold=n), ...]
        puts = client.arm(blocks, flags[0])      # a put to each owner of a block, all fired by the one flag
        results = puts.wait(timeout_s=10)
        outcomes = client.get(blocks, timeout_s=10)

A block's owners are the first `replicas` members in the order that the map gives for its tenant and key
(`kvstore.cluster.map`), so every client with the same map finds them. A call is split by owner, and its parts run at
the same time.

What always holds: for each block what `Client` promises, with one deadline for the whole call. A put with two replicas
succeeds only if both owners have the block; with `acks="any"`, if one has. If an owner lacks a block, or doesn't send
it in its share of the time, the next node in that order is asked, up to one more than there are replicas. So no block
is missed while one member is away, or has just come back or joined. Of the owners, one in this client's `zone` is asked
first (`kvstore.client.cluster_reads`). A deletion goes to all members, and fails unless each has answered. A node that
stops answering costs one short wait in all (`kvstore.client.silent_nodes`). A change of the map during a call is no
error: blocks for a node that has left go to their new owners; a get from it is a miss. Puts that wait for their flag
follow the map (`kvstore.client.cluster_ahead`). A block that an owner lacked is put back to it later (`repairs`).
What it doesn't do: copy blocks that nobody reads. Nodes do, if configured to (`kvstore.node.upkeep`).
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kvstore.client.arguments import checks_arguments
from kvstore.client.arming import Arming, Owners, PutTerms
from kvstore.client.block_calls import Prefix, Stored
from kvstore.client.blocks import PutResult
from kvstore.client.checks import check_between, check_lengths, check_wanted, checked_puts
from kvstore.client.cluster_blocks import blocks_of, keys_of
from kvstore.client.cluster_puts import ClusterPin, ClusterPuts, merged, now_s, seconds_until, stream_broke
from kvstore.client.cluster_reads import Reads, by_owner
from kvstore.client.cluster_removals import Removals
from kvstore.client.description import described
from kvstore.client.nodes import Nodes
from kvstore.client.owner_calls import OwnerCalls
from kvstore.client.repairs import Repairs
from kvstore.clock import SystemClock
from kvstore.durability import Durability
from kvstore.errors import InvalidArgument, KvError, NodeUnavailable
from kvstore.limits import (
    CLUSTER_INLINE_AT_ONCE,
    ERASE_TIMEOUT_S,
    LEASE_TIMEOUT_MS,
    LEASE_TIMEOUT_MS_MAX,
    REPLICAS_MAX,
)
from kvstore.miss import Miss
from kvstore.names import UNSAID
from nic_offload.errors import shown
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from kvstore.client.block_calls import Pin
    from kvstore.client.blocks import Hit
    from kvstore.client.client import Client
    from kvstore.client.cluster_blocks import ClusterBlock
    from kvstore.client.erasing import Erasure
    from kvstore.client.grpc_blocks import Data
    from kvstore.client.nodes import RegisteredMemory
    from kvstore.cluster.map import Map
    from kvstore.reach import Reach
    from nic_offload.counter import Counter
    from nic_offload.fabric import Fabric
    from nic_offload.flags import FlagWord

__all__ = ["ClusterClient"]

_CLOCK = SystemClock()
R = TypeVar("R")


@checks_arguments
class ClusterClient(Handle):
    """A client of a cluster, whose nodes store each block once or twice. Its methods may be called from any thread.

    >>> from kvstore.client import ClusterBlock, ClusterClient
    >>> cluster = ClusterClient(["127.0.0.1:7070"], layout=b"my model, bf16")  # one of its nodes is enough
    >>> everywhere = cluster.register(memory)
    >>> block = ClusterBlock(key, everywhere, offset=0, length=4096)
    >>> [result.durability.name for result in cluster.put([block])]
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
        """`nodes` are one or more of the cluster's nodes; `of_clients` are the arguments of each `Client`.

        Each block is stored on `replicas` nodes, 1 or 2; by default on as many as the cluster keeps for this tenant. A
        put succeeds once all of them have the block, or, with `acks="any"`, once one has.
        """
        check_between(
            "The number of a block's replicas", 1 if replicas is None else replicas, 1, REPLICAS_MAX
        )
        if acks not in ("all", "any"):
            raise InvalidArgument(f'`acks` is "all" or "any", not {shown(acks)}.')
        self.nodes = Nodes(nodes, **of_clients)
        self._replicas, self._acks_max = replicas, REPLICAS_MAX if acks == "all" else 1
        self._calls = OwnerCalls(self.nodes)
        self._repairs = Repairs(self._calls.calling)
        self._removals = Removals(self.nodes, self._calls.each, self._calls.closing, _CLOCK)
        self._arming = Arming(self._calls, lambda: self.nodes.map)
        self._reads = Reads(
            self.nodes, lambda: self.replicas, self._calls.each, self._calls.silent, self._repairs, _CLOCK
        )

    def __repr__(self) -> str:
        """The nodes it was given, replicas, transport and tenant, without the token; no node is called."""
        reach = self.nodes.reach
        return described(self, list(reach.nodes), reach, replicas=self._replicas, transport=reach.transport)

    @property
    def replicas(self) -> int:
        """On how many nodes each block is stored: as given, or as the cluster does it for this tenant, now.

        >>> cluster.replicas
        1
        """
        return self._replicas or self.nodes._replicas  # noqa: SLF001 - of this package

    def register(self, memory: Buffer) -> RegisteredMemory:
        """Register memory for puts to and gets from any node. Close it before the memory is freed.

        FabricError if there is no fabric here, or the memory can't be registered with it.

        >>> with cluster.register(bytearray(8192)) as everywhere:
        ...     block = ClusterBlock(key, everywhere, offset=0, length=8192)
        """
        everywhere = self.nodes.register(memory)
        everywhere.at(self.nodes._main())  # noqa: SLF001 - of this package
        return everywhere

    def attach(self) -> None:
        """Attach now to each node that can be reached, so that later calls don't have to.

        >>> cluster.attach()
        """
        self._calls.each(
            {member.node: [] for member in self.nodes.map.members}, lambda client, _: client.attach()
        )

    @property
    def transport(self) -> str:
        """As `Client.transport`."""
        return self.nodes._main().transport  # noqa: SLF001 - of this package

    @property
    def fabric(self) -> Fabric:
        """As `Client.fabric`, of a node that answered; each node's client has its own of the same kind."""
        return self.nodes._main().fabric  # noqa: SLF001 - of this package

    def owners(self, key: bytes) -> list[str]:
        """The nodes that store a block, as the map has them now, the first owner first.

        >>> cluster.owners(key) == [client.target]
        True
        """
        return self._owners_on(self.nodes.map, key, self.replicas)

    # --- over the fabric

    def put(
        self,
        blocks: Sequence[ClusterBlock],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `Client.put`, on each owner. When it returns, nothing reads the memory any more.

        >>> [result.durability.name for result in cluster.put([block])]
        ['WRITTEN']
        """
        timeout_s = self._get_s(timeout_s)
        lease_ms = min(LEASE_TIMEOUT_MS_MAX, max(1, int(timeout_s * 1000)))
        until_s = now_s() + timeout_s
        try:
            self.nodes._await_map(timeout_s)  # noqa: SLF001 - of this package
        except NodeUnavailable as error:
            return [PutResult(key, None, error) for key in keys_of(blocks)]
        revision = self.nodes.map.revision
        arm = partial(self.arm, durability=durability, lease_ms=lease_ms, timeout_s=timeout_s)
        puts = arm(blocks, expires_unix_ms=expires_unix_ms)
        results = puts.wait(seconds_until(until_s))
        puts.abandon()
        again = [at for at, one in enumerate(results) if isinstance(one.error, NodeUnavailable)]
        if again and self.nodes.map.revision != revision and (left_s := seconds_until(until_s)):
            put = partial(self.put, durability=durability, expires_unix_ms=expires_unix_ms, timeout_s=left_s)
            for at, result in zip(again, put([blocks[at] for at in again]), strict=True):
                results[at] = result
        return results

    def arm(
        self,
        blocks: Sequence[ClusterBlock],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> ClusterPuts:
        """As `Client.arm`: a put to each owner, all of them fired by the one flag.

        If an owner leaves the cluster before the flag is stored, its puts are withdrawn and armed at the new owners.

        >>> puts = cluster.arm([block])
        >>> [result.durability.name for result in puts.wait(timeout_s=10)]
        ['WRITTEN']
        """
        call_s = self.nodes._await_map(self._call_s(timeout_s))  # noqa: SLF001 - of this package
        given, replicas = list(blocks), self.replicas
        keys = keys_of(given)

        def owners(now: Map, at: int) -> list[str]:
            return self._owners_on(now, keys[at], replicas)

        return self._arming.arm(
            given,
            keys,
            flag,
            Owners(owners, partial(self._owned, keys, replicas), min(replicas, self._acks_max)),
            PutTerms(durability, lease_ms, expires_unix_ms, call_s),
        )

    def get(self, blocks: Sequence[ClusterBlock], *, timeout_s: float | None = None) -> list[Hit | Miss]:
        """As `Client.get`, of the first owner that has it, or the nearest: one in this client's `zone` is asked first.

        >>> [type(outcome).__name__ for outcome in cluster.get([block])]
        ['Hit']
        """

        def get(client: Client, some: list[int], left_s: float) -> list[Hit | Miss]:
            return client.get(blocks_of(client, [blocks[at] for at in some]), timeout_s=left_s)

        def copied(at: int, _: object) -> bytes | None:
            return blocks[at].copied()

        return self._reads.found(keys_of(blocks), get, self._get_s(timeout_s), copied)

    # --- over gRPC

    def put_inline(
        self,
        key: bytes,
        data: Data,
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = UNSAID,
        timeout_s: float | None = None,
    ) -> Durability:
        """As `Client.put_inline`, on each owner; returns the lowest durability reached.

        >>> cluster.put_inline(block_key(b"inline"), b"the KV of a page").name
        'WRITTEN'
        """
        (result,) = self.put_many_inline(
            [(key, data)],
            durability=durability,
            expires_unix_ms=expires_unix_ms,
            domain=domain,
            timeout_s=timeout_s,
        )
        if result.error is not None:
            raise result.error
        assert result.durability is not None, "a put has an error or a durability"
        return result.durability

    def get_inline(self, key: bytes, length: int, *, timeout_s: float | None = None) -> bytes | Miss:
        """As `Client.get_inline`, of the first owner that has it.

        >>> _ = cluster.put_inline(block_key(b"inline"), b"the KV of a page")
        >>> cluster.get_inline(block_key(b"inline"), length=16)
        b'the KV of a page'
        """
        (found,) = self.get_many_inline([(key, length)], timeout_s=timeout_s)
        return found

    def put_many_inline(
        self,
        blocks: Iterable[tuple[bytes, Data]],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = UNSAID,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `Client.put_many_inline`, on each owner; every block has a result.

        >>> pages = [(block_key(b"inline"), b"the KV of a page")]
        >>> [result.durability.name for result in cluster.put_many_inline(pages)]
        ['WRITTEN']
        """
        given = list(checked_puts(blocks))
        keys = [key for key, _ in given]
        if timeout_s is not None:
            try:
                timeout_s = self.nodes._await_map(timeout_s)  # noqa: SLF001 - of this package
            except NodeUnavailable as error:
                return [PutResult(key, None, error) for key in keys]
        until_s, replicas = None if timeout_s is None else now_s() + timeout_s, self.replicas

        def put(client: Client, some: list[int]) -> list[PutResult]:
            results = client.put_many_inline(
                (given[at] for at in some),
                durability=durability,
                expires_unix_ms=expires_unix_ms,
                domain=domain,
                timeout_s=None if until_s is None else max(0.001, seconds_until(until_s)),
            )
            for one in results:
                if isinstance(one.error, NodeUnavailable) and not self._calls.is_there(client.target):
                    raise one.error  # the new owners get all of them
            return results

        by_key: list[list[PutResult]] = [[] for _ in keys]
        owned = partial(self._owned, keys, replicas)
        for node, some, answer in self._calls.of_owners(len(keys), owned, put):
            results, broken = ([], answer) if isinstance(answer, KvError) else (answer, stream_broke(node))
            for at, result in zip_longest(some, results):
                by_key[at].append(result or PutResult(keys[at], None, broken))
        return [merged(*one, min(replicas, self._acks_max)) for one in zip(keys, by_key, strict=True)]

    def get_many_inline(
        self, wanted: Sequence[tuple[bytes, int]], *, timeout_s: float | None = None
    ) -> Iterator[bytes | Miss]:
        """As `Client.get_many_inline`, of the first owner that has it; the timeout is for all of them.

        >>> [len(page) for page in cluster.get_many_inline([(key, 4096)])]
        [4096]
        """
        check_wanted(wanted)
        until_s = now_s() + self._get_s(timeout_s)
        for first in range(0, len(wanted), CLUSTER_INLINE_AT_ONCE):
            part = wanted[first : first + CLUSTER_INLINE_AT_ONCE]

            def get(
                client: Client, some: list[int], left_s: float, part: Sequence[tuple[bytes, int]] = part
            ) -> list[bytes | Miss]:
                return list(client.get_many_inline([part[at] for at in some], timeout_s=left_s))

            yield from self._reads.found(
                [key for key, _ in part], get, seconds_until(until_s), lambda _, found: found
            )

    # --- what is stored

    def exists(
        self, keys: Sequence[bytes], *, lengths: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Stored | Miss]:
        """As `Client.exists`, of the first owner that has it. If none can be reached, the Miss says so.

        >>> [type(found).__name__ for found in cluster.exists([key, block_key(b"never put")])]
        ['Stored', 'Miss']
        """
        check_lengths(lengths, keys)
        sizes = lengths or [0] * len(keys)

        def ask(client: Client, some: list[int], left_s: float) -> list[Stored | Miss]:
            return client.exists(
                [keys[at] for at in some], lengths=[sizes[at] for at in some], timeout_s=left_s
            )

        return self._reads.found(keys, ask, self._call_s(timeout_s))

    def prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Prefix:
        """As `Client.prefix`.

        >>> cluster.prefix([key, block_key(b"never put")]).blocks
        1
        """
        are_shared: list[bool] = []

        def ask(client: Client, some: list[int], left_s: float) -> list[Literal[True] | Miss]:
            """Mostly a node has all of its blocks; only after a gap they are looked up one by one."""
            until_s = now_s() + left_s
            first = client.prefix([keys[at] for at in some], timeout_s=left_s)
            are_shared.append(first.is_shared)
            here: list[Literal[True] | Miss] = [True] * first.blocks
            if first.miss is None:
                return here
            left = [keys[at] for at in some[first.blocks + 1 :]]
            others = client.exists(left, timeout_s=seconds_until(until_s)) if left else []
            return [*here, first.miss, *(one if isinstance(one, Miss) else True for one in others)]

        for blocks, found in enumerate(self._reads.found(keys, ask, self._call_s(timeout_s))):
            if isinstance(found, Miss):
                return Prefix(blocks, found)
        return Prefix(len(keys), None, is_shared=bool(keys) and all(are_shared))

    def delete(self, keys: Sequence[bytes], *, durability: Durability = Durability.WRITTEN) -> list[bool]:
        """As `Client.delete`, on every member and every node that is absent from the map.

        Raises the error of a node that has not answered, because its blocks would reappear when it returns. Remove an
        absent node that won't return with `kvstore cluster forget`. A copy between nodes may overtake the deletion, so
        all nodes are called twice, the second time with the same map as this client's; NodeUnavailable if the maps
        don't agree within the time of a call.

        >>> cluster.delete([block_key(b"never put")])
        [False]
        """
        return self._removals.delete(keys, durability, self._call_s(None))

    def erase_user(self, user: str, *, timeout_s: float = ERASE_TIMEOUT_S) -> list[Erasure]:
        """As `Client.erase_user`, on every member and every node that is absent from the map, as `delete`.

        Returns the result of each node, with its receipt.

        >>> [erasure.sessions for erasure in cluster.erase_user("nobody")]  # of each node
        [0]
        """
        return self._removals.erase(
            lambda client, left_s: client._erasing.user(user, left_s),  # noqa: SLF001 - of this package
            timeout_s,
        )

    def erase_tenant(self, *, timeout_s: float = ERASE_TIMEOUT_S) -> list[Erasure]:
        """As `Client.erase_tenant`, on the same nodes as `erase_user`.

        >>> with ClusterClient([client.target], tenant="initech") as other:
        ...     [erasure.sessions for erasure in other.erase_tenant()]
        [0]
        """
        return self._removals.erase(
            lambda client, left_s: client._erasing.tenant(left_s),  # noqa: SLF001 - of this package
            timeout_s,
        )

    def pin(self, keys: Sequence[bytes], *, time_to_live_ms: int = 0) -> ClusterPin:
        """As `Client.pin`, on each owner that answers; raises if none does.

        >>> with cluster.pin([key]) as pin:
        ...     pin.pinned
        [True]
        """
        answers = self._calls.of_owners(
            len(keys),
            partial(self._owned, keys, self.replicas),
            lambda client, some: client.pin([keys[at] for at in some], time_to_live_ms=time_to_live_ms),
        )
        pins: list[Pin] = []
        pinned = [False] * len(keys)
        failed: KvError | None = None
        for _, some, answer in answers:
            if isinstance(answer, KvError):
                failed = answer
                continue
            pins.append(answer)
            for at, is_pinned in zip(some, answer.pinned, strict=True):
                pinned[at] |= is_pinned
        if failed is not None and not pins:
            raise failed
        return ClusterPin(pins, pinned)

    def close(self) -> None:
        """Close the clients. Calls under way end by their deadlines.

        >>> ClusterClient([client.target]).close()
        """
        self._calls.closing.set()
        self._arming.close()
        self._calls.silent.close()
        self.nodes.close()
        self._repairs.close()
        self._calls.threads.shutdown()

    # --- how calls are split

    def _get_s(self, timeout_s: float | None) -> float:
        return self.nodes.reach.get_timeout_s if timeout_s is None else timeout_s

    def _call_s(self, timeout_s: float | None) -> float:
        return self.nodes.reach.call_timeout_s if timeout_s is None else timeout_s

    def _owners_on(self, now: Map, key: bytes, replicas: int) -> list[str]:
        owners = now.owners(self.nodes.placed_as(now).encode(), key)
        return [now.members[at].node for at in owners[:replicas]]

    def _owned(
        self, keys: Sequence[bytes], replicas: int, some: Iterable[int], called: Container[tuple[str, int]]
    ) -> dict[str, list[int]]:
        """Which of the keys at these places each node owns, at any rank, and was not called for."""
        now, wanted = self.nodes.map, list(some)
        tenant = self.nodes.placed_as(now).encode()
        parts: dict[str, list[int]] = defaultdict(list)
        for rank in range(replicas):
            for node, own in by_owner(now, tenant, keys, wanted, rank).items():
                parts[node] += [at for at in own if (node, at) not in called]
        return {node: own for node, own in parts.items() if own}
