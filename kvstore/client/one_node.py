"""One node as `Nodes` presents several: the home of every user is the node of a client that the caller has already.

What always holds: it has the part of `Nodes` that `Arrivals` and its fetcher use, and no other. The client belongs to
the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.client.client import Client
    from kvstore.reach import Reach

__all__ = ["Homes", "OneNode"]


class Homes(Protocol):
    """Finds a user's node, and the clients of nodes."""

    @property
    def reach(self) -> Reach:
        """How the nodes are reached."""
        ...

    def home(self, user: str) -> str:
        """The node that stores a user's KV, now."""
        ...

    def of(self, user: str) -> Client:
        """The client of a user's home."""
        ...

    def at(self, target: str) -> Client:
        """The client of one node."""
        ...


class OneNode:
    """One client's node."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def reach(self) -> Reach:
        """How it is reached."""
        return self._client.reach

    def home(self, user: str) -> str:  # noqa: ARG002 - it is every user's
        """The node."""
        return self._client.target

    def of(self, user: str) -> Client:  # noqa: ARG002 - it is every user's
        """The client."""
        return self._client

    def at(self, target: str) -> Client:  # noqa: ARG002 - there is one
        """The client."""
        return self._client
