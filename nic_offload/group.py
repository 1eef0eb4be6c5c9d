"""Groups: one call waits, without the GIL, for many operations, each with a row.

The C core writes to the rows (`group.c`): when a put fired, and what the peer acknowledged. A batch without errors
causes no events; if no caller is waiting when its last row completes, there is one event, OVER, with the group's tag.
Exceptional results are reported as events, and their reader completes the row.

What always holds: a row completes once, and doesn't change after that. In a forked child every call raises FabricError.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.fabric import Fabric

__all__ = ["Group", "Row"]

_ROW = struct.Struct("=3Q2I")
_ROWS = ffi.typeof("struct tk_row[]")
assert _ROW.size == ffi.sizeof("struct tk_row")
_SLICE_S = 0.25  # a wait in C doesn't see signals
_SLICE_NS = int(_SLICE_S * 1e9)


def _checked(code: int) -> int:
    if code < 0:
        raise FabricError.from_code("Using a group", code)
    return code


class Row(NamedTuple):
    """What became of one operation; times are of CLOCK_MONOTONIC, 0: not yet."""

    fired_ns: int
    landed_ns: int  # the peer's first word
    over_ns: int  # its last word
    code: int  # of that; 0: none arrived
    over: int


class Group:
    """Rows for one batch of operations. The memory is freed when neither this object nor the fabric's work uses it.

    If it `is_awaited`, by its opener until its end, OVER is never reported.
    """

    def __init__(self, fabric: Fabric, tag: int, count: int, *, is_awaited: bool = False) -> None:
        out = ffi.new("struct tk_group **")
        code = lib.tk_group_open(fabric.handle, tag, count, is_awaited, out)
        if code:
            raise FabricError.from_code("Opening a group", code)
        self._handle: Any = ffi.gc(out[0], lib.tk_group_close)
        self._count = count

    @classmethod
    def owning(cls, handle: Any, count: int) -> Self:
        """One that C has opened, with this many rows."""
        group = cls.__new__(cls)
        group._handle, group._count = ffi.gc(handle, lib.tk_group_close), count  # noqa: SLF001 - of this class
        return group

    @property
    def handle(self) -> Any:
        """The C object."""
        return self._handle

    @property
    def pointer(self) -> int:
        """Its address."""
        return int(ffi.cast("uintptr_t", self._handle))

    def row(self, number: int) -> Row:
        """The current state of a row."""
        out = ffi.new("struct tk_row *")
        _checked(lib.tk_group_read(self._handle, number, 1, out))
        return Row._make(_ROW.unpack(ffi.buffer(out)))

    def rows(self, count: int | None = None) -> Iterator[Row]:
        """The current state of the first `count`, or of all."""
        return map(Row._make, self.unnamed_rows(count))

    def unnamed_rows(self, count: int | None = None) -> Iterator[tuple[int, int, int, int, int]]:
        """The same as plain tuples, which cost less."""
        count = self._count if count is None else count
        out = ffi.new(_ROWS, count)
        _checked(lib.tk_group_read(self._handle, 0, count, out))
        return _ROW.iter_unpack(ffi.buffer(out))

    def codes(self, count: int) -> list[int]:
        """The code of the last word for each of the first `count`; 0: none."""
        return [code for _, _, _, code, _ in self.unnamed_rows(count)]

    @property
    def open_rows(self) -> int:
        """How many are not over."""
        return _checked(lib.tk_group_open_rows(self._handle))

    def land(self, row: int, at_ns: int) -> None:
        """Note that the first word for a row has arrived; its reader ends the row later."""
        _checked(lib.tk_group_land(self._handle, row, at_ns))

    def end(self, row: int, code: int = 0) -> None:
        """Complete a row, unless it has completed; a code of 0 keeps the peer's code."""
        _checked(lib.tk_group_end(self._handle, row, code))

    def wait(self, first: int, timeout_s: float) -> bool:
        """Wait until the first `count` rows have ended; returns whether they have."""
        return self._wait(first, 0, timeout_s)

    def wait_all(self, timeout_s: float) -> Iterator[tuple[int, int, int, int, int]] | None:
        """Wait until every row has ended; returns the rows, or None on timeout.

        What can be done before the wait is done then: after a rest the same code takes twenty times as long.
        """
        out = ffi.new(_ROWS, self._count)
        rows, read = ffi.buffer(out), lib.tk_group_read
        if not self._wait(self._count, 0, timeout_s):
            return None
        _checked(read(self._handle, 0, self._count, out))
        return _ROW.iter_unpack(rows)

    def wait_landed(self, timeout_s: float) -> bool:
        """Wait until every row has a word or has completed; returns whether that is so."""
        return self._wait(0, 1, timeout_s)

    def _wait(self, first: int, landed: int, timeout_s: float) -> bool:
        while timeout_s > _SLICE_S:
            if _checked(lib.tk_group_wait(self._handle, first, landed, _SLICE_NS)):
                return True
            timeout_s -= _SLICE_S
        return bool(_checked(lib.tk_group_wait(self._handle, first, landed, int(max(0.0, timeout_s) * 1e9))))
