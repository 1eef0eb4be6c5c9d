"""The shelf and its desk: what the C core answers, and what it leaves to the application.

Calls are packed here from what `kvstore/wire/fabric_call.py` says of them, and by no code of it.
"""

from __future__ import annotations

import os
import random
import struct
from array import array
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from nic_offload.checksum import crc32c
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.shelf import Served, Shelf, Shelved
from nic_offload.trigger import Landing, watch_landings
from tests.nic_offload.rig import PAGE, Pair, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nic_offload.shelf import Desk

OWNER, FINGERPRINT = b"o" * 16, b"f" * 16
SERVED, BROKEN, DONE = 0x7F, 0x85, 1
CALL_AT = 512 << 10  # the node's place, and where the client packs it: blocks lie before
CALL_WORD, ANSWER_WORD = 0, 500
PLACE_BYTES = 16 << 10
ANSWERS_AT = 640 << 10  # where the client reads answers of a node that tells it where blocks are
PARTS = 3  # a kind of call
FIRST = 1 << 40
TAG, DESK = 7, 77


@dataclass(frozen=True)
class Row:
    """A requested block: the shelf's block `number`, to the same place at the peer."""

    number: int
    length: int
    ack_word: int
    key: bytes = b""
    ack_generation: int = 3
    part: tuple[int, int] = (0, 0)  # of a call of kind 3: the bytes before it, and of it


@dataclass(frozen=True)
class Wanted:
    """A call that is valid unless a field says otherwise."""

    rows: tuple[Row, ...]
    generation: int = FIRST
    kind: int = 1
    flags: int = 0
    ack_word: int = ANSWER_WORD
    fingerprint: bytes = FINGERPRINT
    metadata: bytes = b"\x03\x02\x00\x00keyva\x00\x00\x00\x00\x00\x00\x00"
    blocks: int | None = None
    more_bytes: int = 0
    spoilt: bool = False


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


class ShelfRig:
    """The far side is the node: blocks at its memory's start, a place for calls behind them, a shelf and a desk."""

    def __init__(
        self, pair: Pair, *, bytes_max: int = 1 << 30, shares: bool = False, shelf: Shelf | None = None
    ) -> None:
        self.pair = pair
        self.shelf = Shelf(pair.far.fabric, pair.far.region) if shelf is None else shelf
        self.desk: Desk = self.shelf.open_desk(
            pair.far.endpoint,
            pair.back.peer,
            OWNER,
            DESK,
            (pair.back.word_target(0), pair.back.key, PAGE // 8),
            (SERVED, BROKEN),
            bytes_max,
            (pair.far.word(CALL_WORD).address, pair.back.base + ANSWERS_AT),
            shares=shares,
        )
        self.desk.answers(answers=True)
        self.blocks: dict[int, bytes] = {}
        self.puts = 100
        self.watch(FIRST)

    def watch(self, generation: int, place: int = 0) -> None:
        far = self.pair.far
        landing = Landing(
            tag=TAG,
            endpoint=far.endpoint,
            word=far.word(CALL_WORD + place).address,
            generation=generation,
            payload=far.region.address + CALL_AT + place * PLACE_BYTES,
            peer=self.pair.back.peer,
            ack_target=0,
            ack_key=0,
            ack_value=0,
            deadline_ns=0,
            length=0,
            quiet=True,
            desk=self.desk,
            region=far.region,
        )
        watch_landings(far.fabric, [landing])

    def store(self, number: int, offset: int, length: int) -> Shelved:
        """Put a block at this offset on the shelf, with its number plus 1000 as its id."""
        self.blocks[number] = os.urandom(length)
        self.pair.far.fill(offset, self.blocks[number])
        shelved = Shelved(
            OWNER,
            key_of(number),
            FINGERPRINT,
            1000 + number,
            self.pair.far.region.address + offset,
            length,
            crc32c(self.blocks[number]),
        )
        self.shelf.put([shelved])
        return shelved

    def call(self, wanted: Wanted, *, flag: int | None = None, place: int = 0) -> None:
        """Put a call into the node's place; `Row.number` times 4096 is where a block goes to."""
        back = self.pair.there
        rows = b"".join(
            struct.pack(
                "<32sIIQQQ",
                row.key or key_of(row.number),
                row.length,
                row.ack_word,
                row.ack_generation,
                self.pair.back.base + row.number * PAGE,
                self.pair.back.key,
            )
            + (struct.pack("<II", *row.part) if wanted.kind == PARTS else b"")
            for row in wanted.rows
        )
        blocks = len(wanted.rows) if wanted.blocks is None else wanted.blocks
        body = wanted.metadata + rows + bytes(wanted.more_bytes)
        head = struct.pack(
            "<IQBBBBIIIIIQ16s",
            64 + len(body),
            wanted.generation,
            wanted.kind,
            wanted.flags,
            0,
            0,
            len(wanted.metadata),
            blocks,
            wanted.ack_word,
            0,
            0,
            0,
            wanted.fingerprint,
        )
        data = crc32c(head + body).to_bytes(4, "little") + head + body
        if wanted.spoilt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.pair.near.fill(CALL_AT, data)
        self.puts += 1
        back.arm(
            back.put(
                self.puts,
                len(data),
                source=CALL_AT,
                target=CALL_AT + place * PLACE_BYTES,
                flag=(CALL_WORD + place, wanted.generation if flag is None else flag),
            )
        )

    def acked(self, word: int) -> int:
        """Wait for a peer's word; returns its code."""
        there = self.pair.near.word(word)
        wait_until(lambda: there.load() != 0, f"word {word}")
        return there.load() & 0xFF

    def answered(self, generation: int = FIRST) -> bool:
        return self.pair.near.word(ANSWER_WORD).load() == generation << 8 | DONE

    def has_served_more(self, before: int) -> bool:
        return self.pair.far.fabric.statistics().served > before

    def has_ended(self, generation: int) -> bool:
        self.pair.far.reap()
        return TAG in self.pair.far.finals() or self.answered(generation)

    def got(self, number: int, length: int) -> bytes:
        return self.pair.near.bytes_at(number * PAGE, length)

    def served(self, calls: int = 1) -> list[Served]:
        told: list[Served] = []

        def all_told() -> bool:
            told.extend(self.shelf.served())
            return len(told) >= calls

        wait_until(all_told, f"{calls} calls to be over")
        return told

    def left_to_us(self, wanted: Wanted) -> None:
        """The call is left to the application, and nothing was sent."""
        before = self.pair.near.bytes_at(0, CALL_AT)
        self.call(wanted)
        event = self.pair.far.final(TAG)
        assert (event.kind, event.value) == (EventKind.LANDED, wanted.generation)
        self.pair.back.fence()
        assert self.pair.near.bytes_at(0, CALL_AT) == before
        assert not self.answered()
        assert list(self.shelf.served()) == []
        assert self.pair.far.fabric.statistics().served == 0


@pytest.fixture
def rig(pair: Pair) -> Iterator[ShelfRig]:
    yield ShelfRig(pair)  # noqa: PT022 - closed with the pair, whose fabrics own it


def two(rig: ShelfRig) -> tuple[Row, Row]:
    rig.store(1, 0, 5000)
    rig.store(2, 8192, 1)
    return Row(1, 5000, 1), Row(4, 1, 2, key=key_of(2))


def test_a_call_for_blocks_on_the_shelf_is_answered_without_the_application(rig: ShelfRig) -> None:
    rows = two(rig)
    for generation in (FIRST, FIRST + 1, FIRST + 2):
        rig.pair.near.fill(0, bytes(CALL_AT))
        for word in (1, 2, ANSWER_WORD):
            rig.pair.near.word(word).store(0)
        rig.call(Wanted(rows, generation))
        assert [rig.acked(word) for word in (1, 2, ANSWER_WORD)] == [SERVED, SERVED, DONE]
        assert rig.answered(generation)
        assert rig.pair.near.word(1).load() >> 8 == 3
        assert (rig.got(1, 5000), rig.got(4, 1)) == (rig.blocks[1], rig.blocks[2])
        (told,) = rig.served()
        assert (told.desk, list(told.ids), told.size_bytes) == (DESK, [1001, 1002], 5001)
        assert told.metadata.startswith(b"\x03\x02\x00\x00keyva")
        assert 0 < told.began_ns <= told.ended_ns
        assert (told.corrupt, told.failed) == (0, 0)
    rig.pair.far.reap()
    assert rig.pair.far.of(TAG) == []
    statistics = rig.pair.far.fabric.statistics()
    assert (statistics.served, statistics.landed) == (6, 0)
    assert rig.shelf.take([1001])[0]
    assert rig.shelf.take([1002])[0]


OTHERS: dict[str, Callable[[tuple[Row, Row]], Wanted]] = {
    "a block that is not there": lambda rows: Wanted((*rows, Row(9, 10, 3))),
    "another length": lambda rows: Wanted((replace(rows[0], length=4999), rows[1])),
    "another layout": lambda rows: Wanted(rows, fingerprint=b"g" * 16),
    "something to tell": lambda rows: Wanted(rows, flags=1),
    "another call": lambda rows: Wanted(rows, kind=2),
    "a word beyond the last": lambda rows: Wanted((replace(rows[0], ack_word=PAGE // 8), rows[1])),
    "an answer beyond the last": lambda rows: Wanted(rows, ack_word=PAGE // 8),
    "a generation that no word holds": lambda rows: Wanted(
        (replace(rows[0], ack_generation=1 << 56), rows[1])
    ),
    "the generation 0": lambda rows: Wanted((replace(rows[0], ack_generation=0), rows[1])),
    "one block more than its bytes": lambda rows: Wanted(rows, blocks=3),
    "one block fewer": lambda rows: Wanted(rows, blocks=1),
    "no blocks": lambda _: Wanted(()),
    "bytes behind its end": lambda rows: Wanted(rows, more_bytes=8),
    "a spoilt byte": lambda rows: Wanted(rows, spoilt=True),
    "metadata of odd length": lambda rows: Wanted(rows, metadata=b"123"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_any_other_call_is_left_to_the_application(rig: ShelfRig, what: str) -> None:
    rig.left_to_us(OTHERS[what](two(rig)))


def test_a_call_with_another_generation_inside_is_left_to_the_application(rig: ShelfRig) -> None:
    rows = two(rig)
    rig.call(Wanted(rows, FIRST - 1), flag=FIRST)
    assert rig.pair.far.final(TAG).value == FIRST
    assert not rig.answered()


def test_an_unlisted_block_is_no_longer_sent(rig: ShelfRig) -> None:
    rows = two(rig)
    rig.shelf.unlist(OWNER + key_of(2))
    assert len(rig.shelf) == 1
    rig.left_to_us(Wanted(rows))


def test_a_taken_block_is_no_longer_sent(rig: ShelfRig) -> None:
    rows = two(rig)
    assert rig.shelf.take([1001])[0]
    assert rig.shelf.take([1001])[0], "and again"
    rig.left_to_us(Wanted(rows))


def test_blocks_of_another_owner_are_not_found(rig: ShelfRig) -> None:
    rows = two(rig)
    shelved = rig.store(3, 16384, 100)
    rig.shelf.unlist(OWNER + key_of(3))
    rig.shelf.put([shelved._replace(owner=b"p" * 16, id=5000)])
    rig.left_to_us(Wanted((*rows, Row(3, 100, 3))))


def test_no_owner_finds_a_block_of_another_owner(rig: ShelfRig) -> None:
    """Enough owners for some to share the hash chain of the block."""
    rows = two(rig)
    dice = random.Random(17)
    for _ in range(20_000):
        rig.shelf.unlist(dice.randbytes(16) + key_of(1))
        rig.shelf.unlist(dice.randbytes(16) + key_of(2))
    assert len(rig.shelf) == 2
    rig.call(Wanted(rows))
    assert [rig.acked(word) for word in (1, 2)] == [SERVED, SERVED]


def test_a_desk_that_does_not_answer_leaves_all_to_the_application(rig: ShelfRig) -> None:
    rig.desk.answers(answers=False)
    rig.left_to_us(Wanted(two(rig)))


def test_more_bytes_than_a_desk_may_send_at_a_time_are_left_to_the_application(pair: Pair) -> None:
    rig = ShelfRig(pair, bytes_max=5000)
    rig.left_to_us(Wanted(two(rig)))


def test_half_of_the_room_for_operations_is_left_to_the_application(provider: str) -> None:
    with Pair(provider, work_max=64) as pair:
        turned = SimpleNamespace(near=pair.far, far=pair.near, there=pair.back, back=pair.there)
        rig = ShelfRig(cast("Pair", turned))
        rig.store(1, 0, 1)
        rig.call(Wanted(tuple(Row(1, 1, 1) for _ in range(20))))
        assert rig.acked(ANSWER_WORD) == DONE
        rig.served()
        rig.call(Wanted(tuple(Row(1, 1, 1) for _ in range(40)), FIRST + 1))
        assert rig.pair.far.final(TAG).value == FIRST + 1


def test_a_block_of_the_same_name_replaces_the_other(rig: ShelfRig) -> None:
    first = rig.store(1, 0, 5000)
    second = os.urandom(5000)
    rig.pair.far.fill(8192, second)
    rig.shelf.put([first._replace(id=2000, address=first.address + 8192, crc32c=crc32c(second))])
    assert len(rig.shelf) == 1
    rig.call(Wanted((Row(1, 5000, 1),)))
    assert rig.acked(1) == SERVED
    assert rig.got(1, 5000) == second
    (told,) = rig.served()
    assert list(told.ids) == [2000]


def test_a_block_whose_bytes_changed_is_a_miss_and_leaves_the_shelf(rig: ShelfRig) -> None:
    rows = two(rig)
    rig.pair.far.fill(4000, bytes(8))
    rig.call(Wanted(rows))
    assert (rig.acked(1), rig.acked(2), rig.acked(ANSWER_WORD)) == (BROKEN, SERVED, DONE)
    assert rig.pair.near.word(1).load() >> 8 == 3
    assert rig.got(1, 5000) == bytes(5000)
    (told,) = rig.served()
    assert (told.corrupt, told.failed) == (1, 0)
    assert len(rig.shelf) == 1
    rig.pair.far.reap()
    rig.call(Wanted(rows, FIRST + 1))
    assert rig.pair.far.final(TAG).value == FIRST + 1


def is_free(shelf: Shelf, number: int) -> bool:
    return shelf.take([number])[0]


def test_memory_being_sent_is_not_reused(provider: str) -> None:
    """Taken while the call is answered, which takes long; when `take` returns true, all bytes are sent."""
    length, words, at = 8 << 20, range(1, 9), 1 << 20
    busy = 0
    with Pair(provider, at + length) as pair:
        rig = ShelfRig(pair)
        for number in range(12):
            rig.store(number, at, length)
            for word in words:
                pair.near.word(word).store(0)
            before = pair.far.fabric.statistics().served
            rows = tuple(Row(at // PAGE, length, word, key=key_of(number)) for word in words)
            rig.call(Wanted(rows, FIRST + number))
            wait_until(partial(rig.has_served_more, before), "the answer")
            if not is_free(rig.shelf, 1000 + number):
                busy += 1
                assert len(rig.shelf) == 1, "it is known until it is over"
                wait_until(partial(is_free, rig.shelf, 1000 + number), "its end")
            pair.far.fill(at, bytes(length))
            (told,) = rig.served()
            assert (told.corrupt, told.failed) == (0, 0)
            assert [rig.acked(word) for word in words] == [SERVED] * 8
            assert rig.got(at // PAGE, length) == rig.blocks[number]
            assert len(rig.shelf) == 0
    assert busy, "never in the middle"


def test_a_closing_endpoint_releases_everything(rig: ShelfRig) -> None:
    length = 256 << 10
    rig.store(1, 0, length)
    rig.call(Wanted(tuple(Row(0, length, 1, key=key_of(1)) for _ in range(16))))
    wait_until(lambda: rig.pair.far.fabric.statistics().served > 0, "the answer")
    rig.pair.far.endpoint.close()
    assert rig.shelf.take([1001])[0]
    (told,) = rig.served()
    assert len(told.ids) == 16
    rig.desk.close()


def test_calls_go_to_the_application_again_if_reports_are_not_fetched(rig: ShelfRig) -> None:
    rig.store(1, 0, 1)
    wanted = Wanted((Row(1, 1, 1),), metadata=bytes(60_000))
    generation = FIRST
    while TAG not in rig.pair.far.finals():
        rig.pair.near.word(ANSWER_WORD).store(0)
        rig.call(replace(wanted, generation=generation))
        wait_until(partial(rig.has_ended, generation), "an end")
        generation += 1
        assert generation - FIRST < 100
    calls = generation - 1 - FIRST
    assert calls == (1 << 20) // 60_072  # a megabyte of them
    assert len(rig.served(calls)) == calls
    rig.pair.far.events.clear()
    rig.watch(generation)
    rig.call(replace(wanted, generation=generation))
    wait_until(partial(rig.answered, generation), "the answer")


def test_thousands_of_names_come_and_go(rig: ShelfRig) -> None:
    one = rig.store(0, 0, 64)
    numbers = random.Random(1).sample(range(1, 1 << 60), 5000)
    rig.shelf.put([one._replace(key=key_of(number), id=number) for number in numbers])
    assert len(rig.shelf) == 5001
    for at in range(0, 5000, 100):
        rows = tuple(Row(0, 64, 1, key=key_of(number)) for number in numbers[at : at + 100])
        rig.call(Wanted(rows, FIRST + at // 100))
        (told,) = rig.served()
        assert list(told.ids) == numbers[at : at + 100]
    for number in numbers[:1000]:
        rig.shelf.unlist(OWNER + key_of(number))
    rig.shelf.unlist(b"".join(OWNER + key_of(number) for number in numbers[1000:2037]))
    assert len(rig.shelf) == 1 + 5000 - 2037
    rest = numbers[2037:]
    renamed = rig.shelf.rename(array("Q", rest), array("Q", [number + 1 for number in rest]))
    assert renamed == b"\1" * len(rest)
    for number in rest:
        assert rig.shelf.take([number + 1])[0]
    assert len(rig.shelf) == 1


def test_a_block_outside_the_shelfs_region_is_refused(rig: ShelfRig) -> None:
    one = rig.store(1, 0, 64)
    region = rig.pair.far.region
    for address in (region.address - 1, region.address + region.length - 63):
        with pytest.raises(FabricError):
            rig.shelf.put([one._replace(id=9, address=address)])
    with pytest.raises(FabricError):
        rig.shelf.put([one._replace(id=9, length=0)])
    assert len(rig.shelf) == 1


def test_closing_a_fabric_closes_its_shelf(provider: str) -> None:
    with Pair(provider) as pair:
        rig = ShelfRig(pair)
        rig.store(1, 0, 5000)
        rig.call(Wanted((Row(1, 5000, 1),)))
        rig.acked(1)
        pair.far.fabric.close()
        assert rig.shelf.take([1001])[0]
        assert list(rig.shelf.served()) == []
        assert len(rig.shelf) == 0
        rig.shelf.unlist(OWNER + key_of(1))
        rig.desk.close()
