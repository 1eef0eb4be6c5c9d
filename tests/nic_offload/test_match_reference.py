"""The table against the obvious linear search, over rules, requests and changes that hypothesis makes up."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nic_offload.errors import KvError
from nic_offload.match_action import Entry, Outcome, Table
from nic_offload.match_fields import FIELDS
from tests.nic_offload.matching import Fields, Written, expected, request, rule

# Few values, so that rules meet, with the edges among them.
_TEXTS = st.sampled_from(["a", "b"])
_ADDRESSES = st.sampled_from(["0.0.0.0", "10.0.0.0", "10.0.0.1", "255.255.255.255", "::", "2001:db8::1"])
_NETWORKS = st.sampled_from(
    [
        "0.0.0.0/0",
        "10.0.0.0/8",
        "10.0.0.0/31",
        "10.0.0.1/32",
        "128.0.0.0/1",
        "::/0",
        "2001:db8::/32",
        "::/128",
        "0.0.0.1&0.0.0.1",  # odd hosts
        "10.0.0.1&255.0.0.1",
        "10.0.0.0&255.0.0.0",  # a prefix, in other words
        "0.0.0.0&0.0.0.0",
        "::1&::1",
        "2001::&ffff::1",
    ]
)
_PORTS = st.sampled_from([0, 1, 15, 16, 17, 4095, 65535])
_RANGES = st.one_of(
    _PORTS,
    st.sampled_from(["0-65535", "0-15", "0-16", "1-15", "16-31", "4095-4096", "1-65535", "65535-65535"]),
    st.sampled_from(["1&1", "0&0x0f", "16&0xfff0", "15&0xfffd", "0&0", "65535&0xffff"]),
)
_PROTOCOLS = st.sampled_from(["tcp", "udp"])
_PROTOCOLS_TAKEN = st.one_of(_PROTOCOLS, st.sampled_from(["16&0xfe", "6&0xff", "1&1", "0&0"]))

_FIVE: dict[str, Any] = {
    "source": _NETWORKS,
    "destination": _NETWORKS,
    "source_port": _RANGES,
    "destination_port": _RANGES,
    "protocol": _PROTOCOLS_TAKEN,
}
_NAMES: dict[str, Any] = dict.fromkeys(("tenant", "user", "context", "model"), _TEXTS)


def _some(fields: dict[str, Any]) -> st.SearchStrategy[Fields]:
    return st.fixed_dictionaries({}, optional=fields)


_FREE = _some(_NAMES | _FIVE)
_BINDINGS = st.lists(_some(_FIVE).filter(lambda five: any(_narrows(five))), min_size=1, max_size=2)
_BOUND = st.fixed_dictionaries(
    {"tenant": _TEXTS, "user": _TEXTS, "bind": _BINDINGS}, optional={"context": _TEXTS, "model": _TEXTS}
)
_WRITTEN = st.tuples(st.one_of(_FREE, _FREE, _BOUND), st.integers(0, 2))
_REQUESTS = st.fixed_dictionaries(
    _NAMES
    | {"source": _ADDRESSES, "destination": _ADDRESSES}
    | {"source_port": _PORTS, "destination_port": _PORTS, "protocol": _PROTOCOLS}
)
_ASKED = st.lists(_REQUESTS, min_size=1, max_size=8)

assert set(_NAMES | _FIVE) == set(FIELDS)


def _narrows(five: Fields) -> list[bool]:
    """A binding to all ports or protocols alone binds to nothing, and is refused."""
    return [value not in {"0-65535", "0&0"} for value in five.values()]


def _take(table: Table, written: list[Written], one: Written) -> Entry | None:
    """Add a rule if the table takes it; a twin is refused."""
    try:
        entry = table.add(rule(priority=one[1], **one[0]))
    except KvError:
        return None
    written.append(one)
    return entry


def _found(table: Table, places: dict[int, int], ours: Fields) -> int | str | None:
    entry = table.match(request(**ours), 1)
    if entry is None:
        return None
    if entry.is_guard:
        return "guard"
    return places[id(entry)]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_WRITTEN, max_size=12), st.lists(_WRITTEN, max_size=12), st.lists(st.integers(0, 11)), _ASKED)
def test_the_table_agrees_with_a_linear_search(
    filing: list[Written], adding: list[Written], removing: list[int], asked: list[Fields]
) -> None:
    scratch = Table()
    filed: list[Written] = []
    for one in filing:
        _take(scratch, filed, one)

    table = Table()
    added: list[Written] = []
    entries: list[Entry] = []
    for one in adding:
        entry = _take(table, added, one)
        if entry is not None:
            entries.append(entry)
    table.replace([rule(priority=priority, **fields) for fields, priority in filed])
    for place in removing:
        if place < len(entries):
            table.remove(entries.pop(place))
            added.pop(place)

    ordered = [entry for entry in sorted(table, key=lambda entry: entry.age) if not entry.is_guard]
    places = {id(entry): place for place, entry in enumerate(ordered)}
    for ours in asked:
        found = _found(table, places, ours)
        assert found == expected(filed, added, ours)
        explained = table.explain(request(**ours))
        won = [item.entry for item in explained if item.outcome is Outcome.WON]
        assert won == ([] if found is None else [table.match(request(**ours), 2)])


@settings(max_examples=100, deadline=None)
@given(st.lists(_WRITTEN, max_size=10), st.lists(st.integers(0, 9), max_size=10))
def test_removing_everything_added_leaves_nothing(rules: list[Written], order: list[int]) -> None:
    table = Table()
    entries = [entry for one in rules if (entry := _take(table, [], one)) is not None]
    for place in order:
        if place < len(entries):
            table.remove(entries.pop(place))
    for entry in entries:
        table.remove(entry)
    assert table.statistics() == (0, 0, 0, 0)
    assert list(table) == []
    rows = table._ledger
    assert sorted(rows._free) == list(range(1, len(rows.hits)))


@settings(max_examples=60, deadline=None)
@given(st.lists(_WRITTEN, max_size=8), st.lists(_WRITTEN, max_size=8))
def test_replacing_keeps_every_row_in_one_place(first: list[Written], second: list[Written]) -> None:
    table = Table()
    for filing in (first, second, first):
        taken: list[Written] = []
        for one in filing:
            _take(Table() if not taken else _scratch(taken), taken, one)
        table.replace([rule(priority=priority, **fields) for fields, priority in taken])
        rows = [entry.row for entry in table]
        assert len(set(rows)) == len(rows)
        assert sorted(rows + table._ledger._free) == list(range(1, len(table._ledger.hits)))


def _scratch(taken: list[Written]) -> Table:
    table = Table()
    for fields, priority in taken:
        table.add(rule(priority=priority, **fields))
    return table
