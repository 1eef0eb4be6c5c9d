"""The match-action table: which entry wins, which requests are denied, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from nic_offload.errors import KvError, RuleError, TableFull
from nic_offload.match_action import Action, ActionKind, Entry, Outcome, Rule, Table, perform
from nic_offload.match_fields import SPECIFICITY_BITS, Pattern
from nic_offload.match_space import ENTRIES_PER_KEY_MAX
from tests.nic_offload.matching import COUNT, DENY, FETCH, Recorder, hit, request, rule, table_of


def test_an_exact_entry_is_hit() -> None:
    table = table_of(rule(name="x", tenant="acme", user="alice", context="chat-1", model="llama"))
    assert hit(table, request()) == "x"


@pytest.mark.parametrize("changed", ["tenant", "user", "context", "model"])
def test_another_value_in_any_field_is_a_miss(changed: str) -> None:
    table = table_of(rule(tenant="acme", user="alice", context="chat-1", model="llama"))
    assert hit(table, request(**{changed: "other"})) is None


def test_a_fully_given_five_tuple_is_matched_field_by_field() -> None:
    five: dict[str, Any] = {
        "source": "10.1.2.3",
        "destination": "10.9.0.1",
        "source_port": 40000,
        "destination_port": 443,
        "protocol": 6,
    }
    table = table_of(rule(name="x", tenant="acme", user="alice", context="chat-1", **five))
    assert hit(table, request()) == "x"
    others = {
        "source": "10.1.2.4",
        "destination": "10.9.0.2",
        "source_port": 1,
        "destination_port": 2,
        "protocol": 17,
    }
    for name, value in others.items():
        assert hit(table, request(**{name: value})) is None, name


def test_an_empty_table_and_an_empty_rule() -> None:
    assert hit(Table(), request()) is None
    assert hit(table_of(rule(name="any")), request()) == "any"


def test_two_contexts_of_one_user_are_two_entries() -> None:
    table = table_of(
        rule(name="one", tenant="acme", user="alice", context="chat-1"),
        rule(name="two", tenant="acme", user="alice", context="chat-2"),
    )
    assert hit(table, request()) == "one"
    assert hit(table, request(context="chat-2")) == "two"
    assert hit(table, request(context="chat-3")) is None


def test_priority_beats_specificity_whatever_the_order_of_adding() -> None:
    wide = rule(DENY, name="wide", priority=200, source="10.0.0.0/8")
    exact = rule(name="exact", priority=199, tenant="acme", user="alice", context="chat-1", model="llama")
    assert hit(table_of(wide, exact), request()) == "wide"
    assert hit(table_of(exact, wide), request()) == "wide"


def test_with_equal_priorities_the_more_specific_entry_wins() -> None:
    ladder: list[dict[str, Any]] = [
        {},
        {"source_port": "1-65535"},
        {"source_port": "40000-40001"},
        {"source": "0.0.0.0/0"},
        {"source": "10.0.0.0/8"},
        {"source": "10.0.0.0/8", "source_port": 40000},
        {"source": "10.1.0.0/16"},
        {"source": "10.1.2.3"},
        {"protocol": "tcp"},
        {"model": "llama"},
        {"model": "llama", "tenant": "acme"},
    ]
    rules = [rule(name=str(place), **fields) for place, fields in enumerate(ladder)]
    for top in range(len(ladder)):
        assert hit(table_of(*rules[: top + 1]), request()) == str(top)
        assert hit(table_of(*reversed(rules[: top + 1])), request()) == str(top)


def test_of_equally_specific_ones_the_older_wins_also_across_masks() -> None:
    source, destination = (
        rule(name="s", source="10.0.0.0/8"),
        rule(name="d", destination="10.0.0.0/8"),
    )
    assert hit(table_of(source, destination), request()) == "s"
    assert hit(table_of(destination, source), request()) == "d"


@pytest.mark.parametrize(
    ("young", "old"),
    [
        ({"source": "10.0.0.0/8"}, {"destination": "10.0.0.0/8"}),  # both need a shift
        ({"tenant": "acme"}, {"user": "alice"}),  # neither does
        (
            {"source": "10.1.2.3/32"},
            {"source": "10.0.0.0/8", "destination": "10.9.0.0/23"},
        ),  # 33 = 9 + 24 bits
    ],
)
def test_the_older_wins_even_if_the_younger_ones_map_is_probed_first(
    young: dict[str, Any], old: dict[str, Any]
) -> None:
    table = table_of(rule(name="first of its mask", priority=1, **young), rule(name="old", **old))
    table.add(rule(name="young", **young))
    assert hit(table, request()) == "old"


def test_a_rule_of_the_file_is_older_than_an_added_one() -> None:
    table = table_of(rule(name="added", source="10.0.0.0/8"))
    table.replace([rule(name="filed", destination="10.0.0.0/8")])
    assert hit(table, request()) == "filed"


def test_a_rule_added_above_all_others_takes_effect_at_once() -> None:
    table = table_of(
        rule(name="low", priority=1, source="10.0.0.0/8"), rule(name="mid", priority=5, tenant="acme")
    )
    table.add(rule(name="high", priority=9, source="10.0.0.0/8"))
    assert hit(table, request()) == "high"


def test_removing_an_entry_exposes_the_next_best_and_leaves_no_mask_behind() -> None:
    table = table_of(rule(name="low", priority=1, tenant="acme"))
    high = table.add(rule(name="high", priority=9, source="10.0.0.0/8"))
    assert hit(table, request()) == "high"
    table.remove(high)
    assert hit(table, request()) == "low"
    assert table.statistics()._asdict() == {"entries": 1, "entries_of_file": 0, "guards": 0, "masks": 1}
    with pytest.raises(RuleError, match="was not added at run time"):
        table.remove(high)


def test_the_bound_of_a_mask_follows_the_entries_that_leave_it() -> None:
    table = table_of(
        rule(name="keep", priority=1, source="10.0.0.0/8"), rule(name="mid", priority=5, tenant="acme")
    )
    table.remove(table.add(rule(name="high", priority=9, source="11.0.0.0/8")))
    assert [
        bound >> SPECIFICITY_BITS for stage in table._probing.stages for bound, *_ in stage.probes(-1).steps
    ] == [5, 1]
    assert hit(table, request()) == "mid"


def test_plans_are_shared_and_end_with_their_last_user() -> None:
    table = Table()
    entries = [table.add(rule(tenant="acme", user=str(number))) for number in range(3)]
    assert len({id(entry.plan) for entry in entries}) == 1
    (space,) = table._added.spaces.values()
    table.add(rule(tenant="acme", user="stays"))
    other = table.add(rule(COUNT, tenant="acme", user="other"))
    assert len(space.plans) == 2
    table.remove(other)
    assert len(space.plans) == 1


def test_actions_go_to_the_requester_in_order_with_the_handle_of_the_user() -> None:
    recorder = Recorder()
    route = Action(ActionKind.ROUTE, "node-2")
    entry = table_of(rule(route, COUNT, FETCH, tenant="acme")).match(request(user="a/b"), 1)
    assert entry is not None
    assert perform(entry, request(user="a/b"), recorder)
    own = table_of(rule(FETCH, tenant="acme", user="alice", sessions="h-1")).match(request(), 1)
    assert own is not None
    assert perform(own, request(), recorder)
    assert recorder.begun == [("route(node-2)", "acme/a%2Fb"), ("fetch", "acme/a%2Fb"), ("fetch", "h-1")]


def test_two_users_never_share_a_generated_handle() -> None:
    entry = table_of(rule()).match(request(), 1)
    assert entry is not None
    asked = [("a", "b/c"), ("a/b", "c"), ("a%2Fb", "c"), ("a", "b%2Fc")]
    handles = {entry.sessions_of(request(tenant=tenant, user=user)) for tenant, user in asked}
    assert len(handles) == len(asked)


def test_counters_count_hits_the_last_one_and_bytes() -> None:
    table = Table()
    entry = table.add(rule(tenant="acme"))
    assert table.counters(entry) == (0, 0, 0)
    table.match(request(), 5)
    table.match(request(), 9)
    table.match(request(tenant="other"), 11)
    table.explain(request())
    table.add_bytes(entry, 4096)
    table.add_bytes(entry, 1)
    assert table.counters(entry) == (2, 9, 4097)


def test_a_removed_entry_counts_nothing() -> None:
    table = Table()
    old = table.add(rule(tenant="acme"))
    table.match(request(), 5)
    table.remove(old)
    new = table.add(rule(tenant="beta"))
    table.add_bytes(old, 100)  # a transfer that ends late
    assert table.counters(old) == (0, 0, 0)
    assert table.counters(new) == (0, 0, 0)


def test_a_batch_beyond_a_bound_is_refused_as_a_whole() -> None:
    table = Table(entries_max=2, masks_max=2)
    table.add(rule(tenant="acme"))
    table.add(rule(name="x", user="alice"))
    with pytest.raises(TableFull, match="3 entries; at most 2"):
        table.add(rule(tenant="beta"))
    with pytest.raises(TableFull, match="3 entries"):
        table.replace([rule(tenant="beta")])
    table.remove(next(entry for entry in table if entry.name == "x"))
    bound = rule(tenant="acme", user="b", bind=[{"source": "10.0.0.0/8"}])
    with pytest.raises(TableFull, match="3 combinations"):  # its own mask and its guard's
        table.add(bound)
    assert table.statistics()._asdict() == {"entries": 1, "entries_of_file": 0, "guards": 0, "masks": 1}
    assert hit(table, request(user="b", source="11.0.0.1")) == "tenant=acme"


def test_entries_behind_one_key_are_bounded() -> None:
    table = Table()
    for low in range(ENTRIES_PER_KEY_MAX):
        table.add(rule(source_port=f"{low + 1}-65535"))
    with pytest.raises(TableFull, match="merge some of their ranges"):
        table.add(rule(source_port="1000-65535"))
    assert len(table) == ENTRIES_PER_KEY_MAX
    assert hit(table, request(source_port=100)) == "source_port=100-65535"


def test_a_duplicate_is_refused_with_the_name_of_the_other() -> None:
    table = table_of(rule(name="one", tenant="acme", source_port="5-9"))
    with pytest.raises(RuleError, match="Rule 'two' has the same match and priority as 'one'"):
        table.add(rule(DENY, name="two", tenant="acme", source_port="5-9"))
    table.add(rule(DENY, name="two", priority=101, tenant="acme", source_port="5-9"))
    assert hit(table, request(source_port=5)) == "two"


@pytest.mark.parametrize(
    ("actions", "fields", "message"),
    [
        ((DENY, FETCH), {}, "deny must be last"),
        ((FETCH, DENY), {}, "deny must be last"),
        ((FETCH, FETCH), {}, "each action once"),
        ((Action(ActionKind.ROUTE),), {}, "route takes a node"),
        ((Action(ActionKind.STORE, "node"),), {}, "route takes a node"),
        ((), {"priority": 65536}, "from 0 to 65535, not 65536"),
        ((), {"priority": -1}, "from 0 to 65535, not -1"),
        ((), {"sessions": "h", "tenant": "a"}, "sessions belongs to one user"),
        ((), {"bind": [{"source": "10.0.0.1"}], "user": "a"}, "bind belongs to one user"),
        ((), {"bind": [{}], "tenant": "t", "user": "a"}, "at least one field"),
        (
            (),
            {"bind": [{"protocol": 6}], "tenant": "t", "user": "a", "source": "10.0.0.1"},
            "only be in the bindings",
        ),
    ],
)
def test_a_rule_that_can_never_match_is_refused(
    actions: tuple[Action, ...], fields: dict[str, object], message: str
) -> None:
    with pytest.raises(RuleError, match=message):
        rule(*actions, **fields)  # type: ignore[arg-type]


def test_a_rule_without_actions_is_refused() -> None:
    with pytest.raises(KvError, match="takes 1 to 8"):
        Rule(Pattern(), ())


def test_explain_names_each_candidate_and_why_it_lost() -> None:
    table = table_of(
        rule(name="wins", priority=200, tenant="acme"),
        rule(name="low", priority=5, user="alice"),
        rule(name="wide", priority=200),
        rule(name="young", priority=200, model="llama"),
        rule(name="ports", source_port="50000-60000"),
        rule(name="far", priority=300, tenant="acme", user="alice", bind=[{"source": "10.8.0.0/16"}]),
        rule(name="near", priority=1, tenant="acme", user="alice", bind=[{"source": "10.1.0.0/16"}]),
        rule(name="unrelated", tenant="other"),
    )
    outcomes = {item.entry.name: item.outcome for item in table.explain(request())}
    assert next(iter(outcomes)) == "wins"
    assert outcomes == {
        "wins": Outcome.WON,
        "low": Outcome.LOWER_PRIORITY,
        "near": Outcome.LOWER_PRIORITY,
        "wide": Outcome.LESS_SPECIFIC,
        "young": Outcome.YOUNGER,
        "ports": Outcome.OUTSIDE,
        "far": Outcome.NOT_BOUND_HERE,
        "guard of acme/alice": Outcome.PASSED,
    }


def test_an_entry_returns_the_pattern_it_was_made_of() -> None:
    patterns: list[dict[str, Any]] = [
        {},
        {"model": "m"},
        {
            "tenant": "t",
            "user": "u",
            "source": "10.0.0.0/8",
            "destination": "2001:db8::/33",
            "protocol": "icmp",
        },
        {"source_port": "16-31", "destination_port": 0},
        {"source_port": "16-33", "source": "::/0"},
        {"tenant": "t", "user": "u", "bind": [{"source": "0.0.0.0/0", "source_port": "1-2"}]},
    ]
    for fields in patterns:
        one = rule(**fields)
        entry: Entry = Table().add(one)
        assert entry.pattern == one.pattern
