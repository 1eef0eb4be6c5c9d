"""Memory for keys that Python handles: locked, out of core dumps and forked processes, and wiped.

    key = new_key()
    ...
    wipe(key)  # from here on it can't be used

What always holds: a key has 32 bytes that nothing else uses until it is wiped; a wiped one raises ValueError. What
it doesn't do: find copies that a caller makes, with `bytes` for example.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, Final

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

__all__ = ["KEY_BYTES", "are_locked", "key_of", "new_key", "wipe"]

KEY_BYTES: int = lib.TK_AEAD_KEY
_CHUNK_BYTES: Final = 64 << 10  # 2048 keys


class _Places:
    """All places of this process, in chunks of pages that are never freed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[Any] = []
        self._of_address: dict[int, Any] = {}  # those in use
        self.are_locked = True

    def take(self) -> memoryview:
        with self._lock:
            if not self._free:
                self._grow()
            place = self._free.pop()
            self._of_address[int(ffi.cast("uintptr_t", place))] = place
        return memoryview(ffi.buffer(place, KEY_BYTES))

    def _grow(self) -> None:
        locked = ffi.new("int *")
        pages = lib.tk_secret_pages(_CHUNK_BYTES, locked)
        if pages == ffi.NULL:
            raise FabricError.from_code("Getting memory for keys", -12)
        self.are_locked = self.are_locked and bool(locked[0])
        first = ffi.cast("char *", pages)
        self._free += [first + at for at in range(0, _CHUNK_BYTES, KEY_BYTES)]

    def give_back(self, address: int) -> None:
        with self._lock:
            place = self._of_address.pop(address, None)
            if place is not None:
                self._free.append(place)


_PLACES = _Places()


def new_key() -> memoryview:
    """Memory for a key: zeros."""
    return _PLACES.take()


def key_of(secret: bytearray) -> memoryview:
    """Move a key here; the bytearray is wiped."""
    key = new_key()
    key[:] = secret
    wipe(secret)
    return key


def wipe(secret: bytearray | memoryview) -> None:
    """Overwrite a secret with zeros. A key of this memory can't be used afterwards; it may be wiped twice."""
    try:
        view = ffi.from_buffer(secret)
    except ValueError:  # it is over
        return
    lib.tk_wipe(view, len(secret))
    address = int(ffi.cast("uintptr_t", view))
    ffi.release(view)
    if isinstance(secret, memoryview):
        secret.release()
        _PLACES.give_back(address)


def are_locked() -> bool:
    """Whether the system let us lock all of it."""
    return _PLACES.are_locked
