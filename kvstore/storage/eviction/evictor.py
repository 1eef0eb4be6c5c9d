"""The core of eviction: which blocks are evicted, when, and why. It is notified of all changes to blocks.

Always holds:

- A block with a guard is not evicted, whatever its age or time to live. One that expires meanwhile is removed when
  its last guard ends.
- A block is evicted for room only while it is a tail (see `chains`), so what remains of a session is a prefix. Blocks
  after a gap with another cause are evicted before all others.
- A use of a block counts as a use of all blocks before it in its sessions, since they are needed with it. So under
  LRU the least recently used block is always a tail, and exactly that one is evicted.
- Guards end with a use: lifting the last one touches the block.
- The policy holds the rows that may be evicted; others are *set aside*, lazily: when the policy offers one that may
  not. No unguarded tail is set aside.
- The same holds for the blocks of each owner among themselves (see `owners`), which are evicted in LRU order when the
  owner makes room for itself, whatever the policy.
- `EVICTION_STEPS_MAX` bounds a plan; all other operations take time in proportion to their arguments.

It does no I/O, knows no names and no extents, and has no clock: `now_ms` is wall time, passed in. Blocks are numbered
by rows inside, and by their generations outside.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvstore.limits import (
    EVICTION_BATCH_BLOCKS,
    EVICTION_STEPS_MAX,
    EVICTION_URGENT_BLOCKS,
    PROTECTED_SESSIONS_MAX,
    SESSION_BLOCKS_MAX,
    TIMER_TICK_MS,
)
from kvstore.storage.eviction.chains import Chains
from kvstore.storage.eviction.guards import Guards
from kvstore.storage.eviction.idmap import IdMap
from kvstore.storage.eviction.items import (
    Eviction,
    EvictionPlan,
    Guard,
    Mode,
    Reason,
    Record,
    Refusal,
    Statistics,
    Tally,
    Watermarks,
)
from kvstore.storage.eviction.owners import Owners
from kvstore.storage.eviction.policy import NO_ROW, Steps
from kvstore.storage.eviction.pressure import Pressure
from kvstore.storage.eviction.wheel import TimerWheel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.storage.eviction.policy import Policy

__all__ = ["Evictor"]

_SMALLEST_RECORD_PAGES = 2  # a header and one page
_WORD_MAX = (1 << 64) - 1
_ROWS_AT_ONCE = 64  # are made
_FOR_ROOM = frozenset({Reason.SPACE, Reason.STRANDED, Reason.QUOTA})
# The bits of a row's state:
_ASIDE = 1  # the policy doesn't have it
_OVERDUE = 2  # it has expired while it was guarded


class Evictor:
    """All blocks of one drive, and the order in which they go."""

    def __init__(self, policy: Policy, marks: Watermarks, *, capacity_pages: int, now_ms: int) -> None:
        self._policy = policy
        self._pressure = Pressure(marks)
        self._protected: dict[int, int] = {}  # sessions, and how many of the first positions of each
        self._start_ms = now_ms
        self._rows = IdMap(capacity_pages // _SMALLEST_RECORD_PAGES)
        self._wheel = TimerWheel(now_ms)
        self._chains = Chains()
        self._pages = array("I")  # of each row
        self._guards = Guards(self._pages)
        self.owners = Owners()
        self._free_rows = array("I")
        self._total_pages = 0
        self._gone = {reason: Tally(0, 0) for reason in Reason}
        self._space_idle_ms = 0
        # Of each row:
        self._generations = array("Q")
        self._names = array("Q")
        self._used = array("I")  # ticks from the start to its last use
        self._states = bytearray()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_timers(self) -> bool:
        """Whether any block is to expire."""
        return len(self._wheel) > 0

    def __contains__(self, generation: int) -> bool:
        return self._rows.find(generation) >= 0

    # What happens to blocks.

    def restore(self, generations: array[int], pages: array[int], expiries_ms: Sequence[int]) -> None:
        """Take what is on the drive into an empty core, in ascending order of generations.

        Their uses are unknown, so they count as used in that order, before all later blocks.
        """
        assert not self._generations
        count = len(generations)
        self._rows.add_all(generations, 0)
        self._generations.extend(generations)
        self._pages.extend(pages)
        self._names.frombytes(bytes(self._names.itemsize * count))
        self._used.frombytes(bytes(self._used.itemsize * count))
        self._states.extend(bytes(count))
        self._guards.reach(count - 1)
        self._chains.reach(count - 1)
        self._total_pages = sum(pages)
        self._wheel.insert_all(0, expiries_ms)
        self._policy.restored(pages)

    def admitted(self, records: Sequence[Record], now_ms: int) -> dict[int, Refusal]:
        """Note blocks that can be got from now on; return those refused: EXISTS as a whole, others their session."""
        refused = {}
        tick = self._tick(now_ms)
        free = self._free_rows
        self._reach(len(records) - len(free))
        add, policy_admitted = self._rows.add, self._policy.admitted
        for generation, pages, name64, expires_ms, session, position, owner in records:
            row = free[-1]
            if not add(generation, row):
                refused[generation] = Refusal.EXISTS
                continue
            assert pages > 0
            assert session <= _WORD_MAX
            del free[-1]
            self._generations[row] = generation
            self._names[row] = name64
            self._pages[row] = pages
            self._used[row] = tick
            self._states[row] = 0
            self._total_pages += pages
            if expires_ms:
                self._wheel.insert(row, expires_ms)
            policy_admitted(row, pages, name64)
            if owner:
                self.owners.take(row, owner, pages)
            if session:
                refusal = self._settle(row, session, position, now_ms)
                if refusal is not None:
                    refused[generation] = refusal
        return refused

    def own(self, generations: Sequence[int], owner: int) -> None:
        """Note whose blocks these are, all that it has; they are given in the order of their age.

        Nobody knows more of their order than the time of their last use and their age, and nothing of it among several
        drives. So they are spread evenly over the stamps given so far, of which there are as many, oldest first.
        """
        rows = self._rows.find_all(generations)
        rows.sort(key=self._used.__getitem__)
        self.owners.take_all(rows, owner, sum(map(self._pages.__getitem__, rows)))

    def joined(
        self, generations: Sequence[int], session: int, first_position: int, now_ms: int
    ) -> dict[int, Refusal]:
        """Note that kept blocks are in a session, one after the other; returns those refused.

        What stood at a place before has left the session by it: the session went on differently.
        """
        assert 0 < session <= _WORD_MAX
        if not first_position and session not in self._protected:
            rows = self._rows.find_all(generations)
            if len(rows) == len(generations) and self._chains.open_with(session, rows):
                return {}
        refused = {}
        for position, generation in enumerate(generations, first_position):
            row = self._rows.find(generation)
            refusal = Refusal.UNKNOWN if row < 0 else self._settle(row, session, position, now_ms)
            if refusal is not None:
                refused[generation] = refusal
        return refused

    def touched(self, generations: Sequence[int], now_ms: int) -> None:
        """Note uses, in their order; blocks that are not kept are passed over."""
        self._use(self._rows.find_all(generations), now_ms)

    def renewed(self, generation: int, expires_ms: int) -> None:
        """Note that a block expires at another time than was said; 0 is never."""
        row = self._rows.find(generation)
        if row < 0:
            return
        self._wheel.cancel(row)
        self._states[row] &= ~_OVERDUE
        self._wheel.insert(row, expires_ms)

    def moved(self, generation: int, to: int) -> int:
        """Note that a block has another generation; return how many guards it has that somebody is to take back."""
        row = self._rows.find(generation)
        self._rows.remove(generation)
        added = self._rows.add(to, row)
        assert added
        self._generations[row] = to
        return sum(self._guards.count(row, guard) for guard in Guard if guard is not Guard.PROTECTED)

    def left(self, session: int, first_position: int, now_ms: int) -> None:
        """Note that a session ends before a position: blocks from there on are as old as its tail was."""
        rows = self._chains.rows(session, first_position)
        if first_position < self._protected.get(session, 0):
            lifted = [row for row in rows if self._unprotect(session, row)]
            self._lift(lifted, now_ms)
        for row in reversed(rows):
            was_free = self._may_go(row)
            self._pass_on(row, self._chains.leave(row, session), now_ms, was_free=was_free)

    def gone(self, generations: Sequence[int], reason: Reason, now_ms: int) -> list[Eviction]:
        """Note that blocks are gone for a reason that was not decided here; return those that were kept."""
        rows = dict.fromkeys(self._rows.find_all(generations))  # each once, though it may be named twice
        return [self._forget(row, reason, now_ms) for row in rows]

    # Guards.

    def hold(self, generations: Sequence[int], guard: Guard) -> dict[int, Refusal]:
        """Guard blocks, each once more; return those refused."""
        refused = {}
        for generation in generations:
            row = self._rows.find(generation)
            refusal = Refusal.UNKNOWN if row < 0 else self._guards.add(row, guard)
            if refusal is not None:
                refused[generation] = refusal
        return refused

    def release(self, generations: Sequence[int], guard: Guard, now_ms: int) -> dict[int, Refusal]:
        """Take one guard of each block back; return those refused. The last one's end is a use."""
        refused = {}
        lifted = []
        for generation in generations:
            row = self._rows.find(generation)
            refusal = Refusal.UNKNOWN if row < 0 else self._drop_guard(row, guard)
            if refusal is not None:
                refused[generation] = refusal
            elif not self._guards.words[row]:
                lifted.append(row)
        self._lift(lifted, now_ms)
        return refused

    def protect_session(
        self, session: int, blocks: int = SESSION_BLOCKS_MAX, *, now_ms: int
    ) -> Refusal | None:
        """Let nothing of a session's first blocks go, what it has and what it will have, until it is unprotected.

        The last word counts: fewer blocks than before unprotect the others.
        """
        assert 0 < blocks <= SESSION_BLOCKS_MAX
        before = self._protected.get(session, 0)
        if not before and len(self._protected) >= PROTECTED_SESSIONS_MAX:
            return Refusal.FULL
        rows = self._chains.rows(session, min(before, blocks), max(before, blocks))
        if blocks < before:
            self._lift([row for row in rows if self._unprotect(session, row)], now_ms)
        self._protected[session] = blocks
        for row in rows if before < blocks else ():
            self._guards.add_for_session(row)
        return None

    def protected_blocks(self, session: int) -> int:
        """Return how many of a session's first blocks are protected."""
        return self._protected.get(session, 0)

    def unprotect_session(self, session: int, now_ms: int) -> Refusal | None:
        """Let a session's blocks go again; this counts as a use of them."""
        if session not in self._protected:
            return Refusal.NOT_HELD
        rows = self._chains.rows(session, 0, self._protected[session])
        lifted = [row for row in rows if self._unprotect(session, row)]
        del self._protected[session]
        self._lift(lifted, now_ms)
        return None

    def is_guarded(self, generation: int) -> bool:
        """Return whether a block that is kept may not go."""
        row = self._rows.find(generation)
        return row >= 0 and self._guards.words[row] != 0

    def places(self, generation: int) -> tuple[list[int], int]:
        """Return the sessions that have a block, and its position in all of them."""
        row = self._rows.find(generation)
        sessions = [] if row < 0 else list(self._chains.sessions(row))
        return sessions, self._chains.position(row) if sessions else 0

    def lacks(self, session: int, position: int) -> bool:
        """Return whether a session would go on, or have a gap less, with a block at this position."""
        if self._chains.at(session, position) != NO_ROW:
            return False
        return position == 0 or self._chains.at(session, position - 1) != NO_ROW

    @property
    def protected_pages(self) -> int:
        """Return how many pages are of blocks that are protected."""
        return self._guards.protected_pages

    @property
    def knows_names(self) -> bool:
        """Return whether the names in records are of any use here."""
        return self._policy.knows_names

    # What goes.

    def plan(
        self, *, free_pages: int, demand_pages: int = 0, waiting_pages: int = 0, now_ms: int
    ) -> EvictionPlan:
        """Choose blocks to evict now and forget them; expired ones first, then, if room is needed, others.

        `demand_pages` is what puts under way have not allocated yet; `waiting_pages` what a put needs that found
        no room, and is not in it.
        """
        goal = self._pressure.judge(free_pages, demand_pages, waiting_pages)
        blocks_max = EVICTION_URGENT_BLOCKS if goal.mode is Mode.URGENT else EVICTION_BATCH_BLOCKS
        victims = self._expired(blocks_max, now_ms)
        pages = sum(victim.pages for victim in victims)
        steps = Steps(EVICTION_STEPS_MAX)
        stuck = None
        while pages < goal.pages and len(victims) < blocks_max:
            reason = Reason.STRANDED
            row = self._stranded()
            if row == NO_ROW:
                reason = Reason.SPACE
                row = self._candidate(steps)
            if row == NO_ROW:
                stuck = self._guards.what_is_over_soonest() if steps.left > 0 else None
                break
            victims.append(self._forget(row, reason, now_ms))
            pages += victims[-1].pages
        more = self._wheel.lagging or (pages < goal.pages and stuck is None)
        return EvictionPlan(goal.mode, victims, pages, more, stuck)

    def oldest_use(self, owner: int, steps: Steps) -> int | None:
        """Return when the block of an owner that goes first was used, as the number of the use; None: none may go."""
        while (row := self.owners.oldest(owner)) != NO_ROW:
            if self._may_go(row):
                return self.owners.stamp(row)
            if steps.left <= 0:
                return None
            self.owners.set_aside(row)
            steps.left -= 1
        return None

    def evict_oldest(self, owner: int, now_ms: int) -> Eviction:
        """Forget that block, whose owner is to make room for itself."""
        row = self.owners.oldest(owner)
        assert self._may_go(row), "`oldest_use` has just found it"
        return self._forget(row, Reason.QUOTA, now_ms)

    def statistics(self) -> Statistics:
        """Return where the core stands."""
        return Statistics(
            policy=self._policy.name,
            mode=self._pressure.mode,
            blocks=len(self._rows),
            pages=self._total_pages,
            expiring=len(self._wheel),
            sessions=len(self._chains),
            session_links=self._chains.links,
            protected_sessions=len(self._protected),
            guarded=self._guards.tally(),
            timers_lag=self._wheel.lagging,
            gone=dict(self._gone),
            space_idle_ms=self._space_idle_ms,
        )

    def _tick(self, now_ms: int) -> int:
        return max(0, now_ms - self._start_ms) // TIMER_TICK_MS

    def _reach(self, missing: int) -> None:
        """Make at least this many more rows; they are taken behind those that are free, the lowest first."""
        if missing > 0:
            missing = max(missing, _ROWS_AT_ONCE)
            first = len(self._generations)
            for column in (self._generations, self._names, self._pages, self._used):
                column.frombytes(bytes(column.itemsize * missing))
            self._states.extend(bytes(missing))
            self._chains.reach(first + missing - 1)
            self._guards.reach(first + missing - 1)
            self._free_rows[:0] = array("I", range(first + missing - 1, first - 1, -1))

    def _settle(self, row: int, session: int, position: int, now_ms: int) -> Refusal | None:
        """Put a row at a position of a session, replacing any other row there."""
        before = self._chains.at(session, position)
        if before == row:
            return None
        refusal = self._chains.refusal(row, position, len(self._rows))
        if refusal is not None:
            return refusal
        if before != NO_ROW:
            # The block in front of it is a tail for a moment only: the row that comes will stand behind it.
            self._unprotect(session, before)
            self._chains.leave(before, session)
            self._lift([before], now_ms)
        self._chains.join(row, session, position)
        if position < self._protected.get(session, 0):
            self._guards.add_for_session(row)
        return None

    def _use(self, rows: Sequence[int], now_ms: int) -> None:
        tick = self._tick(now_ms)
        used, states = self._used, self._states
        for row in rows:
            used[row] = tick
            if states[row] & _ASIDE:
                states[row] ^= _ASIDE
                self._policy.readmitted(row, self._pages[row])
        self._policy.touched(rows)
        self.owners.touch(rows)

    def _drop_guard(self, row: int, guard: Guard) -> Refusal | None:
        if guard is Guard.PROTECTED:
            by_sessions = sum(self._is_protected_by(session, row) for session in self._chains.sessions(row))
            if self._guards.count(row, guard) == by_sessions:
                return Refusal.NOT_HELD  # what its sessions hold is not to be taken back like this
        return self._guards.drop(row, guard)

    def _is_protected_by(self, session: int, row: int) -> bool:
        return self._chains.position(row) < self._protected.get(session, 0)

    def _unprotect(self, session: int, row: int) -> bool:
        """Take back what a session holds of a row of its own; return whether that was the row's last guard."""
        if not self._is_protected_by(session, row):
            return False
        self._guards.drop(row, Guard.PROTECTED)
        return not self._guards.words[row]

    def _may_go(self, row: int) -> bool:
        return not self._guards.words[row] and not self._chains.followed[row]

    def _lift(self, rows: Sequence[int], now_ms: int) -> None:
        """Note a use of rows whose guards have been changed; those unguarded may expire again."""
        for row in rows:
            if self._states[row] & _OVERDUE and not self._guards.words[row]:
                self._states[row] ^= _OVERDUE
                self._wheel.insert_again(row)
        self._use(rows, now_ms)

    def _expired(self, blocks_max: int, now_ms: int) -> list[Eviction]:
        victims = []
        for row in self._wheel.advance(now_ms, blocks_max, EVICTION_STEPS_MAX):
            if self._guards.words[row]:
                self._states[row] |= _OVERDUE
            else:
                victims.append(self._forget(row, Reason.EXPIRED, now_ms))
        return victims

    def _stranded(self) -> int:
        """Return an evictable block after a gap, or `NO_ROW`. If the last one is not evictable, the policy decides."""
        while (row := self._chains.stranded()) != NO_ROW and self._guards.words[row]:
            self._chains.leave_stranded()
        return row

    def _candidate(self, steps: Steps) -> int:
        """Return the policy's choice among the blocks that may go, setting aside those that may not."""
        while (row := self._policy.candidate(steps)) != NO_ROW:
            if self._may_go(row):
                return row
            self._policy.removed(row)
            self._states[row] |= _ASIDE
            steps.left -= 1
            if steps.left <= 0:
                return NO_ROW
        return NO_ROW

    def _forget(self, row: int, reason: Reason, now_ms: int) -> Eviction:
        eviction = self._describe(row, reason, now_ms)
        aside = self._states[row] & _ASIDE
        if eviction.session:
            was_free = self._may_go(row)
            self._pass_on(row, self._chains.leave(row), now_ms, was_free=was_free)
        if reason in _FOR_ROOM:
            self._policy.evicted(row, self._names[row])
        elif not aside:
            self._policy.removed(row)
        self._wheel.cancel(row)
        if self._guards.words[row]:
            self._guards.clear(row)
        self._rows.remove(eviction.generation)
        self._free_rows.append(row)
        self.owners.leave(row, eviction.pages)
        self._total_pages -= eviction.pages
        self._pages[row] = 0
        blocks, pages = self._gone[reason]
        self._gone[reason] = Tally(blocks + 1, pages + eviction.pages)
        if reason is Reason.SPACE:
            self._space_idle_ms = eviction.idle_ms
        return eviction

    def _pass_on(self, row: int, tails: Iterable[int], now_ms: int, *, was_free: bool) -> None:
        """Return the blocks that are tails now, since this one is not behind them any more, its rank."""
        for tail in tails:
            if self._guards.words[tail]:
                continue
            if was_free:
                self._states[tail] &= ~_ASIDE
                self._policy.inherited(tail, self._pages[tail], row)
                self.owners.inherit(tail, row)
            else:  # it had no rank to leave behind
                self._use([tail], now_ms)

    def _describe(self, row: int, reason: Reason, now_ms: int) -> Eviction:
        session = self._chains.last_session(row)
        return Eviction(
            self._generations[row],
            self._pages[row],
            session,
            self._chains.position(row) if session else 0,
            reason,
            now_ms,
            max(0, self._tick(now_ms) - self._used[row]) * TIMER_TICK_MS,
        )
