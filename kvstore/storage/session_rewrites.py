"""Rewrites session records that are older than the drive's keys: manifests, and the chunks that they share.

Always holds: a manifest is rewritten as a step of its session, so in order with all other steps, and with chunks of its
user's own instead of older ones, which other users' sessions may name. A chunk that is still left after that is
encrypted with its tenant's key; its index entry moves to the new place only if it still names the old one, which is
wiped when the new record survives power loss.

It overwrites headers only: the rest of the old records is overwritten with all other free space.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.durability import Durability
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from kvstore.storage.sealing import NO_DOMAIN
from kvstore.storage.session_steps import Step, StepRecord
from kvstore.wire.record import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.errors import KvError, StorageError
    from kvstore.storage.items import SessionDone
    from kvstore.storage.manifests import Manifests, Place
    from kvstore.storage.session_writes import Sessions
    from kvstore.storage.wipes import Wipes
    from kvstore.storage.writes import RecordWrite, Writes

    Over = Callable[[KvError | None], None]

__all__ = ["SessionRewrites"]


class SessionRewrites:
    """The session rewrites of a drive."""

    def __init__(self, writes: Writes, wipes: Wipes, manifests: Manifests, sessions: Sessions) -> None:
        self._writes = writes
        self._wipes = wipes
        self._manifests = manifests
        self._sessions = sessions
        self._after: bytes | None = b""  # the session after which to continue; None: all were examined
        self._chunk_after: bytes | None = b""
        self._left_out = False
        self._chunk: tuple[Place, Over, bool] | None = None  # its old place, and whether it has moved

    @property
    def is_done(self) -> bool:
        """Return whether no such record is left."""
        return self._after is None and self._chunk_after is None and not self._left_out

    def begin_one(self, below: int, over: Over) -> int:
        """Begin to rewrite a record with a lower generation than this; return its size, 0 if none was begun.

        `over` is called when that has ended.
        """
        if self._after is not None:
            found, self._after = self._manifests.session_below(below, self._after)
            if found is None:
                return self.begin_one(below, over) if self._after is None else 0
            return self._begin_session(*found, over)
        if self._chunk_after is not None:
            at, self._chunk_after = self._manifests.chunk_below(below, self._chunk_after)
            return 0 if at is None else self._begin_chunk(*at, over)
        if self._left_out:
            self._after = self._chunk_after = b""
            self._left_out = False
        return 0

    def _begin_session(self, name: SessionName, place: Place, over: Over) -> int:
        if self._sessions.is_changing(name):
            self._left_out = True  # another step is under way, which may rewrite it as well
            return 0

        def done(ends: Sequence[SessionDone]) -> None:
            (end,) = ends
            self._left_out = self._left_out or end.error is not None
            over(end.error)

        self._sessions.accept([SessionItem(name, SessionStep.REWRITE, Durability.WRITTEN, 0)], done)
        return place.length

    def _begin_chunk(self, tenant: bytes, chunk: bytes, place: Place, over: Over) -> int:
        payload = b"".join(self._manifests.chunk_keys(tenant, chunk))
        item = SessionItem(SessionName(tenant, NO_DOMAIN, b""), SessionStep.REWRITE, Durability.WRITTEN, 0)
        self._chunk = (place, over, False)
        self._writes.add(
            StepRecord(self._writes, self, Step(item, _nobody), Kind.CHUNK, tenant, chunk, payload)
        )
        return place.length

    def publish(self, records: Sequence[RecordWrite]) -> None:
        """Put the new place of a chunk into the index, unless it has left the old one."""
        for record in records:
            assert isinstance(record, StepRecord)
            assert self._chunk is not None
            old, over, _ = self._chunk
            has_moved = self._manifests.move_chunk(record.tenant, record.key, old, record.place)
            self._chunk = (old, over, has_moved)

    def finish(self, records: Sequence[RecordWrite], error: KvError | None) -> None:
        """Wipe the place that the chunk doesn't have; there is one at a time."""
        (record,) = records
        assert isinstance(record, StepRecord)
        assert self._chunk is not None
        (old, over, has_moved), self._chunk = self._chunk, None
        if error is not None:
            self._left_out = True
            over(error)
            return
        if not has_moved:
            self._wipes.free([(record.offset, len(record.payload))])
            over(None)
            return

        def synced(error: StorageError | None) -> None:
            if error is None:
                self._wipes.free([(old.offset, old.length)])

        self._writes.after_sync(synced, unhurried=True)
        over(None)


def _nobody(_: Sequence[SessionDone]) -> None:
    """Ignore the end of a step that no client made."""
