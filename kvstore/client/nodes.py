"""Several nodes: finds a user's node.

    with Nodes(["10.0.0.5:7070", "10.0.0.6:7070"], token=token) as nodes:
        kv = nodes.register(buffer)
        nodes.put("user 7", [ClusterBlock(key, kv, offset, length), ...])
        client = nodes.of("user 7")
        client.get([Block(key, kv.at(client), offset, length), ...])

Everything of a user is on one node, their home, so a session and its blocks are together; users are spread over the
nodes by rendezvous hashing. A node's client is created when it is first needed. If the nodes are a cluster, its map is
requested from the given ones, and homes follow the map (`docs/cluster.md`).

What always holds: clients with the same map, or the same list of nodes in any order, and the same weights, find the
same home. Adding a node moves only the users that it takes over, and their KV is computed once more. A home that is
away stays the home as long as it is on the map or in the list: its gets are misses and its puts fail, as with `Client`,
at the cost of one deadline at most, and other users notice nothing.
The client of a node that left the map is closed once nothing can be in flight any more.
With two replicas, `put`, `arm` and the sessions put a user's blocks to their home and its standby (`user_owners`); the
client of the home (`of`) puts to the home alone.
What it doesn't do: move or copy what is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.client.arguments import checks_arguments
from kvstore.client.checks import check_name
from kvstore.client.client import Client, session_calls_of
from kvstore.client.map_follower import Following
from kvstore.client.session_calls import AnyHome
from kvstore.client.sessions import Session
from kvstore.clock import SystemClock
from kvstore.cluster.map import Map, Member
from kvstore.durability import Durability
from kvstore.errors import Closed, ConfigError, NodeUnavailable, NotRegistered, RegionBusy
from kvstore.limits import CLUSTER_LEFT_MS, LEASE_TIMEOUT_MS, REPLICAS_MAX
from kvstore.reach import Reach, reach_of_arguments, reach_settings
from nic_offload.errors import shown
from nic_offload.handle import Handle
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from kvstore.client.blocks import PutResult
    from kvstore.client.cluster_blocks import ClusterBlock
    from kvstore.client.cluster_puts import ClusterPuts
    from kvstore.client.user_owners import UserPuts
    from nic_offload.fabric import Region
    from nic_offload.flags import FlagWord

__all__ = ["Nodes", "RegisteredMemory"]

_CLOCK = SystemClock()


@checks_arguments
class Nodes(Handle):
    """A client of each of several nodes. Its methods may be called from any thread.

    >>> from kvstore.client import ClusterBlock, Nodes
    >>> nodes = Nodes(["127.0.0.1:7070"], layout=b"my model, bf16")
    >>> [found.length for found in nodes.of("ada").exists([key])]
    [4096]
    """

    def __init__(
        self,
        nodes: Sequence[str] | Reach | None = None,
        *,
        weights: Mapping[str, int] | None = None,
        **of_clients: Any,
    ) -> None:
        """`of_clients` are the arguments of each `Client`. A node's weight is 1 by default."""
        known = {name: of_clients.pop(name) for name in reach_settings() & of_clients.keys()}
        if isinstance(nodes, Reach):
            self.reach = reach_of_arguments(nodes, known)
        else:
            targets = [nodes] if isinstance(nodes, str) else nodes
            if isinstance(targets, (list, tuple)):
                targets = sorted(set(targets), key=str)  # of any types: `Reach` refuses others
            self.reach = Reach.of({"nodes": targets, **known})
        if not isinstance(weights, Mapping | None):
            raise ConfigError(f"The weights are a number for each node, not {type(weights).__name__}.")
        weight_of = dict(weights or {})
        for target in weight_of:
            if target not in self.reach.nodes:
                raise ConfigError(f"{shown(target)} has a weight but is not one of the nodes.")
        given = Map.of(0, (Member(one, one, weight_of.get(one, 1)) for one in self.reach.nodes))
        self._following = Following(self.reach, given)
        self._seen, self._main_node = given, ""
        self._of_clients = of_clients
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}
        self._left_s: dict[str, float] = {}  # clients whose nodes are not on the map: since when
        self._closed = False
        self._user_puts: UserPuts | None = None  # once a user's blocks are put by it

    @property
    def map(self) -> Map:
        """The nodes known now. At first it waits for a node to report them, for at most a call's timeout."""
        now = self._following.map
        if now is not self._seen or self._left_s:
            self._note(now)
        return now

    def _await_map(self, timeout_s: float) -> float:
        """Wait for a node to report the nodes; returns how much is left of the call's time.

        NodeUnavailable if none has answered in this time; after a call's timeout the nodes are those that were given.
        """
        began_ns = _CLOCK.monotonic_ns()
        if not self._following.wait(timeout_s):
            raise _not_called(
                f"None of {', '.join(self.reach.nodes)} has sent the map within {timeout_s:.2g} s."
            )
        return max(0.0, timeout_s - (_CLOCK.monotonic_ns() - began_ns) / 1e9)

    def _note(self, now: Map) -> None:
        """Note which nodes have left with this map, and close the clients of those that left long ago."""
        members, now_s = {one.node for one in now.members}, _CLOCK.monotonic_ns() / 1e9
        with self._lock:
            self._seen = now
            there = self._clients.keys() - members - {self.reach.nodes[0], self._main_node}
            self._left_s = {one: self._left_s.get(one, now_s) for one in there}
            late = [one for one, left_s in self._left_s.items() if now_s - left_s > CLUSTER_LEFT_MS / 1000]
            gone = [self._clients.pop(one) for one in late]
        for client in gone:
            client.close()

    @property
    def _replicas(self) -> int:
        """On how many nodes the cluster keeps each block of this tenant; 1 if it keeps up no copies."""
        _ = self.map  # waits for a node's answer
        return self._following.replicas or 1

    @property
    def _has_standbys(self) -> bool:
        """Whether homes have standbys, so that a user's blocks are put to both."""
        return self.map.revision > 0 and self._replicas >= REPLICAS_MAX

    def home(self, user: str) -> str:
        """The node that stores a user's KV, now.

        >>> nodes.home("ada") == client.target
        True
        """
        check_name("A user", user)
        now = self.map
        home = now.home(self.placed_as(now), user)
        assert home is not None, "a map that is followed has members"
        return home.node

    def placed_as(self, now: Map) -> str:
        """The tenant's digest on a map."""
        return self.reach.tenant if now.placed_as is None else now.placed_as

    def of(self, user: str) -> Client:
        """The client of a user's home. Call this each turn: the client is closed some time after its node leaves.

        Its puts are to this one node. In a cluster with two replicas use `put`, `arm` or a session's `arm`: a block
        that only the home has acknowledged is lost with it, unless a session lists it and it was copied meanwhile.

        >>> nodes.of("ada").target == client.target
        True
        """
        return self._client(self.home(user))

    def at(self, target: str) -> Client:
        """The client of one node, a member or one that is absent.

        >>> nodes.at(client.target).target == client.target
        True
        """
        now = self.map
        nodes = [one.node for one in (*now.members, *now.absent)]
        if target not in nodes:
            raise ConfigError(f"{target!r} is not one of the nodes {', '.join(nodes)}.")
        return self._client(target)

    def _has(self, target: str) -> bool:
        """Whether this is the address of a node on the newest map, a member or one that is absent."""
        now = self.map
        return any(one.node == target for one in (*now.members, *now.absent))

    @contextmanager
    def _calling(self, target: str) -> Iterator[Client]:
        """Call a node of a map that may have changed since.

        NodeUnavailable if the node has left the map, or if its client is closed meanwhile because the node is silent.
        """
        if not self._has(target):
            raise _not_called(f"{target} has left the cluster.")
        client = self._client(target)
        try:
            yield client
        except Closed as error:
            with self._lock:
                is_mistake = self._closed or self._clients.get(target) is client
            if is_mistake:
                raise
            raise _not_called(f"{target} stopped answering before this call was made.") from error

    def _drop(self, target: str) -> None:
        """Close the client of a silent node: its calls end. The next call opens another."""
        with self._lock:
            client = self._clients.pop(target, None)
        if client is not None:
            client._core.why_closed = f"{target} stopped answering."  # noqa: SLF001 - of this package
            client.close()

    def first(self) -> Client:
        """The client of the first configured node, whether it is on the map or not. It does not wait.

        >>> nodes.first().target == client.target
        True
        """
        return self._client(self.reach.nodes[0])

    def _main(self) -> Client:
        """The client of a node that has answered, always the same; of the first configured one if none has."""
        if not self._main_node:
            _ = self.map  # waits for an answer
            with self._lock:
                self._main_node = self._main_node or self._following.node or self.reach.nodes[0]
        return self._client(self._main_node)

    def _client(self, target: str) -> Client:
        with self._lock:
            if self._closed:
                raise Closed("The nodes' clients are closed.")
            client = self._clients.get(target)
            if client is None:
                client = self._clients[target] = Client(self.reach.at(target), **self._of_clients)
                session_calls_of(client).home = _HomeOnMap(self, target)
            return client

    def session(self, user: str, name: str) -> Session:
        """A session, on whatever node is the user's home at each call.

        Its `arm` takes `ClusterBlock`s, in memory of `register`, and puts them as `Nodes.arm` does.

        >>> chat = nodes.session("ada", "chat at home")
        >>> puts = chat.arm([ClusterBlock(key, nodes.register(memory), offset=0, length=4096)])
        >>> [result.error for result in puts.wait(timeout_s=10)]
        [None]
        >>> chat.append([key], tokens=16)
        1
        """
        return Session(lambda: session_calls_of(self.of(user)), user, name)

    def put(
        self,
        user: str,
        blocks: Sequence[ClusterBlock],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `Client.put`, of a user's blocks: to their home and, with two replicas, its standby.

        A put succeeds when both have the block and the home confirms that they are the right two, or that it has no
        standby. When this returns, nothing reads the memory any more.

        >>> block = ClusterBlock(key, nodes.register(memory), offset=0, length=4096)
        >>> [result.durability.name for result in nodes.put("ada", [block])]
        ['WRITTEN']
        """
        check_name("A user", user)
        left_s = self.reach.get_timeout_s if timeout_s is None else timeout_s
        return self._puts().put(user, blocks, durability, expires_unix_ms, left_s)

    def arm(
        self,
        user: str,
        blocks: Sequence[ClusterBlock],
        flag: FlagWord | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> ClusterPuts:
        """As `Client.arm`, of a user's blocks: a put to each node that `put` names, all fired by the one flag.

        If one of these is replaced before the puts are confirmed, they are armed at its successor, until `lease_ms`.
        `wait` asks the home for that, so it takes a call's time even if all puts have ended.

        >>> puts = nodes.arm("ada", [ClusterBlock(key, nodes.register(memory), offset=0, length=4096)])
        >>> [result.durability.name for result in puts.wait(timeout_s=10)]
        ['WRITTEN']
        """
        check_name("A user", user)
        call_s = self.reach.call_timeout_s if timeout_s is None else timeout_s
        return self._puts().arm(user, blocks, flag, durability, lease_ms, expires_unix_ms, call_s)

    def delete(self, keys: Sequence[bytes], *, durability: Durability = Durability.WRITTEN) -> list[bool]:
        """As `ClusterClient.delete`, on every member and every absent node: a block is on more nodes than its home.

        >>> nodes.delete([block_key(b"never put")])
        [False]
        """
        return self._puts().delete(keys, durability)

    def _puts(self) -> UserPuts:
        from kvstore.client.user_owners import UserPuts  # noqa: PLC0415 - it uses this module

        with self._lock:
            if self._closed:
                raise Closed("The nodes' clients are closed.")
            if self._user_puts is None:
                self._user_puts = UserPuts(self)
            return self._user_puts

    def register(self, memory: Buffer) -> RegisteredMemory:
        """Register memory for puts to and gets from any node. Close it before the memory is freed.

        >>> with nodes.register(bytearray(4096)) as everywhere:
        ...     everywhere.at(nodes.of("ada")).length
        4096
        """
        return RegisteredMemory(memory)

    def close(self) -> None:
        """Close the clients.

        >>> Nodes([client.target]).close()
        """
        with self._lock:
            self._closed, puts = True, self._user_puts
        if puts is not None:
            puts.stop()
        with self._lock:
            clients, self._clients = self._clients, {}
        self._following.close()
        for client in clients.values():
            client.close()
        if puts is not None:
            puts.close()


def _not_called(why: str) -> NodeUnavailable:
    refusal = NodeUnavailable(why)
    refusal.was_tried = False
    return refusal


class _HomeOnMap(AnyHome):
    """The view of a client whose node was found on a map: that node may no longer be the home."""

    def __init__(self, nodes: Nodes, target: str) -> None:
        self._nodes, self._target = nodes, target

    def revision(self) -> int:
        return self._nodes.map.revision

    def is_here(self, user: str) -> bool:
        return self._nodes.home(user) == self._target

    @property
    def nodes(self) -> Nodes:
        return self._nodes

    @property
    def has_standby(self) -> bool:
        return self._nodes._has_standbys  # noqa: SLF001 - of this module


@made_by("`ClusterClient.register` or `Nodes.register`")
@checks_arguments
class RegisteredMemory(Handle):
    """Memory registered with each node's client that needs it. `Client.register` returns a region of one client."""

    def __init__(self, memory: Buffer) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._regions: dict[Client, Region] = {}
        self._is_closed = False

    def at(self, client: Client) -> Region:
        """The region registered with this client.

        >>> everywhere.at(cluster.nodes.first()).length
        16384
        """
        with self._lock:
            if self._is_closed:
                raise NotRegistered("The memory was closed: register it again.")
            region = self._regions.get(client)
            if region is None or region.handle is None:
                for other in [one for one, its in self._regions.items() if its.handle is None]:
                    del self._regions[other]  # of a client that was closed
                region = self._regions[client] = client.register(self._memory)
            return region

    def copied(self, offset: int, length: int) -> bytes:
        """A copy of its current contents."""
        return bytes(memoryview(self._memory).cast("B")[offset : offset + length])

    def close(self) -> None:
        """Deregister it from all clients. RegionBusy if a get still uses it: close it again later.

        >>> cluster.register(bytearray(4096)).close()
        """
        busy: RegionBusy | None = None
        with self._lock:
            self._is_closed = True
            for client, region in list(self._regions.items()):
                try:
                    region.close()
                except RegionBusy as error:
                    busy = error
                else:
                    del self._regions[client]
        if busy is not None:
            raise busy
