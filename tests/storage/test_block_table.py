"""The table of blocks against a model of it: through reopenings, killed processes, failing files and damage."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.errors import Corrupt, StorageError
from kvstore.storage.block_table import BlockTable
from kvstore.storage.index import Entry
from kvstore.storage.index_layout import BLOCK_ROW, NAME_BYTES, rows_of_entries, unpacked
from tests.storage.rig import key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.storage.index import Name

SEEDS = int(os.environ.get("TRIGGERKV_TABLE_SEEDS", "60"))
TENANTS = [bytes([number]) * 16 for number in range(1, 4)]
NAMES = [(tenant, key(number)) for tenant in TENANTS for number in range(120)]
SLOTS_MAX = len(NAMES) + 40  # and one batch in place of others
PAGE = 4096
ROW = BLOCK_ROW.itemsize


class Model:
    """A table, and its expected content."""

    def __init__(self, path: Path, seed: int, names: Sequence[Name] = NAMES) -> None:
        self.path = path
        self.dice = random.Random(seed)
        self.table = BlockTable.create(path)
        self.names = names
        self.blocks: dict[Name, Entry] = {}
        self.generation = 0

    def some_name(self) -> Name:
        return self.dice.choice(self.names)

    def some_entry(self) -> Entry:
        self.generation += self.dice.choice([1, 1, 1, 7])
        number = self.generation
        expires_ms = self.dice.choice([0, 0, 1, 1 << 40])
        return Entry(
            number * PAGE, 1 + number % 99, number, number, expires_ms, bytes([number % 251]) * 16, number % 3
        )

    def put(self) -> None:
        batch = [(self.some_name(), self.some_entry()) for _ in range(self.dice.choice([1, 3, 40]))]
        self.table.put(rows_of_entries(batch))
        self.blocks.update(batch)

    def put_the_same(self) -> None:
        batch = self.dice.sample(sorted(self.blocks.items()), min(3, len(self.blocks)))
        self.table.put(rows_of_entries(batch))

    def remove(self) -> None:
        names = [self.some_name() for _ in range(self.dice.choice([1, 5, 50]))]
        if self.dice.random() < 0.5:
            gone = entries_of(self.table.remove(joined(names)))
        else:
            known = [self.blocks.get(name) for name in names]
            gone = entries_of(
                self.table.remove_generations([entry.generation if entry else 1 << 50 for entry in known])
            )
        assert gone == [self.blocks.pop(name, None) for name in names]

    def renew(self) -> None:
        names = [self.some_name() for _ in range(4)]
        times = [self.dice.randrange(1, 1 << 40) for _ in names]
        self.table.renew(joined(names), np.array(times, np.uint64))
        for name, expires_ms in zip(names, times, strict=True):
            if name in self.blocks:
                self.blocks[name] = self.blocks[name]._replace(expires_ms=expires_ms)

    def step(self) -> None:
        self.dice.choice([self.put, self.put, self.put_the_same, self.remove, self.renew])()

    def reopen(self) -> None:
        self.table.close()
        self.table = BlockTable.load(self.path)

    def is_as_expected(self) -> None:
        assert len(self.table) == len(self.blocks)
        found = entries_of(self.table.find(joined(self.names)))
        assert found == [self.blocks.get(name) for name in self.names]
        assert contents(self.table) == self.blocks
        by_generation = {entry.generation: name for name, entry in self.blocks.items()}
        assert self.table.generations().tolist() == sorted(by_generation)
        asked = [*by_generation, self.generation + 1]
        rows = self.table.of_generations(asked)
        assert [
            (tenant, name) if born else None for tenant, name, _, _, _, born, *_ in unpacked(rows.tobytes())
        ] == [by_generation.get(one) for one in asked]
        for tenant in TENANTS:
            own = {name: entry for name, entry in self.blocks.items() if name[0] == tenant}
            assert self.table.generations(tenant).tolist() == sorted(one.generation for one in own.values())
            keys = [one for owner, one in self.names if owner == tenant]
            there = [0 if self.is_missing((tenant, one)) else 1 for one in keys]
            count = self.table.find_until(tenant, b"".join(keys), len(keys), 1000)
            assert count == (there.index(0) if 0 in there else len(there))

    def is_missing(self, name: Name) -> bool:
        entry = self.blocks.get(name)
        return entry is None or 0 < entry.expires_ms <= 1000


def joined(names: Sequence[Name]) -> bytes:
    return b"".join(tenant + one for tenant, one in names)


def entries_of(rows: Any) -> list[Entry | None]:
    return [
        Entry(offset, length, crc, generation, expires_ms, fingerprint, domain) if generation else None
        for _, _, offset, length, crc, generation, fingerprint, domain, expires_ms in unpacked(rows.tobytes())
    ]


def contents(table: BlockTable) -> dict[Name, Entry]:
    found: dict[Name, Entry] = {}
    for rows in table.rows():
        names = [(row["tenant"].tobytes(), row["key"].tobytes()) for row in rows]
        for name, entry in zip(names, entries_of(rows), strict=True):
            assert entry is not None
            assert name not in found
            found[name] = entry
    lives = sorted((one.offset, one.length, one.generation, one.expires_ms) for one in found.values())
    assert sorted(table.lives().tolist()) == lives
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_has_exactly_the_stored_blocks_across_reopenings(tmp_path: Path, seed: int) -> None:
    model = Model(tmp_path / "blocks", seed)
    for _ in range(40):
        model.step()
        if model.dice.random() < 0.2:
            model.reopen()
    model.is_as_expected()
    model.reopen()
    model.is_as_expected()
    model.table.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_process_that_dies_within_a_change_has_made_all_of_it_or_nothing(tmp_path: Path, seed: int) -> None:
    """Any part of a change's rows may be in the file; the head is written last."""
    model = Model(tmp_path / "blocks", seed)
    for _ in range(model.dice.randrange(1, 12)):
        model.step()
    for _ in range(6):
        before, blocks = bytearray(model.path.read_bytes()), dict(model.blocks)
        model.dice.choice([model.put, model.remove])()
        after = model.path.read_bytes()
        model.table.close()
        torn = before + bytes(len(after) - len(before))
        for at in range(PAGE, len(after), ROW):
            if model.dice.random() < 0.5:
                torn[at : at + ROW] = after[at : at + ROW]
        model.path.write_bytes(torn)
        model.blocks = blocks
        model.table = BlockTable.load(model.path)
        model.is_as_expected()
        model.put()  # what was begun is not taken for a part of a later change
        model.remove()
        model.reopen()
        model.is_as_expected()
    model.table.close()


def test_blocks_that_were_put_together_are_found_and_removed_together(tmp_path: Path) -> None:
    """Their rows are neighbours, and read and written together; the others of a batch are not."""
    model = Model(tmp_path / "blocks", 2)
    names = [(TENANTS[0], key(number)) for number in range(200)]
    entries = {
        name: Entry(number * PAGE, 100, 1, number + 1, 0, bytes(16)) for number, name in enumerate(names)
    }
    model.table.put(rows_of_entries(entries.items()))
    orders = [names, names[::-1], names[::3], names[50:] + names[:50]]
    orders.append(model.dice.sample(names, len(names)))
    for order in orders:
        assert model.table.find(joined(order))["offset"].tolist() == [entries[name].offset for name in order]
        generations = [entries[name].generation for name in order]
        assert model.table.of_generations(generations)["key"].tolist() == [name[1] for name in order]
    for order in (names[20:90], names[150:100:-1], model.dice.sample(names[:20], 9)):
        generations = [entries.pop(name).generation for name in order]
        assert model.table.remove_generations(generations)["generation"].tolist() == generations
        model.table.close()
        model.table = BlockTable.load(model.path)
        found = model.table.find(joined(names))["generation"].tolist()
        assert found == [entries[name].generation if name in entries else 0 for name in names]
    model.table.close()


def test_a_reader_undoes_nothing(tmp_path: Path) -> None:
    model = Model(tmp_path / "blocks", 1)
    model.table.put(rows_of_entries([(name, model.some_entry()) for name in NAMES[:20]]))
    model.table.remove(joined(NAMES[:10]))
    before, commit = model.path.read_bytes(), model.table.commit
    model.table.put(rows_of_entries([(name, model.some_entry()) for name in NAMES[5:15]]))
    torn = before[:PAGE] + model.path.read_bytes()[PAGE:]
    rows = np.frombuffer(torn, BLOCK_ROW, len(before) // ROW - PAGE // ROW, PAGE)
    assert (rows["born"] > commit).any()
    assert (rows["gone"] > commit).any()
    model.path.write_bytes(torn)
    table = BlockTable.load(model.path, readonly=True)
    assert model.path.read_bytes() == torn
    with pytest.raises(StorageError):
        table.put(rows_of_entries([((TENANTS[0], key(1)), Entry(PAGE, 1, 1, 1000, 0, bytes(16)))]))
    table.close()
    model.table.close()


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_any_flipped_bit_of_a_live_row_is_detected(tmp_path: Path, seed: int) -> None:
    model = Model(tmp_path / "blocks", seed)
    for _ in range(12):
        model.step()
    model.put()
    data = model.path.read_bytes()
    rows = np.frombuffer(data, BLOCK_ROW, offset=PAGE)
    live = np.flatnonzero((rows["born"] > 0) & (rows["gone"] == 0))
    model.table.close()
    for _ in range(40):
        harmed = bytearray(data)
        at = model.dice.choice(
            [
                model.dice.randrange(8 + 16 + 8 + 16 + 8 + 8 + 8 + 8 + 8),  # the head
                PAGE + ROW * int(model.dice.choice(live.tolist())) + model.dice.randrange(ROW - 8),
            ]
        )
        harmed[at] ^= 1 << model.dice.randrange(8)
        model.path.write_bytes(harmed)
        with pytest.raises(Corrupt):
            BlockTable.load(model.path)
    for count in (0, 50, PAGE, PAGE + ROW * int(live[-1]) + 100):
        model.path.write_bytes(data[:count])
        with pytest.raises(Corrupt):
            BlockTable.load(model.path)


@pytest.mark.parametrize("what", ["put", "remove"])
def test_a_forged_or_reverted_removal_is_detected(tmp_path: Path, what: str) -> None:
    """The mark of a removal has no check of its own: the head says how many rows are live."""
    model = Model(tmp_path / "blocks", 3)
    for _ in range(10):
        model.put()
    for _ in range(5):
        model.remove()
    data = bytearray(model.path.read_bytes())
    rows = np.frombuffer(data, BLOCK_ROW, offset=PAGE)
    is_live = (rows["born"] > 0) & (rows["gone"] == 0)
    row = int(np.flatnonzero(is_live if what == "remove" else rows["gone"] > 0)[0])
    rows["gone"][row] = 1 if what == "remove" else 0
    model.path.write_bytes(data)
    with pytest.raises(Corrupt):
        BlockTable.load(model.path)
    model.table.close()


@contextmanager
def unwritable(model: Model) -> Iterator[None]:
    """Make the file read-only for the table."""
    fd = model.table._fd
    own, reader = os.dup(fd), os.open(model.path, os.O_RDONLY)
    os.dup2(reader, fd)
    os.close(reader)
    try:
        yield
    finally:
        os.dup2(own, fd)
        os.close(own)


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    for seed in range(20):
        model = Model(tmp_path / "blocks", seed)
        for _ in range(10):
            model.step()
        blocks = dict(model.blocks)
        with unwritable(model), pytest.raises(StorageError, match="Bad file descriptor"):
            model.put() if seed % 2 else model.remove()
        model.is_as_expected()
        for change in (model.put, model.remove, model.renew):  # none is made after one that failed
            with pytest.raises(StorageError, match="Input/output error"):
                change()
        assert model.blocks == blocks
        model.is_as_expected()
        model.reopen()
        model.is_as_expected()
        model.table.close()


def test_two_blocks_of_one_generation_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    model = Model(tmp_path / "blocks", 5)
    for _ in range(100):
        model.put()
        taken_by, taken = next(iter(model.blocks.items()))
        names = [name for name in (model.some_name() for _ in range(30)) if name != taken_by]
        batch = [(name, model.some_entry()) for name in names]
        batch.append(((TENANTS[0], key(5000)), taken))
        with pytest.raises(StorageError, match="one generation"):
            model.table.put(rows_of_entries(batch))
        assert len(model.table) == len(model.blocks)
        model.remove()
    model.is_as_expected()
    assert model.path.stat().st_size <= PAGE + SLOTS_MAX * ROW, "each of its slots is free again"
    model.reopen()
    model.is_as_expected()
    model.table.close()


def test_a_block_refused_for_its_generation_leaves_the_one_of_its_name(tmp_path: Path) -> None:
    model = Model(tmp_path / "blocks", 5)
    batch = [(name, model.some_entry()) for name in NAMES[:2]]
    model.table.put(rows_of_entries(batch))
    model.blocks.update(batch)
    with pytest.raises(StorageError, match="one generation"):
        model.table.put(rows_of_entries([(NAMES[0], batch[1][1])]))
    model.is_as_expected()
    model.table.close()


@pytest.mark.parametrize("tenant", [None, TENANTS[1]])
def test_a_scan_finds_every_block_that_exists_throughout(tmp_path: Path, tenant: bytes | None) -> None:
    """Blocks are added, removed, and moved to other rows meanwhile."""
    for seed in range(20):
        model = Model(tmp_path / "blocks", seed)
        for _ in range(30):
            model.put()
        there = {name for name in model.blocks if tenant is None or name[0] == tenant}
        found: set[Name] = set()
        at, is_more = 0, True
        while is_more:
            rows, at = model.table.after(at, 16, tenant)
            is_more = at > 0
            names = [(row["tenant"].tobytes(), row["key"].tobytes()) for row in rows]
            assert len(set(names)) == len(names)
            assert not found & set(names)
            assert tenant is None or all(name[0] == tenant for name in names)
            found |= set(names)
            model.put()
            before = set(model.blocks)
            model.remove()
            there -= before - set(model.blocks)
        assert there <= found
        model.table.close()


def test_a_slot_is_reused(tmp_path: Path) -> None:
    model = Model(tmp_path / "blocks", 1)
    for _ in range(300):
        model.put()
        model.remove()
    assert model.path.stat().st_size <= PAGE + SLOTS_MAX * ROW
    model.table.close()


_FILL = """
import os, random, sys
from pathlib import Path
import numpy as np
from kvstore.storage.block_table import BlockTable
from kvstore.storage.index_layout import BLOCK_ROW

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

table = BlockTable.create(Path(sys.argv[1]))
before = resident_bytes()
for first in range(0, 1_000_000, 10_000):
    rows = np.zeros(10_000, BLOCK_ROW)
    rows["key"] = np.frombuffer(random.Random(first).randbytes(10_000 * 32), "V32")
    rows["generation"] = np.arange(first + 1, first + 10_001)
    table.put(rows)
print((resident_bytes() - before) / 1_000_000)
"""


def test_a_row_takes_as_much_memory_as_the_header_says(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FILL, str(tmp_path / "blocks")]
    said = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout
    assert 29 < float(said) < 45, "29, and what arrays have to spare"


def test_names_of_different_tenants_differ(tmp_path: Path) -> None:
    model = Model(tmp_path / "blocks", 1)
    batch = [((tenant, key(1)), model.some_entry()) for tenant in TENANTS]
    model.table.put(rows_of_entries(batch))
    model.blocks.update(batch)
    assert len(joined([batch[0][0]])) == NAME_BYTES
    model.is_as_expected()
    model.table.close()
