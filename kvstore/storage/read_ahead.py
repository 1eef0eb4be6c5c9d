"""Read-ahead for a walk over a drive: it predicts the next positions and reads them in advance.

A walk over headers gets the position of the next header from each one, so it would make one small read at a time,
while most drives do thirty in hardly more time. Blocks of one store mostly have one size, so the next jump mostly
equals the last one. After two equal jumps the next positions are read, twice as many after each right guess.

Always holds: `read` returns the drive's bytes at that position, read after the `Ahead` was made, or a StorageError. A
wrong guess, or one whose read failed, only costs time: the position is then read normally. After closing, nothing is
in flight, so others may use the drive's queue.

It doesn't see writes: the drive must not be written meanwhile.
"""

from __future__ import annotations

import ctypes
import select
from typing import TYPE_CHECKING, Self

from kvstore.limits import READS_AHEAD_MAX
from kvstore.storage.disk import DiskOp, DiskOpKind
from nic_offload.memory import undumped

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.storage.disk import Disk

__all__ = ["Ahead"]


class Ahead:
    """Reads one drive for one walk, in pieces of at most `piece_bytes`."""

    def __init__(self, disk: Disk, piece_bytes: int) -> None:
        self._disk = disk
        self._piece_bytes = piece_bytes
        self._memory = undumped(READS_AHEAD_MAX * piece_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = list(range(READS_AHEAD_MAX))  # pieces of the memory; their numbers are also the tags
        self._guesses: dict[tuple[int, int], int] = {}  # (offset, length) -> piece; in the order of the drive
        self._results: dict[int, int | None] = {}  # of each piece that is not free; None: in flight
        self._last = (0, 0)
        self._jump = 0
        self._depth = 0
        self._bell = select.poll()
        self._bell.register(disk.fileno(), select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guesses.clear()
        while None in self._results.values():
            self._wait()

    def read(self, offset: int, length: int) -> bytes:
        """Read whole pages, waiting for them; StorageError if any byte can't be read."""
        jump = offset - self._last[0]
        piece = self._guesses.pop((offset, length), None)
        data = None if piece is None else self._taken(piece, length)
        if piece is not None:
            self._depth = min(2 * self._depth, READS_AHEAD_MAX)
        else:
            self._guesses.clear()
            self._depth = 1 if (jump, length) == (self._jump, self._last[1]) else 0
        self._jump, self._last = jump, (offset, length)
        if len(self._guesses) < self._depth // 2 or (self._depth and not self._guesses):
            self._guess()
        return self._disk.read_at(offset, length) if data is None else data

    def _guess(self) -> None:
        (offset, length), known = self._last, len(self._guesses)
        end = self._disk.capacity_bytes - length
        places = (offset + step * self._jump for step in range(known + 1, self._depth + 1))
        wanted = [at for at in places if at <= end]
        if len(wanted) > len(self._free):
            self._free_abandoned()
        ops = [
            DiskOp(DiskOpKind.READ, self._address + piece * self._piece_bytes, length, at, piece)
            for at, piece in zip(wanted, self._free, strict=False)
        ]
        accepted = self._disk.submit(ops) if ops else 0
        for op in ops[:accepted]:
            self._guesses[op.offset, length] = op.tag
            self._results[op.tag] = None
        del self._free[:accepted]

    def _taken(self, piece: int, length: int) -> bytes | None:
        while self._results[piece] is None:
            self._wait()
        result = self._results.pop(piece)
        self._free.append(piece)
        begin = piece * self._piece_bytes
        return self._memory[begin : begin + length] if result == length else None

    def _free_abandoned(self) -> None:
        """Free the buffers of predicted reads that were not requested and have completed."""
        self._reap()
        kept = set(self._guesses.values())
        for piece, result in list(self._results.items()):
            if result is not None and piece not in kept:
                del self._results[piece]
                self._free.append(piece)

    def _wait(self) -> None:
        self._bell.poll()
        self._reap()

    def _reap(self) -> None:
        for done in self._disk.reap():
            self._results[done.tag] = done.result
