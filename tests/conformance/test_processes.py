"""Three processes: one arms, one holds the memory, and one stores to the flag word."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nic_offload.fabric import EventKind
from nic_offload.flags import FlagWords
from tests.nic_offload.far import SLOT_BYTES, Far, about, slot_block, way_to
from tests.nic_offload.rig import Side, wait_until

if TYPE_CHECKING:
    from tests.conformance.backends import Backend

STORE = """
import sys
from nic_offload.flags import FlagWords
words = FlagWords.open(sys.argv[1])
for line in sys.stdin:
    words[0].store(int(line))
    print("stored", flush=True)
"""
LENGTH = 100_000


class Storer:
    """The third process: it stores the values that it is given."""

    def __init__(self, path: str) -> None:
        command = [sys.executable, "-c", STORE, path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def store(self, value: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{value}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "stored\n"

    def close(self) -> None:
        self.process.communicate(timeout=30)


def test_a_third_process_fires_a_round_trip_through_the_second(backend: Backend) -> None:
    """A put -> count -> get of the same bytes back -> count -> notify of our own word; this process only watches."""
    if backend.own_counters:
        pytest.skip("a counter without a word has no memory that another process can map")
    with (
        FlagWords.create(3) as words,
        Side(backend.provider, deferred_work=backend.deferred_work, remote_read=True) as near,
        Far(backend.provider, 1 << 20) as far,
    ):
        way = way_to(near, far.said)
        trigger, put, got = (near.fabric.open_counter(words[i]) for i in range(3))
        storer = Storer(words.path)
        for turn in range(1, 16):
            block = os.urandom(LENGTH)
            near.fill(0, block)
            near.fill(500_000, bytes(LENGTH))
            way.arm(
                way.get(10 * turn + 2, LENGTH, target=500_000, fires=(put, turn), completion=got),
                way.put(10 * turn + 1, LENGTH, flag=(0, turn), fires=(trigger, turn), completion=put),
            )
            storer.store(turn - 1)
            way.fence()
            assert words[1].load() == turn - 1
            storer.store(turn)
            wait_until(lambda turn=turn: words[2].load() == turn, "the round trip")  # type: ignore[misc]
            assert near.bytes_at(500_000, LENGTH) == block
        storer.close()
        assert {event.kind for event in near.events} <= {EventKind.DONE}
        near.all_final([10 * turn + i for turn in range(1, 16) for i in (1, 2)])


def test_both_processes_put_at_once(backend: Backend) -> None:
    """Slots that the other fills, while our own counter fires our puts; every slot and word is right."""
    slots = 40
    with (
        FlagWords.create(1) as words,
        Side(
            backend.provider, slots * SLOT_BYTES, deferred_work=backend.deferred_work, remote_read=True
        ) as near,
        Far(backend.provider, 4 << 20) as far,
    ):
        way = way_to(Side.more(near), far.said)
        counter = near.fabric.open_counter(None if backend.own_counters else words[0])
        way.arm(*(way.notify(tag, 500, tag, fires=(counter, 1 + tag)) for tag in range(200)))
        far.tell(**about(near), slots=slots)
        for slot in range(slots):
            counter.add(5)
            word, block = near.word(slot), slot_block(slot)
            wait_until(lambda word=word: word.load() != 0, f"slot {slot}")  # type: ignore[misc]
            assert near.bytes_at(slot * SLOT_BYTES, len(block)) == block
        finals = near.all_final(range(200))
        assert {finals[tag].kind for tag in range(200)} == {EventKind.DONE}
