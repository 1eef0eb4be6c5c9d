"""Stores for tests: `fake` on a drive in memory, `pair` on two of them, `real` on a file through io_uring.

`closed` has blocks and sessions (`tests.storage.filled`) on a drive in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.storage.fakes import FakeDisk
from tests.storage.filled import disk_of, fill
from tests.storage.pair import two
from tests.storage.rig import StoreRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    yield rig
    for disk in rig.disks:
        disk.held.clear()
    rig.store.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data")
    rig.open()
    yield rig
    rig.store.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[StoreRig]:
    rig = two(tmp_path / "data")
    rig.open()
    yield rig
    for disk in rig.disks:
        disk.release()
    rig.store.close()


@pytest.fixture
def closed(tmp_path: Path) -> StoreRig:
    """A filled store that was closed cleanly."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    rig.store.close()
    rig.disk = FakeDisk(disk_of(rig).pages)
    return rig
