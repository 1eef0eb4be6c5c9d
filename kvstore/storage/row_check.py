"""The checksum at the end of each row of an index: a CRC of the row's name and contents.

Always holds: one flipped bit in a row, or in its name, is detected. Rows by generation have no checksum: they repeat
the rows by name, and `kvstore.storage.index_check` compares the two.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CHECK_BYTES", "checked", "crc32_of_each", "is_whole"]

CHECK_BYTES: Final = 4


def checked(name: bytes, row: bytes) -> bytes:
    """Return a row with its check."""
    return row + crc32(row, crc32(name)).to_bytes(CHECK_BYTES, "little")


def is_whole(name: bytes, row: bytes) -> bool:
    """Return whether a row is what was put under this name."""
    said = int.from_bytes(row[-CHECK_BYTES:], "little")
    return len(row) > CHECK_BYTES and crc32(row[:-CHECK_BYTES], crc32(name)) == said


def crc32_of_each(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the CRC-32 of many rows of one, even, length: one step for every two bytes of all rows at once."""
    table = _steps()
    crcs = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(rows).view("<u2").T:
        crcs = table[(crcs ^ column) & 0xFFFF] ^ (crcs >> 16)
    return ~crcs


@cache
def _steps() -> NDArray[np.uint32]:
    """Return the table of a CRC's step of two bytes, by the lower half of the CRC combined with them."""
    low, high = 0xFFFF, 0xFFFF0000  # `crc32` inverts before and after
    return np.array([crc32((both ^ low).to_bytes(2, "little")) ^ high for both in range(low + 1)], np.uint32)
