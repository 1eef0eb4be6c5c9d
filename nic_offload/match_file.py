"""Rules from TOML, as docs/match-action.md describes it.

What always holds: all rules of a text are accepted, or none. An error is one sentence that names the rule, the field,
its valid forms and, where it can be found, the line. An unknown field is an error.

What it doesn't do: read files, or change a table.
"""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

from nic_offload.errors import RuleError
from nic_offload.match_action import ENTRIES_MAX
from nic_offload.match_fields import FIELDS, parse_pattern, parse_text
from nic_offload.match_rule import PRIORITY_DEFAULT, PRIORITY_MAX, Action, ActionKind, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["parse_rules"]

TEXT_BYTES_MAX = 64 << 20

_RULE_FIELDS = ("name", "priority", *FIELDS, "bind", "actions", "sessions")
_PLAIN = [kind.value for kind in ActionKind if kind is not ActionKind.ROUTE]
_ACTION_TAKES = f'one of {", ".join(_PLAIN)}, or {{ route = "NODE" }}'


def parse_rules(text: str) -> list[Rule]:
    """Parse the rules of a text, in its order."""
    if len(text) > TEXT_BYTES_MAX:
        raise RuleError(f"The rules are {len(text)} characters long; at most {TEXT_BYTES_MAX} are possible.")
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RuleError(f"The rules are not TOML: {str(error) or 'nested too deeply'}.") from None
    for key in document:
        if key != "rule":
            raise RuleError(f"The rules contain {key!r}; only [[rule]] is allowed.")
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RuleError("A rule begins with [[rule]], in double brackets.")
    if len(tables) > ENTRIES_MAX:
        raise RuleError(f"There are {len(tables)} rules; at most {ENTRIES_MAX} are possible.")
    places = _places(text, len(tables))
    rules: list[Rule] = []
    seen: dict[str, str] = {}
    for place, table in zip(places, tables, strict=True):
        rule = _rule(place, table)
        if rule.name is not None and rule.name in seen:
            raise RuleError(f"{place}: name must be unique; {seen[rule.name]} has {rule.name!r} too.")
        if rule.name is not None:
            seen[rule.name] = place
        rules.append(rule)
    return rules


def _places(text: str, count: int) -> list[str]:
    """How errors name each rule. Headers in comments or long strings would miscount: then there are no lines."""
    headers = [number for number, line in enumerate(text.split("\n"), 1) if _HEADER.match(line)]
    if len(headers) != count:
        return [f"Rule {number}" for number in range(1, count + 1)]
    return [f"Rule {number} (line {line})" for number, line in enumerate(headers, 1)]


_HEADER = re.compile(r"\s*\[\[\s*(?:rule|\"rule\"|'rule')\s*\]\]")


def _rule(place: str, table: Mapping[str, object]) -> Rule:
    for key in table:
        if key not in _RULE_FIELDS:
            raise RuleError(f"{place}: there is no field {key!r}; a rule takes {', '.join(_RULE_FIELDS)}.")
    name = parse_text(place, "name", table["name"]) if "name" in table else None
    where = f"{place}, {name!r}" if name is not None else place
    priority = table.get("priority", PRIORITY_DEFAULT)
    if type(priority) is not int:
        raise RuleError(f"{where}: priority takes a whole number from 0 to {PRIORITY_MAX}, not {priority!r}.")
    sessions = parse_text(where, "sessions", table["sessions"]) if "sessions" in table else None
    pattern = parse_pattern(where, table)
    actions = _actions(where, table.get("actions"))
    try:
        return Rule(pattern, actions, priority, sessions, name)
    except RuleError as error:  # its text begins with the rule, and the line is known here
        unplaced = "A rule" if name is None else f"Rule {name!r}"
        raise RuleError(where + str(error).removeprefix(unplaced)) from None


def _actions(where: str, value: object) -> tuple[Action, ...]:
    if not isinstance(value, list):
        raise RuleError(f"{where}: actions takes a list, each item {_ACTION_TAKES}.")
    return tuple(_action(where, item) for item in value)


def _action(where: str, item: object) -> Action:
    if isinstance(item, str) and item in _PLAIN:
        return Action(ActionKind(item))
    if isinstance(item, dict) and list(item) == ["route"]:
        return Action(ActionKind.ROUTE, parse_text(where, "route", item["route"]))
    raise RuleError(f"{where}: actions takes {_ACTION_TAKES}, not {item!r}.")
