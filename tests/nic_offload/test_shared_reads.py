"""Blocks on the same machine, acknowledged one by one: what the node keeps, what its client reads and refuses."""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvstore.wire.sharing import ROW_BYTES
from nic_offload.caller import PLACES
from nic_offload.checksum import crc32c
from nic_offload.fabric import EventKind
from nic_offload.group import Group
from nic_offload.memory import address_of
from nic_offload.trigger import AckWatch, TriggeredPut, arm, watch_acks
from tests.nic_offload.rig import PAGE, Pair, after_ms, wait_until
from tests.nic_offload.test_caller import ACK_WORDS, DONE, TAG, WORDS, say
from tests.nic_offload.test_shared import CORRUPT, LATE, NODE_BYTES, SERVED, Client, Wanted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROWS, WHERE, CALL_ROWS = 64, 0x87, 4
ROW = struct.Struct("<4QI")
WORD_AT, COUNT_AT = 40, 48  # in a row, and in the first
SOURCE, LENGTH, TARGET = 8 * PAGE, 5000, 64 * PAGE
assert ROW.size <= WORD_AT < COUNT_AT < ROW_BYTES


class Row(NamedTuple):
    """The row of a word's block."""

    generation: int
    offset: int
    until_ns: int
    read: int
    crc32c: int


class Rows:
    """The rows shared by both ends."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, ROWS * ROW_BYTES)
        self.address = address_of(self.memory)

    def at(self, word: int) -> Row:
        return Row(*ROW.unpack_from(self.memory, word * ROW_BYTES))

    def say(self, word: int, row: Row) -> None:
        ROW.pack_into(self.memory, word * ROW_BYTES, *row)

    def word(self, word: int) -> int:
        return self._read(word * ROW_BYTES + WORD_AT)

    @property
    def count(self) -> int:
        return self._read(COUNT_AT)

    def _read(self, at: int) -> int:
        return int.from_bytes(self.memory[at : at + 8], "little")

    def say_word(self, word: int, generation: int, code: int) -> None:
        struct.pack_into("<Q", self.memory, word * ROW_BYTES + WORD_AT, generation << 8 | code)
        struct.pack_into("<Q", self.memory, COUNT_AT, self.count + 1)

    def note_read(self, word: int, generation: int) -> None:
        struct.pack_into("<Q", self.memory, word * ROW_BYTES + 24, generation)


# --- the node


class SharingEnd:
    """An end that shares its memory with its peer."""

    def __init__(self, *, looks: bool = False) -> None:
        self.pair, self.rows = Pair("net"), Rows()
        self.pair.there.fence()
        near, there = self.pair.near, self.pair.there
        self.word = there.base + self.pair.far.length  # the peer's first word, as we call it
        near.fill(SOURCE, os.urandom(LENGTH))
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK)
        if looks:
            words = self.word + 8 * ROWS
            near.endpoint.share_words(words, there.key, near.region.address, 1, self.doorbell)
        near.endpoint.share_reads(self.word, there.key, self.rows.address, ROWS, near.region, looks=looks)

    def close(self) -> None:
        self.pair.__exit__()
        os.close(self.doorbell)

    def put(self, word: int = 0, generation: int = 7, tag: int = TAG, *, shared: bool = True) -> None:
        near, there = self.pair.near, self.pair.there
        arm(
            near.fabric,
            [
                TriggeredPut(
                    tag=tag,
                    endpoint=near.endpoint,
                    peer=there.peer,
                    region=near.region,
                    source=near.region.address + SOURCE,
                    length=LENGTH,
                    target=there.base + TARGET,
                    target_key=there.key,
                    flag_target=self.word + 8 * word,
                    flag_key=there.key,
                    flag_value=generation << 8 | SERVED,
                    crc32c=self.sum,
                    sent=True,
                    shared=shared,
                )
            ],
        )

    @property
    def sum(self) -> int:
        return crc32c(self.pair.near.bytes_at(SOURCE, LENGTH))

    def said(self, word: int = 0) -> int:
        return self.pair.far.word(word).load()

    @property
    def is_sent(self) -> bool:
        return has_ended(self.pair)

    def came(self) -> bool:
        return self.pair.far.bytes_at(TARGET, LENGTH) == self.pair.near.bytes_at(SOURCE, LENGTH)


def has_ended(pair: Pair) -> bool:
    pair.near.events += pair.near.fabric.reap()
    return any(event.kind in (EventKind.SENT, EventKind.FAILED) for event in pair.near.events)


@pytest.fixture
def sharing() -> Iterator[SharingEnd]:
    sharing = SharingEnd()
    yield sharing
    sharing.close()


def test_a_block_is_reported_and_kept_until_it_was_read(sharing: SharingEnd) -> None:
    before_ns = time.monotonic_ns()
    sharing.put()
    wait_until(lambda: sharing.said() == 7 << 8 | WHERE, "the word")
    row = sharing.rows.at(0)
    assert (row.generation, row.offset, row.crc32c) == (7, SOURCE, sharing.sum)
    assert before_ns + 500_000_000 < row.until_ns <= time.monotonic_ns() + 1_000_000_000
    time.sleep(0.2)
    assert not sharing.is_sent
    sharing.rows.note_read(0, 6)
    time.sleep(0.1)
    assert not sharing.is_sent, "another generation was read"
    sharing.rows.note_read(0, 7)
    wait_until(lambda: sharing.is_sent, "it is over")
    assert not sharing.came(), "no byte was sent"


def test_a_block_that_is_never_read_is_kept_for_two_seconds(sharing: SharingEnd) -> None:
    began = time.monotonic()
    sharing.put()
    wait_until(lambda: sharing.is_sent, "it is over", 10)
    assert 1.9 < time.monotonic() - began < 6


def test_a_block_that_must_not_be_read_there_is_sent(sharing: SharingEnd) -> None:
    sharing.put(shared=False)
    wait_until(sharing.came, "the bytes")
    assert sharing.rows.at(0).generation == 0


def test_a_word_without_a_row_has_its_block_sent(sharing: SharingEnd) -> None:
    sharing.put(word=ROWS)
    wait_until(sharing.came, "the bytes")
    assert sharing.said(ROWS) == 7 << 8 | SERVED


def test_memory_that_is_not_shared_is_sent() -> None:
    sharing = SharingEnd()
    near, there = sharing.pair.near, sharing.pair.there
    other = near.fabric.register(mmap.mmap(-1, PAGE))
    near.endpoint.share_reads(sharing.word, there.key, sharing.rows.address, ROWS, other, looks=False)
    sharing.put()
    wait_until(sharing.came, "the bytes")
    sharing.close()


def test_a_client_that_looks_there_finds_the_word_in_the_row() -> None:
    sharing = SharingEnd(looks=True)
    for count, (word, generation) in enumerate(((0, 7), (5, 8), (0, 9)), 1):
        sharing.put(word, generation)
        wait_until(lambda count=count: sharing.rows.count == count, "the word")  # type: ignore[misc]
        assert sharing.rows.word(word) == generation << 8 | WHERE
        assert sharing.rows.at(word).generation == generation
        wait_until(lambda: rung(sharing.doorbell), "the doorbell")
        sharing.rows.note_read(word, generation)
        wait_until(lambda: sharing.is_sent, "it is over")
        sharing.pair.near.events.clear()
    sharing.put(ROWS, 10)
    wait_until(sharing.came, "the bytes of a block whose word has no row")
    assert [sharing.said(word) for word in (0, 5)] == [0, 0], "no message was sent"
    sharing.close()


def test_a_word_that_follows_bytes_is_sent_behind_them() -> None:
    sharing = SharingEnd(looks=True)
    sharing.put(shared=False)
    wait_until(lambda: sharing.said() == 7 << 8 | SERVED, "the word")
    assert sharing.came()
    assert (sharing.rows.count, sharing.rows.word(0)) == (0, 0)
    sharing.close()


def rung(doorbell: int) -> bool:
    try:
        return os.eventfd_read(doorbell) > 0
    except BlockingIOError:
        return False


def test_nothing_is_kept_for_a_closed_endpoint(sharing: SharingEnd) -> None:
    sharing.put()
    wait_until(lambda: sharing.said() == 7 << 8 | WHERE, "the word")
    sharing.pair.near.endpoint.close()
    assert sharing.pair.near.region._is_idle()


# --- the client


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def client(rows: Rows) -> Iterator[Client]:
    client = Client(rows.address, ROWS)
    yield client
    client.close()


def begin(client: Client, blocks: Sequence[Wanted]) -> object:
    group = client.get(blocks)
    call = client.asked()
    assert call.flags & CALL_ROWS
    say(client.pair, ACK_WORDS[0], call.generation, DONE)
    return group


def tell(client: Client, rows: Rows, blocks: Sequence[Wanted], number: int, **other: int) -> None:
    one = blocks[number]
    row = Row(
        100 + number,
        one.offset,
        after_ms(20_000),
        0,
        crc32c(client.node[one.offset : one.offset + one.length]),
    )
    rows.say(number, row._replace(**other))
    say(client.pair, number, 100 + number, WHERE)


def tell_in_row(client: Client, rows: Rows, blocks: Sequence[Wanted], number: int) -> None:
    one = blocks[number]
    sum_ = crc32c(client.node[one.offset : one.offset + one.length])
    rows.say(number, Row(100 + number, one.offset, after_ms(20_000), 0, sum_))
    rows.say_word(number, 100 + number, WHERE)


def codes(group: object, count: int) -> list[int]:
    assert group.wait(count, 20)  # type: ignore[attr-defined]
    return [group.row(i).code for i in range(count)]  # type: ignore[attr-defined]


def test_blocks_are_read_where_they_are_reported(client: Client, rows: Rows) -> None:
    blocks = [Wanted(4096, 32 << 10), Wanted(NODE_BYTES - 5000, 5000), Wanted(777, 16 << 10), Wanted(0, 1)]
    group = begin(client, blocks)
    for number in (2, 0, 3, 1):
        tell(client, rows, blocks, number)
        wait_until(lambda number=number: rows.at(number).read == 100 + number, "it was read")  # type: ignore[misc]
    assert codes(group, 4) == [SERVED] * 4
    assert client.is_exact(blocks)
    assert client.caller.shared_blocks == 4
    assert client.caller.free_places == PLACES


def test_parts_of_reported_blocks_are_read(client: Client, rows: Rows) -> None:
    blocks = [Wanted(0, 50_000, 0, 1), Wanted(50_000, 50_000, 16_000, 20_000), Wanted(9, 40_000, 39_999, 1)]
    group = begin(client, blocks)
    for number in range(3):
        tell(client, rows, blocks, number)
    assert codes(group, 3) == [SERVED] * 3
    assert client.is_exact(blocks)


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"crc32c": 5}, CORRUPT),
        ({"until_ns": 1}, LATE),
        ({"generation": 99}, LATE),
        ({"offset": NODE_BYTES - 4999}, LATE),
        ({"offset": (1 << 64) - 1}, LATE),
    ],
)
def test_a_wrong_answer_is_a_miss(client: Client, rows: Rows, other: dict[str, int], code: int) -> None:
    blocks = [Wanted(0, 5000), Wanted(8192, 5000)]
    group = begin(client, blocks)
    tell(client, rows, blocks, 0)
    tell(client, rows, blocks, 1, **other)
    assert codes(group, 2) == [SERVED, code]


def test_a_block_that_nobody_waits_for_is_not_read(client: Client, rows: Rows) -> None:
    blocks = [Wanted(0, 5000)]
    client.get(blocks, blocks_ms=50)
    client.asked()
    near = client.pair.near
    wait_until(lambda: watch_failed(near), "its deadline")
    tell(client, rows, blocks, 0)
    time.sleep(0.1)
    assert client.untouched(blocks)


def test_words_are_found_in_rows(client: Client, rows: Rows) -> None:
    blocks = [Wanted(4096, 32 << 10), Wanted(777, 16 << 10), Wanted(0, 1)]
    group = client.get(blocks)
    call = client.asked()
    for number in (1, 0):
        tell_in_row(client, rows, blocks, number)
        wait_until(lambda number=number: rows.at(number).read == 100 + number, "it was read")  # type: ignore[misc]
    rows.say_word(ACK_WORDS[0], call.generation, DONE)
    tell(client, rows, blocks, 2)  # as words come from a node of an earlier version
    assert codes(group, 4) == [SERVED] * 3 + [DONE]
    assert client.is_exact(blocks)
    assert client.caller.free_places == PLACES


def test_a_word_of_another_use_of_its_row_has_no_effect(client: Client, rows: Rows) -> None:
    blocks = [Wanted(0, 5000)]
    group = begin(client, blocks)
    for generation in (99, 101):
        rows.say_word(0, generation, SERVED)
        time.sleep(0.05)
        assert not group.wait(1, 0)  # type: ignore[attr-defined]
    tell_in_row(client, rows, blocks, 0)
    assert codes(group, 1) == [SERVED]
    assert client.is_exact(blocks)


def test_a_word_that_came_before_it_was_awaited_is_found(client: Client, rows: Rows) -> None:
    near = client.pair.near
    client.get([Wanted(0, 5000)], blocks_ms=50)
    client.asked()
    wait_until(lambda: watch_failed(near), "its deadline")
    rows.say_word(0, 100, WHERE)
    time.sleep(0.1)  # the thread has seen it
    group = Group(near.fabric, TAG + 100, 1)
    word = near.region.address + WORDS
    watch_acks(
        near.fabric,
        [AckWatch(TAG + 100, near.endpoint, word, 100, after_ms(20_000), 1, group, 255)],
    )
    assert codes(group, 1) == [WHERE], "nothing is sent for it any more"


def watch_failed(side: object) -> bool:
    side.events += side.fabric.reap()  # type: ignore[attr-defined]
    return any(event.kind == EventKind.WATCH_FAILED for event in side.events)  # type: ignore[attr-defined]
