"""Reports to the eviction core: every block that enters or leaves the index.

Always holds:

- The core knows exactly the blocks that are in the index, from the opening on, and where each lies.
- A block is guarded while a get reads it, and while a put of it waits for a sync; a request for a block is a use.
- A block leaves the index with a reason, and the latest reasons are remembered.
- A session's stored blocks are in the core in the order of its manifest. A block that is replaced passes on its places
  in all its sessions; one that is stored again takes its place again, if the last session it was in has a gap there.
- Blocks that a session's manifest protects are protected from the opening on, before anything may be evicted.

It decides nothing: the core does, at the request of `kvstore.storage.reclaim`. Other guards end with the process.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from kvstore.config import show_size
from kvstore.errors import NoSpace, ReadOnly, StorageError
from kvstore.limits import (
    EVICTION_LOW_PAGES_MAX,
    EVICTIONS_REMEMBERED,
    PAGE_BYTES,
    PROTECTED_SESSIONS_MAX,
    SESSION_STEP_BLOCKS,
)
from kvstore.miss import Miss, MissReason
from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.policies import new_policy
from kvstore.storage.eviction.removals import History
from kvstore.storage.eviction.types import EVICTION_WORDS, Eviction, Guard, Reason, Record, Watermarks
from kvstore.storage.index import entries_in
from kvstore.storage.index_layout import names_in, names_of, record_pages, rows_of_entries
from kvstore.storage.pending_overwrites import PendingOverwrites
from kvstore.storage.session_space import SessionSpace
from kvstore.storage.stale_extents import StaleExtents
from kvstore.wire.record import record_bytes, records_begin

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.storage.deadlines import Deadlines
    from kvstore.storage.doubts import Doubts
    from kvstore.storage.eviction.types import Evictions, Refusal
    from kvstore.storage.index import Entry, Index, Name
    from kvstore.storage.manifests import Manifests, SessionName
    from kvstore.storage.scrubs import Scrubs
    from kvstore.storage.sealing import Keys
    from kvstore.storage.volume import Volume
    from kvstore.storage.wipes import Wipes
    from kvstore.storage.writes import Writes

__all__ = [
    "Explanation",
    "Held",
    "Keeping",
    "Listener",
    "Placed",
    "restore_sessions",
    "watermarks",
    "with_erased",
]

_AT: Final = {field: at for at, field in enumerate(Record._fields)}
_REASON_AT: Final = Eviction._fields.index("reason")
_LOW_FRACTION: Final = 64  # one in this many pages, but no more than
_FOR_ROOM: Final = frozenset({Reason.SPACE, Reason.STRANDED, Reason.CLEARED})
_MISSES: Final = {
    Reason.EXPIRED: MissReason.EXPIRED,
    Reason.QUOTA: MissReason.QUOTA,
    Reason.ERASED: MissReason.ERASED,
    Reason.QUARANTINED: MissReason.CORRUPT,
}
_OVERWRITTEN: Final = frozenset({Reason.QUARANTINED, Reason.ERASED})
_SAID: Final = {
    Reason.SPACE: "evicted for room",
    Reason.STRANDED: "evicted for room, since its session had a gap before it",
    Reason.CLEARED: "evicted for contiguous room",
    Reason.QUOTA: "evicted because its tenant was at the quota and put more",
    Reason.EXPIRED: "removed when its time to live had ended",
    Reason.SUPERSEDED: "replaced by a newer one",
    Reason.DELETED: "deleted",
    Reason.QUARANTINED: "dropped because it failed a check or could not be read",
    Reason.ERASED: "erased",
}


Listener: TypeAlias = "Callable[[NDArray[Any], Reason | None], None]"
"""Called once a batch with the index's rows of blocks that were stored or, with a reason, removed."""


Placed: TypeAlias = "Callable[[NDArray[Any]], None]"
"""Called once a batch with the rows of blocks that were stored."""


class Held(NamedTuple):
    """A guarded block: what to release."""

    name: Name
    generation: int


class Explanation(NamedTuple):
    """Where a block is, or why it is gone."""

    stored: bool  # a get finds it, unless it has expired or fails a check
    doubted: bool  # not checked since a crash
    gone: Eviction | None  # the last removal of a block of its name, if that is remembered
    now_ms: int
    erased_ms: int | None = None  # when the domain of its key was erased, if nothing else is known

    def __str__(self) -> str:
        """The explanation in one sentence."""
        if self.stored and self.doubted:
            return "The block was found after a crash, and has not been checked yet."
        if self.stored:
            return "The block is stored."
        if self.erased_ms is not None:
            since_s = (self.now_ms - self.erased_ms) / 1000
            return (
                f"The block's erase domain was erased {since_s:.1f} s ago, with all blocks that it had then."
            )
        if self.gone is None:
            return "The block was never stored here, or was removed too long ago to be remembered."
        since_s, idle_s = (self.now_ms - self.gone.at_ms) / 1000, self.gone.idle_ms / 1000
        return f"The block was {_SAID[self.gone.reason]} {since_s:.1f} s ago, after {idle_s:.1f} s idle."

    @property
    def gone_ms(self) -> int:
        """Return when it was removed; 0 if that isn't known."""
        return (self.erased_ms or 0) if self.gone is None else self.gone.at_ms

    @property
    def miss(self) -> Miss:
        """Return the outcome of a get of a block that is not stored."""
        if self.erased_ms is not None:
            return Miss(MissReason.ERASED, "its erase domain was erased")
        if self.gone is None:
            return Miss(MissReason.UNKNOWN)
        if self.gone.reason in _FOR_ROOM:
            reason = MissReason.EVICTED
        else:
            reason = _MISSES.get(self.gone.reason, MissReason.UNKNOWN)
        return Miss(reason, f"it was {_SAID[self.gone.reason]}")


def watermarks(capacity_pages: int) -> Watermarks:
    """Return how much of a drive is kept free so that puts needn't wait."""
    low = min(capacity_pages // _LOW_FRACTION, EVICTION_LOW_PAGES_MAX)
    return Watermarks(low, 2 * low)


class Keeping:
    """The eviction core of one drive, with everything that is reported to it."""

    def __init__(
        self,
        index: Index,
        writes: Writes,
        wipes: Wipes,
        scrubs: Scrubs,
        doubts: Doubts,
        volume: Volume,
        clock: Clock,
        policy: str,
    ) -> None:
        superblock = volume.superblock
        first, until = records_begin(superblock.capacity_bytes), superblock.capacity_bytes
        pages = (until - first) // PAGE_BYTES
        self._pages = pages
        self._index = index
        self._writes = writes
        self._wipes = wipes
        self._scrubs = scrubs
        self.left = StaleExtents(index, writes, wipes, scrubs)
        self.leaving = PendingOverwrites(index, self.left, wipes, scrubs)
        self._doubts = doubts
        self._clock = clock
        self._secret = superblock.secret
        self._keys = volume.keys
        self.marks = watermarks(pages)
        self.core = Evictor(new_policy(policy, pages), self.marks, now_ms=clock.wall_ms())
        self.space = SessionSpace(pages)
        self._history = History(EVICTIONS_REMEMBERED)
        self.listener: Listener | None = None
        self.placed: Placed | None = None  # gets the places of blocks, before the listener
        self.owner_numbers: Mapping[bytes, int] = {}  # of tenants that have a quota
        self.erasing: Counter[bytes] = Counter()  # erasures under way, by tenant; they remove their blocks
        self.quarantined = 0  # since the opening
        self.protected: set[SessionName] = set()
        self.plain_bytes = 0  # of blocks in the clear, while there may be any
        self.leaves_some = False  # some pages stay as they are, and unused, until the next opening
        self._moved: dict[int, tuple[int, int]] = {}  # generations that blocks had when they were guarded
        self._places: dict[Name, tuple[list[int], int]] = {}  # of blocks that are being replaced

    # Entering.

    def published_rows(self, rows: NDArray[Any]) -> None:
        """Note blocks that are in the index now, given as its rows."""
        now_ms = self._clock.wall_ms()
        records = np.zeros((len(rows), len(Record._fields)), np.uint64)
        records[:, _AT["generation"]] = rows["generation"]
        records[:, _AT["pages"]] = record_pages(rows["length"])
        records[:, _AT["expires_ms"]] = rows["expires_ms"]
        records[:, _AT["start"]] = rows["offset"] // PAGE_BYTES
        if self.core.knows_names:
            records[:, _AT["name64"]] = [self._digest(*name) for name in names_of(rows)]
        if self.owner_numbers:
            tenants: list[bytes] = rows["tenant"].tolist()
            records[:, _AT["owner"]] = [self.owner_numbers.get(tenant, 0) for tenant in tenants]
        refused = self.core.admitted_words(_column(records), now_ms)
        assert not refused, "a generation is published once"
        sessions = self._history.sessions_of(names_in(rows).tobytes(), len(rows))
        if self._places or sessions is not None:
            self._take_places(rows, sessions or itertools.repeat(0), now_ms)
        self._notify_placed(rows)

    def _take_places(self, rows: NDArray[Any], before: Iterable[int], now_ms: int) -> None:
        """Give blocks the places in sessions that the blocks before them had."""
        generations: list[int] = rows["generation"].tolist()
        for name, generation, session in zip(names_of(rows), generations, before, strict=False):
            if name in self._places:
                sessions, position = self._places.pop(name)
                for one in sessions:
                    self.core.joined([generation], one, position, now_ms)
            elif session:
                self._rejoin(name, generation, now_ms)

    def _notify_placed(self, rows: NDArray[Any]) -> None:
        if self.placed is not None:
            self.placed(rows)
        self._notify(rows, None)

    def _rejoin(self, name: Name, generation: int, now_ms: int) -> None:
        """Put a block that was in a session when it was removed into its place again, if there is a gap."""
        before = self._history.of(b"".join(name))
        if before is not None and self.core.lacks(before.session, before.position):
            self.core.joined([generation], before.session, before.position, now_ms)

    # Leaving.

    def drop(self, names: Sequence[Name], reason: Reason, *, spared: Collection[int] = ()) -> NDArray[Any]:
        """Remove blocks from the index, then wipe and free them. `spared` is as in `free`.

        Return the row that each had; one without a generation for those that there were not.
        """
        if self._writes.stopped is not None:
            raise self._writes.stopped_again()
        rows = self._forget(names, spared if reason is Reason.ERASED else None)
        self.free(rows[rows["generation"] > 0], reason, spared=spared)
        return rows

    def free(
        self, rows: NDArray[Any], reason: Reason, *, wipe: bool = True, spared: Collection[int] = ()
    ) -> None:
        """Wipe and free blocks that the index no longer has.

        Quarantined or erased blocks are overwritten too, except those encrypted with the keys of `spared`. The header
        comes last if a block is in the clear, so that power loss leaves nothing that an erasure would not find.
        """
        self._notify(rows, reason)
        if reason is Reason.SUPERSEDED:  # the next block of the name takes this one's places
            for name, entry in entries_in(rows):
                self._places[name] = self.core.places(entry.generation)
        removed = self.core.gone(_column(rows["generation"]), reason, self._clock.wall_ms())
        known = rows
        if len(removed) < len(rows):  # the core has already forgotten the others
            known = rows[np.isin(rows["generation"], np.array(removed.generations, np.uint64))]
        self._history.add(names_in(known).tobytes(), removed)
        if reason not in _OVERWRITTEN:
            self._leave_ground(rows, wipe=wipe)
            return
        erased: list[tuple[Name, Entry]] = []
        for at, (name, entry) in enumerate(entries_in(rows)):
            if entry.domain in spared:
                self._leave_ground(rows[at : at + 1], wipe=wipe)
            elif reason is Reason.ERASED or (wipe and not entry.domain):
                erased.append((name, entry))
            else:
                self._leave_ground(rows[at : at + 1], self.leaving.quarantine(name, entry), wipe=wipe)
        if erased:
            self.plain_bytes -= sum(record_bytes(one.length) for _, one in erased if not one.domain)
            self.leaving.erase(erased)

    def evict(self, victims: Evictions) -> None:
        """Drop blocks that the core has forgotten already. If the index fails, the store has stopped."""
        if not victims:
            return
        try:
            rows = self._index.remove_generations(victims.generations)
        except StorageError as error:
            self._writes.stop(ReadOnly(f"{error} The store accepts no more puts."), 0)
            return
        reasons = np.array(victims.words[_REASON_AT::EVICTION_WORDS], np.uint64)
        for reason in np.unique(reasons).tolist():
            self._notify(rows[reasons == reason], Reason(reason))
        self._history.add(names_in(rows).tobytes(), victims)
        self._leave_ground(rows)

    def clear(self, generations: Sequence[int]) -> None:
        """Drop blocks that lie where room is needed, except those that have got a guard meanwhile."""
        free = [one for one in generations if not self.core.is_guarded(one)]
        with suppress(StorageError):  # then the store has stopped
            names = [name for name in self._index.names_of(free) if name is not None]
            self.drop(names, Reason.CLEARED)

    def quarantine(self, name: Name, generation: int, *, wipe: bool) -> None:
        """Forget a block that failed a check, or could not be read.

        Its extent counts against its tenant until the drive has overwritten it without an error (`scrubs`); an extent
        with another record's header must not be wiped, and stays as it is until the store is opened again.
        """
        try:
            entry = self._index.lookup([name])[0]
            if entry is None or entry.generation != generation:
                return  # a newer one has replaced it, or it has been forgotten
            spared = () if wipe and not entry.domain else None  # no erasure would find it
            rows = self._forget([name], spared)
        except StorageError:  # the block will be checked, and missed, again
            return
        self.free(rows, Reason.QUARANTINED, wipe=wipe)
        self.quarantined += 1

    def unreadable(self, name: Name, generation: int, *, wipe: bool) -> None:
        """Quarantine a block that could not be read twice; on a drive that accepts no writes, doubt it.

        Such a drive may be unreadable for a while as a whole, and can wipe nothing.
        """
        if self._writes.stopped is None:
            self.quarantine(name, generation, wipe=wipe)
        else:
            with suppress(StorageError):
                self._doubts.add([generation])

    def believe(self, generations: Iterable[int]) -> None:
        """Record that the CRCs of these blocks were checked and are right."""
        self._doubts.believe(generations)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that are unused because a block there failed a check."""
        return self.leaving.pages.total() * PAGE_BYTES

    def quarantined_pages_of(self, tenant: bytes) -> int:
        """Pages of these that belonged to a tenant."""
        return self.leaving.pages[tenant]

    def _notify(self, rows: NDArray[Any], reason: Reason | None) -> None:
        if self.listener is not None and len(rows):
            self.listener(rows, reason)

    def _forget(self, names: Sequence[Name], spared: Collection[int] | None = None) -> NDArray[Any]:
        try:
            return self._index.remove(names, spared)
        except StorageError as error:
            self._writes.stop(ReadOnly(f"{error} The store accepts no more puts."), 0)
            raise

    def _leave_ground(
        self,
        rows: NDArray[Any],
        instead: Callable[[int, int], None] | None = None,
        *,
        wipe: bool = True,
    ) -> None:
        pages = record_pages(rows["length"])
        self.plain_bytes -= int(pages[rows["domain"] == 0].sum()) * PAGE_BYTES
        self.leaves_some |= not wipe
        if wipe:
            starts = rows["offset"] // PAGE_BYTES
            self._wipes.free_extents(list(zip(starts.tolist(), pages.tolist(), strict=True)), instead)

    # Rewritten records.

    def moved(self, name: Name, old: Entry, new: Entry) -> None:
        """Note that a block was rewritten elsewhere; its guards and sessions don't change."""
        guards = self.core.moved(old.generation, new.generation, new.offset // PAGE_BYTES)
        if guards:
            self._moved[old.generation] = (new.generation, guards)
        self.plain_bytes -= record_bytes(old.length)
        self._notify_placed(rows_of_entries([(name, new)]))

    def after_wipes(self, then: Callable[[StorageError | None], None]) -> None:
        """Call back when all that is being wiped is free."""
        self._wipes.free((), then)

    @property
    def is_overwriting(self) -> bool:
        """Return whether anything is being overwritten."""
        return self._scrubs.pending > 0 or self.left.is_erasing

    def after_scrubs(self, then: Callable[[StorageError | None], None]) -> None:
        """Call back when everything that is being overwritten, erased headers included, is so or has failed."""

        def overwritten(error: StorageError | None) -> None:
            if error is None:
                self.left.after_all(then)
            else:
                then(error)

        self._scrubs.after_all(overwritten)

    def void(self, entry: Entry) -> None:
        """Wipe and free a record that never was in the index."""
        self._wipes.free([(entry.offset, entry.length)])

    def _known_as(self, generation: int) -> int:
        """Return the current generation of a block that was guarded under this one, and takes one guard back."""
        if generation not in self._moved:
            return generation
        now, guards = self._moved.pop(generation)
        if guards > 1:
            self._moved[generation] = (now, guards - 1)
        return now

    # Uses and guards.

    def used(self, generations: Sequence[int]) -> None:
        """Note that blocks were requested and served, from anywhere."""
        self.core.touched(generations, self._clock.wall_ms())

    def guard(self, generations: Sequence[int], guard: Guard) -> None:
        """Guard blocks on the store's own behalf."""
        self.core.hold(generations, guard)

    def unguard(self, generations: Sequence[int], guard: Guard) -> None:
        """Release such guards; a block that is gone has none."""
        if self._moved:
            generations = [self._known_as(one) for one in generations]
        self.core.release(generations, guard, self._clock.wall_ms())

    def hold(self, names: Sequence[Name], guard: Guard) -> list[Held | None]:
        """Guard blocks; None for each that is not stored, or has too many guards."""
        entries = self._index.lookup(names)
        refused = self.core.hold([entry.generation for entry in entries if entry], guard)
        return [
            Held(name, entry.generation) if entry and entry.generation not in refused else None
            for name, entry in zip(names, entries, strict=True)
        ]

    @property
    def takes_writes(self) -> bool:
        """Return whether blocks can be removed from the drive."""
        return self._writes.stopped is None

    def generations_of(self, tenant: bytes) -> array[int]:
        """Return the generations of all blocks of a tenant, in ascending order."""
        return _column(self._index.generations(tenant))

    def renewed(self, generation: int, expires_ms: int) -> None:
        """Note that a block lives longer."""
        self.core.renewed(generation, expires_ms)

    def refusal(self, pages: int) -> NoSpace | None:
        """Return why a block of this many pages can't be stored: protected blocks leave no room for it."""
        protected = self.core.protected_pages
        if not protected or protected + self.marks.low_pages + pages <= self._pages:
            return None
        return NoSpace(
            f"The drive has no room for {show_size(pages * PAGE_BYTES)}: {show_size(protected * PAGE_BYTES)} of its"
            f" {show_size(self._pages * PAGE_BYTES)} are protected."
        )

    def has_passing_guards(self) -> bool:
        """Return whether any block has a guard that will end on its own."""
        guarded = self.core.statistics().guarded
        return any(blocks for guard, blocks in guarded.items() if guard is not Guard.PROTECTED)

    def protect(self, name: SessionName, blocks: int) -> Refusal | None:
        """Protect a session's first blocks, until it is unprotected."""
        refusal = self.core.protect_session(self._digest(*name), blocks, now_ms=self._clock.wall_ms())
        if refusal is None:
            self.protected.add(name)
        return refusal

    def may_protect(self, name: SessionName) -> bool:
        """Return whether a session is protected, or one more may be."""
        return name in self.protected or len(self.protected) < PROTECTED_SESSIONS_MAX

    def protect_first(self, name: SessionName, blocks: int, length: int) -> Iterator[None]:
        """Apply the protection in the manifest of a session of this length, even of 0 blocks, in slices."""
        before = min(self.core.protected_blocks(self._digest(*name)), length)
        after = min(blocks, length)
        step = SESSION_STEP_BLOCKS if before < after else -SESSION_STEP_BLOCKS
        for at in range(before + step, after, step):
            self.protect(name, at)
            yield
        if blocks:
            self.protect(name, blocks)
        else:
            self.unprotect(name)

    def unprotect(self, name: SessionName) -> Refusal | None:
        """End the protection of a session's blocks."""
        self.protected.discard(name)
        return self.core.unprotect_session(self._digest(*name), self._clock.wall_ms())

    # Sessions.

    def joined(self, name: SessionName, keys: Sequence[bytes], first_position: int) -> None:
        """Note that a session names blocks, from a position on; those that are not stored leave gaps."""
        session, now_ms = self._digest(*name), self._clock.wall_ms()
        generations = self._index.generations_of(name.tenant, keys)  # 0, for those not stored, is never used
        self.core.joined(generations, session, first_position, now_ms)

    def cut(self, name: SessionName, blocks: int) -> None:
        """Note that a session has at most this many blocks."""
        self.core.left(self._digest(*name), blocks, self._clock.wall_ms())

    # Queries.

    def after(self, at: int, limit: int) -> tuple[list[tuple[Name, Entry]], int]:
        """Look at blocks from a place on, including expired ones, as `Index.after` does."""
        return self._index.after(at, limit)

    def newest(self, limit: int) -> NDArray[np.uint64]:
        """Return the last generations, at most `limit`, in ascending order."""
        return self._index.newest(limit)

    def of_generations(self, generations: Sequence[int]) -> list[tuple[Name, Entry]]:
        """Return the blocks with these generations; those that are gone are left out."""
        return self._index.of_generations(generations)

    def stored(self, names: bytes) -> NDArray[np.bool_]:
        """Return which blocks are stored, given tenant and key of each. A failed index has none."""
        return self._index.stored(names)

    def explain(self, name: Name) -> Explanation:
        """Return where a block is, or why it is gone."""
        entry = self._index.lookup([name])[0]
        doubted = entry is not None and entry.generation in self._doubts.of([entry.generation])
        gone = self._history.of(b"".join(name))
        return Explanation(entry is not None, doubted, gone, self._clock.wall_ms())

    def misses(self, tenant: bytes, keys: Sequence[bytes]) -> list[Miss]:
        """Return the misses of blocks that are not in the index."""
        explanations = [Explanation(False, False, self._history.of(tenant + key), 0) for key in keys]
        return [one.miss for one in with_erased(explanations, self._keys, tenant, keys)]

    # The opening.

    def restore(self, lives: NDArray[Any]) -> None:
        """Fill the core with the blocks of the index, oldest first."""
        lives = lives[np.argsort(lives["generation"])]
        self.core.restore(
            np.ascontiguousarray(lives["generation"]),
            record_pages(lives["length"]).astype(np.uint32),
            np.ascontiguousarray(lives["expires_ms"]),
            lives["offset"] // PAGE_BYTES,
        )

    def _digest(self, *parts: bytes) -> int:
        """Return 64 bits for a name, never 0; keyed, so that no client can make two names collide."""
        digest = blake2b(b"".join(parts), digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "little") or 1


def restore_sessions(manifests: Manifests, deadlines: Deadlines, of_drives: Sequence[Keeping]) -> None:
    """Report the places of blocks in one drive's sessions to all drives, and to that drive when the sessions expire."""
    for name, stored in manifests.all():
        deadlines.set(name, stored.manifest.expires_ms)
        if stored.manifest.protected:
            for keeping in of_drives:
                keeping.protect(name, stored.manifest.protected)
        keys: Sequence[bytes] = ()
        with suppress(StorageError):  # one that contradicts itself is left to fsck; its blocks count alone
            keys = manifests.keys(name) or ()
        for keeping in of_drives:
            with suppress(StorageError):
                keeping.joined(name, keys, 0)


def with_erased(
    explanations: Sequence[Explanation], keys: Keys | None, tenant: bytes, names: Sequence[bytes]
) -> list[Explanation]:
    """Return explanations of blocks of one tenant; where nothing else explains one, the erasure of its domain."""
    unknown = [at for at, one in enumerate(explanations) if not one.stored and one.gone is None]
    found = [None] * len(unknown) if keys is None else keys.erased_ms(tenant, [names[at] for at in unknown])
    explanations = list(explanations)
    for at, erased_ms in zip(unknown, found, strict=True):
        explanations[at] = explanations[at]._replace(erased_ms=erased_ms)
    return explanations


def _column(numbers: NDArray[Any]) -> array[int]:
    column = array("Q")
    column.frombytes(numbers.astype("u8").tobytes())
    return column
