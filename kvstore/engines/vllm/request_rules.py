"""The match-action table in an engine's scheduler: what the rules say of each request, and what is prefetched for it.

Each request is matched when it arrives: by the tenant of the settings, the user and the session that it names, the
model, and its 5-tuple if the settings trust the one in `kv_transfer_params`. A rule that denies keeps the store out of
that request; one that fetches or prefetches has all KV of its user read into the node's memory, by the requester, if
the request names a session. Without a file of rules, one rule prefetches for every request.

What always holds: `match` calls no node. A request whose 5-tuple is unknown matches no rule that names an address, a
port or a protocol, and so a user bound to 5-tuples is denied.
What it doesn't do: refuse a request, which the engine's front end does; read the file again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.client import Arrivals, ClusterClient
from kvstore.client.matched import RuleCounts, matched_by
from kvstore.clock import SystemClock
from kvstore.config_files import read_text
from kvstore.errors import ConfigError
from nic_offload.errors import RuleError
from nic_offload.match_action import Action, ActionKind, Request, Rule, Table
from nic_offload.match_fields import FIVE_FIELDS, Pattern
from nic_offload.match_file import parse_rules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Client, Matched, Session
    from kvstore.engines.vllm.settings import Settings
    from kvstore.engines.vllm.stats import Stats

__all__ = ["ANONYMOUS", "RequestRules", "session_of"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

ANONYMOUS = "anonymous"
_TENANT = "default"  # of rules, if the settings name none
_UNKNOWN = (-1,) * len(FIVE_FIELDS)  # matches no address, no port and no protocol
_NAMES = {"tenant": "x", "user": "x", "context": "x", "model": "x"}


def session_of(request: Any) -> tuple[str, str] | None:
    """The user and the session that a request names."""
    given = request.kv_transfer_params or {}
    name = given.get("session") or getattr(request, "session_id", None)
    return (str(given.get("user") or ANONYMOUS), str(name)) if name else None


class RequestRules:
    """The rules of one engine."""

    def __init__(self, settings: Settings, client: Client | ClusterClient, model: str) -> None:
        """ConfigError for a file that can't be read, or that says nothing sensible."""
        self._tenant = settings.reach.tenant or _TENANT
        self._model = model
        self._trusts = settings.five_tuple == "request"
        self._table = Table()
        self._table.replace(_rules(settings.rules))
        self._arrivals: Arrivals | None = None
        if not isinstance(client, ClusterClient):
            self._arrivals = Arrivals(client, self._table, tenant=self._tenant)
        self._counts = RuleCounts()  # of a cluster's engine, which has no sessions to fetch
        self._clock = SystemClock()
        self._reported: dict[str, tuple[int, int]] = {}

    def match(self, request: Any) -> Matched:
        """What the rules say of a request of the engine's. It counts as a hit."""
        user, session = session_of(request) or (self._user(request), "")
        asked = Request(self._tenant, user, session, self._model, *self._five(request))
        if self._arrivals is not None:
            return self._arrivals.match(asked)
        now_ns = self._clock.monotonic_ns()
        entry = self._table.match(asked, now_ns)
        if entry is not None:
            self._counts.add(entry, hits=1, now_ns=now_ns)
        return matched_by(asked, entry, self._tenant)

    @staticmethod
    def _user(request: Any) -> str:
        return str((request.kv_transfer_params or {}).get("user") or ANONYMOUS)

    def _five(self, request: Any) -> Any:
        if not self._trusts:
            return _UNKNOWN
        given = (request.kv_transfer_params or {}).get("five_tuple")
        try:
            return Request.parse(_NAMES | given)[len(_NAMES) :]  # type: ignore[operator]
        except (RuleError, TypeError) as error:
            log.debug("A request's five_tuple counts as unknown: %s", error)
            return _UNKNOWN

    # --- below, from one thread beside the engine's

    def session(self, user: str, name: str) -> Session | None:
        """A session whose transfers the requester's catalogue follows; None on a cluster, which has none."""
        return None if self._arrivals is None else self._arrivals.session(user, name)

    def fetch(self, matched: Matched) -> None:
        """Have the user's KV read into the node's memory if the rule says so. It waits for look-ups on the node."""
        if self._arrivals is not None:
            self._arrivals.fetch(matched)

    def appended(self, user: str, blocks: Sequence[tuple[bytes, int]], *, was_changed: bool) -> None:
        """A turn's blocks are stored: their keys and lengths. After a change to the past the node is asked again."""
        if self._arrivals is None:
            return
        if was_changed:
            self._arrivals.forgotten(user)
        else:
            for key, length in blocks:
                self._arrivals.stored(user, key, length)
        self._arrivals.poll()

    # --- metrics

    def add_to(self, stats: Stats) -> None:
        """Add what each rule has seen since the last call."""
        counts = self._arrivals.counts() if self._arrivals is not None else self._counts.all()
        for name, seen in counts.items():
            hits, moved_bytes = self._reported.get(name, (0, 0))
            stats.add_of_rule("rule_hits", name, seen.hits - hits)
            stats.add_of_rule("rule_bytes", name, seen.moved_bytes - moved_bytes)
            self._reported[name] = seen.hits, seen.moved_bytes


def _rules(path: str) -> list[Rule]:
    if not path:
        return [Rule(Pattern(), (Action(ActionKind.PREFETCH),), name=_TENANT)]
    try:
        return parse_rules(read_text(Path(path)))
    except RuleError as error:
        raise ConfigError(f"{path}: {error}") from error
