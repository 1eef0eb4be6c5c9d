"""What the requester knows: for each user, in order, where every extent of their KV is.

An `Extent` is one block on a drive of a node. Its generation grows each time the block is stored again or moved, so
of two reports about a block the one with the higher generation is newer, in whatever order they arrive.

What always holds: a report that is not newer than what is known changes nothing. Users, extents per user and all
extents are bounded. Past a bound a block is left out and earlier ones stay, so a user keeps a usable prefix.

What it doesn't do: prove anything. The drive is authoritative: when an extent is requested the node checks key and
generation, and may answer MISS. The catalogue doesn't remember dropped extents either: a late report adds one again,
until that MISS.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from nic_offload.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Catalogue", "Change", "Extent", "User"]

TEXT_MAX = 256  # characters in a tenant, a user or a node
KEY_BYTES_MAX = 64


class User(NamedTuple):
    """The user whose KV it is."""

    tenant: str
    user: str


class Extent(NamedTuple):
    """Where one block lies."""

    node: str
    drive: int
    address: int
    length: int
    key: bytes
    generation: int


class Change(enum.Enum):
    """The effect of a report."""

    ADDED = "added"
    REPLACED = "replaced"
    REMOVED = "removed"
    STALE = "stale"  # something as new or newer is known
    UNKNOWN = "unknown"  # there is no such block, or no such user
    NO_ROOM = "no room"  # at a bound


_NOTHING: Mapping[bytes, Extent] = MappingProxyType({})


class Catalogue:
    """Users, and their extents in the order in which the blocks were first stored."""

    def __init__(
        self, *, users_max: int, extents_max: int, extents_per_user_max: int, extent_bytes_max: int
    ) -> None:
        self._users_max = users_max
        self._extents_max = extents_max
        self._extents_per_user_max = extents_per_user_max
        self._extent_bytes_max = extent_bytes_max
        self._users: dict[User, dict[bytes, Extent]] = {}
        self.extents = 0

    def __len__(self) -> int:
        return len(self._users)

    def of(self, user: User) -> Mapping[bytes, Extent]:
        """The user's extents by key, in order; empty for an unknown user. Read-only."""
        return self._users.get(user, _NOTHING)

    def stored(self, user: User, extent: Extent) -> Change:
        """A block was stored: it is new, or replaces the known one."""
        self._check(user, extent)
        theirs = self._users.get(user)
        known = None if theirs is None else theirs.get(extent.key)
        if known is not None:
            return self._replace(user, known, extent)
        if theirs is None:
            if len(self._users) >= self._users_max:
                return Change.NO_ROOM
            theirs = {}
        if len(theirs) >= self._extents_per_user_max or self.extents >= self._extents_max:
            return Change.NO_ROOM
        theirs[extent.key] = extent
        self._users[user] = theirs
        self.extents += 1
        return Change.ADDED

    def moved(self, user: User, extent: Extent) -> Change:
        """A known block lies somewhere else now."""
        self._check(user, extent)
        known = self.of(user).get(extent.key)
        return Change.UNKNOWN if known is None else self._replace(user, known, extent)

    def dropped(self, user: User, key: bytes, generation: int) -> Change:
        """A block of this generation is gone."""
        known = self.of(user).get(key)
        if known is None:
            return Change.UNKNOWN
        if known.generation > generation:
            return Change.STALE
        theirs = self._users[user]
        del theirs[key]
        self.extents -= 1
        if not theirs:
            del self._users[user]
        return Change.REMOVED

    def forget(self, user: User) -> int:
        """All KV of the user is gone; returns the number of extents."""
        count = len(self._users.pop(user, ()))
        self.extents -= count
        return count

    def _replace(self, user: User, known: Extent, extent: Extent) -> Change:
        if extent.generation <= known.generation:
            return Change.STALE
        self._users[user][extent.key] = extent
        return Change.REPLACED

    def _check(self, user: User, extent: Extent) -> None:
        for name, text in (*zip(user._fields, user, strict=True), ("node", extent.node)):
            if not 1 <= len(text) <= TEXT_MAX:
                raise KvError(f"The {name} of an extent takes 1 to {TEXT_MAX} characters, not {len(text)}.")
        if not 1 <= len(extent.key) <= KEY_BYTES_MAX:
            raise KvError(f"The key of an extent takes 1 to {KEY_BYTES_MAX} bytes, not {len(extent.key)}.")
        if not 1 <= extent.length <= self._extent_bytes_max:
            raise KvError(f"An extent is 1 to {self._extent_bytes_max} bytes long, not {extent.length}.")
