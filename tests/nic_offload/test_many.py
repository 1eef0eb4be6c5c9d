"""Large numbers of endpoints, peers and events; and an idle fabric, which sleeps."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import select
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.node.heap import used_bytes
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import WordPut, put_words
from tests.nic_offload.rig import PAGE, Pair, Side, Way, happens_more_often, wait_until

if TYPE_CHECKING:
    from nic_offload.flags import FlagWord

ENDPOINTS = 16
MIB = 1 << 20


def holds(word: FlagWord, value: int) -> bool:
    return word.load() == value


def test_one_fabric_serves_16_endpoints_each_with_its_own_peer(provider: str) -> None:
    length, puts = 4001, 20
    node = Side(provider)
    endpoints = 4 if provider == "tcp;ofi_rxm" else ENDPOINTS  # each takes it a sixth of a second
    peers = [Side(provider, 32 * PAGE) for _ in range(endpoints)]
    sides = [Side.more(node) for _ in peers]
    try:
        blocks = [os.urandom(length) for _ in peers]
        ways = [Way.between(side, peer) for side, peer in zip(sides, peers, strict=True)]
        for i, (way, block) in enumerate(zip(ways, blocks, strict=True)):
            node.fill(i * PAGE, block)
            way.arm(
                *(
                    way.put(100 * i + j, length, source=i * PAGE, target=j * length, flag=(j, i + 1))
                    for j in range(puts)
                )
            )
        finals = node.all_final(100 * i + j for i in range(endpoints) for j in range(puts))
        assert {event.kind for event in finals.values()} == {EventKind.DONE}
        for i, (peer, block) in enumerate(zip(peers, blocks, strict=True)):
            for j in range(puts):
                wait_until(partial(holds, peer.word(j), i + 1), "a flag")
                assert peer.bytes_at(j * length, length) == block
    finally:
        node.close()
        for peer in peers:
            peer.close()


def test_puts_in_both_directions_at_once(pair: Pair) -> None:
    blocks = os.urandom(30_000), os.urandom(30_000)
    pair.near.fill(0, blocks[0])
    pair.far.fill(0, blocks[1])
    half = pair.near.length // 2
    for way in (pair.there, pair.back):
        way.arm(*(way.put(tag, 30_000, target=half, flag=(0, 7)) for tag in range(100)))
    pair.near.all_final(range(100))
    pair.far.all_final(range(100))
    wait_until(lambda: pair.near.word(0).load() == pair.far.word(0).load() == 7, "both flags")
    assert pair.far.bytes_at(half, 30_000) == blocks[0]
    assert pair.near.bytes_at(half, 30_000) == blocks[1]


def test_an_idle_fabric_sleeps(provider: str) -> None:
    """It has a waiting put, so that it has something to check."""
    with Pair(provider) as pair:
        pair.there.fence()
        pair.there.arm(pair.there.put(1, 8, fires=(pair.flags[0], 1)))
        sides, slept, used_s = (pair.near, pair.far), list[int](), list[float]()
        for _ in range(5):  # some of these seconds may have been another process's
            sleeps, began_s = pair.near.fabric.statistics().sleeps, time.process_time()
            assert not select.select([side.fabric for side in sides], [], [], 1.0)[0], "nothing comes"
            used_s.append(time.process_time() - began_s)
            slept.append(pair.near.fabric.statistics().sleeps - sleeps)
            if used_s[-1] < 0.2 and slept[-1] > 50:
                break
        assert min(used_s) < 0.2, "of a core, for all threads"
        assert max(slept) > 50, "it looks, at least every few milliseconds"
        assert not pair.near.of(1)


def test_a_sleeping_fabric_wakes_for_new_work(pair: Pair) -> None:
    """By itself it would check every 20 ms: a tenth would be posted within 2 ms."""
    pair.there.fence()
    tags = itertools.count()

    def is_soon() -> bool:
        tag, asleep = next(tags), pair.near.fabric.statistics().sleeps
        wait_until(lambda: pair.near.fabric.statistics().sleeps > asleep + 3, "sleep")
        before = time.monotonic_ns()
        pair.there.arm(pair.there.put(tag, 0, flag=(0, 7)))
        return pair.near.final(tag).value - before < 2_000_000  # until it was posted

    assert happens_more_often(is_soon, 1 / 10)


def test_events_arrive_in_order_and_in_batches(pair: Pair) -> None:
    total = 3000
    flag = pair.flags[0]
    for start in range(0, total, 500):
        pair.there.arm(*(pair.there.put(start + i, 8, fires=(flag, start + i + 1)) for i in range(500)))
    flag.store(total)
    pair.near.all_final(range(total))
    assert [event.kind for event in pair.near.events] == [EventKind.DONE] * total
    times = [event.time_ns for event in pair.near.events]
    assert times == sorted(times)
    assert not pair.near.fabric.reap()
    assert not select.select([pair.near.fabric], [], [], 0)[0]


def test_unread_events_are_bounded(provider: str) -> None:
    with Pair(provider, work_max=64) as pair:
        put = pair.there.put(1, 8)
        armed = 0

        def no_room_at_rest() -> bool:
            nonlocal armed
            try:
                pair.there.arm(put)
            except FabricError as error:
                if str(-errno.EAGAIN) not in str(error):
                    raise
                return armed > 4 * 64 and pair.near.fabric.statistics().done == armed
            armed += 1
            return False

        wait_until(no_room_at_rest, "a refusal")
        assert armed <= 6 * 64 + 1  # as many may be waiting to be published, and as many be under way
        pair.near.wait(lambda: len(pair.near.events) == armed, "all events")
        pair.there.fence()


@pytest.mark.parametrize("provider", ["net"])
def test_memory_for_queued_work_is_freed_once_nothing_needed_it_between_two_checks(pair: Pair) -> None:
    """Most of the queue is cancelled; the rest stays in place, and fires."""
    near, there, flag = pair.near, pair.there, pair.flags[0]
    tags, more = range(16 << 10), range(16 << 10, 20 << 10)
    kept = {*tags[:100], tags[len(tags) // 2]}
    there.fence()
    near.fabric.shrink()
    gc.collect()  # what earlier tests have left
    before = used_bytes()
    for first in tags[::1024]:
        there.arm(*(there.put(tag, 8, fires=(flag, 1)) for tag in tags[first : first + 1024]))
    full = used_bytes()
    assert full - before > 6 * MIB, "queued work takes memory"
    near.fabric.cancel(sorted(set(tags) - kept))
    near.all_final(set(tags) - kept)
    near.fabric.shrink()
    assert used_bytes() > full - MIB, "it was needed since the last look"
    near.fabric.shrink()
    assert used_bytes() < before + 3 * MIB
    flag.store(1)
    near.all_final(kept)
    there.arm(*(there.put(tag, 8, fires=(flag, 2)) for tag in more))
    flag.store(2)
    finals = near.all_final(more)
    assert {finals[tag].kind for tag in kept.union(more)} == {EventKind.DONE}


def test_words_put_quietly_report_nothing(pair: Pair) -> None:
    near, there = pair.near, pair.there
    for i in range(100):
        word = WordPut(near.endpoint, there.peer, there.word_target(i), there.key, i + 1)
        put_words(near.fabric, [word])
    wait_until(lambda: all(pair.far.word(i).load() == i + 1 for i in range(100)), "all words")
    there.fence()
    near.reap()
    assert [event.tag for event in near.events if event.tag < 1 << 60] == []
    assert near.fabric.statistics().acks_sent == 100


@pytest.mark.parametrize("length", [0, 257])
def test_an_empty_address_is_refused(pair: Pair, length: int) -> None:
    with pytest.raises(FabricError):
        pair.near.fabric.add_peer(b"x" * length)
