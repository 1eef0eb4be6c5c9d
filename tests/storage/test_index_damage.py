"""A damaged index costs a scan, never a record: with any bit of it wrong, all records on the drive are found."""

from __future__ import annotations

import logging
import os
import random
import shutil
import struct
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest

from kvstore.cli import main
from kvstore.errors import Corrupt, ReadOnly, StorageError
from kvstore.storage import index_check, index_file
from kvstore.storage.drive_set import SET_NAME, read_set
from kvstore.storage.folder import FolderLock
from kvstore.storage.fsck import check
from kvstore.storage.index import BLOCKS_NAME, Index
from kvstore.storage.index_layout import BLOCK_ROW, NAME_BYTES
from kvstore.storage.row_check import CHECK_BYTES, checked
from kvstore.storage.superblock import find_superblock
from kvstore.storage.volume import Volume
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.filled import (
    all_is_there,
    data_of,
    disk_of,
    fill,
    payload_of,
    puts_overwrite_nothing,
)
from tests.storage.rig import TENANT, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

CASES = int(os.environ.get("TRIGGERKV_INDEX_CASES", "120"))  # `make crash`: 20,000
BOOT = "0" * 36
PAGE = 4096


@pytest.fixture
def killed(tmp_path: Path) -> StoreRig:
    """A store whose process was killed."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    rig.kill()
    rig.disk = disk_of(rig).after_kill(1)
    return rig


def put_row(rig: StoreRig, change: Callable[[Index, Any], object]) -> None:
    """Change rows outside of the store, with all checks of LMDB updated."""
    index = Index(rig.data / "index-0", 0)
    index.write(lambda transaction: change(index, transaction))
    index.abandon()


def commit_is_noted(rig: StoreRig) -> None:
    """Note the last commits of an index that was changed behind the store's back."""
    index = Index(rig.data / "index-0", 0)
    lock = FolderLock(rig.data)
    place = lock.place(0)
    index._notes, index._noted = place, place.note[:2]
    index._note_commit()
    index.abandon()
    lock.release()


def change_blocks(rig: StoreRig, change: Callable[[Index], object]) -> None:
    """Change blocks outside of the store, with all checks of their rows updated."""
    index = Index(rig.data / "index-0", 0)
    change(index)
    index.abandon()
    commit_is_noted(rig)


def row_at(data: bytes | bytearray, number: int) -> int:
    """Return where the row of a stored block begins in the file of the table."""
    rows = np.frombuffer(data, BLOCK_ROW, offset=PAGE)
    is_its = (rows["key"] == np.void(key(number))) & (rows["gone"] == 0)
    return PAGE + BLOCK_ROW.itemsize * int(np.flatnonzero(is_its)[0])


def flip_in_row(rig: StoreRig, number: int, byte: int, bit: int) -> None:
    path = rig.data / "index-0" / BLOCKS_NAME
    data = bytearray(path.read_bytes())
    data[row_at(data, number) + byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    "byte", [0, 20, 49, 57, 60, 66, 80, 88, 92, 96, 104, 113], ids=lambda byte: f"byte-{byte}"
)
@pytest.mark.parametrize("closed_first", [True, False])
def test_one_flipped_bit_in_a_row_costs_no_record(tmp_path: Path, byte: int, *, closed_first: bool) -> None:
    """Of its name, place, length, CRC, generation, fingerprint, domain, slot, commit, check and expiry."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    if closed_first:
        rig.store.close()
        rig.disk = FakeDisk(disk_of(rig).pages)
    else:
        rig.kill()
        rig.disk = disk_of(rig).after_kill(1)
    flip_in_row(rig, 50, byte, 4)
    all_is_there(rig)
    assert rig.store.statistics().rebuilt
    puts_overwrite_nothing(rig)
    rig.store.close()


@pytest.mark.parametrize("file", ["data.mdb", BLOCKS_NAME])
@pytest.mark.parametrize("repaired", [False, True])
def test_a_start_and_fsck_rebuild_from_a_zeroed_page(closed: StoreRig, file: str, *, repaired: bool) -> None:
    path = closed.data / "index-0" / file
    pages = path.stat().st_size // PAGE
    whole = path.read_bytes()
    for page in range(pages):
        path.write_bytes(whole[: page * PAGE] + bytes(PAGE) + whole[(page + 1) * PAGE :])
        (closed.data / "index-0" / "seal").unlink(missing_ok=True)  # so that the page itself is looked at
        if repaired:
            disk = FakeDisk(disk_of(closed).pages)
            check(closed.data, repair=True, source=_source(disk), boot_id=BOOT)
            closed.disk = FakeDisk(disk.pages)
        all_is_there(closed)
        closed.store.close()
        closed.disk = FakeDisk(disk_of(closed).pages)
        whole = path.read_bytes()


def _source(disk: FakeDisk) -> Any:
    return FakeDrives([disk])


@pytest.mark.parametrize("first", range(0, CASES, 40))
def test_an_index_damaged_at_random_costs_no_record_and_lets_none_be_overwritten(
    tmp_path: Path, first: int
) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    rebuilt = 0
    for seed in range(first, min(first + 40, CASES)):
        rng = random.Random(seed)
        if rng.random() < 0.5:
            rig.store.close()
            rig.disk = FakeDisk(disk_of(rig).pages, seed=seed)
        else:
            rig.kill()
            rig.disk = disk_of(rig).after_kill(seed)
        damage(rig.data / "index-0", rng)
        all_is_there(rig)
        rebuilt += rig.store.statistics().rebuilt
        number = 2000 + rng.randrange(40)
        assert rig.put(number, payload_of(number)).error is None
        done, got = rig.get(number)
        assert (done.miss, got) == (None, payload_of(number))
        if seed % 20 == 19:
            puts_overwrite_nothing(rig)
            for number in range(1000, 1060):
                rig.delete(number)
    assert rebuilt > 5
    rig.store.close()


def damage(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(["data.mdb", BLOCKS_NAME])
    data = bytearray(path.read_bytes())
    pages = len(data) // PAGE
    match rng.randrange(7):
        case 0:
            for _ in range(rng.choice([1, 1, 1, 5, 100])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:  # where it hurts: heads of pages
            page = rng.randrange(pages)
            data[page * PAGE + rng.randrange(170 if page < 2 else 24)] ^= 1 << rng.randrange(8)
        case 2:
            page = rng.randrange(pages)
            data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
        case 3:
            del data[rng.randrange(len(data)) :]
        case 4:
            one, other = rng.randrange(pages), rng.randrange(pages)
            data[one * PAGE : (one + 1) * PAGE] = data[other * PAGE : (other + 1) * PAGE]
        case 5:
            at = rng.randrange(len(data) - 64)
            data[at : at + 64] = rng.randbytes(64)
        case 6:
            seal = folder / "seal"
            if seal.exists():
                said = bytearray(seal.read_bytes())
                said[rng.randrange(len(said))] ^= 1 << rng.randrange(8)
                seal.write_bytes(said)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_a_rebuild_is_reported_in_one_sentence(closed: StoreRig, caplog: pytest.LogCaptureFixture) -> None:
    flip_in_row(closed, 50, 1, 4)
    with caplog.at_level(logging.WARNING):
        all_is_there(closed)
    said = [record.getMessage() for record in caplog.records if "index" in record.getMessage()]
    folder = closed.data / "index-0"
    assert said == [
        f"The index in {folder} is rebuilt from the drive: it can't be opened: its table of blocks was changed."
    ]
    closed.store.close()


def test_an_intact_index_is_trusted_with_and_without_its_seal(closed: StoreRig) -> None:
    (closed.data / "index-0" / "seal").unlink()
    all_is_there(closed)
    assert not closed.store.statistics().rebuilt
    closed.store.close()
    assert (closed.data / "index-0" / "seal").exists()


def test_an_open_index_has_no_seal(closed: StoreRig) -> None:
    assert (closed.data / "index-0" / "seal").exists()
    closed.open()
    assert not (closed.data / "index-0" / "seal").exists()
    closed.store.close()


@pytest.mark.parametrize("byte", range(0, 24, 3))
def test_a_damaged_seal_counts_as_missing(closed: StoreRig, byte: int) -> None:
    path = closed.data / "index-0" / "seal"
    said = bytearray(path.read_bytes())
    said[byte] ^= 1
    path.write_bytes(said)
    assert not index_file.is_sealed(path.parent)


def test_a_sealed_file_with_one_flipped_bit_is_not_sealed(closed: StoreRig) -> None:
    folder = closed.data / "index-0"
    assert index_file.is_sealed(folder)
    data = bytearray(data_of(closed).read_bytes())
    data[-1] ^= 1
    data_of(closed).write_bytes(data)
    assert not index_file.is_sealed(folder)


# What each check sees that nothing else does. LMDB's own structure is right in all of these.


def believed(rig: StoreRig) -> Index:
    """Open the index as after a kill, and read all of it."""
    superblock = _superblock(rig)
    lock = FolderLock(rig.data)
    note = lock.place(0).note
    lock.release()
    index = Index.trusted(rig.data / "index-0", superblock, BOOT, note)
    try:
        index_check.check_index(index, Volume(disk_of(rig), superblock))
    finally:
        index.abandon()
    return index


def _superblock(rig: StoreRig) -> Any:
    superblock = find_superblock(disk_of(rig))
    assert superblock is not None
    return superblock


def test_the_index_of_a_killed_process_is_trusted(killed: StoreRig) -> None:
    believed(killed)
    all_is_there(killed)
    assert not killed.store.statistics().rebuilt
    killed.store.close()


def _session(index: Index, transaction: Any) -> None:
    with transaction.cursor(index.sessions) as cursor:
        cursor.first()
        session, row = cursor.item()
    transaction.put(session, row[:40] + bytes([row[40] ^ 1]) + row[41:], db=index.sessions)


def _reference(index: Index, transaction: Any) -> None:
    with transaction.cursor(index.references) as cursor:
        cursor.first()
        block, row = cursor.item()
    transaction.put(block, bytes([row[0] ^ 1]) + row[1:], db=index.references)


def _nowhere(index: Index, transaction: Any) -> None:
    """A session's row with a valid check and an impossible place."""
    with transaction.cursor(index.sessions) as cursor:
        cursor.first()
        session, row = cursor.item()
    transaction.put(session, checked(session, bytes([row[0] ^ 1]) + row[1:-CHECK_BYTES]), db=index.sessions)


def _beyond(index: Index) -> None:
    put_changed(index, offset=1 << 40)


def _elsewhere(index: Index) -> None:
    """A row whose checks are valid, and whose record has another header."""
    put_changed(index, crc32c=1)


def put_changed(index: Index, **fields: Any) -> None:
    entry = index.lookup([(TENANT, key(50))])[0]
    assert entry is not None
    index.publish([((TENANT, key(50)), entry._replace(**fields))])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rig: put_row(rig, _session), "a row was changed"),
        (lambda rig: put_row(rig, _reference), "a row was changed"),
        (lambda rig: put_row(rig, _nowhere), "an impossible place"),
        (lambda rig: change_blocks(rig, _beyond), "beyond the drive"),
        (lambda rig: change_blocks(rig, _elsewhere), "differs from its record's header"),
        (lambda rig: flip_in_row(rig, 50, 1, 4), "its table of blocks was changed"),
    ],
)
def test_a_contradiction_is_detected(killed: StoreRig, change: Callable[[StoreRig], None], why: str) -> None:
    change(killed)
    commit_is_noted(killed) if "table" not in why else None
    with pytest.raises(Corrupt, match=why):
        believed(killed)
    all_is_there(killed)
    assert killed.store.statistics().rebuilt
    puts_overwrite_nothing(killed)
    killed.store.close()


def test_a_row_that_no_look_up_finds_is_detected(killed: StoreRig) -> None:
    """A branch that misdirects look-ups; all rows exist and are intact."""
    data = bytearray(data_of(killed).read_bytes())
    tables = struct.unpack_from("<Q", data, newest_head(data) + 40 + 48 + 40)[0] * PAGE
    said = data.index(b"references", tables, tables + PAGE) + len(b"references")
    root = struct.unpack_from("<Q", data, said + 40)[0] * PAGE
    assert struct.unpack_from("<H", data, root + 10)[0] == 1, "it has branches"
    second = struct.unpack_from("<H", data, root + 18)[0]
    data[root + second + 8] = 0xFF
    data_of(killed).write_bytes(data)
    with pytest.raises(Corrupt, match="not found where it stands"):
        believed(killed)
    all_is_there(killed)
    assert killed.store.statistics().rebuilt
    killed.store.close()


def test_a_head_of_another_commit_than_its_rows_is_rejected(killed: StoreRig) -> None:
    """The older of the two heads, with a transaction number made higher by a flipped bit."""
    data = bytearray(data_of(killed).read_bytes())
    numbers = [struct.unpack_from("<Q", data, page * PAGE + 144)[0] for page in (0, 1)]
    older = numbers.index(min(numbers))
    struct.pack_into("<Q", data, older * PAGE + 144, min(numbers) + 2)
    data_of(killed).write_bytes(data)
    lock = FolderLock(killed.data)
    place = lock.place(0)
    place.write_note(place.note._replace(commit=min(numbers) + 2))
    lock.release()
    with pytest.raises(Corrupt, match="another commit than its rows"):
        believed(killed)
    all_is_there(killed)
    killed.store.close()


def newest_head(data: bytes | bytearray) -> int:
    return max((0, 1), key=lambda page: struct.unpack_from("<Q", data, page * PAGE + 144)[0]) * PAGE


# While it serves.


def failing(*_: object, **__: object) -> Any:
    raise lmdb.CorruptedError("located page was wrong type")


@pytest.fixture
def full_disk() -> Iterator[Callable[[StoreRig], AbstractContextManager[None]]]:
    """Make an open table's file full, with only zeros in it."""
    with ExitStack() as last:
        full = os.open("/dev/full", os.O_RDWR)
        last.callback(os.close, full)

        @contextmanager
        def while_full(rig: StoreRig) -> Iterator[None]:
            fd = rig.drive._index._table._fd
            own = os.dup(fd)
            os.dup2(full, fd)
            try:
                yield
            finally:
                os.dup2(own, fd)
                os.close(own)

        yield while_full


def test_an_index_that_fails_during_operation_is_a_typed_error_and_no_acknowledgement(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full_disk: Callable[[StoreRig], AbstractContextManager[None]],
) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    with full_disk(rig):
        assert isinstance(rig.put(3000, b"x").error, StorageError)
        done, _ = rig.get(1)
        assert done.miss is not None
    assert isinstance(rig.put(3001, b"x").error, ReadOnly), "nobody knows what it has by now"
    assert rig.get(1)[1] == payload_of(1), "and what it had is there"
    with monkeypatch.context() as broken:
        broken.setattr(rig.drive._index, "_env", _Broken(rig.drive._index._env))
        assert rig.append(7, [1]).error is not None
    with full_disk(rig):
        assert rig.delete(1).error is not None
    rig.store.close()
    assert not data_of(rig).exists(), "so that it is built anew"
    rig.disk = FakeDisk(disk_of(rig).pages)
    all_is_there(rig)
    assert rig.store.statistics().rebuilt
    rig.store.close()


class _Broken:
    """An environment in which no transaction can begin."""

    def __init__(self, env: Any) -> None:
        self._env = env

    begin = staticmethod(failing)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._env, attribute)


def test_a_row_changed_while_it_was_open_wipes_nothing(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    entry = rig.store.lookup([(TENANT, key(51))])[0]
    assert entry is not None
    path = rig.data / "index-0" / BLOCKS_NAME
    with path.open("r+b") as file:  # the same file: the store has it open
        file.seek(row_at(path.read_bytes(), 50) + NAME_BYTES)
        file.write(struct.pack("<Q", entry.offset))
    assert rig.delete(50).error is not None
    rig.store.close()
    rig.disk = FakeDisk(disk_of(rig).pages)
    all_is_there(rig)
    rig.store.close()


def test_a_get_that_meets_a_changed_row_ends_all_puts(killed: StoreRig) -> None:
    """Other rows may have changed too."""
    killed.open()
    flip_in_row(killed, 50, 57, 4)
    assert killed.get(50)[0].miss is not None
    assert isinstance(killed.put(3001, b"x").error, ReadOnly)
    assert killed.get(51)[1] == payload_of(51)
    killed.store.close()


def test_the_check_of_a_folder_says_why_an_index_is_rejected(
    closed: StoreRig, capsys: pytest.CaptureFixture[str]
) -> None:
    real = StoreRig(closed.data.parent / "real")
    real.open()
    real.put(1, b"x")
    real.store.close()
    data = bytearray(data_of(real).read_bytes())
    data[newest_head(data) + 16] ^= 1
    data_of(real).write_bytes(data)
    assert main(["fsck", str(real.data)]) == 3
    assert "its head is damaged" in capsys.readouterr().out
    assert main(["fsck", str(real.data), "--repair"]) == 0
    assert main(["fsck", str(real.data)]) == 0
    shutil.rmtree(real.data)
    assert name(1)


def test_a_damaged_set_of_drives_costs_no_record_and_is_reported(
    closed: StoreRig, caplog: pytest.LogCaptureFixture
) -> None:
    path = closed.data / SET_NAME
    path.write_bytes(path.read_bytes().replace(b'"set": 1', b'"set": 3'))
    with caplog.at_level(logging.WARNING):
        all_is_there(closed)
    assert sum("kvstore.drives" in record.getMessage() for record in caplog.records) == 1
    assert read_set(closed.data) is not None, "it has been written anew"
    closed.store.close()
