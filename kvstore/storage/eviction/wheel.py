"""A hierarchical timer wheel: which rows expire when. Insertion and removal are O(1) at any distance.

It has eight levels of 64 buckets, each level 64 times as coarse as the one before. A row is in the level of the
highest digit (in base 64, of its tick) in which it differs from the wheel's own tick, in the bucket of that digit. So
the lowest bucket of the lowest occupied level is always the next, and the wheel jumps from one occupied bucket to the
next, however much time is between them. When the time of a bucket begins, its rows are due or move to the levels
below.

Always holds:

- No row is returned before its time by the clock of that call, and none, if the steps suffice, later than the next
  call after the first complete tick since.
- A call makes a bounded number of steps; the next calls finish a jump forward.
- After a jump back, rows whose time is in between are held until the clock reaches it again.

It doesn't read a clock: the time is passed in. Rows that expire beyond 890,000 years never do.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from kvstore.limits import TIMER_TICK_MS
from kvstore.storage.eviction.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TimerWheel"]

_DIGIT_BITS: Final = 6
_BUCKETS: Final = 1 << _DIGIT_BITS
_LEVELS: Final = 8
_PENDING: Final = _LEVELS * _BUCKETS  # the ring of rows that are to be given or to find their bucket
_HEADS: Final = _PENDING + 1
_TICKS_MAX: Final = (1 << _DIGIT_BITS * _LEVELS) - 1


class TimerWheel:
    """Rows by the time at which they expire."""

    __slots__ = ("_count", "_due", "_occupied", "_rings", "_tick", "lagging")

    def __init__(self, now_ms: int) -> None:
        self._rings = Rings(_HEADS)
        self._due = array("Q")  # of each row, the tick at whose beginning it may go
        self._occupied = [0] * _LEVELS  # a bit for each bucket that holds something
        self._tick = now_ms // TIMER_TICK_MS
        self._count = 0
        self.lagging = False  # the last advance left work to the next one

    def __len__(self) -> int:
        return self._count

    def insert(self, row: int, expires_ms: int) -> None:
        """Let a row that is not in the wheel expire; 0 is never."""
        due = -(-expires_ms // TIMER_TICK_MS)
        if expires_ms == 0 or due > _TICKS_MAX:
            return
        self._reach(row)
        self._due[row] = due
        self.insert_again(row)

    def insert_all(self, first_row: int, expiries_ms: Sequence[int]) -> None:
        """Do the same for rows one after the other. It may be a million of them."""
        if not any(expiries_ms):
            return
        self._reach(first_row + len(expiries_ms) - 1)
        dues, place = self._due, self._place
        for row, expires_ms in enumerate(expiries_ms, first_row):
            due = -(-expires_ms // TIMER_TICK_MS)
            if 0 < due <= _TICKS_MAX:
                dues[row] = due
                place(row)
                self._count += 1

    def insert_again(self, row: int) -> None:
        """Put a row that was given out back, with its old time."""
        assert not self._rings.is_linked(_HEADS + row)
        self._place(row)
        self._count += 1

    def cancel(self, row: int) -> None:
        """Take a row out, if it is in."""
        node = _HEADS + row
        if self._rings.is_linked(node):
            self._unlink(node)
            self._count -= 1

    def advance(self, now_ms: int, rows_max: int, steps_max: int) -> list[int]:
        """Return rows that have expired, in about the order of their times, until a bound is met."""
        target = now_ms // TIMER_TICK_MS
        rings = self._rings
        expired: list[int] = []
        self.lagging = True
        for _ in range(steps_max):
            node = rings.after[_PENDING]
            if node == _PENDING:
                if not self._open_next_bucket(target):
                    self.lagging = False
                    break
                continue
            due = self._due[node - _HEADS]
            if due <= target and due <= self._tick:
                if len(expired) == rows_max:
                    break
                rings.unlink(node)
                self._count -= 1
                expired.append(node - _HEADS)
            elif due <= self._tick:
                self._turn_back(target)
            else:
                rings.unlink(node)
                self._place(node - _HEADS)
        return expired

    def _reach(self, row: int) -> None:
        missing = row + 1 - len(self._due)
        if missing > 0:
            self._due.extend([0] * missing)
            self._rings.reach(_HEADS + row)

    def _place(self, row: int) -> None:
        due = self._due[row]
        if due <= self._tick:
            head = _PENDING
        else:
            level = ((due ^ self._tick).bit_length() - 1) // _DIGIT_BITS
            bucket = due >> level * _DIGIT_BITS & _BUCKETS - 1
            self._occupied[level] |= 1 << bucket
            head = level * _BUCKETS + bucket
        self._rings.push(head, _HEADS + row)

    def _unlink(self, node: int) -> None:
        rings = self._rings
        head = rings.after[node]
        rings.unlink(node)
        if head < _PENDING and rings.after[head] == head:
            self._occupied[head // _BUCKETS] &= ~(1 << head % _BUCKETS)

    def _open_next_bucket(self, target: int) -> bool:
        """Advance to the next occupied bucket, if its time has begun, else to the target."""
        for level, occupied in enumerate(self._occupied):
            if occupied:
                bucket = (occupied & -occupied).bit_length() - 1
                shift = level * _DIGIT_BITS
                begin = (self._tick >> shift + _DIGIT_BITS << _DIGIT_BITS | bucket) << shift
                if begin > target:
                    break
                self._tick = begin
                self._occupied[level] ^= 1 << bucket
                self._rings.move_all(level * _BUCKETS + bucket, _PENDING)
                return True
        self._tick = max(self._tick, target)
        return False

    def _turn_back(self, target: int) -> None:
        """Begin anew from an earlier tick, because a row is due between there and the wheel's own.

        It costs all rows one step each, but only after a jump back over a time at which a row expires.
        """
        self._tick = target
        for level, occupied in enumerate(self._occupied):
            self._occupied[level] = 0
            for bucket in range(_BUCKETS):
                if occupied >> bucket & 1:
                    self._rings.move_all(level * _BUCKETS + bucket, _PENDING)
