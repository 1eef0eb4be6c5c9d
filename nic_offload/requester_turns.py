"""Which user is served next, fairly by bytes: deficit round robin between tenants, then between one tenant's users.

Members are in a ring, each with a credit of bytes. The first is served while its credit covers its next piece; then
it gets a quantum and moves to the end. A member that can't be served for a while (it is at its own bound) pauses: it
keeps its credit and returns to the front, because otherwise its bound would cost it its share as well.

What always holds: of two members that are always waiting, neither gets more than two quanta ahead of the other. With
a quantum no smaller than any piece, finding the next member takes at most one step per member. A member that waits for
nothing loses its credit, so turns can't be saved up. A tenant's urgent users come before its others, and no tenant gets
more because it has urgent users.

What it doesn't do: know what is served. It asks for the cost of a member's next piece, which must not change between
`head` and `charge`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from nic_offload.requester_catalogue import User

    Member = TypeVar("Member", bound=Hashable)
else:
    Member = TypeVar("Member")

__all__ = ["Line", "Lines", "Turns"]


class Turns(Generic[Member]):
    """The ring."""

    def __init__(self, quantum_bytes: int) -> None:
        self._quantum_bytes = quantum_bytes
        self._credit: dict[Member, int] = {}  # of members in the ring, and of paused ones
        self._ring: OrderedDict[Member, None] = OrderedDict()

    def __len__(self) -> int:
        """How many can be served."""
        return len(self._ring)

    def __bool__(self) -> bool:
        """Whether there is any member, paused or not."""
        return bool(self._credit)

    def add(self, member: Member) -> None:
        """Add a member at the end, or end its pause; no effect on a member that is in the ring."""
        if member in self._ring:
            return
        self._ring[member] = None
        if member in self._credit:
            self._ring.move_to_end(member, last=False)
        else:
            self._credit[member] = self._quantum_bytes

    def pause(self, member: Member) -> None:
        """Don't serve a member until it is added again."""
        self._credit.setdefault(member, self._quantum_bytes)
        self._ring.pop(member, None)

    def discard(self, member: Member) -> None:
        """Remove a member, if present."""
        self._credit.pop(member, None)
        self._ring.pop(member, None)

    def head(self, cost: Callable[[Member], int]) -> Member:
        """The member to serve next; the same one until it is charged, leaves, or its cost changes."""
        while True:
            member = next(iter(self._ring))
            if self._credit[member] >= cost(member):
                return member
            self._credit[member] += self._quantum_bytes
            self._ring.move_to_end(member)

    def charge(self, member: Member, cost_bytes: int) -> None:
        """The member was served."""
        self._credit[member] -= cost_bytes


class Line(enum.Enum):
    """The line that a user is in."""

    URGENT = "urgent"
    AHEAD = "ahead of time"


class _Tenant:
    """The turns of the users of a tenant."""

    def __init__(self, quantum_bytes: int) -> None:
        self.lines: dict[Line, Turns[User]] = {line: Turns(quantum_bytes) for line in Line}

    @property
    def turns(self) -> Turns[User]:
        """Return the turns of urgent users if any of them can be served, else of those served ahead of time."""
        urgent = self.lines[Line.URGENT]
        return urgent if len(urgent) else self.lines[Line.AHEAD]


class Lines:
    """All users that wait for their turn."""

    def __init__(self, quantum_bytes: int) -> None:
        self._quantum_bytes = quantum_bytes
        self._tenants: dict[str, _Tenant] = {}
        self._turns: Turns[str] = Turns(quantum_bytes)

    def __len__(self) -> int:
        """How many tenants have a user that can be served."""
        return len(self._turns)

    def __bool__(self) -> bool:
        """Whether any user is in line, paused or not."""
        return bool(self._tenants)

    def stand(self, user: User, line: Line | None, *, pauses: bool = False) -> None:
        """Put the user in this line and no other; None: in none."""
        tenant = self._tenants.get(user.tenant)
        if tenant is None:
            if line is None:
                return
            tenant = self._tenants[user.tenant] = _Tenant(self._quantum_bytes)
        for name, turns in tenant.lines.items():
            if name is not line:
                turns.discard(user)
            elif pauses:
                turns.pause(user)
            else:
                turns.add(user)
        if len(tenant.turns):
            self._turns.add(user.tenant)
        elif any(tenant.lines.values()):
            self._turns.pause(user.tenant)
        else:
            self._turns.discard(user.tenant)
            del self._tenants[user.tenant]

    def head(self, cost: Callable[[User], int]) -> User:
        """The member to serve next."""
        tenant = self._turns.head(lambda name: cost(self._tenants[name].turns.head(cost)))
        return self._tenants[tenant].turns.head(cost)

    def charge(self, user: User, cost_bytes: int) -> None:
        """The user that `head` gave was served."""
        self._tenants[user.tenant].turns.charge(user, cost_bytes)
        self._turns.charge(user.tenant, cost_bytes)
