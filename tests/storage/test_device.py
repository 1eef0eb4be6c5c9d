"""A raw block device as the drive: a loop device, where this machine permits one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.config import DriveSpec
from kvstore.errors import ConfigError, StorageError
from kvstore.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 32 << 20


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    backing = tmp_path / "backing"
    backing.write_bytes(bytes(SIZE))
    try:
        made = subprocess.run(
            ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(
            f"needs a loop device (root, the kernel's module): {getattr(error, 'stderr', '') or error}"
        )
    path = Path(made.stdout.strip())
    yield path
    subprocess.run(["losetup", "--detach", str(path)], check=True)


def open_over(data: Path, device: Path) -> Store:
    return Store.open(data, capacity_bytes=None, clock=SystemClock(), drives=[DriveSpec(device)])


def test_a_device_is_formatted_once_and_recognized_again(tmp_path: Path, device: Path) -> None:
    with open_over(tmp_path / "node", device) as store:
        assert store.statistics().capacity_bytes == SIZE
        name = store.name
    with open_over(tmp_path / "node", device) as store:
        assert store.name == name


def test_a_device_with_content_is_left_alone(tmp_path: Path, device: Path) -> None:
    mark = b"_BHRfS_M"  # where one kind of file system begins: 64 KiB in
    with device.open("r+b") as raw:
        raw.seek(65536 + 64)
        raw.write(mark)
    with pytest.raises(ConfigError, match="holds other data"):
        open_over(tmp_path / "node", device)
    with device.open("rb") as raw:
        raw.seek(65536 + 64)
        assert raw.read(len(mark)) == mark


def test_two_folders_do_not_share_a_device(tmp_path: Path, device: Path) -> None:
    with open_over(tmp_path / "node", device), pytest.raises(StorageError, match="is in use"):
        open_over(tmp_path / "other", device)


def test_a_path_that_is_neither_file_nor_device_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match="neither a file nor a block device"):
        open_over(tmp_path / "node", folder)


def test_a_device_given_to_a_folder_with_a_drive_becomes_its_second(tmp_path: Path, device: Path) -> None:
    with Store.open(tmp_path / "node", capacity_bytes=SIZE, clock=SystemClock()):
        pass
    for _ in range(2):
        with open_over(tmp_path / "node", device) as store:
            assert [state.number for state in store.drive_states()] == [0, 1]
            assert store.statistics().capacity_bytes == 2 * SIZE
