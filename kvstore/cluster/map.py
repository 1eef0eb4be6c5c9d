"""The map of a cluster: its members as of a revision of etcd, and whose home each of them is.

What always holds: a map is a value; equal members have equal homes, in whatever order they were found and whoever tells
of them; a member that can't be read is left out, and the others stay.
What it doesn't do: ask anybody. `kvstore.cluster.membership` follows etcd, `kvstore.client.following` a node.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import ConfigError
from kvstore.limits import CLUSTER_WEIGHT_MAX
from kvstore.placement import Placement
from kvstore.reach import split_target

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Map", "Member"]

_TEXT_MAX: Final = 256


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A node that is there."""

    name: str  # of its folder, for good
    node: str  # HOST:PORT for calls
    weight: int = 1
    version: str = ""

    def __post_init__(self) -> None:
        """ConfigError if no node can be so."""
        split_target(self.node)
        texts = (self.name, self.version)
        if not self.name or any(len(text) > _TEXT_MAX or not text.isprintable() for text in texts):
            raise ConfigError(f"A member's name and version are words of {_TEXT_MAX} letters at most.")
        if not 1 <= self.weight <= CLUSTER_WEIGHT_MAX:
            raise ConfigError(f"A node's weight is 1 to {CLUSTER_WEIGHT_MAX}, not {self.weight}.")

    def encoded(self) -> bytes:
        """As it is written to etcd."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Member:
        """ConfigError if it is none. What a later version says besides is left out."""
        try:
            told = json.loads(data)
            known: dict[str, Any] = {one.name: _typed(one.type, told[one.name]) for one in fields(cls)}
            return cls(**known)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError("That is no record of a member.") from error


def _typed(kind: object, value: object) -> object:
    wanted = int if kind == "int" else str
    if type(value) is not wanted:
        raise TypeError
    return value


@dataclass(frozen=True)
class Map:
    """Who is there. Without members it says that nobody is."""

    revision: int
    members: tuple[Member, ...] = field(default=())

    @classmethod
    def of(cls, revision: int, members: Iterable[Member]) -> Map:
        """In the one order that a map has; of two members at one address the later name is left out."""
        by_node: dict[str, Member] = {}
        for member in sorted(members):
            by_node.setdefault(member.node, member)
        return cls(revision, tuple(sorted(by_node.values())))

    @cached_property
    def _placement(self) -> Placement:
        return Placement([(one.name.encode(), one.weight) for one in self.members])

    def home(self, tenant: str, user: str) -> Member | None:
        """Where a user's KV is kept; None if there is nobody."""
        if not self.members:
            return None
        return self.members[self._placement.order(tenant.encode(), user.encode())[0]]

    def owners(self, tenant: bytes, key: bytes) -> tuple[int, ...]:
        """The members that a block would be kept on, by their places, the first owner first. There must be some."""
        return self._placement.order(tenant, key)

    def shares(self) -> list[float]:
        """The part of all users that each member has."""
        homes = self._placement.homes if self.members else b""
        return [homes.count(place) / len(homes) for place in range(len(self.members))]
