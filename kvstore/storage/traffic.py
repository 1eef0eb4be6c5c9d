"""Operations to and from the drive: a queue, and how much of it is in flight.

Always holds: no more than `DRIVE_INFLIGHT_BYTES_MAX` are in flight, and no more than `DRIVE_INFLIGHT_READ_BYTES_MAX`
of reads (more would cause convoys of completions, for which the fabric would wait), but always two operations if there
are two (fewer would leave the drive idle); tenants take turns by bytes, and the work of one tenant, or of none, is
served in order; the drive is given new work before the results of old work are handled; a short transfer is an error;
`about_to_start` is called when all work that can begin now has begun, and before the drive has any of it. Work that
another thread does on the drive (`Elsewhere`) has its turn and its room here like all other work.
Work of several operations has ended when all of them have, with the first error, if there was one.

It doesn't know what the work is for. The callers that fill the queue bound it.
"""

from __future__ import annotations

import enum
import errno
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol

from kvstore.limits import (
    DRIVE_INFLIGHT_BYTES_MAX,
    DRIVE_INFLIGHT_OPS_MIN,
    DRIVE_INFLIGHT_READ_BYTES_MAX,
    DRIVE_QUEUE_DEPTH,
    TURN_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.storage.disk import Disk, DiskOp

__all__ = ["Elsewhere", "Traffic", "Work"]


class Elsewhere(enum.Enum):
    """Marks work that another thread executes: `Traffic.ended` is called when it has completed."""

    BEGUN = enum.auto()


class Work(Protocol):
    """Work that starts at once on the drive, mostly one operation, and its purpose."""

    @property
    def tenant(self) -> bytes:
        """The tenant it is scheduled for; empty: the store itself."""
        ...

    @property
    def size_bytes(self) -> int:
        """How many bytes it adds to those in flight."""
        ...

    @property
    def reads(self) -> bool:
        """Whether a client waits for the bytes that it reads."""
        ...

    def begin(self, tag: int) -> DiskOp | list[DiskOp] | Elsewhere | None:
        """Return the operation, or all of them, right before they start; None if there is nothing left to do."""
        ...

    def end(self, result: int) -> None:
        """Handle the result: all bytes, or `-errno`."""
        ...


class _Line:
    """The queued work of one tenant."""

    __slots__ = ("credit_bytes", "works")

    def __init__(self) -> None:
        self.credit_bytes = TURN_BYTES
        self.works: deque[Work] = deque()


class _Parts:
    """The operations that have ended, of work with several."""

    __slots__ = ("error", "left", "moved_bytes")

    def __init__(self, left: int) -> None:
        self.left = left
        self.moved_bytes = 0
        self.error = 0


class Traffic:
    """The only path to the drive while the store runs."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._first: deque[Work] = deque()  # before all lines
        self._lines: OrderedDict[bytes, _Line] = OrderedDict()  # the first one has its turn
        self._in_flight: dict[int, Work] = {}
        self._parts: dict[int, _Parts] = {}  # of work with several operations
        self._more = 0  # operations of such work beyond the first of each
        self._refused: list[DiskOp] = []  # begun, but the drive had no room for them yet
        self._next_tag = 0
        self.about_to_start: Callable[[], object] = lambda: None
        self.in_flight_bytes = 0
        self._reading_bytes = 0

    @property
    def queued(self) -> int:
        """How many operations are queued."""
        return len(self._first) + sum(len(line.works) for line in self._lines.values())

    @property
    def tenants_wait(self) -> bool:
        """Whether any tenant's work is queued."""
        return len(self._lines) > (b"" in self._lines)

    @property
    def in_flight(self) -> int:
        """How many operations are in flight."""
        return len(self._in_flight) + self._more

    def add(self, work: Work) -> None:
        """Queue work; `pump` starts it."""
        line = self._lines.get(work.tenant)
        if line is None:
            line = self._lines[work.tenant] = _Line()
        line.works.append(work)

    def add_first(self, work: Work) -> None:
        """Queue work before all other."""
        self._first.appendleft(work)

    def poll(self) -> None:
        """Collect completions, start more work, then deliver the results."""
        ended = []
        for tag, result in self._disk.reap():
            if tag in self._parts:
                whole = self._part_ended(tag, result)
                if whole is None:
                    continue
                result = whole  # noqa: PLW2901
            work = self._in_flight.pop(tag)
            size_bytes = work.size_bytes
            self._count(work, -size_bytes)
            ended.append((work, result if result < 0 or result == size_bytes else -errno.EIO))
        self.pump()
        for work, result in ended:
            work.end(result)

    def _part_ended(self, tag: int, result: int) -> int | None:
        """Return the result of the whole, if that was its last operation."""
        parts = self._parts[tag]
        parts.left -= 1
        if result < 0:
            parts.error = parts.error or result
        else:
            parts.moved_bytes += result
        if parts.left:
            self._more -= 1
            return None
        del self._parts[tag]
        return parts.error or parts.moved_bytes

    def ended(self, tag: int) -> None:
        """Record the completion of work that another thread executed."""
        work = self._in_flight.pop(tag)
        self._count(work, -work.size_bytes)

    def pump(self) -> None:
        """Start as much as the bounds allow, in one system call."""
        ops, self._refused = self._refused, []
        while (work := self._next()) is not None and self._has_room(work):
            self._take(work)
            op = work.begin(self._next_tag)
            if op is None:
                continue
            self._in_flight[self._next_tag] = work
            if isinstance(op, list):
                self._parts[self._next_tag] = _Parts(len(op))
                self._more += len(op) - 1
                ops += op
            elif op is not Elsewhere.BEGUN:
                ops.append(op)
            self._next_tag += 1
            self._count(work, work.size_bytes)
        if ops:
            self.about_to_start()
            accepted = self._disk.submit(ops)
            self._refused = ops[accepted:]

    def _next(self) -> Work | None:
        """The work that is served next; it is not removed."""
        if self._first:
            return self._first[0]
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            work = line.works[0]
            if len(self._lines) == 1 or line.credit_bytes >= work.size_bytes:
                return work
            line.credit_bytes += TURN_BYTES
            self._lines.move_to_end(tenant)
        return None

    def _take(self, work: Work) -> None:
        if self._first:
            self._first.popleft()
            return
        line = self._lines[work.tenant]
        line.works.popleft()
        line.credit_bytes = max(0, line.credit_bytes - work.size_bytes)
        if not line.works:
            del self._lines[work.tenant]

    def _count(self, work: Work, size_bytes: int) -> None:
        self.in_flight_bytes += size_bytes
        if work.reads:
            self._reading_bytes += size_bytes

    def _has_room(self, work: Work) -> bool:
        count = len(self._in_flight) + self._more
        if count < DRIVE_INFLIGHT_OPS_MIN:
            return True
        if work.reads and self._reading_bytes + work.size_bytes > DRIVE_INFLIGHT_READ_BYTES_MAX:
            return False
        return (
            count < DRIVE_QUEUE_DEPTH and self.in_flight_bytes + work.size_bytes <= DRIVE_INFLIGHT_BYTES_MAX
        )
