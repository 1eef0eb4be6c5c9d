"""How the rows of an index's blocks look: by name and by generation, one at a time or thousands in one array.

A block that a lane has written comes in an array of `NAMED_ROW`s, all blocks of a batch at once. `packed` makes of it
what LMDB stores; the rest of the store reads its columns.

Always holds: the check of a row covers name and contents (`kvstore.storage.row_check`), however the row was made.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zlib import crc32

import numpy as np

from kvstore.limits import HEADER_BYTES, KEY_BYTES, PAGE_BYTES, TENANT_BYTES
from kvstore.storage.row_check import CHECK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.storage.index import Entry, Name

    Pairs: TypeAlias = "list[tuple[bytes, bytes]]"
    """Keys and values."""

__all__ = [
    "BLOCKS",
    "BORN",
    "ENTRY",
    "ENTRY_ROW",
    "EXPIRES",
    "GENERATION",
    "LIFE",
    "LIFE_ROW",
    "NAMED_ROW",
    "NAME_BYTES",
    "OWNER",
    "OWNERS",
    "PLACE",
    "PLACE_ROW",
    "ROW",
    "packed",
    "record_pages",
    "rows_of_entries",
]

ENTRY: Final = struct.Struct("<QIIQQ16sI")
ENTRY_ROW: Final = struct.Struct(f"<QIIQQ16sI{CHECK_BYTES}x")
EXPIRES: Final = struct.Struct(f"<24xQ20x{CHECK_BYTES}x")
BORN: Final = struct.Struct(f"<16xQ28x{CHECK_BYTES}x")  # generation
NAME_BYTES: Final = TENANT_BYTES + KEY_BYTES
_FIELDS: Final = [
    ("offset", "<u8"),
    ("length", "<u4"),
    ("crc32c", "<u4"),
    ("generation", "<u8"),
    ("expires_ms", "<u8"),
    ("fingerprint", "V16"),
    ("domain", "<u4"),
    ("check", f"V{CHECK_BYTES}"),
]
ROW: Final = np.dtype(_FIELDS)
NAMED_ROW: Final = np.dtype([("tenant", f"V{TENANT_BYTES}"), ("key", f"V{KEY_BYTES}"), *_FIELDS])
LIFE: Final = ["offset", "length", "generation", "expires_ms"]
PLACE_ROW: Final = np.dtype([("offset", "<u8"), ("length", "<u4")])
LIFE_ROW: Final = np.dtype([(name, ROW[name]) for name in LIFE])
GENERATION: Final = struct.Struct(">Q")  # big-endian, so that LMDB's order is that of numbers
OWNER: Final = struct.Struct("<48sQI")  # name, offset, length
PLACE: Final = struct.Struct("<QI")  # how the rows of all records begin, in every table
BLOCKS: Final = (b"blocks", NAME_BYTES, ROW.itemsize)  # a table, and the sizes of its names and values
OWNERS: Final = (b"generations", GENERATION.size, OWNER.size)
_OWNED: Final = np.dtype(
    [("number", ">u8"), ("name", f"V{NAME_BYTES}"), ("offset", "<u8"), ("length", "<u4")]
)

assert ENTRY_ROW.size == EXPIRES.size == BORN.size == ROW.itemsize == NAMED_ROW.itemsize - NAME_BYTES
assert OWNER.size == 48 + PLACE.size == _OWNED.itemsize - GENERATION.size


def rows_of_entries(entries: Iterable[tuple[Name, Entry]]) -> NDArray[Any]:
    """Return what an index has of blocks as `NAMED_ROW`s, without checks."""
    return np.array([(*name, *entry, b"") for name, entry in entries], NAMED_ROW)


def record_pages(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many pages the records of payloads of these lengths have."""
    return HEADER_BYTES // PAGE_BYTES - (-lengths.astype(np.int64) // PAGE_BYTES)


def packed(blocks: NDArray[Any]) -> tuple[Pairs, Pairs]:
    """Return the rows of blocks by name and by generation; their checks need not be there yet."""
    size, until = NAMED_ROW.itemsize, NAMED_ROW.itemsize - CHECK_BYTES
    data = blocks.tobytes()
    rows = []
    for at in range(0, len(data), size):
        row = data[at : at + until]
        check = crc32(row).to_bytes(CHECK_BYTES, "little")
        rows.append((row[:NAME_BYTES], row[NAME_BYTES:] + check))
    owned = np.empty(len(blocks), _OWNED)
    owned["number"], owned["offset"], owned["length"] = (
        blocks["generation"],
        blocks["offset"],
        blocks["length"],
    )
    owned["name"] = blocks.view("u1").reshape(-1, size)[:, :NAME_BYTES].copy().view("V48")[:, 0]
    data, size, at_name = owned.tobytes(), _OWNED.itemsize, GENERATION.size
    return rows, [
        (data[at : at + at_name], data[at + at_name : at + size]) for at in range(0, len(data), size)
    ]
