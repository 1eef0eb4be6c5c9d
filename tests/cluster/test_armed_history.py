"""Puts that follow the map, in random histories: maps change, nodes die and return, flags are stored.

What is simulated: nodes, their connections, the map, the clock, and when a put fires, lands and is acknowledged.
"""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from kvstore.client import cluster_ahead
from kvstore.client.blocks import PutResult
from kvstore.client.cluster_ahead import Ahead, ArmedAhead, PutPlaces
from kvstore.client.cluster_puts import merged
from kvstore.client.puts import FailedPut
from kvstore.cluster.map import Map, Member
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, FabricError, KeyTaken, KvError, NodeUnavailable
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kvstore.client.cluster_ahead import Roles
    from nic_offload.flags import FlagWord

NODES = [f"node{number}:1" for number in range(4)]
KEYS = [bytes([number]) * 32 for number in range(6)]
SECOND, DEADLINE_S = 1_000_000_000, 90
SEEDS = int(os.environ.get("TRIGGERKV_CLUSTER_SEEDS", "60"))
LATE = DeadlineExceeded("The put has not ended yet; it continues.")


@dataclass
class Row:
    at: int
    threshold: int  # 0: it fires at once
    fired: bool = False
    landed: bool = False
    done: bool = False
    error: KvError | None = None
    was_withdrawn: bool = False

    @property
    def over(self) -> bool:
        return self.done or self.error is not None


@dataclass(eq=False)
class Batch:
    """A stand-in for `ArmedPuts` of one node."""

    world: PutHistory
    node: str
    rows: list[Row]

    @property
    def has_ended(self) -> bool:
        return all(row.over for row in self.rows)

    def wait(self, timeout_s: float) -> list[PutResult]:
        assert not timeout_s
        return [
            PutResult(
                KEYS[row.at],
                Durability.WRITTEN if row.done else None,
                None if row.done else row.error or LATE,
                False,
                int(row.fired),
                int(row.landed),
            )
            for row in self.rows
        ]

    def wait_landed(self, timeout_s: float) -> bool:
        assert not timeout_s
        return all(row.over or row.landed for row in self.rows)

    def cancel(self) -> int:
        count = 0
        for row in self.rows:
            if not row.over and not row.fired:
                row.error, row.was_withdrawn = FabricError("The put was cancelled before it was sent."), True
                count += 1
        return count

    def abandon(self) -> None:
        self.cancel()
        self.lose(DeadlineExceeded("A block was sent and did not land in time."), but_landed=True)

    def _abandon(self, numbers: Collection[int]) -> None:
        for row in (self.rows[number] for number in numbers):
            if not row.over and not row.landed:
                row.error, row.was_withdrawn = FabricError("The put was cancelled."), not row.fired

    def lose(self, error: KvError, *, but_landed: bool = False) -> None:
        for row in self.rows:
            if not row.over and not (but_landed and row.landed):
                row.error = error

    def _withdraw(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            row = self.rows[number]
            if self.world.rng.random() < 0.3:
                self.world.fire(row)  # just before
            if not row.over and not row.fired:
                row.error, row.was_withdrawn = FabricError("The put was cancelled before it was sent."), True

    def _failed_puts(self, known: Collection[int]) -> dict[int, FailedPut]:
        return {
            number: FailedPut(row.error, row.fired, row.was_withdrawn)
            for number, row in enumerate(self.rows)
            if row.error is not None and number not in known
        }


@dataclass
class PutHistory:
    rng: random.Random
    replicas: int
    copies: int
    now_ns: int = 0
    flag: int = 0
    revision: int = 1
    up: set[str] = field(default_factory=lambda: set(NODES))
    members: set[str] = field(default_factory=lambda: set(NODES))
    stored: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    batches: list[Batch] = field(default_factory=list)
    told: dict[int, PutResult] = field(default_factory=dict)  # the last, of blocks that are over
    free: set[int] = field(default_factory=set)  # blocks that may not be sent again
    is_slow: bool = False  # arming waits until it `goes_on`
    has_begun: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def load(self) -> int:
        return self.flag

    @property
    def map(self) -> Map:
        return Map.of(self.revision, [Member(one, one, 1) for one in sorted(self.members)])

    def owners(self, now: Map, at: int) -> Sequence[str]:
        return [now.members[place].node for place in now.owners(b"", KEYS[at])[: self.replicas]]

    def arm(self, parts: Mapping[str, list[int]], at_once: bool) -> dict[str, Batch | KvError]:  # noqa: FBT001
        if self.is_slow:
            self.has_begun.set()
            assert self.goes_on.wait(10)
        return {node: self._arm(node, places, at_once=at_once) for node, places in parts.items()}

    def _arm(self, node: str, places: list[int], *, at_once: bool) -> Batch | KvError:
        assert len(set(places)) == len(places)
        for at in places:
            assert at not in self.free, "what the caller may have overwritten is not put again"
            here = [
                batch.node for batch in self.batches for row in batch.rows if row.at == at and not row.over
            ]
            assert len(here) < self.replicas, "of each copy one put is under way"
            assert node not in here
            assert not at_once or self.flag >= 1, "it has fired"
        if node not in self.up or self.rng.random() < 0.1:
            return NodeUnavailable(f"{node} is away.")
        batch = Batch(self, node, [Row(at, 0 if at_once else 1) for at in places])
        self.batches.append(batch)
        return batch

    def live(self) -> list[Batch]:
        return [batch for batch in self.batches if not batch.has_ended]

    def fire(self, row: Row) -> None:
        if not row.over and self.flag >= row.threshold:
            assert row.at not in self.free or row.fired
            row.fired = True

    def step(self, batch: Batch) -> None:
        """Advance one put at its node."""
        row = self.rng.choice(batch.rows)
        if row.over or batch.node not in self.up:
            return
        if not row.fired:
            self.fire(row)
        elif not row.landed:
            assert row.at not in self.free, "it reads what the caller may have overwritten"
            row.landed = True
        elif self.rng.random() < 0.02:
            row.error = KeyTaken("Another block is stored under this key.")
        else:
            self.stored[batch.node].add(row.at)
            row.done = True

    def kill(self, node: str) -> None:
        self.up.discard(node)
        for batch in self.batches:
            if batch.node == node:
                batch.lose(NodeUnavailable("The node went away."))

    def set_members(self, members: set[str]) -> None:
        if members and members != self.members:
            self.members, self.revision = members, self.revision + 1

    def change(self) -> None:
        node = self.rng.choice(NODES)
        match self.rng.randrange(4):
            case 0:
                self.kill(node)
            case 1:
                self.up.add(node)
                self.set_members(self.members | {node})
            case 2:
                self.set_members(self.members - {node})
            case 3:
                self.set_members({one for one in self.members if one in self.up} | {node})


class Caller:
    """Calls the places as `ClusterPuts` does, and collects the results that it may return."""

    def __init__(self, world: PutHistory, places: PutPlaces) -> None:
        self.world, self.places = world, places
        self.is_stopped = False

    def results(self) -> list[PutResult]:
        return [
            merged(key, some, self.world.copies) for key, some in zip(KEYS, self.places.each(), strict=True)
        ]

    def is_told(self) -> None:
        had_ended = self.places.has_ended
        results = self.results()
        read = self.places.still_read(results)
        if read and self.world.rng.random() < 0.5:  # they have been for a while
            self.places.release(read)
            results = self.results()
            assert not self.places.still_read(results)
        for at in self.places.still_read(results):
            results[at] = PutResult(KEYS[at], None, LATE)
        self.places.note_results(results)
        for at, result in enumerate(results):
            if result.error is None:
                there = [node for node in NODES if at in self.world.stored[node]]
                assert len(there) >= self.world.copies, "nothing is acknowledged that is not so"
                self.world.told.setdefault(at, result)
            elif had_ended:
                self.world.told.setdefault(at, result)
            if at in self.world.told:
                was = self.world.told[at]
                is_same = (result.error is None) == (was.error is None)
                # With one copy of two stored, the other owner may say later that it has another block.
                may_change = self.world.copies < self.world.replicas and isinstance(result.error, KeyTaken)
                assert is_same or may_change, "each is told once"
            if result.error is None or result.landed_ns:
                self.world.free.add(at)

    def look_landed(self) -> None:
        if self.places.have_landed():
            self.world.free.update(range(len(KEYS)))
            assert all(row.over or row.landed for batch in self.world.batches for row in batch.rows)

    def stop(self) -> None:
        self.is_stopped = True
        self.places.stop(FabricError("The put was cancelled before it was sent."))
        for batch in self.places.all_parts():
            batch.abandon()
        self.world.free.update(range(len(KEYS)))
        assert all(row.over or row.landed for batch in self.world.batches for row in batch.rows)


def begun(world: PutHistory) -> PutPlaces:
    parts: dict[str, list[int]] = defaultdict(list)
    for at in range(len(KEYS)):
        for node in world.owners(world.map, at):
            parts[node].append(at)
    return placed(world, parts)


def placed(world: PutHistory, parts: Mapping[str, list[int]], roles: Roles | None = None) -> PutPlaces:
    """The places of puts that are armed at these nodes."""
    answers = world.arm(parts, False)
    ahead = Ahead(
        cast("FlagWord", world),
        DEADLINE_S * SECOND,
        lambda _: 1,
        world.owners,
        world.arm,
        lambda _: None,
        roles,
    )
    return PutPlaces(KEYS, [(node, some, answers[node]) for node, some in parts.items()], world.copies, ahead)


def play(world: PutHistory, caller: Caller) -> None:
    rng = world.rng
    for _ in range(rng.randrange(20, 200)):
        world.now_ns += SECOND // 5
        match rng.randrange(16):
            case 0:
                world.change()
            case 1:
                caller.is_told()
            case 2:
                caller.look_landed()
            case 3 if rng.random() < 0.3:
                world.flag = 1
            case 4 if rng.random() < 0.03:
                caller.stop()
            case 5 | 6 | 7 | 8:
                caller.places.follow(world.map)
            case _ if some := world.live():
                world.step(rng.choice(some))


def end_well(world: PutHistory, caller: Caller) -> bool:
    """Let all puts end without further failures; returns whether they did before the deadline."""
    world.flag, world.up = 1, set(NODES)
    world.set_members(set(NODES))
    for _ in range(100):
        world.now_ns += SECOND // 5
        caller.places.follow(world.map)
        for batch in world.live():
            for _ in range(4 * len(batch.rows)):
                world.step(batch)
    is_in_time = world.now_ns < DEADLINE_S * SECOND
    world.now_ns = max(world.now_ns, (DEADLINE_S + 1) * SECOND)
    for batch in world.live():
        for row in batch.rows:
            if not row.over and not row.fired:
                row.error = DeadlineExceeded("It was not sent.")
    caller.places.follow(world.map)
    assert caller.places.has_ended
    return is_in_time


def stored(world: PutHistory, caller: Caller) -> int:
    """The number of stored blocks; a block that could be stored must not be lost."""
    free, done = set(world.free), 0
    caller.is_told()
    for at, result in enumerate(caller.results()):
        is_taken = any(
            isinstance(row.error, KeyTaken) for batch in world.batches for row in batch.rows if row.at == at
        )
        assert result.error is None or is_taken or at in free, "no put is lost"
        done += result.error is None
    return done


@pytest.mark.parametrize(("replicas", "copies"), [(1, 1), (2, 2), (2, 1)])
def test_each_put_is_reported_exactly_once_and_correctly_whatever_happens(
    replicas: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = 0
    for seed in range(SEEDS):
        world = PutHistory(random.Random(seed), replicas, copies)
        monkeypatch.setattr(cluster_ahead, "_CLOCK", _clock(world))
        caller = Caller(world, begun(world))
        play(world, caller)
        if end_well(world, caller) and not caller.is_stopped:
            done += stored(world, caller)
        else:
            caller.is_told()
    assert done > 4 * SEEDS, "most of them were stored"


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PutHistory:
    """Nodes that never refuse, and two copies of each block; the parameter is the number of copies wanted."""
    world = PutHistory(random.Random(1), 2, getattr(request, "param", 2))
    monkeypatch.setattr(world.rng, "random", lambda: 0.5)
    monkeypatch.setattr(cluster_ahead, "_CLOCK", _clock(world))
    return world


def land(world: PutHistory, *nodes: str) -> None:
    world.flag = 1
    for batch in world.live():
        if batch.node in nodes:
            for row in batch.rows:
                row.fired = row.landed = True


def test_a_put_reported_as_landed_is_not_put_again(world: PutHistory) -> None:
    places = begun(world)
    land(world, *NODES)
    assert places.have_landed()
    for node in NODES:
        world.kill(node)
        world.up.add(node)
    count = len(world.batches)
    world.set_members(set(NODES[:3]))
    world.now_ns += SECOND
    assert not places.follow(world.map)
    assert len(world.batches) == count
    results = Caller(world, places).results()
    assert {type(one.error) for one in results} == {NodeUnavailable}


def test_a_put_that_landed_unreported_is_put_again(world: PutHistory) -> None:
    places = begun(world)
    land(world, *NODES)
    for node in NODES:
        world.kill(node)
        world.up.add(node)
    world.now_ns += SECOND
    assert places.follow(world.map)
    assert sum(len(batch.rows) for batch in world.live()) == 2 * len(KEYS)


def test_a_put_that_no_node_accepts_ends_by_its_deadline(world: PutHistory) -> None:
    places = begun(world)
    for node in NODES:
        world.kill(node)
    assert places.follow(world.map)
    late = Caller(world, places).results()
    assert {type(one.error) for one in late} == {DeadlineExceeded}
    assert "continues" in str(late[0].error)
    world.now_ns = (DEADLINE_S + 1) * SECOND
    assert places.has_ended
    assert not places.follow(world.map)
    unfired = Caller(world, places).results()
    assert "did not reach" in str(unfired[0].error)


def test_a_late_put_says_why_no_node_accepted_it(world: PutHistory) -> None:
    places = begun(world)
    for node in NODES:
        world.kill(node)
    world.flag = 1
    places.follow(world.map)
    world.now_ns = (DEADLINE_S + 1) * SECOND
    assert {type(one.error) for one in Caller(world, places).results()} == {NodeUnavailable}


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_put_that_may_still_succeed_is_not_reported_as_failed(world: PutHistory) -> None:
    """One copy is enough: it has landed when the other owner dies."""
    places = begun(world)
    land(world, *NODES[1:])
    world.kill(NODES[0])
    places.follow(world.map)
    assert places.have_landed(), "a copy of each, and no other is waited for"
    results = Caller(world, places).results()
    assert {type(one.error) for one in results} == {DeadlineExceeded}
    assert {one.landed_ns for one in results} == {0, 1}


def test_a_put_whose_node_goes_away_as_its_result_is_read_is_armed_again(
    world: PutHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Batch.wait

    def goes_away(batch: Batch, timeout_s: float) -> list[PutResult]:
        world.kill(batch.node)
        return wait(batch, timeout_s)

    places = begun(world)
    with monkeypatch.context() as patched:
        patched.setattr(Batch, "wait", goes_away)
        results = Caller(world, places).results()
    assert {type(one.error) for one in results} == {DeadlineExceeded}
    places.note_results(results)
    world.up = set(NODES)
    assert places.follow(world.map)
    assert sum(len(batch.rows) for batch in world.live()) == 2 * len(KEYS)


class EndedPlaces:
    """Puts that are armed again by another thread, just after `ArmedAhead`'s own has seen that they have ended."""

    def __init__(self, ahead: ArmedAhead) -> None:
        self._ahead, self.rounds = ahead, 0

    def follow(self, _: Map) -> bool:
        if threading.current_thread() is not self._ahead._thread:
            return True
        self.rounds += 1
        if self.rounds == 1:
            caller = threading.Thread(target=self._ahead.again, args=(self,))
            caller.start()
            caller.join()
        return False

    def stop(self, _: KvError) -> int:
        return 0


def test_puts_that_are_armed_again_as_they_are_seen_to_have_ended_are_followed(world: PutHistory) -> None:
    ahead = ArmedAhead(lambda: world.map)
    places = EndedPlaces(ahead)
    ahead.add(cast("PutPlaces", places))
    try:
        wait_until(lambda: places.rounds == 2, "they are followed once more")
    finally:
        ahead.close()


def is_under_way(world: PutHistory, places: PutPlaces) -> bool:
    """Whether puts are reported as open while one is being armed and all are abandoned."""
    told = threading.Event()

    def stop() -> None:
        Caller(world, places).stop()
        told.set()

    are = not places.have_landed() and not places.has_ended
    stops = threading.Thread(target=stop)
    stops.start()
    is_told = told.wait(0.2)
    world.goes_on.set()
    stops.join()
    return are and not is_told


def being_armed(world: PutHistory) -> tuple[PutPlaces, threading.Thread]:
    """Puts that have all been stored, but those that a thread arms at new owners until `goes_on`."""
    places = begun(world)
    world.set_members(set(NODES[1:]))
    world.is_slow = True
    follows = threading.Thread(target=places.follow, args=(world.map,))
    follows.start()
    assert world.has_begun.wait(10)
    land(world, *NODES)
    for batch in world.live():
        for row in batch.rows:
            row.done = True
    return places, follows


@pytest.mark.parametrize("world", [1, 2], indirect=True)
def test_no_put_is_reported_as_ended_while_it_is_being_armed(world: PutHistory) -> None:
    """Otherwise it could be sent after the caller has overwritten its source."""
    places, follows = being_armed(world)
    assert is_under_way(world, places)
    follows.join()
    assert places.has_ended


def test_a_block_with_enough_copies_is_read_while_another_put_of_it_is_being_armed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = PutHistory(random.Random(1), 2, 1)
    monkeypatch.setattr(cluster_ahead, "_CLOCK", _clock(world))
    places, follows = being_armed(world)
    armed = {at for at, some in places._waiting.items() if any(one.is_arming for one in some)}
    results = Caller(world, places).results()
    assert armed
    assert {one.error for one in results} == {None}
    assert places.still_read(results) == armed
    world.goes_on.set()
    follows.join()


def _clock(world: PutHistory) -> object:
    class Clock:
        @staticmethod
        def monotonic_ns() -> int:
            return world.now_ns

    return Clock()
