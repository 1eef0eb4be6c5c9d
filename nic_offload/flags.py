"""Flag words: 64-bit words in shared memory whose stores fire armed puts.

A flag word is monotonic: it counts up (tokens written, layers done) and a put armed with threshold N
fires when the word is at least N. Whoever can map the memory can fire it: another process here, a GPU
thread where the words are mapped for it (it fences first, then stores).

What always holds: a store is one 64-bit release store, never torn; what the storing process wrote before
it is visible to whoever saw the new value. The words vanish with the process that made them: they live
in an unnamed memory file, so a killed process leaves nothing behind. The file is sealed: nobody who has its path can
cut it, which would end every process that then looks at a word.

What it doesn't do: take a put back. A word that goes backwards fires nothing and un-fires nothing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Self

from nic_offload._core import ffi, lib
from nic_offload.errors import KvError
from nic_offload.handle import Handle

__all__ = ["FlagWord", "FlagWords"]

_WORD_BYTES = 8
_NAME = "triggerkv-flags"
_MEMORY_FILE = f"/memfd:{_NAME} "
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FlagWord:
    """One word. It keeps its memory (`owner`) mapped, also when its `FlagWords` is closed."""

    __slots__ = ("_owner", "_pointer", "address")

    def __init__(self, address: int, owner: object = None) -> None:
        self.address = address
        self._owner = owner
        self._pointer = ffi.cast("void *", address)

    def load(self) -> int:
        """The word's value now."""
        return int(lib.tk_word_load(self._pointer))

    def store(self, value: int) -> None:
        """Publish everything written before, then the value: this is what fires a put."""
        lib.tk_word_store(self._pointer, value)


class FlagWords(Handle):
    """A handful of flag words in memory that other processes can map by `path`."""

    def __init__(self, fd: int, count: int, path: str) -> None:
        self.path = path
        self._fd = fd
        self._map = mmap.mmap(fd, count * _WORD_BYTES)
        pin = ffi.from_buffer(self._map)
        base = int(ffi.cast("uintptr_t", pin))
        self._words = [FlagWord(base + i * _WORD_BYTES, pin) for i in range(count)]

    @classmethod
    def create(cls, count: int) -> Self:
        """Make `count` words, all zero."""
        if count < 1:
            raise KvError(f"A set of flag words needs at least one word, not {count}.")
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, count * _WORD_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, count, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str) -> Self:
        """Map the words that another process of the same user made; `path` is its `FlagWords.path`."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise KvError(f"The flag words at {path} could not be opened: {error.strerror}.") from error
        if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(_MEMORY_FILE):
            os.close(fd)  # the maker has closed its words and something else has taken the number
            raise KvError(f"{path} is not a set of flag words, or no longer.")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            os.close(fd)
            raise KvError(
                f"{path} could be cut by whoever made it, and whoever looks at it would end: not opened."
            )
        count = os.fstat(fd).st_size // _WORD_BYTES
        if not count:
            os.close(fd)
            raise KvError(f"{path} has no flag words in it.")
        return cls(fd, count, path)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> FlagWord:
        return self._words[index]

    def close(self) -> None:
        """Let the words go. They are unmapped when nobody has one of them, and no put waits for one, any more."""
        if self._fd < 0:
            return
        self._words = []
        del self._map
        os.close(self._fd)
        self._fd = -1
