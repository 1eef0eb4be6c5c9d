"""The store: blocks and sessions in and out of one drive or several, for one thread, without asyncio.

The node's loop calls `put` and `get`, watches `fileno()` for reading and calls `poll()` when it is
readable. Callbacks are called only from `poll` (and from `close`, which polls); they may
call the store again.

Each drive (`kvstore.storage.drive`) has its own index, superblock and queue, and keeps its promises on its own. This
module adds placement: a name has an order of drives (`kvstore.placement`), the first of which
is its home.

Always holds:

- A block is looked up at home first, then on the other drives in order, and counts as missing when none has it. It is
  put where it already is, or else on the first drive in order that accepts writes; the latter also if it is on a failed
  drive that will never make it as durable, or extend its life, as requested.
- A deletion is reported when all drives have done it. So while a drive has failed, deletions fail.
- A session is on one drive, the one that held it first, until its removal has been synced there; new ones go to the
  first drive in their user's order that accepts writes. Data on a failed drive can be read, not changed.
- When a drive fails, only the puts that were being written to it fail.
- With one drive, calls are passed on unchanged.

Nothing spans two drives in one transaction. A crash while a session is removed with its blocks may leave blocks on
drives other than the session's: blocks that nothing names, as after any eviction of a session.
"""

from __future__ import annotations

import os
import select
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvstore.durability import Durability
from kvstore.errors import Overloaded, StorageError
from kvstore.limits import GENERATIONS_PER_DRIVE, PREFIX_STEP_BLOCKS, SESSION_BLOCKS_MAX
from kvstore.placement import Placement
from kvstore.storage.all_drives import AllManifests, Deletions, SessionSteps
from kvstore.storage.batch_bounds import check_batch, check_steps
from kvstore.storage.drive_files import FolderDrives
from kvstore.storage.eviction.policies import POLICY_DEFAULT
from kvstore.storage.eviction.types import together
from kvstore.storage.eviction_events import restore_sessions, with_erased
from kvstore.storage.folder import FolderLock
from kvstore.storage.items import DriveState, GetDone, Statistics
from kvstore.storage.opening import open_drives
from kvstore.storage.quotas import Quotas
from kvstore.storage.renewals import lives_as_long
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.config import DriveSpec
    from kvstore.storage.disk import Progress
    from kvstore.storage.drive import Drive
    from kvstore.storage.drive_files import DriveSource
    from kvstore.storage.eviction.types import Guard, Refusal
    from kvstore.storage.eviction_events import Explanation, Held, Listener, Placed
    from kvstore.storage.index import Entry, Name, NamesAndLives
    from kvstore.storage.items import (
        DeleteItem,
        DeletesDone,
        GetItem,
        GetsDone,
        PutItem,
        PutsDone,
        SessionItem,
        SessionsDone,
    )
    from kvstore.storage.manifests import Manifests, SessionName
    from kvstore.storage.quotas import Quota
    from kvstore.storage.sealing import Keys, OpenKeys

__all__ = ["Store"]

_ANY = ("takes_puts", "rebuilt")


class Store(Handle):
    """An open data folder."""

    def __init__(
        self,
        lock: FolderLock,
        drives: Sequence[Drive],
        away: Sequence[int],
        clock: Clock,
        keys: Keys | None = None,
    ) -> None:
        """Take over open drives, and the keys of their records; `Store.open` makes them."""
        self._lock = lock
        self.keys = keys
        if keys is not None:
            keys.on_finished(lambda: os.eventfd_write(drives[0].fileno(), 1))
        self._clock = clock
        self.drives = tuple(drives)
        self._only = drives[0] if len(drives) == 1 else None
        self._away = away
        self._by_number = {drive.number: drive for drive in drives}
        self._placement = Placement([(drive.uuid, drive.capacity_bytes) for drive in drives])
        self._deletions = Deletions(self.drives)
        self._steps = SessionSteps(self.drives, self._placement)
        self.manifests: Manifests | AllManifests = (
            drives[0].manifests if len(drives) == 1 else AllManifests(drives)
        )
        self.quotas = Quotas([drive.keeping for drive in drives], clock)
        for drive in drives:
            drive.others.extend(other for other in drives if other is not drive)
            drive.share_quotas(self.quotas)
            restore_sessions(drive.manifests, drive.deadlines, [each.keeping for each in drives])
        self._ready = select.epoll()
        for drive in drives:
            self._ready.register(drive.fileno(), select.EPOLLIN)
        self._closed = False

    @classmethod
    def open(
        cls,
        data: Path,
        *,
        capacity_bytes: int | None,
        clock: Clock,
        drives: Sequence[DriveSpec] = (),
        without: Collection[int] = (),
        source: DriveSource | None = None,
        progress: Progress | None = None,
        boot_id: str | None = None,
        policy: str = POLICY_DEFAULT,
        open_keys: OpenKeys | None = None,
    ) -> Store:
        """Open a data folder. Creates a drive if there is none, adds the given ones, and leaves out `without`.

        With `open_keys`, records are encrypted.
        """
        with ExitStack() as undo:
            lock = FolderLock(data)
            undo.callback(lock.give_up)
            source = source or FolderDrives(data, capacity_bytes, drives)
            opened, away, keys = open_drives(
                data,
                lock,
                source,
                clock=clock,
                without=without,
                progress=progress,
                boot_id=boot_id,
                policy=policy,
                open_keys=open_keys,
            )
            store = cls(lock, opened, away, clock, keys)
            undo.pop_all()
        return store

    @property
    def homes(self) -> bytes:
        """Return the position of the home drive of each lot of names."""
        return self._placement.homes

    def of_domain(self, tenant: bytes, domain: bytes | None, of: set[int] | None) -> Iterator[list[Name]]:
        """Yield the names of a tenant's blocks, all or those of one domain: pending puts, then stored blocks.

        A stored block is of the domain if it is encrypted with one `of` these keys; None: every block is.

        They come some at a time, and the caller may take as long as it likes; later blocks may be included or not.
        """
        for drive in self.drives:
            yield drive.puts.of_domain(tenant, domain)
        for drive in self.drives:
            at, is_more = 0, True
            while is_more:
                names, at = drive.of_domain(tenant, of, at)
                is_more = at > 0
                yield names

    @contextmanager
    def erasing(self, tenant: bytes) -> Iterator[None]:
        """Leave removing blocks without a key to an erasure of the tenant, so that it counts all of them."""
        for drive in self.drives:
            drive.keeping.erasing[tenant] += 1
        try:
            yield
        finally:
            for drive in self.drives:
                drive.keeping.erasing[tenant] -= 1
                if not drive.keeping.erasing[tenant]:
                    del drive.keeping.erasing[tenant]

    @property
    def has_puts(self) -> bool:
        """Return whether any put that Python knows is in progress."""
        return any(drive.puts.are_under_way for drive in self.drives)

    def is_putting(self, name: Name) -> bool:
        """Return whether a put of this name is in progress."""
        return any(drive.puts.is_under_way(name) for drive in self.drives)

    @property
    def name(self) -> str:
        """Return the store's name: the beginning of its uuid."""
        return self.drives[0].store_uuid.hex()[:12]

    @property
    def salt(self) -> bytes:
        """Return a secret of the store that never leaves the node, for the names of tenants."""
        return self.drives[0].salt

    def put(self, items: Sequence[PutItem], done: PutsDone) -> None:
        """Store blocks; `done` is called with each result. Overloaded, and none stored, if a drive's queue is full."""
        if self._only is not None:
            self._only.put(items, done)
            return
        check_batch(items)
        by_drive = self._puts_by_drive(items)
        if any(len(some) > drive.puts_left for drive, some in by_drive.items()):
            raise Overloaded("A drive's queue of puts is full.")
        for drive, some in by_drive.items():
            drive.put(some, done)

    def get(self, items: Sequence[GetItem], done: GetsDone) -> None:
        """Read blocks into slots; `done` is called with each result, a BUSY miss if a drive's queue is full."""
        if self._only is not None:
            self._only.get(items, done)
            return
        check_batch(items)
        names = [(item.tenant, item.key) for item in items]
        by_drive: dict[Drive, list[GetItem]] = {}
        for item, name, (drive, _) in zip(items, names, self._find(names), strict=True):
            by_drive.setdefault(drive or self._in_order(name)[0], []).append(item)
        for drive, some in by_drive.items():
            drive.get(some, done)

    def delete(self, items: Sequence[DeleteItem], done: DeletesDone) -> None:
        """Delete blocks; `done` is called with each result. Overloaded, and none deleted, if the queue is full."""
        if self._only is not None:
            self._only.delete(items, done)
            return
        check_batch(items)
        self._deletions.accept(items, done)

    def evict(self, generations: Sequence[int]) -> int:
        """Evict the blocks with these generations that are still stored; return how many bytes that frees.

        The bytes are free once the blocks' readers are done and their headers wiped; no event reports that.
        """
        return sum(drive.evict(some) for drive, some in self._by_drive(generations).items())

    def change_sessions(self, items: Sequence[SessionItem], done: SessionsDone) -> None:
        """Change sessions; `done` is called with each result. Overloaded, and none changed, if the queue is full."""
        if self._only is not None:
            self._only.change_sessions(items, done)
            return
        check_steps(items)
        self._steps.accept(items, done)

    def prefix(self, tenant: bytes, keys: Sequence[bytes]) -> int:
        """Return how many of these keys are stored, from the first up to the first gap."""
        if self._only is not None:
            return self._only.prefix(tenant, keys)
        check_batch(keys)
        for first in range(0, len(keys), PREFIX_STEP_BLOCKS):
            step = keys[first : first + PREFIX_STEP_BLOCKS]
            missing = self._missing(tenant, step)
            if missing:
                return first + next(at for at, key in enumerate(step) if key in missing)
        return len(keys)

    def names_of(self, generations: Sequence[int]) -> list[Name | None]:
        """Return which block has each generation."""
        if self._only is not None:
            return self._only.names_of(generations)
        drives = map(self.drive_of, generations)
        return [
            None if drive is None else drive.names_of([generation])[0]
            for drive, generation in zip(drives, generations, strict=True)
        ]

    def lookup(self, keys: Sequence[tuple[bytes, bytes]]) -> list[Entry | None]:
        """Return the index entry of each (tenant, key), expired ones included, or None."""
        if self._only is not None:
            return self._only.lookup(keys)
        return [entry for _, entry in self._find(keys)]

    def stored(self, names: bytes) -> NDArray[np.bool_]:
        """Return which blocks are stored, given tenant and key of each; expired ones are."""
        are_stored = self.drives[0].keeping.stored(names)
        for drive in self.drives[1:]:
            are_stored |= drive.keeping.stored(names)
        return are_stored

    def verify_payload(self, item: GetItem, done: GetDone) -> GetDone:
        """Check the payload of a hit in its slot; return the hit, or a miss if the check failed."""
        drive = self._only or self.drive_of(done.generation)
        return done if drive is None else drive.verify_payload(item, done)

    @property
    def has_doubts(self) -> bool:
        """Return whether any block may be doubted, as some are for a while after a crash."""
        return any(drive.has_doubts for drive in self.drives)

    def doubtful(self, entries: Iterable[Entry | None]) -> set[int]:
        """Return the generations of blocks that must not be reported to clients as stored (`Drive.doubtful`)."""
        if self._only is not None:
            return self._only.doubtful(entries)
        by_drive: dict[Drive, list[Entry]] = {}
        for entry in entries:
            if entry is not None and (drive := self.drive_of(entry.generation)) is not None:
                by_drive.setdefault(drive, []).append(entry)
        return {one for drive, some in by_drive.items() for one in drive.doubtful(some)}

    def believe(self, generations: Sequence[int]) -> None:
        """Record that the CRCs of these blocks were checked and are right."""
        if self.has_doubts:
            for drive, some in self._by_drive(generations).items():
                drive.believe(some)

    def quarantine(self, tenant: bytes, key: bytes, generation: int) -> None:
        """Remove a block that failed a check. Its extent is reused once the drive has overwritten all of it."""
        drive = self._only or self.drive_of(generation)
        if drive is not None:
            drive.quarantine(tenant, key, generation)

    def used(self, generations: Sequence[int]) -> None:
        """Record that blocks were read from memory, so that eviction counts it as a use."""
        for drive, some in self._by_drive(generations).items():
            drive.used(some)

    def hold(self, names: Sequence[Name], guard: Guard) -> list[Held | None]:
        """Guard blocks from eviction until `release` or the process ends, refcounted; None for each not stored."""
        if self._only is not None:
            return self._only.hold(names, guard)
        check_batch(names)
        held: list[Held | None] = [None] * len(names)
        places: dict[Drive, list[int]] = {}
        for at, (drive, _) in enumerate(self._find(names)):
            if drive is not None:
                places.setdefault(drive, []).append(at)
        for drive, some in places.items():
            for at, one in zip(some, drive.hold([names[at] for at in some], guard), strict=True):
                held[at] = one
        return held

    def release(self, held: Sequence[Held], guard: Guard) -> None:
        """Release blocks that were guarded with this guard."""
        of_generation = {one.generation: one for one in held}
        for drive, some in self._by_drive([one.generation for one in held]).items():
            drive.release([of_generation[generation] for generation in some], guard)

    def protect(self, session: SessionName, blocks: int = SESSION_BLOCKS_MAX) -> Refusal | None:
        """Protect a session's first blocks from eviction, including future ones; FULL if too many are protected.

        It lasts until the process ends or a step of the session changes it. `SessionStep.PROTECT` survives a restart.
        """
        refusals = [drive.protect(session, blocks) for drive in self.drives]
        refusal = next(filter(None, refusals), None)
        if refusal is not None:
            self.unprotect(session)
        return refusal

    def unprotect(self, session: SessionName) -> Refusal | None:
        """End the protection of a session's blocks; NOT_HELD if it was not protected."""
        refusals = [drive.unprotect(session) for drive in self.drives]
        return next(filter(None, refusals), None)

    @property
    def protected(self) -> Collection[SessionName]:
        """Return which sessions are protected."""
        return self.drives[0].keeping.protected  # the same on all drives

    def explain(self, tenant: bytes, key: bytes) -> Explanation:
        """Return where a block is, or why it was removed."""
        return self.explain_all(tenant, [key])[0]

    def explain_all(self, tenant: bytes, keys: Sequence[bytes]) -> list[Explanation]:
        """Return where blocks are, or why they were removed."""
        explanations = []
        for key in keys:
            of_drives = [drive.explain(tenant, key) for drive in self._in_order((tenant, key))]
            explanations.append(
                max(of_drives, key=lambda one: (one.stored, one.gone.at_ms if one.gone is not None else -1))
            )
        return with_erased(explanations, self.keys, tenant, keys)

    def change_quotas(self, bytes_max: Mapping[bytes, int]) -> None:
        """Set the quotas of these tenants, in bytes of all drives; all other tenants have none."""
        self.quotas.change(bytes_max)
        for drive in self.drives:
            drive.wake()

    def quota(self, tenant: bytes) -> Quota:
        """Return a tenant's quota and its use."""
        return self.quotas.of(tenant)

    def listen(self, listener: Listener) -> None:
        """Call a listener when blocks are stored or removed on any drive. It must not call the store."""
        for drive in self.drives:
            drive.keeping.listener = listener

    def follow_places(self, placed: Placed) -> Iterator[NamesAndLives]:
        """Call `placed` with the places of blocks whenever some are stored; return those of all stored so far."""
        for drive in self.drives:
            drive.keeping.placed = placed
        for drive in self.drives:
            yield from drive.names()

    @property
    def writes(self) -> tuple[int, int]:
        """Return how many writes have begun since the opening, and how many have completed."""
        begun, ended = zip(*(drive.writes for drive in self.drives), strict=True)
        return sum(begun), sum(ended)

    def poll(self) -> None:
        """Advance all pending work, and call the callbacks of completed operations."""
        if self._only is not None:
            self._only.poll()
            return
        try:
            for drive in self.drives:
                drive.poll()
            self._deletions.completions.deliver()
            self._steps.completions.deliver()
        finally:
            if (
                self._deletions.completions or self._steps.completions
            ):  # a callback raised, and others have not been called
                os.eventfd_write(self.drives[0].fileno(), 1)

    @property
    def has_timers(self) -> bool:
        """Return whether any work is pending or any session or block has a time to live."""
        return any(drive.has_timers for drive in self.drives)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `poll` has something to do."""
        return self._only.fileno() if self._only is not None else self._ready.fileno()

    def statistics(self) -> Statistics:
        """Return the store's statistics."""
        each = [drive.statistics() for drive in self.drives]
        if len(each) == 1:
            return each[0]
        total: dict[str, Any] = {
            field.name: (any if field.name in _ANY else sum)(getattr(one, field.name) for one in each)
            for field in fields(Statistics)
            if field.name not in {"eviction", "clear_why"}
        }
        total["clear_why"] = next((one.clear_why for one in each if one.clear_why), "")
        total["eviction"] = together([one.eviction for one in each])
        total["deletes_pending"] = self._deletions.completions.promised  # not one for each drive
        total["sessions_pending"] = self._steps.completions.promised
        return Statistics(**total)

    def drive_states(self) -> list[DriveState]:
        """Return the state of each drive, including those left out."""
        states = [
            DriveState(drive.number, drive.statistics(), str(drive.failure or "")) for drive in self.drives
        ]
        states += [
            DriveState(number, None, "It was left out when the node was started.") for number in self._away
        ]
        return sorted(states, key=lambda state: state.number)

    def close(self) -> None:
        """Complete all accepted work, make it durable, and mark the index of each drive that never failed as clean."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last:
            last.callback(self._lock.release)
            if self.keys is not None:
                last.callback(self.keys.close)
            last.callback(self._ready.close)
            for drive in self.drives:
                last.callback(drive.close)
            self._drain()
            if self.keys is not None:
                with suppress(StorageError):  # then its copies can't be told apart
                    self.keys.count_up()

    def _drain(self) -> None:
        """Complete operations that involve several drives."""
        while self._deletions.completions.promised or self._steps.completions.promised:
            waits_only_for_a_poll = self._deletions.completions or self._steps.completions
            if not waits_only_for_a_poll:
                if not any(drive.is_busy for drive in self.drives):
                    raise StorageError("The store is unusable after an earlier exception.")
                self._ready.poll()
            self.poll()

    def _puts_by_drive(self, items: Sequence[PutItem]) -> dict[Drive, list[PutItem]]:
        names = [(item.tenant, item.key) for item in items]
        now_ms = self._clock.wall_ms()
        by_drive: dict[Drive, list[PutItem]] = {}
        for item, name, (holder, entry) in zip(items, names, self._find(names), strict=True):
            # The drive where a put of the name is under way: it may be in no drive's index yet, and not at home.
            under_way = next((drive for drive in self.drives if drive.puts.is_under_way(name)), None)
            if under_way is not None:
                by_drive.setdefault(under_way, []).append(item)
                continue
            if holder is not None and (holder.takes_puts or _decides(item, holder, entry, now_ms)):
                by_drive.setdefault(holder, []).append(item)
                continue
            order = self._in_order(name)
            drive = next((one for one in order if one.takes_puts), order[0])
            by_drive.setdefault(drive, []).append(item)
        return by_drive

    def _find(self, names: Sequence[Name]) -> list[tuple[Drive | None, Entry | None]]:
        """Find blocks, each at home first. An expired or doubted copy counts only if no drive has a better one."""
        now_ms = self._clock.wall_ms()
        order = self._placement.order
        orders = [order(tenant, key) for tenant, key in names]
        found: list[tuple[Drive | None, Entry | None]] = [(None, None)] * len(names)
        left: Sequence[int] = range(len(names))
        for turn in range(len(self.drives)):
            by_drive: dict[int, list[int]] = {}
            for at in left:
                by_drive.setdefault(orders[at][turn], []).append(at)
            left = []
            for where, places in by_drive.items():
                drive = self.drives[where]
                entries = drive.lookup([names[at] for at in places])
                doubtful = drive.doubtful(entries)
                for at, entry in zip(places, entries, strict=True):
                    if entry is None:
                        left.append(at)
                        continue
                    over = _is_over(entry, now_ms)
                    if over or entry.generation in doubtful:
                        left.append(at)
                        if found[at][0] is None or (not over and _is_over(found[at][1], now_ms)):
                            found[at] = drive, entry
                    else:
                        found[at] = drive, entry
            if not left:
                break
        return found

    def _missing(self, tenant: bytes, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that no drive has; each key's home is asked first."""
        order = self._placement.order
        by_home: dict[int, list[bytes]] = {}
        for key in keys:
            by_home.setdefault(order(tenant, key)[0], []).append(key)
        left = [key for where, some in by_home.items() for key in self.drives[where].missing(tenant, some)]
        for drive in self.drives:
            if left:
                left = drive.missing(tenant, left)
        return set(left)

    def _in_order(self, name: Name) -> list[Drive]:
        return [self.drives[where] for where in self._placement.order(*name)]

    def _by_drive(self, generations: Sequence[int]) -> Mapping[Drive, Sequence[int]]:
        if self._only is not None:
            return {self._only: generations}
        by_drive: dict[Drive, list[int]] = {}
        for generation in generations:
            if (drive := self.drive_of(generation)) is not None:
                by_drive.setdefault(drive, []).append(generation)
        return by_drive

    def drive_of(self, generation: int) -> Drive | None:
        """Return the drive that stores the block of this generation."""
        return self._by_number.get(generation // GENERATIONS_PER_DRIVE)


def _decides(item: PutItem, failed: Drive, entry: Entry | None, now_ms: int) -> bool:
    """Return whether a failed drive's block decides a put: it has other bytes, or is as durable as requested."""
    if entry is None or _is_over(entry, now_ms) or failed.doubtful([entry]):
        return False
    if (entry.length, entry.fingerprint, entry.crc32c) != (item.length, item.fingerprint, item.crc32c):
        return True
    if not lives_as_long(entry.expires_ms, item.expires_ms):
        return False
    return item.durability < Durability.SYNCED or failed.has_synced(entry.generation)


def _is_over(entry: Entry | None, now_ms: int) -> bool:
    return entry is not None and 0 < entry.expires_ms <= now_ms
