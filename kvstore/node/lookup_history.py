"""The history of look-ups and their outcomes: bounded, in memory and in a log in the data folder.

What always holds: at most `LOOKUPS_MAX` look-ups and `LOOKUPS_BYTES_MAX`; the oldest of the tenant that has the most
make room. A tenant's look-ups are found under its own name only. A look-up is recorded once, when it ends, as one
note whatever the number of its blocks; it contains no key. Nothing that a caller reports here ends a call.
What it doesn't do: wait for the disk (`lookup_log`), or decide anything.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvstore.limits import (
    LEASES_OVER_REMEMBERED,
    LOOKUP_REPORTED_LATE_MS,
    LOOKUPS_BYTES_MAX,
    LOOKUPS_LISTED_MAX,
    LOOKUPS_MAX,
    LOOKUPS_REPORTED_BYTES_MAX,
    SESSION_BYTES,
    UI_LOOKUPS_MAX,
    UI_LOOKUPS_SCANNED_MAX,
    USER_BYTES,
)
from kvstore.lookups import Lookup, bounded, clean_id
from kvstore.node.lookup_log import Kept
from kvstore.node.lookup_progress import Looking
from kvstore.wire import lookups_pb2 as pb
from kvstore.wire.lookup_messages import LOOKUPS_HEADER, REQUEST_HEADER, lookup_message, lookup_of

if TYPE_CHECKING:
    from collections.abc import Container

    from kvstore.clock import Clock
    from kvstore.lookups import Kind
    from kvstore.node.call_spans import NodeSpans
    from kvstore.node.calls import HasMetadata
    from kvstore.node.lookup_log import LookupLog
    from kvstore.storage.manifests import SessionName
    from kvstore.storage.store import Store

__all__ = ["Lookups"]

_NO_SESSION = bytes(USER_BYTES + SESSION_BYTES)
_ROOM_PART = 64  # one part in this many is freed at once


class Lookups:
    """The look-ups of a node."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        on_disk: LookupLog | None = None,
        spans: NodeSpans | None = None,
    ) -> None:
        self.spans = spans
        self.store = store
        self.clock = clock
        self._on_disk = on_disk
        self._of: dict[bytes, deque[Kept]] = {}  # by tenant, the oldest first
        self._bytes_of: dict[bytes, int] = {}
        self._count = self._bytes = 0
        self._leases_over: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        for kept in on_disk.load() if on_disk is not None else ():
            self._keep(kept)

    def __len__(self) -> int:
        return self._count

    # --- what happens

    def begin(
        self, caller: HasMetadata, tenant: bytes, kind: Kind, blocks: int, session: SessionName | None = None
    ) -> Looking:
        """Begin a look-up. The caller's report of look-ups that did not reach the node is recorded too."""
        request_id = ""
        for key, value in caller.invocation_metadata() or ():
            if key == REQUEST_HEADER and isinstance(value, str):
                request_id = clean_id(value)
            elif key == LOOKUPS_HEADER and isinstance(value, bytes):
                self._add_reported(tenant, value)
        whose = _NO_SESSION if session is None else session.user + session.session
        parent = None if self.spans is None else self.spans.parent_of(caller)
        return Looking(self, tenant, whose, request_id, kind, blocks, parent)

    def _add_reported(self, tenant: bytes, data: bytes) -> None:
        try:
            message = pb.LookupsByCaller.FromString(data[:LOOKUPS_REPORTED_BYTES_MAX])
        except DecodeError:
            return  # the history is for people, and no reason to refuse blocks
        now_ms = self.clock.wall_ms()
        for reported in message.lookups:
            ago_ms = min(max(0, message.sent_unix_ms - reported.at_unix_ms), LOOKUP_REPORTED_LATE_MS)
            reported.at_unix_ms, reported.by_caller = now_ms - ago_ms, True
            lookup = lookup_of(reported)
            self.record(
                tenant,
                _NO_SESSION,
                Lookup(
                    clean_id(lookup.request_id),
                    lookup.kind,
                    lookup.at_unix_ms,
                    lookup.took_us,
                    lookup.blocks,
                    bounded(lookup.runs),
                    by_caller=True,
                    detail=lookup.detail,
                ),
            )

    def lease_over(self, tenant: bytes, key: bytes) -> None:
        """Note that a lease of a block was over before the block landed."""
        self._leases_over[tenant, key] = self.clock.wall_ms()
        self._leases_over.move_to_end((tenant, key))
        if len(self._leases_over) > LEASES_OVER_REMEMBERED:
            self._leases_over.popitem(last=False)

    def lease_over_ms(self, tenant: bytes, key: bytes) -> int:
        """When the last lease of a block was over before the block landed; 0: none is remembered."""
        return self._leases_over.get((tenant, key), 0)

    def record(self, tenant: bytes, session: bytes, lookup: Lookup) -> None:
        """Record a look-up that has ended."""
        message = lookup_message(lookup).SerializeToString()
        kept = Kept(tenant, session, lookup.request_id.encode(), message)
        self._keep(kept)
        if self._on_disk is not None:
            self._on_disk.append(kept)

    def _keep(self, kept: Kept) -> None:
        self._of.setdefault(kept.tenant, deque()).append(kept)
        self._bytes_of[kept.tenant] = self._bytes_of.get(kept.tenant, 0) + kept.size_bytes
        self._count += 1
        self._bytes += kept.size_bytes
        if self._count > LOOKUPS_MAX or self._bytes > LOOKUPS_BYTES_MAX:
            self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest look-ups of the tenant with the most, several at once, so that it is rarely searched for."""
        tenant = max(self._bytes_of, key=self._bytes_of.__getitem__)
        mine = self._of[tenant]
        until_bytes = self._bytes_of[tenant] - LOOKUPS_BYTES_MAX // _ROOM_PART
        until_count = len(mine) - LOOKUPS_MAX // _ROOM_PART
        while mine and (self._bytes_of[tenant] > until_bytes and len(mine) > until_count):
            gone = mine.popleft()
            self._bytes_of[tenant] -= gone.size_bytes
            self._bytes -= gone.size_bytes
            self._count -= 1
        if not mine:
            del self._of[tenant], self._bytes_of[tenant]

    # --- queries

    def missed(self, tenant: bytes, outcomes: Container[int]) -> list[pb.Lookup]:
        """The last look-ups with one of these outcomes, of one tenant or, with b"", of all; the latest first."""
        notes = (self._of.get(tenant, deque()),) if tenant else tuple(self._of.values())
        share = UI_LOOKUPS_SCANNED_MAX // max(1, len(notes))
        recent = (kept for mine in notes for kept in islice(reversed(mine), share))
        messages = (pb.Lookup.FromString(kept.message) for kept in recent)
        found = [one for one in messages if any(run.outcome in outcomes for run in one.runs)]
        return sorted(found, key=lambda one: -one.at_unix_ms)[:UI_LOOKUPS_MAX]

    def listed(
        self, tenant: bytes, request_id: str, session: SessionName | None, last: int
    ) -> pb.ListLookupsResponse:
        """A tenant's latest look-ups of a request, of a session, or of all; the earliest of them first."""
        mine = self._of.get(tenant, deque())
        wanted = clean_id(request_id).encode()
        whose = None if session is None else session.user + session.session
        found = (
            kept
            for kept in reversed(mine)
            if (not wanted or kept.request_id == wanted) and whose in {None, kept.session}
        )
        limit = min(last or LOOKUPS_LISTED_MAX, LOOKUPS_LISTED_MAX)
        lookups = [pb.Lookup.FromString(kept.message) for kept in islice(found, limit)][::-1]
        lookups.sort(key=lambda one: one.at_unix_ms)
        return pb.ListLookupsResponse(
            lookups=lookups,
            now_unix_ms=self.clock.wall_ms(),
            remembered=len(mine),
            since_unix_ms=pb.Lookup.FromString(mine[0].message).at_unix_ms if mine else 0,
            unwritten=0 if self._on_disk is None else self._on_disk.unwritten,
        )

    def close(self) -> None:
        """Write queued look-ups."""
        if self._on_disk is not None:
            self._on_disk.close()
