"""The map of a cluster: its members as of a revision of etcd, and the home of each user.

What always holds: a map is a value. Equal members give equal homes, in whatever order and from whichever node they
come. A member that can't be parsed is left out, and the others stay.
What it doesn't do: make calls. `kvstore.cluster.membership` follows etcd, `kvstore.client.map_follower` a node.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

from kvstore.cluster.owners import Owners
from kvstore.errors import ConfigError
from kvstore.limits import (
    CLUSTER_LOTS_MAX,
    CLUSTER_WEIGHT_MAX,
    MAP_PLACEMENTS_CACHED,
    MEMBER_TEXT_CHARACTERS_MAX,
    OWNERS_MAX,
)
from kvstore.placement import LOTS, Placement, lot_of
from kvstore.reach import split_target
from nic_offload.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["DRAINED", "DRAINING", "TOO_OLD", "Map", "Member", "lots_in", "lots_record"]

DRAINING: Final = "draining"
DRAINED: Final = "drained"  # of a node that has been one: all that it had is on others

# Fields that records of earlier versions don't have.
_LATER: Final = {"state": "", "zone": "", "replicas": 0, "standbys": 0}


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A node that is on the map."""

    name: str  # of its folder, for good
    node: str  # HOST:PORT for calls
    weight: int = 1
    version: str = ""
    state: str = ""  # "draining", or nothing
    zone: str = ""  # what fails together with it: a rack, a room; two copies are in two zones
    replicas: int = 0  # its --cluster-replicas; 0: none, or not known
    standbys: int = 0  # 1: it reads records of lots that name a standby; 0: a node of an earlier version

    def __post_init__(self) -> None:
        """ConfigError if a field is invalid."""
        split_target(self.node)
        texts = (self.name, self.version, self.state, self.zone)
        if not self.name or any(
            len(text) > MEMBER_TEXT_CHARACTERS_MAX or not text.isprintable() for text in texts
        ):
            raise ConfigError(
                "A member's name, version, state and zone have at most"
                f" {MEMBER_TEXT_CHARACTERS_MAX} printable characters."
            )
        if not isinstance(self.weight, int) or not 1 <= self.weight <= CLUSTER_WEIGHT_MAX:
            raise ConfigError(f"A node's weight is 1 to {CLUSTER_WEIGHT_MAX}, not {shown(self.weight)}.")

    def encoded(self) -> bytes:
        """The record in etcd."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Member:
        """ConfigError if it is invalid. Unknown fields of later versions are ignored."""
        try:
            values = _LATER | json.loads(data)
            known: dict[str, Any] = {one.name: _typed(one.type, values[one.name]) for one in fields(cls)}
            return cls(**known)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError("The member's record is invalid.") from error


# Clients of versions with another placement get these members instead of the real ones, so all their calls fail, with
# this address in the message; nodes of such versions find the first. Two copies need two of them.
TOO_OLD: Final = tuple(
    Member(f"lots {port}", f"needs-a-later-version-of-triggerkv.invalid:{port}", CLUSTER_WEIGHT_MAX)
    for port in (1, 2)
)


def lots_record(lots: int) -> bytes:
    """The record of a cluster's number of lots."""
    return json.dumps(asdict(TOO_OLD[0]) | {"lots": lots}, separators=(",", ":")).encode()


def lots_in(record: bytes) -> int:
    """The number in such a record; ConfigError if it is invalid."""
    try:
        return Map(0, lots=int(_typed("int", json.loads(record)["lots"]))).lots
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("The record of the cluster's number of lots is invalid.") from error


@lru_cache(MAP_PLACEMENTS_CACHED)  # most maps have the same nodes as the one before
def _placement(nodes: tuple[tuple[bytes, int], ...], zones: tuple[str, ...], lots: int) -> Placement | Owners:
    return Placement(nodes, zones) if lots == LOTS else Owners(nodes, zones, lots)


def _typed(kind: object, value: Any) -> Any:
    wanted = int if kind == "int" else str
    if type(value) is not wanted:
        raise TypeError
    return value


@dataclass(frozen=True)
class Map:
    """The members. It may be empty."""

    revision: int
    members: tuple[Member, ...] = field(default=())
    digest: int = 0  # of the members, their leases and the absent nodes; 0: unknown
    absent: tuple[Member, ...] = ()  # that were members, and may come back with what they have
    placed_as: str | None = None  # what stands for a client's tenant; None: what it calls itself
    lots: int = LOTS  # into which names fall: of the cluster, for good

    def __post_init__(self) -> None:
        """ConfigError if the number of lots is invalid."""
        if not LOTS <= self.lots <= CLUSTER_LOTS_MAX or self.lots & (self.lots - 1):
            raise ConfigError(
                f"A cluster has {LOTS} to {CLUSTER_LOTS_MAX} lots, a power of two, not {self.lots}."
            )

    @classmethod
    def of(
        cls,
        revision: int,
        members: Iterable[Member],
        digest: int = 0,
        placed_as: str | None = None,
        absent: Iterable[Member] = (),
        lots: int = LOTS,
    ) -> Map:
        """In the one order that a map has; of two members at one address the later name is left out."""
        by_node: dict[str, Member] = {}
        for member in sorted(members):
            by_node.setdefault(member.node, member)
        there = tuple(sorted(by_node.values()))
        names = {one.name for one in there}
        away = tuple(sorted(one for one in absent if one.name not in names))
        return cls(revision, there, digest, away, placed_as, lots)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of its members."""
        return frozenset(one.name for one in self.members)

    @cached_property
    def knows_standbys(self) -> bool:
        """Whether every node, absent ones too, can read records of lots that name a standby."""
        return all(one.standbys for one in (*self.members, *self.absent))

    @cached_property
    def in_zone(self) -> dict[str, frozenset[int]]:
        """The indices of the members of each zone."""
        zones: dict[str, set[int]] = defaultdict(set)
        for at, one in enumerate(self.members):
            zones[one.zone].add(at)
        return {zone: frozenset(places) for zone, places in zones.items()}

    @cached_property
    def draining(self) -> tuple[int, ...]:
        """The indices of members that should receive no new blocks; none if all are draining."""
        places = tuple(at for at, one in enumerate(self.members) if one.state == DRAINING)
        return places if len(places) < len(self.members) else ()

    @cached_property
    def _staying(self) -> tuple[int, ...]:
        return tuple(at for at in range(len(self.members)) if at not in self.draining)

    @cached_property
    def _placement(self) -> Placement | Owners:
        staying = [self.members[at] for at in self._staying]
        zones = tuple(one.zone for one in staying)
        nodes = tuple((one.name.encode(), one.weight) for one in staying)
        return _placement(nodes, zones if len(set(zones)) > 1 else (), self.lots)

    def home(self, tenant: str, user: str) -> Member | None:
        """The member that stores a user's KV; None if the map is empty."""
        if not self.members:
            return None
        return self.members[self.owners(tenant.encode(), user.encode())[0]]

    def owners(self, tenant: bytes, key: bytes) -> tuple[int, ...]:
        """The first owners of a block as indices of members, at most `OWNERS_MAX`; then all that are draining."""
        return self.owners_of(self.lot_of(tenant, key))

    def owners_of_each(self, tenant: bytes, keys: Iterable[bytes]) -> Iterator[tuple[int, ...]]:
        """As `owners`, for many keys."""
        lots = [self.lot_of(tenant, key) for key in keys]
        if self.members and isinstance(self._placement, Owners):
            self._placement.draw(lots)
        return map(self.owners_of, lots)

    def lot_of(self, tenant: bytes, key: bytes) -> int:
        """The lot that a block, or a user, falls into."""
        return lot_of(tenant, key, self.lots)

    def owners_of(self, lot: int) -> tuple[int, ...]:
        """The owners of a lot's blocks; none if the map is empty."""
        if not self.members:
            return ()
        order = self._placement.order_of(lot)[:OWNERS_MAX]
        return order if not self.draining else tuple(self._staying[at] for at in order) + self.draining

    def orders(self) -> Iterator[tuple[int, ...]]:
        """The owners of all lots' blocks."""
        placement, staying, draining = self._placement, self._staying, self.draining
        orders = placement.orders().tolist() if isinstance(placement, Owners) else placement.orders
        return ((*(staying[at] for at in order[:OWNERS_MAX]), *draining) for order in orders)

    def shares(self) -> list[float]:
        """Each member's share of all users, by its weight; what it has differs by chance (docs/cluster.md)."""
        total = sum(self.members[at].weight for at in self._staying)
        staying = frozenset(self._staying)
        return [one.weight / total if at in staying else 0.0 for at, one in enumerate(self.members)]
