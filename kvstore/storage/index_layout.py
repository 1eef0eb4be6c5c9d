"""How the rows of an index's blocks look: one at a time, or thousands in one array.

A row says all that the index has of a block. `kvstore.storage.block_table` keeps them in a file and returns them; the
rest of the store makes them, as `BLOCK_ROW`s, or reads their columns. On the drive the same is in the block's header.

Always holds: the C core sets where a row stands, by which commit, and its check; what the caller has there is ignored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.limits import HEADER_BYTES, KEY_BYTES, PAGE_BYTES, TENANT_BYTES
from kvstore.wire.record import Header, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvstore.storage.index import Entry, Name

__all__ = [
    "BLOCK_ROW",
    "LIFE",
    "LIFE_ROW",
    "NAME_BYTES",
    "PLACE",
    "PLACE_ROW",
    "header_of",
    "is_header_of",
    "names_in",
    "names_of",
    "record_pages",
    "rows_of_entries",
    "split_names",
    "unpacked",
]

NAME_BYTES: Final = TENANT_BYTES + KEY_BYTES
BLOCK_ROW: Final = np.dtype(  # `struct keep_block`
    [
        ("tenant", f"V{TENANT_BYTES}"),
        ("key", f"V{KEY_BYTES}"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("crc32c", "<u4"),
        ("generation", "<u8"),
        ("fingerprint", "V16"),
        ("domain", "<u4"),
        ("slot", "<u4"),
        ("born", "<u8"),
        ("check", "<u8"),
        ("expires_ms", "<u8"),
        ("gone", "<u8"),
    ]
)
LIFE: Final = ["offset", "length", "generation", "expires_ms"]
PLACE_ROW: Final = np.dtype([("offset", "<u8"), ("length", "<u4")])
LIFE_ROW: Final = np.dtype([(name, "<u8") for name in LIFE])  # `struct keep_life`
PLACE: Final = struct.Struct("<QI")  # how the rows of all records begin, in every table of LMDB
_ROW: Final = struct.Struct(f"<{TENANT_BYTES}s{KEY_BYTES}sQIIQ16sI20xQ8x")

assert _ROW.size == BLOCK_ROW.itemsize


def rows_of_entries(entries: Iterable[tuple[Name, Entry]]) -> NDArray[Any]:
    """Return what an index has of blocks as `BLOCK_ROW`s."""
    rows = [
        _ROW.pack(tenant, key, offset, length, crc, generation, fingerprint, domain, expires_ms)
        for (tenant, key), (offset, length, crc, generation, expires_ms, fingerprint, domain) in entries
    ]
    return np.frombuffer(b"".join(rows), BLOCK_ROW)


def unpacked(rows: bytes | memoryview) -> Iterator[tuple[bytes, bytes, int, int, int, int, bytes, int, int]]:
    """Return of each row tenant, key, offset, length, CRC, generation, fingerprint, domain and expiry."""
    return _ROW.iter_unpack(rows)


def names_in(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the names in `BLOCK_ROW`s: a row of bytes, tenant and key, of each."""
    return rows.view(np.uint8).reshape(-1, rows.itemsize)[:, :NAME_BYTES]


def names_of(rows: NDArray[Any]) -> list[Name]:
    """Return tenant and key of each of these `BLOCK_ROW`s."""
    return split_names(names_in(rows))


def split_names(names: NDArray[np.uint8]) -> list[Name]:
    """Return tenant and key of each row of bytes."""
    data = names.tobytes()
    return [
        (data[at : at + TENANT_BYTES], data[at + TENANT_BYTES : at + NAME_BYTES])
        for at in range(0, len(data), NAME_BYTES)
    ]


def record_pages(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many pages the records of payloads of these lengths have."""
    return HEADER_BYTES // PAGE_BYTES - (-lengths.astype(np.int64) // PAGE_BYTES)


def header_of(name: Name, entry: Entry) -> Header:
    """Return the header that a block must have on the drive."""
    (tenant, key), (_, length, crc, generation, expires_ms, fingerprint, domain) = name, entry
    return Header(Kind.BLOCK, key, tenant, fingerprint, generation, length, crc, expires_ms, domain)


def is_header_of(found: object, name: Name, entry: Entry) -> bool:
    """Return whether a header is the one that the index names, except its expiry, which may have been extended."""
    return isinstance(found, Header) and found._replace(expires_ms=entry.expires_ms) == header_of(name, entry)
