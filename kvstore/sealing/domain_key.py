"""The key of an erase domain, or the record of a destroyed one. A wiped key stays wiped."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import Closed
from nic_offload import aead
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from kvstore.sealing.slots import Slot

__all__ = ["DomainKey", "Erased"]


class DomainKey(Handle):
    """The key of an erase domain, unsealed. Closing it wipes the key."""

    def __init__(self, number: int, slot: Slot, key: memoryview) -> None:
        self.number = number
        self.id = slot.id
        self.tenant = slot.tenant
        self.domain = slot.domain
        self._key = key
        self._wiped = False

    def __repr__(self) -> str:
        return f"DomainKey(number={self.number}, id={self.id.hex()})"

    @property
    def key(self) -> memoryview:
        """The key's 32 bytes; Closed once they are wiped."""
        if self._wiped:
            raise Closed("The domain key was wiped.")
        return self._key

    def close(self) -> None:
        """Wipe the key."""
        self._wiped = True
        aead.wipe(self._key)


class Erased(NamedTuple):
    """A destroyed key, by its slot's number and its id; without them if the domain never had one.

    With a number and no id: a slot that could not be read, and was overwritten because it might have had the key. If it
    is lost, it has no bytes of any key, and was not overwritten.
    """

    tenant: bytes
    domain: bytes
    number: int | None
    id: bytes | None
    at_ms: int
    is_earlier: bool = False  # an earlier erasure destroyed it
    is_lost: bool = False

    @property
    def is_unread(self) -> bool:
        """Whether the slot was overwritten without knowing whose key it had."""
        return self.number is not None and self.id is None and not self.is_lost
