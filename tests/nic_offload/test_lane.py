"""Lanes: from a slot to the drive, and the word `written`, with no call of the application."""

from __future__ import annotations

import errno
import os
import struct
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

from nic_offload.lane import NO_GROUND, Ground, Lane, Lanes, RecordFormat, Written, written_in
from nic_offload.receiver import Receiver, Room, packed_rooms
from nic_offload.sender import Area
from nic_offload.trigger import TriggeredNotify, arm
from tests.nic_offload.far import Far, way_to
from tests.nic_offload.rig import PAGE, Side, wait_until
from tests.nic_offload.test_granted import (
    DIFFERS,
    EXPIRED,
    FINGERPRINT,
    FIRST,
    LANDED,
    LENGTH_MAX,
    OWNER,
    RECEIVER,
    ROOMS,
    SHARED,
    SLOT,
    TAKEN,
    WORDS,
    WRITTEN,
    GrantRig,
    head_of,
    key_of,
    open_rig,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nic_offload.receiver import Came

MIB = 1 << 20
TAG = 1 << 63
DEPTH = 16
LOTS = 8192
BYTES_MAX = 1 << 30
FORMAT = RecordFormat(b"TKVRECRD", 3, 1, bytes(range(32)), b"n" * 16)
FIXED = struct.Struct("<8sHHI32s16s16sQQI4x")
LENGTH = 5000
PAGES = 3  # of a record


class Drive:
    """A file, or what is open as `fd`, and the lane to it of a rig's receiver."""

    def __init__(
        self,
        rig: GrantRig,
        path: Path,
        flags: int = os.O_RDWR,
        bytes_max: int = BYTES_MAX,
        fd: int | None = None,
    ) -> None:
        self.rig = rig
        self.path = path
        if fd is None:
            path.write_bytes(b"\xaa" * (4 * MIB))
            fd = os.open(path, flags | os.O_DIRECT)
        self._fd = fd
        self.lane = Lane(rig.pair.far.fabric, TAG, self._fd, DEPTH, bytes_max, FORMAT)
        rig.receiver.use(Lanes([self.lane], bytes(LOTS)))
        rig.lanes.append(self.came)
        self.written: list[Written] = []
        self._heard: list[Came] = []

    def came(self) -> list[Came]:
        """Blocks not returned before, ended or not."""
        self.take()
        self._heard += [one.came for one in written_in(self.lane.under_way())]
        came, self._heard = self._heard, []
        return came

    def take(self) -> None:
        rows = written_in(self.lane.take())
        self.written += rows
        self._heard += [one.came for one in rows if not one.was_reported]

    def lend(
        self,
        page: int = 0,
        generation: int = 100,
        pages: int = 100,
        records: int = 64,
        *,
        is_clear: bool = True,
    ) -> None:
        assert self.lane.lend(Ground(page, generation, pages, records)) is not None
        if is_clear:
            self.lane.clear(generation + records)

    def wait_written(self, count: int) -> list[Written]:
        def enough() -> bool:
            self.take()
            return len(self.written) >= count

        wait_until(enough, f"{count} records")
        return self.written

    def record(self, one: Written) -> tuple[tuple[Any, ...], bytes]:
        """The fields of a record's header, after checking its tag, and the payload with its padding."""
        with self.path.open("rb") as file:
            file.seek(one.offset)
            data = file.read(PAGES * PAGE)
        fixed, tag = data[: FIXED.size], data[FIXED.size : FIXED.size + 16]
        message = FORMAT.name + one.offset.to_bytes(8, "little") + fixed
        assert blake2b(message, key=FORMAT.secret, digest_size=16).digest() == tag
        assert not any(data[FIXED.size + 16 : PAGE])
        return FIXED.unpack(fixed), data[PAGE:]

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    for rig in open_rig("net"):
        drive = Drive(rig, tmp_path / "drive")
        yield drive
        drive.close()


def test_a_block_is_written_and_acknowledged_without_the_application(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(8, pages=PAGES)
    rig.pair.far.fill(ROOMS, b"\xff" * (8 * PAGES * PAGE))
    drive.lend()
    _, group = rig.put([1, 2, 3], LENGTH, durability=WRITTEN, metadata=b"m" * 16)
    assert rig.codes(group, 3) == [WRITTEN] * 3
    rig.wait_came(3)
    ended = {one.came.id: one for one in drive.wait_written(3)}
    assert [one.generation for one in drive.written] == [100, 101, 102]
    assert all(came.under_way and came.listed for came in rig.came)
    for came in rig.came:
        one = ended[came.id]
        said, payload = drive.record(one)
        magic, version, kind, length, key, owner, fingerprint, generation, expires_ms, crc = said
        assert (magic, version, kind, length) == (b"TKVRECRD", 3, 1, LENGTH)
        assert (key, owner, fingerprint, expires_ms) == (came.key, OWNER, FINGERPRINT, 0)
        assert (generation, crc, one.result) == (one.generation, came.crc32c, 0)
        assert payload[:LENGTH] == rig.payload(came)
        assert not any(payload[LENGTH:]), "what lay in the room before does not reach the drive"
    assert (
        bytes(rig.pair.far.bytes_at(rig.came[0].address + PAGE - 128 - 16 - rig.pair.far.region.address, 16))
        == b"m" * 16
    )


def test_only_a_query_reports_a_block_before_its_end(drive: Drive) -> None:
    rig, lane = drive.rig, drive.lane
    rig.feed(3, pages=PAGES)
    drive.lend(is_clear=False)
    assert rig.put([1, 2], LENGTH)[1].wait_landed(20)
    heard = written_in(lane.under_way())
    assert [one.came.key for one in heard] == [key_of(1), key_of(2)]
    assert {one.tag for one in heard} == {RECEIVER}
    assert not lane.under_way(), "once"
    assert rig.put([3], LENGTH)[1].wait_landed(20)
    assert lane.begun == 3
    lane.clear(1 << 40)
    ended = drive.wait_written(3)
    assert [one.came.key for one in ended] == [key_of(number) for number in (1, 2, 3)]
    assert [one.was_reported for one in ended] == [1, 1, 0]
    assert [one.came for one in ended[:2]] == [one.came for one in heard]
    assert ended[2].came.under_way == 1
    assert not lane.under_way(), "nor after its end"
    assert not rig.receiver.take()[0], "nor from its receiver"
    assert rig.shelf.came == 3


def test_rooms_are_requested_before_lanes_have_used_all(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(4, pages=PAGES)
    drive.lend()
    fabric = rig.pair.far.fabric
    fabric.reap()
    assert rig.put([1], LENGTH)[1].wait_landed(20)
    assert not any(event.tag == RECEIVER for event in fabric.reap())
    assert rig.put([2], LENGTH)[1].wait_landed(20)
    wait_until(lambda: any(event.tag == RECEIVER for event in fabric.reap()), "two of four are left")
    state = rig.receiver.take()[1]
    assert (state.rooms, state.starved) == (2, 0)


def test_a_block_goes_to_the_lane_of_its_names_home(tmp_path: Path) -> None:
    for rig in open_rig("net"):
        first, last = Drive(rig, tmp_path / "first"), Drive(rig, tmp_path / "last")
        rig.receiver.use(Lanes([first.lane, None, last.lane], bytes(lot % 3 for lot in range(LOTS))))
        first.lend()
        last.lend()
        rig.feed(30, pages=PAGES)
        _, group = rig.put(list(range(30)), LENGTH)
        assert rig.codes(group, 30) == [LANDED] * 30
        rig.wait_came(30)
        homes = [(crc32(OWNER + came.key) * LOTS >> 32) % 3 for came in rig.came]
        assert set(homes) == {0, 1, 2}
        assert [came.under_way for came in rig.came] == [(1, 0, 3)[home] for home in homes]
        for drive, home in ((first, 0), (last, 2)):
            ids = [came.id for came, at in zip(rig.came, homes, strict=True) if at == home]
            assert [one.came.id for one in drive.wait_written(len(ids))] == ids
            drive.close()


def test_unrequested_acknowledgements_are_not_sent(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(2, pages=PAGES)
    drive.lend()
    assert rig.codes(rig.put([1], LENGTH)[1], 1) == [LANDED]
    assert drive.wait_written(1)[0].result == 0
    rig.wait_came(1)
    assert rig.came[0].under_way


def put_one(drive: Drive, number: int, length: int = LENGTH) -> None:
    assert drive.rig.put([number], length, durability=WRITTEN)[1].wait_landed(20)


def test_without_ground_the_application_gets_the_block(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(6, pages=PAGES)
    drive.lend(pages=2 * PAGES, records=64)
    for number in range(3):
        put_one(drive, number)
    rig.wait_came(3)
    assert [came.under_way for came in rig.came] == [1, 1, 0]
    drive.wait_written(2)
    state = drive.lane.seal()
    assert state is not None
    assert (state.used, state.left, state.next) == (2, Ground(2 * PAGES, 102, 0, 62), NO_GROUND.next)
    drive.lend(page=50, generation=200, records=1)
    for number in range(3, 5):
        put_one(drive, number)
    rig.wait_came(5)
    assert [came.under_way for came in rig.came[3:]] == [1, 0]
    assert drive.wait_written(3)[2][2:4] == (200, 50 * PAGE)


def test_the_lane_continues_on_the_next_ground_when_a_record_does_not_fit(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(8, pages=PAGES)
    drive.lend(pages=2 * PAGES + 1, records=10)
    put_one(drive, 0)
    left, following = Ground(PAGES, 101, PAGES + 1, 9), Ground(60, 110, 30, 10)
    assert drive.lane.state()[:4] == (left, NO_GROUND.next, NO_GROUND.next, 1)
    assert drive.lane.lend(following) == (left, NO_GROUND.next, NO_GROUND.next, 1, 0, 0)
    drive.lane.clear(120)
    put_one(drive, 1)
    assert drive.lane.state()[:4] == (Ground(2 * PAGES, 102, 1, 8), following, NO_GROUND.next, 2)
    drive.wait_written(2)
    rig.pair.far.fabric.reap()
    put_one(drive, 2)
    after = (Ground(60 + PAGES, 111, 30 - PAGES, 9), NO_GROUND.next, Ground(2 * PAGES, 102, 1, 8), 1, 2, 0)
    assert drive.lane.state() == after
    wait_until(lambda: asked(drive) > 0, "it asks for a next one")
    rig.wait_came(3)
    assert [one[2:4] for one in drive.wait_written(3)] == [
        (100, 0),
        (101, PAGES * PAGE),
        (110, 60 * PAGE),
    ]
    assert drive.lane.seal() == after
    assert drive.lane.state() == NO_GROUND


def test_other_ground_replaces_the_next(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(4, pages=PAGES)
    drive.lend(pages=PAGES, records=1)
    put_one(drive, 0)
    small, large = Ground(40, 110, 1, 1), Ground(60, 120, 30, 10)
    assert drive.lane.lend(small) is not None
    state = drive.lane.lend(large)
    assert state is not None
    assert state.next == small
    drive.lane.clear(130)
    put_one(drive, 1)
    assert drive.wait_written(2)[1][2:4] == (120, 60 * PAGE)


def asked(drive: Drive) -> int:
    """How often the lane has notified the application."""
    return sum(event.tag == TAG for event in drive.rig.pair.far.fabric.reap())


def test_a_block_waits_for_ground_that_will_arrive(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(6, pages=PAGES)
    drive.lane.expect(ground=True)
    _, group = rig.put([1, 2], LENGTH, durability=WRITTEN)
    assert group.wait_landed(20)
    assert drive.lane.state().wanted_pages == PAGES
    assert not rig.receiver.take(every=False)[0]
    assert asked(drive) == 1, "it is told once, not in every round"
    drive.lend(pages=PAGES, records=64)
    assert drive.wait_written(1)[0].generation == 100
    wait_until(lambda: drive.lane.state().wanted_pages == PAGES, "the second asks again")
    drive.lend(page=50, generation=200)
    assert rig.codes(group, 2) == [WRITTEN] * 2
    assert drive.wait_written(2)[1].generation == 200
    assert drive.lane.state().wanted_pages == 0
    left_to_lanes(rig, 2)
    assert [came.under_way for came in rig.came] == [1, 1]


def test_a_block_does_not_wait_for_ground_that_will_not_arrive(drive: Drive) -> None:
    """Nor for the rest of its second, once of a few times: a busy machine stands still for longer."""
    rig = drive.rig
    rig.feed(6, pages=PAGES)
    took_s = []
    for number in range(1, 6):
        drive.lane.expect(ground=True)
        assert rig.put([number], LENGTH)[1].wait_landed(20)
        assert not rig.receiver.take(every=False)[0]
        began = time.monotonic()
        drive.lane.expect(ground=False)
        left_to_lanes(rig, number)
        assert drive.lane.state().wanted_pages == 0
        assert not any(came.under_way for came in rig.came)
        took_s.append(time.monotonic() - began)
        if took_s[-1] < 0.5:
            return
    pytest.fail(f"it took {min(took_s):.1f} s")


def test_a_put_is_reported_after_all_earlier_ones_are_on_the_drive(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(4, pages=PAGES)
    drive.lend(is_clear=False)
    _, group = rig.put([1, 2], LENGTH, durability=WRITTEN)
    assert group.wait_landed(20)
    assert not group.wait(2, 0.1)
    assert not drive.lane.take()
    drive.lane.clear(101)
    assert group.wait(1, 20)
    assert not group.wait(2, 0.1)
    drive.lane.clear(102)
    assert rig.codes(group, 2) == [WRITTEN] * 2
    drive.wait_written(2)


def test_a_failed_write_is_the_last(tmp_path: Path) -> None:
    for rig in open_rig("net"):
        drive = Drive(rig, tmp_path / "drive", os.O_RDONLY)
        rig.feed(4, pages=PAGES)
        drive.lend()
        _, group = rig.put([1, 2], LENGTH, durability=WRITTEN)
        assert group.wait_landed(20)
        rig.wait_came(2)
        taken = [
            came.id for came in rig.came if came.under_way
        ]  # the second if it came before the first had failed
        assert [one.came.id for one in drive.wait_written(len(taken))] == taken
        assert {one.result for one in drive.written} == {-errno.EBADF}
        assert not group.wait(1, 0.05), "no word says that it was written"
        rig.put([3], LENGTH, durability=WRITTEN)
        rig.wait_came(3)
        assert rig.came[2].under_way == 0
        assert drive.lane.lend(Ground(0, 900, 10, 10)) is None
        drive.close()


def test_any_number_of_blocks_is_written_in_order(drive: Drive) -> None:
    rig = drive.rig
    rig.feed(120, pages=PAGES)
    drive.lend(pages=120 * PAGES, records=120)
    numbers = list(range(1, 121))
    _, group = rig.put(numbers, LENGTH, durability=WRITTEN)
    assert group.wait_landed(20)
    rig.wait_came(120)
    taken = [came for came in rig.came if came.under_way]
    drive.wait_written(len(taken))
    assert [one.came.id for one in drive.written] == [came.id for came in taken]
    generations = [one.generation for one in drive.written]
    assert generations == list(range(100, 100 + len(taken)))
    for came, one in zip(taken, drive.written, strict=True):
        said, payload = drive.record(one)
        assert said[4] == came.key
        assert payload[:LENGTH] == rig.payload(came)
    assert len(taken) >= DEPTH
    assert {came.key for came in rig.came} == {key_of(number) for number in numbers}


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Drive]:
    """A lane with room for two records at a time, which stay until they are cleared."""
    for rig in open_rig("net"):
        drive = Drive(rig, tmp_path / "drive", bytes_max=2 * PAGES * PAGE)
        rig.feed(8, pages=PAGES)
        drive.lend(is_clear=False)
        yield drive
        drive.close()


def left_to_lanes(rig: GrantRig, count: int) -> None:
    """Take this many blocks, except those that wait for a lane."""
    rig.wait_came(count, every=False)


def test_a_block_waits_for_a_lane_filled_by_its_owner(narrow: Drive) -> None:
    rig = narrow.rig
    _, group = rig.put([1, 2, 3, 4], LENGTH, durability=WRITTEN)
    assert group.wait_landed(20)
    left_to_lanes(rig, 2)
    assert not rig.receiver.take(every=False)[0]
    narrow.lane.clear(1 << 40)
    assert rig.codes(group, 4) == [WRITTEN] * 4
    left_to_lanes(rig, 4)
    assert [came.under_way for came in rig.came] == [1] * 4
    assert [one.came.id for one in narrow.wait_written(4)] == [came.id for came in rig.came]
    assert [narrow.record(one)[1][:LENGTH] for one in narrow.written] == [
        rig.payload(came) for came in rig.came
    ]


def test_the_application_may_take_a_block_that_waits_for_a_lane(narrow: Drive) -> None:
    rig = narrow.rig
    _, group = rig.put([1, 2, 3, 4], LENGTH, durability=WRITTEN)
    assert group.wait_landed(20)
    rig.wait_came(4)
    assert [came.under_way for came in rig.came] == [1, 1, 0, 0]
    narrow.lane.clear(1 << 40)
    narrow.wait_written(2)
    assert rig.codes(rig.put([5], LENGTH, durability=WRITTEN)[1], 1) == [WRITTEN]
    assert [one.came.id for one in narrow.wait_written(3)[:2]] == [came.id for came in rig.came[:2]]
    assert len(narrow.written) == 3, "nobody else writes what the application has taken"


@pytest.mark.parametrize("looks_at", [4, None])
def test_each_of_many_blocks_that_wait_is_taken_by_the_lane_once(narrow: Drive, looks_at: int | None) -> None:
    """Whether or not the application looks in between, and however long the list of those that wait is by then."""
    rig = narrow.rig
    assert rig.put(list(range(1, 9)), LENGTH)[1].wait_landed(20)

    def lane_takes(until: int) -> None:
        narrow.lane.clear(100 + until - 2)
        wait_until(lambda: narrow.lane.begun == until, f"{until} on the lane so far")

    for until in (4, 6, 8):
        lane_takes(until)
        if until == looks_at:
            assert not rig.receiver.take(every=False)[0]
    narrow.lane.clear(108)
    narrow.wait_written(8)
    rig.wait_came(8)
    assert [came.under_way for came in rig.came] == [1] * 8
    assert {came.key for came in rig.came} == {key_of(number) for number in range(1, 9)}


def test_a_block_whose_name_is_stored_meanwhile_stops_waiting(narrow: Drive) -> None:
    """The application puts another block of that name itself, and must know of both."""
    rig = narrow.rig
    _, group = rig.put([1, 2, 3, 4], LENGTH)
    assert group.wait_landed(20)
    rig.shelf.stored(OWNER + key_of(3), are_stored=True)
    narrow.lane.clear(1 << 40)
    left_to_lanes(rig, 4)
    assert {came.key: came.under_way for came in rig.came} == {
        key_of(number): number != 3 for number in (1, 2, 3, 4)
    }


def test_a_block_waits_no_longer_than_a_second(narrow: Drive) -> None:
    """A hanging drive keeps no block from the application."""
    rig = narrow.rig
    assert rig.put([1, 2, 3], LENGTH)[1].wait_landed(20)
    left_to_lanes(rig, 3)
    assert [came.under_way for came in rig.came] == [1, 1, 0]


def test_a_short_block_does_not_overtake_waiting_ones(tmp_path: Path) -> None:
    for rig in open_rig("net"):
        drive = Drive(rig, tmp_path / "drive", bytes_max=(2 * PAGES + 1) * PAGE)
        rig.feed(8, pages=PAGES)
        drive.lend(is_clear=False)
        assert rig.put([1, 2, 3], LENGTH)[1].wait_landed(20)
        assert rig.put([4], 100)[1].wait_landed(20)
        assert drive.lane.begun == 2
        drive.lane.clear(1 << 40)
        left_to_lanes(rig, 4)
        assert [came.key for came in rig.came] == [key_of(number) for number in (1, 2, 3, 4)]
        assert [came.under_way for came in rig.came] == [1] * 4
        assert [one.came.id for one in drive.wait_written(4)] == [came.id for came in rig.came]
        drive.close()


def test_a_block_does_not_wait_for_a_lane_that_another_owner_uses(narrow: Drive) -> None:
    """The application schedules them at the drive."""
    rig, at, payload = narrow.rig, 24 * MIB, b"p" * LENGTH
    pair = rig.pair
    here = pair.far.region.address + at
    another = Receiver(
        pair.far.fabric,
        rig.shelf,
        pair.far.endpoint,
        78,
        pair.back.peer,
        Area(here, here + PAGE, SLOT, 0, 1, FIRST),
        LENGTH_MAX,
        b"another owner...",
        (pair.back.word_target(0), pair.back.key, WORDS),
        (LANDED, DIFFERS, TAKEN, EXPIRED, WRITTEN),
        (pair.there.base, pair.there.key),
        SHARED,
    )
    another.use(Lanes([narrow.lane], bytes(LOTS)))
    another.feed(packed_rooms([Room(here + PAGE + SLOT, PAGES, MIB)]))
    head = head_of(payload, ack_word=40)
    pair.near.fill(20 * MIB, head + payload)
    pair.there.arm(pair.there.put(1, len(head + payload), source=20 * MIB, target=at + 2 * PAGE - len(head)))
    pair.near.final(1)
    target = pair.there.base + at
    arm(
        pair.near.fabric,
        [TriggeredNotify(2, pair.near.endpoint, pair.there.peer, target, pair.there.key, FIRST)],
    )
    wait_until(lambda: narrow.lane.begun == 1, "the other's block")
    assert rig.put([1, 2], LENGTH)[1].wait_landed(20)
    narrow.lane.clear(101)
    narrow.wait_written(1)
    left_to_lanes(rig, 3)
    assert [came.under_way for came in rig.came] == [1, 1, 0], "the other's first"
    assert rig.put([3, 4], LENGTH)[1].wait_landed(20)
    narrow.lane.clear(1 << 40)
    left_to_lanes(rig, 5)
    assert [came.under_way for came in rig.came[3:]] == [1, 1], "one has waited: all records were its owner's"


@pytest.mark.parametrize("provider", ["net", "tcp;ofi_rxm"])
def test_an_unreachable_peer_does_not_delay_acknowledgements_of_others(provider: str, tmp_path: Path) -> None:
    """It is stopped before anything was sent to it; its block was the first to be written."""
    at, payload = 24 * MIB, b"p" * LENGTH
    with Far(provider, MIB) as other:
        for rig in open_rig(provider):
            pair, drive = rig.pair, Drive(rig, tmp_path / "drive")
            another = Side.more(pair.far)
            way = way_to(another, other.said)
            other.stop()
            here = pair.far.region.address + at
            stuck = Receiver(
                pair.far.fabric,
                rig.shelf,
                another.endpoint,
                78,
                way.peer,
                Area(here, here + PAGE, SLOT, 0, 1, FIRST),
                LENGTH_MAX,
                OWNER,
                (way.word_target(0), way.key, WORDS),
                (LANDED, DIFFERS, TAKEN, EXPIRED, WRITTEN),
                (pair.there.base, pair.there.key),
                SHARED,
                0,
            )
            stuck.use(Lanes([drive.lane], bytes(LOTS)))
            stuck.feed(packed_rooms([Room(here + PAGE + SLOT, PAGES, MIB)]))
            drive.lend()
            head = head_of(payload, durability=WRITTEN)
            pair.near.fill(20 * MIB, head + payload)
            pair.there.arm(
                pair.there.put(1, len(head + payload), source=20 * MIB, target=at + 2 * PAGE - len(head))
            )
            pair.near.final(1)
            arm(
                pair.near.fabric,
                [
                    TriggeredNotify(
                        2, pair.near.endpoint, pair.there.peer, pair.there.base + at, pair.there.key, FIRST
                    )
                ],
            )
            drive.wait_written(1)
            assert drive.written[0].tag == 78
            for turn in range(3):
                rig.feed(1, pages=PAGES)
                _, group = rig.put([turn + 10], LENGTH, durability=WRITTEN)
                assert rig.codes(group, 1) == [WRITTEN]
            drive.close()
