"""A rule of the match-action table: a pattern, a priority, actions; and the interface that executes them.

What always holds: a `Rule` that exists is valid for the table, except for the table's own bounds. `deny` comes last,
and no action that moves bytes precedes it. A rule with a handle or bindings names its tenant and user, so no handle
depends on the caller.

What it doesn't do: execute an action. The requester does, through `Requester`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nic_offload.errors import RuleError
from nic_offload.match_fields import FiveTuple, Pattern

if TYPE_CHECKING:
    from nic_offload.match_fields import Request

__all__ = ["Action", "ActionKind", "Requester", "Rule"]

PRIORITY_MAX = 65535
PRIORITY_DEFAULT = 100
ACTIONS_MAX = 8  # of one rule
IDLE_TIMEOUT_MS_MAX = 365 * 24 * 3_600_000


class ActionKind(enum.Enum):
    """What may be done for a request; the set is closed."""

    FETCH = "fetch"  # bring all KV of the user to where the request runs, now
    PREFETCH = "prefetch"  # the same with low priority, before the request needs it
    STORE = "store"  # keep the KV that the request will make
    ROUTE = "route"  # the user's KV is on this node
    DENY = "deny"  # refuse the request; terminal
    COUNT = "count"  # nothing besides the counting that every hit has


class Action(NamedTuple):
    """One thing to do. Only `route` has a node."""

    kind: ActionKind
    node: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}({self.node})" if self.node else self.kind.value


DENY = Action(ActionKind.DENY)


class Requester(Protocol):
    """Moves the bytes. The table names KV by handle only; this interface resolves handles."""

    def begin(self, action: Action, sessions: str, request: Request) -> None:
        """Begin a fetch, prefetch, store or route for all KV behind the handle; return without waiting.

        Bytes are reported to `Table.add_bytes` when they have moved. A handle that stands for nothing is a
        miss, not an error.
        """
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, from an operator or a session.

    Without `sessions`, the handle is that of the user in the request (`Entry.sessions_of`). With an idle timeout its
    entry is removed once it has not been hit for that long (`Table.age`); a file's rules have none.
    """

    pattern: Pattern
    actions: tuple[Action, ...]
    priority: int = PRIORITY_DEFAULT
    sessions: str | None = None
    name: str | None = None
    idle_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        """Refuse a rule that means nothing, or could give access to another tenant's KV."""
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise RuleError(f"{self}: priority takes a number from 0 to {PRIORITY_MAX}, not {self.priority}.")
        self._check_actions()
        idle_ms = self.idle_timeout_ms
        if idle_ms is not None and not 1 <= idle_ms <= IDLE_TIMEOUT_MS_MAX:
            raise RuleError(
                f"{self}: idle_timeout_ms takes a number from 1 to {IDLE_TIMEOUT_MS_MAX}, not {idle_ms}."
            )
        pattern = self.pattern
        if (pattern.bind or self.sessions is not None) and (pattern.tenant is None or pattern.user is None):
            field = "bind" if pattern.bind else "sessions"
            raise RuleError(f"{self}: {field} belongs to one user, so tenant and user are required.")
        if pattern.bind and pattern.five != FiveTuple():
            raise RuleError(f"{self}: with bind, the 5-tuple may only be in the bindings.")
        if FiveTuple() in pattern.bind:
            raise RuleError(f"{self}: a binding needs at least one field.")

    def _check_actions(self) -> None:
        if not 1 <= len(self.actions) <= ACTIONS_MAX:
            raise RuleError(f"{self}: actions takes 1 to {ACTIONS_MAX} actions, not {len(self.actions)}.")
        kinds = [action.kind for action in self.actions]
        if len(set(kinds)) < len(kinds):
            raise RuleError(f"{self}: actions takes each action once.")
        if ActionKind.DENY in kinds and kinds not in ([ActionKind.DENY], [ActionKind.COUNT, ActionKind.DENY]):
            raise RuleError(f"{self}: deny must be last, and only count may precede it.")
        for action in self.actions:
            if bool(action.node) != (action.kind is ActionKind.ROUTE):
                raise RuleError(f"{self}: only route takes a node, and needs one.")

    def __str__(self) -> str:
        return f"Rule {self.name!r}" if self.name is not None else "A rule"
