"""A lane's writes: adjacent records are written together, each to its place.

Puts that wait for `landed` only leave the lane up to 500 us to collect their records, so here most are in one write.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from nic_offload.lane import Ground
from tests.nic_offload.rig import PAGE
from tests.nic_offload.test_granted import LANDED, WRITTEN, open_rig
from tests.nic_offload.test_lane import DEPTH, LENGTH, PAGES, Drive

if TYPE_CHECKING:
    from pathlib import Path

    from nic_offload.lane import Written

COUNT = DEPTH - 2  # the ring of writes wraps within a batch


def put_batch(drive: Drive, first: int, count: int, durability: int = LANDED) -> list[Written]:
    """Those records of this batch that the lane wrote."""
    written, came = len(drive.written), len(drive.rig.came)
    _, group = drive.rig.put(list(range(first, first + count)), LENGTH, durability=durability)
    assert drive.rig.codes(group, count) == [durability] * count
    drive.rig.wait_came(came + count)
    taken = sum(one.under_way > 0 for one in drive.rig.came[came:])
    return drive.wait_written(written + taken)[written:]


def check(drive: Drive, written: list[Written]) -> None:
    """Each record is in its place, and is that of its block."""
    by_id = {came.id: came for came in drive.rig.came}
    for one in written:
        came = by_id[one.came.id]
        header, payload = drive.record(one)
        assert one.result == 0
        assert (header[4], header[7]) == (came.key, one.generation)
        assert payload[:LENGTH] == drive.rig.payload(came)
        assert not any(payload[LENGTH:])


@pytest.mark.parametrize("durability", [LANDED, WRITTEN])
def test_each_record_of_a_batch_is_written_to_its_place(tmp_path: Path, durability: int) -> None:
    batches = 5
    for rig in open_rig("net"):
        with closing(Drive(rig, tmp_path / "drive")) as drive:
            rig.feed(batches * COUNT, pages=PAGES)
            drive.lend(pages=batches * COUNT * PAGES, records=batches * COUNT)
            for batch in range(batches):
                written = put_batch(drive, batch * COUNT, COUNT, durability)
                assert len(written) >= COUNT / 2
            check(drive, drive.written)


def test_records_on_either_side_of_a_gap_are_written_to_their_places(tmp_path: Path) -> None:
    for rig in open_rig("net"):
        with closing(Drive(rig, tmp_path / "drive")) as drive:
            rig.feed(8, pages=PAGES)
            drive.lend(pages=4 * PAGES, records=4)
            put_batch(drive, 0, 1)
            drive.lane.lend(Ground(200, 104, 4 * PAGES, 4))
            drive.lane.clear(108)
            put_batch(drive, 1, 7)
            assert [one.offset // PAGE for one in drive.written] == [0, 3, 6, 9, 200, 203, 206, 209]
            check(drive, drive.written)


def test_all_records_of_a_failed_write_have_failed(tmp_path: Path) -> None:
    for rig in open_rig("net"):
        with closing(Drive(rig, tmp_path / "drive", os.O_RDONLY)) as drive:
            rig.feed(8, pages=PAGES)
            drive.lend()
            written = put_batch(drive, 0, 8)
            assert len(written) > 1
            assert {one.result for one in written} == {-errno.EBADF}


def test_a_short_write_continues_where_it_stopped(tmp_path: Path) -> None:
    """A pipe of two pages takes two at a time, whatever their offset on the drive."""
    count = 8
    drain, fill = os.pipe()
    fcntl.fcntl(fill, fcntl.F_SETPIPE_SZ, 2 * PAGE)
    pages: list[bytes] = []

    def read_pages() -> None:
        with os.fdopen(drain, "rb") as pipe:
            while page := pipe.read(PAGE):
                pages.append(page)

    reader = threading.Thread(target=read_pages)
    reader.start()
    for rig in open_rig("net"):
        with closing(Drive(rig, tmp_path / "drive", fd=fill)) as drive:
            rig.feed(count, pages=PAGES)
            drive.lend()
            written = put_batch(drive, 0, count)
            payloads = {came.id: drive.rig.payload(came) for came in rig.came}
    reader.join(20)
    assert {one.result for one in written} == {0}
    assert len(set(pages)) == len(pages) == count * PAGES, "each page once"
    for one in written:
        payload = payloads[one.came.id]
        assert payload[:PAGE] in pages
        assert payload[PAGE:].ljust(PAGE, b"\0") in pages
