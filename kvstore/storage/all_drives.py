"""Operations that concern all drives of a store: deletions, steps of sessions, and reading sessions.

Always holds: a deletion is reported when every drive has reported it, with the first error if there was one; the
steps of one session go to the drive that holds it, in order; a removal is synced before it is reported, so that
nothing of a session is left when another drive gets its name; blocks deleted with a session are reported when they
are gone from every drive.

A store of one drive does not use it.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from kvstore.durability import Durability
from kvstore.errors import Overloaded, StorageError
from kvstore.storage.completion_queue import CompletionQueue
from kvstore.storage.items import DeleteDone, SessionDone, SessionStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.placement import Placement
    from kvstore.storage.drive import Drive
    from kvstore.storage.index import Name
    from kvstore.storage.items import DeleteItem, DeletesDone, SessionItem, SessionsDone
    from kvstore.storage.manifests import Listed, SessionName, Stored
    from kvstore.wire.manifest import Manifest

__all__ = ["AllManifests", "Deletions", "SessionSteps"]


class Deletions:
    """All deletions that have not been reported yet."""

    def __init__(self, drives: Sequence[Drive]) -> None:
        self._drives = drives
        self.completions: CompletionQueue[DeleteDone] = CompletionQueue()

    def accept(self, items: Sequence[DeleteItem], done: DeletesDone) -> None:
        """Delete them on each drive. Overloaded, and nothing done, if one has no room."""
        if any(len(items) > drive.deletes_left for drive in self._drives):
            raise Overloaded("A drive's queue of deletions is full.")
        self.completions.promised += len(items)
        batch = _Deletions(self.completions, items, done, len(self._drives))
        numbered = [item._replace(tag=at) for at, item in enumerate(items)]
        for drive in self._drives:
            drive.delete(numbered, batch.collect)


class _Deletions:
    """One batch, until every drive has reported each of its deletions."""

    def __init__(
        self,
        completions: CompletionQueue[DeleteDone],
        items: Sequence[DeleteItem],
        done: DeletesDone,
        drives: int,
    ) -> None:
        self._completions = completions
        self._done = done
        self._left = [drives] * len(items)
        self._so_far = [DeleteDone(item.tag, None, found=False) for item in items]

    def collect(self, answers: Sequence[DeleteDone]) -> None:
        """Take a drive's results; its tags are positions in the batch."""
        for answer in answers:
            at = answer.tag
            so_far = self._so_far[at]
            now = DeleteDone(
                so_far.tag,
                so_far.error or answer.error,
                so_far.found or answer.found,
                so_far.size_bytes + answer.size_bytes,
                so_far.is_overwritten or answer.is_overwritten,
            )
            self._so_far[at] = now
            self._left[at] -= 1
            if not self._left[at]:
                self._completions.add(self._done, now)


class SessionSteps:
    """All steps of sessions that have not been reported yet."""

    def __init__(self, drives: Sequence[Drive], placement: Placement) -> None:
        self._drives = drives
        self._placement = placement
        self.completions: CompletionQueue[SessionDone] = CompletionQueue()

    def accept(self, items: Sequence[SessionItem], done: SessionsDone) -> None:
        """Execute each step on the drive of its session. Overloaded, and nothing done, if a drive has no room."""
        by_drive: dict[int, list[SessionItem]] = {}
        for item in items:
            by_drive.setdefault(self._where(item.name), []).append(item)
        if any(len(some) > self._drives[where].sessions_left for where, some in by_drive.items()):
            raise Overloaded("A drive's queue of session changes is full.")
        self.completions.promised += len(items)
        for where, some in by_drive.items():
            drive = self._drives[where]
            others = [one for one in self._drives if one is not drive]
            numbered = [
                item._replace(
                    tag=at,
                    durability=Durability.SYNCED if item.step is SessionStep.REMOVE else item.durability,
                )
                for at, item in enumerate(some)
            ]
            drive.change_sessions(numbered, _Steps(self.completions, some, done, others).collect)

    def _where(self, name: SessionName) -> int:
        order = self._placement.order(name.tenant, name.user)
        for where in order:
            if self._drives[where].holds_session(name):
                return where
        return next((where for where in order if self._drives[where].takes_puts), order[0])


class _Steps:
    """The steps of one batch that one drive executes."""

    def __init__(
        self,
        completions: CompletionQueue[SessionDone],
        items: Sequence[SessionItem],
        done: SessionsDone,
        others: Sequence[Drive],
    ) -> None:
        self._completions = completions
        self._items = items
        self._done = done
        self._others = others

    def collect(self, answers: Sequence[SessionDone]) -> None:
        """Take the drive's results; its tags are positions among the items."""
        for answer in answers:
            item = self._items[answer.tag]
            result = answer._replace(tag=item.tag)
            if item.delete_blocks and answer.error is None and answer.unreferenced:
                gone = self._gone(result)
                for other in self._others:
                    other.drop(answer.unreferenced, gone)
            else:
                self._completions.add(self._done, result)

    def _gone(self, result: SessionDone) -> Callable[[StorageError | None], None]:
        """Report the step when the other drives have dropped its blocks too."""
        left, first = len(self._others), None

        def gone(error: StorageError | None) -> None:
            nonlocal left, first
            left -= 1
            first = first or error
            if not left:
                self._completions.add(self._done, result._replace(error=first))

        return gone


class AllManifests:
    """The sessions of all drives, read-only."""

    def __init__(self, drives: Sequence[Drive]) -> None:
        self._manifests = [drive.manifests for drive in drives]

    def get(self, name: SessionName) -> Stored | None:
        """Find a session."""
        return next((found for one in self._manifests if (found := one.get(name)) is not None), None)

    def keys(self, name: SessionName, first: int = 0, until: int | None = None) -> list[bytes] | None:
        """Return a session's block keys, or a range of them; None if there is no such session."""
        for manifests in self._manifests:
            keys = manifests.keys(name, first, until)
            if keys is not None:
                return keys
        return None

    def keys_of(
        self, tenant: bytes, manifest: Manifest, first: int = 0, until: int | None = None
    ) -> list[bytes]:
        """Return block keys of a session that was found; StorageError if one of their chunks is gone."""
        *others, last = self._manifests
        for manifests in others:
            with suppress(StorageError):
                return manifests.keys_of(tenant, manifest, first, until)
        return last.keys_of(tenant, manifest, first, until)

    def of_user(self, tenant: bytes, user: bytes, after: bytes = b"", limit: int = 1000) -> list[Listed]:
        """List a user's sessions, in order, starting after `after`."""
        found = (manifests.of_user(tenant, user, after, limit) for manifests in self._manifests)
        return sorted(chain.from_iterable(found))[:limit]

    def page(self, tenant: bytes, after: bytes, limit: int) -> tuple[list[tuple[SessionName, Listed]], bool]:
        """List sessions of one tenant, or with b"" of all, in the order of their names, starting after `after`."""
        pages = [manifests.page(tenant, after, limit) for manifests in self._manifests]
        found = sorted((one for some, _ in pages for one in some), key=lambda one: one[0])
        return found[:limit], len(found) > limit or any(more for _, more in pages)

    def __len__(self) -> int:
        return sum(map(len, self._manifests))

    def own_keys(self, name: SessionName) -> Iterator[set[bytes]]:
        """Yield the keys whose refcounts fall with this session, some at a time; a key repeats for each reference."""
        return chain.from_iterable(manifests.own_keys(name) for manifests in self._manifests)

    def references(self, names: Iterable[Name]) -> list[int]:
        """Return the refcount of each block."""
        names = list(names)
        counts = (manifests.references(names) for manifests in self._manifests)
        return [sum(each) for each in zip(*counts, strict=True)]
