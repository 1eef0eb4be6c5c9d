"""A store with blocks and sessions, some of them deleted, and a check that everything else is intact."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.fakes import FakeDisk
    from tests.storage.rig import StoreRig

BLOCKS = 120


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(1 + number * 97 % 9000)


def data_of(rig: StoreRig) -> Path:
    return rig.data / "index-0" / "data.mdb"


def disk_of(rig: StoreRig) -> FakeDisk:
    assert rig.disk is not None
    return rig.disk


def fill(rig: StoreRig) -> None:
    for number in range(BLOCKS):
        rig.start_put(number, payload_of(number), expires_ms=(number % 5 == 0) * (rig.clock.now_ms + 10**9))
        if number % 30 == 29:
            rig.settle()
    rig.append(1, range(BLOCKS))
    for first in range(0, BLOCKS, 40):
        rig.append(2 + first, range(first, first + 40))
    for number in range(0, BLOCKS, 7):
        rig.delete(number)


def live() -> list[int]:
    return [number for number in range(BLOCKS) if number % 7]


def all_is_there(rig: StoreRig) -> None:
    """Every record is exact, and filling the drive twice evicts no protected block."""
    rig.open()
    for number in live():
        done, got = rig.get(number)
        assert (done.miss, got) == (None, payload_of(number)), number
    assert rig.session(1) == list(range(BLOCKS))


def puts_overwrite_nothing(rig: StoreRig) -> None:
    for number in range(1000, 1060):
        assert rig.put(number, payload_of(number % 50) + b"new").error is None
    for number in live():
        done, got = rig.get(number)
        assert (done.miss, got) == (None, payload_of(number)), number
