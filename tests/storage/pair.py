"""A store of two drives in memory, and on which of them things are stored."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, StoreRig, key

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fail", "holders", "homed", "two", "user_drive"]


def two(data: Path, seed: int = 0) -> StoreRig:
    return StoreRig(data, disks=[FakeDisk(seed=seed), FakeDisk(seed=seed + 1)])


def homed(rig: StoreRig, position: int, count: int = 1, start: int = 1000) -> list[int]:
    """Numbers of blocks that belong on this drive."""
    found: list[int] = []
    while len(found) < count:
        if rig.home(start) == position:
            found.append(start)
        start += 1
    return found


def holders(rig: StoreRig, number: int) -> list[int]:
    return [
        position
        for position, drive in enumerate(rig.store.drives)
        if drive.lookup([(TENANT, key(number))])[0] is not None
    ]


def user_drive(rig: StoreRig) -> int:
    """The drive on which our user's sessions belong."""
    return rig.store._placement.order(TENANT, USER)[0]


def fail(rig: StoreRig, position: int, fault: int = -errno.EIO) -> None:
    disk = rig.disks[position]
    disk.faults = {disk.operations: fault}
    assert rig.put(homed(rig, position, start=90_000)[0], b"x").error is not None
    assert not rig.store.drives[position].takes_puts
