"""Puts of a user's blocks in random histories: home and standby change, are lost, come back and are replaced.

What is simulated: as in `test_armed_history`, and what the home answers when it is asked which nodes must have them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, cast

from kvstore.client import cluster_ahead
from kvstore.client.cluster_puts import merged
from kvstore.errors import KeyTaken, KvError, NodeUnavailable
from tests.cluster.test_armed_history import (
    KEYS,
    NODES,
    SECOND,
    SEEDS,
    Batch,
    PutHistory,
    Row,
    end_well,
    placed,
)
from tests.cluster.test_armed_history import _clock as clock_of

if TYPE_CHECKING:
    from collections.abc import Collection

    import pytest

    from kvstore.client.blocks import PutResult
    from kvstore.client.cluster_ahead import PutPlaces


class UserHistory(PutHistory):
    """A user whose home and standby change."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, 2, 2)
        self.folders = dict.fromkeys(NODES, 0)  # how often the folder at an address was replaced
        self.home, self.standby = NODES[0], NODES[1]
        self.names = self.now_named()  # as the client knows them
        self.answers = True

    def now_named(self) -> dict[str, str]:
        nodes = [self.home, *([self.standby] if self.standby else [])]
        return {node: f"{node} {self.folders[node]}" for node in nodes}

    def ask(self, timeout_s: float) -> dict[str, str] | None:
        del timeout_s
        if not self.answers and self.rng.random() < 0.7:
            return None
        self.names = self.now_named()
        return self.names

    def look(self, away: Collection[str]) -> None:
        if away or self.rng.random() < 0.1:
            self.ask(0)

    def _arm(self, node: str, places: list[int], *, at_once: bool) -> Batch | KvError:
        assert len(set(places)) == len(places)
        for at in places:
            assert at not in self.free, "what the caller may have overwritten is not put again"
            assert not at_once or self.flag >= 1, "it has fired"
        if node not in self.up or self.rng.random() < 0.1:
            return NodeUnavailable(f"{node} is away.")
        batch = Batch(self, node, [Row(at, 0 if at_once else 1) for at in places])
        self.batches.append(batch)
        return batch

    def change(self) -> None:
        node = self.rng.choice(NODES)
        match self.rng.randrange(7):
            case 0:
                self.kill(node)
            case 1:
                self.up.add(node)
            case 2:  # another folder at its address
                self.kill(node)
                self.folders[node] += 1
                self.stored[node].clear()
                self.up.add(node)
            case 3:
                self.standby = ""
            case 4 if self.standby:  # the home is lost, or its users move
                self.home, self.standby = self.standby, ""
            case 5:
                self.answers = not self.answers
            case _ if node != self.home:
                self.standby = node
        self.set_members(self.members)


def begun(world: UserHistory) -> PutPlaces:
    return placed(world, {node: list(range(len(KEYS))) for node in world.names}, world)


class UsersCaller:
    """Calls the places as `ClusterPuts` does for a user's blocks."""

    def __init__(self, world: UserHistory, places: PutPlaces) -> None:
        self.world, self.places, self.acknowledged = world, places, set[int]()

    def results(self) -> list[PutResult]:
        each = self.places.each()
        return [merged(key, some, self.places.copies) for key, some in zip(KEYS, each, strict=True)]

    def is_told(self) -> None:
        names, results = self.places.names, self.results()
        if any(one.error is None for one in results):
            now = self.world.ask(0)
            if now != names:
                if now is not None:
                    self.places.follow(self.world.map)
                return
        self.places.note_results(results)
        for at, result in enumerate(results):
            if result.error is None:
                for node in self.world.now_named():
                    assert at in self.world.stored[node], "each node that must have it has it"
                self.acknowledged.add(at)
            if result.error is None or result.landed_ns:
                self.world.free.add(at)

    def look_landed(self) -> None:
        if self.places.have_landed():
            self.world.free.update(range(len(KEYS)))


def test_a_users_block_is_acknowledged_only_if_the_present_home_and_standby_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, late = 0, 0
    for seed in range(3 * SEEDS):
        world = UserHistory(random.Random(seed))
        monkeypatch.setattr(cluster_ahead, "_CLOCK", clock_of(world))
        caller = UsersCaller(world, begun(world))
        for _ in range(world.rng.randrange(20, 150)):
            world.now_ns += SECOND // 5
            match world.rng.randrange(16):
                case 0 | 1:
                    world.change()
                case 2 | 3:
                    caller.is_told()
                case 4 if world.rng.random() < 0.1:
                    caller.look_landed()
                case 5 if world.rng.random() < 0.5:
                    world.flag = 1
                case 6 | 7 | 8:
                    caller.places.follow(world.map)
                case _ if some := world.live():
                    world.step(world.rng.choice(some))
        world.answers = True
        free = set(world.free)
        world.ask(0)
        in_time = end_well(world, cast("object", caller))  # type: ignore[arg-type]
        caller.is_told()
        taken = {row.at for batch in world.batches for row in batch.rows if isinstance(row.error, KeyTaken)}
        if in_time:
            assert set(range(len(KEYS))) - free - taken <= caller.acknowledged, "no put is lost"
        else:
            late += 1
        good += len(caller.acknowledged)
    assert good > 9 * SEEDS, "about half of them or more"
    assert late < SEEDS


def test_a_put_that_a_former_standby_still_reads_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    world = UserHistory(random.Random(1))
    monkeypatch.setattr(world.rng, "random", lambda: 0.5)
    monkeypatch.setattr(cluster_ahead, "_CLOCK", clock_of(world))
    caller = UsersCaller(world, begun(world))
    world.flag = 1
    (former,) = [batch for batch in world.batches if batch.node == world.standby]
    for row in former.rows:
        row.fired = True
    world.standby = NODES[2]
    world.ask(0)
    caller.places.follow(world.map)
    for batch in world.batches:
        if batch is not former:
            for row in batch.rows:
                row.fired = row.landed = row.done = True
    assert {one.error is not None and not one.landed_ns for one in caller.results()} == {True}
    former.lose(NodeUnavailable("The node went away."))
    assert {one.error for one in caller.results()} == {None}
