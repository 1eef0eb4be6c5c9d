"""`kvstore fsck`: what it finds and repairs, and that it changes nothing intact."""

from __future__ import annotations

import os
import shutil
import struct
from typing import TYPE_CHECKING

import pytest

from kvstore.cli import main
from kvstore.errors import ConfigError, Corrupt, FolderLocked
from kvstore.limits import HEADER_BYTES, PAGE_BYTES
from kvstore.storage.fsck import check
from kvstore.storage.index import Index
from kvstore.wire.record import parse_superblock
from tests.storage.rig import TENANT, StoreRig, key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BOOT = "0" * 36


@pytest.fixture
def filled(real: StoreRig) -> StoreRig:
    real.put(1000, b"the first generation")
    real.delete(1000)
    for number in range(200):
        real.start_put(number, b"payload of %d" % number)
        if number % 50 == 49:
            real.settle()
    real.append(1, range(150))
    real.fork(2, 1, 130)
    real.delete(199)
    return real


def poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as drive:
        drive.seek(offset)
        drive.write(data)


def is_whole(rig: StoreRig) -> None:
    rig.open()
    assert not rig.store.statistics().rebuilt
    assert all(rig.get(number)[1] == b"payload of %d" % number for number in range(199))
    assert rig.get(199)[0].miss is not None
    assert rig.session(1) == list(range(150))
    assert rig.session(2) == list(range(130))


def tamper(rig: StoreRig, change: Callable[[Index], object]) -> None:
    index = Index(rig.data / "index-0", 0)
    change(index)
    index.abandon()


def test_a_clean_folder_has_nothing_wrong_and_is_not_written(filled: StoreRig) -> None:
    filled.store.close()
    before = (filled.data / "drive-0.kv").read_bytes()
    report = check(filled.data, payloads=True, repair=True)
    assert report.damage == []
    assert not report.repaired
    assert (report.counts["blocks"], report.counts["sessions"], report.counts["chunks"]) == (199, 2, 1)
    assert (filled.data / "drive-0.kv").read_bytes() == before
    assert not (filled.data / "index.fsck").exists()
    is_whole(filled)


def test_leftovers_of_a_killed_process_are_not_damage(filled: StoreRig) -> None:
    filled.kill()
    assert check(filled.data, boot_id=BOOT).damage == []
    is_whole(filled)


def _delete(rig: StoreRig) -> None:
    shutil.rmtree(rig.data / "index-0")


def _cut(rig: StoreRig) -> None:
    path = rig.data / "index-0" / "data.mdb"
    os.truncate(path, path.stat().st_size // 2 // PAGE_BYTES * PAGE_BYTES)


def _garbage(rig: StoreRig) -> None:
    poke(rig.data / "index-0" / "data.mdb", 0, b"\xff" * 8192)


@pytest.mark.parametrize("harm", [_delete, _cut, _garbage])
def test_a_missing_or_broken_index_is_rebuilt(filled: StoreRig, harm: Callable[[StoreRig], None]) -> None:
    filled.store.close()
    harm(filled)
    assert check(filled.data).damage == ["unusable index"]
    assert check(filled.data, repair=True).left == []
    assert check(filled.data).damage == []
    is_whole(filled)


@pytest.mark.parametrize("killed", [False, True])
def test_yesterdays_index_is_rebuilt(filled: StoreRig, *, killed: bool) -> None:
    shutil.copytree(filled.data / "index-0", filled.data / "yesterday")
    filled.put(200, b"today")
    if killed:
        filled.kill()
    else:
        filled.store.close()
    shutil.rmtree(filled.data / "index-0")
    (filled.data / "yesterday").rename(filled.data / "index-0")
    assert check(filled.data, boot_id=BOOT).damage == ["unusable index"]
    assert check(filled.data, boot_id=BOOT, repair=True).repaired
    is_whole(filled)
    assert filled.get(200)[1] == b"today"


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("blocks missing from the index", lambda index: index.remove([(TENANT, key(5))])),
        (
            "blocks in the index and not on the drive",
            lambda index: index.publish(
                [((TENANT, key(999)), index.lookup([(TENANT, key(5))])[0]._replace(generation=10**6))]
            ),
        ),
        (
            "blocks in the index with an older generation",
            lambda index: index.publish(
                [((TENANT, key(5)), index.lookup([(TENANT, key(5))])[0]._replace(generation=1))]
            ),
        ),
        (
            "blocks in the index with other fields",
            lambda index: index.publish(
                [((TENANT, key(5)), index.lookup([(TENANT, key(5))])[0]._replace(crc32c=1))]
            ),
        ),
        (
            "records that overlap in the index",
            lambda index: index.publish(
                [((TENANT, key(5)), index.lookup([(TENANT, key(6))])[0]._replace(generation=10**6))]
            ),
        ),
        (
            "wrong refcounts",
            lambda index: index.write(
                lambda transaction: transaction.put(
                    TENANT + key(140), struct.pack("<I", 7), db=index.references
                )
            ),
        ),
        (
            "sessions that differ in the index",
            lambda index: index.write(
                lambda transaction: transaction.delete(
                    TENANT + b"a-user-of-tests!" + (2).to_bytes(16, "little"), db=index.sessions
                )
            ),
        ),
    ],
)
def test_an_index_that_contradicts_the_drive_is_found_and_repaired(
    filled: StoreRig, what: str, change: Callable[[Index], object]
) -> None:
    filled.store.close()
    tamper(filled, change)
    assert what in check(filled.data).damage
    assert check(filled.data, repair=True).left == []
    assert check(filled.data).damage == []
    is_whole(filled)


def test_a_damaged_payload_is_found_on_request_and_not_repaired(filled: StoreRig) -> None:
    offset, _ = filled.record_at(7)
    filled.store.close()
    poke(filled.data / "drive-0.kv", offset + HEADER_BYTES, b"X")
    assert check(filled.data).damage == []
    report = check(filled.data, payloads=True, repair=True)
    assert report.left == ["payloads that fail their CRC"]
    assert report.examples[report.left[0]] == key(7).hex()
    assert not report.repaired


def test_a_damaged_superblock_and_a_damaged_roll_are_found_and_rewritten(filled: StoreRig) -> None:
    filled.kill()
    filled.open()  # this makes a roll
    filled.store.close()
    drive = filled.data / "drive-0.kv"
    superblock = parse_superblock(drive.read_bytes()[:PAGE_BYTES])
    assert hasattr(superblock, "roll_copy")
    poke(drive, PAGE_BYTES, b"garbage")
    poke(drive, (2 + superblock.roll_copy) * PAGE_BYTES, b"garbage")
    report = check(filled.data, repair=True)
    assert report.damage[:2] == [
        "damaged copies of the superblock",
        "damaged roll: deleted blocks may reappear",
    ]
    assert check(filled.data).damage == []
    is_whole(filled)


def test_an_interrupted_repair_leaves_an_index_that_is_rebuilt(
    filled: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.store.close()
    tamper(filled, lambda index: index.remove([(TENANT, key(5))]))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Index, "close_clean", die)
        with pytest.raises(KeyboardInterrupt):
            check(filled.data, repair=True)
    filled.open()
    assert filled.store.statistics().rebuilt
    assert filled.get(5)[1] == b"payload of 5"


def test_the_command_prints_a_table_and_exits_with_the_result(
    filled: StoreRig, capsys: pytest.CaptureFixture[str]
) -> None:
    filled.store.close()
    assert main(["fsck", str(filled.data)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    shutil.rmtree(filled.data / "index-0")
    assert main(["fsck", str(filled.data)]) == 3
    assert "unusable index" in capsys.readouterr().out
    assert main(["fsck", str(filled.data), "--repair"]) == 0
    assert "repaired" in capsys.readouterr().out
    assert main(["fsck", str(filled.data)]) == 0
    assert main(["fsck", str(filled.data / "none")]) == 2


def test_a_folder_that_cannot_be_checked_is_an_error(filled: StoreRig, tmp_path: Path) -> None:
    with pytest.raises(FolderLocked):
        check(filled.data)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no drive"):
        check(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    filled.store.close()
    for copy in (0, PAGE_BYTES):
        poke(filled.data / "drive-0.kv", copy, b"garbage")
    with pytest.raises(Corrupt):
        check(filled.data)


def test_a_drive_without_a_superblock_is_damage_and_not_a_failed_command(
    filled: StoreRig, capsys: pytest.CaptureFixture[str]
) -> None:
    filled.store.close()
    for copy in (0, PAGE_BYTES):
        poke(filled.data / "drive-0.kv", copy, b"garbage")
    assert main(["fsck", str(filled.data)]) == 3
    assert f"{filled.data}: damaged. " in capsys.readouterr().out
