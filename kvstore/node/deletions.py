"""What was deleted or erased lately: copies that were read before that are refused.

A client that finds a block on its second owner puts it back to the first. Between its get and that put, the block may
have been deleted on both.

What always holds: a copy is refused if its block was deleted since it was read, by this node's own clock; also if it
was read before the node started, or before a deletion that is no longer remembered. At most `DELETIONS_KEPT_MAX` are
remembered. For `ERASED_COPIES_REFUSED_MS` after an erasure began here no copy of what it erases is taken.
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
    """What was deleted since the node started."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ns = clock.monotonic_ns()
        # The oldest first. No plain dict: its front, if it is taken again and again, is found more and more slowly.
        self._at_ns: OrderedDict[Name, int] = OrderedDict()
        self._forgotten_ns = 0  # the latest of those that are not kept any more

    def __len__(self) -> int:
        return len(self._at_ns)

    def note(self, names: Iterable[Name]) -> None:
        """Blocks are being deleted."""
        now_ns = self._clock.monotonic_ns()
        for name in names:
            self._at_ns[name] = now_ns
            self._at_ns.move_to_end(name)
        while len(self._at_ns) > DELETIONS_KEPT_MAX:
            self._forgotten_ns = self._at_ns.popitem(last=False)[1]

    def may_be_since(self, name: Name, read_ms_ago: int) -> bool:
        """Whether a block may have been deleted since a copy of it was read, so long before it was sent here.

        How long it was under way nobody knows: to a node that lives no longer than the call may take that brings it,
        and to another one no longer than a connection lasts that says nothing.
        """
        read_ns = self._clock.monotonic_ns() - read_ms_ago * _MS
        since_ns = read_ns - COPY_LATE_MS * _MS
        return (
            read_ns - REPAIR_CALL_MS * _MS <= self._began_ns
            or 0 < since_ns <= self._forgotten_ns
            or since_ns <= self._at_ns.get(name, since_ns - 1)
        )


class Erasures:
    """What was erased since the node started."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ns: dict[
            tuple[bytes, bytes | None], int
        ] = {}  # by tenant and domain, None: the whole tenant

    def note(self, tenant: bytes, domain: bytes | None) -> None:
        """An erasure begins, or goes on."""
        now_ns = self._clock.monotonic_ns()
        self._until_ns = {named: until_ns for named, until_ns in self._until_ns.items() if until_ns > now_ns}
        self._until_ns[tenant, domain] = now_ns + ERASED_COPIES_REFUSED_MS * _MS

    def began_since(self, tenant: bytes, domain: bytes, since_ns: int) -> bool:
        """Whether an erasure of this domain has begun since then, if that was no longer ago than copies are refused."""
        begun_ns = since_ns + ERASED_COPIES_REFUSED_MS * _MS
        return any(self._until_ns.get((tenant, one), 0) >= begun_ns for one in (None, domain))

    def refuse_copies(self, tenant: bytes, domain: bytes) -> bool:
        """Whether copies of blocks of this domain may have been read, elsewhere, before it was erased there."""
        now_ns = self._clock.monotonic_ns()
        return any(self._until_ns.get((tenant, one), 0) > now_ns for one in (None, domain))
