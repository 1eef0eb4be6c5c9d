"""A request that was matched against the rules, and what each rule has seen so far.

What always holds: a request that a rule denies, or whose entry points to another tenant's KV, has no owner. Counters
only grow, whatever leaves the table, and their number is bounded.
What it doesn't do: lock, or call a node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from kvstore.limits import RULES_COUNTED_MAX
from nic_offload.match_action import ActionKind, Counters
from nic_offload.requester_catalogue import User

if TYPE_CHECKING:
    from nic_offload.match_action import Entry, Request

__all__ = ["Matched", "RuleCounts", "matched_by"]


class Matched(NamedTuple):
    """What the rules say of a request; `Arrivals.match` makes it."""

    request: Request
    entry: Entry | None  # None: no rule matches
    owner: User | None  # whose KV the entry points to, if the request may have it

    @property
    def rule(self) -> str | None:
        """The name of the entry that was hit.

        >>> arrivals.match(request).rule
        'tenant=acme,user=ada'
        """
        return None if self.entry is None else self.entry.name

    @property
    def denied(self) -> bool:
        """Whether a rule refuses the request.

        >>> arrivals.match(request).denied
        False
        """
        return self.entry is not None and self.owner is None

    @property
    def fetches(self) -> bool:
        """Whether the rule has the user's KV fetched.

        >>> arrivals.match(request).fetches
        True
        """
        if self.entry is None or self.owner is None:
            return False
        return any(action.kind in {ActionKind.FETCH, ActionKind.PREFETCH} for action in self.entry.actions)


def matched_by(request: Request, entry: Entry | None, tenant: str) -> Matched:
    """A request that hit this entry, at nodes where the client acts for this tenant."""
    owner = None if entry is None else _owner(entry, request)
    denies = entry is not None and any(action.kind is ActionKind.DENY for action in entry.actions)
    if denies or owner is None or owner.tenant != tenant:
        owner = None
    return Matched(request, entry, owner)


def _owner(entry: Entry, request: Request) -> User | None:
    """Return the user whose KV the entry points to."""
    parts = [unquote(part) for part in entry.sessions_of(request).split("/")]
    return User(*parts) if len(parts) == len(User._fields) and parts[0] == request.tenant else None


class RuleCounts:
    """Counters by the names of entries. The first names are kept; what all others have seen is under ""."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}  # hits, time of the last one, bytes

    def add(self, entry: Entry, *, hits: int = 0, now_ns: int = 0, moved_bytes: int = 0) -> None:
        """Count for an entry."""
        name = entry.name
        if name not in self._seen and len(self._seen) >= RULES_COUNTED_MAX:
            name = ""
        seen = self._seen.setdefault(name, [0, 0, 0])
        seen[0] += hits
        seen[1] = max(seen[1], now_ns)
        seen[2] += moved_bytes

    def all(self) -> dict[str, Counters]:
        """All of them so far."""
        return {name: Counters(*seen) for name, seen in self._seen.items()}
