"""An index whose files are deleted or replaced while open, or that can't be closed: one error, then a new index."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ReadOnly
from kvstore.storage.index import BLOCKS_NAME, Index
from tests.storage.fakes import FakeDisk
from tests.storage.filled import all_is_there, data_of, disk_of, fill, payload_of
from tests.storage.rig import StoreRig
from tests.storage.test_index_damage import failing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DELETIONS: dict[str, Callable[[StoreRig], object]] = {
    "the whole folder": lambda rig: shutil.rmtree(rig.data),
    "the folder of the index": lambda rig: shutil.rmtree(rig.data / "index-0"),
    "the rows of sessions": lambda rig: data_of(rig).unlink(),
    "the rows of blocks": lambda rig: (rig.data / "index-0" / BLOCKS_NAME).unlink(),
    "another index in its place": lambda rig: _replace(rig.data / "index-0"),
}


def _replace(folder: Path) -> None:
    shutil.rmtree(folder)
    Index.empty(folder, 1).abandon()


@pytest.mark.parametrize("how", DELETIONS)
def test_an_index_deleted_during_operation_stops_puts_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    rig.put(2000, b"x", expires_ms=rig.clock.now_ms + 5)
    caplog.clear()
    DELETIONS[how](rig)
    assert isinstance(rig.put(3000, b"x").error, ReadOnly)
    assert isinstance(rig.put(3001, b"x").error, ReadOnly)
    assert rig.append(9, [1]).error is not None
    assert rig.remove(1).error is not None
    assert rig.delete(1).error is not None
    rig.clock.now_ms += 10
    for number in (1, 2000, 3000):
        done, got = rig.get(number)
        assert done.miss is not None or got == payload_of(number)
    rig.store.close()
    said = f"The index in {rig.data / 'index-0'} was deleted or replaced while it was open."
    assert [one for one in caplog.messages if "index" in one] == [f"{said} It is rebuilt at the next start."]


@pytest.mark.parametrize("how", DELETIONS)
def test_closing_a_deleted_index_reports_it_and_leaves_its_replacement_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    DELETIONS[how](rig)
    others = {path: path.read_bytes() for path in rig.data.rglob("*") if path.is_file()}
    if how == "the rows of blocks":
        del others[data_of(rig)]  # our own: the next start builds another
    rig.store.close()
    assert "was deleted or replaced while it was open" in caplog.text
    assert {path: path.read_bytes() for path in rig.data.rglob("*") if path.is_file()} == others


@pytest.mark.parametrize("name", ["data.mdb", BLOCKS_NAME])
def test_an_index_that_cannot_be_closed_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    if name == BLOCKS_NAME:
        monkeypatch.setattr(rig.drive._index._table, "sync", _no_sync)
    else:
        monkeypatch.setattr(rig.drive._index, "_open", failing)
    rig.store.close()
    monkeypatch.undo()
    rig.disk = FakeDisk(disk_of(rig).pages)
    all_is_there(rig)
    assert rig.store.statistics().rebuilt
    rig.store.close()


def _no_sync() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
