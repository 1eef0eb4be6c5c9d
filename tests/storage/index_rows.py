"""Rows of an index with only the names of blocks, for tests of its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.limits import KEY_BYTES
from kvstore.storage.index_layout import BLOCK_ROW, NAME_BYTES, names_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["padded", "rows"]


def padded(key: bytes) -> bytes:
    """Return a short key with the padding of a row."""
    return key.ljust(KEY_BYTES, b"\0")


def rows(names: Sequence[tuple[bytes, bytes]]) -> NDArray[Any]:
    """Return the index's rows of blocks with these names."""
    named = np.zeros(len(names), BLOCK_ROW)
    data = b"".join(tenant + padded(key) for tenant, key in names)
    names_in(named)[:] = np.frombuffer(data, np.uint8).reshape(-1, NAME_BYTES)
    return named
