"""Verifies stored records on which the acknowledgement of a put would rely.

Always holds: a record is whole if its header is exactly the one in the index, tag included, and its payload has that
header's CRC, and the right tag if it is encrypted, all read from the drive after the request; a failed read is retried
once. While a record is read nothing new is written there, and it is not evicted for room. Memory is bounded by
`CHECKS_AT_ONCE` pieces, allocated with the first check; further checks wait, in order.

It decides nothing: it reports to the caller, which consults the index again.
"""

from __future__ import annotations

import ctypes
import enum
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.limits import CHECK_PIECE_BYTES, CHECKS_AT_ONCE, HEADER_BYTES, PAGE_BYTES
from kvstore.storage.disk import DiskOp, DiskOpKind
from kvstore.storage.eviction.types import Guard
from kvstore.storage.index_layout import is_header_of
from kvstore.wire.record import Flaw, Header, record_bytes
from nic_offload.checksum import crc32c_at
from nic_offload.memory import undumped

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.extents import Extents
    from kvstore.storage.index import Entry, Name
    from kvstore.storage.traffic import Traffic
    from kvstore.wire.record import HeaderCodec
    from nic_offload.vault import Decryption

__all__ = ["Checks", "Finding"]


class Finding(enum.Enum):
    """What a record turned out to be."""

    WHOLE = enum.auto()
    DAMAGED = enum.auto()
    FOREIGN = enum.auto()  # another record's valid header is there, which must not be wiped
    UNREADABLE = enum.auto()
    ERASED = enum.auto()  # its key was destroyed


class Checks:
    """All checks of one drive that have not ended."""

    def __init__(self, codec: HeaderCodec, extents: Extents, traffic: Traffic, keeping: Keeping) -> None:
        self._codec = codec
        self._extents = extents
        self._traffic = traffic
        self._keeping = keeping
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []  # addresses of pieces
        self._waiting: deque[_Check] = deque()

    def check(self, name: Name, entry: Entry, then: Callable[[Finding], None]) -> None:
        """Read a record; `then` gets the finding, from `poll`."""
        if self._memory is None:
            self._memory = undumped(CHECKS_AT_ONCE * CHECK_PIECE_BYTES)
            first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._free = [first + at * CHECK_PIECE_BYTES for at in range(CHECKS_AT_ONCE)]
        self._extents.pin(entry.offset // PAGE_BYTES)
        self._keeping.guard([entry.generation], Guard.PIN)
        self._waiting.append(_Check(self, name, entry, then))
        self._start()

    def _start(self) -> None:
        while self._free and self._waiting:
            one = self._waiting.popleft()
            one.address = self._free.pop()
            self._traffic.add(one)

    def arrived(self, one: _Check, result: int) -> None:
        """Take the result of a read."""
        finding = self._read_on(one, result)
        if finding is None:
            self._traffic.add(one)
            return
        self._free.append(one.address)
        if one.decryption is not None:
            one.decryption.close()
        self._extents.unpin(one.entry.offset // PAGE_BYTES)
        self._keeping.unguard([one.entry.generation], Guard.PIN)
        self._start()
        one.then(finding)

    def _read_on(self, one: _Check, result: int) -> Finding | None:
        """Check a piece; None if there is more to read."""
        if result < 0:
            one.failed += 1
            return None if one.failed == 1 else Finding.UNREADABLE
        first = one.address
        if one.at == 0:
            found, one.decryption = self._codec.open(first, one.entry.offset)
            if found is Flaw.NO_KEY:
                return Finding.ERASED
            if not is_header_of(found, one.name, one.entry):
                return Finding.FOREIGN if isinstance(found, Header) else Finding.DAMAGED
            first += HEADER_BYTES
        left = HEADER_BYTES + one.entry.length - one.at
        length = min(one.address + left, one.address + result) - first
        if one.decryption is not None and not one.decryption.step(first, length):
            return Finding.DAMAGED
        one.crc32c = crc32c_at(first, length, one.crc32c)
        one.at += result
        if one.at < record_bytes(one.entry.length):
            return None
        is_authentic = one.decryption is None or one.decryption.is_authentic()
        return Finding.WHOLE if is_authentic and one.crc32c == one.entry.crc32c else Finding.DAMAGED


class _Check:
    """One record that is being read, piece by piece."""

    reads: Final = True

    __slots__ = (
        "_checks",
        "address",
        "at",
        "crc32c",
        "decryption",
        "entry",
        "failed",
        "name",
        "tenant",
        "then",
    )

    def __init__(self, checks: Checks, name: Name, entry: Entry, then: Callable[[Finding], None]) -> None:
        self._checks = checks
        self.name = name
        self.tenant = name[0]
        self.entry = entry
        self.then = then
        self.address = self.at = self.crc32c = self.failed = 0
        self.decryption: Decryption | None = None

    @property
    def size_bytes(self) -> int:
        return min(CHECK_PIECE_BYTES, record_bytes(self.entry.length) - self.at)

    def begin(self, tag: int) -> DiskOp:
        return DiskOp(DiskOpKind.READ, self.address, self.size_bytes, self.entry.offset + self.at, tag)

    def end(self, result: int) -> None:
        self._checks.arrived(self, result)
