"""Membership in simulated time: nodes that join, leave, are cut off, return or are copied, and the maps they send."""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cluster.etcd import EtcdAway, Listed
from kvstore.cluster.etcd_history import EtcdMemory
from kvstore.cluster.map import DRAINING, TOO_OLD, Map, Member, lots_record
from kvstore.cluster.membership import Membership
from kvstore.cluster.takeovers import Takeovers
from kvstore.limits import CLUSTER_LOTS
from kvstore.placement import LOTS
from tests.cluster.simulated import HISTORY, FakeClient, FakeEtcd, LoopClock, run

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = int(os.environ.get("TRIGGERKV_CLUSTER_SEEDS", "150"))
STEPS = 25
SETTLED_S = 30.0  # a lease, a call's deadline, a pause, the same again, and a map that is held back


class Process:
    """One process of a node: a folder's name, and an address of its own."""

    def __init__(
        self, etcd: FakeEtcd, rng: random.Random, name: str, port: int, memory: EtcdMemory | None = None
    ) -> None:
        self.way = FakeClient(etcd, rng)
        self.member = Member(name, f"10.0.0.1:{port}")
        self.membership = Membership(self.way, LoopClock(), memory or EtcdMemory("test"), Takeovers("test"))
        self.revisions = [0]
        self.membership.start()
        self.membership.join(self.member)
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            self.revisions.append((await self.membership.later_than(self.revisions[-1], 5)).revision)

    async def end(self, *, kindly: bool, for_good: bool = False) -> None:
        self._looking.cancel()
        if kindly:
            await self.membership.close(for_good=for_good)
        else:
            for task in self.membership._tasks:
                task.cancel()

    @property
    def told(self) -> Map:
        return self.membership.map


class SimulatedMembers:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.etcd = FakeEtcd()
        self.processes: list[Process] = []  # that are alive, in the order in which they began
        self.copied: set[str] = set()
        self.may_come_back: set[str] = set()  # that were members, have ended and were not forgotten since
        self.memories: dict[str, EtcdMemory] = defaultdict(
            partial(EtcdMemory, "test", chance=random.Random(seed))
        )
        self.backup: tuple[Any, ...] | None = None
        self._ports = 1000

    def begin(self, name: str) -> None:
        while name in self.etcd.left():
            name += "'"  # an empty folder
        if name in {one.member.name for one in self.processes}:
            self.copied.add(name)
            copy = EtcdMemory("test", chance=self.memories[name]._chance)
            copy._seen = replace(self.memories[name]._seen)
            self.memories[name] = copy
        self._ports += 1
        self.processes.append(Process(self.etcd, self.rng, name, self._ports, self.memories[name]))

    async def end(self, *, kindly: bool) -> None:
        one = self.rng.choice(self.processes)
        self.processes.remove(one)
        for_good = kindly and self.rng.random() < 0.3
        if for_good:  # of whatever life the folder is
            self.may_come_back.discard(one.member.name)
        elif one.member.name in self.etcd.known():  # else it was forgotten meanwhile
            self.may_come_back.add(one.member.name)
        await one.end(kindly=kindly, for_good=for_good)

    async def forget(self, one: Process) -> None:
        """Make a node forget all absent nodes of its map."""
        for absent in one.told.absent:
            with suppress(EtcdAway):
                self.may_come_back.discard(absent.name)  # also if only the answer is lost
                await one.membership.forget(absent.name)

    async def lose(self) -> None:
        """Make etcd lose all data, or everything since a backup."""
        for one in self.processes:
            if "drained or forgotten" in one.membership.outside:
                self.copied.add(one.member.name)  # it stays off the map until it is started again
        self.may_come_back.clear()  # a node that has these on its map may die before it says so
        if self.backup is None:
            await self.etcd.restore()
        else:
            await self.etcd.restore(self.backup)

    def cut_off(self, *some: Process) -> None:
        """Cut these nodes off from etcd, or reconnect them."""
        is_away = not some[0].way.is_away
        for one in some:
            one.way.is_away = is_away

    async def step(self) -> None:
        rng = self.rng
        names = [f"node{number}" for number in range(5)]
        here = {one.member.name for one in self.processes}
        doing: list[Callable[[], object]] = [lambda: self.begin(rng.choice(names))]
        if self.processes:
            one = rng.choice(self.processes)
            doing += [lambda: self.cut_off(one)] * 2
            doing += [lambda: self.cut_off(*self.processes)]
        if rng.random() < 0.1:
            self.backup = rng.choice((None, self.etcd.state()))
        if rng.random() < 0.1:
            await self.lose()
        if self.processes and rng.random() < 0.1:
            await self.forget(rng.choice(self.processes))
        chosen = rng.randrange(len(doing) + 2)
        if chosen < len(doing):
            doing[chosen]()
        elif self.processes and len(here) > 1:
            await self.end(kindly=bool(rng.randrange(2)))
        await asyncio.sleep(rng.random() * rng.choice((0.05, 2, 8)))

    async def settle(self) -> None:
        for one in self.processes:
            one.way.is_away = False
        await asyncio.sleep(SETTLED_S)

    def check(self) -> None:
        """All living nodes have the same map: with each node that was never copied, and at most one of its copies."""
        maps = {one.told.members for one in self.processes}
        assert len(maps) <= 1, maps
        for one in self.processes:
            name = one.member.name
            of_name = [other for other in one.told.members if other.name == name]
            assert len(of_name) <= 1
            if name in self.etcd.left():
                if (
                    name not in self.copied
                ):  # else one of the two may have been the member when the other left
                    assert one.membership.outside
                    assert not of_name, "it was drained or forgotten"
                continue
            joined = self.etcd.joined.get(b"/triggerkv/test/members/" + name.encode(), 0)
            came_last = joined in self.etcd.leases and joined in one.membership.leases
            if came_last or name not in self.copied:
                assert of_name == [one.member]
        for one in self.processes:
            known = {*one.told.names, *(other.name for other in one.told.absent)}
            assert known == self.etcd.known()
            assert known >= self.may_come_back - self.copied, "who has been a member is one, or is absent"
        on_it = [one for one in self.processes if one.member in one.told.members]
        for one in self.processes:
            assert (one.membership.outside == "") == (one in on_it), one.membership.outside
            assert one.revisions == sorted(one.revisions), "a map that goes back"
            assert one.membership.away_ms == 0


@pytest.mark.parametrize("tenth", range(10))
def test_all_nodes_agree_on_the_map_soon_after_failures(tenth: int) -> None:
    async def history(seed: int) -> None:
        world = SimulatedMembers(seed)
        leases = asyncio.create_task(world.etcd.run())
        for _ in range(STEPS):
            await world.step()
        await world.settle()
        world.check()
        for one in world.processes:
            await one.end(kindly=True)
        await asyncio.sleep(1)
        assert not [key for key in world.etcd.values if b"/members/" in key], "who leaves is no member"
        leases.cancel()

    for seed in range(tenth, SEEDS, 10):
        try:
            run(history(seed))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_while_etcd_is_away_the_map_stays_and_the_duration_is_reported() -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        rng = random.Random(1)
        one, other = (Process(etcd, rng, name, port) for name, port in (("a", 1), ("b", 2)))
        await asyncio.sleep(1)
        before = one.told
        assert before.members == (one.member, other.member)
        one.way.is_away = True
        await asyncio.sleep(3600)
        assert one.told is before
        assert 3_590_000 <= one.membership.away_ms <= 3_600_000
        assert list(other.told.members) == [other.member], "its lease is over, and others know"
        one.way.is_away = False
        await asyncio.sleep(5)
        assert one.told.members == before.members
        assert other.told.members == before.members
        assert (one.membership.outside, one.membership.away_ms) == ("", 0)
        leases.cancel()

    run(history())


@pytest.mark.parametrize("seed", range(40))
def test_a_returning_node_yields_to_its_replacement(seed: int) -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        rng = random.Random(seed)
        one = Process(etcd, rng, "a", 1)
        await asyncio.sleep(1)
        one.way.is_away = True
        await asyncio.sleep(10 + rng.random())
        copy = Process(etcd, rng, "a", 2)
        await asyncio.sleep(10 + rng.random())
        one.way.is_away = False
        for _ in range(100):
            await asyncio.sleep(0.2)
            assert list(copy.told.members) == [copy.member]
        assert list(one.told.members) == [copy.member]
        assert "another process" in one.membership.outside
        leases.cancel()

    run(history())


def test_an_older_list_is_ignored() -> None:
    """As is one from an etcd that has lost data."""

    async def history() -> None:
        etcd = FakeEtcd()
        one = Process(etcd, random.Random(1), "a", 1)
        await asyncio.sleep(1)
        now = one.told
        assert now.members == (one.member,)
        one.membership._take(Listed(now.revision - 1, {}, {}))
        assert one.told is now

    run(history())


@pytest.mark.parametrize("seed", range(40))
def test_members_whose_leases_all_end_at_once_stay_and_those_that_left_do_not(seed: int) -> None:
    """As when etcd's leader continues after a stop."""

    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        rng = random.Random(seed)
        some = [Process(etcd, rng, name, port) for port, name in enumerate("abcd", 1)]
        await asyncio.sleep(10)
        if seed % 2:  # it was away, and all are back since
            for away in (True, False):
                for one in some:
                    one.way.is_away = away
                await asyncio.sleep(20 + rng.random() * 40)
        for lease in rng.sample(sorted(etcd.leases), 4):
            await etcd.drop([lease])
            await asyncio.sleep(rng.random() * 0.1)
        for _ in range(100):
            await asyncio.sleep(0.1)
            assert all(len(one.told.members) >= 3 for one in some)
        assert all(len(one.told.members) == 4 for one in some)
        for one in some[2:]:
            await one.end(kindly=False)
        await asyncio.sleep(20)
        assert all(one.told.names == {"a", "b"} for one in some[:2])
        leases.cancel()

    run(history())


def test_a_node_that_left_is_absent_until_it_is_back_or_forgotten_or_empty() -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        rng = random.Random(1)
        one, other, third = (Process(etcd, rng, name, port) for port, name in enumerate("abc", 1))
        await asyncio.sleep(2)
        digests = {one.membership.digest}
        assert not one.told.absent
        await other.end(kindly=True)
        await asyncio.sleep(1)
        assert one.told.names == {"a", "c"}
        assert list(one.told.absent) == [other.member]
        digests.add(one.membership.digest)
        assert await one.membership.forget("c") == [], "it is there"
        back = Process(etcd, rng, "b", 9)
        await asyncio.sleep(2)
        assert one.told.names == {"a", "b", "c"}
        assert not one.told.absent
        digests.add(one.membership.digest)
        await back.end(kindly=False)
        await asyncio.sleep(10)
        assert list(one.told.absent) == [back.member], "at its last address"
        before = one.membership.digest
        assert await one.membership.forget("b") == ["b"]
        await asyncio.sleep(1)
        assert not one.told.absent
        assert one.membership.digest != before, "who has come and gone counts"
        assert len(digests) == 3
        third._looking.cancel()
        await third.membership.close(for_good=True)
        await asyncio.sleep(1)
        assert one.told.names == {"a"}
        assert not one.told.absent
        again = [Process(etcd, rng, name, port) for port, name in enumerate("bc", 20)]
        await asyncio.sleep(5)
        assert one.told.names == {"a"}
        assert all("drained or forgotten" in gone.membership.outside for gone in again)
        leases.cancel()

    run(history())


@pytest.mark.parametrize("seed", range(40))
def test_a_lease_survives_a_short_silence_of_etcd(seed: int) -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        rng = random.Random(seed)
        one = Process(etcd, rng, "a", 1)
        await asyncio.sleep(1 + rng.random() * 3)
        lease = one.membership.lease
        assert lease
        for _ in range(5):
            one.way.is_away = True
            await asyncio.sleep(rng.random() * 2)
            one.way.is_away = False
            await asyncio.sleep(5)
            assert one.membership.lease == lease
            assert one.told.members == (one.member,)
        assert len(etcd.leases) == 1, "and it asked for no other"
        leases.cancel()

    run(history())


@pytest.mark.parametrize("seed", range(40))
def test_when_etcd_returns_no_running_member_is_missed(seed: int) -> None:
    """All leases have ended by then, and the members join one by one."""

    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        rng = random.Random(seed)
        some = [Process(etcd, rng, name, port) for port, name in enumerate("abcd", 1)]
        await asyncio.sleep(1)
        lost, *others = some
        before = others[0].told.members
        assert len(before) == 4
        for one in some:
            one.way.is_away = True
        await asyncio.sleep(10 + rng.random() * 60)
        assert not [key for key in etcd.values if b"/members/" in key]
        await lost.end(kindly=False)
        late = Process(etcd, rng, "e", 9)
        late.way.is_away = True
        await asyncio.sleep(5)
        for one in (*others, late):
            one.way.is_away = False
        for _ in range(300):
            await asyncio.sleep(0.1)
            assert all(one.told.names >= frozenset("bcd") for one in others)
            assert not late.told.members or late.told.names >= frozenset("bcd"), "nor by who has just begun"
        assert {one.told.names for one in (*others, late)} == {frozenset("bcde")}, (
            "and who is gone is missed in the end"
        )
        leases.cancel()

    run(history())


EARLY = b"/triggerkv/test/nodes/"
LOTS_KEY = EARLY + b"lots"


def test_the_first_member_sets_the_number_of_lots_and_all_others_follow() -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        some = [Process(etcd, random.Random(port), name, port) for port, name in enumerate("abc", 1)]
        await asyncio.sleep(2)
        assert [one.told.lots for one in some] == [CLUSTER_LOTS] * 3
        assert all(one.told.members == tuple(other.member for other in some) for one in some)
        assert etcd.values[LOTS_KEY] == (lots_record(CLUSTER_LOTS), 0), "it stays when all nodes have left"
        for key in [key for key in etcd.values if key.startswith(HISTORY)]:
            etcd.values[key] = (b"0 %d" % (2 * LOTS), 0)
        etcd.revision += 1
        late = Process(etcd, random.Random(4), "d", 4)
        await asyncio.sleep(5)
        assert late.told.lots == 2 * LOTS, "as etcd has it, and not as this version would choose it"
        leases.cancel()

    run(history())


def test_a_cluster_made_by_earlier_versions_keeps_its_lots_and_its_records_places() -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        earlier = Member("a", "10.0.0.1:1")
        lease = etcd.grant(1000)
        await etcd.put(
            EARLY + b"a", earlier.encoded(), lease, only_new=False, lasting=b"/triggerkv/test/known/a"
        )
        one = Process(etcd, random.Random(1), "b", 2)
        await asyncio.sleep(2)
        assert one.told.members == (earlier, one.member)
        assert one.told.lots == LOTS
        assert {EARLY + b"a", EARLY + b"b"} <= etcd.values.keys(), "where earlier versions look"
        assert LOTS_KEY not in etcd.values
        await etcd.restore()  # and another node is there first
        await asyncio.sleep(8)
        assert EARLY + b"b" in etcd.values
        assert LOTS_KEY not in etcd.values, "what runs stays as it was"
        leases.cancel()

    run(history())


def test_a_node_of_an_earlier_version_is_no_member_of_a_cluster_with_other_lots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To deletions it is an absent node; to itself, the only other member is unreachable."""

    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        one = Process(etcd, random.Random(1), "a", 1)
        await asyncio.sleep(2)
        earlier = Member("b", "10.0.0.1:2")
        lease = etcd.grant(1000)
        await etcd.put(
            EARLY + b"b", earlier.encoded(), lease, only_new=False, lasting=b"/triggerkv/test/known/b"
        )
        await asyncio.sleep(5)
        assert one.told.members == (one.member,)
        assert one.told.absent == (earlier,)
        its = [Member.decoded(value) for key, (value, _) in etcd.values.items() if key.startswith(EARLY)]
        assert sorted(its) == sorted([TOO_OLD[0], earlier]), "all that it takes for members"
        leases.cancel()

    run(history())
    assert caplog.text.count("nodes/b is a node of a version that is too old") == 1


def test_the_number_of_lots_is_rewritten_if_etcd_has_lost_it() -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        some = [Process(etcd, random.Random(port), name, port) for port, name in enumerate("ab", 1)]
        await asyncio.sleep(2)
        await etcd.restore()
        await asyncio.sleep(20)
        assert [one.told.lots for one in some] == [CLUSTER_LOTS] * 2
        assert LOTS_KEY in etcd.values
        assert all(one.told.names == {"a", "b"} for one in some)
        leases.cancel()

    run(history())


@pytest.mark.parametrize(
    "record", [b"nonsense", b"{}", lots_record(LOTS)[:-7] + b"1000}", b'{"lots":"8192"}']
)
def test_an_unreadable_number_of_lots_is_never_guessed(record: bytes) -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        await etcd.put(LOTS_KEY, record, 0, only_new=True, lasting=b"")
        one = Process(etcd, random.Random(1), "a", 1)
        await asyncio.sleep(20)
        assert not one.told.members
        assert "lots" in one.membership.outside
        assert not one.membership.outside.endswith("."), "it is told within a sentence"
        assert etcd.values.keys() == {LOTS_KEY}
        leases.cancel()

    run(history())


def test_a_node_drained_and_then_lost_is_not_awaited_and_does_not_return() -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        rng = random.Random(1)
        one, other, third = (Process(etcd, rng, name, port) for port, name in enumerate("abc", 1))
        await asyncio.sleep(2)
        for drained in (other, third):
            await drained.membership.announce(DRAINING)
            await drained.membership.note_drained()
        await third.membership.announce("")
        await third.membership.note_drained()  # by a map that still has it as draining
        for lost in (other, third):
            await lost.end(kindly=False)
            await asyncio.sleep(20)
        assert one.told.names == {"a"}
        assert [absent.name for absent in one.told.absent] == ["c"], "it was a member again"
        again = [Process(etcd, rng, name, port) for port, name in enumerate("bc", 20)]
        await asyncio.sleep(5)
        assert one.told.names == {"a", "c"}
        assert "drained or forgotten" in again[0].membership.outside
        leases.cancel()

    run(history())


def test_a_record_that_a_node_was_drained_does_not_overtake_its_return() -> None:
    async def history(seed: int) -> None:
        etcd = FakeEtcd()
        one = Process(etcd, random.Random(seed), "a", 1).membership
        await asyncio.sleep(2)
        await one.announce(DRAINING)
        await asyncio.gather(one.note_drained(), one.announce(""))
        record, _ = etcd.values[b"/triggerkv/test/known/a"]
        assert Member.decoded(record).state == ""

    for seed in range(8):
        run(history(seed))


@pytest.mark.parametrize("is_written", [False, True])
def test_a_drain_that_etcd_has_not_confirmed_has_no_effect(*, is_written: bool) -> None:
    """Etcd writes the state and its answer is lost, or it doesn't write it; then the node's lease ends."""

    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        one, other = (Process(etcd, rng, name, port) for port, name in enumerate("ab", 1))
        await asyncio.sleep(2)
        one.way.is_away = not is_written
        said, revision = asyncio.create_task(one.membership.announce(DRAINING)), etcd.revision
        while is_written and etcd.revision == revision:  # noqa: ASYNC110 - time is simulated
            await asyncio.sleep(0.001)
        one.way.is_away = True
        with pytest.raises(EtcdAway, match="remains as it was"):
            await said
        assert one.membership.state == ""
        await asyncio.sleep(0 if is_written else 20)
        one.way.is_away = False
        await asyncio.sleep(SETTLED_S)
        assert other.told.names == {"a", "b"}
        assert not other.told.draining
        await one.membership.announce(DRAINING)
        await asyncio.sleep(SETTLED_S)
        assert len(other.told.draining) == 1
        leases.cancel()

    run(history())


def test_members_with_another_number_of_copies_are_reported_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        one = Process(etcd, random.Random(1), "a", 1)
        one.membership._member = replace(one.member, replicas=2)
        for port, (name, replicas) in enumerate((("b", 2), ("c", 0), ("d", 1)), 2):
            assert "--cluster-replicas" not in caplog.text
            other = Process(etcd, random.Random(port), name, port)
            other.membership._member = replace(other.member, replicas=replicas)
            await asyncio.sleep(2)
        Process(etcd, random.Random(9), "e", 9)
        await asyncio.sleep(2)

    run(history())
    assert caplog.text.count("--cluster-replicas is 2 here, and 1 on other nodes") == 2, "by a and by b"
    assert caplog.text.count("--cluster-replicas is 1 here, and 2 on other nodes") == 1
