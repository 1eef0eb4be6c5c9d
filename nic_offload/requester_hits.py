"""From a hit in the match-action table to the requester: its handles and actions become users and requests.

What always holds: a handle stands for KV of the request's own tenant or for nothing; a handle that stands for nothing
is counted, and is not an error.

What it doesn't do: read a clock, or wait. Make an `At` for each moment; it is two numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from nic_offload.match_rule import ActionKind
from nic_offload.requester_catalogue import User

if TYPE_CHECKING:
    from nic_offload.match_fields import Request
    from nic_offload.match_rule import Action
    from nic_offload.requester import KvRequester
    from nic_offload.requester_terms import Answer

__all__ = ["At"]


class At:
    """The requester at a moment: the match-action table's `perform` begins actions with it."""

    def __init__(self, requester: KvRequester, now_ms: int, deadline_ms: int) -> None:
        self._requester = requester
        self._now_ms, self._deadline_ms = now_ms, deadline_ms
        self.answers: list[Answer] = []  # to fetch and prefetch

    def begin(self, action: Action, sessions: str, request: Request) -> None:
        """Begin one action for all KV behind the handle."""
        parts = [unquote(part) for part in sessions.split("/")]
        foreign = parts[0] != request.tenant
        if foreign or len(parts) != len(User._fields) or not all(parts):
            self._requester.refuse_handle(foreign=foreign)
            return
        user = User(*parts)
        if action.kind is ActionKind.STORE:
            self._requester.place(user, keep=True)
        elif action.kind is ActionKind.ROUTE:
            self._requester.place(user, node=action.node)
        else:
            urgent = action.kind is ActionKind.FETCH
            self.answers.append(self._requester.request(user, self._now_ms, self._deadline_ms, urgent=urgent))
