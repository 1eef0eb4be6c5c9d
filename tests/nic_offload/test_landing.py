"""Landings and acknowledgements: which words are accepted as answers, and which are not."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from nic_offload.checksum import crc32c
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.trigger import AckWatch, Landing, WordPut, put_words, watch_acks, watch_landings
from tests.nic_offload.rig import PAGE, after_ms, wait_until

if TYPE_CHECKING:
    from tests.nic_offload.rig import Pair

LANDED, WRITTEN, DURABLE = 1, 2, 3
A_ROUND = 256 << 10  # of a checksum are made at a time


def landing(
    pair: Pair, tag: int, generation: int, length: int, *, quiet: bool = False, **more: Any
) -> Landing:
    """Slot at the far side's start, flag word 0 there; acknowledged in the near side's word `tag`."""
    fields = {
        "word": pair.far.word(0).address,
        "payload": pair.far.region.address,
        "ack_target": pair.back.word_target(tag),
        "ack_key": pair.back.key,
        "deadline_ns": 0,
    } | more
    return Landing(
        tag=tag,
        endpoint=pair.far.endpoint,
        generation=generation,
        length=length,
        peer=pair.back.peer,
        ack_value=generation << 8 | LANDED,
        quiet=quiet,
        **fields,
    )


def ack(pair: Pair, tag: int, generation: int, final: int, *, deadline_ns: int = 0) -> AckWatch:
    """A watch over the near side's word `tag`."""
    return AckWatch(tag, pair.near.endpoint, pair.near.word(tag).address, generation, deadline_ns, final)


def say(pair: Pair, word: int, generation: int, code: int) -> None:
    """Acknowledge from the far side."""
    target = pair.back.word_target(word)
    put_words(
        pair.far.fabric,
        [WordPut(pair.far.endpoint, pair.back.peer, target, pair.back.key, generation << 8 | code)],
    )


def stale(pair: Pair, count: int) -> bool:
    return pair.far.fabric.statistics().stale_words >= count


def reported(pair: Pair, count: int) -> bool:
    return len(pair.near.of(1)) == count


@pytest.mark.parametrize("length", [1, 4097, A_ROUND, 2 * A_ROUND, 3 * A_ROUND + 1, (1 << 20) - 1])
def test_a_block_lands_with_its_checksum_and_is_acknowledged(pair: Pair, length: int) -> None:
    block = os.urandom(length)
    pair.near.fill(0, block)
    watch_landings(pair.far.fabric, [landing(pair, 1, 7, length)])
    watch_acks(pair.near.fabric, [ack(pair, 1, 7, LANDED)])
    pair.there.arm(pair.there.put(9, length, flag=(0, 7)))
    event = pair.far.final(1)
    assert (event.kind, event.value) == (EventKind.LANDED, crc32c(block))
    assert pair.far.bytes_at(0, length) == block
    pair.near.wait(lambda: len(pair.near.of(1)) == 1, "the acknowledgement")
    assert pair.near.of(1)[0].value == 7 << 8 | LANDED
    assert pair.near.word(1).load() == 7 << 8 | LANDED
    assert pair.far.fabric.statistics().landed == 1
    assert pair.far.fabric.statistics().watches == 0
    assert pair.far.of(1) == [event]


def test_a_wrong_generation_is_ignored_and_then_the_right_one_accepted(pair: Pair) -> None:
    watch_landings(pair.far.fabric, [landing(pair, 1, 1 << 32 | 7, 100)])
    pair.far.fabric.cancel([0])  # when it returns, the watch stands
    # Those of the second row differ in one half of the word alone; a later one is as wrong as an earlier one.
    for count, wrong in enumerate((6, 8, 7, 1 << 32 | 6, 1 << 32 | 8, 1 << 33 | 7, (1 << 64) - 1), 1):
        pair.there.arm(pair.there.put(10 + count, 100, flag=(0, wrong)))
        wait_until(partial(stale, pair, count), "a stale word")
    pair.back.fence()
    pair.far.reap()
    assert not pair.far.of(1)
    assert pair.near.word(1).load() == 0
    assert pair.far.fabric.statistics().landed == 0
    pair.near.fill(0, b"right" * 20)
    pair.there.arm(pair.there.put(9, 100, flag=(0, 1 << 32 | 7)))
    event = pair.far.final(1)
    assert (event.kind, event.value) == (EventKind.LANDED, crc32c(b"right" * 20))
    wait_until(lambda: pair.near.word(1).load() == (1 << 32 | 7) << 8 | LANDED, "the acknowledgement")


def test_a_block_that_arrived_before_its_watch_lands(pair: Pair) -> None:
    pair.there.arm(pair.there.put(9, 100, flag=(0, 7)))
    wait_until(lambda: pair.far.word(0).load() == 7, "the flag")
    watch_landings(pair.far.fabric, [landing(pair, 1, 7, 100)])
    assert pair.far.final(1).kind == EventKind.LANDED


def test_a_missing_landing_ends_at_its_deadline(pair: Pair) -> None:
    watch_landings(pair.far.fabric, [landing(pair, 1, 7, 100, deadline_ns=after_ms(20))])
    event = pair.far.final(1)
    assert (event.kind, event.status) == (EventKind.WATCH_FAILED, -errno.ETIMEDOUT)
    pair.there.arm(pair.there.put(9, 100, flag=(0, 7)))
    wait_until(lambda: pair.far.word(0).load() == 7, "the flag")
    pair.back.fence()
    assert pair.near.word(1).load() == 0  # too late: not acknowledged
    assert pair.far.of(1) == [event]


def test_a_cancelled_landing_accepts_nothing(pair: Pair) -> None:
    watch_landings(pair.far.fabric, [landing(pair, 1, 7, 100)])
    assert pair.far.fabric.cancel([1]) == 1
    pair.there.arm(pair.there.put(9, 100, flag=(0, 7)))
    wait_until(lambda: pair.far.word(0).load() == 7, "the flag")
    pair.back.fence()
    pair.far.reap()
    assert [(event.kind, event.status) for event in pair.far.of(1)] == [
        (EventKind.WATCH_FAILED, -errno.ECANCELED)
    ]
    assert pair.near.word(1).load() == 0


def test_a_refused_acknowledgement_does_not_undo_the_landing(pair: Pair) -> None:
    """The peer gave an invalid key."""
    watch_landings(pair.far.fabric, [landing(pair, 1, 7, 100, ack_key=pair.back.key ^ 0x5A5A5A)])
    pair.there.arm(pair.there.put(9, 100, flag=(0, 7)))
    assert pair.far.final(1).kind == EventKind.LANDED
    assert pair.near.word(1).load() == 0
    pair.far.endpoint.close()
    assert pair.far.fabric.statistics().in_flight == 0


def test_acknowledgements_rise_until_the_final_one(pair: Pair) -> None:
    watch_acks(pair.near.fabric, [ack(pair, 1, 7, WRITTEN)])
    for code in (LANDED, WRITTEN, DURABLE):
        say(pair, 1, 7, code)
        if code < DURABLE:
            pair.near.wait(partial(reported, pair, code), f"code {code}")
    wait_until(lambda: pair.near.word(1).load() & 0xFF == DURABLE, "the last word")
    pair.there.fence()
    pair.near.reap()
    assert [(e.kind, e.value) for e in pair.near.of(1)] == [
        (EventKind.ACKED, 7 << 8 | LANDED),
        (EventKind.ACKED, 7 << 8 | WRITTEN),
    ]
    assert pair.near.fabric.statistics().watches == 0


def test_a_code_above_the_final_one_is_final(pair: Pair) -> None:
    watch_acks(pair.near.fabric, [ack(pair, 1, 7, WRITTEN)])
    say(pair, 1, 7, 200)
    pair.near.wait(lambda: len(pair.near.of(1)) == 1, "the acknowledgement")
    wait_until(lambda: pair.near.fabric.statistics().watches == 0, "the end of the watch")


def test_acknowledgements_of_another_generation_are_ignored(pair: Pair) -> None:
    say(pair, 1, 6, DURABLE)
    wait_until(lambda: pair.near.word(1).load() == 6 << 8 | DURABLE, "the old word")
    watch_acks(pair.near.fabric, [ack(pair, 1, 7, LANDED)])
    pair.there.fence()
    say(pair, 1, 8, DURABLE)
    wait_until(lambda: pair.near.word(1).load() == 8 << 8 | DURABLE, "a word of the future")
    pair.there.fence()
    pair.near.reap()
    assert not pair.near.of(1)
    say(pair, 1, 7, LANDED)
    pair.near.wait(lambda: len(pair.near.of(1)) == 1, "the acknowledgement")


def test_an_acknowledgement_that_arrived_before_its_watch_is_seen(pair: Pair) -> None:
    say(pair, 1, 7, WRITTEN)
    wait_until(lambda: pair.near.word(1).load() == 7 << 8 | WRITTEN, "the word")
    watch_acks(pair.near.fabric, [ack(pair, 1, 7, WRITTEN)])
    pair.near.wait(lambda: len(pair.near.of(1)) == 1, "the acknowledgement")
    assert pair.near.of(1)[0].value == 7 << 8 | WRITTEN


def test_a_missing_acknowledgement_ends_at_its_deadline(pair: Pair) -> None:
    watch_acks(pair.near.fabric, [ack(pair, 1, 7, WRITTEN, deadline_ns=after_ms(20))])
    event = pair.near.final(1)
    assert (event.kind, event.status) == (EventKind.WATCH_FAILED, -errno.ETIMEDOUT)
    say(pair, 1, 7, WRITTEN)
    wait_until(lambda: pair.near.word(1).load() == 7 << 8 | WRITTEN, "the word")
    pair.there.fence()
    assert pair.near.of(1) == [event]


def test_many_slots_land_each_with_its_own_checksum(pair: Pair) -> None:
    pair.there.fence()  # sockets (1.17), when busy, may never deliver a burst that is the first thing on a connection
    count, slot_bytes = 200, PAGE
    blocks = [os.urandom(slot_bytes - i) for i in range(count)]
    for i, block in enumerate(blocks):
        pair.near.fill(i * slot_bytes, block)
    watch_landings(
        pair.far.fabric,
        [
            landing(
                pair,
                i,
                1000 + i,
                len(block),
                word=pair.far.word(i).address,
                payload=pair.far.region.address + i * slot_bytes,
            )
            for i, block in enumerate(blocks)
        ],
    )
    watch_acks(pair.near.fabric, [ack(pair, i, 1000 + i, LANDED) for i in range(count)])
    pair.there.arm(
        *(
            pair.there.put(
                500 + i, len(block), source=i * slot_bytes, target=i * slot_bytes, flag=(i, 1000 + i)
            )
            for i, block in enumerate(blocks)
        )
    )
    finals = pair.far.all_final(range(count))
    assert [finals[i].value for i in range(count)] == [crc32c(block) for block in blocks]
    pair.near.wait(lambda: all(pair.near.of(i) for i in range(count)), "all acknowledgements")


def test_a_word_at_an_unaligned_address_is_refused(pair: Pair) -> None:
    odd = pair.far.word(0).address + 4
    with pytest.raises(FabricError, match=str(-errno.EINVAL)):
        watch_landings(pair.far.fabric, [landing(pair, 1, 7, 100, word=odd)])
    with pytest.raises(FabricError, match=str(-errno.EINVAL)):
        watch_landings(pair.far.fabric, [landing(pair, 1, 7, 100, ack_target=pair.back.word_target(1) + 1)])
    with pytest.raises(FabricError, match=str(-errno.EINVAL)):
        watch_acks(pair.near.fabric, [ack(pair, 1, 7, 1)._replace(word=pair.near.word(1).address + 2)])
