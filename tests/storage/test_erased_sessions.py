"""Erasing sessions of a store in the clear: nothing of their records is left, whatever has interrupted an erasure.

The process, or the power, goes at each step of it; then it is repeated. Once that is reported, no label and no key of a
block of theirs is in any record of a session on the drive, superseded ones and chunks included.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import ReadOnly
from kvstore.limits import PAGE_BYTES, SESSION_CHUNK_BLOCKS
from kvstore.storage import overwriting
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, StoreRig, name

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.storage.items import SessionDone

SAID = b"-- erased user's block "
BLOCKS = [int.from_bytes(SAID + b"%09d" % number, "little") for number in range(5 * SESSION_CHUNK_BLOCKS + 9)]
LABEL = "-- what an erased user called it --"
OTHER = b"another user of t"[:16]
ITS = SessionName(TENANT, USER, name(1))
OF_OTHER = SessionName(TENANT, OTHER, name(1))
STEPS_MAX = 300


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, bytes]]:
    """A store with a session, and one of another user that shares its first chunk, whole on the drive."""
    rig = StoreRig(tmp_path_factory.mktemp("filled"), FakeDisk())
    rig.open()
    for number in BLOCKS:
        assert rig.put(number, b"KV").error is None
    assert rig.append(1, BLOCKS[:-1], Durability.SYNCED, label=LABEL).error is None
    fork = SessionItem(OF_OTHER, SessionStep.FORK, Durability.SYNCED, 0, source=ITS)
    assert rig.change_session(fork._replace(blocks=SESSION_CHUNK_BLOCKS)).error is None
    rig.close()
    assert rig.disk is not None
    return rig.data, rig.disk.pages


def used(filled: tuple[Path, dict[int, bytes]], folder: Path, seed: int) -> StoreRig:
    """A store with changes that wait for a sync: the session has grown, the other has released its chunk."""
    data, pages = filled
    shutil.copytree(data, folder)
    rig = StoreRig(folder, FakeDisk(pages, seed=seed))
    rig.open()
    cut = SessionItem(OF_OTHER, SessionStep.TRUNCATE, Durability.WRITTEN, 0, blocks=0)
    assert rig.change_session(cut).error is None
    assert rig.append(1, BLOCKS[-1:]).error is None
    assert rig.truncate(1, 4 * SESSION_CHUNK_BLOCKS + 3).error is None
    return rig


def start_erasing(rig: StoreRig) -> list[SessionDone]:
    done: list[SessionDone] = []
    item = SessionItem(ITS, SessionStep.REMOVE, Durability.SYNCED, 0, is_erased=True)
    rig.store.change_sessions([item], done.extend)
    return done


def erase(rig: StoreRig) -> SessionDone:
    done = start_erasing(rig)
    rig.settle()
    return done[0]


def left(rig: StoreRig) -> list[int]:
    """The pages that contain data of the session; headers of blocks contain one key each."""
    assert rig.disk is not None
    return [
        page
        for page, said in rig.disk.pages.items()
        if LABEL.encode() in said or (said.count(SAID) > 1 and page not in _of_other(rig))
    ]


def _of_other(rig: StoreRig) -> set[int]:
    """The pages of chunks that the other user's session has."""
    stored = rig.store.manifests.get(OF_OTHER)
    chunks = set() if stored is None else set(stored.manifest.chunks)
    places = [place for _, key, place, _ in rig.drive.manifests.all_chunks() if key in chunks]
    return {place.offset // PAGE_BYTES + one for place in places for one in range(place.pages)}


@pytest.mark.parametrize("how", ["kill", "no-index", "power"])
def test_an_erased_session_leaves_nothing_once_an_interrupted_erasure_is_repeated(
    filled: tuple[Path, dict[int, bytes]], tmp_path: Path, how: str
) -> None:
    met, others = set(), set()
    for steps in range(STEPS_MAX):
        rig = used(filled, tmp_path / str(steps), steps)
        assert len(left(rig)) > 3, "manifests, the last one and those before, and chunks"
        done = start_erasing(rig)
        for _ in range(steps):
            rig.poll_once()
        over = bool(done)
        if over:
            assert done[0].error is None
            assert left(rig) == []
        met.add(len(left(rig)))
        rig.go_on_after(how, steps)
        other = rig.store.manifests.keys(OF_OTHER)
        assert other is not None, steps
        assert len(other) in (0, SESSION_CHUNK_BLOCKS)
        others.add(len(other))
        assert erase(rig).error is None
        assert left(rig) == [], steps
        assert rig.session(1) is None
        assert overwriting._noted(rig.drive._index) == []
        rig.close()
        if over:
            break
    assert over
    assert len(met) > 3, "it died where some pages were overwritten and others were not"
    assert how != "power" or len(others) == 2


def test_a_session_that_cannot_be_overwritten_is_not_reported_as_erased(
    filled: tuple[Path, dict[int, bytes]], tmp_path: Path
) -> None:
    rig = used(filled, tmp_path / "data", 1)
    assert rig.disk is not None
    stored = rig.store.manifests.get(ITS)
    assert stored is not None
    rig.disk.unwritable = {stored.place.offset // PAGE_BYTES + 1}
    assert isinstance(erase(rig).error, ReadOnly)
    rig.close()
    rig.disk = FakeDisk(rig.disk.pages)
    rig.open()
    assert left(rig) == []
    assert erase(rig).error is None
    rig.close()


def test_a_clean_stop_in_the_middle_leaves_nothing_that_the_next_start_does_not_overwrite(
    filled: tuple[Path, dict[int, bytes]], tmp_path: Path
) -> None:
    met = set()
    for steps in range(STEPS_MAX):
        rig = used(filled, tmp_path / str(steps), steps)
        done = start_erasing(rig)
        for _ in range(steps):
            rig.poll_once()
        over = bool(done)
        rig.close()
        assert done, "it is answered"
        met.add(done[0].error is None)
        if done[0].error is None:
            assert left_of(rig) == []
        assert rig.disk is not None
        rig.disk = FakeDisk(rig.disk.pages, seed=steps)
        rig.open()
        assert erase(rig).error is None
        assert left(rig) == []
        rig.close()
        if over:
            break
    assert over
    assert met == {False, True}


def left_of(rig: StoreRig) -> list[int]:
    """The same for a closed store in which the other session has no chunk."""
    assert rig.disk is not None
    return [page for page, said in rig.disk.pages.items() if LABEL.encode() in said or said.count(SAID) > 1]
