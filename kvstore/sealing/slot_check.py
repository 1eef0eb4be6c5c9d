"""Whether keys in slots are authentic where they are, thousands at a time, and where a moved one belongs.

What always holds: a slot is judged by the tag of its key, which covers the store, the slot's number and all that the
slot says. What it doesn't do: judge a slot whose key was destroyed, which has no tag, or read a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kvstore.sealing.slots import CHECKED_BYTES, CLEAR_BYTES, SLOT_BYTES, UUID_BYTES
from nic_offload import aead

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Rows: TypeAlias = NDArray[Any]
    Numbers: TypeAlias = NDArray[np.uint32]
    Good: TypeAlias = NDArray[np.bool_]

__all__ = ["are_authentic", "home_of"]

_CLEAR_AT: Final = UUID_BYTES + 4
_SEALED_AT: Final = _CLEAR_AT + CLEAR_BYTES
_TRIED_AT_ONCE: Final = 1 << 15


def are_authentic(rows: Rows, numbers: Numbers, store_uuid: bytes, key: Buffer) -> Good:
    """Tell of each slot whether this key wraps its key, in the slot of this number."""
    count = len(numbers)
    packed = np.empty((count, _SEALED_AT + CHECKED_BYTES - CLEAR_BYTES), np.uint8)
    packed[:, :UUID_BYTES] = np.frombuffer(store_uuid, np.uint8)
    packed[:, UUID_BYTES:_CLEAR_AT] = numbers.astype("<u4").view(np.uint8).reshape(count, 4)
    packed[:, _CLEAR_AT:] = rows.view(np.uint8).reshape(-1, SLOT_BYTES)[:, :CHECKED_BYTES]
    good = aead.authentic(key, packed.tobytes(), count, _SEALED_AT)
    return np.frombuffer(good, np.bool_)


def home_of(row: bytes, slots: int, store_uuid: bytes, key: Buffer) -> int | None:
    """Find the number of the slot that a slot's bytes were written for; None if they were changed as well."""
    for first in range(0, slots, _TRIED_AT_ONCE):
        numbers = np.arange(first, min(first + _TRIED_AT_ONCE, slots), dtype=np.uint32)
        found = np.flatnonzero(are_authentic(np.frombuffer(row, np.uint8), numbers, store_uuid, key))
        if len(found):
            return first + int(found[0])
    return None
