"""A step of a session that has not been reported yet, and the records that it writes.

`kvstore.storage.session_writes` decides their order.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from kvstore.limits import FINGERPRINT_BYTES, HEADER_BYTES
from kvstore.storage.manifests import Place
from kvstore.storage.writes import RecordWrite
from kvstore.wire.record import Header, Kind, record_bytes
from nic_offload.checksum import crc32c
from nic_offload.memory import undumped

if TYPE_CHECKING:
    import mmap

    from kvstore.errors import KvError
    from kvstore.storage.index import Name
    from kvstore.storage.items import SessionItem, SessionsDone
    from kvstore.storage.writes import Owner, Writes
    from kvstore.wire.manifest import Manifest

__all__ = ["Step", "StepRecord"]

_NO_FINGERPRINT: Final = bytes(FINGERPRINT_BYTES)


class Step:
    """One step of one session."""

    __slots__ = (
        "chunks_left",
        "done",
        "error",
        "head",
        "item",
        "left",
        "manifest",
        "records",
        "unreferenced",
    )

    def __init__(self, item: SessionItem, done: SessionsDone) -> None:
        self.item = item
        self.done = done
        self.manifest: Manifest | None = None
        self.records: list[StepRecord] = []
        self.head: StepRecord | None = None
        self.left = 0
        self.error: KvError | None = None
        self.unreferenced: list[Name] = []
        self.chunks_left: list[Place] = []  # by an erasure, until all of them are overwritten


class StepRecord(RecordWrite):
    """A manifest or a chunk being written, in its own memory; if it is encrypted, with the user's key."""

    __slots__ = ("_memory", "crc32c", "key", "kind", "payload", "step")

    def __init__(
        self,
        writes: Writes,
        owner: Owner,
        step: Step,
        kind: Kind,
        tenant: bytes,
        key: bytes,
        payload: bytes,
    ) -> None:
        size_bytes = record_bytes(len(payload))
        self._memory = undumped(size_bytes)
        self._memory[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        super().__init__(writes, owner, _address(self._memory), size_bytes, tenant, step.item.name.user)
        self.order = self.step = step
        self.kind = kind
        self.key = key
        self.payload = payload
        self.crc32c = crc32c(payload)

    @property
    def place(self) -> Place:
        """Return where it is, once it has been begun."""
        assert self.generation, "a record that has no place is in no index"
        return Place(self.offset, len(self.payload), self.crc32c, self.generation)

    def header(self) -> Header:
        """Return the header, now that place and generation are known."""
        return Header(
            self.kind,
            self.key,
            self.tenant,
            _NO_FINGERPRINT,
            self.generation,
            len(self.payload),
            self.crc32c,
            0,
        )


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
