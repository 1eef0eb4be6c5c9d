"""The checks before an index is mapped, and the small files beside it: an incomplete file counts as missing."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import Corrupt
from kvstore.storage import index_file
from kvstore.storage.drive_set import SET_NAME, DriveSet, read_set, write_set
from kvstore.storage.folder import CommitNote, FolderLock
from kvstore.storage.index import Index
from tests.storage.rig import key
from tests.storage.test_index_damage import newest_head

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PAGE = 4096


def put_rows(index: Index, numbers: Iterable[int]) -> None:
    def put(transaction: Any) -> None:
        for number in numbers:
            transaction.put(key(number) + bytes(16), bytes(60), db=index.references)

    index.write(put)


def structure(tmp_path: Path) -> bytearray:
    """The file of an index whose trees have branches, and whose free list is long."""
    index = Index.empty(tmp_path / "index", 1)
    for first in range(0, 2000, 50):
        put_rows(index, range(first, first + 50))
    index.abandon()
    return bytearray((tmp_path / "index" / "data.mdb").read_bytes())


def pages_of_kind(data: bytes | bytearray, flags: int) -> list[int]:
    """Pages of a tree by their kind; some may be free."""
    return [
        page
        for page in range(2, len(data) // PAGE)
        if struct.unpack_from("<H", data, page * PAGE + 10)[0] == flags
    ]


def root_of_main(data: bytes | bytearray) -> int:
    return int(struct.unpack_from("<Q", data, newest_head(data) + 40 + 48 + 40)[0])


def refuses(tmp_path: Path, data: bytes | bytearray, why: str) -> None:
    (tmp_path / "index" / "data.mdb").write_bytes(data)
    with pytest.raises(Corrupt, match=why):
        index_file.check_structure(tmp_path / "index")


def test_the_structure_of_an_intact_file_is_sound(tmp_path: Path) -> None:
    data = structure(tmp_path)
    assert pages_of_kind(data, 1), "it has branches"
    index_file.check_structure(tmp_path / "index")


def test_a_file_shorter_than_it_says_is_not_mapped(tmp_path: Path) -> None:
    data = structure(tmp_path)
    last = struct.unpack_from("<Q", data, newest_head(data) + 136)[0]
    refuses(tmp_path, data[: last * PAGE], "shorter than its header says")
    struct.pack_into("<Q", data, newest_head(data) + 136, last + 5)  # and nothing leads to these
    refuses(tmp_path, data, "shorter than its header says")


def test_a_page_with_bounds_or_rows_outside_it_is_not_mapped(tmp_path: Path) -> None:
    data = structure(tmp_path)
    root = root_of_main(data) * PAGE
    for at, value, why in (
        (12, 5000, "no bounds"),
        (14, 16, "."),
        (16, 4094, "outside of its bounds"),
        (10, 1, "another kind or number"),
        (0, 77, "another kind or number"),
    ):
        harmed = bytearray(data)
        struct.pack_into("<H", harmed, root + at, value)
        refuses(tmp_path, harmed, why)
    harmed = bytearray(data)
    struct.pack_into("<H", harmed, newest_head(data) + 10, 2)
    refuses(tmp_path, harmed, "another kind or number")


def test_a_row_longer_than_its_page_is_not_mapped(tmp_path: Path) -> None:
    data = structure(tmp_path)
    root = root_of_main(data) * PAGE
    first = struct.unpack_from("<H", data, root + 16)[0]
    for at, value in ((0, 400), (2, 7), (6, 300)):  # low and high half of its length, length of its key
        harmed = bytearray(data)
        struct.pack_into("<H", harmed, root + first + at, value)
        refuses(tmp_path, harmed, "overlap")


def test_a_free_page_in_use_is_detected(tmp_path: Path) -> None:
    """LMDB would overwrite it."""
    data = structure(tmp_path)
    root = struct.unpack_from("<Q", data, newest_head(data) + 40 + 40)[0] * PAGE
    first = struct.unpack_from("<H", data, root + 16)[0]
    struct.pack_into("<Q", data, root + first + 8 + 8 + 8, root_of_main(data))
    refuses(tmp_path, data, "two pages refer to page")


def test_a_page_number_beyond_the_file_is_detected(tmp_path: Path) -> None:
    data = structure(tmp_path)
    struct.pack_into("<Q", data, newest_head(data) + 40 + 48 + 40, 1 << 50)
    refuses(tmp_path, data, "which doesn't exist")


def test_a_tree_with_another_number_of_entries_than_it_says_is_detected(tmp_path: Path) -> None:
    data = structure(tmp_path)
    at = newest_head(data) + 40 + 48 + 32
    struct.pack_into("<Q", data, at, struct.unpack_from("<Q", data, at)[0] + 1)
    refuses(tmp_path, data, "differ from its header")


# What stands beside it.


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_the_set_of_drives_invalidates_the_set(tmp_path: Path, bit: int) -> None:
    """A set number that is too high would void every drive."""
    write_set(tmp_path, DriveSet(bytes(range(16)), 12, 3))
    whole = (tmp_path / SET_NAME).read_bytes()
    for at in range(len(whole)):
        harmed = bytearray(whole)
        harmed[at] ^= 1 << bit
        (tmp_path / SET_NAME).write_bytes(harmed)
        assert read_set(tmp_path) is None, bytes(harmed)


def test_a_flipped_bit_in_the_note_of_a_commit_invalidates_the_note(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "data")
    place = lock.place(3)
    note = CommitNote(b"d" * 16, 7, 9)
    place.write_note(note)
    assert place.note == note
    for at in range(36):
        lock._page[3 * 40 + at] ^= 8
        assert place.note != note
        assert place.note.commit == 0
        lock._page[3 * 40 + at] ^= 8
    lock.release()


def test_no_plaintext_of_the_heap_gets_into_the_index(tmp_path: Path) -> None:
    """Pages of LMDB come from malloc; their ends are not initialized before they are written to the file."""
    mark = b"KV plaintext of a tenant! " * 16
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    index = Index.empty(tmp_path / "index", 1 << 30)
    for number in range(200):
        dirty = [libc.malloc(PAGE + 8 * (one % 3)) for one in range(64)]
        for address in dirty:
            ctypes.memmove(address, (mark * 11)[:PAGE], PAGE)
        for address in dirty[::2]:
            libc.free(address)
        put_rows(index, [number])
        for address in dirty[1::2]:
            libc.free(address)
    index.abandon()
    assert mark[:26] not in (tmp_path / "index" / "data.mdb").read_bytes()
