"""Blocks and sessions whose keys an interrupted erasure has destroyed: they are in the index, and can't be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.miss import MissReason
from kvstore.storage.fsck import check
from tests.storage.fake_keys import FakeKeyring, FakeKeys
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.rig import TENANT, USER, StoreRig, key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.storage.fsck import Report

ADA, BOB = b"domain of ada   ", b"domain of bob   "
BYTES, OTHERS = b"what ada said", b"what ada said, and more"


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.keyring = FakeKeyring()
    rig.open()
    assert rig.put(1, BYTES, Durability.SYNCED, domain=ADA).error is None
    assert rig.put(2, BYTES, Durability.SYNCED, domain=BOB).error is None
    rig.append(1, [1, 2])
    yield rig
    rig.store.close()


def destroy(rig: StoreRig, domain: bytes) -> None:
    assert rig.keyring is not None
    assert isinstance(rig.store.keys, FakeKeys)
    name, _ = rig.keyring.keys[TENANT, domain]
    rig.keyring.erase(TENANT, domain)
    rig.store.keys.vault.drop(name.number)


def restart(rig: StoreRig, how: str) -> None:
    if how == "killed":
        rig.kill()
        rig.open()
    elif how == "stopped":
        rig.store.close()
        assert rig.disk is not None
        rig.disk = FakeDisk(rig.disk.pages)
        rig.open()


def report_of(rig: StoreRig) -> Report:
    """What fsck finds after a clean stop."""
    rig.store.close()
    assert rig.disk is not None
    assert rig.keyring is not None
    source, pages = FakeDrives([FakeDisk(rig.disk.pages)]), rig.disk.pages
    report = check(rig.data, source=source, boot_id=rig.boot_id, payloads=True, open_keys=rig.keyring.open)
    rig.disk = FakeDisk(pages)
    rig.open()
    return report


@pytest.mark.parametrize("data", [BYTES, OTHERS])
@pytest.mark.parametrize("how", ["at once", "stopped", "killed"])
def test_no_put_ends_because_of_a_block_whose_key_was_destroyed(
    sealed: StoreRig, how: str, data: bytes
) -> None:
    destroy(sealed, ADA)
    restart(sealed, how)
    assert sealed.put(1, data, domain=ADA).error is None
    assert sealed.get(1)[1] == data
    assert sealed.get(2)[1] == BYTES
    restart(sealed, "stopped")
    assert sealed.get(1)[1] == data
    assert report_of(sealed).damage == []


def test_a_block_that_a_put_replaces_counts_as_erased_and_not_as_damaged(sealed: StoreRig) -> None:
    destroy(sealed, ADA)
    sealed.put(1, OTHERS, domain=ADA)
    assert sealed.store.statistics().quarantined == 0
    assert sealed.delete(1).found
    sealed.settle()
    assert sealed.store.statistics().blocks == 1


def test_a_block_whose_key_was_destroyed_is_not_reported_as_stored(sealed: StoreRig) -> None:
    destroy(sealed, ADA)
    found = sealed.store.lookup([(TENANT, key(number)) for number in (1, 2)])
    first, second = found
    assert first is not None
    assert second is not None
    assert sealed.store.doubtful(found) == {first.generation}
    miss = sealed.get(1)[0].miss
    assert miss is not None
    assert miss.reason is MissReason.ERASED


@pytest.mark.parametrize("domain", [ADA, USER])
def test_what_a_stop_in_the_middle_of_an_erasure_leaves_is_no_damage(sealed: StoreRig, domain: bytes) -> None:
    assert report_of(sealed).damage == []
    destroy(sealed, domain)
    report = report_of(sealed)
    assert report.damage == []
    assert report.counts["records whose keys an interrupted erasure has destroyed"] == 1
