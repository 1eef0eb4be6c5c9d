"""What the tests of the requester share: a fetcher that notes what it is asked for, and short ways to make extents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nic_offload.errors import KvError
from nic_offload.requester import KvRequester
from nic_offload.requester_catalogue import Extent, User
from nic_offload.requester_terms import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

ALICE, BOB, EVE = User("acme", "alice"), User("acme", "bob"), User("other", "eve")
SMALL = Limits(
    users_max=4,
    extents_max=20,
    extents_per_user_max=8,
    extent_bytes_max=10,
    requests_max=6,
    bytes_in_flight_max=40,
    user_bytes_in_flight_max=25,
    gets_in_flight_max=6,
    gets_per_ticket_max=3,
)


def extent(key: int, generation: int = 1, *, node: str = "n1", length: int = 10, address: int = 0) -> Extent:
    return Extent(node, 0, address, length, key.to_bytes(2), generation)


class Noting:
    """A fetcher that records its tickets, which are numbers."""

    def __init__(self) -> None:
        self.tickets: dict[int, tuple[User, tuple[Extent, ...]]] = {}
        self.cancelled: list[int] = []
        self.refuses = 0  # that many of the next issues
        self._number = 0

    def issue(self, user: User, extents: Sequence[Extent]) -> int:
        if self.refuses:
            self.refuses -= 1
            raise KvError("the node is gone")
        self._number += 1
        self.tickets[self._number] = user, tuple(extents)
        return self._number

    def cancel(self, ticket: Any) -> None:
        assert ticket in self.tickets
        self.cancelled.append(ticket)

    def asked(self) -> list[tuple[User, int]]:
        """Users and keys of all open tickets, in order."""
        return [(user, int.from_bytes(one.key)) for user, extents in self.tickets.values() for one in extents]


class RequesterRig:
    """A requester with a noting fetcher."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.fetcher = Noting()
        self.requester = KvRequester(self.fetcher, limits)

    def know(self, user: User, *keys: int, **more: Any) -> None:
        for key in keys:
            self.requester.stored(user, extent(key, **more))

    def finish_all(self) -> None:
        for ticket in tuple(self.fetcher.tickets):
            del self.fetcher.tickets[ticket]
            self.requester.finished(ticket)
