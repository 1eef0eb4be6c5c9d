"""Requests that arrive: matched by the real table, fetched by the real requester, from a real node."""

from __future__ import annotations

import mmap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Arrivals, Block, Client, Nodes, Resumed
from kvstore.clock import SystemClock
from kvstore.errors import (
    Closed,
    InvalidArgument,
    NotRegistered,
)
from kvstore.limits import RESUME_BATCH_BLOCKS, RULES_COUNTED_MAX
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.steps import Step
from nic_offload.flags import FlagWords
from nic_offload.match_action import Action, ActionKind, Pattern, Request, Rule, Table
from nic_offload.match_file import parse_rules
from tests.nic_offload.rig import wait_until
from tests.node.in_process import HeldDrive, NodeInProcess
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

SIZE = 20_000
WAIT_S = 20.0
RULES = """
[[rule]]
name = "ada"
priority = 200
tenant = "acme"
user = "ada"
bind = [{ source = "10.1.0.0/16" }]
actions = ["prefetch"]

[[rule]]
name = "bob's brother sees bob's"
tenant = "acme"
user = "ben"
actions = ["fetch"]
sessions = "acme/bob"

[[rule]]
name = "counted"
tenant = "acme"
user = "carl"
actions = ["count"]

[[rule]]
name = "everybody of acme"
priority = 10
tenant = "acme"
actions = ["fetch", "store"]

[[rule]]
name = "others"
priority = 5
tenant = "zeta"
actions = ["fetch"]
"""


def key(user: str, number: int) -> bytes:
    return block_key(user.encode(), number.to_bytes(4))


def bytes_of(user: str, number: int) -> bytes:
    return (user[0].encode() + number.to_bytes(4)) * (SIZE // 5)


def request(user: str, context: str = "chat", *, tenant: str = "acme", source: str = "10.1.2.3") -> Request:
    fields: dict[str, Any] = {"tenant": tenant, "user": user, "context": context, "model": "m"}
    five = {"source": source, "destination": "10.9.9.9", "source_port": 40000, "destination_port": 443}
    return Request.parse({**fields, **five, "protocol": "tcp"})


class ArrivalsRig:
    """A compute node: rules, nodes, and registered memory for a number of blocks."""

    def __init__(self, target: str, blocks: int = 300) -> None:
        self.nodes = Nodes([target], tenant="acme")
        self.client = self.nodes.at(target)
        self.table = Table()
        self.table.replace(parse_rules(RULES))
        self.arrivals = Arrivals(self.nodes, self.table, tenant="acme")
        self.memory = mmap.mmap(-1, blocks * SIZE)
        self.memory[:] = b"\xdd" * len(self.memory)
        self.region = self.client.register(self.memory)

    def place(self, number: int, name: bytes) -> Block:
        return Block(name, self.region, number * SIZE, SIZE)

    def store(self, user: str, first: int, last: int, context: str = "chat") -> None:
        for number in range(first, last):
            self.client.put_inline(key(user, number), bytes_of(user, number))
        keys = [key(user, number) for number in range(first, last)]
        self.arrivals.session(user, context).append(keys, 16 * len(keys))

    def has(self, user: str, numbers: range) -> bool:
        expected = b"".join(bytes_of(user, number) for number in numbers)
        return self.memory[: len(numbers) * SIZE] == expected

    def close(self) -> None:
        self.arrivals.close()
        self.nodes.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "data") as node:
        yield node


@pytest.fixture
def rig(here: NodeInProcess) -> Iterator[ArrivalsRig]:
    rig = ArrivalsRig(here.target)
    yield rig
    rig.close()


def test_kv_prefetched_during_think_time_is_resumed_without_reading_the_drive(
    here: NodeInProcess, rig: ArrivalsRig
) -> None:
    """Nothing stalls if thinking takes longer than the fetch. The test waits for the prefetch, not for a clock."""
    count = RESUME_BATCH_BLOCKS + 20
    rig.store("ada", 0, count)
    rig.store("ada", 500, 503, context="another chat")
    typing = rig.arrivals.arrived(request("ada"))
    assert (typing.denied, typing.miss, typing.rule) == (False, None, "ada")
    assert typing.wait(WAIT_S)
    before = here.call(lambda node: node.hot.pages.statistics().found)
    back = rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S)
    assert back.whole() == Resumed(count, 16 * count, count, 16 * count, None)
    assert rig.has("ada", range(count))
    assert here.call(lambda node: node.hot.pages.statistics().found) - before >= count, "all of it was hot"
    chat = rig.arrivals.session("ada", "chat")
    seen = chat.trace().seen
    assert not [one for one in seen if one.step is Step.READ]
    prefetched = next(one for one in seen if one.step is Step.PREFETCHED)
    assert prefetched.blocks == count + 3, "all KV of the user, of whatever context"
    assert rig.arrivals.wait(back, WAIT_S)
    entry = next(one for one in rig.table if one.name == "ada")
    assert rig.table.counters(entry).moved_bytes == 2 * (count + 3) * SIZE
    assert rig.table.counters(entry).hits == 2


def test_without_a_prefetch_the_same_bytes_come_from_the_drive(rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 30)
    assert rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S).whole().is_whole
    assert rig.has("ada", range(30))
    chat = rig.arrivals.session("ada", "chat")
    chat.report()
    (read,) = [one for one in chat.trace().seen if one.step is Step.READ]
    assert (read.blocks, read.size_bytes) == (30, 30 * SIZE)


def test_a_request_that_arrives_during_the_prefetch_is_complete(rig: ArrivalsRig) -> None:
    """Blocks being prefetched count as requested, and must be requested again into memory."""
    rig.store("ada", 0, 200)
    for _ in range(3):
        rig.memory[:] = b"\xdd" * len(rig.memory)
        rig.arrivals.arrived(request("ada"))
        assert rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S).whole().is_whole
        assert rig.has("ada", range(200))


def test_a_spoofed_five_tuple_is_denied_and_the_node_is_not_asked(rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 3)
    calls = rig.client.calls
    for place in (None, rig.place):
        spoofed = rig.arrivals.arrived(request("ada", source="192.0.2.7"), place)
        assert spoofed.denied
        assert spoofed.rule == "guard of acme/ada"
        assert not spoofed.whole().is_whole
    foreign = rig.arrivals.arrived(request("eve", tenant="zeta"), rig.place)
    assert foreign.denied, "these nodes' clients act for acme"
    assert rig.client.calls == calls
    assert rig.memory[:] == b"\xdd" * len(rig.memory)


def test_an_unknown_user_is_a_miss_with_its_reason(rig: ArrivalsRig) -> None:
    nobody = rig.arrivals.arrived(request("dora"), rig.place, timeout_s=WAIT_S)
    assert nobody.whole().miss == Miss(MissReason.UNKNOWN, "The user 'dora' has no session 'chat'.")
    ahead = rig.arrivals.arrived(request("dora"))
    assert ahead.miss == Miss(MissReason.UNKNOWN, "This user is unknown.")
    nothing = rig.arrivals.arrived(request("eve", tenant="theta"))
    assert nothing.miss == Miss(MissReason.UNKNOWN, "No rule matches this request.")
    counted = rig.arrivals.arrived(request("carl"), rig.place)
    assert counted.miss is not None
    assert rig.arrivals.statistics().missed == 2


def test_another_process_learns_from_the_node_which_blocks_a_user_has(
    here: NodeInProcess, rig: ArrivalsRig
) -> None:
    rig.store("bob", 0, 5)
    rig.store("bob", 100, 102, context="second")
    other = ArrivalsRig(here.target)
    assert other.arrivals.known("bob") == ()
    assert other.arrivals.arrived(request("ben", "chat"), other.place, timeout_s=WAIT_S).whole().is_whole
    assert other.has("bob", range(5)), "the rule points to bob's KV"
    assert {one.key for one in other.arrivals.known("bob")} == {
        key("bob", number) for number in (*range(5), 100, 101)
    }
    looked_up = {one.key: one.generation for one in other.arrivals.known("bob")}
    other.arrivals.stored("bob", key("bob", 0), SIZE)
    newer = {one.key: one.generation for one in other.arrivals.known("bob")}
    assert newer[key("bob", 0)] > max(looked_up.values()), "a put is newer than a look-up before it"
    other.close()


def test_the_catalogue_follows_every_transfer(rig: ArrivalsRig) -> None:
    """N puts are N updates; a block that a get misses is removed; one that is put again is added again."""
    chat = rig.arrivals.session("ada", "chat")
    blocks = [rig.place(number, key("ada", number)) for number in range(4)]
    with FlagWords.create(1) as flags:
        puts = chat.arm(blocks, flags[0])
        assert rig.arrivals.known("ada") == (), "what is not acknowledged is not known"
        flags[0].store(1)
        assert all(result.error is None for result in puts.wait(WAIT_S))
        first = rig.arrivals.known("ada")
        assert {one.key for one in first} == {block.key for block in blocks}
        assert all(one.length == SIZE and one.node == rig.nodes.home("ada") for one in first)
        chat.append([block.key for block in blocks], 64)
        rig.client.delete([blocks[2].key])
        back = chat.resume(rig.place)
        assert (back.usable_blocks, back.miss is not None) == (2, True)
        assert {one.key for one in rig.arrivals.known("ada")} == {blocks[at].key for at in (0, 1, 3)}
        flags[0].store(0)
        again = chat.arm([blocks[2]], flags[0])
        flags[0].store(1)
        assert again.wait(WAIT_S)[0].error is None
        new = {one.key: one.generation for one in rig.arrivals.known("ada")}
        assert new[blocks[2].key] > max(one.generation for one in first)
        assert rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S).whole().is_whole
    chat.remove(delete_blocks=True)
    assert rig.arrivals.known("ada") == ()


def test_a_removed_block_makes_an_arrival_a_miss_with_the_usable_prefix(rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 10)
    assert rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S).whole().is_whole
    rig.client.delete([key("ada", 4)])
    back = rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S).whole()
    assert (back.usable_blocks, back.usable_tokens) == (4, 64)
    assert back.miss is not None
    assert back.miss.reason is MissReason.UNKNOWN
    again = rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S).whole()
    assert again.usable_blocks == 4, "the catalogue does not name it any more, and the session does"
    assert again.miss is not None
    assert again.miss.reason is MissReason.UNKNOWN


def test_a_block_that_occurs_twice_in_a_session_is_delivered_to_both_places(rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 2)
    chat = rig.arrivals.session("ada", "twice")
    chat.append([key("ada", number) for number in (0, 1, 0)], 48)
    assert rig.arrivals.arrived(request("ada", "twice"), rig.place, timeout_s=WAIT_S).whole().is_whole
    assert rig.memory[: 3 * SIZE] == b"".join(bytes_of("ada", number) for number in (0, 1, 0))
    with pytest.raises(InvalidArgument, match="Block 0 of the session"):
        rig.arrivals.arrived(request("ada", "twice"), lambda number, _: rig.place(number, bytes(32)))


def test_a_node_that_is_away_is_a_miss(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "data") as node:
        rig = ArrivalsRig(node.target)
        rig.store("ada", 0, 3)
        assert rig.arrivals.arrived(request("ada")).wait(WAIT_S)
    for _ in range(2):
        for place in (None, rig.place):
            away = rig.arrivals.arrived(request("ada"), place, timeout_s=2.0)
            assert away.wait(WAIT_S)
            back = away.whole()
            assert not back.is_whole
            assert back.usable_blocks == 0
    assert away.miss is not None
    assert away.miss.reason is MissReason.NODE_AWAY
    rig.close()


def test_a_replaced_arrival_ends_when_nothing_writes_into_its_memory_any_more(
    here: NodeInProcess, rig: ArrivalsRig
) -> None:
    rig.store("ada", 0, 5)
    drive = HeldDrive(here)
    first = rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S)
    wait_until(lambda: drive.waiting() == 5, "the drive has been asked")
    assert here.call(lambda node: node.pins.count) == 1, "no eviction takes a block of it meanwhile"
    second = rig.arrivals.arrived(
        request("ada"), lambda number, name: rig.place(number + 100, name), timeout_s=WAIT_S
    )
    came: list[Resumed] = []
    waiting = threading.Thread(target=lambda: came.append(first.whole()))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "its gets may still come"
    drive.release()
    assert second.whole().is_whole
    waiting.join(WAIT_S)
    assert came[0].is_whole
    assert rig.has("ada", range(5))
    assert rig.memory[100 * SIZE : 105 * SIZE] == rig.memory[: 5 * SIZE]
    assert here.call(lambda node: node.pins.count) == 0


def test_unregistered_memory_is_refused_and_nothing_hangs(rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 3)
    rig.region.close()
    with pytest.raises(NotRegistered, match="not registered"):
        rig.arrivals.arrived(request("ada"), rig.place)
    rig.arrivals.close()
    with pytest.raises(Closed, match="closed"):
        rig.arrivals.arrived(request("ada"))


def test_a_hanging_node_delays_no_other_nodes_users(here: NodeInProcess, node: NodeProcess) -> None:
    with Nodes([here.target, node.target], tenant="acme") as nodes:
        users = [f"user {number}" for number in range(50)]
        stuck = next(user for user in users if nodes.home(user) == node.target)
        well = next(user for user in users if nodes.home(user) == here.target)
        for user in (stuck, well):
            nodes.of(user).put_inline(key(user, 0), b"x" * SIZE)
            nodes.of(user).session(user, "chat").append([key(user, 0)], 16)
        table = Table()
        table.replace(parse_rules(RULES))
        with Arrivals(nodes, table, tenant="acme") as arrivals:
            stop(node.pid)
            region = nodes.of(well).register(memory := bytearray(SIZE))
            hanging = threading.Thread(target=lambda: arrivals.arrived(request(stuck)))
            hanging.start()
            begun_s = time.monotonic()
            back = arrivals.arrived(request(well), lambda _, name: Block(name, region, 0, SIZE)).whole()
            assert back.is_whole
            assert memory == b"x" * SIZE
            assert time.monotonic() - begun_s < 5.0
            assert hanging.is_alive(), "it waits for its own node"
            node.kill()
            hanging.join(WAIT_S)
            assert not hanging.is_alive()


def test_a_client_can_request_a_prefetch(rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 3)
    read = rig.client.prefetch([key("ada", number) for number in (0, 1, 7)])
    assert read.unread == []
    assert list(read.missing) == [key("ada", 7)]
    assert read.missing[key("ada", 7)].reason is MissReason.UNKNOWN


def test_one_client_is_the_home_of_all_users(here: NodeInProcess, rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 20)
    with Client(here.target, tenant="acme") as client, Arrivals(client, rig.table, tenant="acme") as arrivals:
        memory = mmap.mmap(-1, 20 * SIZE)
        region = client.register(memory)
        typing = arrivals.arrived(request("ada"))
        assert typing.wait(WAIT_S)
        back = arrivals.arrived(
            request("ada"), lambda number, name: Block(name, region, number * SIZE, SIZE), timeout_s=WAIT_S
        )
        assert back.whole().is_whole
        assert memory[:] == b"".join(bytes_of("ada", number) for number in range(20))
        assert arrivals.session("ada", "chat").keys() == [key("ada", number) for number in range(20)]


def test_a_request_is_matched_without_a_call_and_fetched_later(rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 3)
    calls = rig.client.calls
    allowed = rig.arrivals.match(request("ada"))
    spoofed = rig.arrivals.match(request("ada", source="192.0.2.7"))
    foreign = rig.arrivals.match(request("eve", tenant="zeta"))
    unmatched = rig.arrivals.match(request("eve", tenant="theta"))
    assert [one.denied for one in (allowed, spoofed, foreign, unmatched)] == [False, True, True, False]
    assert [one.rule for one in (allowed, spoofed, unmatched)] == ["ada", "guard of acme/ada", None]
    assert rig.arrivals.fetch(spoofed, rig.place).denied
    assert rig.client.calls == calls
    hits = rig.table.counters(next(one for one in rig.table if one.name == "ada")).hits
    assert rig.arrivals.fetch(allowed, rig.place, timeout_s=WAIT_S).whole().is_whole
    assert rig.table.counters(next(one for one in rig.table if one.name == "ada")).hits == hits, (
        "counted once"
    )


def test_entries_without_hits_are_removed_while_requests_arrive(rig: ArrivalsRig) -> None:
    def aged(user: str, idle_timeout_ms: int) -> Rule:
        fetch = (Action(ActionKind.FETCH),)
        return Rule(Pattern("acme", user), fetch, name=f"of {user}", idle_timeout_ms=idle_timeout_ms)

    now_ns = SystemClock().monotonic_ns()
    rig.table.add(aged("zoe", 1), now_ns)
    rig.table.add(aged("yan", 3_600_000), now_ns)
    wait_until(
        lambda: rig.arrivals.match(request("bob")).rule is not None and "of zoe" not in names(rig),
        "the entry has aged",
    )
    assert "of yan" in names(rig)
    assert rig.arrivals.match(request("zoe")).rule == "everybody of acme"


def names(rig: ArrivalsRig) -> set[str]:
    return {entry.name for entry in rig.table}


def test_hits_and_bytes_of_an_entry_are_counted_by_name_and_survive_its_removal(rig: ArrivalsRig) -> None:
    rig.store("ada", 0, 4)
    assert rig.arrivals.arrived(request("ada"), rig.place, timeout_s=WAIT_S).whole().is_whole
    rig.arrivals.arrived(request("ada", source="192.0.2.7"))
    wait_until(lambda: rig.arrivals.counts()["ada"].moved_bytes == 4 * SIZE, "the bytes are counted")
    rig.table.replace([])
    counts = rig.arrivals.counts()
    assert (counts["ada"].hits, counts["guard of acme/ada"].hits) == (1, 1)
    assert counts["ada"].last_hit_ns > 0
    for number in range(RULES_COUNTED_MAX + 10):
        entry = rig.table.add(Rule(Pattern("acme", f"user {number}"), (Action(ActionKind.COUNT),)))
        rig.arrivals.match(request(f"user {number}"))
        rig.table.remove(entry)
    counts = rig.arrivals.counts()
    assert len(counts) == RULES_COUNTED_MAX + 1
    assert counts[""].hits == 12, "what has no room for its name is counted together"
    assert sum(one.hits for one in counts.values()) == RULES_COUNTED_MAX + 12
