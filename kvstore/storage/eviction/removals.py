"""Why the last removed blocks were removed: the Python face of `keep/history.c`.

Always holds: a fixed number of the newest removals is remembered, by name, in some 100 bytes each; of one name only the
newest. A name is known by 64 bits of a digest with a random secret.
"""

from __future__ import annotations

import secrets
from array import array
from typing import TYPE_CHECKING

from kvstore.storage.eviction.types import EVICTION_WORDS, eviction_of
from kvstore.storage.keep._keep import ffi, lib

if TYPE_CHECKING:
    from kvstore.storage.eviction.types import Eviction, Evictions

__all__ = ["History"]


class History:
    """Evictions by name: tenant and key in one."""

    __slots__ = ("_history",)

    def __init__(self, size: int) -> None:
        history = lib.keep_history_new(size, secrets.token_bytes(16))
        if not history:
            raise MemoryError("There is no memory to remember removed blocks.")
        self._history = ffi.gc(history, lib.keep_history_free)

    def add(self, names: bytes, evictions: Evictions) -> None:
        """Remember evictions, in place of the oldest."""
        gone = ffi.from_buffer("struct keep_gone[]", evictions.words)
        lib.keep_history_add(self._history, ffi.from_buffer("uint8_t[]", names), gone, len(evictions))

    def of(self, name: bytes) -> Eviction | None:
        """Return the eviction of a block, if it is remembered."""
        words = array("Q", bytes(8 * EVICTION_WORDS))
        out = ffi.from_buffer("struct keep_gone *", words, require_writable=True)
        return eviction_of(words, 0) if lib.keep_history_of(self._history, name, out) else None

    def sessions_of(self, names: bytes, count: int) -> array[int] | None:
        """Return the last session of each removed block, 0 if it isn't remembered; None if all are 0."""
        sessions = array("Q", bytes(8 * count))
        out = ffi.from_buffer("uint64_t[]", sessions, require_writable=True)
        data = ffi.from_buffer("uint8_t[]", names)
        return sessions if lib.keep_history_sessions(self._history, data, count, out) else None
