"""Rows that are read from an index's file at once are those that LMDB gives one by one."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import lmdb
import pytest

from kvstore.errors import Corrupt
from kvstore.storage.index_rows import rows_of

if TYPE_CHECKING:
    from pathlib import Path

NAME, VALUE = 48, 52


def opened(folder: Path) -> lmdb.Environment:
    return lmdb.open(str(folder), map_size=256 << 20, max_dbs=4, sync=False, lock=False, readahead=False)


def read(folder: Path, name_bytes: int = NAME, value_bytes: int = VALUE) -> list[bytes]:
    return [row.tobytes() for rows in rows_of(folder, b"one", name_bytes, value_bytes) for row in rows]


@pytest.mark.parametrize("count", [0, 1, 30, 500, 40_000])
def test_rows_are_those_that_lmdb_gives(tmp_path: Path, count: int) -> None:
    """Trees of no, one, two and three levels, with rows taken out again."""
    dice = random.Random(count)
    env = opened(tmp_path)
    table, other = env.open_db(b"one"), env.open_db(b"other")
    names = [dice.randbytes(NAME) for _ in range(count)]
    for first in range(0, count, 1000):
        with env.begin(write=True) as transaction:
            for name in names[first : first + 1000]:
                transaction.put(name, dice.randbytes(VALUE), db=table)
                transaction.put(name, b"x" * dice.randrange(9000), db=other) if dice.random() < 0.01 else None
    with env.begin(write=True) as transaction:
        for name in dice.sample(names, count // 3):
            transaction.delete(name, db=table)
    with env.begin() as transaction:
        expected = [name + value for name, value in transaction.cursor(table)]
        depth = transaction.stat(table)["depth"]
    assert depth == {0: 0, 1: 1, 30: 1, 500: 2, 40_000: 3}[count]
    assert read(tmp_path) == expected
    env.close()
    assert read(tmp_path) == expected


def test_numbers_come_in_their_order(tmp_path: Path) -> None:
    env = opened(tmp_path)
    table = env.open_db(b"one")
    with env.begin(write=True) as transaction:
        for number in range(5000):
            transaction.put(struct.pack(">Q", number), bytes(60), db=table, append=True)
    rows = read(tmp_path, 8, 60)
    assert [int.from_bytes(row[:8]) for row in rows] == list(range(5000))
    env.close()


@pytest.mark.parametrize(("name", "value"), [(NAME, VALUE + 1), (NAME - 1, VALUE), (NAME, 6000)])
def test_a_row_of_another_length_is_refused(tmp_path: Path, name: int, value: int) -> None:
    env = opened(tmp_path)
    table = env.open_db(b"one")
    with env.begin(write=True) as transaction:
        for number in range(300):
            transaction.put(number.to_bytes(NAME), bytes(VALUE), db=table)
        transaction.put(b"\xff" * name, bytes(value), db=table)
    with pytest.raises(Corrupt, match="another length"):
        read(tmp_path)
    env.close()
