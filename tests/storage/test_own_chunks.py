"""Chunks of an encrypted store belong to one user each, and are lost with that user's key."""

from __future__ import annotations

import shutil
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.limits import ENCRYPT_REST_MS, SESSION_CHUNK_BLOCKS
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from kvstore.storage.recovery import scan
from kvstore.wire.record import Kind
from tests.storage.fake_keys import FakeKeyring
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, StoreRig, key, name

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

COUNT = 2 * SESSION_CHUNK_BLOCKS + 9
OTHER = b"another user of t"[:16]
TURNS_MAX = 10_000


def filled(folder: Path, *, encrypted: bool) -> StoreRig:
    rig = StoreRig(folder, FakeDisk())
    if encrypted:
        rig.keyring = FakeKeyring()
    rig.open()
    for number in range(COUNT):
        assert rig.put(number, b"KV", Durability.SYNCED).error is None
    assert rig.append(1, range(COUNT), Durability.SYNCED).error is None
    return rig


def of_other(rig: StoreRig, step: SessionStep, **more: Any) -> None:
    """A step of the session of another user."""
    item = SessionItem(SessionName(TENANT, OTHER, name(1)), step, Durability.SYNCED, 0)
    assert rig.change_session(item._replace(**more)).error is None


def reopened(rig: StoreRig, *, scanned: bool = False) -> None:
    rig.close()
    assert rig.disk is not None
    rig.disk = FakeDisk(rig.disk.pages)
    if scanned:
        shutil.rmtree(rig.data / "index-0")
    rig.open()


def chunks(rig: StoreRig) -> int:
    """The number of chunk records that can be decrypted with all keys."""
    with closing(scan(rig.drive._volume)) as found:
        return sum(one.header.kind == Kind.CHUNK for one in found)


def has_others(rig: StoreRig) -> bool:
    keys = rig.store.manifests.keys(SessionName(TENANT, OTHER, name(1)))
    return keys == [key(number) for number in range(COUNT)]


@pytest.mark.parametrize("step", [SessionStep.APPEND, SessionStep.FORK])
def test_chunks_are_lost_with_the_key_of_their_user_and_no_other_user_needs_them(
    tmp_path: Path, step: SessionStep
) -> None:
    rig = filled(tmp_path, encrypted=True)
    if step is SessionStep.FORK:
        of_other(rig, step, source=SessionName(TENANT, USER, name(1)), blocks=COUNT)
    else:
        of_other(rig, step, keys=[key(number) for number in range(COUNT)], tokens=1)
    reopened(rig, scanned=True)
    assert rig.session(1) == list(range(COUNT))
    assert chunks(rig) == 4
    assert rig.keyring is not None
    rig.keyring.erase(TENANT, USER)
    reopened(rig, scanned=True)
    assert chunks(rig) == 2
    assert rig.session(1) is None
    assert has_others(rig)
    rig.close()


def test_sessions_of_a_user_share_chunks(tmp_path: Path) -> None:
    rig = filled(tmp_path, encrypted=True)
    assert rig.fork(2, 1, COUNT).error is None
    assert rig.append(3, range(COUNT)).error is None
    assert len(list(rig.drive.manifests.all_chunks())) == 2
    rig.close()


@pytest.mark.parametrize("is_newer", [False, True], ids=["manifest in the clear", "only chunks in the clear"])
def test_earlier_chunks_become_their_users_own(tmp_path: Path, *, is_newer: bool) -> None:
    """Two users who share them each get their own when the drive is encrypted."""
    rig = filled(tmp_path, encrypted=False)
    of_other(rig, SessionStep.FORK, source=SessionName(TENANT, USER, name(1)), blocks=COUNT)
    assert len(list(rig.drive.manifests.all_chunks())) == 2
    rig.keyring = FakeKeyring()
    reopened(rig)
    if is_newer:
        assert rig.append(1, [0]).error is None
    for _ in range(TURNS_MAX):
        if not rig.store.statistics().clear_bytes:
            break
        rig.clock.now_ms += ENCRYPT_REST_MS
        rig.store.poll()
    assert rig.session(1) == [*range(COUNT), *([0] if is_newer else [])]
    assert len(list(rig.drive.manifests.all_chunks())) == 4
    rig.keyring.erase(TENANT, USER)
    reopened(rig, scanned=True)
    assert chunks(rig) == 2
    assert rig.session(1) is None
    assert has_others(rig)
    rig.close()
