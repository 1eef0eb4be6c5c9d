"""An index is two files, the table of blocks and LMDB's: it is trusted only if both are of the same commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import Corrupt, StorageError
from kvstore.storage.block_table import BlockTable
from kvstore.storage.index import BLOCKS_NAME
from tests.storage.fakes import FakeDisk
from tests.storage.filled import all_is_there, disk_of, fill, payload_of
from tests.storage.rig import StoreRig
from tests.storage.test_index_damage import believed

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("file", ["data.mdb", BLOCKS_NAME])
def test_one_file_from_an_earlier_time_is_rejected_after_sigkill(tmp_path: Path, file: str) -> None:
    """The other one has all commits, and so has the note."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    path = rig.data / "index-0" / file
    before = path.read_bytes()
    for number in (3000, 3001):
        assert rig.put(number, payload_of(number)).error is None
        assert rig.append(1000 + number, [number]).error is None
    rig.kill()
    rig.disk = disk_of(rig).after_kill(1)
    path.write_bytes(before)
    with pytest.raises(Corrupt, match="lacks a commit"):
        believed(rig)
    all_is_there(rig)
    assert rig.store.statistics().rebuilt
    assert rig.get(3001)[1] == payload_of(3001)
    assert rig.session(4001) == [3001]
    rig.store.close()


@pytest.mark.parametrize("file", ["data.mdb", BLOCKS_NAME])
def test_one_file_from_an_earlier_epoch_is_rejected(closed: StoreRig, file: str) -> None:
    path = closed.data / "index-0" / file
    before = path.read_bytes()
    closed.open()
    assert closed.put(3000, payload_of(3000)).error is None
    closed.store.close()
    closed.disk = FakeDisk(disk_of(closed).pages)
    path.write_bytes(before)
    all_is_there(closed)
    assert closed.store.statistics().rebuilt
    assert closed.get(3000)[1] == payload_of(3000)
    closed.store.close()


def test_an_index_whose_table_could_not_be_synced_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)

    def fail(_: BlockTable) -> None:
        raise StorageError("could not be synced: the drive is full")

    with monkeypatch.context() as broken:
        broken.setattr(BlockTable, "sync", fail)
        rig.store.close()
    rig.disk = FakeDisk(disk_of(rig).pages)
    all_is_there(rig)
    assert rig.store.statistics().rebuilt
    rig.store.close()
