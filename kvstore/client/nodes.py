"""Several nodes: which one is a user's.

    with Nodes(["10.0.0.5:7070", "10.0.0.6:7070"], token=token) as nodes:
        client = nodes.of("user 7")
        kv = nodes.register(buffer)
        client.get([Block(key, kv.at(client), offset, length), ...])

All that belongs to a user lies on one node, their home, so that a session and its blocks are together; users are spread
over the nodes by rendezvous hashing. A client of a node is made when it is first wanted. If the nodes are of a cluster,
those that are named are where its map is asked for, and homes follow the map (`docs/cluster.md`).

What always holds: clients with the same map, or the same list of nodes, in whatever order, and the same weights, find
the same home; adding a node moves the users that it takes, and no others, and their KV is computed once more. A home
that is away stays the home as long as the map, or the list, has it: its gets are misses and its puts fail, as `Client`
says, at no more than one deadline's cost, and other users notice nothing.
What it doesn't do: move or copy what is stored, or close clients of nodes that have left before it is closed itself.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kvstore.client.client import Client
from kvstore.client.following import Following
from kvstore.cluster.map import Map, Member
from kvstore.errors import Closed, ConfigError, RegionBusy
from kvstore.reach import Reach
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Buffer

    from nic_offload.fabric import Region

__all__ = ["Everywhere", "Nodes"]


class Nodes(Handle):
    """A client of each of several nodes. Any thread."""

    def __init__(
        self,
        nodes: Sequence[str] | Reach | None = None,
        *,
        weights: Mapping[str, int] | None = None,
        **of_clients: Any,
    ) -> None:
        """`of_clients` is what each `Client` is made with; a node has the weight 1 if nobody says another."""
        known = {name: of_clients.pop(name) for name in Reach.settings() & of_clients.keys()}
        if isinstance(nodes, Reach):
            self.reach = Reach.given(nodes, known)
        else:
            self.reach = Reach.of({"nodes": None if nodes is None else sorted(set(nodes)), **known})
        weight_of = dict(weights or {})
        for target in weight_of:
            if target not in self.reach.nodes:
                raise ConfigError(f"{target!r} has a weight and is not one of the nodes.")
        given = Map.of(0, (Member(one, one, weight_of.get(one, 1)) for one in self.reach.nodes))
        self._following = Following(self.reach, given)
        self._of_clients = of_clients
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}
        self._closed = False

    @property
    def map(self) -> Map:
        """The nodes as they are known now. The first time it waits for one to tell, for a call's time at most."""
        return self._following.map

    def home(self, user: str) -> str:
        """Where a user's KV is kept, now."""
        home = self.map.home(self.reach.tenant, user)
        assert home is not None, "a map that is followed has members"
        return home.node

    def of(self, user: str) -> Client:
        """The client of a user's home."""
        return self._client(self.home(user))

    def at(self, target: str) -> Client:
        """The client of one node."""
        nodes = [one.node for one in self.map.members]
        if target not in nodes:
            raise ConfigError(f"{target!r} is not one of the nodes {', '.join(nodes)}.")
        return self._client(target)

    def first(self) -> Client:
        """The client of the first node that was named, whether it is on the map or not. It waits for nobody."""
        return self._client(self.reach.nodes[0])

    def _client(self, target: str) -> Client:
        with self._lock:
            if self._closed:
                raise Closed("The nodes' clients are closed.")
            client = self._clients.get(target)
            if client is None:
                client = self._clients[target] = Client(self.reach.at(target), **self._of_clients)
            return client

    def register(self, memory: Buffer) -> Everywhere:
        """Let blocks of any node be put from memory and got into it. Close it when the memory goes."""
        return Everywhere(memory)

    def close(self) -> None:
        """Close the clients."""
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, {}
        self._following.close()
        for client in clients.values():
            client.close()


class Everywhere(Handle):
    """Memory that is registered with each client that wants it."""

    def __init__(self, memory: Buffer) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._regions: dict[Client, Region] = {}

    def at(self, client: Client) -> Region:
        """The memory as this client has it."""
        with self._lock:
            region = self._regions.get(client)
            if region is None or region.handle is None:
                region = self._regions[client] = client.register(self._memory)
            return region

    def close(self) -> None:
        """Take it back from all of them. RegionBusy if that can't be yet: close it again when its gets have ended."""
        busy: RegionBusy | None = None
        with self._lock:
            for client, region in list(self._regions.items()):
                try:
                    region.close()
                except RegionBusy as error:
                    busy = error
                else:
                    del self._regions[client]
        if busy is not None:
            raise busy
