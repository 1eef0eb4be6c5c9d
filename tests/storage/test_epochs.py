"""Sessions in the epochs of a cluster: those of other epochs don't count, and a late step changes nothing."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import NoSession, SessionRefused
from kvstore.storage.items import SessionStep
from kvstore.storage.manifests import SessionName
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, StoreRig, name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    for number in range(8):
        rig.put(number, b"x%d" % number)
    yield rig
    rig.store.close()


def blocks(rig: StoreRig, number: int, epoch: int | None) -> int | None:
    stored = rig.store.manifests.get(SessionName(TENANT, USER, name(number)))
    return None if stored is None or stored.is_over(rig.clock.wall_ms(), epoch) else stored.manifest.blocks


def step(rig: StoreRig, number: int, step: SessionStep, **more: Any) -> Exception | None:
    tag = rig.start_step(number, step, **more)
    rig.settle()
    return rig.session_done[tag].error


def test_a_session_of_another_epoch_counts_as_missing_and_is_removed_by_the_first_step(rig: StoreRig) -> None:
    assert rig.append(1, [0, 1, 2], epoch=1).error is None
    assert (blocks(rig, 1, 1), blocks(rig, 1, 2), blocks(rig, 1, None)) == (3, None, 3)
    assert isinstance(step(rig, 1, SessionStep.TRUNCATE, blocks=1, epoch=2), NoSession)
    assert rig.append(2, [5], epoch=0).error is None
    assert isinstance(step(rig, 3, SessionStep.FORK, source=2, blocks=1, epoch=3, source_epoch=4), NoSession)
    assert step(rig, 3, SessionStep.FORK, source=2, blocks=1, epoch=3, source_epoch=0) is None
    assert (blocks(rig, 3, 3), blocks(rig, 3, 0)) == (1, None)
    assert rig.append(1, [7], epoch=2, first_block=0).error is None
    assert (blocks(rig, 1, 1), blocks(rig, 1, 2)) == (None, 1)


def test_a_step_of_an_earlier_epoch_leaves_a_session_of_a_later_one_alone(rig: StoreRig) -> None:
    assert rig.append(1, [0, 1], epoch=2).error is None
    for late in (SessionStep.APPEND, SessionStep.TRUNCATE, SessionStep.REMOVE, SessionStep.LIMIT):
        assert isinstance(step(rig, 1, late, epoch=1), SessionRefused)
    assert blocks(rig, 1, 2) == 2


@pytest.mark.parametrize("scanned", [False, True])
def test_an_epoch_stays_with_a_session_through_its_steps_and_restarts(
    rig: StoreRig, *, scanned: bool
) -> None:
    assert rig.append(1, [0, 1, 2], epoch=3).error is None
    assert step(rig, 1, SessionStep.TRUNCATE, blocks=2, epoch=3) is None
    assert step(rig, 1, SessionStep.PROTECT, blocks=1, epoch=3) is None
    assert rig.append(1, [4]).error is None, "who asks for what the node has leaves it in its epoch"
    rig.store.close()
    assert rig.disk is not None
    rig.disk = FakeDisk(rig.disk.pages)
    if scanned:
        shutil.rmtree(rig.data / "index-0")
    rig.open()
    assert (blocks(rig, 1, 3), blocks(rig, 1, 0)) == (3, None)
