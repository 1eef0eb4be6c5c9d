"""A user bound to 5-tuples is accepted only from there; a request in their name from elsewhere is denied."""

from __future__ import annotations

from typing import Any

from nic_offload.match_action import Table, perform
from tests.nic_offload.matching import COUNT, DENY, Recorder, hit, request, rule, table_of

SPOOF: dict[str, Any] = {"tenant": "acme", "user": "alice", "context": "chat-1"}


def test_a_user_spoofed_from_anothers_five_tuple_is_denied_and_others_are_not() -> None:
    table = table_of(
        rule(name="alice", **SPOOF, bind=[{"source": "10.1.2.3", "source_port": 40000, "protocol": "tcp"}]),
        rule(name="mallory", tenant="acme", user="mallory", bind=[{"source": "10.6.6.6"}]),
        rule(name="acme", priority=65535, tenant="acme"),
    )
    assert hit(table, request(context="chat-2")) == "acme"
    assert hit(table, request(user="bob", source="10.6.6.6")) == "acme"
    for spoofed in ({"source": "10.6.6.6"}, {"source_port": 40001}, {"protocol": "udp"}):
        for context in ("chat-1", "chat-2"):  # nor through a context that no entry names
            entry = table.match(request(context=context, **spoofed), 7)
            assert entry is not None
            assert entry.is_guard
            assert entry.actions == (DENY,)
            assert not perform(entry, request(), Recorder())
    guard = table.match(request(source="10.6.6.6"), 8)
    assert guard is not None
    assert guard.name == "guard of acme/alice"
    assert table.counters(guard) == (7, 8, 0)


def test_a_bound_entry_is_hit_from_each_of_its_places() -> None:
    table = table_of(rule(name="x", **SPOOF, bind=[{"source": "10.1.0.0/16"}, {"source": "2001:db8::/32"}]))
    assert hit(table, request()) == "x"
    assert hit(table, request(source="2001:db8::5")) == "x"
    assert hit(table, request(source="10.2.0.0")) == "guard of acme/alice"
    assert hit(table, request(source="::ffff:10.1.0.1")) == "x"


def test_a_written_deny_rule_catches_a_spoofed_context_of_the_same_user() -> None:
    table = table_of(
        rule(name="one", **SPOOF, bind=[{"source": "10.1.0.0/16"}]),
        rule(name="two", tenant="acme", user="alice", context="chat-2", bind=[{"source": "10.2.0.0/16"}]),
        rule(COUNT, DENY, name="no", priority=1, tenant="acme", user="alice"),
    )
    assert hit(table, request()) == "one"
    assert hit(table, request(context="chat-2", source="10.2.0.1")) == "two"
    assert hit(table, request(context="chat-2")) == "no"  # their place, but not this context's
    assert hit(table, request(source="10.3.0.1")) == "guard of acme/alice"


def test_an_added_binding_narrows_the_files_bindings_and_cannot_widen_them() -> None:
    table = Table()
    table.replace([rule(name="filed", **SPOOF, bind=[{"source": "10.1.0.0/16"}])])
    table.add(rule(name="wider", priority=300, **SPOOF, bind=[{"source": "0.0.0.0/0"}]))
    assert hit(table, request(source="10.2.0.1")) == "guard of acme/alice"
    assert hit(table, request()) == "wider"
    table.add(rule(name="elsewhere", priority=301, tenant="beta", user="b", bind=[{"source": "10.2.0.0/16"}]))
    assert hit(table, request(tenant="beta", user="b")) == "guard of beta/b"


def test_of_two_guards_that_deny_the_files_counts() -> None:
    table = Table()
    table.add(rule(**SPOOF, bind=[{"source": "10.3.0.0/16"}]))
    table.replace([rule(**SPOOF, bind=[{"source": "10.4.0.0/16"}])])
    first = table.match(request(), 1)
    table.replace([rule(**SPOOF, bind=[{"source": "10.4.0.0/16"}]), rule(tenant="other")])
    second = table.match(request(), 2)
    assert first is not None
    assert second is not None
    assert second.age < next(entry.age for entry in table._added)
    assert table.counters(second) == (2, 2, 0)
    assert table.explain(request())[0].entry is second


def test_a_guard_is_removed_with_the_last_binding_of_its_user() -> None:
    table = Table()
    one = table.add(rule(**SPOOF, bind=[{"source": "10.1.0.0/16"}]))
    two = table.add(rule(tenant="acme", user="alice", model="m", bind=[{"source": "10.2.0.0/16"}]))
    assert hit(table, request(source="10.2.0.1")) is None
    table.remove(two)
    assert hit(table, request(source="10.2.0.1")) == "guard of acme/alice"
    table.remove(one)
    assert hit(table, request(source="10.2.0.1")) is None
    assert len(table) == table.statistics().masks == table.statistics().guards == 0
