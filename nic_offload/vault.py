"""Encrypted records, and the keys that they are encrypted with (`vault.c`, `record_encryption.c`).

A `Vault` holds keys of erase domains in locked memory, where lanes and readers find them. `RecordCipher` encrypts and
decrypts whole records of one drive for the application.

What always holds: a header that is given back is authentic for its place on its drive, and so is a payload; memory of a
payload that isn't is zeros. What it doesn't do: keep keys that were not used for long; one that is missing is asked for
(`Decrypted.key`), and put again.
"""

from __future__ import annotations

import errno
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.aead import KEY_BYTES
from nic_offload.errors import FabricError
from nic_offload.handle import Handle
from nic_offload.header_pages import FIXED_BYTES, NAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

__all__ = ["DOMAIN_BYTES", "SALT_BYTES", "Decrypted", "KeyName", "RecordCipher", "Vault", "row_of"]

DOMAIN_BYTES: int = lib.TK_DOMAIN_BYTES
SALT_BYTES: int = lib.TK_SALT_BYTES
_ROW = "=QQQQII"


def row_of(fixed: str) -> struct.Struct:
    """Give what packs a record to encrypt.

    Its fields: source, target, offset, key id, key number, bytes at the target; then the header's, little-endian.
    """
    row = struct.Struct(_ROW + fixed)
    assert row.size == ffi.sizeof("struct tk_to_encrypt")
    return row


class KeyName(NamedTuple):
    """Which key of a domain a record was encrypted with."""

    number: int
    id: int  # random: tells whether the number was given to another since


class Decrypted(NamedTuple):
    """What a header page says; only what is in the clear, unless its key is in the vault."""

    key: KeyName
    fixed: bytes
    is_open: bool


class Vault(Handle):
    """Keys for all drives of a node. Close it after the fabric and the drives."""

    def __init__(self, capacity: int) -> None:
        """So many keys are kept; of more, those not used lately go."""
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


class RecordCipher:
    """Of one opening of a drive."""

    def __init__(self, vault: Vault, secret: bytes, salt: bytes, drive: bytes) -> None:
        """`secret` is the key of headers' tags; `salt` must be new and random."""
        self.vault = vault
        self.setup: Any = ffi.new("struct tk_encryption *")
        self.setup.vault = vault.handle
        ffi.memmove(self.setup.secret, secret, KEY_BYTES)
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

    def decrypt(self, offset: int, address: int, length: int) -> Decrypted | None:
        """Decrypt a payload of this length in place, behind its header page; 0: look at the header alone.

        None: it is no record of this place, or was changed; then the payload's memory is zeros.
        """
        out = ffi.new("struct tk_decrypted *")
        code = lib.tk_decrypt_record(self.setup, offset, ffi.cast("void *", address), length, out)
        if code in {-errno.EBADMSG, -errno.EIO}:
            return None
        if code not in {0, -errno.ENOKEY}:
            raise FabricError.from_code("Decrypting a record", code)
        key = KeyName(out.number, out.id)
        return Decrypted(key, bytes(ffi.buffer(out.fixed, FIXED_BYTES)), not code)
