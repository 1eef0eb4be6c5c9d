"""Fair queueing: which tenant is next, and which of its connections; and how much a tenant may hold.

Tenants take turns by bytes (deficit round robin: a turn is worth `TURN_BYTES`, and its remainder is kept for the next),
and a tenant's connections take turns within its own. So a tenant that requests a thousand blocks delays others by one
turn each, not by a thousand blocks.

What always holds: the requests of one connection stay in order; a waiting tenant is next after at most one turn of each
other tenant, unless it may hold no more.
What it doesn't do: know the meaning of items, or limit their number: `Shares` limits how much of a common memory may be
held briefly, and `Places` how much may be held for long.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from kvstore.limits import SHARES, TURN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

__all__ = ["FairQueue", "Holder", "Places", "Shares", "Waiting"]


class Waiting(Protocol):
    """Something that waits."""

    @property
    def tenant(self) -> Hashable:
        """The tenant that it belongs to."""
        ...

    @property
    def flow(self) -> Hashable:
        """The connection of its tenant on which it arrived."""
        ...

    @property
    def size_bytes(self) -> int:
        """How many bytes count against its turn."""
        ...


T = TypeVar("T", bound=Waiting)
Holder: TypeAlias = "tuple[Hashable, Hashable]"  # a tenant, and one of its connections or the like


class _Line(Generic[T]):
    """The queue of one tenant."""

    __slots__ = ("credit_bytes", "flows", "in_turn")

    def __init__(self) -> None:
        self.in_turn = False
        self.credit_bytes = 0
        self.flows: OrderedDict[Hashable, deque[T]] = OrderedDict()


class FairQueue(Generic[T]):
    """The queue of all tenants."""

    def __init__(self, places: Places | None = None) -> None:
        """`places` are taken by waiting items; callers check `left` first."""
        self._lines: OrderedDict[Hashable, _Line[T]] = OrderedDict()  # the one whose turn it is is first
        self._count = 0
        self._places = places

    def __len__(self) -> int:
        return self._count

    def left(self, tenant: Hashable) -> int:
        """How many more of a tenant may wait."""
        assert self._places is not None
        return self._places.left(tenant)

    def add(self, things: Iterable[T]) -> None:
        """Queue items, behind those of their connection."""
        counts: dict[Hashable, int] = {}
        for thing in things:
            self._flow(thing).append(thing)
            counts[thing.tenant] = counts.get(thing.tenant, 0) + 1
        for tenant, count in counts.items():
            self._counted(tenant, count)

    def _counted(self, tenant: Hashable, more: int) -> None:
        self._count += more
        if self._places is not None:
            self._places.take(tenant, more)

    def put_back(self, thing: T) -> None:
        """Queue a taken item again, before those of its connection, and give its turn back."""
        self._flow(thing).appendleft(thing)
        self._lines[thing.tenant].credit_bytes += thing.size_bytes
        self._counted(thing.tenant, 1)

    def take(self, may: Callable[[T], bool]) -> T | None:
        """Take the next item among the connections whose first item may be taken; None if there is none."""
        spared: list[tuple[Hashable, _Line[T]]] = []
        taken: T | None = None
        while taken is None and self._lines:
            tenant, line = next(iter(self._lines.items()))
            flow = self._first_allowed(line, may)
            if flow is None:
                # No tenant loses its place: its queue is put back after the others have been examined.
                spared.append((tenant, line))
                del self._lines[tenant]
                continue
            thing = line.flows[flow][0]
            if not line.in_turn:
                line.in_turn = True
                line.credit_bytes += TURN_BYTES
            if line.credit_bytes < thing.size_bytes:
                line.in_turn = False
                self._lines.move_to_end(tenant)
                continue
            taken = self._pop(tenant, line, flow)
        for tenant, line in reversed(spared):
            self._lines[tenant] = line
            self._lines.move_to_end(tenant, last=False)
        return taken

    def take_any(self) -> T | None:
        """Take the next item; None if nothing waits."""
        return self.take(lambda _: True)

    def drop(self, tenant: Hashable, flow: Hashable) -> None:
        """Drop the items of a connection."""
        line = self._lines.get(tenant)
        if line is not None and flow in line.flows:
            self._counted(tenant, -len(line.flows.pop(flow)))
            if not line.flows:
                del self._lines[tenant]

    def withdraw(self, tenant: Hashable, flow: Hashable, which: Callable[[T], bool]) -> list[T]:
        """Remove and return the items that a connection no longer wants."""
        line = self._lines.get(tenant)
        things = None if line is None else line.flows.get(flow)
        if line is None or things is None:
            return []
        gone = [thing for thing in things if which(thing)]
        kept = deque(thing for thing in things if not which(thing))
        self._counted(tenant, -len(gone))
        if kept:
            line.flows[flow] = kept
        else:
            del line.flows[flow]
            if not line.flows:
                del self._lines[tenant]
        return gone

    def _flow(self, thing: T) -> deque[T]:
        line = self._lines.get(thing.tenant)
        if line is None:
            line = self._lines[thing.tenant] = _Line()
        flow = line.flows.get(thing.flow)
        if flow is None:
            flow = line.flows[thing.flow] = deque()
        return flow

    def _first_allowed(self, line: _Line[T], may: Callable[[T], bool]) -> Hashable | None:
        return next((flow for flow, things in line.flows.items() if may(things[0])), None)

    def _pop(self, tenant: Hashable, line: _Line[T], flow: Hashable) -> T:
        things = line.flows[flow]
        thing = things.popleft()
        self._counted(tenant, -1)
        line.credit_bytes -= thing.size_bytes
        if things:
            line.flows.move_to_end(flow)
        else:
            del line.flows[flow]
        if not line.flows:
            del self._lines[tenant]  # an idle tenant saves nothing up
        return thing


class Shares:
    """How much of a common memory each holder has; together no more than there is.

    A connection holds at most an eighth of it, or a single item (its puts more, see below); a tenant as much as
    `Places` permits, or a single item: with any number of connections it leaves the others their parts. A holder is a
    tenant and one of its connections, or the like.
    """

    def __init__(self, capacity_bytes: int, tenants: Callable[[], int] = lambda: 1) -> None:
        """`tenants` returns how many tenants the node knows."""
        self._capacity_bytes = capacity_bytes
        self._held: dict[Holder, int] = {}
        self._of_tenants = Places(capacity_bytes, tenants)

    @property
    def total_bytes(self) -> int:
        """The sum over all holders."""
        return self._of_tenants.total

    def may_hold(self, who: Holder, size_bytes: int) -> bool:
        """Whether a holder may have this many more bytes."""
        if self.total_bytes + size_bytes > self._capacity_bytes:
            return not self.total_bytes
        held, tenant = self._held.get(who, 0), who[0]
        if held and held + size_bytes > self._capacity_bytes // SHARES:
            return False
        return size_bytes <= self._of_tenants.left(tenant) or not self._of_tenants.held(tenant)

    def may_hold_so_many(self, who: Holder, size_bytes: int, most: int) -> int:
        """How many more items of one size a connection's puts may hold, up to `most`.

        They may hold as much as they leave free, because the drives release it, without the client.
        """
        if most <= 0:
            return 0
        held_bytes, free_bytes = self._held.get(who, 0), self._capacity_bytes - self.total_bytes
        most_bytes = max(self._capacity_bytes // SHARES, (held_bytes + free_bytes) // 2)
        left_bytes = min(free_bytes, most_bytes - held_bytes, self._of_tenants.left(who[0]))
        return min(most, left_bytes // size_bytes) or int(self.may_hold(who, size_bytes))

    def hold(self, who: Holder, size_bytes: int) -> None:
        """Count this many more bytes of a holder."""
        self._held[who] = self._held.get(who, 0) + size_bytes
        self._of_tenants.take(who[0], size_bytes)

    def release(self, who: Holder, size_bytes: int) -> None:
        """Note that a holder no longer has this much."""
        left = self._held[who] - size_bytes
        assert left >= 0
        if left:
            self._held[who] = left
        else:
            del self._held[who]
        self._of_tenants.give_back(who[0], size_bytes)


class Places:
    """A resource held for long, such as connections: each tenant has a share that no other can use.

    Half of it is divided among all tenants of the node; of the other half a tenant may use no more than
    it leaves free. So a new tenant always finds its own share, and a single tenant has all.
    """

    def __init__(self, capacity: int, tenants: Callable[[], int]) -> None:
        """`tenants` returns how many tenants the node knows."""
        self.capacity = capacity
        self.total = 0
        self._tenants = tenants
        self._held: dict[Hashable, int] = {}
        self._parts = (0, 0)  # capacity and tenants for which the next two were computed
        self._own = 0  # the guaranteed part of each tenant
        self._over = 0  # the sum of what tenants hold beyond that

    def left(self, who: Hashable) -> int:
        """How much more a tenant may have."""
        own, held, free = self.own(), self.held(who), self.capacity - self.total
        tenants = self._parts[1]
        if tenants <= 1:
            return free
        common = max(0, self.capacity - own * tenants)
        others = self._over - max(0, held - own)
        most = own + max(0, common - others) // 2
        return max(0, min(free, most - held))

    def held(self, who: Hashable) -> int:
        """How much a tenant has."""
        return self._held.get(who, 0)

    def own(self) -> int:
        """The guaranteed minimum of each tenant, if there are others."""
        parts = (self.capacity, self._tenants())
        if parts != self._parts:
            self._parts, self._own = parts, max(1, self.capacity // (2 * max(1, parts[1])))
            self._over = sum(max(0, one - self._own) for one in self._held.values())
        return self._own

    def take(self, who: Hashable, count: int = 1) -> None:
        """Count this many more of a tenant."""
        self._change(who, count)

    def give_back(self, who: Hashable, count: int = 1) -> None:
        """Note that a tenant has given this many back."""
        self._change(who, -count)

    def _change(self, who: Hashable, by: int) -> None:
        own, before = self.own(), self._held.pop(who, 0)
        after = before + by
        assert after >= 0
        if after:
            self._held[who] = after
        self._over += max(0, after - own) - max(0, before - own)
        self.total += by
