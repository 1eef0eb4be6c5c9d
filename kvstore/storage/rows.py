"""The check that every row of an index ends with: a CRC of its name and all before it.

Always holds: one flipped bit in a row, or in the name that it stands under, is seen. Rows by generation have none: they
say again what the rows by name do, and `kvstore.storage.index_check` holds the two against each other.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

__all__ = ["CHECK_BYTES", "checked", "is_whole"]

CHECK_BYTES: Final = 4


def checked(name: bytes, row: bytes) -> bytes:
    """Give a row with its check."""
    return row + crc32(row, crc32(name)).to_bytes(CHECK_BYTES, "little")


def is_whole(name: bytes, row: bytes) -> bool:
    """Tell whether a row is what was put under this name."""
    said = int.from_bytes(row[-CHECK_BYTES:], "little")
    return len(row) > CHECK_BYTES and crc32(row[:-CHECK_BYTES], crc32(name)) == said
