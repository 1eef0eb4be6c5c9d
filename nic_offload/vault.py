"""Encrypted records, and the keys that encrypt them (`vault.c`, `record_encryption.c`).

A `Vault` holds keys of erase domains in locked memory, where lanes and readers find them. `RecordCipher` encrypts and
decrypts whole records of one drive for the application.

What always holds: a returned header is authentic for its place on its drive, and so is a payload; the memory of a
payload that isn't is zeroed. What it doesn't do: keep keys that have long been unused; a missing key is reported
(`Decrypted.key`), and the application adds it again.
"""

from __future__ import annotations

import errno
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.aead import KEY_BYTES, NONCE_BYTES, NotAuthentic
from nic_offload.aead import TAG_BYTES as GCM_TAG_BYTES
from nic_offload.errors import FabricError
from nic_offload.handle import Handle
from nic_offload.header_pages import FIXED_BYTES, NAME_BYTES, PAGE_BYTES, TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

__all__ = [
    "DOMAIN_BYTES",
    "SALT_BYTES",
    "Decrypted",
    "Decryption",
    "KeyName",
    "RecordCipher",
    "Vault",
    "address_of",
    "row_of",
]

DOMAIN_BYTES: int = lib.TK_DOMAIN_BYTES
SALT_BYTES: int = lib.TK_SALT_BYTES
_ROW = "=QQQQII"


def row_of(fixed: str) -> struct.Struct:
    """The function that packs a record to encrypt.

    Its fields: source, target, offset, key id, key number, bytes at the target; then the header's, little-endian.
    """
    row = struct.Struct(_ROW + fixed)
    assert row.size == ffi.sizeof("struct tk_to_encrypt")
    return row


def address_of(data: bytes) -> int:
    """The address of bytes that the caller keeps alive."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data)))


class KeyName(NamedTuple):
    """The key that a record was encrypted with."""

    number: int
    id: int  # random: shows whether the number has since been given to another key


class Decrypted(NamedTuple):
    """The fields of a header page; only those in the clear, unless its key is in the vault."""

    key: KeyName
    fixed: bytes


class Vault(Handle):
    """Keys for all drives of a node. Close it after the fabric and the drives."""

    def __init__(self, capacity: int) -> None:
        """Keep up to `capacity` keys; beyond that, keys not used lately are evicted."""
        out = ffi.new("struct tk_vault **")
        code = lib.tk_vault_open(capacity, out)
        if code:
            raise FabricError.from_code("Opening a vault", code)
        self.handle: Any = out[0]

    def put(self, owner: bytes, domain: bytes, key: KeyName, secret: Buffer) -> None:
        """Keep a domain's key."""
        assert (len(owner), len(domain)) == (NAME_BYTES, DOMAIN_BYTES)
        view = ffi.from_buffer(secret)
        assert len(view) == KEY_BYTES
        lib.tk_vault_put(self.handle, owner, domain, key.number, key.id, view)

    def drop(self, number: int) -> bool:
        """Forget a key for good; False if it is not here."""
        return not lib.tk_vault_drop(self.handle, number)

    def seal_text(self, key: KeyName, nonce: bytes, associated: bytes, text: bytes) -> bytes | None:
        """Encrypt a short text for a domain, followed by a tag; None if its key is not here."""
        out = ffi.new("char[]", len(text) + GCM_TAG_BYTES)
        row, kept = _text(key, nonce, associated, text, len(text))
        code = lib.tk_seal_text(self.handle, row, out)
        del kept
        return ffi.buffer(out)[:] if _has_key("Sealing a text", code) else None

    def unseal_text(self, key: KeyName, nonce: bytes, associated: bytes, sealed: bytes) -> bytes | None:
        """Decrypt one; None if its key is not here, NotAuthentic if it was changed."""
        size = len(sealed) - GCM_TAG_BYTES
        if size < 0:
            raise NotAuthentic("A sealed text was cut off.")
        out = ffi.new("char[]", max(size, 1))
        row, kept = _text(key, nonce, associated, sealed, size)
        code = lib.tk_unseal_text(self.handle, row, out)
        del kept
        if code == -errno.EBADMSG:
            raise NotAuthentic("A sealed text was changed, or belongs elsewhere.")
        return ffi.buffer(out)[:size] if _has_key("Unsealing a text", code) else None

    def __len__(self) -> int:
        return int(lib.tk_vault_count(self.handle))

    @property
    def is_locked(self) -> bool:
        """Whether the keys can't be swapped."""
        return bool(lib.tk_vault_is_locked(self.handle))

    def close(self) -> None:
        """Wipe all keys."""
        if self.handle is not None:
            lib.tk_vault_close(self.handle)
            self.handle = None


def _text(
    key: KeyName, nonce: bytes, associated: bytes, data: bytes, size: int
) -> tuple[object, tuple[object, object]]:
    assert len(nonce) == NONCE_BYTES
    kept = ffi.from_buffer(associated), ffi.from_buffer(data)
    row = ffi.new("struct tk_text *")
    row.number, row.id, row.bytes, row.associated_bytes = key.number, key.id, size, len(associated)
    row.associated, row.text = (int(ffi.cast("uintptr_t", one)) for one in kept)
    ffi.memmove(row.nonce, nonce, NONCE_BYTES)
    return row, kept


def _has_key(what: str, code: int) -> bool:
    if code not in {0, -errno.ENOKEY}:
        raise FabricError.from_code(what, code)
    return not code


class RecordCipher:
    """The cipher of one opening of a drive."""

    def __init__(self, vault: Vault, secret: Buffer, salt: bytes, drive: bytes) -> None:
        """`secret`, the key of headers' tags, is used in place, not copied; `salt` must be new and random."""
        self.vault = vault
        self._secret = secret  # kept, but not exported: closing the keyring before us must not fail
        self.setup: Any = ffi.new("struct tk_encryption *")
        self.setup.vault = vault.handle
        with ffi.from_buffer("uint8_t[]", secret) as view:
            assert len(view) == KEY_BYTES
            self.setup.secret = ffi.cast("uint8_t *", view)
        ffi.memmove(self.setup.salt, salt, SALT_BYTES)
        ffi.memmove(self.setup.drive, drive, NAME_BYTES)

    def encrypt(self, rows: Sequence[bytes]) -> bool:
        """Encrypt records from and to memory that the caller keeps alive; False if a key is not in the vault."""
        packed = ffi.from_buffer("struct tk_to_encrypt[]", b"".join(rows))
        code = lib.tk_encrypt_records(self.setup, packed, len(rows))
        if code == -errno.ENOKEY:
            return False
        if code:
            raise FabricError.from_code("Encrypting records", code)
        return True

    def tag(self, fixed: bytes, offset: int) -> bytes:
        """The tag of a header at this place."""
        out = ffi.new("uint8_t[]", TAG_BYTES)
        assert len(fixed) == FIXED_BYTES
        lib.tk_tag_header(self.setup, offset, fixed, out)
        return bytes(ffi.buffer(out))

    def open(self, offset: int, page: int) -> tuple[Decrypted, Decryption | None] | None:
        """Open the header page at this address; without its key there is no decryption.

        None: it is not a record of this place, or was changed.
        """
        out, opened = ffi.new("struct tk_decrypted *"), ffi.new("struct tk_decryption **")
        code = lib.tk_decryption_open(self.setup, offset, ffi.cast("void *", page), out, opened)
        if code in {-errno.EBADMSG, -errno.EIO}:
            return None
        if code not in {0, -errno.ENOKEY}:
            raise FabricError.from_code("Decrypting a record", code)
        said = Decrypted(KeyName(out.number, out.id), bytes(ffi.buffer(out.fixed, FIXED_BYTES)))
        return said, None if code else Decryption(opened[0])

    def decrypt(self, offset: int, record: int, length: int) -> Decrypted | None:
        """Decrypt, in place, a record with a payload of this length; if that fails, zero it and return None."""
        opened = self.open(offset, record)
        decryption = None if opened is None else opened[1]
        if opened is None or decryption is None:
            return None
        with decryption:
            is_its = decryption.step(record + PAGE_BYTES, length) and decryption.is_authentic()
        if not is_its:
            lib.tk_wipe(ffi.cast("void *", record + PAGE_BYTES), length)
        return opened[0] if is_its else None


class Decryption(Handle):
    """A payload that is being decrypted in place. Its bytes must not be used before `is_authentic` returns True."""

    def __init__(self, opened: Any) -> None:
        self._handle = opened

    def step(self, address: int, length: int) -> bool:
        """Decrypt the next bytes; False if that failed."""
        return not lib.tk_decryption_step(self._handle, ffi.cast("void *", address), length)

    def is_authentic(self) -> bool:
        """Whether all bytes are the ones written; called once, after the last step."""
        return not lib.tk_decryption_end(self._handle)

    def close(self) -> None:
        """Free it."""
        if self._handle is not None:
            lib.tk_decryption_close(self._handle)
            self._handle = None
