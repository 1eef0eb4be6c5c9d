"""A table's file with states that no table writes, or on a full drive; and names with equal hashes."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.errors import Corrupt, StorageError
from kvstore.storage.block_table import BlockTable
from kvstore.storage.index_layout import BLOCK_ROW, rows_of_entries
from tests.nic_offload.sealing import siphash
from tests.storage.rig import key
from tests.storage.test_block_table import NAMES, PAGE, ROW, SEEDS, TENANTS, Model, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.storage.index import Name

HEAD = np.dtype(
    [
        ("magic", "V8"),
        ("drive", "V16"),
        ("epoch", "<u8"),
        ("secret", "V16"),
        *((name, "<u8") for name in ("commit", "slots", "count", "sum", "check")),
    ]
)
# Numbers of names. Under a secret of zeros the hashes of each two are equal in all bits that the table has of them;
PAIRS = [
    (43002752, 130681537),
    (65221659, 67644562),
    (95463075, 130478539),
    (20189691, 26525561),
    (1831466, 132082433),
    (53011803, 67383164),
    (60858450, 69961441),
    (44571711, 111536699),
]
# these are in one part: in the first and the second one, the last but one and the last one, and that of the first pair
# and the one behind it;
PARTS = [
    (4852, 28861, 70901, 233551, 302414, 334757),
    (43831, 153727),
    (30797, 131751),
    (97474, 221436, 242310, 249114, 255293, 346397),
    (108127, 337913, 385590, 405206, 549578, 615633),
    (43330, 54881),
]
SAME_MARK = (83169, 244051)  # and these tenants have the same mark.
CROWDED = [(TENANTS[number % 3], key(number)) for some in [*PAIRS, *PARTS] for number in some]


def view_of(data: bytearray) -> tuple[NDArray[Any], NDArray[Any]]:
    """The head of a file, an array of one, and its rows."""
    head = np.frombuffer(data, HEAD, 1)
    return head, np.frombuffer(data, BLOCK_ROW, int(head["slots"][0]), PAGE)


def is_live(rows: NDArray[Any]) -> NDArray[np.intp]:
    return np.flatnonzero((rows["born"] > 0) & (rows["gone"] == 0))


def close_head(data: bytearray) -> None:
    """Update the check of a changed head."""
    head, _ = view_of(data)
    until = HEAD.fields["check"][1] if HEAD.fields else 0
    head["check"] = siphash(head["secret"].tobytes(), bytes(data[:until]))


def close_rows(data: bytearray) -> None:
    """Update the checks of changed rows, and their sum in the head."""
    head, rows = view_of(data)
    secret, total = head["secret"].tobytes(), 0
    until = BLOCK_ROW.fields["check"][1] if BLOCK_ROW.fields else 0
    for at in is_live(rows):
        identity = siphash(secret, rows[at].tobytes()[:until])
        rows["check"][at] = siphash(secret, struct.pack("<QQ", identity, rows["expires_ms"][at]))
        total += identity
    head["count"], head["sum"] = len(is_live(rows)), total % (1 << 64)
    close_head(data)


def crowded(path: Path, seed: int) -> Model:
    """A model of names whose hashes are alike."""
    model = Model(path, seed, CROWDED)
    model.table.close()
    data = bytearray(path.read_bytes()).ljust(PAGE, b"\0")
    view_of(data)[0]["secret"] = np.void(bytes(16))
    close_head(data)
    path.write_bytes(data)
    model.table = BlockTable.load(path)
    return model


def _name_twice(data: bytearray) -> None:
    _, rows = view_of(data)
    one, other, *_ = is_live(rows)
    for name in ("tenant", "key"):
        rows[name][other] = rows[name][one]
    close_rows(data)


def _generation_twice(data: bytearray) -> None:
    _, rows = view_of(data)
    one, other, *_ = is_live(rows)
    rows["generation"][other] = rows["generation"][one]
    close_rows(data)


def _no_generation(data: bytearray) -> None:
    _, rows = view_of(data)
    rows["generation"][is_live(rows)[0]] = 0
    close_rows(data)


def _one_less(data: bytearray) -> None:
    view_of(data)[0]["count"] -= 1
    close_head(data)


def _one_more(data: bytearray) -> None:
    view_of(data)[0]["count"] += 1
    close_head(data)


def _another_sum(data: bytearray) -> None:
    """Swap a removed row with a live one: the number of live rows stays the same."""
    _, rows = view_of(data)
    here = int(is_live(rows)[0])
    there = int(np.flatnonzero(rows["gone"] > 0)[0])
    rows["gone"][[here, there]] = rows["gone"][[there, here]]


def _changed_places(data: bytearray) -> None:
    _, rows = view_of(data)
    one, other, *_ = is_live(rows)
    rows[[one, other]] = rows[[other, one]]


@pytest.mark.parametrize(
    "forge",
    [_name_twice, _generation_twice, _no_generation, _one_less, _one_more, _another_sum, _changed_places],
)
def test_a_foreign_change_is_detected_even_if_each_check_is_valid(
    tmp_path: Path, forge: Callable[[bytearray], None]
) -> None:
    model = Model(tmp_path / "blocks", 3)
    for _ in range(10):
        model.put()
    model.table.remove(joined(list(model.blocks)[:3]))
    model.table.close()
    data = bytearray(model.path.read_bytes())
    same = bytearray(data)
    close_rows(same)
    assert same == data
    forge(data)
    model.path.write_bytes(data)
    with pytest.raises(Corrupt, match="its table of blocks was changed"):
        BlockTable.load(model.path)


def test_rows_swapped_while_the_file_is_open_are_not_confused(tmp_path: Path) -> None:
    model = Model(tmp_path / "blocks", 3)
    model.table.put(rows_of_entries([(name, model.some_entry()) for name in NAMES]))
    data = bytearray(model.path.read_bytes())
    _changed_places(data)
    with model.path.open("r+b") as file:  # the same file: it is open
        file.write(data)
    rows = view_of(data)[1][:2]
    for name in rows:
        with pytest.raises(Corrupt, match="a block's row was changed"):
            model.table.find(name["tenant"].tobytes() + name["key"].tobytes())
    for generation in rows["generation"]:
        with pytest.raises(Corrupt, match="a block's row was changed"):
            model.table.of_generations([int(generation)])
    with pytest.raises(Corrupt, match="a block's row was changed"):
        model.table.lives()
    model.table.close()


def test_rows_that_a_file_has_lost_while_it_is_open_are_detected(tmp_path: Path) -> None:
    model = Model(tmp_path / "blocks", 4)
    entries = [(name, model.some_entry()) for name in NAMES]
    model.table.put(rows_of_entries(entries))
    os.truncate(model.path, PAGE + 2 * ROW)
    assert model.table.find(joined(NAMES[:2]))["generation"].all()
    for count in (3, len(NAMES)):
        with pytest.raises(Corrupt, match="a block's row was changed"):
            model.table.find(joined(NAMES[:count]))
        with pytest.raises(Corrupt, match="a block's row was changed"):
            model.table.of_generations([entry.generation for _, entry in entries[:count]])
    model.table.close()


@contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """Make writes beyond an offset of a file fail, as on a full drive."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("what", ["put", "remove"])
@pytest.mark.parametrize("room", ["none", "one row", "a part of a row", "what there is"])
def test_rows_that_could_not_be_written_are_in_no_commit(tmp_path: Path, what: str, room: str) -> None:
    """The head could be written all the time."""
    model = Model(tmp_path / "blocks", 1)
    for _ in range(10):
        model.step()
    size = model.path.stat().st_size
    limit = {"none": PAGE, "one row": PAGE + ROW, "a part of a row": size + ROW + 50, "what there is": size}
    if what == "remove" and limit[room] >= size:
        limit[room] = PAGE + 50
    rows = rows_of_entries([(name, model.some_entry()) for name in model.names])
    with files_end_at(limit[room]), pytest.raises(StorageError, match="File too large"):
        model.table.put(rows) if what == "put" else model.table.remove(joined(list(model.blocks)))
    model.is_as_expected()
    model.reopen()
    model.is_as_expected()
    model.put()
    model.remove()
    model.reopen()
    model.is_as_expected()
    model.table.close()


_WITHOUT_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from kvstore.storage.block_table import BlockTable
from kvstore.storage.index_layout import BLOCK_ROW

def leave(more_bytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + more_bytes, resource.RLIM_INFINITY))

table = BlockTable.create(Path(sys.argv[1]))
first = refusals = 0
for attempt in range(300):
    number = np.arange(first + 1, first + 1 + (2000 if attempt else 100_000))
    rows = np.zeros(len(number), BLOCK_ROW)
    rows["key"] = number.astype("<u8").repeat(4).view("V32")
    rows["generation"] = number
    leave(attempt * 7 % 40 * 8192 if attempt else 1 << 30)
    try:
        table.put(rows)
    except MemoryError:
        leave(1 << 30)
        refusals += 1
        assert len(table) == first
        assert not table.of_generations(number.tolist())["generation"].any()
        table.put(rows)
    leave(1 << 30)
    first += len(rows)
assert refusals > 5, refusals
found = table.of_generations(range(1, first + 1))
assert found["generation"].tolist() == list(range(1, first + 1))
print("ok")
"""


def test_a_put_without_memory_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_MEMORY, str(tmp_path / "blocks")]
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("ok\n", 0), ended.stderr


@pytest.mark.parametrize("tenant", [None, TENANTS[1]])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, len(CROWDED)])
def test_a_scan_in_steps_of_any_size_finds_each_block_once(
    tmp_path: Path, limit: int, tenant: bytes | None
) -> None:
    """Names with equal hashes, many names in one part, and moving blocks."""
    model = crowded(tmp_path / "blocks", limit)
    model.table.put(rows_of_entries([(name, model.some_entry()) for name in CROWDED]))
    stay, come = CROWDED[::2], CROWDED[1::2]
    for moving in (False, True):
        found: list[Name] = []
        at, steps = 0, 0
        while at or not steps:
            rows, at = model.table.after(at, limit, tenant)
            found += [(row["tenant"].tobytes(), row["key"].tobytes()) for row in rows]
            steps += 1
            assert steps <= len(CROWDED)
            if moving:
                model.table.put(rows_of_entries([(model.dice.choice(stay), model.some_entry())]))
                model.table.remove(joined(model.dice.sample(come, 3)))
                model.table.put(rows_of_entries([(model.dice.choice(come), model.some_entry())]))
        assert len(set(found)) == len(found)
        expected = {name for name in (stay if moving else CROWDED) if tenant in (None, name[0])}
        assert expected <= set(found)
        assert {name[0] for name in found} == ({tenant} if tenant else set(TENANTS))
    model.table.close()


def test_a_scan_of_one_tenant_returns_none_of_a_tenant_with_an_equal_mark(tmp_path: Path) -> None:
    tenants = [number.to_bytes(16, "little") for number in SAME_MARK]
    marks = {siphash(bytes(16), tenant) & 0xFFFF_FFFF for tenant in tenants}
    assert len(marks) == 1
    model = crowded(tmp_path / "blocks", 1)
    model.table.put(rows_of_entries([((tenant, key(1)), model.some_entry()) for tenant in tenants]))
    for tenant in tenants:
        rows, at = model.table.after(0, 100, tenant)
        assert (rows["tenant"].tobytes(), at) == (tenant, 0)
    model.table.close()


@pytest.mark.parametrize("seed", range(SEEDS // 3))
def test_names_with_equal_hashes_are_distinguished(tmp_path: Path, seed: int) -> None:
    for one, other in PAIRS:
        hashes = [siphash(bytes(16), TENANTS[number % 3] + key(number)) for number in (one, other)]
        assert hashes[0] >> 16 == hashes[1] >> 16
    model = crowded(tmp_path / "blocks", seed)
    for _ in range(40):
        model.step()
        if model.dice.random() < 0.2:
            model.reopen()
    model.is_as_expected()
    model.table.close()
