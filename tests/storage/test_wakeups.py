"""A drive asks to be polled as soon as it can go on: otherwise all waits for the next tick of the node's timer."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.storage.test_crashes import data, run, slice_sessions

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.errors import StorageError
    from tests.storage.rig import StoreRig

__all__ = ["data"]


def test_a_callback_that_waits_for_no_wipe_asks_for_a_poll(fake: StoreRig) -> None:
    """A queued removal that begins when the step before it fails has nothing to wipe, and ends with such a callback."""
    (drive,) = fake.store.drives
    told: list[StorageError | None] = []
    drive._wipes.free((), told.append)
    drive._wake_if_due()
    assert fake.is_ready(0)
    fake.poll()
    assert told == [None]
    assert not fake.is_ready(0)


@pytest.mark.parametrize(("seed", "drives"), [(15_839, 1), (2_601, 2)])
def test_histories_that_stood_still(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    drives: int,
) -> None:
    """One learnt, when it lent ground, that its lane had left the ground before; the other is as above."""
    monkeypatch.setattr("kvstore.storage.superblock.DRIVE_CAPACITY_BYTES_MIN", 1)
    if drives == 1:
        monkeypatch.setattr("kvstore.storage.extents.LENT_SHARE", 3)
    else:
        monkeypatch.setattr(os, "urandom", random.Random(seed).randbytes)
    slice_sessions(monkeypatch, seed)
    run(data / str(seed), seed, drives=drives)
