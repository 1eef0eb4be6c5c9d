"""Rows that are read from an index's file at once are those that LMDB gives one by one."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from typing import TYPE_CHECKING
from zlib import crc32

import lmdb
import numpy as np
import pytest

from kvstore.errors import Corrupt
from kvstore.storage.index_rows import check_order, rows_of
from kvstore.storage.row_check import crc32_of_each

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


def filled(folder: Path, count: int = 4000) -> tuple[bytearray, list[bytes]]:
    """The file of a table of two levels, and its names in their order."""
    dice = random.Random(count)
    names = sorted(dice.randbytes(NAME) for _ in range(count))
    env = opened(folder)
    table = env.open_db(b"one")
    with env.begin(write=True) as transaction:
        for (
            name
        ) in names:  # so that no page is split, which leaves copies of rows in pages that nothing leads to
            transaction.put(name, bytes(VALUE), db=table, append=True)
    env.close()
    check_order(folder, b"one", NAME, VALUE)
    return bytearray((folder / "data.mdb").read_bytes()), names


def refuses(folder: Path, data: bytearray, why: str) -> None:
    (folder / "data.mdb").write_bytes(data)
    with pytest.raises(Corrupt, match=why):
        check_order(folder, b"one", NAME, VALUE)


def test_rows_that_change_places_are_seen(tmp_path: Path) -> None:
    """Within a leaf, and from the end of one leaf to the beginning of the next."""
    data, names = filled(tmp_path)
    for one, other in [*pairwise(names)][1000:1060]:
        harmed = bytearray(data)
        here, there = data.index(one + bytes(VALUE)), data.index(other + bytes(VALUE))
        harmed[here : here + NAME], harmed[there : there + NAME] = other, one
        refuses(tmp_path, harmed, "not in their order|not found")


def test_a_branch_that_sends_a_search_elsewhere_is_seen(tmp_path: Path) -> None:
    data, names = filled(tmp_path)
    branches = [name for name in names if data.count(name) == 2]  # they are the first of their leaves
    assert len(branches) > 50
    for name in branches:
        places = [data.index(name)]
        places.append(data.index(name, places[0] + 1))
        (at,) = [place for place in places if data[place + NAME : place + NAME + VALUE] != bytes(VALUE)]
        before, behind = names[names.index(name) - 1], names[names.index(name) + 1]
        for other in (before, behind):
            harmed = bytearray(data)
            harmed[at : at + NAME] = other
            refuses(tmp_path, harmed, "not found where")
    harmed = bytearray(data)
    harmed[at - 2 : at] = (NAME - 8).to_bytes(2, "little")
    refuses(tmp_path, harmed, "a branch has a name of another length")


def test_the_crc_of_many_rows_is_that_of_each() -> None:
    rows = np.frombuffer(random.Random(3).randbytes(500 * 68), np.uint8).reshape(500, 68)
    assert crc32_of_each(rows).tolist() == [crc32(row.tobytes()) for row in rows]
