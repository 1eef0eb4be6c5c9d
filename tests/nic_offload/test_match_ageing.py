"""Entries that are not hit for their idle timeout leave the table, and no others."""

from __future__ import annotations

import random

import pytest

from nic_offload.errors import RuleError
from nic_offload.match_action import Action, ActionKind, Entry, Pattern, Rule, Table
from nic_offload.match_fields import Request
from tests.nic_offload.matching import DENY, hit, request, rule

MS = 1_000_000


def _ageing(name: str, idle_ms: int = 100, **fields: object) -> Rule:
    plain = rule(name=name, **fields)  # type: ignore[arg-type]
    return Rule(plain.pattern, plain.actions, plain.priority, plain.sessions, name, idle_timeout_ms=idle_ms)


def test_an_entry_is_removed_once_it_has_not_been_hit_for_its_timeout() -> None:
    table = Table()
    table.add(_ageing("short", user="alice"), now_ns=5 * MS)
    assert table.age(104 * MS) == 0
    assert table.age(105 * MS) == 1
    assert hit(table, request()) is None
    assert table.statistics() == (0, 0, 0, 0)


def test_a_hit_keeps_an_entry_for_another_timeout() -> None:
    table = Table()
    table.add(_ageing("kept", user="alice"), now_ns=0)
    for at_ms in (90, 180, 270):
        assert table.match(request(), at_ms * MS) is not None
        assert table.age((at_ms + 99) * MS) == 0
    assert table.age(370 * MS) == 1


def test_entries_without_a_timeout_and_rules_of_the_file_stay() -> None:
    table = Table()
    table.replace([rule(name="of the file", context="chat-1")])
    table.add(rule(name="added", user="alice"))
    table.add(_ageing("ageing", model="llama"), now_ns=0)
    assert table.age(10**18) == 1
    assert sorted(entry.name for entry in table) == ["added", "of the file"]


def test_bindings_expire_with_their_entry() -> None:
    table = Table()
    table.replace([rule(name="anyone", priority=0)])
    bound = _ageing("bound", tenant="acme", user="alice", bind=[{"source": "10.9.9.9"}])
    table.add(bound, now_ns=0)
    assert hit(table, request()) == "guard of acme/alice"
    assert table.age(100 * MS) == 1
    assert hit(table, request()) == "anyone"
    assert table.statistics().guards == 0


def test_two_entries_that_differ_in_their_timeout_share_no_plan() -> None:
    table = Table()
    patterns = [Pattern(user=name) for name in ("a", "b")]
    for pattern, idle_ms in zip(patterns, (100, 1000), strict=True):
        table.add(Rule(pattern, (Action(ActionKind.FETCH),), idle_timeout_ms=idle_ms), now_ns=0)
    assert table.age(100 * MS) == 1
    assert [entry.pattern for entry in table] == [patterns[1]]


def test_a_manually_removed_entry_does_not_age_and_its_row_is_not_mistaken_for_it() -> None:
    table = Table()
    gone = table.add(_ageing("gone", user="alice"), now_ns=0)
    table.remove(gone)
    heir = table.add(_ageing("heir", user="alice", idle_ms=500), now_ns=90 * MS)
    assert heir.row != 0
    assert table.age(200 * MS) == 0
    assert hit(table, request()) == "heir"


def test_a_call_removes_a_bounded_number() -> None:
    table = Table()
    for number in range(30):
        table.add(_ageing(str(number), user=f"user {number}"), now_ns=0)
    assert [table.age(10**12, at_most=12) for _ in range(4)] == [12, 12, 6, 0]


def test_the_heap_does_not_grow_with_entries_that_come_and_go() -> None:
    table = Table()
    for number in range(5_000):
        table.remove(table.add(_ageing("x", user=f"user {number}"), now_ns=0))
    assert len(table._ageing._due) < 200


def test_only_added_entries_age_and_they_report_since_when() -> None:
    table = Table()
    with pytest.raises(RuleError, match="only entries added at run time age"):
        table.replace([_ageing("filed", user="alice")])
    with pytest.raises(RuleError, match="needs the time at which it is added"):
        table.add(_ageing("untimed", user="alice"))
    with pytest.raises(RuleError, match="idle_timeout_ms takes a number from 1"):
        _ageing("never", idle_ms=0)
    assert len(table) == 0


def test_a_table_of_ageing_entries_equals_a_dict_of_last_uses() -> None:
    dice = random.Random(5)
    table = Table()
    added: dict[str, Entry] = {}
    used: dict[str, tuple[int, int]] = {}  # the last use, and the timeout
    now_ms = 1
    for _ in range(4_000):
        now_ms += dice.randrange(8)
        user = f"user {dice.randrange(60)}"
        if user not in used:
            idle_ms = dice.choice([50, 200, 900])
            added[user] = table.add(_ageing(user, idle_ms, tenant="acme", user=user), now_ns=now_ms * MS)
            used[user] = now_ms, idle_ms
        elif dice.random() < 0.1:
            table.remove(added[user])
            del used[user]
        else:
            assert hit_at(table, user, now_ms) == user
            used[user] = now_ms, used[user][1]
        expected = {name for name, (last_ms, idle_ms) in used.items() if now_ms - last_ms >= idle_ms}
        assert table.age(now_ms * MS) == len(expected)
        used = {name: of for name, of in used.items() if name not in expected}
        assert {entry.name for entry in table} == used.keys()


def hit_at(table: Table, user: str, now_ms: int) -> str | None:
    entry = table.match(Request("acme", user, "c", "m", 0, 0, 0, 0, 0), now_ms * MS)
    return None if entry is None else entry.name


def test_a_deny_rule_may_age_too() -> None:
    table = Table()
    plain = rule(DENY, name="misused", source="10.0.0.0/8")
    table.add(Rule(plain.pattern, plain.actions, name="misused", idle_timeout_ms=100), now_ns=0)
    assert hit(table, request()) == "misused"
    assert table.age(10**12) == 1
