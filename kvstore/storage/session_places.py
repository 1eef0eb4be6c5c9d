"""Old places of session records on the drive: they are wiped and freed, or overwritten if they are erased.

Always holds: records that a change replaces or gives up are wiped when no power loss can bring back what names them; a
removed session's manifests, older ones too, are wiped at once. An erased session's are overwritten, and so are the
chunks that only it named, those of earlier changes that still wait included: payloads first, headers when that
survives power loss (`kvstore.storage.stale_extents`). Until then the index lists them (`kvstore.storage.manifests`).

It doesn't find records wiped earlier: their payloads stay in free pages until something else is written there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.storage.overwriting import strike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.errors import StorageError
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.index import Index
    from kvstore.storage.manifests import Changed, Place, SessionName
    from kvstore.storage.wipes import Wipes
    from kvstore.storage.writes import Writes

    Held = dict[SessionName, dict[Place, None]]

__all__ = ["SessionPlaces"]


class SessionPlaces:
    """The old places of one drive."""

    def __init__(self, writes: Writes, wipes: Wipes, index: Index, keeping: Keeping) -> None:
        self._writes = writes
        self._wipes = wipes
        self._index = index
        self._keeping = keeping
        self._space = keeping.space
        self._replaced: Held = {}  # older manifests, until newer ones are synced
        self._given_up: Held = {}  # chunks, until that is synced

    def free_when_synced(self, name: SessionName, changed: Changed) -> None:
        """Free records that a change has replaced, when no power loss can bring back what names them.

        That may be another session: one that shared a chunk and was cut, if only its older manifest survives.
        """
        manifests = [] if changed.manifest is None else [changed.manifest]
        if not manifests and not changed.chunks:
            return
        _hold(self._replaced, name, manifests)
        _hold(self._given_up, name, changed.chunks)
        self._space.leaves(name.tenant, sum(place.pages for place in (*manifests, *changed.chunks)))

        def synced(error: StorageError | None) -> None:
            if error is None:
                due = _release(self._given_up, name, changed.chunks)
                due += _release(self._replaced, name, manifests)  # those not removed meanwhile
                self.free(name.tenant, due)

        self._writes.after_sync(synced, unhurried=True)

    def before(self, name: SessionName) -> list[Place]:
        """Return the places of a session's earlier records that are not wiped yet."""
        return [*self._replaced.get(name, ()), *self._given_up.get(name, ())]

    def manifests_left(self, name: SessionName, last: Place | None) -> list[Place]:
        """Return the manifests of a session that is removed, older ones too, which must not outlive it."""
        places = [*self._replaced.pop(name, ())]
        if last is not None:
            places.append(last)
            self._space.leaves(name.tenant, last.pages)
        return places

    def chunks_left(self, name: SessionName, chunks: Sequence[Place]) -> list[Place]:
        """Return these chunks, which an erased session has given up, and those that it had given up before."""
        self._space.leaves(name.tenant, sum(place.pages for place in chunks))
        return [*chunks, *self._given_up.pop(name, ())]

    def free(self, tenant: bytes, places: Sequence[Place]) -> None:
        """Wipe and free places."""
        self._space.gone(tenant, sum(place.pages for place in places))
        self._wipes.free((place.offset, place.length) for place in places)

    def erase(
        self,
        tenant: bytes,
        manifests: Sequence[Place],
        chunks: Sequence[Place],
        then: Callable[[StorageError | None], None],
    ) -> None:
        """Overwrite and free places that are noted in the index; call back when nothing is left there."""
        places = [*manifests, *chunks]
        pages = sum(place.pages for place in places)

        def unnamed(error: StorageError | None) -> None:
            if error is not None:
                then(error)
                return
            self._space.gone(tenant, pages)
            self._keeping.left.erase([(place.offset, place.length) for place in places])
            self._keeping.left.after_all(wiped)

        def wiped(error: StorageError | None) -> None:
            if error is None:
                self._keeping.after_scrubs(overwritten)
            else:
                then(error)

        def overwritten(error: StorageError | None) -> None:
            if error is None:
                strike(self._index, places)
            then(error)

        if chunks:  # as above: a session that power loss brings back may name them
            self._writes.after_sync(unnamed)
        else:
            unnamed(None)


def _hold(held: Held, name: SessionName, places: Iterable[Place]) -> None:
    for place in places:
        held.setdefault(name, {})[place] = None


def _release(held: Held, name: SessionName, places: Iterable[Place]) -> list[Place]:
    """Remove those of these places that are held."""
    of_name = held.get(name, {})
    due = [place for place in places if place in of_name]
    for place in due:
        of_name.pop(place, None)
    if not of_name:
        held.pop(name, None)
    return due
