"""The promises of the policies and the core, in the plainest code possible: searches in lists.

It shares nothing with what it judges but the values in `types`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.limits import TIMER_TICK_MS
from kvstore.storage.eviction.types import Guard, Mode, Reason, Record, Refusal, Stuck, Watermarks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Block", "PlainCore", "PlainLru", "PlainS3Fifo"]


class PlainLru:
    """A list of rows, the coldest first, each with the number of its last use."""

    def __init__(self) -> None:
        self.uses = 0
        self.order: list[tuple[int, int]] = []

    def admitted(self, row: int, pages: int, name64: int) -> None:
        del pages, name64
        self.touched([row])

    def readmitted(self, row: int, pages: int) -> None:
        del pages
        self.touched([row])

    def restored(self, pages: Sequence[int]) -> None:
        self.touched(range(len(pages)))

    def inherited(self, row: int, pages: int, place: int) -> None:
        del pages
        last = dict(self.order)
        if last.get(row, 0) <= last[place]:
            self.removed(row)
            self.order.insert(self.order.index((place, last[place])) + 1, (row, last[place]))

    def touched(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.uses += 1
            self.removed(row)
            self.order.append((row, self.uses))

    def removed(self, row: int) -> None:
        self.order = [entry for entry in self.order if entry[0] != row]

    def evicted(self, row: int, name64: int) -> None:
        del name64
        self.removed(row)

    def candidate(self) -> int:
        return self.order[0][0] if self.order else -1


@dataclass
class _Entry:
    row: int
    pages: int
    uses: int = 0


class PlainS3Fifo:
    """S3-FIFO as lists, the next block to evict first."""

    def __init__(self, capacity_pages: int) -> None:
        self.small_max = max(1, capacity_pages // 10)
        self.ghost_max = capacity_pages - self.small_max
        self.small: list[_Entry] = []
        self.main: list[_Entry] = []
        self.ghosts: list[tuple[int, int]] = []

    def admitted(self, row: int, pages: int, name64: int) -> None:
        known = [ghost for ghost in self.ghosts if ghost[0] == name64]
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != name64]
        (self.main if known else self.small).append(_Entry(row, pages))

    def readmitted(self, row: int, pages: int) -> None:
        self.main.append(_Entry(row, pages))

    def restored(self, pages: Sequence[int]) -> None:
        self.main = [_Entry(row, each) for row, each in enumerate(pages)]

    def inherited(self, row: int, pages: int, place: int) -> None:
        if any(entry.row == row for entry in self.small + self.main):
            return
        for queue in (self.small, self.main):
            for at, entry in enumerate(queue):
                if entry.row == place:
                    queue.insert(at + 1, _Entry(row, pages, entry.uses))
                    return

    def touched(self, rows: Sequence[int]) -> None:
        for row in rows:
            for entry in self.small + self.main:
                if entry.row == row:
                    entry.uses = min(3, entry.uses + 1)

    def removed(self, row: int) -> None:
        self.small = [entry for entry in self.small if entry.row != row]
        self.main = [entry for entry in self.main if entry.row != row]

    def evicted(self, row: int, name64: int) -> None:
        for entry in self.small:
            if entry.row == row:
                self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != name64]
                self.ghosts.append((name64, entry.pages))
                while sum(pages for _, pages in self.ghosts) > self.ghost_max:
                    self.ghosts.pop(0)
        self.removed(row)

    def candidate(self) -> int:
        while self.small or self.main:
            if sum(entry.pages for entry in self.small) > self.small_max or not self.main:
                entry = self.small.pop(0)
                if entry.uses == 0:
                    self.small.insert(0, entry)
                    return entry.row
                self.main.append(_Entry(entry.row, entry.pages))
            else:
                entry = self.main.pop(0)
                if entry.uses == 0:
                    self.main.insert(0, entry)
                    return entry.row
                self.main.append(_Entry(entry.row, entry.pages, entry.uses - 1))
        return -1


@dataclass
class Block:
    record: Record
    used: int  # the number of its last use
    position: int | None = None
    sessions: set[int] = field(default_factory=set)
    guards: dict[Guard, int] = field(default_factory=lambda: dict.fromkeys(Guard, 0))
    leaving: set[int] = field(default_factory=set)  # sessions that end before it, in the middle of saying so


class PlainCore:
    """The promises of the core under exact LRU; it checks each action of the core."""

    def __init__(self, marks: Watermarks) -> None:
        self.marks = marks
        self.draining = False
        self.blocks: dict[int, Block] = {}
        self.protected: dict[int, int] = {}  # sessions, and how many of their first positions
        self.uses = 0

    # What happens.

    def admitted(self, record: Record) -> Refusal | None:
        if record.generation in self.blocks:
            return Refusal.EXISTS
        self.uses += 1
        self.blocks[record.generation] = Block(record, self.uses)
        return self.joined(record.generation, record.session, record.position) if record.session else None

    def joined(self, generation: int, session: int, position: int) -> Refusal | None:
        block = self.blocks.get(generation)
        if block is None:
            return Refusal.UNKNOWN
        before = [other for other in self.members(session) if other.position == position]
        if before == [block]:
            return None
        if block.sessions and block.position != position:
            return Refusal.MOVED
        for other in before:
            other.sessions.remove(session)
            self._use(other)
        block.position = position
        block.sessions.add(session)
        return None

    def touched(self, generations: Iterable[int]) -> None:
        for generation in generations:
            if generation in self.blocks:
                self._use(self.blocks[generation])

    def hold(self, generation: int, guard: Guard) -> Refusal | None:
        if generation not in self.blocks:
            return Refusal.UNKNOWN
        self.blocks[generation].guards[guard] += 1
        return None

    def release(self, generation: int, guard: Guard) -> Refusal | None:
        block = self.blocks.get(generation)
        if block is None:
            return Refusal.UNKNOWN
        if block.guards[guard] == 0:
            return Refusal.NOT_HELD
        block.guards[guard] -= 1
        if not self.is_guarded(block):
            self._use(block)
        return None

    def protect(self, session: int, blocks: int) -> None:
        before = self.protected.get(session, 0)
        self.protected[session] = blocks
        for block in self.members(session):
            if blocks <= (block.position or 0) < before and not self.is_guarded(block):
                self._use(block)

    def unprotect(self, session: int) -> None:
        before = self.protected.pop(session)
        for block in self.members(session):
            if (block.position or 0) < before and not self.is_guarded(block):
                self._use(block)

    def left(self, session: int, first_position: int) -> None:
        leaving = [block for block in self.members(session) if (block.position or 0) >= first_position]
        for block in leaving:
            was_protected = (block.position or 0) < self.protected.get(session, 0)
            block.sessions.remove(session)
            lifted = was_protected and not self.is_guarded(block)
            block.sessions.add(session)
            if lifted:
                self._use(block)
        for block in reversed(leaving):
            block.leaving.add(session)
        for block in reversed(leaving):
            was_free = block in self.tails() and not self.is_guarded(block)
            tails_before = {id(tail) for tail in self.tails()}
            block.sessions.remove(session)
            block.leaving.remove(session)
            self._promote(tails_before, block, was_free=was_free)

    def forget(self, generation: int) -> None:
        block = self.blocks[generation]
        tails_before = {id(tail) for tail in self.tails()}
        was_free = id(block) in tails_before and not self.is_guarded(block)
        del self.blocks[generation]
        self._promote(tails_before, block, was_free=was_free)

    def _promote(self, tails_before: set[int], block: Block, *, was_free: bool) -> None:
        for tail in self.tails():
            if id(tail) not in tails_before and not self.is_guarded(tail):
                if was_free:
                    tail.used = max(tail.used, block.used)
                else:
                    self._use(tail)

    # What is so.

    def members(self, session: int) -> list[Block]:
        found = [block for block in self.blocks.values() if session in block.sessions]
        return sorted(found, key=lambda block: block.position or 0)

    def sessions(self) -> set[int]:
        return {session for block in self.blocks.values() for session in block.sessions}

    def tails(self) -> list[Block]:
        last = {session: self.members(session)[-1] for session in self.sessions()}
        return [
            block
            for block in self.blocks.values()
            if all(last[session] is block for session in block.sessions)
        ]

    def count(self, block: Block, guard: Guard) -> int:
        if guard is not Guard.PROTECTED:
            return block.guards[guard]
        by_sessions = [
            session
            for session in block.sessions - block.leaving
            if (block.position or 0) < self.protected.get(session, 0)
        ]
        return block.guards[guard] + len(by_sessions)

    def is_guarded(self, block: Block) -> bool:
        return any(self.count(block, guard) for guard in Guard)

    def is_whole(self, session: int) -> bool:
        positions = [block.position for block in self.members(session)]
        return positions == list(range(len(positions)))

    def stuck(self) -> Stuck:
        longest = [
            max(guard for guard in Guard if self.count(block, guard))
            for block in self.blocks.values()
            if self.is_guarded(block)
        ]
        return Stuck(min(longest) + Stuck.PINNED) if longest else Stuck.EMPTY

    def expired(self, now_ms: int) -> set[int]:
        return {
            generation
            for generation, block in self.blocks.items()
            if block.record.expires_ms
            and -(-block.record.expires_ms // TIMER_TICK_MS) <= now_ms // TIMER_TICK_MS
            and not self.is_guarded(block)
        }

    def goal(self, free: int, demand: int, waiting: int) -> tuple[Mode, int]:
        if free - demand < self.marks.low_pages:
            self.draining = True
        if free - demand >= self.marks.high_pages:
            self.draining = False
        wanted = self.marks.high_pages - (free - demand) if self.draining else 0
        if waiting:
            return Mode.URGENT, max(wanted, waiting)
        return (Mode.BACKGROUND if self.draining else Mode.IDLE), wanted

    def check_choice(self, generation: int, reason: Reason, *, exact_lru: bool) -> None:
        """Check the choice of an evicted block, before it is dropped here."""
        block = self.blocks[generation]
        assert not self.is_guarded(block)
        tails = self.tails()
        assert block in tails
        if reason is Reason.STRANDED:
            (session,) = block.sessions
            positions = [member.position for member in self.members(session)]
            assert positions != list(range(positions[0] or 0, (positions[-1] or 0) + 1)) or positions[0] != 0
        elif exact_lru:
            assert block.used == min(tail.used for tail in tails if not self.is_guarded(tail))

    def _use(self, block: Block) -> None:
        self.uses += 1
        block.used = self.uses
