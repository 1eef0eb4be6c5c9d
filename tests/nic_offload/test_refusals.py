"""Refused calls, and that a refused call has changed nothing."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from nic_offload.checksum import crc32c
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import WordPut, put_words
from tests.nic_offload.rig import Pair, wait_until

if TYPE_CHECKING:
    from nic_offload.fabric import Event
    from nic_offload.flags import FlagWord

CANARY = b"canary" * 1000
OURS = {-errno.ECANCELED, -errno.ETIMEDOUT, -errno.EBADMSG}  # each says that nothing went out


def more_than(events: list[Event], count: int) -> bool:
    return len(events) > count


def fails_at_the_peer(pair: Pair, tag: int) -> None:
    """A refused write is never reported as done; on shm its end never comes.

    A failure never looks like one of ours: each of those says that nothing went out.
    """
    if pair.provider == "shm":
        for fabric in (pair.near.fabric, pair.far.fabric):
            loops = fabric.statistics().loops
            wait_until(
                partial(lambda fabric, loops: fabric.statistics().loops > loops + 50, fabric, loops), "rounds"
            )
    else:
        event = pair.near.final(tag)
        assert event.kind == EventKind.FAILED
        assert event.status not in OURS


def test_bytes_that_differ_from_their_checksum_are_not_sent(pair: Pair, flag: FlagWord) -> None:
    near, there = pair.near, pair.there
    pair.far.fill(0, CANARY)
    block = os.urandom(700_001)
    near.fill(0, block)
    right = crc32c(block)
    there.arm(
        there.put(1, len(block), flag=(0, 7), crc32c=right ^ 1),
        there.put(2, len(block), flag=(1, 7), crc32c=right, fires=(flag, 1)),
    )
    event = near.final(1)
    assert (event.kind, event.status) == (EventKind.FAILED, -errno.EBADMSG)
    near.fill(len(block) - 1, bytes([block[-1] ^ 0x80]))  # the second one's source changes after it was armed
    flag.store(1)
    assert near.final(2).status == -errno.EBADMSG
    there.fence()
    there.fence()
    assert pair.far.bytes_at(0, len(CANARY)) == CANARY
    assert (pair.far.word(0).load(), pair.far.word(1).load()) == (0, 0)
    assert near.fabric.statistics().put_bytes == 0


def test_bytes_that_match_their_checksum_are_sent(pair: Pair) -> None:
    block = os.urandom(700_001)
    pair.near.fill(5, block)
    pair.there.arm(pair.there.put(1, len(block), source=5, crc32c=crc32c(block)))
    assert pair.near.final(1).kind == EventKind.DONE


@pytest.mark.parametrize("length", [9, 6000, 900_000])
def test_an_invalid_key_writes_nothing(pair: Pair, length: int) -> None:
    near, there = pair.near, pair.there
    pair.far.fill(0, CANARY)
    near.fill(0, os.urandom(length))
    bad = there.key ^ 0x5A5A5A
    there.arm(there.put(1, length, flag=(0, 7), target_key=bad))
    fails_at_the_peer(pair, 1)
    near.endpoint.close()
    near.region.close()
    assert near.fabric.statistics().in_flight == 0
    pair.far.endpoint.close()
    assert pair.far.bytes_at(0, len(CANARY)) == CANARY
    assert pair.far.word(0).load() == 0


@pytest.mark.parametrize("length", [8, 100, 9000])
def test_without_a_flag_an_invalid_key_writes_nothing(pair: Pair, length: int) -> None:
    pair.far.fill(0, CANARY)
    pair.near.fill(0, os.urandom(length))
    bad = pair.there.key ^ 0x5A5A5A
    pair.there.arm(pair.there.put(1, length, target_key=bad))
    target = pair.there.word_target(1)
    put_words(pair.near.fabric, [WordPut(pair.near.endpoint, pair.there.peer, target, bad, 5)])
    fails_at_the_peer(pair, 1)
    pair.near.endpoint.close()
    pair.far.endpoint.close()
    assert pair.far.bytes_at(0, len(CANARY)) == CANARY
    assert pair.far.word(1).load() == 0


def test_the_key_of_a_closed_region_writes_nothing(pair: Pair) -> None:
    pair.there.arm(pair.there.put(1, 100, flag=(0, 7)))
    pair.near.final(1)
    pair.far.region.close()
    pair.far.fill(0, CANARY)
    pair.far.memory[pair.far.length : pair.far.length + 8] = bytes(8)
    pair.near.fill(0, b"x" * 6000)
    pair.there.arm(pair.there.put(2, 6000, flag=(0, 8)))
    fails_at_the_peer(pair, 2)
    pair.near.endpoint.close()
    pair.far.endpoint.close()
    assert pair.far.bytes_at(0, len(CANARY)) == CANARY
    assert pair.far.memory[pair.far.length : pair.far.length + 8] == bytes(8)


def test_a_write_past_the_end_of_a_region_writes_nothing(pair: Pair) -> None:
    pair.far.fill(pair.far.length - len(CANARY), CANARY)
    pair.near.fill(0, b"x" * 9000)
    pair.there.arm(pair.there.put(1, 9000, target=pair.far.length))  # more than the page of words has
    fails_at_the_peer(pair, 1)
    pair.near.endpoint.close()
    pair.far.endpoint.close()
    assert pair.far.bytes_at(pair.far.length - len(CANARY), len(CANARY)) == CANARY
    assert pair.far.word(0).load() == 0


def test_a_region_is_closed_only_when_no_put_reads_from_it(pair: Pair, flag: FlagWord) -> None:
    near, there = pair.near, pair.there
    there.arm(*(there.put(tag, 9, fires=(flag, 1)) for tag in (1, 2)))
    for _ in range(2):
        with pytest.raises(FabricError, match=str(-errno.EBUSY)):
            near.region.close()
    assert near.fabric.cancel([1]) == 1
    with pytest.raises(FabricError, match=str(-errno.EBUSY)):
        near.region.close()
    assert near.fabric.cancel([2]) == 1
    near.region.close()
    near.region.close()


@pytest.mark.parametrize(("source", "length"), [(-1, 9), (1 << 20, 4097), (4097, 1 << 20), (1 << 40, 1)])
def test_a_source_outside_its_region_is_refused(pair: Pair, source: int, length: int) -> None:
    with pytest.raises(FabricError, match=str(-errno.ERANGE)):
        pair.there.arm(pair.there.put(1, 8), pair.there.put(2, length, source=source))
    assert pair.near.fabric.statistics().armed == 0
    pair.near.region.close()  # nothing uses it


def test_a_region_of_another_fabric_is_refused(pair: Pair) -> None:
    with pytest.raises(FabricError, match=str(-errno.ERANGE)):
        pair.there.arm(pair.there.put(1, 9)._replace(region=pair.far.region, source=pair.far.region.address))
    with pytest.raises(FabricError, match=str(-errno.EINVAL)):
        pair.there.arm(pair.there.put(1, 9, endpoint=pair.far.endpoint))


def test_words_at_unaligned_addresses_are_refused(pair: Pair) -> None:
    for put in (
        pair.there.put(1, 9, flag_target=pair.there.word_target(0) + 4),
        pair.there.put(1, 9, flag_target=pair.there.word_target(0) + 1),
    ):
        with pytest.raises(FabricError, match=str(-errno.EINVAL)):
            pair.there.arm(put)
    target = pair.there.word_target(0) + 2
    word = WordPut(pair.near.endpoint, pair.there.peer, target, pair.there.key, 1)
    with pytest.raises(FabricError, match=str(-errno.EINVAL)):
        put_words(pair.near.fabric, [word])


def test_an_empty_put_is_refused(pair: Pair) -> None:
    with pytest.raises(FabricError, match=str(-errno.EINVAL)):
        pair.there.arm(pair.there.put(1, 0))


def test_queued_work_is_bounded_and_refused_as_a_whole(provider: str) -> None:
    with Pair(provider, work_max=1024) as pair:
        near, there, flag = pair.near, pair.there, pair.flags[0]
        there.arm(*(there.put(tag, 8, fires=(flag, 1)) for tag in range(1000)))
        with pytest.raises(FabricError, match=str(-errno.EAGAIN)):
            there.arm(*(there.put(tag, 8, fires=(flag, 1)) for tag in range(1000, 1025)))
        there.arm(*(there.put(tag, 8, fires=(flag, 1)) for tag in range(1000, 1024)))
        with pytest.raises(FabricError, match=str(-errno.EAGAIN)):
            there.arm(there.put(5000, 8))
        flag.store(1)
        near.all_final(range(1024))
        assert near.fabric.statistics().armed == 1024
        there.fence()
        assert {event.tag for event in near.events if event.tag < 1 << 62} == set(range(1024))


def test_20000_puts_go_through_a_small_queue(provider: str) -> None:
    """One flag word counts up; each batch is armed as soon as there is room."""
    with Pair(provider, work_max=1024) as pair:
        near, there, flag = pair.near, pair.there, pair.flags[0]
        total, batch, armed = 20_000, 250, 0
        near.fill(0, os.urandom(16))
        while armed < total:
            flag.store(armed)
            try:
                there.arm(
                    *(
                        there.put(tag, 16, target=16 * (tag % 60_000), fires=(flag, tag + 1))
                        for tag in range(armed, armed + batch)
                    )
                )
                armed += batch
            except FabricError:
                near.wait(partial(more_than, near.events, len(near.events)), "room")
        flag.store(total)
        near.wait(lambda: len(near.events) >= total, "all of them")
        there.fence()
        assert near.fabric.statistics().done == total + 1
        assert {event.kind for event in near.events} == {EventKind.DONE}
        assert len({event.tag for event in near.events}) == total + 1
        assert near.fabric.statistics().waiting == 0
