"""An index of an older build, which has its blocks in LMDB, is converted at the next start, without a scan."""

from __future__ import annotations

import os
import random
import shutil
import struct
from typing import TYPE_CHECKING, Any

import lmdb
import pytest

from kvstore.errors import StorageError
from kvstore.limits import ENCRYPT_REST_MS, INDEX_TABLES_MAX
from kvstore.storage import index_upgrade
from kvstore.storage.block_table import BlockTable
from kvstore.storage.encrypting import Encrypting
from kvstore.storage.fsck import check
from kvstore.storage.index import BLOCKS_NAME, Index
from kvstore.storage.index_file import DATA_NAME, seal, unseal
from kvstore.storage.index_layout import unpacked
from kvstore.storage.row_check import CHECK_BYTES, checked
from tests.storage.fake_keys import FakeKeyring
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.filled import (
    all_is_there,
    disk_of,
    fill,
    live,
    payload_of,
    puts_overwrite_nothing,
)
from tests.storage.rig import TENANT, StoreRig, key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.storage.index import Entry

CASES = int(os.environ.get("TRIGGERKV_UPGRADE_CASES", "20"))
OLD_META_KEYS = {b"store 4": b"store 3", b"store 4, sealed": b"store 3, sealed"}
OLD_ROW = struct.Struct("<QIIQQ16sI")  # offset, length, CRC, generation, expiry, fingerprint, domain
OLD_OWNER = struct.Struct("<48sQI")  # name, offset, length; by generation
IS_CLEAN_AT = 16 + 8  # in the row of meta


def folder_of(rig: StoreRig) -> Path:
    return rig.data / "index-0"


def environment_of(folder: Path) -> Any:
    return lmdb.open(str(folder), map_size=64 << 20, max_dbs=INDEX_TABLES_MAX, lock=False)


def make_old(folder: Path, *, is_clean: bool = True, sealed: bool = True) -> None:
    """Make a closed index one as the previous build left it."""
    table = BlockTable.load(folder / BLOCKS_NAME)
    rows = [row for some in table.rows() for row in unpacked(some.tobytes())]
    table.close()
    (folder / BLOCKS_NAME).unlink()
    unseal(folder)
    with environment_of(folder) as env, env.begin(write=True) as transaction:
        blocks, owners, meta = (
            env.open_db(name, transaction) for name in (b"blocks", b"generations", b"meta")
        )
        for tenant, name, offset, length, crc, generation, fingerprint, domain, expires_ms in rows:
            row = OLD_ROW.pack(offset, length, crc, generation, expires_ms, fingerprint, domain)
            transaction.put(tenant + name, checked(tenant + name, row), db=blocks)
            owner = OLD_OWNER.pack(tenant + name, offset, length)
            transaction.put(struct.pack(">Q", generation), owner, db=owners)
        for new, old in OLD_META_KEYS.items():
            said = transaction.pop(new, db=meta)
            if said is not None:
                row = said[:IS_CLEAN_AT] + bytes([is_clean]) + said[IS_CLEAN_AT + 1 : -CHECK_BYTES]
                transaction.put(old, checked(old, row), db=meta)
        transaction.put(b"commit", struct.pack("<Q", transaction.id()), db=meta)
    if sealed:
        seal(folder)


def closed(rig: StoreRig) -> None:
    rig.store.close()
    rig.disk = FakeDisk(disk_of(rig).pages)


def entries(rig: StoreRig) -> list[Entry | None]:
    return rig.store.lookup([(TENANT, key(number)) for number in live()])


def nothing_is_wrong(rig: StoreRig) -> None:
    """Nothing is wrong with the folder or the tables of LMDB."""
    keyring = rig.keyring.open if rig.keyring is not None else None
    report = check(
        rig.data, source=FakeDrives([FakeDisk(disk_of(rig).pages)]), boot_id=rig.boot_id, open_keys=keyring
    )
    assert report.damage == []
    with environment_of(folder_of(rig)) as env, env.begin() as transaction:
        names = [name for name, _ in transaction.cursor()]
    assert b"sessions" in names
    assert not {b"blocks", b"generations"} & set(names)


@pytest.fixture(params=["clear", "encrypted", "being encrypted"])
def filled(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StoreRig:
    """A store with sessions and expiries, of which some blocks are doubted."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.keyring = FakeKeyring() if request.param == "encrypted" else None
    rig.open()
    fill(rig)
    if request.param == "being encrypted":
        closed(rig)
        rig.keyring = FakeKeyring()
        rig.open()
        for _ in range(60):
            rig.clock.now_ms += ENCRYPT_REST_MS
            rig.store.poll()
        assert {one.domain > 0 for one in entries(rig) if one} == {True, False}
        monkeypatch.setattr(Encrypting, "step", lambda _: None)
    rig.kill()
    rig.disk = disk_of(rig).after_kill(1)
    rig.open()
    return rig


def everything_is_there(rig: StoreRig, before: list[Entry | None], *, rebuilt: bool) -> None:
    all_is_there(rig)
    assert rig.store.statistics().rebuilt == rebuilt
    assert entries(rig) == before
    puts_overwrite_nothing(rig)
    closed(rig)
    nothing_is_wrong(rig)
    rig.open()
    assert not rig.store.statistics().rebuilt
    assert entries(rig) == before
    rig.store.close()


@pytest.mark.parametrize("sealed", [True, False])
def test_an_older_builds_index_is_converted_without_a_scan(
    filled: StoreRig, monkeypatch: pytest.MonkeyPatch, *, sealed: bool
) -> None:
    monkeypatch.setattr(index_upgrade, "INDEX_ROWS_AT_ONCE", 32)
    before, doubted = entries(filled), filled.store.statistics().doubted
    assert doubted > 0
    assert {one.expires_ms > 0 for one in before if one} == {True, False}
    closed(filled)
    make_old(folder_of(filled), sealed=sealed)
    filled.open()
    assert not filled.store.statistics().rebuilt
    assert filled.store.statistics().doubted == doubted
    closed(filled)
    everything_is_there(filled, before, rebuilt=False)


class KilledError(Exception):
    """The process was killed."""


def die(*_: object, **__: object) -> Any:
    raise KilledError


def _die_within_put(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTable, "put", die)


def _die_after_some(patch: pytest.MonkeyPatch) -> None:
    put = BlockTable.put

    def put_and_die(table: BlockTable, rows: Any) -> None:
        put(table, rows)
        raise KilledError

    patch.setattr(BlockTable, "put", put_and_die)


def _die_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTable, "sync", die)


def _die_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(index_upgrade, "checked", die)


def _die_after_the_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Index, "_open", die)


@pytest.mark.parametrize(
    "step",
    [
        _die_within_put,
        _die_after_some,
        _die_before_it_is_durable,
        _die_before_the_commit,
        _die_after_the_commit,
    ],
)
def test_an_interrupted_conversion_is_made_at_the_next_start(
    filled: StoreRig, monkeypatch: pytest.MonkeyPatch, step: Callable[[pytest.MonkeyPatch], None]
) -> None:
    monkeypatch.setattr(index_upgrade, "INDEX_ROWS_AT_ONCE", 32)
    before = entries(filled)
    closed(filled)
    make_old(folder_of(filled))
    with monkeypatch.context() as patch:
        step(patch)
        for _ in range(2):
            with pytest.raises(KilledError):
                filled.open()
            filled.disk = FakeDisk(disk_of(filled).pages)
    everything_is_there(filled, before, rebuilt=False)


@pytest.mark.parametrize("call", ["put", "sync"])
def test_a_conversion_without_room_costs_a_scan(
    filled: StoreRig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = entries(filled)
    closed(filled)
    make_old(folder_of(filled))
    change = getattr(BlockTable, call)

    def fail(*_: object) -> None:
        monkeypatch.setattr(BlockTable, call, change)
        raise StorageError("could not be written: the drive is full")

    monkeypatch.setattr(BlockTable, call, fail)
    everything_is_there(filled, before, rebuilt=True)


def _flipped(folder: Path, name: bytes) -> None:
    """Flip a bit in the row of a table of LMDB, whose own structure is as right as before."""
    with environment_of(folder) as env, env.begin(write=True) as transaction:
        table = env.open_db(name, transaction)
        with transaction.cursor(table) as cursor:
            assert cursor.last()
            key_, row = cursor.item()
        transaction.put(key_, row[:26] + bytes([row[26] ^ 4]) + row[27:], db=table)
        transaction.put(b"commit", struct.pack("<Q", transaction.id()), db=env.open_db(b"meta", transaction))


def _blocks(folder: Path) -> None:
    _flipped(folder, b"blocks")


def _meta(folder: Path) -> None:
    _flipped(folder, b"meta")


def _another_commit(folder: Path) -> None:
    with environment_of(folder) as env, env.begin(write=True) as transaction:
        transaction.put(b"commit", bytes(8), db=env.open_db(b"meta", transaction))


def _one_generation_twice(folder: Path) -> None:
    with environment_of(folder) as env, env.begin(write=True) as transaction:
        table = env.open_db(b"blocks", transaction)
        (_, first), (name, row) = list(transaction.cursor(table))[:2]
        twice = OLD_ROW.pack(
            *OLD_ROW.unpack(row[:-CHECK_BYTES])[:3], *OLD_ROW.unpack(first[:-CHECK_BYTES])[3:]
        )
        transaction.put(name, checked(name, twice), db=table)
        transaction.put(b"commit", struct.pack("<Q", transaction.id()), db=env.open_db(b"meta", transaction))


@pytest.mark.parametrize("harm", [_blocks, _meta, _another_commit, _one_generation_twice])
def test_an_older_builds_incomplete_index_is_rebuilt(
    filled: StoreRig, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(index_upgrade, "INDEX_ROWS_AT_ONCE", 32)
    before = entries(filled)
    closed(filled)
    make_old(folder_of(filled))
    harm(folder_of(filled))
    everything_is_there(filled, before, rebuilt=True)


def test_an_older_builds_index_that_was_not_closed_is_rebuilt(filled: StoreRig) -> None:
    before = entries(filled)
    closed(filled)
    make_old(folder_of(filled), is_clean=False)
    everything_is_there(filled, before, rebuilt=True)


def test_an_older_builds_index_from_an_earlier_time_is_rebuilt(filled: StoreRig) -> None:
    closed(filled)
    copy = filled.data / "copy"
    shutil.copytree(folder_of(filled), copy)
    make_old(copy)
    filled.open()
    before = entries(filled)
    assert filled.put(3000, payload_of(3000)).error is None
    closed(filled)
    shutil.rmtree(folder_of(filled))
    copy.rename(folder_of(filled))
    filled.open()
    assert filled.store.statistics().rebuilt
    assert filled.get(3000)[1] == payload_of(3000)
    assert entries(filled) == before
    filled.store.close()


@pytest.mark.parametrize("first", range(0, CASES, 10))
def test_an_older_builds_index_damaged_at_random_costs_no_record(tmp_path: Path, first: int) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    fill(rig)
    before = entries(rig)
    for seed in range(first, first + 10):
        closed(rig)
        make_old(folder_of(rig))
        path = folder_of(rig) / DATA_NAME
        data = bytearray(path.read_bytes())
        dice = random.Random(seed)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        all_is_there(rig)
        assert entries(rig) == before
    rig.store.close()
