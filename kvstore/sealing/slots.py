"""The keyring's bytes: its header, and slots with one wrapped key each (docs/sealing.md).

What always holds: a slot lies within one sector, and so does a header; no slot is all zeros, so zeros are a slot that
the drive has lost; the clear part of a slot, with the store and the slot's number, is authenticated by the tag of its
wrapped key. Every wrapping draws a new nonce.
What it doesn't do: read or write a file, or decide which key wraps which.
"""

from __future__ import annotations

import enum
import secrets
import struct
from io import FileIO
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.errors import Corrupt, WrongVersion
from kvstore.limits import (
    MASTER_ID_BYTES_MAX,
    MASTER_WRAPPED_BYTES_MAX,
    PAGE_BYTES,
    SECTOR_BYTES,
    TENANT_BYTES,
)
from nic_offload import aead, wrapped_keys
from nic_offload.checksum import crc32c
from nic_offload.secret_keys import new_key

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "Header",
    "Kind",
    "Root",
    "Slot",
    "State",
    "fresh_id",
    "fresh_key",
    "overwritten",
    "pack_header",
    "pack_slot",
    "parse_header",
    "parse_slot",
    "root_associated",
    "unwrapped",
    "wrapped",
]

FORMAT_VERSION: Final = 2
VERSION_WITHOUT_MARKS: Final = 1  # the format in which free slots are zeros
DOMAIN_BYTES: Final = 16
ID_BYTES: Final = 8
UUID_BYTES: Final = 16
SLOT_BYTES: Final = 128
CLEAR_BYTES: Final = 64  # of a slot, covered by the tag of its key
CHECKED_BYTES: Final = SLOT_BYTES - 4  # covered by its CRC32C
SLOTS_PER_PAGE: Final = PAGE_BYTES // SLOT_BYTES
HEADER_PAGES: Final = 2  # a copy in the first sector of each
NO_ID: Final = bytes(ID_BYTES)
NO_NAME: Final = bytes(TENANT_BYTES)

_MAGIC: Final = b"TKVKEYRG"
_HEADER: Final = struct.Struct(f"<8sI4x16sQQ{MASTER_ID_BYTES_MAX}s")
_ROOT: Final = struct.Struct(f"<8sI{MASTER_WRAPPED_BYTES_MAX}sI")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = SECTOR_BYTES - _CRC.size
_CLEAR: Final = struct.Struct("<II8s16s16sQ8s")
_SEALED_BYTES: Final = aead.NONCE_BYTES + aead.KEY_BYTES + aead.TAG_BYTES
_NUMBER: Final = struct.Struct("<I")
_PURPOSE: Final = b"tkv root"
_FREE: Final = b"FREE".ljust(CHECKED_BYTES, b"\0")

assert (CLEAR_BYTES, SLOT_BYTES, UUID_BYTES) == (
    wrapped_keys.CLEAR_BYTES,
    wrapped_keys.SLOT_BYTES,
    wrapped_keys.STORE_BYTES,
)
assert _CLEAR.size == CLEAR_BYTES
assert CLEAR_BYTES + _SEALED_BYTES + _CRC.size == SLOT_BYTES
assert SECTOR_BYTES % SLOT_BYTES == 0
assert _HEADER.size + _ROOT.size <= _CRC_AT


class State(enum.IntEnum):
    """The state of a slot. The values are far apart, so that a few flipped bits don't turn one into another."""

    FREE = int.from_bytes(b"FREE", "little")  # no record names it
    LIVE = int.from_bytes(b"LIVE", "little")
    GONE = int.from_bytes(b"GONE", "little")  # its key was destroyed; its name and the time remain


class Kind(enum.IntEnum):
    """The purpose of a key."""

    UNREAD = 0  # destroyed while unreadable
    STORE = 1
    TENANT = 2
    DOMAIN = 3


class Slot(NamedTuple):
    """A slot that is not free."""

    state: int
    kind: int
    id: bytes
    tenant: bytes
    domain: bytes  # of a tenant's key: its version, as u64
    when_ms: int  # when the key was made, or destroyed
    wrapped_by: bytes  # the id of the key that wraps this one
    sealed: bytes = bytes(_SEALED_BYTES)  # nonce, key, tag

    @property
    def version(self) -> int:
        """The version of a tenant's key; the highest is in use."""
        return int.from_bytes(self.domain[:8], "little")

    def gone(self, at_ms: int) -> Slot:
        """The slot after its key was destroyed."""
        return self._replace(state=State.GONE, when_ms=at_ms, wrapped_by=NO_ID, sealed=bytes(_SEALED_BYTES))


class Root(NamedTuple):
    """A root key: its id, and the key as the master key wraps it."""

    id: bytes
    wrapped: bytes


class Header(NamedTuple):
    """The keyring's header."""

    store_uuid: bytes
    sequence: int  # of two copies, the one with the higher sequence counts
    made_ms: int
    master_id: str
    root: Root
    slots: int  # how many there are; 0: unknown, in the format in which free slots are zeros


def fresh_id() -> bytes:
    """A random id; never all zeros."""
    while (drawn := secrets.token_bytes(ID_BYTES)) == NO_ID:
        pass
    return drawn


def fresh_key() -> memoryview:
    """A random key in locked memory, without another copy; its owner wipes it."""
    key = new_key()
    with FileIO("/dev/urandom") as source:
        got = source.readinto(key)
    assert got == len(key), got
    return key


def root_associated(store_uuid: bytes, root_id: bytes) -> bytes:
    """The associated data that a master key authenticates with a root key."""
    return _PURPOSE + store_uuid + root_id


def pack_header(header: Header) -> bytes:
    """A header as one sector."""
    master = header.master_id.encode()
    assert len(master) <= MASTER_ID_BYTES_MAX, master
    fixed = _HEADER.pack(
        _MAGIC, FORMAT_VERSION, header.store_uuid, header.sequence, header.made_ms, master
    ) + _ROOT.pack(header.root.id, len(header.root.wrapped), header.root.wrapped, header.slots)
    fixed = fixed.ljust(_CRC_AT, b"\0")
    return fixed + _CRC.pack(crc32c(fixed))


def parse_header(sectors: list[bytes]) -> Header:
    """The valid copy with the highest sequence; Corrupt if none is valid."""
    found = [header for header in map(_header_in, sectors) if header is not None]
    if found:
        return max(found, key=lambda header: header.sequence)
    for sector in sectors:
        version = int.from_bytes(sector[8:12], "little")
        if sector[:8] == _MAGIC and version not in (FORMAT_VERSION, VERSION_WITHOUT_MARKS):
            raise WrongVersion(f"The keyring has format {version}; this build reads format {FORMAT_VERSION}.")
    raise Corrupt("The keyring's header is damaged, or the file is no keyring; it was left unchanged.")


def _header_in(sector: bytes) -> Header | None:
    magic, version, store_uuid, sequence, made_ms, master = _HEADER.unpack_from(sector)
    if magic != _MAGIC or version not in (FORMAT_VERSION, VERSION_WITHOUT_MARKS):
        return None
    if _CRC.unpack_from(sector, _CRC_AT)[0] != crc32c(sector[:_CRC_AT]):
        return None
    root_id, length, blob, slots = _ROOT.unpack_from(sector, _HEADER.size)
    master_id = master.rstrip(b"\0").decode("utf-8", "replace")
    return Header(store_uuid, sequence, made_ms, master_id, Root(root_id, blob[:length]), slots)


def overwritten(at_ms: int) -> Slot:
    """A slot after an unreadable key in it was destroyed: it may be reused."""
    return Slot(State.GONE, Kind.UNREAD, NO_ID, NO_NAME, NO_NAME, at_ms, NO_ID)


def pack_slot(slot: Slot | None) -> bytes:
    """A slot's bytes; None: a free slot."""
    row = _FREE if slot is None else _CLEAR.pack(*slot[:-1]) + slot.sealed
    return row + _CRC.pack(crc32c(row))


def parse_slot(row: bytes) -> Slot | None:
    """A slot from its bytes, None if it is free; Corrupt if it is damaged."""
    if row == pack_slot(None):
        return None
    slot = Slot._make((*_CLEAR.unpack_from(row), row[CLEAR_BYTES:CHECKED_BYTES]))
    whole = _CRC.unpack_from(row, CHECKED_BYTES)[0] == crc32c(row[:CHECKED_BYTES])
    if not whole or slot.state not in (State.LIVE, State.GONE) or slot.kind not in tuple(Kind):
        raise Corrupt("A slot of the keyring is damaged; nothing sealed with its key can be opened.")
    return slot


def wrapped(slot: Slot, key: Buffer, by: Buffer, store_uuid: bytes, number: int) -> Slot:
    """The slot with a key in it, wrapped by another under a new nonce."""
    nonce = secrets.token_bytes(aead.NONCE_BYTES)
    return slot._replace(sealed=nonce + aead.seal(by, nonce, _associated(slot, store_uuid, number), key))


def unwrapped(slot: Slot, by: Buffer, store_uuid: bytes, number: int) -> memoryview:
    """The key in a slot, in locked memory that the caller wipes; Corrupt if any part of the slot was changed."""
    nonce, sealed = slot.sealed[: aead.NONCE_BYTES], slot.sealed[aead.NONCE_BYTES :]
    try:
        return aead.unseal_key(by, nonce, _associated(slot, store_uuid, number), sealed)
    except aead.NotAuthentic as error:
        raise Corrupt(
            f"The key in slot {number} of the keyring was changed, or belongs elsewhere."
        ) from error


def _associated(slot: Slot, store_uuid: bytes, number: int) -> bytes:
    return store_uuid + _NUMBER.pack(number) + _CLEAR.pack(*slot[:-1])
