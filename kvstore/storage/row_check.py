"""The checksum at the end of each row of LMDB and of each note of the lock file: a CRC of name and contents.

Always holds: one flipped bit in a row, or in its name, is detected.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

__all__ = ["CHECK_BYTES", "checked", "is_whole"]

CHECK_BYTES: Final = 4


def checked(name: bytes, row: bytes) -> bytes:
    """Return a row with its check."""
    return row + crc32(row, crc32(name)).to_bytes(CHECK_BYTES, "little")


def is_whole(name: bytes, row: bytes) -> bool:
    """Return whether a row is what was put under this name."""
    said = int.from_bytes(row[-CHECK_BYTES:], "little")
    return len(row) > CHECK_BYTES and crc32(row[:-CHECK_BYTES], crc32(name)) == said
