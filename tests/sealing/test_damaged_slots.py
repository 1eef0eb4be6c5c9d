"""A damaged or moved slot of the keyring: the blocks encrypted with it miss with that reason, and are kept."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import Corrupt, StorageError, WrongKeyring
from kvstore.miss import MissReason
from kvstore.sealing.keyring import Keyring
from kvstore.sealing.keyring_file import keyring_path
from kvstore.sealing.keyring_state import read_status
from kvstore.sealing.masters import open_master
from kvstore.sealing.slots import HEADER_PAGES, SLOT_BYTES, Kind, State, parse_slot
from kvstore.sealing.store_keys import keys_opener
from kvstore.storage.fsck import check
from tests.sealing.test_lost_keyring import DOMAIN, PAYLOAD, Ring, command, is_there, killed, rig
from tests.storage.rig import TENANT, USER

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["rig"]

OTHER = b"another of hers."
HOW = ["a bad CRC", "zeros", "swapped with another"]


def slots_of(path: Path) -> dict[bytes, int]:
    """The numbers of the slots with live keys, by domain."""
    raw = path.read_bytes()[HEADER_PAGES * 4096 :]
    rows = [parse_slot(raw[at : at + SLOT_BYTES]) for at in range(0, len(raw), SLOT_BYTES)]
    return {
        one.domain: number
        for number, one in enumerate(rows)
        if one is not None and one.kind == Kind.DOMAIN and one.state == State.LIVE
    }


def row(path: Path, number: int) -> bytes:
    at = HEADER_PAGES * 4096 + number * SLOT_BYTES
    return path.read_bytes()[at : at + SLOT_BYTES]


def change(path: Path, number: int, new: bytes, at: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_PAGES * 4096 + number * SLOT_BYTES + at)
        file.write(new)


def damage(path: Path, how: str) -> None:
    numbers = slots_of(path)
    number, other = numbers[DOMAIN], numbers[OTHER]
    if how == "a bad CRC":
        change(path, number, bytes([row(path, number)[80] ^ 1]), at=80)
        return
    if how == "zeros":
        change(path, number, bytes(SLOT_BYTES))
        return
    rows = [row(path, one) for one in (number, other)]
    change(path, number, rows[1])
    change(path, other, rows[0])


@pytest.mark.parametrize("how", HOW)
def test_an_encrypted_block_without_its_key_is_an_explained_miss_and_stays(
    rig: Ring,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    rig.open()
    assert rig.put(3, PAYLOAD, domain=DOMAIN).error is None
    assert rig.put(4, PAYLOAD, domain=OTHER).error is None
    rig.store.close()
    path = keyring_path(rig.data)
    good = {number: row(path, number) for number in slots_of(path).values()}
    damage(path, how)
    rig.open()
    lost = (2, 3, 4) if how == HOW[-1] else (2, 3)
    for _ in range(2):
        for number in lost:
            miss = rig.get(number)[0].miss
            assert miss is not None
            assert miss.reason is MissReason.UNREADABLE
            assert "keyring is damaged" in miss.detail
    assert is_there(rig, 1)
    warnings = [one.getMessage() for one in caplog.records if "can't be used, and" in one.getMessage()]
    assert len(warnings) == (2 if how == HOW[-1] else 1), "each slot once"
    assert sum("slots of the keyring are damaged" in one.getMessage() for one in caplog.records) == 1
    rig.store.close()
    for number, was in good.items():
        change(path, number, was)
    rig.open()
    for number in (1, 2, 3, 4):
        assert is_there(rig, number)


def without_index(rig: Ring) -> None:
    shutil.rmtree(rig.data / "index-0")


def damaged_store(rig: Ring, how: str) -> dict[int, bytes]:
    """A closed store with damaged slots, and their former content."""
    rig.open()
    assert rig.put(4, PAYLOAD, domain=OTHER).error is None
    rig.store.close()
    path = keyring_path(rig.data)
    good = {number: row(path, number) for number in slots_of(path).values()}
    damage(path, how)
    return good


@pytest.mark.parametrize("how", HOW)
def test_a_new_index_loses_no_block_of_a_damaged_slot(rig: Ring, how: str) -> None:
    good = damaged_store(rig, how)
    without_index(rig)
    for _ in range(2):
        with pytest.raises(
            StorageError, match=r"keys whose slots in the keyring are damaged.*accept-keyring"
        ):
            rig.open()
    for number, was in good.items():
        change(keyring_path(rig.data), number, was)
    rig.open()
    for number in (1, 2, 4):
        assert is_there(rig, number)


def test_a_killed_node_keeps_its_index_despite_a_damaged_slot(rig: Ring) -> None:
    rig.open()
    assert rig.put(4, PAYLOAD, domain=OTHER).error is None
    killed(rig)
    path = keyring_path(rig.data)
    good = {number: row(path, number) for number in slots_of(path).values()}
    damage(path, "a bad CRC")
    rig.open()
    assert not is_there(rig, 2)
    assert is_there(rig, 4)
    killed(rig)
    for number, was in good.items():
        change(path, number, was)
    rig.open()
    for number in (1, 2, 4):
        assert is_there(rig, number)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("index", ["whole", "lost"])
def test_fsck_repairs_nothing_that_would_lose_them(rig: Ring, how: str, index: str) -> None:
    good = damaged_store(rig, how)
    if index == "lost":
        without_index(rig)
    else:
        with (rig.data / "drive-0.kv").open("r+b") as drive:
            drive.write(bytes(64))  # the first copy of the superblock, which a repair would mend
    before = {file.name: file.read_bytes() for file in rig.data.rglob("*.kv")}
    report = check(rig.data, repair=True, open_keys=keys_opener(rig.data, rig.option))
    assert not report.repaired
    assert report.counts["records whose keys are damaged in the keyring"] == (2 if how == HOW[-1] else 1)
    assert not report.counts["blocks in the index and not on the drive"]
    assert before == {file.name: file.read_bytes() for file in rig.data.rglob("*.kv")}
    for number, was in good.items():
        change(keyring_path(rig.data), number, was)
    assert check(rig.data, repair=True, open_keys=keys_opener(rig.data, rig.option)).left == []
    rig.open()
    for number in (1, 2, 4):
        assert is_there(rig, number)


def test_damaged_slots_are_given_up_once_confirmed(rig: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    damaged_store(rig, "a bad CRC")
    without_index(rig)
    assert command(rig, "accept-keyring") == 3
    said = capsys.readouterr().out
    assert "1 slots of the keyring are damaged" in said
    assert "1 encrypted records" in said
    with pytest.raises(StorageError, match="accept-keyring"):
        rig.open()
    assert command(rig, "accept-keyring", "--yes") == 0
    assert read_status(keyring_path(rig.data)).damaged == 0
    rig.open()
    assert is_there(rig, 1)
    assert is_there(rig, 4)
    assert not is_there(rig, 2)
    assert rig.store.statistics().blocks == 2


def test_a_block_without_a_key_in_an_older_copy_is_not_erased(
    rig: Ring, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keyring_path(rig.data)
    rig.open()
    shutil.copy(path, rig.data / "copy")
    assert rig.put(4, PAYLOAD, domain=OTHER).error is None
    killed(rig)
    path.rename(rig.data / "newest")
    shutil.copy(rig.data / "copy", path)
    rig.open()
    assert rig.put(5, PAYLOAD, domain=b"a later domain..").error is None  # in another slot
    for _ in range(2):
        miss = rig.get(4)[0].miss
        assert miss is not None
        assert miss.reason is MissReason.UNREADABLE
    rig.store.close()
    without_index(rig)
    with pytest.raises(StorageError, match=r"accept-keyring"):
        rig.open()
    assert command(rig, "accept-keyring") == 3
    assert "1 encrypted records" in capsys.readouterr().out
    shutil.copy(path, rig.data / "copy")
    path.unlink()
    (rig.data / "newest").rename(path)
    with pytest.raises(WrongKeyring, match="older copy"):  # it was in use since
        rig.open()
    path.unlink()
    (rig.data / "copy").rename(path)
    assert command(rig, "accept-keyring", "--yes") == 0
    rig.open()
    assert is_there(rig, 1)
    assert is_there(rig, 2)
    assert not is_there(rig, 4)
    killed(rig)
    without_index(rig)
    rig.open()  # once and for all
    assert is_there(rig, 2)


def test_a_session_whose_key_an_older_copy_lacks_is_not_treated_as_erased(
    rig: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record has its user's key, which no block has."""
    path = keyring_path(rig.data)
    rig.open()
    shutil.copy(path, rig.data / "copy")
    assert rig.append(1, [1, 2], label="her chat").error is None
    lacking = slots_of(path)[USER]
    killed(rig)
    shutil.copy(rig.data / "copy", path)
    rig.open()
    assert "lacks 1 keys that blocks and sessions name" in caplog.text
    assert rig.put(5, PAYLOAD, domain=b"a later domain..").error is None
    assert lacking not in slots_of(path).values(), "it is given to nobody"
    rig.store.close()
    without_index(rig)
    with pytest.raises(StorageError, match=r"1 records need keys .* accept-keyring"):
        rig.open()


def test_swapped_slots_are_reported_as_damaged(rig: Ring) -> None:
    rig.open()
    assert rig.put(4, PAYLOAD, domain=OTHER).error is None
    rig.store.close()
    path = keyring_path(rig.data)
    ids = {number: row(path, number)[8:16] for number in slots_of(path).values()}
    damage(path, "swapped with another")
    assert rig.option is not None
    master = open_master(rig.option)
    with Keyring.open(path, master, read_status(path).store_uuid) as keyring:
        assert keyring.status().damaged == 2
        for domain in (DOMAIN, OTHER):
            assert keyring.domain(TENANT, domain) is None
        for number, key_id in ids.items():
            with pytest.raises(Corrupt, match="damaged"):
                keyring.by_number(number, key_id)
    master.close()


def test_a_keyring_readable_by_others_is_made_private_and_that_is_logged(
    rig: Ring,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = keyring_path(rig.data)
    for mode, words in ((0o644, "mode 0644"), (0o620, "mode 0620"), (0o600, "")):
        caplog.clear()
        path.chmod(mode)
        rig.open()
        rig.store.close()
        assert path.stat().st_mode & 0o777 == 0o600
        said = [one.getMessage() for one in caplog.records if "open to other users" in one.getMessage()]
        assert [words in one for one in said] == [True] * bool(words)
