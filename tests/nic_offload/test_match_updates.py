"""Rules are replaced while another thread matches: it sees the old or the new table; kept entries keep their counts."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from nic_offload.errors import KvError, RuleError
from nic_offload.match_action import Action, ActionKind, Table
from nic_offload.match_file import parse_rules
from tests.nic_offload.matching import COUNT, DENY, FETCH, request, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROUNDS = 300


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    """Switch threads as often as possible, to expose races."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_eager_threads")
def test_a_matching_thread_sees_one_table_or_the_other() -> None:
    """In each set, the request hits its own colour's rule; half replaced, it would hit `open`, or nothing."""

    def colour(name: str) -> str:
        filler = "".join(
            f'[[rule]]\nuser = "{name}{n}"\nsource = "10.{n}.0.0/16"\nactions = ["fetch"]\n'
            for n in range(20)
        )
        return (
            '[[rule]]\nname = "open"\npriority = 1\nactions = ["fetch"]\n'
            + filler
            + f'[[rule]]\nname = "{name}"\npriority = {len(name)}00\n'
            + f'{"tenant" if name == "red" else "model"} = "{"acme" if name == "red" else "llama"}"\n'
            + 'actions = ["deny"]\n'
        )

    sets = [parse_rules(colour("red")), parse_rules(colour("green"))]
    table = Table()
    table.replace(sets[0])
    added = table.add(rule(name="added", tenant="acme", user="carol", context="c", priority=900))
    seen: set[str | None] = set()
    wrong: list[str] = []
    done = threading.Event()

    def match() -> None:
        asked, carol, now = request(), request(user="carol", context="c"), 0
        while not done.is_set():
            now += 1
            entry = table.match(asked, now)
            seen.add(None if entry is None else entry.name)
            other = table.match(carol, now)
            if other is not added:
                wrong.append(repr(other))

    thread = threading.Thread(target=match)
    thread.start()
    try:
        for turn in range(_ROUNDS):
            table.replace(sets[turn % 2])
            table.remove(table.add(rule(priority=0, tenant="acme", user=f"u{turn}", source="10.0.0.0/9")))
    finally:
        done.set()
        thread.join(30)
    assert not thread.is_alive()
    assert seen == {"red", "green"}
    assert wrong == []


@pytest.mark.usefixtures("_eager_threads")
def test_no_hit_is_lost_while_rules_are_replaced() -> None:
    table = Table()
    steady = rule(COUNT, name="steady", tenant="acme", priority=500)
    table.replace([steady])
    matches = 20_000
    thread = threading.Thread(target=lambda: [table.match(request(), now) for now in range(matches)])
    thread.start()
    turn = 0
    while thread.is_alive():
        turn += 1
        table.replace([rule(tenant="acme", user=f"u{turn}"), steady])
    thread.join(30)
    (entry,) = (entry for entry in table if entry.name == "steady")
    assert table.counters(entry) == (matches, matches - 1, 0)


def test_counters_of_kept_rules_survive_a_replacement() -> None:
    table = Table()
    bind = [{"source": "10.1.0.0/16"}]
    old = [
        rule(name="stays", tenant="acme", priority=7),
        rule(name="goes", tenant="beta"),
        rule(name="bound", tenant="gamma", user="g", bind=bind),
    ]
    assert table.replace(old) == (0, 3, 0)
    entries = {entry.name: entry for entry in table}
    for tenant in ("acme", "beta", "gamma"):
        table.match(request(tenant=tenant, user="g"), 40)
    table.match(request(tenant="gamma", user="g", source="10.2.0.1"), 41)
    table.add_bytes(entries["stays"], 512)
    route = Action(ActionKind.ROUTE, "node-9")
    new = [
        rule(name="new", tenant="beta", priority=101),
        rule(route, name="renamed", tenant="acme", priority=7),
        rule(DENY, name="bound", tenant="gamma", user="g", bind=bind),
    ]
    assert table.replace(new) == (2, 1, 1)
    entries_now = {entry.name: entry for entry in table}
    assert table.counters(entries_now["renamed"]) == (1, 40, 512)
    assert entries_now["renamed"].actions == (route,)
    assert table.counters(entries_now["bound"]) == (1, 40, 0)
    assert table.counters(entries_now["guard of gamma/g"]) == (1, 41, 0)
    assert table.counters(entries_now["new"]) == (0, 0, 0)
    assert table.counters(entries["goes"]) == (0, 0, 0)
    table.add_bytes(entries["stays"], 1)  # a transfer that began under the old rules
    assert table.counters(entries_now["renamed"]) == (1, 40, 513)


def test_added_entries_stay_when_the_file_changes() -> None:
    table = Table()
    added = table.add(rule(FETCH, tenant="acme"))
    table.match(request(), 3)
    table.replace([rule(tenant="beta")])
    table.replace([])
    assert table.match(request(), 4) is added
    assert table.counters(added) == (2, 4, 0)
    assert len(table) == 1


def test_a_refused_replacement_changes_nothing() -> None:
    table = Table(masks_max=2)
    table.replace([rule(name="one", tenant="acme")])
    table.match(request(), 3)
    for bad in (
        [rule(tenant="beta"), rule(tenant="beta")],
        [rule(tenant="beta"), rule(user="b"), rule(model="m")],
        [rule(tenant="a", user="a", bind=[{"source": f"10.0.{n}.{m}"} for m in range(16)], priority=n)
         for n in range(17)],
    ):  # fmt: skip
        with pytest.raises(KvError):
            table.replace(bad)
    (entry,) = table
    assert entry.name == "one"
    assert table.counters(entry) == (1, 3, 0)
    assert table.match(request(), 4) is entry
    assert len(table._ledger.hits) - 1 - len(table._ledger._free) == 1


def test_a_rule_of_the_file_cannot_be_removed_by_itself() -> None:
    table = Table()
    table.replace([rule(tenant="acme", user="a", bind=[{"protocol": "tcp"}])])
    for entry in table:
        with pytest.raises(RuleError, match="replace the file's rules"):
            table.remove(entry)
