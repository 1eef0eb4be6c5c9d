"""The codec of a drive's superblock, its roll's place and its record headers, as `docs/record-format.md` has them.

It is pure: bytes in, values out, and back. Bad bytes are an outcome (`Flaw`), never an exception, because
a recovery reads millions of pages that are not headers.

Always holds: a header is accepted only with the tag that this store's secret makes from its bytes, its drive
and its own offset, and an encrypted record's only if its key opens it; `pack` and `encrypt` fill the page to its
end, so what a slot held before does not reach the drive.

It doesn't check payloads (readers of payloads do), or whether a header is the expected one.
"""

from __future__ import annotations

import ctypes
import enum
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import Corrupt
from kvstore.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    DRIVES_MAX,
    FINGERPRINT_BYTES,
    GENERATION_MAX,
    HEADER_BYTES,
    KEY_BYTES,
    PAGE_BYTES,
    SECTOR_BYTES,
    TENANT_BYTES,
)
from nic_offload import vault
from nic_offload.checksum import crc32c
from nic_offload.header_pages import FIXED_BYTES, row_of, write_tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "ENCRYPTED_MAGIC",
    "FORMAT_VERSION",
    "HEADER_USED_BYTES",
    "RECORD_MAGIC",
    "ROLL_COPIES",
    "SUPERBLOCK_COPIES",
    "Flaw",
    "Header",
    "HeaderCodec",
    "KeyringMark",
    "Kind",
    "Superblock",
    "foreign_version",
    "pack_superblock",
    "parse_superblock",
    "record_bytes",
    "records_begin",
    "roll_bytes",
    "roll_offset",
]

FORMAT_VERSION = 3
SUPERBLOCK_COPIES = 2
ROLL_COPIES = 2
RECORD_MAGIC = b"TKVRECRD"
ENCRYPTED_MAGIC = b"TKVSEALD"

_DRIVE_MAGIC = b"TKVDRIVE"
_TAG_BYTES = 16
_SUPERBLOCK = struct.Struct("<8sII16s16s32sQQQQQIIQI")
_KEYRING = struct.Struct("<8sQQ")  # after the superblock's CRC, with a CRC of all before; or zeros
_CRC = struct.Struct("<I")
_MAGIC_VERSION = struct.Struct("<8sI")
_FIXED = struct.Struct("<8sHHI32s16s16sQQI4x")  # what the tag covers
_ROW = row_of(_FIXED.format[1:])
_HEADER = struct.Struct(f"<{_FIXED.size}s{_TAG_BYTES}s")
_KEYRING_AT = _SUPERBLOCK.size + _CRC.size
_KEYRING_END = _KEYRING_AT + _KEYRING.size + _CRC.size
_OFFSET = struct.Struct("<Q")
_EXPIRES_AT = 88  # in the header of a record,
_ENCRYPTED_EXPIRES_AT = 24  # and of one that is encrypted
_ENCRYPTED_ROW = vault.row_of(_FIXED.format[1:])
_IDENTITY_BYTES = 72 + 16  # of an encrypted record, and its tag

HEADER_USED_BYTES = _HEADER.size + _IDENTITY_BYTES  # the rest of the page is zeros, and is ignored

assert struct.calcsize("<32s16s16s") == KEY_BYTES + TENANT_BYTES + FINGERPRINT_BYTES
assert HEADER_USED_BYTES <= SECTOR_BYTES, "a header lies in one sector"
assert _FIXED.size == FIXED_BYTES


class Kind(enum.IntEnum):
    """What a record is. Other numbers are reserved: a scan jumps over such a record."""

    BLOCK = 1
    SESSION = 2
    CHUNK = 3


class Flaw(enum.Enum):
    """Why bytes are not what they should be."""

    SHORT = "fewer bytes than the structure has"
    MAGIC = "no magic"
    VERSION = "another format version"
    CHECK = "the checksum or the tag is wrong"
    RANGE = "a field is out of its range"
    NO_KEY = "the key of an encrypted record is missing"
    KEY_DAMAGED = "the key of an encrypted record can't be opened, and was not destroyed"


class KeyringMark(NamedTuple):
    """The keyring that encrypts a drive's records, and its count of changes when this was written."""

    id: bytes  # of the store's key, which stays the same in every rotation
    sequence: int


class Superblock(NamedTuple):
    """The contents of a superblock."""

    store_uuid: bytes
    drive_uuid: bytes
    drive_index: int
    secret: bytes
    capacity_bytes: int
    epoch: int
    created_ms: int
    generation_ceiling: int
    roll_generation: int  # 0: there is no roll
    roll_copy: int
    roll_crc32c: int
    set_number: int  # of the last set of drives that this one was part of
    set_drives: int  # how many drives the store had then, including those left out
    keyring: KeyringMark | None = None  # None: no record is encrypted
    plain_below: int = 0  # records of lower generations, and free pages, may be in the clear; 0: nothing is


class Header(NamedTuple):
    """The contents of a record's header; the codec handles the offset and the tag."""

    kind: int
    key: bytes
    tenant: bytes
    fingerprint: bytes
    generation: int
    length: int
    crc32c: int
    expires_ms: int
    domain: int = 0  # the number, from 1, of the key that it is encrypted with; 0: it is in the clear


def record_bytes(length: int) -> int:
    """Bytes on the drive of a record with a payload of `length` bytes: whole pages, including the header's."""
    return HEADER_BYTES + -(-length // PAGE_BYTES) * PAGE_BYTES


def roll_bytes(capacity_bytes: int) -> int:
    """Bytes of one copy of the roll: a bit for each page of the drive, in whole pages."""
    return -(-capacity_bytes // PAGE_BYTES // (8 * PAGE_BYTES)) * PAGE_BYTES


def roll_offset(capacity_bytes: int, copy: int) -> int:
    """Where a copy of the roll begins."""
    return SUPERBLOCK_COPIES * PAGE_BYTES + copy * roll_bytes(capacity_bytes)


def records_begin(capacity_bytes: int) -> int:
    """Where the first record may be."""
    return roll_offset(capacity_bytes, ROLL_COPIES)


def pack_superblock(superblock: Superblock) -> bytes:
    """Encode a superblock, which is one page."""
    fixed = _SUPERBLOCK.pack(
        _DRIVE_MAGIC,
        FORMAT_VERSION,
        superblock.drive_index,
        superblock.store_uuid,
        superblock.drive_uuid,
        superblock.secret,
        superblock.capacity_bytes,
        superblock.epoch,
        superblock.created_ms,
        superblock.generation_ceiling,
        superblock.roll_generation,
        superblock.roll_copy,
        superblock.roll_crc32c,
        superblock.set_number,
        superblock.set_drives,
    )
    page = fixed + _CRC.pack(crc32c(fixed))
    if superblock.keyring is not None:
        page += _KEYRING.pack(*superblock.keyring, superblock.plain_below)
        page += _CRC.pack(crc32c(page))
    return page.ljust(PAGE_BYTES, b"\0")


def parse_superblock(page: bytes) -> Superblock | Flaw:
    """Read one copy of a superblock."""
    if len(page) < _KEYRING_END:
        return Flaw.SHORT
    magic, version, index, store, drive, secret, *numbers = _SUPERBLOCK.unpack_from(page)
    if magic != _DRIVE_MAGIC:
        return Flaw.MAGIC
    if version != FORMAT_VERSION:
        return Flaw.VERSION
    if _CRC.unpack_from(page, _SUPERBLOCK.size)[0] != crc32c(page[: _SUPERBLOCK.size]):
        return Flaw.CHECK
    superblock = Superblock(store, drive, index, secret, *numbers)
    if any(page[_KEYRING_AT:_KEYRING_END]):
        if _CRC.unpack_from(page, _KEYRING_END - _CRC.size)[0] != crc32c(page[: _KEYRING_END - _CRC.size]):
            return Flaw.CHECK
        key_id, sequence, plain_below = _KEYRING.unpack_from(page, _KEYRING_AT)
        superblock = superblock._replace(keyring=KeyringMark(key_id, sequence), plain_below=plain_below)
    in_range = (
        superblock.capacity_bytes % PAGE_BYTES == 0
        and superblock.generation_ceiling <= GENERATION_MAX + 1
        and superblock.roll_copy < ROLL_COPIES
        and superblock.drive_index < superblock.set_drives <= DRIVES_MAX
    )
    return superblock if in_range else Flaw.RANGE


def foreign_version(page: bytes) -> int | None:
    """The format version of a superblock, if it is not ours; None if this is no superblock at all."""
    magic, version = _MAGIC_VERSION.unpack_from(page)
    return version if magic == _DRIVE_MAGIC and version != FORMAT_VERSION else None


class HeaderCodec:
    """Packs and parses the record headers of one drive."""

    __slots__ = ("_drive_uuid", "_keyed", "_load", "_secret", "cipher")

    def __init__(
        self,
        secret: bytes,
        drive_uuid: bytes,
        cipher: vault.RecordCipher | None = None,
        load: Callable[[vault.KeyName], bool] = lambda _: False,
    ) -> None:
        """With a cipher, encrypted records are opened; `load` puts a key into its vault, or reports it destroyed.

        Corrupt: it was not destroyed, and can't be opened.
        """
        self._secret, self._drive_uuid = secret, drive_uuid
        self.cipher = cipher
        self._load = load
        # The key block and the drive's name are hashed once; each tag starts from a copy of this state.
        self._keyed = blake2b(drive_uuid, key=secret, digest_size=_TAG_BYTES)

    @property
    def magics(self) -> tuple[bytes, ...]:
        """Return the first bytes of the headers that it can read."""
        return (RECORD_MAGIC,) if self.cipher is None else (RECORD_MAGIC, ENCRYPTED_MAGIC)

    def pack(self, records: Iterable[tuple[int, int, int, Header]]) -> None:
        """Write whole header pages, and zeros after payloads.

        For each record: the address of its memory and how many bytes of it are written, none after the header page to
        leave them unchanged; its offset on the drive; its header.
        """
        write_tagged(
            self._secret,
            self._drive_uuid,
            [
                _ROW.pack(
                    address,
                    offset,
                    HEADER_BYTES + length,
                    size_bytes,
                    RECORD_MAGIC,
                    FORMAT_VERSION,
                    kind,
                    length,
                    key,
                    tenant,
                    fingerprint,
                    generation,
                    expires_ms,
                    crc,
                )
                for address, size_bytes, offset, (
                    kind,
                    key,
                    tenant,
                    fingerprint,
                    generation,
                    length,
                    crc,
                    expires_ms,
                    _,
                ) in records
            ],
        )

    def encrypt(self, records: Sequence[tuple[int, int, int, int, vault.KeyName, Header]]) -> None:
        """Encrypt whole records, with zeros after their payloads; KeyError if a key is gone.

        For each: its source and target in memory; its size; its offset on the drive; its key; its header.
        """
        assert self.cipher is not None
        rows = [
            _ENCRYPTED_ROW.pack(
                source,
                target,
                offset,
                name.id,
                name.number,
                size_bytes,
                RECORD_MAGIC,
                FORMAT_VERSION,
                one.kind,
                one.length,
                one.key,
                one.tenant,
                one.fingerprint,
                one.generation,
                one.expires_ms,
                one.crc32c,
            )
            for source, target, size_bytes, offset, name, one in records
        ]
        if self.cipher.encrypt(rows):
            return
        for *_, name, _ in records:  # the vault keeps those that were used lately
            try:
                is_there = self._load(name)
            except Corrupt:
                is_there = False
            if not is_there:
                raise KeyError(name)
        if not self.cipher.encrypt(rows):
            raise KeyError(records[0][4])

    def parse(self, data: bytes, at: int, offset: int) -> Header | Flaw:
        """Read the header at `at` of `data`, which was read from `offset` of the drive."""
        if len(data) - at < HEADER_USED_BYTES:
            return Flaw.SHORT
        if self.cipher is not None and data.startswith(ENCRYPTED_MAGIC, at):
            header, decryption = self.open(vault.address_of(data) + at, offset)
            if decryption is not None:
                decryption.close()
            return header
        return self._parse_plain(data, at, offset)

    def _parse_plain(self, data: bytes, at: int, offset: int) -> Header | Flaw:
        if not data.startswith(RECORD_MAGIC, at):
            return Flaw.MAGIC
        fixed, tag = _HEADER.unpack_from(data, at)
        _, version, kind, length, key, tenant, fingerprint, generation, expires_ms, crc = _FIXED.unpack(fixed)
        if version != FORMAT_VERSION:
            return Flaw.VERSION
        if tag != self._tag(fixed, offset):
            return Flaw.CHECK
        if not BLOCK_BYTES_MIN <= length <= BLOCK_BYTES_MAX or generation > GENERATION_MAX:
            return Flaw.RANGE
        return Header(kind, key, tenant, fingerprint, generation, length, crc, expires_ms)

    def open(self, page: int, offset: int) -> tuple[Header | Flaw, vault.Decryption | None]:
        """Open the header page at this address; also return the decryption of an encrypted payload."""
        if self.cipher is None or ctypes.string_at(page, len(ENCRYPTED_MAGIC)) != ENCRYPTED_MAGIC:
            return self.parse(ctypes.string_at(page, HEADER_USED_BYTES), 0, offset), None
        opened = self.cipher.open(offset, page)
        try:
            if opened is not None and opened[1] is None and self._load(opened[0].key):
                opened = self.cipher.open(offset, page)
        except Corrupt:
            return Flaw.KEY_DAMAGED, None
        if opened is None:
            return Flaw.CHECK, None
        said, decryption = opened
        if decryption is None:
            return Flaw.NO_KEY, None
        _, _, kind, length, key, tenant, fingerprint, generation, expires_ms, crc = _FIXED.unpack(said.fixed)
        if not BLOCK_BYTES_MIN <= length <= BLOCK_BYTES_MAX or generation > GENERATION_MAX:
            decryption.close()
            return Flaw.RANGE, None
        header = Header(
            kind, key, tenant, fingerprint, generation, length, crc, expires_ms, said.key.number + 1
        )
        return header, decryption

    def open_record(self, record: int, size_bytes: int, offset: int) -> Header | Flaw:
        """Open a record of this size at this address, and decrypt its payload in place if it is encrypted."""
        header, decryption = self.open(record, offset)
        if decryption is None or isinstance(header, Flaw):
            return header
        with decryption:
            payload = record + HEADER_BYTES
            is_whole = record_bytes(header.length) <= size_bytes and decryption.step(payload, header.length)
            return header if is_whole and decryption.is_authentic() else Flaw.CHECK

    def put_off(self, page: int, offset: int, expires_ms: int) -> None:
        """Write a later expiry into the header page at this address, which is authentic."""
        is_encrypted = ctypes.string_at(page, len(ENCRYPTED_MAGIC)) == ENCRYPTED_MAGIC
        assert not is_encrypted or self.cipher is not None
        at = _ENCRYPTED_EXPIRES_AT if is_encrypted else _EXPIRES_AT
        ctypes.memmove(page + at, _OFFSET.pack(expires_ms), _OFFSET.size)
        fixed = ctypes.string_at(page, FIXED_BYTES)
        tag_of = self.cipher.tag if self.cipher is not None and is_encrypted else self._tag
        ctypes.memmove(page + FIXED_BYTES, tag_of(fixed, offset), _TAG_BYTES)

    def _tag(self, fixed: bytes, offset: int) -> bytes:
        state = self._keyed.copy()
        state.update(_OFFSET.pack(offset) + fixed)
        return state.digest()
