"""Flag words: 64-bit words in shared memory whose stores fire armed puts.

A flag word is monotonic: it counts up (tokens written, layers done) and a put armed with threshold N
fires when the word is at least N. Any code that can map the memory can fire it: another process here, a GPU
thread where the words are mapped for it (it fences first, then stores).

What always holds: a store is one 64-bit release store, never torn; what the storing process wrote before
it is visible to all that see the new value. The words vanish with the process that made them: they live
in an unnamed memory file, so a killed process leaves nothing behind. The file is sealed against truncation, which
would kill every process that then reads a word. A store wakes the threads that sleep until one.

A store by a GPU, or by a program without this module, wakes no thread: it is seen within two milliseconds.

What it doesn't do: take a put back. A word that goes backwards fires nothing and un-fires nothing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Self

from nic_offload._core import ffi, lib
from nic_offload.errors import Closed, InvalidArgument, shown
from nic_offload.handle import Handle
from nic_offload.made_by import made_by

__all__ = ["FlagWord", "FlagWords"]

WORDS_MAX = 1 << 20  # of one set: 8 MiB

_WORD_BYTES = 8
_VALUE_MAX = (1 << 64) - 1
_NAME = "triggerkv-flags"
_MEMORY_FILE = f"/memfd:{_NAME} "
_BELL = struct.Struct("=QIIi4x")  # struct tk_bell, after the words
assert ffi.sizeof("struct tk_bell") == _BELL.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Words:
    """The memory of a set of words and its bell, mapped for as long as one of the words is in use."""

    def __init__(self, fd: int, bell_fd: int) -> None:
        self.bell_fd = bell_fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._pin = ffi.from_buffer(self._map)
        self.address = int(ffi.cast("uintptr_t", self._pin))
        self.bell_address = self.address + len(self._map) - _BELL.size
        self.bell = ffi.cast("struct tk_bell *", self.bell_address)

    def __del__(self) -> None:
        os.close(self.bell_fd)


@made_by("`FlagWords`")
class FlagWord:
    """One word. Its memory stays mapped even after its `FlagWords` is closed."""

    __slots__ = ("_pointer", "_words", "address")

    def __init__(self, address: int, words: _Words | None = None) -> None:
        self.address = address
        self._words = words
        self._pointer = ffi.cast("void *", address)

    @property
    def place(self) -> tuple[int, int, int]:
        """The addresses of the word and of its bell, and the pipe; 0 and -1 for those of a word elsewhere in memory."""
        words = self._words
        return (self.address, 0, -1) if words is None else (self.address, words.bell_address, words.bell_fd)

    def load(self) -> int:
        """The word's value now.

        >>> flags[1].load()
        0
        """
        return int(lib.tk_word_load(self._pointer))

    def store(self, value: int) -> None:
        """Publish everything written before, then the value. This fires puts.

        >>> flags[0].store(3)
        >>> flags[0].load()
        3
        """
        try:
            if self._words is None:
                lib.tk_word_store(self._pointer, value)
            else:
                lib.tk_word_ring(self._pointer, value, self._words.bell, self._words.bell_fd)
        except (OverflowError, TypeError):  # the conversion to C; checking beforehand would cost each store
            raise InvalidArgument(f"A flag word's value is 0 to {_VALUE_MAX}, not {shown(value)}.") from None


@made_by("`FlagWords.create` or `FlagWords.open`")
class FlagWords(Handle):
    """Flag words in memory that other processes can map by its `path`.

    >>> from kvstore import FlagWords
    >>> flags = FlagWords.create(2)
    >>> len(flags), flags[1].load()
    (2, 0)
    """

    def __init__(self, fd: int, bell_fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        words = _Words(fd, bell_fd)
        self._words = [FlagWord(words.address + i * _WORD_BYTES, words) for i in range(words.bell.words)]

    @classmethod
    def create(cls, count: int) -> Self:
        """Make `count` words, all zero.

        >>> with FlagWords.create(1) as words:
        ...     words[0].load()
        0
        """
        if not isinstance(count, int) or not 1 <= count <= WORDS_MAX:
            raise InvalidArgument(f"A set of flag words has 1 to {WORDS_MAX} words, not {shown(count)}.")
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        hears, rings = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        bell_fd = os.open(f"/proc/self/fd/{hears}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        os.close(hears)
        os.close(rings)
        os.pwrite(fd, _BELL.pack(lib.TK_BELL_MAGIC, count, 0, bell_fd), count * _WORD_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, bell_fd, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str) -> Self:
        """Map the words that another process of the same user made; `path` is its `FlagWords.path`.

        >>> with FlagWords.open(flags.path) as same:
        ...     len(same)
        2
        """
        if not isinstance(path, str) or not path or "\0" in path:
            raise InvalidArgument(f"The path of flag words is that of `FlagWords.path`, not {shown(path)}.")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _refused(f"The flag words at {path} could not be opened: {error.strerror}") from error
        try:
            return cls(fd, _checked(fd, path), path)
        except InvalidArgument:
            os.close(fd)
            raise

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> FlagWord:
        if self._fd < 0:
            raise Closed("The flag words are closed.")
        return self._words[index]

    def close(self) -> None:
        """Release the words. They are unmapped when no object refers to one and no put waits for one.

        >>> FlagWords.create(1).close()
        """
        if self._fd < 0:
            return
        self._words = []
        os.close(self._fd)
        self._fd = -1


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument(f"{why}; pass the `FlagWords.path` of a set that its maker has not closed.")


def _checked(fd: int, path: str) -> int:
    """Refuse a file that is not a set of flag words; otherwise open its bell."""
    if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(_MEMORY_FILE):
        # The maker may have closed its words, and the number belongs to another file.
        raise _refused(f"{path} is not a set of flag words")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise _refused(f"{path} could be truncated by its creator, which would kill its readers")
    size = os.fstat(fd).st_size
    tail = os.pread(fd, _BELL.size, max(0, size - _BELL.size))
    magic, words, _, maker_fd = _BELL.unpack(tail) if len(tail) == _BELL.size else (0, 0, 0, 0)
    if magic != lib.TK_BELL_MAGIC or not words or size != words * _WORD_BYTES + _BELL.size:
        raise _refused(f"{path} has no flag words in it")
    bell = Path(path).with_name(str(maker_fd))
    try:
        bell_fd = os.open(bell, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _refused(
            f"The bell of the flag words at {path} could not be opened: {error.strerror}"
        ) from error
    if not stat.S_ISFIFO(os.fstat(bell_fd).st_mode):
        os.close(bell_fd)
        raise _refused(f"{path} is not a set of flag words")
    return bell_fd
