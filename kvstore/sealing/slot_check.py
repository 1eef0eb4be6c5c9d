"""Checks whether keys are authentic in their slots, thousands at a time, and finds where a moved one belongs.

What always holds: a slot is checked by the tag of its key, which covers the store, the slot's number and all of the
slot's fields. What it doesn't do: check a slot whose key was destroyed, which has no tag, or read a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from kvstore.limits import KEYRING_SLOTS_TRIED_AT_ONCE
from kvstore.sealing.slots import SLOT_BYTES
from nic_offload import wrapped_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Good: TypeAlias = NDArray[np.bool_]

__all__ = ["Some", "are_authentic", "home_of"]

_NAME: Final = np.dtype("S16")  # of a fixed length: trailing zeros make no difference
_TENANT_AT: Final = 1  # the second part of a slot in parts of this length
_WHICH: Final = np.dtype([("row", np.uint32), ("number", np.uint32)])


class Some(NamedTuple):
    """Some of the slots that were read together."""

    slots: bytes  # all of those read
    rows: NDArray[np.intp]  # the positions of these among them
    numbers: NDArray[np.intp]  # their numbers in the keyring

    def are_of(self, tenants: Iterable[bytes]) -> Good:
        """For each, whether its name is of one of these tenants."""
        names = np.frombuffer(self.slots, _NAME).reshape(-1, SLOT_BYTES // _NAME.itemsize)
        return np.isin(names[self.rows, _TENANT_AT], np.array(list(tenants), _NAME))


def are_authentic(some: Some, store_uuid: bytes, key: Buffer) -> Good:
    """For each, whether this key wraps its key, in the slot of this number."""
    which = np.empty(len(some.rows), _WHICH)
    which["row"], which["number"] = some.rows, some.numbers
    return np.frombuffer(wrapped_keys.are_authentic(key, store_uuid, some.slots, which.data), np.bool_)


def home_of(row: bytes, slots: int, store_uuid: bytes, key: Buffer) -> int | None:
    """The number of the slot for which these bytes were written; None if they were also changed."""
    for first in range(0, slots, KEYRING_SLOTS_TRIED_AT_ONCE):
        numbers = np.arange(first, min(first + KEYRING_SLOTS_TRIED_AT_ONCE, slots))
        some = Some(row, np.zeros_like(numbers), numbers)
        found = np.flatnonzero(are_authentic(some, store_uuid, key))
        if len(found):
            return first + int(found[0])
    return None
