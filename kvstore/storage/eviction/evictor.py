"""The core of eviction: which blocks are evicted, when, and why. It is notified of all changes to blocks.

What always holds: see the C code that does the work (`keep/core.c` and the files it names). Each call takes a batch,
and runs no Python per block. A call that contradicts what the core knows is an AssertionError; one for which there
is no memory is a MemoryError. Neither has changed anything.

It does no I/O, knows no names, and has no clock: `now_ms` is wall time, passed in.
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from kvstore.limits import (
    EVICTION_BATCH_BLOCKS,
    EVICTION_EXPIRED_AT_ONCE,
    EVICTION_SESSIONS_AT_ONCE,
    EVICTION_STEPS_MAX,
    EVICTION_URGENT_BLOCKS,
    GUARDS_OF_A_KIND_MAX,
    PROTECTED_SESSIONS_MAX,
    QUOTA_OWNERS_MAX,
    SESSION_BLOCKS_MAX,
    SESSION_LINKS_MIN,
    SESSION_LINKS_PER_BLOCK,
    TIMER_TICK_MS,
)
from kvstore.storage.eviction.pressure import Pressure
from kvstore.storage.eviction.types import (
    EVICTION_WORDS,
    EvictionPlan,
    Evictions,
    Guard,
    Mode,
    Reason,
    Record,
    Refusal,
    Standing,
    Statistics,
    Stuck,
    Tally,
    Watermarks,
)
from kvstore.storage.keep._keep import ffi, lib
from kvstore.storage.keep.outcome import check

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.storage.eviction.policy import Policy, Steps

__all__ = ["NEVER", "Evictor", "Uses"]

_REFUSALS: Final[tuple[Refusal | None, ...]] = (None, *Refusal)
_REASONS: Final = max(Reason) + 1
NEVER: Final = (1 << 64) - 1

assert ffi.sizeof("struct keep_record") == 8 * len(Record._fields)
assert ffi.sizeof("struct keep_gone") == 8 * EVICTION_WORDS
assert lib.KEEP_EXPIRED_AT_ONCE == EVICTION_EXPIRED_AT_ONCE


class Uses:
    """The number of uses so far, on all drives that share this."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = ffi.new("uint64_t *")

    def add(self, count: int) -> None:
        """Count uses that no core has seen."""
        self.kept[0] += count


class Evictor:
    """All blocks of one drive, and the order in which they are evicted."""

    def __init__(self, policy: Policy, marks: Watermarks, *, now_ms: int) -> None:
        self._policy = policy
        self._pressure = Pressure(marks)
        self._uses: Uses | None = None
        limits = ffi.new(
            "struct keep_limits *",
            (
                now_ms,
                TIMER_TICK_MS,
                SESSION_BLOCKS_MAX,
                SESSION_LINKS_MIN,
                SESSION_LINKS_PER_BLOCK,
                GUARDS_OF_A_KIND_MAX,
                PROTECTED_SESSIONS_MAX,
                QUOTA_OWNERS_MAX,
            ),
        )
        kept = lib.keep_core_new(policy.kept, policy.knows_names, limits)
        if not kept:
            raise MemoryError("There is no memory for the order in which blocks are evicted.")
        self._kept = ffi.gc(kept, lib.keep_core_free)
        self._said = ffi.new("struct keep_core_said *")
        self._steps = ffi.new("int64_t *")
        self._word = ffi.new("uint64_t *")
        self._planned = ffi.new("struct keep_planned *")
        self._room: array[int] | None = (
            None  # for victims: allocated before any is forgotten, so that none is lost
        )

    def __len__(self) -> int:
        return int(lib.keep_core_blocks(self._kept))

    @property
    def has_timers(self) -> bool:
        """Whether any block has an expiry."""
        return bool(lib.keep_core_expiring(self._kept))

    def __contains__(self, generation: int) -> bool:
        return bool(lib.keep_core_knows(self._kept, generation))

    # What happens to blocks.

    def restore(
        self,
        generations: array[int] | NDArray[np.uint64],
        pages: array[int] | NDArray[np.uint32],
        expiries_ms: array[int] | NDArray[np.uint64],
        starts: array[int] | NDArray[np.uint64] | None = None,
    ) -> None:
        """Add the blocks on the drive to an empty core, in ascending order of generations.

        Their uses are unknown, so they count as used in that order, before all later blocks.
        """
        starts = array("Q", bytes(8 * len(generations))) if starts is None else starts
        assert len(generations) == len(pages) == len(expiries_ms) == len(starts)
        check(
            lib.keep_core_restore(
                self._kept,
                ffi.from_buffer("uint64_t[]", generations),
                ffi.from_buffer("uint64_t[]", starts),
                ffi.from_buffer("uint32_t[]", pages),
                ffi.from_buffer("uint64_t[]", expiries_ms),
                len(generations),
            )
        )

    def admitted(self, records: Sequence[tuple[int, ...]], now_ms: int) -> dict[int, Refusal]:
        """Note blocks that gets can find from now on; return refusals: EXISTS of the block, others of its session.

        Each is a `Record`, or the same as a plain tuple.
        """
        return self.admitted_words(array("Q", chain.from_iterable(records)), now_ms)

    def admitted_words(self, words: array[int], now_ms: int) -> dict[int, Refusal]:
        """Note blocks as `admitted` does, given the fields of all `Record`s in one array."""
        fields = len(Record._fields)
        refused = bytearray(len(words) // fields)
        assert len(words) == len(refused) * fields
        count = lib.keep_core_admitted(
            self._kept,
            ffi.from_buffer("struct keep_record[]", words),
            len(refused),
            now_ms,
            ffi.from_buffer("uint8_t[]", refused),
        )
        return _refusals(check(count), words[::fields] if count else (), refused)

    def own(self, generations: array[int], owner: int) -> None:
        """Note the owner of these blocks, which are all that it has, oldest first.

        Only the time of their last use and their age are known of their order, and nothing across several drives. So
        they are spread evenly over the stamps given so far, of which there are as many, oldest first.
        """
        column = ffi.from_buffer("uint64_t[]", generations)
        check(lib.keep_core_own(self._kept, column, len(generations), owner))

    def share_uses(self, uses: Uses) -> None:
        """Count uses together with all that share this."""
        self._uses = uses
        lib.keep_core_share_uses(self._kept, uses.kept)

    def owned_pages(self, owner: int) -> int:
        """Return how many pages an owner's blocks have."""
        return int(lib.keep_core_owned_pages(self._kept, owner))

    def joined(
        self, generations: Sequence[int], session: int, first_position: int, now_ms: int
    ) -> dict[int, Refusal]:
        """Note that kept blocks are in a session, one after the other; returns refusals.

        Blocks that were at these positions leave the session: it was continued differently.
        """
        refused = bytearray(len(generations))
        count = lib.keep_core_joined(
            self._kept,
            _column(generations),
            len(generations),
            session,
            first_position,
            now_ms,
            ffi.from_buffer("uint8_t[]", refused),
        )
        return _refusals(check(count), generations, refused)

    def touched(self, generations: Sequence[int], now_ms: int) -> None:
        """Note uses, in their order; blocks that are not kept are ignored."""
        lib.keep_core_touched(self._kept, _column(generations), len(generations), now_ms)

    def renewed(self, generation: int, expires_ms: int) -> None:
        """Note that a block has a new expiry; 0: never."""
        check(lib.keep_core_renewed(self._kept, generation, expires_ms))

    def moved(self, generation: int, to: int, start: int = 0) -> int:
        """Note that a block has another generation, and another place.

        Returns how many guards it has that must be taken back.
        """
        return check(lib.keep_core_moved(self._kept, generation, to, start))

    def left(self, session: int, first_position: int, now_ms: int) -> None:
        """Note that a session ends before a position: blocks from there on are as old as its tail was."""
        lib.keep_core_left(self._kept, session, first_position, now_ms)

    def gone(self, generations: Sequence[int], reason: Reason, now_ms: int) -> Evictions:
        """Note that blocks are gone for a reason that was not decided here; return those that were kept."""
        words = _room(len(generations))
        count = lib.keep_core_gone(
            self._kept,
            _column(generations),
            len(generations),
            reason,
            now_ms,
            ffi.from_buffer("struct keep_gone[]", words),
        )
        del words[check(count) * EVICTION_WORDS :]
        return Evictions(words)

    # Guards.

    def hold(self, generations: Sequence[int], guard: Guard) -> dict[int, Refusal]:
        """Guard each of these blocks once more; return refusals."""
        refused = bytearray(len(generations))
        count = lib.keep_core_hold(
            self._kept,
            _column(generations),
            len(generations),
            guard,
            ffi.from_buffer("uint8_t[]", refused),
        )
        return _refusals(check(count), generations, refused)

    def release(self, generations: Sequence[int], guard: Guard, now_ms: int) -> dict[int, Refusal]:
        """Release one guard of each block; return refusals. Releasing the last one counts as a use."""
        refused = bytearray(len(generations))
        count = lib.keep_core_release(
            self._kept,
            _column(generations),
            len(generations),
            guard,
            now_ms,
            ffi.from_buffer("uint8_t[]", refused),
        )
        return _refusals(check(count), generations, refused)

    def protect_session(
        self, session: int, blocks: int = SESSION_BLOCKS_MAX, *, now_ms: int
    ) -> Refusal | None:
        """Protect a session's first blocks, current and future ones, until it is unprotected.

        The last call decides: fewer blocks than before unprotect the others.
        """
        return _REFUSALS[check(lib.keep_core_protect(self._kept, session, blocks, now_ms))]

    def protected_blocks(self, session: int) -> int:
        """Return how many of a session's first blocks are protected."""
        return int(lib.keep_core_protected_blocks(self._kept, session))

    def unprotect_session(self, session: int, now_ms: int) -> Refusal | None:
        """End the protection of a session's blocks; this counts as a use of them."""
        return _REFUSALS[check(lib.keep_core_unprotect(self._kept, session, now_ms))]

    def is_guarded(self, generation: int) -> bool:
        """Return whether a kept block may not be evicted."""
        return bool(lib.keep_core_is_guarded(self._kept, generation))

    def places(self, generation: int) -> tuple[list[int], int]:
        """Return the sessions that have a block, and its position in all of them."""
        room = EVICTION_SESSIONS_AT_ONCE
        while True:
            sessions = array("Q", bytes(8 * room))
            out = ffi.from_buffer("uint64_t[]", sessions)
            count = int(lib.keep_core_places(self._kept, generation, out, room, self._word))
            if count <= room:
                return sessions[:count].tolist(), int(self._word[0])
            room = count

    def lacks(self, session: int, position: int) -> bool:
        """Return whether a block at this position would extend the session, or fill a gap in it."""
        return bool(lib.keep_core_lacks(self._kept, session, position))

    def at(self, start: int) -> Standing | None:
        """Return the block that begins at a page."""
        pages = int(lib.keep_core_at(self._kept, start, self._word))
        return Standing(int(self._word[0]), pages) if pages else None

    @property
    def protected_pages(self) -> int:
        """Return the pages of protected blocks."""
        return int(lib.keep_core_protected_pages(self._kept))

    @property
    def knows_names(self) -> bool:
        """Return whether names in records are used here."""
        return self._policy.knows_names

    # Evictions.

    def plan(
        self, *, free_pages: int, demand_pages: int = 0, waiting_pages: int = 0, now_ms: int
    ) -> EvictionPlan:
        """Choose blocks to evict now and forget them; expired ones first, then, if room is needed, others.

        `demand_pages`: pages that puts under way have not allocated yet; `waiting_pages`: pages, not among those, for
        a put that found no room.
        """
        if self._room is None:
            self._room = _room(EVICTION_URGENT_BLOCKS)
        goal = self._pressure.judge(free_pages, demand_pages, waiting_pages)
        lib.keep_core_plan(
            self._kept,
            max(0, goal.pages),
            EVICTION_URGENT_BLOCKS if goal.mode is Mode.URGENT else EVICTION_BATCH_BLOCKS,
            EVICTION_STEPS_MAX,
            now_ms,
            ffi.from_buffer("struct keep_gone[]", self._room),
            self._planned,
        )
        planned = self._planned
        stuck = Stuck(planned.stuck) if planned.stuck else None
        more = bool(planned.lags) or (planned.pages < goal.pages and stuck is None)
        victims = Evictions()
        if planned.blocks:
            victims.words, self._room = self._room, None
            del victims.words[planned.blocks * EVICTION_WORDS :]
        return EvictionPlan(goal.mode, victims, int(planned.pages), more, stuck)

    def oldest_use(self, owner: int, steps: Steps) -> int | None:
        """Return the last use, by number, of the owner's block to be evicted first; None: none may be."""
        self._steps[0] = steps.left
        use = int(lib.keep_core_oldest_use(self._kept, owner, self._steps))
        steps.left = self._steps[0]
        return None if use == lib.KEEP_NONE else check(use)

    def evict_oldest(
        self, owner: int, pages: int, blocks_max: int, steps: Steps, now_ms: int, *, before: int = NEVER
    ) -> Evictions:
        """Forget blocks of an owner that has to make room for itself, the least recently used first.

        It ends at the limit of pages or of blocks, when the steps are used up, or when the next block was not used
        before the given use.
        """
        words = _room(blocks_max)
        self._steps[0] = steps.left
        count = lib.keep_core_evict_oldest(
            self._kept,
            owner,
            pages,
            blocks_max,
            before,
            self._steps,
            now_ms,
            ffi.from_buffer("struct keep_gone[]", words),
        )
        steps.left = self._steps[0]
        del words[count * EVICTION_WORDS :]
        return Evictions(words)

    def statistics(self) -> Statistics:
        """Return the state of the core."""
        said = self._said
        lib.keep_core_say(self._kept, said)
        guarded = ffi.unpack(said.guarded, len(Guard))
        tallies = [*map(Tally, ffi.unpack(said.gone_blocks, _REASONS), ffi.unpack(said.gone_pages, _REASONS))]
        return Statistics(
            policy=self._policy.name,
            mode=self._pressure.mode,
            blocks=len(self),
            pages=said.pages,
            expiring=int(lib.keep_core_expiring(self._kept)),
            sessions=said.sessions,
            session_links=said.links,
            protected_sessions=said.protected_sessions,
            guarded=dict(zip(Guard, guarded, strict=True)),
            timers_lag=bool(said.lags),
            gone={reason: tallies[reason] for reason in Reason},
            space_idle_ms=said.space_idle_ms,
        )


def _room(evictions: int) -> array[int]:
    return array("Q", bytes(8 * EVICTION_WORDS * evictions))


def _column(numbers: Iterable[int]) -> Any:
    return ffi.from_buffer("uint64_t[]", numbers if isinstance(numbers, array) else array("Q", numbers))


def _refusals(count: int, generations: Iterable[int], refused: bytearray) -> dict[int, Refusal]:
    if not count:
        return {}
    found = ((one, _REFUSALS[number]) for one, number in zip(generations, refused, strict=True))
    return {one: refusal for one, refusal in found if refusal is not None}
