"""What the tests of the match-action table share: short ways to write requests and rules, and the reference.

The reference is the obvious linear search over the rules as they were written, with `ipaddress` for networks;
it shares no code with the table's way of matching, of counting bits or of breaking ties.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nic_offload.match_action import Action, ActionKind, Request, Rule, Table
from nic_offload.match_fields import parse_pattern

FETCH = Action(ActionKind.FETCH)
DENY = Action(ActionKind.DENY)
COUNT = Action(ActionKind.COUNT)

Fields = dict[str, Any]
Written = tuple[Fields, int]  # the fields of a rule, and its priority

BASE: Fields = {
    "tenant": "acme",
    "user": "alice",
    "context": "chat-1",
    "model": "llama",
    "source": "10.1.2.3",
    "destination": "10.9.0.1",
    "source_port": 40000,
    "destination_port": 443,
    "protocol": "tcp",
}
TEXTS = ("tenant", "user", "context", "model")
PROTOCOLS = {"tcp": 6, "udp": 17}


def request(**fields: Any) -> Request:
    """A request like BASE but for these fields."""
    return Request.parse(BASE | fields)


def rule(
    *actions: Action, priority: int = 100, name: str | None = None, sessions: str | None = None, **fields: Any
) -> Rule:
    """A rule; without actions, one that fetches."""
    return Rule(parse_pattern("A rule", fields), actions or (FETCH,), priority, sessions, name)


def hit(table: Table, asked: Request) -> str | None:
    """The name of the entry that is hit."""
    entry = table.match(asked, 1)
    return None if entry is None else entry.name


def table_of(*rules: Rule) -> Table:
    """A table with these rules, added in this order."""
    table = Table()
    for one in rules:
        table.add(one)
    return table


@dataclass
class Recorder:
    """A requester that only records its requests."""

    begun: list[tuple[str, str]] = field(default_factory=list)

    def begin(self, action: Action, sessions: str, request: Request) -> None:
        assert request.user
        self.begun.append((str(action), sessions))


def _within(address: str, network: str) -> bool:
    if "&" in network:
        ours = ipaddress.ip_address(address)
        value, mask = map(ipaddress.ip_address, network.split("&"))
        return ours.version == value.version and int(ours) & int(mask) == int(value)
    ours, theirs = ipaddress.ip_address(address), ipaddress.ip_network(network)
    return ours.version == theirs.version and ours in theirs


@cache
def _ports(text: str | int) -> frozenset[int]:
    """Every port that a rule's text means."""
    if "&" in str(text):
        value, mask = (int(one, 0) for one in str(text).split("&"))
        return frozenset(port for port in range(65536) if port & mask == value)
    low, _, high = str(text).partition("-")
    return frozenset(range(int(low), int(high or low) + 1))


def _protocols(text: str) -> list[int]:
    """Every protocol that a rule's text means."""
    if "&" in text:
        value, mask = (int(one, 0) for one in text.split("&"))
        return [number for number in range(256) if number & mask == value]
    return [PROTOCOLS[text]]


def _fixed_bits(text: str) -> int:
    if "&" in text:
        return int(ipaddress.ip_address(text.split("&")[1])).bit_count()
    return ipaddress.ip_network(text).prefixlen


def five_matches(five: Fields, ours: Fields) -> bool:
    for name, value in five.items():
        if name in {"source", "destination"}:
            if not _within(ours[name], value):
                return False
        elif name in {"source_port", "destination_port"}:
            if int(ours[name]) not in _ports(value):
                return False
        elif name == "protocol" and PROTOCOLS[ours[name]] not in _protocols(value):
            return False
    return True


def matches(written: Fields, ours: Fields) -> bool:
    """Whether a rule matches a request, field by field."""
    if any(field in written and written[field] != ours[field] for field in TEXTS):
        return False
    bind = written.get("bind")
    if bind is not None and not any(five_matches(five, ours) for five in bind):
        return False
    return five_matches(written, ours)


def _five_rank(five: Fields) -> tuple[int, int, int]:
    protocol = 256 - len(_protocols(five["protocol"])) if "protocol" in five else 0
    bits = [_fixed_bits(five[end]) + 1 for end in ("source", "destination") if end in five]
    ports = [65536 - len(_ports(five[p])) for p in ("source_port", "destination_port") if p in five]
    return protocol, sum(bits), sum(ports)


def rank(written: Fields) -> tuple[int, tuple[int, int, int]]:
    """The specificity of a rule; tuples compare as documented."""
    five = min(map(_five_rank, written["bind"])) if "bind" in written else _five_rank(written)
    return sum(field in written for field in TEXTS), five


def denied_by_guard(rules: list[Written], ours: Fields) -> bool:
    bindings = [
        five
        for fields, _ in rules
        if fields.get("bind") and (fields["tenant"], fields["user"]) == (ours["tenant"], ours["user"])
        for five in fields["bind"]
    ]
    return bool(bindings) and not any(five_matches(five, ours) for five in bindings)


def expected(filed: list[Written], added: list[Written], ours: Fields) -> int | str | None:
    """The place of the winner in `filed` and then `added`, "guard", or None for a miss."""
    if denied_by_guard(filed, ours) or denied_by_guard(added, ours):
        return "guard"
    rules = filed + added
    hits = [place for place, (fields, _) in enumerate(rules) if matches(fields, ours)]
    if not hits:
        return None
    return max(hits, key=lambda place: (rules[place][1], rank(rules[place][0]), -place))
