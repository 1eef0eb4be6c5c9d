"""The logs in which clients record gets without a call: what the node reads from them, and when."""

from __future__ import annotations

import mmap
import os
import struct
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from nic_offload.direct import BLOCKS_MAX, LOG_BYTES
from nic_offload.fabric import EventKind
from nic_offload.memory import address_of
from nic_offload.shelf import RENAMED_USED
from tests.nic_offload.rig import wait_until
from tests.nic_offload.test_direct import FINGERPRINT, HEAD_BYTES, METADATA, SLOT_BYTES, DirectRig, desk_of
from tests.nic_offload.test_shared_desk import SHARES
from tests.nic_offload.test_shelf import ANSWER_WORD, FIRST, Row, ShelfRig, Wanted, key_of, two

if TYPE_CHECKING:
    from collections.abc import Iterator

LANDED_ID = 1 << 63
LOG_HEAD = 4096
TOLD = 1 << 62  # a tag


@pytest.fixture
def rig() -> Iterator[DirectRig]:
    with closing(DirectRig()) as one:
        yield one


def with_calls(rig: DirectRig) -> tuple[ShelfRig, tuple[Row, Row]]:
    """A desk that can also be called, for the log's client, and the rows of a call for both of its blocks."""
    rig.desk.log(0)
    shelf = ShelfRig(rig.pair, shares=True, shelf=rig.shelf)
    rows = two(shelf)
    shelf.desk.log(address_of(rig.log))
    rig.blocks = shelf.blocks
    return shelf, rows


def test_a_full_log_makes_calls_until_it_is_read(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(100))
    for _ in range(3):  # around its end
        count = 0
        while rig.read(1):
            count += 1
        assert count == (LOG_BYTES - LOG_HEAD) // (40 + 16 + len(METADATA))
        assert not rig.direct.has_all(FINGERPRINT, [key_of(1)], METADATA)
        told = rig.served()
        assert len(told) == count
        assert all((list(one.ids), bytes(one.metadata)) == ([1001], METADATA) for one in told)


def test_a_call_makes_room_in_the_log(rig: DirectRig) -> None:
    """The node's own thread takes the notes then, whether or not the application asks for them."""
    shelf, rows = with_calls(rig)
    while rig.read(1):
        pass
    written, taken = struct.unpack("<Q56xQ", rig.log[:72])
    assert written > taken == 0
    shelf.call(Wanted(rows, flags=SHARES))
    wait_until(lambda: rig.pair.near.word(ANSWER_WORD).load() != 0, "the answer")
    assert struct.unpack("<Q56xQ", rig.log[:72]) == (written, written)
    assert rig.read(1)
    assert len(rig.served()) > 800


def test_notes_wait_while_the_application_has_many_to_process(rig: DirectRig) -> None:
    """Others' requests would wait for that."""
    shelf, rows = with_calls(rig)
    taken, count = list[int](), 0
    for generation in (FIRST, FIRST + 1):
        while rig.read(1):
            count += 1
        rig.pair.near.word(ANSWER_WORD).store(0)
        shelf.call(Wanted(rows, flags=SHARES, generation=generation))
        wait_until(lambda: rig.pair.near.word(ANSWER_WORD).load() != 0, "the answer")
        written, now = struct.unpack("<Q56xQ", rig.log[:72])
        taken.append(written - now)
        shelf.watch(generation + 1)
    assert taken[0] == 0
    assert taken[1] > 0
    assert len(rig.served()) == count + 2, "all are reported"


def test_notes_that_wait_are_announced_when_their_client_calls(rig: DirectRig) -> None:
    """Otherwise it would make calls until the application asks for something."""
    rig.shelf.use_readers({}, TOLD, 1 << 20)
    shelf, rows = with_calls(rig)
    for generation in (FIRST, FIRST + 1):
        assert rig.node.of(TOLD) == []
        while rig.read(1):
            pass
        rig.pair.near.word(ANSWER_WORD).store(0)
        shelf.call(Wanted(rows, flags=SHARES, generation=generation))
        wait_until(lambda: rig.pair.near.word(ANSWER_WORD).load() != 0, "the answer")
        shelf.watch(generation + 1)
        rig.node.reap()
    rig.node.wait(lambda: rig.node.of(TOLD) != [], "the notes that wait are announced")
    assert rig.node.kinds(TOLD) == [EventKind.CAME]
    assert len(rig.served()) > 1000
    assert rig.read(1)


def test_the_use_of_a_block_that_has_gone_is_not_reported(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(100))
    rig.shelve(2, os.urandom(100), at=4096)
    assert rig.read(1, 2)
    rig.unlist(1)
    rig.shelve(1, os.urandom(100), at=8192, id=5000)
    (told,) = rig.served()
    assert list(told.ids) == [0, 1002]


def test_the_use_of_a_block_that_has_just_landed_is_reported_with_its_lasting_id(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(100), id=LANDED_ID | 1)
    rig.shelve(2, os.urandom(100), at=4096, id=LANDED_ID | 2)
    assert rig.read(1)
    rig.served()
    ids = struct.pack("=2Q", LANDED_ID | 1, LANDED_ID | 2)
    assert rig.shelf.rename(ids, struct.pack("=2Q", 7, 8)) == bytes([RENAMED_USED, 1])
    assert rig.read(2)
    (told,) = rig.served()
    assert list(told.ids) == [8]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 1 << 40),  # more was written than there is room for
        (0, 8),  # less than a note
        (LOG_HEAD, 0),  # its length,
        (LOG_HEAD, 1 << 31),
        (LOG_HEAD, 64 | 1000 << 32),  # its blocks,
        (LOG_HEAD + 8, 1 << 30),  # its metadata
    ],
)
def test_an_impossible_note_closes_the_log(rig: DirectRig, at: int, value: int) -> None:
    rig.shelve(1, os.urandom(100))
    assert rig.read(1)
    rig.log[at : at + 8] = value.to_bytes(8, "little")
    assert rig.served() == []
    assert not rig.read(1)
    rig.desk.answers(answers=True)
    assert not rig.read(1), "for good"


def test_a_note_of_nonsense_harms_no_other_block(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(100))
    assert rig.read(1)
    seqs = range(HEAD_BYTES, len(rig.directory), SLOT_BYTES)
    (slot,) = [number for number, at in enumerate(seqs) if rig.directory[at]]
    note = struct.pack("<IIIIQQQ", 56, 1, 0, 0, 5, 1 << 63, 1 << 63) + struct.pack(
        "<QII", 2, 1 << 31 | slot, 0
    )
    rig.log[LOG_HEAD : LOG_HEAD + 56] = note
    rig.log[:8] = (56).to_bytes(8, "little")
    (told,) = rig.served()
    assert list(told.ids) == [0]
    assert told.began_ns == told.ended_ns <= time.monotonic_ns()
    assert told.size_bytes <= rig.node.region.length


def test_a_note_never_says_more_bytes_than_a_get_can_have(rig: DirectRig) -> None:
    """Their sum would exceed what the statistics can show."""
    size = 40 + 16 * BLOCKS_MAX
    note = struct.pack("<IIIIQQQ", size, BLOCKS_MAX, 0, 0, 5, 6, (1 << 64) - 1)
    rig.log[LOG_HEAD : LOG_HEAD + len(note)] = note
    rig.log[:8] = size.to_bytes(8, "little")
    (told,) = rig.served()
    assert told.size_bytes == 64 << 20


def test_a_client_that_goes_on_reading_does_not_keep_who_takes_its_notes(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(100))
    for _ in range(3):
        assert rig.read(1)
    for count, _ in enumerate(rig.shelf.served(), 1):
        assert rig.read(1)
        assert count <= 3, "those that were written when it began"
    assert len(rig.served()) == 3


def test_calls_that_are_answered_meanwhile_are_left_and_this_is_said(rig: DirectRig) -> None:
    shelf = ShelfRig(rig.pair, shares=True, shelf=rig.shelf)
    rows = two(shelf)

    def call(generation: int) -> None:
        answer = rig.pair.near.word(ANSWER_WORD)
        before = answer.load()
        shelf.call(Wanted(rows, flags=SHARES, generation=generation))
        wait_until(lambda: answer.load() != before, "the answer")
        shelf.watch(generation + 1)

    call(FIRST)
    for count, _ in enumerate(rig.shelf.served(), 1):
        call(FIRST + count)
        assert count == 1
    assert rig.shelf.has_more
    assert len(rig.served()) == 1
    assert not rig.shelf.has_more


def test_all_notes_are_taken_at_once_even_if_they_need_more_room_than_there_is(rig: DirectRig) -> None:
    note = struct.pack("<IIIIQQQ", 40, 1, 0, 1, 5, 6, 0)
    notes, logs = (LOG_BYTES - LOG_HEAD) // len(note), []
    for _ in range(14):
        log = mmap.mmap(-1, LOG_BYTES)
        log[LOG_HEAD : LOG_HEAD + notes * len(note)] = note * notes
        log[:8] = (notes * len(note)).to_bytes(8, "little")
        desk_of(rig.pair, rig.shelf).log(address_of(log))
        logs.append(log)
    assert len(rig.served()) == len(logs) * notes
