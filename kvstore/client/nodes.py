"""Several nodes: which one is a user's.

    with Nodes(["10.0.0.5:7070", "10.0.0.6:7070"], token=token) as nodes:
        client = nodes.of("user 7")
        kv = nodes.register(buffer)
        client.get([Block(key, kv.at(client), offset, length), ...])

All that belongs to a user lies on one node, their home, so that a session and its blocks are together; users are spread
over the nodes by rendezvous hashing. A client of a node is made when it is first wanted.

What always holds: who has the same list of nodes, in whatever order, and the same weights finds the same home; adding
a node moves the users that it takes, and no others, and their KV is computed once more. A home that is away stays the
home: its gets are misses and its puts fail, as `Client` says, at no more than one deadline's cost, and other users
notice nothing.
What it doesn't do: find out which nodes there are, move or copy what is stored. Take a node that is gone for good off
the list.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kvstore.client.client import Client
from kvstore.errors import Closed, ConfigError, RegionBusy
from kvstore.placement import Placement
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
        """`of_clients` is what each `Client` is made with; a node without a weight has 1."""
        known = {name: of_clients.pop(name) for name in Reach.settings() & of_clients.keys()}
        if isinstance(nodes, Reach):
            self.reach = Reach.given(nodes, known)
        else:
            self.reach = Reach.of({"nodes": None if nodes is None else sorted(set(nodes)), **known})
        self.targets = sorted(self.reach.nodes)
        weight_of = dict(weights or {})
        for target, weight in weight_of.items():
            if target not in self.targets or weight < 1:
                raise ConfigError(f"The weight {weight} of {target!r} is not that of a node, or below 1.")
        self._placement = Placement([(one.encode(), weight_of.get(one, 1)) for one in self.targets])
        self._of_clients = of_clients
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}
        self._closed = False

    def home(self, user: str) -> str:
        """Where a user's KV is kept."""
        return self.targets[self._placement.order(self.reach.tenant.encode(), user.encode())[0]]

    def of(self, user: str) -> Client:
        """The client of a user's home."""
        return self.at(self.home(user))

    def at(self, target: str) -> Client:
        """The client of one node."""
        if target not in self.targets:
            raise ConfigError(f"{target!r} is not one of the nodes {', '.join(self.targets)}.")
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
