"""Calls that a desk answers from a drive (`desk_cold.c`): what it reads, leaves to the node, and reports."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Any

import pytest

from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.reader import Reader
from nic_offload.receiver import Room, packed_rooms
from nic_offload.shelf import IN_MEMORY, Served, place_of
from tests.nic_offload.rig import PAGE, Pair, wait_until
from tests.nic_offload.test_lane import FORMAT
from tests.nic_offload.test_reader import DEPTH, record_of
from tests.nic_offload.test_shelf import (
    DONE,
    FINGERPRINT,
    FIRST,
    OWNER,
    PARTS,
    SERVED,
    Row,
    ShelfRig,
    Wanted,
    key_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
COLD = 99  # the tag of what the shelf has to tell
DRIVE, GENERATION = 3, (5 << 40) + 4711
LENGTH = 3 * PAGE + 123
ROOMS_AT, ROOMS, ROOM_PAGES = 128 << 10, 4, 5


class ColdRig(ShelfRig):
    """A node whose drive is a file, or a pipe that the test writes to."""

    def __init__(
        self, pair: Pair, path: Path | None, *, cold_max: int = 1 << 20, shelf_max: int = 1 << 30
    ) -> None:
        super().__init__(pair, bytes_max=shelf_max)
        self.path = path
        if path is not None:
            path.write_bytes(bytes(4 * MIB))
            self.fd, self._writer = os.open(path, os.O_RDONLY | os.O_DIRECT), -1
        else:
            self.fd, self._writer = os.pipe()
            fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, 1 << 18)
        depth = 1 if path is None else DEPTH  # so that it is known who reads what comes from the pipe
        self.reader = Reader(pair.far.fabric, self.fd, depth, FORMAT)
        self.shelf.use_readers({DRIVE: self.reader}, COLD, cold_max)
        self.rooms(range(ROOMS))

    def rooms(self, numbers: Any) -> None:
        start = self.pair.far.region.address + ROOMS_AT
        self.shelf.feed(
            packed_rooms([Room(start + at * ROOM_PAGES * PAGE, ROOM_PAGES, at) for at in numbers])
        )

    def place(self, number: int, page: int, generation: int = GENERATION, drive: int = DRIVE) -> None:
        word = place_of(drive, page, generation).to_bytes(8, "little")
        self.shelf.place(OWNER + key_of(number) + word)

    def record(
        self, number: int, page: int, generation: int = GENERATION, expires_ms: int = 0, length: int = LENGTH
    ) -> bytearray:
        """Make a record of block `number` for this place, and note its payload."""
        self.blocks[number] = bytes((number + at * 7) % 251 for at in range(length))
        return record_of(
            page * PAGE, generation, self.blocks[number], expires_ms, key=key_of(number), owner=OWNER
        )

    def on_drive(self, number: int, page: int, **fields: Any) -> None:
        assert self.path is not None
        self.write(page, self.record(number, page, **fields))
        self.place(number, page)

    def write(self, page: int, data: bytes | bytearray) -> None:
        assert self.path is not None
        with self.path.open("r+b") as file:
            file.seek(page * PAGE)
            file.write(data)

    def spoil(self, at: int) -> None:
        assert self.path is not None
        with self.path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    def give(self, data: bytes | bytearray) -> None:
        assert os.write(self._writer, data) == len(data)

    def came(self, *numbers: int) -> None:
        """The blocks' bytes and words have arrived, and the word of the call."""
        for number in numbers:
            assert self.acked(number) == SERVED
            assert self.got(number * 8, len(self.blocks[number])) == self.blocks[number]
        wait_until(self.answered, "the answer")

    def told(self) -> Served:
        """The core's report of a call, after its event."""
        self.pair.far.wait(lambda: bool(self.pair.far.of(COLD)), "an event")
        assert [EventKind(one.kind) for one in self.pair.far.of(COLD)] == [EventKind.CAME]
        (served,) = self.served()
        assert served.cold is not None
        return served

    def unsent(self) -> dict[bytes, int]:
        """The blocks left to the node, with the reasons; nothing of them was sent."""
        served = self.told()
        assert served.cold is not None
        self.pair.back.fence()
        return {row.key: row.status for row in served.cold.rows if row.status}

    def close(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
        os.close(self.fd)


@pytest.fixture
def rig(pair: Pair, tmp_path: Path) -> Iterator[ColdRig]:
    one = ColdRig(pair, tmp_path / "drive")
    yield one
    one.close()


@pytest.fixture
def slow() -> Iterator[ColdRig]:
    with Pair("net") as pair:
        one = ColdRig(pair, None)
        yield one
        one.close()  # the reads end, and so the fabric can


def wanted(*numbers: int, **fields: Any) -> Wanted:
    """A call for blocks, each into a place of its own, with a word of its number."""
    return Wanted(tuple(Row(at * 8, LENGTH, at, key=key_of(at)) for at in numbers), **fields)


def test_blocks_on_the_drive_and_in_memory_are_sent_without_the_application(rig: ColdRig) -> None:
    rig.on_drive(1, 16)
    rig.on_drive(2, 64)
    rig.store(3, 0, LENGTH)
    rig.call(wanted(1, 3, 2))
    rig.came(1, 3, 2)
    served = rig.told()
    call = served.cold
    assert call is not None
    assert list(served.ids) == [GENERATION, 1003, GENERATION]
    assert served.size_bytes == 3 * LENGTH
    assert (served.corrupt, served.failed) == (0, 0)
    assert (call.fingerprint, call.shares) == (FINGERPRINT, False)
    assert [(row.key, row.status, row.length, row.ack_word) for row in call.rows] == [
        (key_of(at), 0, LENGTH, at) for at in (1, 3, 2)
    ]
    assert [row.room == IN_MEMORY for row in call.rows] == [False, True, False]
    for row, number in zip(call.rows, (1, 3, 2), strict=True):
        if row.room != IN_MEMORY:
            at = ROOMS_AT + row.room * ROOM_PAGES * PAGE + PAGE
            assert rig.pair.far.bytes_at(at, LENGTH) == rig.blocks[number], "its room has the payload"
    assert rig.shelf.wanted == (0, ROOMS - 2)
    assert rig.pair.far.of(7) == [], "the call never came to the application"


def test_the_whole_block_is_checked_and_only_the_part_sent(rig: ColdRig) -> None:
    rig.on_drive(1, 16)
    rig.call(Wanted((Row(8, LENGTH, 1, key=key_of(1), part=(100, 5000)),), kind=PARTS))
    assert rig.acked(1) == SERVED
    assert rig.got(8, 5000) == rig.blocks[1][100:5100]
    assert not any(rig.got(8, PAGE * 3)[5000:])
    assert rig.told().size_bytes == 5000


LEFT: dict[str, Any] = {
    "a name without a place": lambda rig: rig.shelf.stored(OWNER + key_of(2), are_stored=True),
    "a name that is not stored": lambda _: None,
    "a place that was forgotten": lambda rig: (rig.on_drive(2, 64), rig.shelf.unlist(OWNER + key_of(2))),
    "a name that is free again": lambda rig: (
        rig.on_drive(2, 64),
        rig.shelf.stored(OWNER + key_of(2), are_stored=False),
    ),
    "a drive without a reader": lambda rig: rig.place(2, 64, drive=DRIVE + 1),
    "no room": lambda rig: (rig.on_drive(2, 64), rig.shelf.rooms(), rig.rooms([0])),
}


@pytest.mark.parametrize("what", LEFT)
def test_a_call_that_the_desk_cannot_answer_completely_is_left_to_the_application(
    rig: ColdRig, what: str
) -> None:
    rig.on_drive(1, 16)
    before = len(rig.shelf.rooms())
    rig.rooms(range(before))
    LEFT[what](rig)
    rooms = 1 if what == "no room" else before
    rig.left_to_us(wanted(1, 2))
    assert len(rig.shelf.rooms()) == rooms, "all of them are there as before"
    assert rig.shelf.wanted[0] == (ROOM_PAGES if what == "no room" else 0)


def test_blocks_larger_than_the_rooms_are_left_to_the_application(rig: ColdRig) -> None:
    length = ROOM_PAGES * PAGE
    rig.on_drive(1, 16, length=length)
    rig.left_to_us(Wanted((Row(8, length, 1, key=key_of(1)),)))
    assert rig.shelf.wanted == (ROOM_PAGES + 1, 0)


@pytest.mark.parametrize(("cold_max", "shelf_max"), [(2 * LENGTH, 1 << 30), (1 << 20, LENGTH), (0, 1 << 30)])
def test_more_blocks_than_may_be_read_at_a_time_are_left_to_the_application(
    pair: Pair, tmp_path: Path, cold_max: int, shelf_max: int
) -> None:
    rig = ColdRig(pair, tmp_path / "drive", cold_max=cold_max, shelf_max=shelf_max)
    rig.on_drive(1, 16)
    rig.on_drive(2, 64)
    rig.left_to_us(wanted(1, 2))
    rig.close()


def test_an_owner_leaves_others_as_much_as_it_uses(slow: ColdRig) -> None:
    """Of four blocks that may be read at a time, a first call reads two, and the same owner's second none."""
    slow.shelf.use_readers({DRIVE: slow.reader}, COLD, 4 * LENGTH)
    for number in (1, 2, 3):
        slow.place(number, 16 * number)
    slow.watch(FIRST, place=1)
    slow.call(wanted(1, 2))
    wait_until(slow.answered, "the first call is answered")
    slow.call(wanted(3, ack_word=501), place=1)
    slow.pair.far.final(7)
    assert slow.pair.near.word(501).load() == 0
    slow.give(slow.record(1, 16))
    slow.give(slow.record(2, 32))
    slow.came(1, 2)
    slow.told()
    slow.watch(FIRST + 1, place=1)
    slow.call(wanted(3, generation=FIRST + 1, ack_word=501), place=1)
    slow.give(slow.record(3, 48))
    assert slow.acked(3) == SERVED


OTHERS: dict[str, Any] = {
    "another name": lambda rig: rig.write(16, rig.record(9, 16)),
    "another place's": lambda rig: rig.write(16, rig.record(1, 17)),
    "a later generation's": lambda rig: rig.write(16, rig.record(1, 16, GENERATION + 1)),
    "another length": lambda rig: rig.write(16, rig.record(1, 16, length=LENGTH - 1)),
    "one that expires": lambda rig: rig.write(16, rig.record(1, 16, expires_ms=1 << 60)),
    "a spoilt header": lambda rig: rig.spoil(16 * PAGE + 60),
    "a spoilt tag": lambda rig: rig.spoil(16 * PAGE + 110),
    "a spoilt payload": lambda rig: rig.spoil(17 * PAGE + 2 * PAGE + 77),
    "zeros": lambda rig: rig.write(16, bytes(5 * PAGE)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_anything_but_the_right_record_is_left_to_the_application(rig: ColdRig, what: str) -> None:
    rig.on_drive(1, 16)
    rig.on_drive(2, 64)
    OTHERS[what](rig)
    rig.call(wanted(1, 2))
    assert rig.acked(2) == SERVED
    assert rig.unsent() == {key_of(1): -errno.EBADMSG if what == "a spoilt payload" else -errno.ENODATA}
    assert rig.pair.near.word(1).load() == 0
    assert not any(rig.got(8, LENGTH))


def test_an_unreadable_drive_leaves_all_to_the_application(rig: ColdRig) -> None:
    rig.on_drive(1, 16)
    rig.place(1, 8 << 20)  # behind its end
    rig.call(wanted(1))
    assert rig.unsent() == {key_of(1): -errno.ENODATA}


@pytest.mark.parametrize("what", ["unlisted", "replaced", "free"])
def test_a_block_whose_place_is_forgotten_while_it_is_read_is_not_sent(slow: ColdRig, what: str) -> None:
    slow.place(1, 16)
    slow.call(wanted(1))
    wait_until(slow.answered, "the call is answered")
    if what == "unlisted":
        slow.shelf.unlist(OWNER + key_of(1))
    elif what == "replaced":
        slow.place(1, 16, GENERATION + 1)
    else:
        slow.shelf.stored(OWNER + key_of(1), are_stored=False)
    slow.give(slow.record(1, 16))
    assert slow.unsent() == {key_of(1): -errno.ENODATA}
    assert slow.pair.near.word(1).load() == 0
    assert not any(slow.got(8, LENGTH))


def test_reads_of_a_desk_can_be_cancelled(slow: ColdRig) -> None:
    for number in (1, 2):
        slow.place(number, 16 * number)
    call = Wanted(
        tuple(Row(at * 8, LENGTH, at, key=key_of(at), ack_generation=100 + at) for at in (1, 2)),
    )
    slow.call(call)
    wait_until(slow.answered, "the call is answered")
    assert slow.desk.cancel([102, 77]) == 1
    assert slow.desk.cancel([102]) == 0
    slow.give(slow.record(1, 16))
    slow.came(1)
    assert slow.unsent() == {key_of(2): -errno.ECANCELED}
    assert slow.pair.near.word(2).load() == 0


def test_after_the_endpoint_closes_a_room_is_kept_until_the_drive_is_done_with_it(slow: ColdRig) -> None:
    slow.place(1, 16)
    slow.call(wanted(1))
    wait_until(slow.answered, "the call is answered")
    slow.pair.far.endpoint.close()
    served = slow.told()
    assert served.cold is not None
    assert [row.room for row in served.cold.rows] == [IN_MEMORY], "the drive may still write to the room"
    assert slow.shelf.wanted == (0, ROOMS - 1)
    slow.give(slow.record(1, 16))
    wait_until(lambda: slow.shelf.wanted == (0, ROOMS), "all rooms")
    assert len(slow.shelf.rooms()) == ROOMS


def test_nothing_of_another_record_stays_in_the_room(rig: ColdRig) -> None:
    rig.on_drive(2, 16)
    rig.place(1, 16)
    rig.call(wanted(1))
    assert rig.unsent() == {key_of(1): -errno.ENODATA}
    at = ROOMS_AT + (ROOMS - 1) * ROOM_PAGES * PAGE
    assert not any(rig.pair.far.bytes_at(at, ROOM_PAGES * PAGE))


def test_rooms_outside_the_region_are_refused(rig: ColdRig) -> None:
    far = rig.pair.far.region
    for address, pages in (
        (far.address + 8, 1),
        (far.address - PAGE, 1),
        (far.address + far.length - PAGE, 2),
    ):
        with pytest.raises(FabricError):
            rig.shelf.feed(packed_rooms([Room(address, pages, 1)]))
    assert len(rig.shelf.rooms()) == ROOMS


def test_such_a_call_is_answered_with_done(rig: ColdRig) -> None:
    rig.on_drive(1, 16)
    rig.call(wanted(1))
    rig.came(1)
    assert rig.pair.near.word(500).load() == FIRST << 8 | DONE
