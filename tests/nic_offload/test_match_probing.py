"""The table skips maps that can't match a request, and never one that can."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nic_offload.match_action import Entry, Table
from nic_offload.match_probing import CHOICES_MAX, NETWORKS_MAX, Selector
from nic_offload.match_space import NETWORKS_PER_MASK_MAX, SOURCE, TENANT, USER
from tests.nic_offload.matching import BASE, Fields, Written, expected, request, rule


def _prefix(dice: random.Random, length: int) -> str:
    bits = dice.getrandbits(32) >> (32 - length) << (32 - length)
    return f"{bits >> 24}.{bits >> 16 & 255}.{bits >> 8 & 255}.{bits & 255}/{length}"


def _wildcards(dice: random.Random, lengths: list[int], each: int) -> list[Written]:
    """Rules with a source prefix, and some of the other fields, at priorities of their own."""
    written: dict[str, Written] = {}
    for length in lengths:
        for _ in range(each):
            fields: Fields = {"source": _prefix(dice, length)}
            if dice.random() < 0.5:
                fields["tenant"] = dice.choice(["acme", "other"])
            written[str(fields)] = (fields, 1_000 + length)
    return list(written.values())


def _with_wildcards(dice: random.Random, lengths: range) -> Table:
    """A table with ten such rules of each length, as those of a file."""
    table = Table()
    written = _wildcards(dice, list(lengths), 10)
    table.replace([rule(priority=priority, **fields) for fields, priority in written])
    return table


def _steps(table: Table, **asked: Any) -> int:
    """The number of maps in which a request is looked up."""
    return sum(len(stage.probes_for(request(**asked)).steps) for stage in table._probing.stages)


def _selectors(table: Table) -> dict[int, Selector]:
    return {one.field: one for stage in table._probing.stages for one in stage.selectors}


def _asked(dice: random.Random, written: list[Written]) -> list[Fields]:
    """Requests from the rules' own networks, from neighbouring ones, and from anywhere."""
    asked = []
    for fields, _ in dice.sample(written, min(len(written), 150)):
        base = fields.get("source", "9.9.9.9/32").split("/")[0]
        if ":" not in base:
            head = base.rsplit(".", dice.choice([1, 2]))[0]
            base = ".".join((head + ".1.1").split(".")[:4])
        asked.append({"source": base, "tenant": dice.choice(["acme", "other"])})
    asked += [{"source": _prefix(dice, 32).split("/")[0]} for _ in range(100)]
    return [*asked, {"source": "2001:db8::7"}, {"source": "::ffff:10.1.2.3"}, {"source": "0.0.0.0"}]


def _check(table: Table, filed: list[Written], added: list[Written], dice: random.Random) -> None:
    """Each request hits the entry that a linear search finds."""
    rules = filed + added
    for asked in _asked(dice, rules):
        found = table.match(request(**asked), 1)
        best = expected(filed, added, BASE | asked)
        if best is None:
            assert found is None, asked
            continue
        fields, priority = rules[int(best)]
        wanted = rule(priority=priority, **fields)
        assert found is not None, asked
        assert (found.pattern, found.priority) == (wanted.pattern, wanted.priority), asked


def test_few_of_many_masks_are_probed_and_the_winner_is_that_of_a_linear_search() -> None:
    dice = random.Random(1)
    written = _wildcards(dice, list(range(9, 25)), 30)
    table = Table()
    table.replace([rule(priority=priority, **fields) for fields, priority in written])
    masks = table.statistics().masks
    assert masks == 32
    probed = [_steps(table, source=asked["source"]) for asked in _asked(dice, written)]
    assert sum(probed) / len(probed) < masks / 3
    _check(table, written, [], dice)


def test_entries_added_and_removed_one_by_one_are_found_in_their_networks() -> None:
    dice = random.Random(2)
    filed = _wildcards(dice, [10, 12, 16, 20], 20)
    table = Table()
    table.replace([rule(priority=priority, **fields) for fields, priority in filed])
    waiting = [one for one in _wildcards(dice, [9, 12, 14, 16, 20, 24, 32], 25) if one not in filed]
    dice.shuffle(waiting)
    added: list[Written] = []
    entries: list[Entry] = []
    for turn, (fields, priority) in enumerate(waiting):
        entries.append(table.add(rule(priority=priority, **fields)))
        added.append((fields, priority))
        if turn % 4 == 3:
            gone = dice.randrange(len(added))
            table.remove(entries.pop(gone))
            added.pop(gone)
        if turn % 40 == 39:
            _check(table, filed, added, dice)
    assert SOURCE in _selectors(table)
    _check(table, filed, added, dice)


def test_an_added_entry_is_found_in_a_network_that_no_other_entry_has() -> None:
    dice = random.Random(3)
    table = _with_wildcards(dice, range(12, 24))
    known = table.add(rule(priority=5, name="first", source="203.0.112.0/20", model="llama"))
    before = table._probing
    entry = table.add(rule(priority=5, name="second", source="198.51.96.0/20", model="llama"))
    assert table._probing is before  # one network more, and no new arrangement
    assert table.match(request(source="198.51.97.1"), 1) is entry
    assert table.match(request(source="203.0.113.1"), 1) is known


@pytest.mark.parametrize("source", ["2001:db8::/32", "::ffff:0:0/96", "64:ff9b::/96", "::8/125", "::/0"])
@pytest.mark.parametrize("first", ["10.0.0.0/29", "ffff:ff00::/24", "::1:0:0/96"])
def test_ipv6_sources_are_found_alongside_ipv4_ones(source: str, first: str) -> None:
    dice = random.Random(4)
    table = _with_wildcards(dice, range(12, 30))
    table.add(rule(priority=9_000, source=first))
    entry = table.add(rule(priority=9_000, source=source))
    inside = source.split("/", maxsplit=1)[0].replace("::ffff:0:0", "10.9.8.7")
    assert table.match(request(source=inside), 1) is entry


def test_a_mask_with_too_many_networks_is_always_probed_and_still_correct() -> None:
    table = Table()
    rules = [rule(priority=length, source=f"10.200.0.0/{length}") for length in range(20, 30)]
    first = len(rules)
    rules += [
        rule(priority=7, source=f"{number >> 8}.{number & 255}.0.0/16")
        for number in range(NETWORKS_PER_MASK_MAX + 1)
    ]
    entries = [table.add(one) for one in rules]
    assert table.match(request(source="0.3.1.1"), 1) is entries[first + 3]
    assert table.match(request(source="4.0.1.1"), 1) is entries[-1]
    assert table.match(request(source="10.200.0.1"), 1) is entries[first - 1]
    assert _steps(table, source="99.9.9.9") == 1, "that mask, also for a network without entries"
    for entry in entries:
        table.remove(entry)
    assert table.statistics() == (0, 0, 0, 0)


def test_the_networks_of_all_masks_together_are_bounded() -> None:
    table = Table()
    rules = []
    for length in range(16, 33):
        for number in range(NETWORKS_PER_MASK_MAX):
            host = (17 * number + length - 16) << 16 | (1 << (32 - length) if length < 32 else 1) & 0xFFFF
            source = f"{host >> 24}.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}"
            rules.append(rule(priority=length, source=f"{source}/{length}"))
    table.replace(rules)
    assert 0 < len(_selectors(table)[SOURCE].near) <= NETWORKS_MAX
    assert table.match(request(source="0.170.0.1"), 1) is not None
    assert _steps(table, source="0.170.0.1") == 2, "a mask that is too many for the bound, too"


def test_a_plain_mask_below_wildcards_and_one_without_a_source_are_always_probed() -> None:
    dice = random.Random(6)
    table = _with_wildcards(dice, range(12, 24))
    exact = table.add(rule(priority=3, tenant="acme", user="alice", context="chat-1"))
    ported = table.add(rule(priority=4, destination_port="1-442", user="bob"))
    far = request(source="203.0.113.9")
    assert table.match(far, 1) is exact
    table.add(rule(priority=2, source="198.51.96.0/20", model="llama"))
    assert table.match(request(source="198.51.97.1"), 1) is exact, "in a network that entries have, too"
    assert table.match(request(source="203.0.113.9", user="bob", destination_port=80), 1) is ported


def test_behind_one_proxy_a_request_is_looked_up_in_its_tenants_maps_only() -> None:
    """All requests come from one network, for which each mask has entries: of other tenants."""
    dice = random.Random(6)
    written: list[Written] = [
        ({"tenant": f"t{number}", "source": f"10.0.0.0/{8 + number % 16}"}, 1_000 + number % 16)
        for number in range(64)
    ]
    table = Table()
    table.replace([rule(priority=priority, **fields) for fields, priority in written])
    assert TENANT in _selectors(table)
    added: list[Written] = []
    entries: list[Entry] = []
    for turn in range(120):
        fields: Fields = {"tenant": f"t{dice.randrange(90)}", "source": f"10.0.0.0/{9 + turn % 15}"}
        if (fields, 7_000) not in added:
            entries.append(table.add(rule(priority=7_000, **fields)))
            added.append((fields, 7_000))
        if turn % 3 == 2:
            gone = dice.randrange(len(added))
            table.remove(entries.pop(gone))
            added.pop(gone)
        for number in range(0, 92, 5):
            asked: Fields = {"tenant": f"t{number}", "source": f"10.0.{dice.randrange(256)}.7"}
            found, best = table.match(request(**asked), 1), expected(written, added, BASE | asked)
            wanted = None if best is None else (written + added)[int(best)]
            got = None if found is None else (found.pattern.tenant, found.priority)
            assert got == (None if wanted is None else (wanted[0]["tenant"], wanted[1])), asked
            shown = table.explain(request(**asked))
            assert (shown[0].entry if shown else None) is found
    assert _steps(table, tenant="nobody", source="10.0.3.7") == 0
    assert max(_steps(table, tenant=f"t{number}", source="10.0.3.7") for number in range(90)) < 12


def test_a_mask_with_too_many_tenants_is_always_probed_and_still_correct() -> None:
    table = Table()
    for number in range(NETWORKS_PER_MASK_MAX + 2):
        table.add(rule(priority=5, tenant=f"t{number}", source="10.0.0.0/8"))
    entry = table.add(rule(priority=5, tenant="last", source="10.0.0.0/8"))
    assert table.match(request(tenant="last"), 1) is entry
    assert [space.tenants for space in table._added.spaces.values()] == [None]


def test_of_one_tenant_behind_one_proxy_a_request_is_looked_up_in_its_users_maps_only() -> None:
    """Each mask has entries for the network and the tenant of all requests, and for other users."""
    table = Table()
    masks = range(9, 25)
    rules = [
        rule(priority=1_000 + length, tenant="acme", user=f"u{user}", source=f"10.0.0.0/{length}")
        for length in masks
        for user in range(length)
    ]
    table.replace(rules[::2])
    for one in rules[1::2]:
        table.add(one)
    exact = table.add(rule(priority=5, tenant="acme", user="alice", context="chat-1"))
    assert table.match(request(source="10.0.0.9"), 1) is exact
    assert _steps(table, source="10.0.0.9") == 1, "the exact entry's map alone"
    for user in range(26):
        found = table.match(request(user=f"u{user}", source="10.0.0.9"), 1)
        best = max((length for length in masks if user < length), default=None)
        assert (found and found.priority) == (best and 1_000 + best), user
    assert USER in _selectors(table)


def test_the_kept_choices_of_maps_are_bounded() -> None:
    table = Table()
    dice = random.Random(8)
    for number in range(1_000):
        table.add(rule(priority=number, tenant=f"t{number}", source=f"10.0.0.0/{9 + number % 16}"))
        for length in dice.sample(range(9, 25), 6):
            table.add(
                rule(priority=2_000, name=f"{number}", tenant=f"t{number}", source=f"10.0.0.0/{length}")
            )
    (stage,) = table._probing.stages
    for number in range(4 * CHOICES_MAX):
        found = table.match(request(tenant=f"t{number % 1_000}", source="10.0.0.9"), 1)
        assert found is not None
        assert found.priority == 2_000
        stage.probes(1 << 20 | number)
        assert len(stage.made) <= CHOICES_MAX
