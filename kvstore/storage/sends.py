"""Blocks that a reader (`nic_offload.reader`) reads from the drive and sends.

Always holds: the extents are pinned and the blocks guarded from before they are handed to the reader until the drive is
done with them; they are handed over at their tenant's turn at the drive, and count as its work until then.

It checks nothing and reports nothing: the reader checks header and payload, and a record that is corrupt or could not
be read is read again the usual way (`kvstore.storage.block_reads`), which handles the failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.limits import PAGE_BYTES
from kvstore.storage.eviction.types import Guard
from kvstore.storage.traffic import Elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.extents import Extents
    from kvstore.storage.index import Entry
    from kvstore.storage.traffic import Traffic

__all__ = ["Send", "Sends"]


class Send:
    """Blocks of one tenant that are passed to a reader together."""

    reads: Final = True

    __slots__ = ("_start", "entries", "sends", "size_bytes", "tag", "tenant")

    def __init__(
        self, tenant: bytes, entries: Sequence[Entry], size_bytes: int, start: Callable[[], bool]
    ) -> None:
        """`start` passes them to the reader, and returns whether any is still wanted."""
        self.tenant = tenant
        self.entries = entries
        self.size_bytes = size_bytes  # of their records
        self._start = start
        self.sends: Sends | None = None
        self.tag = 0

    def begin(self, tag: int) -> Elsewhere | None:
        """Pass them to the reader."""
        assert self.sends is not None
        self.tag = tag
        if self._start():
            self.sends.begun(self)
            return Elsewhere.BEGUN
        self.sends.release(self)
        return None

    def end(self, result: int) -> None:
        """Nothing ends here: `Sends.over` is called when the drive is done with them."""
        raise AssertionError(f"it was handed on, and ended here with {result}")


class Sends:
    """All sends of a drive."""

    def __init__(self, extents: Extents, traffic: Traffic, keeping: Keeping) -> None:
        self._extents = extents
        self._traffic = traffic
        self._keeping = keeping
        self.blocks = 0  # those that are not over
        self._begun: dict[int, Send] = {}  # passed on, by their tags

    def accept(self, sends: Iterable[Send]) -> None:
        """Queue them."""
        for send in sends:
            send.sends = self
            self.blocks += len(send.entries)
            self._extents.pin_all([entry.offset // PAGE_BYTES for entry in send.entries])
            self._keeping.guard([entry.generation for entry in send.entries], Guard.PIN)
            self._traffic.add(send)

    def begun(self, send: Send) -> None:
        """Note that they were passed to the reader."""
        self._begun[send.tag] = send

    def over(self, send: Send) -> None:
        """Note that the drive is done with them."""
        del self._begun[send.tag]
        self._traffic.ended(send.tag)
        self.release(send)

    def close(self) -> None:
        """End all sends: the readers are closed, so the drive is done with them."""
        for send in list(self._begun.values()):
            self.over(send)

    def release(self, send: Send) -> None:
        """Release their extents."""
        self.blocks -= len(send.entries)
        self._extents.unpin_all([entry.offset // PAGE_BYTES for entry in send.entries])
        self._keeping.unguard([entry.generation for entry in send.entries], Guard.PIN)
