"""Writes a session's steps to the drive: a new manifest for each step, and each chunk once it is full.

Always holds: the steps of one session are executed one after the other. A manifest is in the index only when it and
its chunks are complete on the drive, in order, and after the blocks that it names. What it replaces is wiped only
when the manifest has been synced, or when the session itself is removed.

- `holds` is true for a name while any record of it may be on the drive, even one that power loss would bring back,
  except after a removal that need not survive power loss. So a store that sends the steps of a session to the drive
  that holds it never has a session on two drives.
- Protection of a session is part of its manifest, so it survives restarts.
- An expired session doesn't exist for any step that begins later, and `expire` removes it from the drive; if power
  loss brought it back, it would still be expired.
- A long step is executed in slices (`kvstore.storage.slices`), so that others can use the thread in between. The
  index entry of the session changes in one transaction: before it, the blocks of an append are looked up, its records
  queued and its chunks counted; after it, chunks are released, eviction is notified and blocks are deleted. A step is
  reported, and the next step of its session begun, when all of its slices are done. A crash between two slices is a
  crash before or after that transaction: unsettled counts are noted in it (`kvstore.storage.manifests`).
- A session that is erased is removed when its records are overwritten as well (`kvstore.storage.session_places`).

It doesn't change blocks, except that a removal, on request, deletes blocks on its own drive that nothing names any
more.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.durability import Durability
from kvstore.errors import (
    InvalidArgument,
    KvError,
    NoSession,
    ReadOnly,
    Refused,
    SessionRefused,
    StorageError,
)
from kvstore.limits import (
    KEY_BYTES,
    PAGE_BYTES,
    SESSION_BLOCKS_MAX,
    SESSION_BYTES,
    SESSION_CHUNK_BLOCKS,
    SESSION_DROP_BLOCKS,
    SESSION_SLICE_BLOCKS,
    TENANT_BYTES,
    USER_BYTES,
)
from kvstore.storage.completion_queue import CompletionQueue
from kvstore.storage.deadlines import Deadlines
from kvstore.storage.eviction.types import Reason
from kvstore.storage.items import SessionDone, SessionItem, SessionStep
from kvstore.storage.manifest_growth import (
    appended,
    empty,
    first_blocks,
    labelled,
    longer,
    refuse_longer,
    taken,
)
from kvstore.storage.manifests import Stored
from kvstore.storage.session_places import SessionPlaces
from kvstore.storage.session_space import Claim
from kvstore.storage.session_steps import Step, StepRecord
from kvstore.storage.slices import Slices
from kvstore.wire.manifest import Manifest, cut_turns, pack_manifest, session_key
from kvstore.wire.record import Kind, record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.index import Entry, Index, Name
    from kvstore.storage.items import SessionsDone
    from kvstore.storage.manifest_growth import Growth
    from kvstore.storage.manifests import Changed, Manifests, Place, SessionName
    from kvstore.storage.quotas import QuotaQueue
    from kvstore.storage.wipes import Wipes
    from kvstore.storage.writes import RecordWrite, Writes

__all__ = ["Neighbour", "Sessions"]

_CREATIONS: Final = frozenset({SessionStep.FORK, SessionStep.TAKE})
_GROWTHS: Final = frozenset({SessionStep.APPEND, SessionStep.TAKE})
_CUTS: Final = frozenset({SessionStep.TRUNCATE, SessionStep.TAKE})
_REMOVALS: Final = frozenset({SessionStep.REMOVE, SessionStep.EXPIRE})

_NAME_SIZES: Final = (TENANT_BYTES, USER_BYTES, SESSION_BYTES)


class Neighbour(Protocol):
    """Another drive of the store, as far as sessions are concerned."""

    manifests: Manifests
    keeping: Keeping

    def lookup(self, keys: Sequence[Name]) -> list[Entry | None]:
        """Return the entries of the blocks that it has."""
        ...


class Sessions:
    """All steps that have not been reported yet."""

    def __init__(
        self,
        writes: Writes,
        wipes: Wipes,
        index: Index,
        manifests: Manifests,
        keeping: Keeping,
        quota_queue: QuotaQueue,
        clock: Clock,
        *,
        others: Sequence[Neighbour],
    ) -> None:
        self._clock = clock
        self._quota_queue = quota_queue
        self._space = keeping.space
        self._space.restore(manifests.pages_of_tenants())
        self.deadlines = Deadlines()
        self._writes = writes
        self._wipes = wipes
        self._index = index
        self._manifests = manifests
        self._keeping = keeping
        self._others = others
        self._doubtful: set[SessionName] = set()  # not in the index, but a record may be on the drive
        self._steps: dict[SessionName, deque[Step]] = {}  # the first of each is under way
        self._places = SessionPlaces(writes, wipes, index, keeping)
        self.completions: CompletionQueue[SessionDone] = CompletionQueue()
        self.slices = Slices()

    def accept(self, items: Sequence[SessionItem], done: SessionsDone) -> None:
        """Accept steps; each is reported through the completions."""
        self.completions.promised += len(items)
        for item in items:
            waiting = self._steps.setdefault(item.name, deque())
            waiting.append(Step(item, done))
            if len(waiting) == 1:
                self._begin(waiting[0])

    def expire(self, sessions_max: int) -> None:
        """Begin to remove expired sessions."""
        durability = (
            Durability.SYNCED if self._others else Durability.WRITTEN
        )  # else another drive could have its name
        names = self.deadlines.due(self._clock.wall_ms(), sessions_max)
        self.accept([SessionItem(name, SessionStep.EXPIRE, durability, 0) for name in names], _nobody)

    def holds(self, name: SessionName) -> bool:
        """Return whether a session is here, a step of it is under way, or something of it is left on the drive."""
        return name in self._steps or name in self._doubtful or self._manifests.get(name) is not None

    def is_changing(self, name: SessionName) -> bool:
        """Return whether a step of a session is under way."""
        return name in self._steps

    def publish(self, records: Sequence[RecordWrite]) -> None:
        """Begin to put manifests into the index, each after its chunks."""
        for record in records:
            assert isinstance(record, StepRecord)
            step = record.step
            if step.head is record and step.error is None:  # else there was no room for a chunk
                assert step.manifest is not None
                step.left += 1
                self.slices.begin(self._publishing(step, record, step.manifest))

    def finish(self, records: Sequence[RecordWrite], error: KvError | None) -> None:
        """Report each step when its last record has ended."""
        for record in records:
            assert isinstance(record, StepRecord)
            record.step.error = record.step.error or error
            self._one_less(record.step)

    def drop(self, names: Sequence[Name], then: Callable[[StorageError | None], None]) -> None:
        """Delete those of these blocks that no session names, in slices; `then` is called once headers are wiped."""
        self.slices.begin(self._dropping(names, then))

    def _dropping(self, names: Sequence[Name], then: Callable[[StorageError | None], None]) -> Iterator[None]:
        try:
            for at in range(0, len(names), SESSION_DROP_BLOCKS):
                if at:
                    yield
                some = names[at : at + SESSION_DROP_BLOCKS]  # another session may name them by now
                self._keeping.drop(self._unnamed(some), Reason.DELETED)
        except StorageError as error:
            then(error)
        else:
            self._keeping.leaving.when_gone(names, then)

    def _one_less(self, step: Step) -> None:
        """Note that one of the records of a step has ended, or the slices after them."""
        step.left -= 1
        if step.left == 0:
            if step.error is not None:
                self._void(step)
            self._end(step)

    def _void(self, step: Step) -> None:
        """Wipe what a failed step has written, if the drive still accepts writes."""
        name = step.item.name
        self._space.failed(name.tenant, sum(one.size_bytes for one in step.records) // PAGE_BYTES)
        written = [one for one in step.records if one.result is not None]  # the others found no room
        if self._writes.stopped is not None or written:
            self._doubtful.add(name)
        if self._writes.stopped is not None or not written:
            return

        def wiped(error: StorageError | None) -> None:
            if error is None:
                self._writes.after_sync(synced, unhurried=True)

        def synced(error: StorageError | None) -> None:
            if error is None:
                self._doubtful.discard(name)

        self._wipes.free(((one.offset, len(one.payload)) for one in written), wiped)

    def _begin(self, step: Step) -> None:
        self.slices.begin(self._doing(step))

    def _doing(self, step: Step) -> Iterator[None]:
        try:
            _refuse(step.item)
            if self._writes.stopped is not None:
                raise self._writes.stopped_again()
            stored = self._manifests.get(step.item.name)
            epoch = step.item.epoch
            if stored is not None and epoch is not None and epoch < stored.manifest.epoch:
                raise SessionRefused("The session has continued in a later epoch of its cluster.")
            over = self._is_over(stored, epoch)
            if step.item.step is SessionStep.REMOVE or (over and step.item.step is SessionStep.EXPIRE):
                yield from self._remove(step)
            elif step.item.step is SessionStep.EXPIRE:
                self._end(step)  # it was given more time meanwhile
            elif over and step.item.step is not SessionStep.TAKE:  # which replaces it in one transaction
                self._begin_anew(step)
            elif (before := self._done_before(step.item)) is not None:
                self._done_again(step, before)
            else:
                if step.item.step is SessionStep.APPEND:
                    yield from self._refuse_unknown(step.item)
                self._claim(step, *(yield from self._wanted(step.item)))
        except (Refused, StorageError) as error:
            step.error = error
            self._end(step)

    def _done_again(self, step: Step, before: Manifest) -> None:
        """Repeat nothing of an append that was done before, except to set its expiry: the last request decides."""
        expires_ms = step.item.expires_ms
        if expires_ms is None or expires_ms == before.expires_ms:
            step.manifest = before
            self._end(step)
        else:
            self._claim(step, before._replace(expires_ms=expires_ms), {})

    def _is_over(self, stored: Stored | None, epoch: int | None = None) -> bool:
        return stored is not None and stored.is_over(self._clock.wall_ms(), epoch)

    def _begin_anew(self, step: Step) -> None:
        """Execute a step after removing the session of its name that expired or is of a past epoch."""
        removal = Step(
            SessionItem(step.item.name, SessionStep.EXPIRE, step.item.durability, 0, epoch=step.item.epoch),
            _nobody,
        )
        self.completions.promised += 1
        self._steps[step.item.name].appendleft(removal)
        self._begin(removal)

    def _done_before(self, item: SessionItem) -> Manifest | None:
        """Return the session if these keys were already appended to it at this place."""
        stored = self._manifests.get(item.name)
        if item.first_block is None or stored is None or stored.manifest.blocks == item.first_block:
            return None
        there = self._manifests.keys(item.name, item.first_block, item.first_block + len(item.keys))
        return labelled(stored.manifest, item) if there == list(item.keys) else None

    def _wanted(self, item: SessionItem) -> Growth:
        """Make the manifest that a step leads to, and the chunks that it may be the first to name."""
        name = item.name
        there = self._manifests.get(name)
        if item.step in _CREATIONS and not (
            there is None or item.replaces or self._is_over(there, item.epoch)
        ):
            raise SessionRefused("A session of this name already exists.")
        if item.step in _GROWTHS:
            return (yield from self._grown(item, there))
        source = item.source if item.step is SessionStep.FORK else name
        stored = self._manifests.get(source) if source is not None else None
        source_epoch = item.source_epoch if item.step is SessionStep.FORK else item.epoch
        stored = None if self._is_over(stored, source_epoch) else stored
        if item.step is SessionStep.LIMIT and stored is not None:
            return labelled(stored.manifest, item)._replace(expires_ms=item.expires_ms or 0), {}
        if item.step is SessionStep.REWRITE and stored is not None:
            empty = stored.manifest._replace(chunks=(), tail=())
            return (yield from longer(empty, self._manifests.keys(name) or [], self._owner(name)))
        if item.step is SessionStep.PROTECT and stored is not None:
            self._refuse_to_protect(item)
            return labelled(stored.manifest, item)._replace(protected=item.blocks), {}
        if source is None or source.tenant != name.tenant:
            raise NoSession("There is no such session.")
        if stored is None or self._owner(source) != self._owner(name):
            return (yield from self._copied(source, item))
        refuse_longer(item.blocks, stored.manifest.blocks)
        chunks, tail = first_blocks(self._manifests, name.tenant, stored.manifest, item.blocks)
        label = item.label if item.step is SessionStep.FORK else labelled(stored.manifest, item).label
        turns = cut_turns(stored.manifest.turns, stored.manifest.blocks, item.blocks)
        kept = Manifest(name.user, name.session, chunks, tail, turns, label)
        if item.step is SessionStep.FORK:  # it starts without expiry and protection
            kept = kept._replace(epoch=item.epoch or 0)
        else:
            was = stored.manifest
            kept = kept._replace(epoch=was.epoch, expires_ms=was.expires_ms, protected=was.protected)
        return kept, {}

    def _grown(self, item: SessionItem, there: Stored | None) -> Growth:
        """Append to a session, or make it what it is on another node, maybe out of its first blocks here."""
        owner = self._owner(item.name)
        if item.step is SessionStep.APPEND:
            return (
                yield from appended(labelled(there.manifest, item) if there else empty(item), item, owner)
            )
        first = empty(item)
        if item.blocks:
            if there is None or self._is_over(there, item.epoch):
                raise SessionRefused("The session has none of the first blocks that were to stay.")
            refuse_longer(item.blocks, there.manifest.blocks)
            chunks, tail = first_blocks(self._manifests, item.name.tenant, there.manifest, item.blocks)
            first = first._replace(chunks=chunks, tail=tail)
        may_protect = item.protected and all(one.may_protect(item.name) for one in self._all_keeping())
        manifest, written = yield from taken(first, item, owner)
        return manifest._replace(protected=item.protected if may_protect else 0), written

    def _owner(self, name: SessionName) -> bytes:
        """The owner of its chunks: with encryption its user, with whose key they are lost."""
        return name.user if self._writes.encrypts else b""

    def _refuse_to_protect(self, item: SessionItem) -> None:
        if not 0 <= item.blocks <= SESSION_BLOCKS_MAX:
            raise SessionRefused(
                f"A session has at most {SESSION_BLOCKS_MAX} blocks to protect, not {item.blocks}."
            )
        if item.blocks and not all(keeping.may_protect(item.name) for keeping in self._all_keeping()):
            raise SessionRefused(
                "The store has its maximum number of protected sessions; end the protection of some."
            )

    def _copied(self, source: SessionName, item: SessionItem) -> Growth:
        """Fork a session on another drive, or of another user: the chunks are written here as well."""
        having = [self._manifests, *(other.manifests for other in self._others)]
        for manifests in having if item.step is SessionStep.FORK else ():
            stored = manifests.get(source)
            if stored is not None and not self._is_over(stored, item.source_epoch):
                refuse_longer(item.blocks, stored.manifest.blocks)
                keys = manifests.keys(source, 0, item.blocks) or []
                copy, chunks = yield from longer(empty(item), keys, self._owner(item.name))
                turns = cut_turns(stored.manifest.turns, stored.manifest.blocks, item.blocks)
                return copy._replace(turns=turns), chunks
        raise NoSession("There is no such session.")

    def _refuse_unknown(self, item: SessionItem) -> Iterator[None]:
        for at in range(0, len(item.keys), SESSION_SLICE_BLOCKS):
            if at:
                yield
            names = [(item.name.tenant, key) for key in item.keys[at : at + SESSION_SLICE_BLOCKS]]
            if not self._knows(names):
                raise SessionRefused("A session may list only stored blocks; one of these is not.")

    def _knows(self, names: list[Name]) -> bool:
        having: list[Index | Neighbour] = [self._index, *self._others]
        for drive in having:
            names = [name for name, entry in zip(names, drive.lookup(names), strict=True) if entry is None]
            if not names:
                return True
        return False

    def _unreferenced(self, names: Sequence[Name]) -> Sequence[Name]:
        """Leave out the blocks that sessions on other drives name."""
        for other in self._others:
            names = other.manifests.without_references(names)
        return names

    def _unnamed(self, names: Sequence[Name]) -> Sequence[Name]:
        """Return those of these blocks that no session names, on any drive."""
        for manifests in (self._manifests, *(other.manifests for other in self._others)):
            names = manifests.without_references(names)
        return names

    def _claim(self, step: Step, manifest: Manifest, chunks: Mapping[bytes, bytes]) -> None:
        """Write a step's records when there is room for them in the quota of its tenant."""
        head, name = pack_manifest(manifest), step.item.name
        step.manifest = manifest
        before = self._manifests.get(name)
        pages = sum(record_bytes(len(payload)) for payload in (head, *chunks.values())) // PAGE_BYTES

        def let_in() -> None:
            self.slices.begin(self._write(step, manifest, chunks, head))

        def refuse(error: StorageError) -> None:
            step.error = error
            self._end(step)

        may_grow = step.item.step is not SessionStep.REWRITE  # it counts towards no quota
        grows = may_grow and (before is None or pages > before.place.pages)
        self._quota_queue.add(Claim(self._space, name.tenant, pages, let_in, refuse, grows=grows))

    def _write(
        self, step: Step, manifest: Manifest, chunks: Mapping[bytes, bytes], head: bytes
    ) -> Iterator[None]:
        tenant = step.item.name.tenant
        step.left = len(chunks) + 1
        for at, (chunk, payload) in enumerate(chunks.items()):
            if at and not at * SESSION_CHUNK_BLOCKS % SESSION_SLICE_BLOCKS:
                yield
            self._add(StepRecord(self._writes, self, step, Kind.CHUNK, tenant, chunk, payload))
        # The head last, so that it is published after its chunks.
        key = session_key(manifest.user, manifest.session)
        step.head = StepRecord(self._writes, self, step, Kind.SESSION, tenant, key, head)
        self._add(step.head)

    def _add(self, record: StepRecord) -> None:
        record.step.records.append(record)
        self._writes.add(record)

    def _publishing(self, step: Step, head: StepRecord, manifest: Manifest) -> Iterator[None]:
        """Put a manifest into the index, a large one's chunks first, and report it."""
        name, is_cut = step.item.name, step.item.step in _CUTS
        written = {record.key: (record.place, record.payload) for record in step.records[:-1]}
        before = self._manifests.get(name) if is_cut else None
        try:
            freed = yield from self._name_chunks(name, manifest, written)
            new = Stored(head.place, manifest)
            changed = self._manifests.replace(name, new, written, SESSION_SLICE_BLOCKS)
        except StorageError as error:
            step.error = error
            yield from self._take_back(step)
            self._one_less(step)
            return
        self._space.kept(name.tenant, sum(one.size_bytes for one in step.records) // PAGE_BYTES)
        self.deadlines.set(name, manifest.expires_ms)
        try:
            yield from self._settle(step, changed._replace(chunks=changed.chunks + freed))
            yield from self._telling(step, manifest, before)
        except StorageError as error:
            self._writes.stop(ReadOnly(f"{error} The store takes no more puts."), 0)
            step.error = step.error or error
        self._one_less(step)

    def _name_chunks(
        self, name: SessionName, manifest: Manifest, written: Mapping[bytes, tuple[Place, bytes]]
    ) -> Generator[None, None, list[Place]]:
        """Count in slices what a session will name, except for a last slice; return what became free."""
        before = self._manifests.get(name)
        known = set(before.manifest.chunks) if before is not None else set()
        chunks = [one for one in dict.fromkeys(manifest.chunks) if one not in known]
        freed: list[Place] = []
        while len(chunks) * SESSION_CHUNK_BLOCKS > SESSION_SLICE_BLOCKS:
            named, places = self._manifests.name_chunks(name, chunks, written, SESSION_SLICE_BLOCKS)
            freed += places
            del chunks[:named]
            yield
        return freed

    def _take_back(self, step: Step) -> Iterator[None]:
        """Release the chunks counted for a step that failed; `_void` wipes what the step has written."""
        try:
            while self._manifests.settle(step.item.name, SESSION_SLICE_BLOCKS).owes:
                yield
        except StorageError as error:
            self._writes.stop(ReadOnly(f"{error} The store takes no more puts."), 0)

    def _settle(self, step: Step, changed: Changed) -> Iterator[None]:
        """Free what a step has given up, in slices if that is much."""
        while True:
            if step.item.is_erased:
                step.chunks_left += self._places.chunks_left(step.item.name, changed.chunks)
            else:
                self._places.free_when_synced(step.item.name, changed)
            with suppress(
                StorageError
            ):  # another drive's index: the step is done, and reports less than it could
                step.unreferenced += self._unreferenced(changed.unreferenced)
            if not changed.owes:
                return
            yield
            changed = self._manifests.settle(
                step.item.name, SESSION_SLICE_BLOCKS, is_erased=step.item.is_erased
            )

    def _telling(self, step: Step, manifest: Manifest, before: Stored | None) -> Iterator[None]:
        """Report to the eviction of every drive which blocks the session has now."""
        item = step.item
        if item.step is SessionStep.PROTECT:
            for keeping in self._all_keeping():
                yield from keeping.protect_first(item.name, item.blocks, manifest.blocks)
        elif item.step is SessionStep.TRUNCATE:
            blocks = manifest.blocks if before is None else before.manifest.blocks
            yield from self._cut(item.name, blocks, manifest.blocks)
        else:
            if item.step is SessionStep.TAKE and before is not None:
                yield from self._cut(item.name, before.manifest.blocks, item.blocks)
            yield from self._joined(item, manifest)
            if item.step is SessionStep.TAKE and (manifest.protected or before is not None):
                for keeping in self._all_keeping():
                    yield from keeping.protect_first(item.name, manifest.protected, manifest.blocks)

    def _joined(self, item: SessionItem, manifest: Manifest) -> Iterator[None]:
        blocks = manifest.blocks if item.step is SessionStep.FORK else len(item.keys)
        first = manifest.blocks - blocks if item.first_block is None else item.first_block
        for at in range(0, blocks, SESSION_SLICE_BLOCKS):
            if at:
                yield
            until = min(at + SESSION_SLICE_BLOCKS, blocks)
            keys = (
                self._manifests.keys_of(item.name.tenant, manifest, at, until)
                if item.step is SessionStep.FORK
                else item.keys[at:until]
            )
            for keeping in self._all_keeping():
                keeping.joined(item.name, keys, first + at)

    def _cut(self, name: SessionName, before: int, blocks: int) -> Iterator[None]:
        """Report to the eviction that a session has lost its last blocks, last first."""
        for until in range(before - SESSION_SLICE_BLOCKS, blocks, -SESSION_SLICE_BLOCKS):
            for keeping in self._all_keeping():
                keeping.cut(name, until)
            yield
        for keeping in self._all_keeping():
            keeping.cut(name, blocks)

    def _all_keeping(self) -> list[Keeping]:
        return [self._keeping, *(other.keeping for other in self._others)]

    def _remove(self, step: Step) -> Iterator[None]:
        name, is_erased = step.item.name, step.item.is_erased
        stored = self._manifests.get(name)
        erased = self._places.before(name) if is_erased else None
        try:
            changed = self._manifests.replace(name, None, {}, SESSION_SLICE_BLOCKS, erased=erased)
        except StorageError as error:
            self._writes.stop(ReadOnly(f"{error} The store accepts no more puts."), 0)
            raise
        self.deadlines.set(name, 0)
        self._doubtful.add(name)
        manifests = self._places.manifests_left(name, changed.manifest)
        if not is_erased:
            self._places.free(name.tenant, manifests)
        yield from self._settle(step, changed._replace(manifest=None))
        blocks = 0 if stored is None else stored.manifest.blocks
        for keeping in self._all_keeping():
            yield from keeping.protect_first(name, 0, blocks)
        yield from self._cut(name, blocks, 0)

        def wiped(error: StorageError | None) -> None:
            step.error = error
            self._end(step)

        def dropped(error: StorageError | None) -> None:
            if error is None and is_erased:
                self._places.erase(name.tenant, manifests, step.chunks_left, wiped)
            else:
                wiped(error)

        yield from self._dropping(step.unreferenced if step.item.delete_blocks else (), dropped)

    def _end(self, step: Step) -> None:
        waiting = self._steps[step.item.name]
        assert waiting[0] is step
        waiting.popleft()
        if step.error is None and step.item.durability is Durability.SYNCED:
            self._writes.after_sync(lambda error: self._report(step, error))
        else:
            self._report(step, step.error)
        if waiting:
            self._begin(waiting[0])
        else:
            self._steps.pop(step.item.name, None)

    def _report(self, step: Step, error: KvError | None) -> None:
        if step.item.step in _REMOVALS and error is None:
            self._doubtful.discard(step.item.name)
        blocks = step.manifest.blocks if step.manifest is not None and error is None else 0
        done = SessionDone(step.item.tag, error, blocks, step.unreferenced)
        self.completions.add(step.done, done)


def _nobody(_: Sequence[SessionDone]) -> None:
    """Ignore the end of a step that no client made."""


def _refuse(item: SessionItem) -> None:
    if tuple(map(len, item.name)) != _NAME_SIZES or set(map(len, item.keys)) - {KEY_BYTES}:
        raise InvalidArgument("A tenant, a user, a session or a key has the wrong size.")
