"""A drive's file that is deleted or replaced while the node has it open: puts stop with one error, reported once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.config import DriveSpec
from kvstore.errors import ReadOnly, StorageError
from kvstore.storage.folder import drive_path
from tests.storage.fakes import FakeDisk
from tests.storage.rig import StoreRig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DELETIONS: dict[str, Callable[[Path], object]] = {
    "its name": lambda file: file.unlink(),
    "what its link leads to": lambda file: file.resolve().unlink(),
    "another file in its place": lambda file: other_beside(file).rename(file),
}


def other_beside(file: Path) -> Path:
    other = file.with_name("other")
    other.write_bytes(bytes(4096))
    return other


@pytest.mark.parametrize("how", DELETIONS)
def test_a_drive_whose_file_is_deleted_accepts_no_more_puts_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    rig = StoreRig(tmp_path / "data")
    rig.specs = [DriveSpec(tmp_path / "elsewhere.kv", rig.capacity_bytes)]
    rig.open()
    rig.put(1, b"before")
    caplog.clear()
    file = drive_path(rig.data, 0)
    DELETIONS[how](file)
    assert isinstance(rig.put(2, b"after").error, ReadOnly)
    assert isinstance(rig.put(3, b"after").error, ReadOnly)
    assert rig.append(9, [1]).error is not None
    said = f"The drive {file} was deleted or replaced while it was open."
    assert said in rig.store.drive_states()[0].failure
    assert rig.get(1)[1] == b"before", "what it has is still served"
    assert rig.get(2)[0].miss is not None
    rig.store.close()
    assert caplog.messages == [f"{said} What it has is lost at the next start."]
    rig.specs = []
    with pytest.raises(StorageError, match=r"^Drive 0 cannot be used\. "):
        rig.open()


def test_blocks_that_a_lane_wrote_to_a_deleted_file_are_not_in_the_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    rig.use_lanes(1)
    (lane,) = rig.lanes
    tag = rig.start_put(2, b"after")
    assert rig.disk is not None
    rig.disk.deleted = True
    while tag not in lane.told:
        lane.step()
    lane.told.clear()  # the client heard `written`: nothing had looked yet
    rig.take_written()
    assert isinstance(rig.put_done[tag].error, ReadOnly)
    assert rig.get(2)[0].miss is not None
    assert isinstance(rig.put(3, b"after").error, ReadOnly)
    assert caplog.messages == ["deleted What it has is lost at the next start."]
    rig.close()
