"""Ten conversations with an engine with a tiny cache, over a node with a tiny drive, while both fail.

Between turns and within them blocks are evicted, and damaged on the drive; the node is killed, or stopped and
continued; half-way the engine is killed, and one that loads the other way (`sync`, `async`) takes its place. What holds
all the time: every answer is that of an engine without our connector, every page that was loaded is one that was saved,
and every page on the node is that of a clean engine.

TRIGGERKV_CONVERSATION_RUNS=n has n runs, each with conversations and accidents of its own; TRIGGERKV_SEED=n is the
first one's seed. What happens when depends on the machine's speed too, so a seed need not fail twice.
"""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Client
from tests.engines.chats import ANSWER_TOKENS, TURNS, Chats
from tests.engines.digests import read_digests
from tests.engines.engine import Engine
from tests.engines.node import Node
from tests.engines.pages import check_pages, layout_of, read_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUNS = int(os.environ.get("TRIGGERKV_CONVERSATION_RUNS", "1"))
FIRST_SEED = int(os.environ.get("TRIGGERKV_SEED", "0"))
USERS = 10
COMMON_TOKENS = 70  # that all conversations begin with
DAMAGED = 0.2  # of the records on the drive, each time
QUIET_SAYS = 3  # until there is something to damage
CHECKED_EVERY_SAYS = 5
# A conversation ends with up to 22 blocks of 32 tokens, and all of them have some 600 pages of 36 KiB.
SMALL_ENGINE: dict[str, Any] = {
    "num_gpu_blocks_override": 40,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
}
SMALL_DRIVE = "16MiB"
SMALL_MEMORY = ("--hot", "128MiB")  # the least that a node takes
# A node that is stopped for longer is late.
DEADLINES = {"lookup_timeout_ms": 100, "load_timeout_ms": 400, "save_timeout_ms": 400}


class Reference:
    """The right results: answers of an engine without our connector, and pages of an undisturbed one with it."""

    def __init__(self, place: Path, model: Path) -> None:
        self._node = Node(place / "clean node")
        self._plain = Engine(place, "plain", model)
        self._clean = Engine(place, "clean", model, self._node.target)
        self._keys: set[str] = set()

    def hold(self, seed: int) -> tuple[Chats, dict[str, bytes]]:
        """Hold new conversations; returns them, and all their pages by key."""
        chats = Chats.held_with(self._plain, users=USERS, seed=seed, common_tokens=COMMON_TOKENS)
        chats.check(self._clean)
        keys = read_digests(self._clean.digests)[0].keys() - self._keys
        self._keys |= keys
        pages = read_pages(self._node.target, self.layout, keys)
        assert pages.keys() == keys
        return chats, pages

    @property
    def layout(self) -> bytes:
        return layout_of(self._clean.digests / "clean.txt")

    def close(self) -> None:
        self._plain.close()
        self._clean.close()
        self._node.stop()


@pytest.fixture(scope="module")
def reference(place: Path, model: Path) -> Iterator[Reference]:
    folder = place / "reference"
    folder.mkdir()
    reference = Reference(folder, model)
    yield reference
    reference.close()


class Conversations:
    """A node and an engine, their conversations, and the failures injected into them."""

    def __init__(self, place: Path, model: Path, loads: list[str], dice: random.Random) -> None:
        self.node = Node(place / "node", capacity=SMALL_DRIVE, arguments=SMALL_MEMORY)
        self._engines = [
            Engine(place, load, model, self.node.target, extra={"load": load, **DEADLINES}, **SMALL_ENGINE)
            for load in loads
        ]
        self._digests = self._engines[0].digests
        self._dice = dice
        self.before = [self.damage, self.damage_at_rest, self.kill, self.kill_and_damage]
        self.meanwhile = [self.kill_meanwhile, self.pause_meanwhile]
        self.counts = dict.fromkeys(("hit_tokens", "missing_blocks", "withheld_pages"), 0.0)
        self.farthest = 0.0
        self.stored: dict[str, bytes] = {}

    # --- before something is said

    def damage(self) -> None:
        """Damage stored blocks; one that is also in the node's memory is damaged once it has left it."""
        self.node.damage(DAMAGED, self._dice)

    def damage_at_rest(self) -> None:
        self.node.stop()
        self.damage()
        self.node.start()

    def kill(self) -> None:
        self.node.kill()
        self.node.start()

    def kill_and_damage(self) -> None:
        self.node.kill()
        self.damage()
        self.node.start()

    # --- while it is said

    def kill_meanwhile(self) -> None:
        time.sleep(0.5 * self._dice.random())
        self.kill()

    def pause_meanwhile(self) -> None:
        for _ in range(3):
            time.sleep(0.1 * self._dice.random())
            with self.node.paused():
                time.sleep(self._dice.choice([0.05, 0.3, 1.0]))

    # ---

    def say(self, prompts: list[list[int]], happens: Callable[[], None] | None = None) -> list[list[int]]:
        if happens in self.before:
            happens()
            for _ in range(2):  # until its client finds a restarted node again
                self._engines[0].say([prompts[0][:COMMON_TOKENS]])
                time.sleep(0.1)
        other = threading.Thread(target=happens if happens in self.meanwhile else None)
        other.start()
        try:
            return self._engines[0].say(prompts, tokens=ANSWER_TOKENS).answers
        finally:
            other.join()

    def replace_the_engine(self, prompts: list[list[int]]) -> None:
        """Kill the engine during an answer; the next one takes its place."""
        self.count()
        killer = threading.Timer(0.3 * self._dice.random(), self._engines[0].kill)
        killer.start()
        with suppress(AssertionError, BrokenPipeError):  # it gives no answer
            self.say(prompts)
        killer.join()
        self._engines.pop(0).close()

    def count(self) -> None:
        engine = self._engines[0]
        assert "Traceback" not in engine.log()
        for name in self.counts:
            self.counts[name] += engine.count(name)

    def check(self, layout: bytes, clean: dict[str, bytes]) -> None:
        saved, loaded = read_digests(self._digests)
        assert not [key for key, digest in loaded if digest not in saved.get(key, ())]
        self.stored = read_pages(self.node.target, layout, saved)
        self.farthest = max(self.farthest, check_pages(self.stored, clean))
        with Client(self.node.target) as client:
            assert client.statistics().blocks == len(self.stored), "there is nothing else on the node"

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self.node.stop()


def hold(
    rig: Conversations, chats: Chats, clean: dict[str, bytes], layout: bytes, dice: random.Random
) -> None:
    """Hold all conversations, some at a time, with a failure each time."""
    turns = dict.fromkeys(range(USERS), 0)
    is_replaced = False
    accidents: list[Callable[[], None]] = []
    says = done = 0
    while turns:
        users = dice.sample(sorted(turns), min(len(turns), dice.randrange(1, 5)))
        prompts = [chats.prompts[turns[user]][user] for user in users]
        happens: Callable[[], None] | None = None
        if not is_replaced and 2 * done >= USERS * TURNS:
            rig.replace_the_engine(prompts)
            is_replaced = True
        elif says >= QUIET_SAYS:
            accidents = accidents or dice.sample([*rig.before, *rig.meanwhile], 6)
            happens = accidents.pop()
        said = rig.say(prompts, happens)
        assert said == [chats.answers[turns[user]][user] for user in users], (says, users, happens)
        for user in users:
            turns[user] += 1
            if turns[user] == TURNS:
                del turns[user]
        says, done = says + 1, done + len(users)
        if says % CHECKED_EVERY_SAYS == 0 or not turns:
            rig.check(layout, clean)
    rig.count()


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_ten_conversations_and_all_their_pages_are_correct_whatever_happens(
    tmp_path: Path,
    model: Path,
    reference: Reference,
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    dice = random.Random(seed)
    rig = Conversations(tmp_path, model, ["sync", "async"][:: -1 if seed % 2 else 1], dice)
    try:
        chats, clean = reference.hold(seed)
        hold(rig, chats, clean, reference.layout, dice)
    finally:
        rig.close()
    for name, count in rig.counts.items():
        record_property(name, count)
    record_property("stored of all pages", (len(rig.stored), len(clean)))
    record_property("farthest", rig.farthest)
    assert 0 < len(rig.stored) < len(clean)
    assert rig.counts["hit_tokens"] > 0
    assert rig.counts["missing_blocks"] > 0
