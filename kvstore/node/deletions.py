"""Recent deletions and erasures: copies that were read before them are refused.

A client that finds a block on its second owner puts it back to the first. Between its get and that put, the block may
have been deleted on both.

What always holds: a copy is refused if its block was deleted since it was read, by this node's own clock; and if it
was read before the node started, or before a deletion that is no longer remembered. At most `DELETIONS_KEPT_MAX` are
remembered. For `ERASED_COPIES_REFUSED_MS` after an erasure began here, copies of what it erases are refused.
A block that had landed in a reserved slot before its deletion is not stored afterwards.
What it doesn't do: refuse a normal put of a deleted block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.limits import COPY_LATE_MS, DELETIONS_KEPT_MAX, ERASED_COPIES_REFUSED_MS, REPAIR_CALL_MS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.clock import Clock
    from kvstore.storage.index import Name

__all__ = ["Deletions", "Erasures"]

_MS = 1_000_000


class Deletions:
    """The deletions since the node started."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ns = clock.monotonic_ns()
        # The oldest first. Not a plain dict: repeated removal from its front gets slower and slower.
        self._at_ns: OrderedDict[Name, int] = OrderedDict()
        self._forgotten_ns = 0  # the latest deletion that is no longer remembered

    def __len__(self) -> int:
        return len(self._at_ns)

    def __contains__(self, name: Name) -> bool:
        return name in self._at_ns

    def note(self, names: Iterable[Name]) -> None:
        """Note that blocks are being deleted."""
        now_ns = self._clock.monotonic_ns()
        for name in names:
            self._at_ns[name] = now_ns
            self._at_ns.move_to_end(name)
        while len(self._at_ns) > DELETIONS_KEPT_MAX:
            self._forgotten_ns = self._at_ns.popitem(last=False)[1]

    def is_since(self, name: Name, at_ns: int) -> bool:
        """Whether a block has been deleted since then; of one that is no longer remembered, False."""
        return self._at_ns.get(name, -1) >= at_ns

    def may_be_since(self, name: Name, read_ms_ago: int) -> bool:
        """Whether a block may have been deleted since a copy of it was read, this long before the copy was sent here.

        The time in flight is unknown. It counts as `REPAIR_CALL_MS`, the longest that the call may take, against the
        node's start, and as `COPY_LATE_MS`, the longest that a silent connection lasts, against deletions.
        """
        read_ns = self._clock.monotonic_ns() - read_ms_ago * _MS
        since_ns = read_ns - COPY_LATE_MS * _MS
        return (
            read_ns - REPAIR_CALL_MS * _MS <= self._began_ns
            or 0 < since_ns <= self._forgotten_ns
            or since_ns <= self._at_ns.get(name, since_ns - 1)
        )


class Erasures:
    """The erasures since the node started."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ns: dict[
            tuple[bytes, bytes | None], int
        ] = {}  # by tenant and domain, None: the whole tenant

    def note(self, tenant: bytes, domain: bytes | None) -> None:
        """Note that an erasure begins, or continues."""
        now_ns = self._clock.monotonic_ns()
        self._until_ns = {named: until_ns for named, until_ns in self._until_ns.items() if until_ns > now_ns}
        self._until_ns[tenant, domain] = now_ns + ERASED_COPIES_REFUSED_MS * _MS

    def began_since(self, tenant: bytes, domain: bytes, since_ns: int) -> bool:
        """Whether an erasure of this domain has begun since then, as long as its copies are still refused."""
        begun_ns = since_ns + ERASED_COPIES_REFUSED_MS * _MS
        return any(self._until_ns.get((tenant, one), 0) >= begun_ns for one in (None, domain))

    def refuse_copies(self, tenant: bytes, domain: bytes) -> bool:
        """Whether copies of this domain's blocks may have been read on another node before it was erased there."""
        now_ns = self._clock.monotonic_ns()
        return any(self._until_ns.get((tenant, one), 0) > now_ns for one in (None, domain))
